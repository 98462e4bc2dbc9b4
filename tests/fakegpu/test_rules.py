"""The rules of tiles on a GPU that is not there: the tables of tests/parallel/spatial/, by CUDA's contracts."""

import importlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.geometry import GridShape, Split, Tiling
from mpi4dl.parallel.spatial import gather
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.rules import norm_kernels
from mpi4dl.parallel.spatial.sharding import shard
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from tests.fakegpu.device import CUDA, installed
from tests.fakegpu.kernels import KERNELS, Autocast
from tests.parallel.spatial.comparing import Arrangement, compare_table, in_turns
from tests.pool.ranks import Ranks

OF_CASES = (
    *("attention", "contraction", "convolution", "flattening", "gathering", "indexing", "losses", "normalization"),
    *("padding", "pointwise", "pooling", "reductions", "resampling", "views"),
)
TABLES = [
    *(f"test_{name}.CASES" for name in OF_CASES),
    *("test_attention.IN_EVALUATION", "test_convolution.TRANSPOSED", "test_flattening.ROWS"),
    *("test_flattening.REORDERED", "test_indexing.CHOICES", "test_reductions.PREFIXES", "test_reductions.NORMS"),
    "test_resampling.SAMPLES",
]
ARRANGEMENTS = [
    Arrangement(1, 2),
    Arrangement(2, 2, style="wide"),
    Arrangement(4, 1, style="uneven"),
    Arrangement(2, 1, batch=2),
]


REFUSED = {"numpy"}  # by plain PyTorch on a GPU, too


def on_gpu(
    comm: Communicator, table: str, arrangement: Arrangement, patches: Any = (), begin: str = ""
) -> dict[str, str]:
    """What is wrong with the cases of a table whose names begin like this."""
    module, _, name = table.partition(".")
    comm.gpu_wire = "staged"
    with pytest.MonkeyPatch.context() as context:
        for place, value in patches:
            context.setattr(place, value)
        known = getattr(importlib.import_module(f"tests.parallel.spatial.{module}"), name)
        for case in [name for name in known if name in REFUSED or not name.startswith(begin)]:
            context.delitem(known, case)
        return compare_table(
            comm, f"tests.parallel.spatial.{module}", name, arrangement, CUDA, partial(installed, True)
        )


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.exhaustive
def test_rules_on_a_gpu_equal_plain_pytorch(ranks: Ranks, table: str, arrangement: Arrangement) -> None:
    assert ranks(arrangement.num_ranks).run(on_gpu, table, arrangement) == [{}] * arrangement.num_ranks


NORMS, ANY_DEVICE = (
    "test_normalization.CASES",
    ("mpi4dl.parallel.spatial.rules.norm_kernels.CudaKernels.MOST_PIXELS", 0),
)
KERNEL = norm_kernels.backward_of_batch_norm


@pytest.mark.parametrize("patches", [[], [ANY_DEVICE]], ids=["SyncBatchNorm's kernels", "those of any device"])
@pytest.mark.parametrize("arrangement", in_turns(Arrangement(1, 2), Arrangement(3, 1, style="uneven")), ids=str)
def test_norms_are_exact_by_both_sets_of_kernels(ranks: Ranks, arrangement: Arrangement, patches: Any) -> None:
    assert ranks(arrangement.num_ranks).run(on_gpu, NORMS, arrangement, patches) == [{}] * arrangement.num_ranks


def mean_as_saved(gradient: Any, x: Any, weight: Any, mean: torch.Tensor, variance: Any, *rest: Any) -> Any:
    """As it was called once. CUDA's kernel takes what is saved for 1/std, in evaluation mode too; that of CPUs not."""
    return KERNEL(gradient, x, weight, mean, variance, mean, mean, *rest[2:])


def test_the_mean_as_saved_deviation_is_found(ranks: Ranks) -> None:
    patches = [ANY_DEVICE, ("mpi4dl.parallel.spatial.rules.norm_kernels.backward_of_batch_norm", mean_as_saved)]
    (found, *_) = ranks(2).run(on_gpu, NORMS, Arrangement(1, 2), patches, "BatchNorm2d(4")
    assert any("gradient" in text for text in found.values())


