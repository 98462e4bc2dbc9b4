"""Within `gathering`, what has no rule is computed whole: exactly, named once, cut again; or refused as ever."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.geometry import GridShape
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.meter import SavedTensors
from mpi4dl.parallel.spatial.dry_run_grid import dry_run_grid
from mpi4dl.parallel.spatial.sharding import even_layout
from tests.parallel.spatial.comparing import (
    SOME_ARRANGEMENTS,
    Arrangement,
    Case,
    Function,
    arrange,
    compare_models,
    table_test,
)
from tests.pool.ranks import Ranks, on_ranks


def gathered(function: Function) -> Callable[[], Function]:
    """The function within `gathering`, whose warnings are for another test."""

    def within(x: Tensor) -> Any:
        torch.manual_seed(7)
        with spatial.gathering(), warnings.catch_warnings():
            warnings.simplefilter("ignore", spatial.GatheredWarning)
            return function(x)

    return lambda: within


def fill_where_positive(x: Tensor) -> Tensor:
    y = x * 1
    y[y > 0] = 0.5
    return y


def sort_rows_of_channels(x: Tensor) -> Tensor:
    """In place, into a view of channels."""
    y = x * 1
    y[:, 1:3].index_fill_(2, torch.tensor([0, 3]), 2.0)
    return y * x


SHAPES = ((3, 4, 13, 17), (3, 4, 5, 9))
SPREAD: dict[str, Function] = {
    "Fourier": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 0.5j).real,
    "sort rows": lambda x: x.sort(2),
    "median of rows": lambda x: x - x.median(2, keepdim=True).values,
    "a mask": fill_where_positive,
    "in place": sort_rows_of_channels,
    "a plain tensor in place": lambda x: torch.zeros(x.shape).index_add_(2, torch.arange(x.shape[2]).flip(0), x) * x,
    "fractional pooling, and back": lambda x: F.interpolate(F.fractional_max_pool2d(x, 2, (3, 3)), x.shape[2:]) * x,
    "two spread operands": lambda x: torch.cdist(x, x.flip(1)) @ x,
}
WHOLE: dict[str, Function] = {
    "chosen pixels": lambda x: x[x > 0],
    "singular values": lambda x: torch.linalg.svdvals(x[:, :, :3, :4]),
    "half a spectrum": lambda x: torch.fft.rfft2(x).abs(),
    "a number": lambda x: x.sum() * x.detach().median().item(),
    "numpy": lambda x: x.sum() * float(np.asarray(x.detach()).mean()),
    "unique": lambda x: (x.sum(), x.detach().round().unique(return_counts=True)),
}
CASES = {
    **{name: Case(gathered(function), SHAPES) for name, function in SPREAD.items()},
    **{name: Case(gathered(function), SHAPES, spread=False) for name, function in WHOLE.items()},
}

test_what_is_gathered_equals_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS)


class Spectral(nn.Module):
    """A layer without a rule, with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x * self.scale).abs()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(Spectral(), nn.BatchNorm2d(4)), Spectral(), nn.Conv2d(4, 2, 3)
    )


