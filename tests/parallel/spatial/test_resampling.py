"""Interpolation in every mode, pixel shuffle, and sampling at any places, on tiles are those of the whole image."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.geometry import Split
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import resampling
from mpi4dl.parallel.spatial.rules.resampling import Weighing, channels_last, sums_of, transposed, weigh
from tests.parallel.spatial.comparing import (
    ARRANGEMENTS,
    SOME_ARRANGEMENTS,
    Arrangement,
    Case,
    arrange,
    chosen,
    functions,
    modules,
    table_test,
)
from tests.pool.ranks import Ranks, on_ranks

MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")


LARGE = (75, 90)  # above 128 output pixels in all, PyTorch finds the nearest ones in another way


def resize(mode: str, *sizes: tuple[int, int], **options: object) -> dict[str, Case]:
    name = " ".join([mode, *(f"{key}={value}" for key, value in options.items()), *("large" for _ in sizes)])
    function = {name: lambda x: F.interpolate(x, mode=mode, **options)}  # type: ignore[arg-type]
    return functions(function, sizes=sizes) if sizes else functions(function)


CASES: dict[str, Case] = {}
for mode in MODES:
    CASES |= resize(mode, size=(26, 34))
    CASES |= resize(mode, size=(7, 11))
    CASES |= resize(mode, size=3)
    CASES |= resize(mode, size=(40, 5))
    CASES |= resize(mode, scale_factor=2)
    CASES |= resize(mode, scale_factor=(1.7, 0.6))
    CASES |= resize(mode, scale_factor=2.3, recompute_scale_factor=True)
    CASES |= resize(mode, scale_factor=1.5)
    CASES |= resize(mode, scale_factor=(0.5, 3))
    CASES |= resize(mode, scale_factor=(0.75, 1.1))
    if mode != "bicubic":  # PyTorch's gradient of that is not that of what it computed
        CASES |= resize(mode, scale_factor=1.05)
    CASES |= resize(mode, LARGE, size=(55, 88))
    CASES |= resize(mode, LARGE, scale_factor=(1.01, 2.01))
    CASES |= resize(mode, LARGE, scale_factor=(2.25, 0.625))
for mode in ("bilinear", "bicubic"):
    CASES |= resize(mode, size=(26, 34), align_corners=True)
    CASES |= resize(mode, size=(7, 1), align_corners=True)
    CASES |= resize(mode, scale_factor=2, align_corners=True)
    CASES |= resize(mode, scale_factor=0.4, align_corners=True)
    CASES |= resize(mode, size=(13, 20), align_corners=False)
    CASES |= resize(mode, size=(4, 20), antialias=True)
    CASES |= resize(mode, scale_factor=(0.3, 1.5), antialias=True)
    CASES |= resize(mode, size=(5, 5), antialias=True, align_corners=True)
CASES |= modules(
    lambda: nn.Upsample(scale_factor=2),
    lambda: nn.UpsamplingBilinear2d(scale_factor=3),
    lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 4, 3)),
    lambda: nn.PixelShuffle(2),
    lambda: nn.Sequential(nn.Conv2d(4, 18, 3, padding=1), nn.PixelShuffle(3), nn.AvgPool2d(3, 2)),
)
CASES |= modules(lambda: nn.PixelUnshuffle(2), sizes=[(14, 18), (6, 8)])
CASES |= modules(lambda: nn.PixelUnshuffle(3), sizes=[(15, 9)])
for size in ((3, 5), (26, 18), (1, 1)):
    CASES |= resize("area", size=size)

test_resampling_equals_that_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


test_parts_of_few_rows_and_of_none = pytest.mark.exhaustive(
    table_test(__name__, [Arrangement(1, 3, style="empty"), Arrangement(1, 4, style="uneven"), Arrangement(4, 1)])
)


DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
FORMATS = (torch.contiguous_format, torch.channels_last)


def compare_formats(comm: Communicator, arrangement: Arrangement) -> list[str]:
    """What differs in any dtype and memory format: the format too, and any bit where the mode only picks pixels."""
    wrong = []
    for name, case in CASES.items():
        mode = name.split(" ")[0]
        if mode not in (*MODES, "area"):
            continue
        for dtype, memory_format in ((dtype, memory_format) for dtype in DTYPES for memory_format in FORMATS):
            if dtype == torch.bfloat16 and "antialias" in name:
                continue  # which PyTorch does not have
            image = torch.randn(2, 5, *case.shapes[0][-2:], dtype=dtype).contiguous(memory_format=memory_format)
            tiles, leaf = arrange(image, comm, arrangement), image.clone().requires_grad_()
            tile = tiles.local.contiguous(memory_format=memory_format).requires_grad_()
            expected, ours = case.make()(leaf), case.make()(tiles.like(tile))
            gradient = torch.randn_like(expected)
            expected.backward(gradient)
            owned = spatial.retile(ours, ours.layout.narrow.tiling)
            rows, cols = owned.layout.owned[1:]
            owned.local.backward(gradient[:, :, rows.start : rows.stop, cols.start : cols.stop])
            rows, cols = tiles.layout.held[1:]
            pairs = [(spatial.gather(ours), expected)]
            if not tiles.layout.wide:
                pairs.append((tile.grad, leaf.grad[:, :, rows.start : rows.stop, cols.start : cols.stop]))
            tolerances = (0.0 if mode.startswith("nearest") else DTYPES[dtype], DTYPES[dtype])
            for (found, wanted), tolerance in zip(pairs, tolerances, strict=False):
                error = (found - wanted).abs().max() / wanted.abs().max() if wanted.numel() else 0
                if found.dtype != dtype or error > tolerance:
                    wrong.append(f"{name} {dtype} {memory_format}: off by {float(error):.1e}")
            in_format = channels_last(ours.local) == (memory_format == torch.channels_last)
            if ours.shape[-1] > 1 and not in_format:
                wrong.append(f"{name} {dtype}: no longer in {memory_format}")
    return wrong


@pytest.mark.parametrize("style", ["even", "wide"])
@pytest.mark.exhaustive
def test_dtypes_and_memory_formats(ranks: Ranks, style: str) -> None:
    found = ranks(2).run(compare_formats, Arrangement(1, 2, style=style))
    assert not any(found), "\n".join(sorted({text for texts in found for text in texts}))


@on_ranks(2)
def test_ranks_agree_whatever_their_strides(comm: Communicator) -> None:
    """Whose strides fit either memory format: PyTorch finds nearest pixels by another kernel in each."""
    for size, factor in ((100, 1.004), (100, 2.004), (96, 88 / 96)):
        image = torch.randn(1, 4, 1, size, dtype=torch.float64)
        split = Split.at([0, size - 1, size])
        tiles = spatial.shard(image, spatial.Grid(comm, cols=2))
        tiles = spatial.retile(tiles, tiles.layout.tiling.replace(2, split))
        for mode in ("nearest", "nearest-exact"):
            expected = F.interpolate(image, scale_factor=(40.0, factor), mode=mode)
            ours = spatial.gather(F.interpolate(tiles, scale_factor=(40.0, factor), mode=mode))
            assert torch.equal(ours, expected)


def places(x: Tensor, depth: int = 2) -> Tensor:
    """Some beside the image, the same on every rank."""
    return torch.rand(x.shape[0], 7, 11, depth, generator=torch.Generator().manual_seed(3)) * 2.4 - 1.2


def turn(x: Tensor) -> Tensor:
    """An affine map for each image, made of the image."""
    return x.mean((1, 2, 3)).view(-1, 1, 1) * torch.tensor([[0.8, -0.6, 0.1], [0.6, 0.8, 0.2]])


SPREAD_SAMPLES = {
    "grid_sample, everybody's places": lambda x: F.grid_sample(x, places(x), align_corners=False),
    "grid_sample, spread places": lambda x: F.grid_sample(
        x, x[:, :2].tanh().permute(0, 2, 3, 1), mode="bicubic", align_corners=True
    ),
    "grid_sample of a plain image": lambda x: F.grid_sample(
        places(x, 4).permute(0, 3, 1, 2), x[:, :2].permute(0, 2, 3, 1), align_corners=False
    ),
    "grid_sample, nearest, reflected": lambda x: F.grid_sample(x, 2 * places(x), "nearest", "reflection", False),
    "affine_grid": lambda x: F.grid_sample(x, F.affine_grid(turn(x), (3, 4, 6, 7), False), align_corners=False),
}
SAMPLES = functions(SPREAD_SAMPLES)

test_samples_equal_those_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS, "SAMPLES")


Taps = list[list[tuple[int, float]]]
ROWS: Taps = [[(0, 0.5), (3, 2.0)], [(2, -1.0)], [], [(3, 0.25), (3, 0.5), (1, 1.0)]]
COLS: Taps = [[(4, 1.5)], [(0, 1.0), (1, 2.0)]]


def weighing_of(taps: Taps, num_rows: int) -> Weighing:
    like = torch.empty(0, dtype=torch.float64)
    return Weighing(sums_of(taps, True, like), sums_of(transposed(taps, num_rows), True, like))


def matrix(taps: Taps, num_rows: int) -> Tensor:
    found = torch.zeros(len(taps), num_rows, dtype=torch.float64)
    for i, of_sum in enumerate(taps):
        for row, weight in of_sum:
            found[i, row] += weight
    return found


@pytest.mark.parametrize("cached_bytes", [1, 1 << 20])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_sums_and_gradients_are_those_of_matrices(
    monkeypatch: pytest.MonkeyPatch, cached_bytes: int, memory_format: torch.memory_format
) -> None:
    monkeypatch.setattr(resampling, "CACHED_BYTES", cached_bytes)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    y = weigh(x, weighing_of(ROWS, 4), weighing_of(COLS, 5))
    expected = matrix(ROWS, 4) @ x @ matrix(COLS, 5).mT
    torch.testing.assert_close(y, expected)
    gradient = torch.randn_like(expected)
    ours, plain = (torch.autograd.grad(each, x, gradient)[0] for each in (y, expected))
    torch.testing.assert_close(ours, plain)


def test_what_no_sum_reads_does_not_matter() -> None:
    """Not even if it is infinite or not a number, as it would in a product with a matrix."""
    x = torch.tensor([[1.0, 2.0, torch.inf, torch.nan]]).view(1, 1, 4, 1)
    taps: Taps = [[(0, 0.5), (1, 0.5)], [(1, 1.0)]]
    like = torch.empty(0)
    y = weigh(x, Weighing(sums_of(taps, True, like), sums_of(transposed(taps, 4), True, like)), None)
    assert y.flatten().tolist() == [1.5, 2.0]


def test_16_bits_are_not_added_up_in_16_bits() -> None:
    x = torch.tensor([1.0] + [2.0**-8] * 8, dtype=torch.bfloat16).view(1, 1, 9, 1)
    taps: Taps = [[(row, 1.0) for row in range(9)]]
    like = torch.empty(0)
    y = weigh(x, Weighing(sums_of(taps, True, like), sums_of(transposed(taps, 9), True, like)), None)
    assert y.item() == 1.03125
    assert y.dtype == torch.bfloat16