def places_of_equals(comm: Communicator, name: str) -> tuple[list[float], list[int]]:
    comm.gpu_wire = "staged"
    with installed():
        image = torch.tensor([[3.0, 1, 2, 1, 1, 3, 2, 1]]).expand(1, 2, 3, 8).clone().to(CUDA)
        x = shard(image, Grid.of(comm, GridShape(1, 1, comm.size)))
        values, places = x.kthvalue(2, 3, True) if name == "kthvalue" else x.median(3, True)
        whole = image.cpu().gather(3, gather(places).cpu())
        assert torch.equal(whole, gather(values).cpu())
        return gather(values).cpu().flatten().tolist(), gather(places).cpu().flatten().tolist()


@pytest.mark.parametrize("name", ["kthvalue", "median"])
def test_of_equal_values_all_ranks_take_the_same_one(ranks: Ranks, name: str) -> None:
    first, *others = ranks(4).run(places_of_equals, name)
    assert all(each == first for each in others)


def sum_under_autocast(comm: Communicator) -> tuple[str, float]:
    comm.gpu_wire = "staged"
    with installed(), pytest.MonkeyPatch.context() as context:
        context.setattr(torch, "is_autocast_enabled", lambda kind="cuda": kind == "cuda")
        x = shard(torch.ones(1, 1, 512, 512, dtype=torch.float16).to(CUDA), Grid.of(comm, GridShape(1, 1, 2)))
        with Autocast():
            total = gather(x.sum())
        return str(total.dtype), float(total.cpu())


def test_sums_over_tiles_are_float32_under_autocast(ranks: Ranks) -> None:
    """As CUDA's autocast has them: 262,144 is more than 16 bits hold."""
    assert ranks(2).run(sum_under_autocast) == [("torch.float32", 512.0**2)] * 2


LENGTHS = {2: [40, 33], 3: [24, 0, 50]}


def ring_on_gpu(comm: Communicator, dtype: torch.dtype, features: int, causal: bool) -> tuple[set[str], list[float]]:
    """The kernels that ran, and how far output and gradients are from attention in float64, over plain PyTorch's."""
    comm.gpu_wire = "staged"
    lengths = LENGTHS[comm.size]
    torch.manual_seed(0)
    whole = [torch.randn(1, 3, sum(lengths), features).to(dtype) for _ in range(3)]
    direction = torch.randn(1, 3, sum(lengths), features).to(dtype)

    def plain(kind: torch.dtype) -> list[torch.Tensor]:
        given = [x.to(kind).requires_grad_() for x in whole]
        y = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
        return [y.detach(), *torch.autograd.grad(y, given, direction.to(kind))]

    exact, alone = plain(torch.float64), plain(dtype)
    ran = set()

    def counted(kernel: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            ran.add(kernel.__name__)
            return kernel(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as context, installed():
        for name, kernel in KERNELS.items():
            if "attention" in name:
                context.setitem(KERNELS, name, counted(kernel))
        grid = Grid(comm, tokens=comm.size)
        grid.attention = "ring"
        cuts = [0, *itertools.accumulate(lengths)]
        layout = Layout(grid, Tiling.even(grid.shape, (1, cuts[-1])).replace(1, Split.at(cuts)), (None, 2))
        mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
        parts = [x[:, :, mine].clone().to(CUDA).requires_grad_() for x in whole]
        y = torch.nn.functional.scaled_dot_product_attention(
            *(SpatialTensor(x, layout) for x in parts), is_causal=causal
        )
        found = torch.autograd.grad(y.local, parts, direction[:, :, mine].clone().to(CUDA))
        ours = [x.detach().cpu() for x in (y.local, *found)]
    worst = []
    for x, reference, single in zip(ours, exact, alone, strict=True):
        error = float((x - reference[:, :, mine]).abs().amax()) if x.numel() else 0.0
        worst.append(error / max(1e-12, float((single - reference).abs().amax())))
    return ran, worst


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "features", "kernel"),
    [
        (torch.bfloat16, 16, "flash"),
        (torch.float16, 12, "flash"),  # filled up to 16
        (torch.float32, 16, "efficient"),
        (torch.float32, 10, "efficient"),
        (torch.bfloat16, 264, "efficient"),
        (torch.float64, 16, None),
    ],
    ids=str,
)
def test_blocks_of_a_ring_go_to_the_kernels_of_cuda(
    ranks: Ranks, dtype: torch.dtype, features: int, kernel: str | None, size: int, causal: bool
) -> None:
    expected = {f"_scaled_dot_product_{kernel}_attention{end}" for end in ("", "_backward")} if kernel else set()
    for rank, (ran, worst) in enumerate(ranks(size).run(ring_on_gpu, dtype, features, causal)):
        assert ran == (expected if LENGTHS[size][rank] else set())
        assert max(worst) < 3