def train_gathering(comm: Communicator) -> list[str]:
    """What differs from the plain network, and the warnings of this rank."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    model, plain = network(), network()
    plain.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, 12, 9)
    tiles = arrange(image, comm, Arrangement(comm.size, 1))
    with spatial.gathering(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            y = model(tiles)
    assert isinstance(y, spatial.SpatialTensor)
    (y.square().sum() / comm.size).backward()
    for _ in range(2):
        expected = plain(image)
    expected.square().sum().backward()
    wrong = compare_models(comm, model, plain)
    assert not wrong, wrong
    return [str(warning.message) for warning in caught]


def test_each_module_and_operator_is_named_once_with_its_bytes(ranks: Ranks) -> None:
    first, *others = ranks(3).run(train_gathering)
    assert others == [[], []]
    assert len(first) == 2
    assert "torch.fft" in first[0] or "fft_fft2" in first[0]
    assert "in module 1.0 (Spectral)" in first[0]
    assert "in module 2 (Spectral)" in first[1]
    assert f"{2 * 4 * 12 * 9 * 8:,} bytes" in first[0]
    assert "cut again" in first[0]


@on_ranks(2)
def test_what_a_copy_cannot_do_is_refused_on_all_ranks(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(2, 4, 8, 8), spatial.Grid(comm, rows=2))
    refused = {
        "data_ptr": lambda: x.data_ptr(),
        "stride": lambda: x.stride(),
        "untyped_storage": lambda: x.untyped_storage(),
        "in place to a copy": lambda: x.unfold(2, 3, 1).index_fill_(1, torch.tensor([0]), 1.0),
        "shape": lambda: x.unsqueeze_(0),
        "out=": lambda: torch.add(x, x, out=x),
    }
    with spatial.gathering(), warnings.catch_warnings():
        warnings.simplefilter("ignore", spatial.GatheredWarning)
        for name, function in refused.items():
            with pytest.raises(spatial.NoRule, match=name):
                function()
        values = x.numpy()
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1
        torch.manual_seed(comm.rank)
        with pytest.raises(spatial.NoRule, match="seed them alike") as caught:
            F.fractional_max_pool2d(x, 2, (3, 3))
    with pytest.raises(spatial.NoRule):
        F.fractional_max_pool2d(x, 2, (3, 3))
    comm.agree(None, message=str(caught.value))


@on_ranks(2)
def test_a_spread_tensor_is_copied_into_a_plain_one_and_spread_again(comm: Communicator) -> None:
    """As detectors batch images of several sizes; then spread again."""
    grid = spatial.Grid(comm, rows=2)
    torch.set_default_dtype(torch.float64)
    images = [torch.randn(3, 8, 7, requires_grad=True), torch.randn(3, 6, 9, requires_grad=True)]
    weight = torch.randn(2, 3, 8, 9)

    def batch(parts: list[Tensor]) -> Tensor:
        batched = parts[0].new_full((2, 3, 8, 9), 0.5)
        for i, image in enumerate(parts):
            batched[i, :2, : image.shape[1], : image.shape[2]].copy_(image[:2])
            batched[i, 2, : image.shape[1], : image.shape[2]] = image[2]
        return batched

    whole = batch([spatial.shard(image, grid) for image in images])
    assert torch.equal(whole, batch(images))
    spread = spatial.shard_like(whole, spatial.shard(torch.zeros(2, 1, 8, 9), grid))
    assert isinstance(spread, spatial.SpatialTensor)
    assert torch.equal(spatial.gather(spread), whole)
    ((spread * spread * weight).sum() / comm.size).backward()
    ours = [comm.all_reduce(image.grad) for image in images]
    for image in images:
        image.grad = None
    (batch(images).square() * weight).sum().backward()
    for mine, image in zip(ours, images, strict=True):
        assert torch.allclose(mine, image.grad, rtol=1e-12)
    with pytest.raises(ValueError, match="same number of dims"):
        spatial.shard_like(whole, spatial.shard(torch.zeros(2, 1, 9, 9), grid))


class Pool(nn.Module):
    """Attention over the patches of an image; `ordered`: by their places in the order of each feature."""

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.ordered = ordered
        self.encoder, self.score = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.encoder(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 16)
        if self.ordered:
            patches = torch.sort(patches, 1).values
        weights = self.score(torch.tanh(patches)).softmax(1)
        return (weights * patches).sum(1)  # type: ignore[no-any-return]


def kept_of_plain(model: nn.Module, side: int) -> float:
    """The share of what plain PyTorch keeps for backward that a rank of 2x2 keeps."""
    shape, grid = (1, 3, side, side), dry_run_grid(GridShape(1, 2, 2), 0)
    layout = even_layout(grid, shape)
    tile = spatial.SpatialTensor(torch.empty(layout.local_shape(shape), device="meta"), layout)
    kept = []
    for image in (tile, torch.empty(shape, device="meta")):
        saved = SavedTensors(model.parameters())
        with saved.counting():
            model(image)
        kept.append(saved.num_bytes)
    return kept[0] / kept[1]


def test_attention_over_patches_stays_spread() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_of_plain(Pool(ordered=False).to("meta"), 1024) < 0.3


def test_much_that_is_gathered_is_told_once_for_each_line() -> None:
    model = Pool(ordered=True).to("meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        kept_of_plain(model, 64)
        assert not caught
        for _ in range(2):
            kept_of_plain(model, 1024)
    (told,) = [each for each in caught if "torch.sort" in str(each.message)]
    assert issubclass(told.category, spatial.GatheredWarning)
    assert Path(told.filename) == Path(__file__)
    assert "Pool" in str(told.message)
    assert f"{3 * 4 * 16 * 1024**2 // 4:,} more bytes" in str(told.message)
