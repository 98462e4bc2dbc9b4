"""Batch, group, instance and layer norm on tiles use the statistics of the whole image."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, blocks
from mpi4dl.engine import Engine
from mpi4dl.parallel import spatial
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.rules import normalization
from mpi4dl.parallel.spatial.rules.norm_kernels import ANYWHERE, Shares, constants_of, joined
from tests.parallel.spatial.comparing import (
    ARRANGEMENTS,
    Arrangement,
    Case,
    arrange,
    chosen,
    compare_table,
    modules,
    sum_gradients,
    table_test,
)
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import EXACT, assert_close


class ChannelsLast(nn.Module):
    """A module applied to (N, H, W, C), as ConvNeXt does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Twice(nn.Module):
    """Two steps of a norm, so that running statistics are updated from updated ones."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(3 * x.square() + 1)


def randomized(norm: nn.Module) -> nn.Module:
    """With weights, and statistics, that are not what norms begin with."""
    for value in [*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())]:
        value.data.uniform_(0.5, 1.5)
    return norm


def large(norm: Callable[..., nn.Module], *shape: int) -> Callable[[], nn.Module]:
    return lambda: randomized(norm(shape))


def with_one_infinity(image: Tensor) -> Tensor:
    spoilt = image.clone()
    spoilt.view(-1)[7] = float("inf")
    return spoilt


CASES = {
    "batch norm of an infinity": Case(
        lambda: randomized(nn.BatchNorm2d(4, track_running_stats=False)), ((3, 4, 13, 17),), image=with_one_infinity
    ),
    "batch norm of equal pixels": Case(
        lambda: nn.BatchNorm2d(4), ((3, 4, 13, 17),), image=lambda x: torch.full_like(x, 0.5)
    ),
    **modules(
        lambda: Twice(randomized(nn.BatchNorm2d(4))),
        lambda: Twice(nn.BatchNorm2d(4, momentum=None)),
        lambda: Twice(nn.BatchNorm2d(4, momentum=0.3, eps=1e-3, affine=False)),
        lambda: Twice(nn.BatchNorm2d(4, track_running_stats=False)),
        lambda: randomized(nn.BatchNorm2d(4)).eval(),
        lambda: nn.BatchNorm2d(4, affine=False).eval(),
        lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(),
        lambda: nn.SyncBatchNorm(4).eval(),
        lambda: randomized(nn.GroupNorm(2, 4)),
        lambda: nn.GroupNorm(1, 4, affine=False),
        lambda: randomized(nn.GroupNorm(4, 4)),
        lambda: nn.InstanceNorm2d(4),
        lambda: randomized(nn.InstanceNorm2d(4, affine=True)),
        lambda: randomized(nn.InstanceNorm2d(4, track_running_stats=True)).eval(),
        lambda: Twice(randomized(nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=0.3))),
        lambda: nn.LocalResponseNorm(3),
        lambda: ChannelsLast(randomized(nn.LayerNorm(4))),
        lambda: ChannelsLast(nn.LayerNorm(4, elementwise_affine=False)),
        lambda: ChannelsLast(nn.RMSNorm(4)),
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3, 2, 1)),
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
    ),
    **modules(
        *(large(norm, *shape) for norm in (nn.LayerNorm, nn.RMSNorm) for shape in ((4, 13, 17), (13, 17), (17,))),
        lambda: nn.LayerNorm((13, 17), eps=0.3, bias=False),
        lambda: nn.RMSNorm((13, 17), eps=0.3, elementwise_affine=False),
        lambda: ChannelsLast(randomized(nn.RMSNorm((17, 4)))),
        sizes=[(13, 17)],
    ),
}

test_norms_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


# As if more than two ranks were too many for one gather: they merge their moments in blocks, and those of all blocks.


@contextmanager
def in_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MOST_GATHERED", 2)
        patch.setattr(normalization, "FEW", 1)
        yield


def compare_in_blocks(comm: Communicator, arrangement: Arrangement) -> dict[str, str]:
    with in_blocks():
        return compare_table(comm, __name__, "CASES", arrangement)


@pytest.mark.parametrize(
    "arrangement",
    [
        Arrangement(1, 5, turn=0),
        Arrangement(3, 2, turn=1),
        *(
            pytest.param(arrangement, marks=pytest.mark.exhaustive)
            for arrangement in (
                Arrangement(1, 3),
                Arrangement(2, 2, style="wide"),
                Arrangement(5, 1, style="uneven"),
                Arrangement(2, 3),
                Arrangement(1, 3, batch=2),
                Arrangement(7, 1),
                Arrangement(2, 4, style="uneven"),
                Arrangement(4, 2, style="empty"),
            )
        ),
    ],
    ids=str,
)
def test_norms_of_many_ranks(ranks: Ranks, arrangement: Arrangement) -> None:
    assert ranks(arrangement.num_ranks).run(compare_in_blocks, arrangement) == [{}] * arrangement.num_ranks


def trained_in_blocks(comm: Communicator, dtype: torch.dtype) -> tuple[int, bytes, list[float]]:
    """How many parts this rank gathers in a step, the bits of all that a norm knows then, and running statistics."""
    with in_blocks():
        torch.manual_seed(0)
        norm = randomized(nn.BatchNorm2d(4)).to(dtype)
        counted: list[int] = []
        grid = spatial.Grid(comm, rows=comm.size)
        assert grid.comm.blocks is not None
        for each in (grid.comm, grid.comm.blocks.within, grid.comm.blocks.across):
            each.all_gather = partial(count_parts, counted, each.all_gather)  # type: ignore[method-assign]
        image = torch.randn(2, 4, 2 * comm.size + 1, 3, dtype=dtype) * 5 + 100
        y = norm(spatial.shard(image, grid))
        (y.square().sum() / comm.size).backward()
        sum_gradients(norm, grid.comm)
        known = [*norm.buffers(), *(p.grad for p in norm.parameters())]
        bits = b"".join(value.numpy().tobytes() for value in known)
        return sum(counted), bits, norm.running_var.tolist()


def count_parts(counted: list[int], call: Callable[[Tensor], Tensor], mine: Tensor) -> Tensor:
    found = call(mine)
    counted.append(len(found))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_ranks", "num_parts"), [(5, 6), (6, 5), (7, 7), (8, 6)])
def test_many_ranks_gather_few_parts_and_have_the_same_bits(
    ranks: Ranks, num_ranks: int, num_parts: int, dtype: torch.dtype
) -> None:
    found = ranks(num_ranks).run(trained_in_blocks, dtype)
    assert len({bits for _, bits, _ in found}) == 1
    assert max(parts for parts, _, _ in found) == num_parts
    torch.manual_seed(0)
    norm = randomized(nn.BatchNorm2d(4)).to(dtype)
    norm(torch.randn(2, 4, 2 * num_ranks + 1, 3, dtype=dtype) * 5 + 100)
    assert found[0][2] == pytest.approx(norm.running_var.tolist(), rel=1e-12 if dtype == torch.float64 else 1e-5)


class Constants:
    constants = staticmethod(constants_of)


@pytest.mark.parametrize("num_ranks", [9, 67, 130, 2048])
def test_moments_of_blocks_are_those_of_all_numbers(num_ranks: int) -> None:
    """Of ranks of which some have nothing, others much, and each its own mean."""
    generator = torch.Generator().manual_seed(num_ranks)
    counts = [int(n) for n in torch.randint(4, (num_ranks,), generator=generator)]
    own = [
        torch.randn(1, 3, n, generator=generator, dtype=torch.float64) + 1000 * rank for rank, n in enumerate(counts)
    ]
    every = torch.stack([torch.stack(ANYWHERE.told(Constants, x)) for x in own])  # type: ignore[arg-type]
    spans = blocks.BlockPlan.of(num_ranks).spans
    totals = [sum(counts[span.start : span.stop]) for span in spans]
    device = torch.device("cpu")
    of_blocks = [
        joined(every[span.start : span.stop], Shares.of(counts[span.start : span.stop], device), total)
        for span, total in zip(spans, totals, strict=True)
    ]
    mean, squares, rest = joined(torch.stack(of_blocks), Shares.of(totals, device), sum(counts))
    assert not rest.any()
    whole = torch.cat([x.squeeze(0) for x in own], 1)
    assert_close(mean, whole.mean(1), EXACT, "mean")
    assert_close(squares, whole.var(1, correction=0) * whole.shape[1], EXACT, "squares")


@pytest.mark.parametrize("arrangement", [Arrangement(2, 2), Arrangement(4, 1, style="uneven")], ids=str)
@on_ranks(4)
def test_a_mean_of_1000_keeps_its_digits_in_float32(comm: Communicator, arrangement: Arrangement) -> None:
    image = torch.randn(2, 3, 64, 48, generator=torch.Generator().manual_seed(0)) + 1000
    plain = nn.BatchNorm2d(3).double()
    reference = plain(image.double()).detach()
    norm = nn.BatchNorm2d(3)
    y = spatial.gather(norm(arrange(image, comm, arrangement))).detach()
    assert y.dtype is torch.float32
    variance = (norm.running_var.double() - plain.running_var).abs().max()
    mean, error, variance = float(y.double().mean().abs()), float((y.double() - reference).abs().max()), float(variance)
    assert mean < 1e-4
    assert error < 3e-4  # the image itself is rounded to 6e-5
    assert variance < 1e-5


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@on_ranks(2)
def test_statistics_of_many_pixels_keep_their_digits_in_float32(comm: Communicator, memory_format: Any) -> None:
    image = torch.randn(1, 2, 1536, 1536).contiguous(memory_format=memory_format)
    tile, groups = spatial.shard(image, spatial.Grid(comm, cols=2)), partial(F.group_norm, num_groups=2)
    for norm in (partial(F.batch_norm, running_mean=None, running_var=None, training=True), groups):
        ours, plain = spatial.gather(norm(tile)), norm(image.double())
        assert float(((ours - plain).abs() / plain.abs().clamp(min=1)).max()) < 2e-6


@on_ranks(2)
def test_one_value_per_channel_is_refused_as_by_pytorch(comm: Communicator) -> None:
    grid = spatial.Grid(comm, cols=2)
    norm = nn.BatchNorm2d(3)
    one = spatial.shard(torch.randn(1, 3, 1, 2), grid)[..., :1]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(one)


@on_ranks(2)
def test_groups_that_do_not_divide_the_channels_are_refused(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(1, 4, 4, 4), spatial.Grid(comm, cols=2))
    with pytest.raises(ValueError, match=r"`num_channels` \(=4\) must be divisible by `num_groups` \(=3\)"):
        nn.functional.group_norm(x, 3)


class TokensOfOneImage(nn.Module):
    """What PyTorch's batch norm on CPUs has wrong gradients for; `by_formula`: without that kernel."""

    def __init__(self, by_formula: bool = False) -> None:
        super().__init__()
        self.by_formula = by_formula
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def normalized(self, x: Tensor) -> Tensor:
        if not self.by_formula:
            return self.norm(x)  # type: ignore[no-any-return]
        centred = x - x.mean((0, 2, 3), keepdim=True)
        y = centred / (centred.square().mean((0, 2, 3), keepdim=True) + self.norm.eps).sqrt()
        return y * self.norm.weight.view(-1, 1, 1) + self.norm.bias.view(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.normalized(self.conv(x)).flatten(2).transpose(1, 2))).mean(1)


def one_image(by_formula: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return TokensOfOneImage(by_formula).double()


@pytest.mark.parametrize("plan", [Plan(), Plan(((1, 1), (1, 1))), Plan(((1, 2),))], ids=str)
@on_ranks()
def test_gradients_of_one_image_are_right_where_the_kernel_of_cpus_is_not(comm: Communicator, plan: Plan) -> None:
    image, target = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([2])
    if plan.num_stages == 1:
        held = LocalStages.whole(one_image(), plan, comm)
    else:
        held = split(one_image, plan, comm, balance=(2, 5), image=image.shape)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    boxes = [each.box for each in engine.reads(1, (6, 8))]
    tiles = [image[(slice(*box[0]), slice(None), *(slice(*side) for side in box[1:]))] for box in boxes]
    expected = one_image(by_formula=True)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(expected(image), target).backward()
        optimizer.step()
        engine.step(tiles, target, (6, 8))
    state = expected.state_dict()
    for name, value in held.own_state().items():
        if not name.startswith("norm.running") and not name.endswith("tracked"):
            assert_close(value, state[name], EXACT, name)
