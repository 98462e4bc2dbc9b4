"""Contestants compute the same: exchanges and sums by hand, and training by all of them; others are refused."""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import allreduce, halo, peers, zero
from benchmarks.common.models import SlowWeights, sleeping_model
from benchmarks.common.ranks import burst_seconds, difference, first_losses, gloo, must_agree
from benchmarks.data_parallel import Contests
from benchmarks.peers import ENGINE, GLOO, METHODS, SIDES, Contest, joined, num_stages, plain, reference_of
from benchmarks.tensor_parallel import Ours, build, formula_bytes
from benchmarks.zero import NAMES, PLAIN, VARIANTS, LiveTensors, count_bytes
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.geometry import even_cuts
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.sites import sites_of
from mpi4dl.parallel.costs.units import count_units
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.benchmarks.checks import options_of
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks, on_ranks
from tests.support.commands import refusal


def window(padded: Tensor, rows: int, cols: int, rank: int, halo: int, around: int) -> Tensor:
    """The tile of a rank, with a border of `around`, cut out of the whole image that is padded by `halo`."""
    high, wide = (even_cuts(padded.shape[dim] - 2 * halo, parts) for dim, parts in ((-2, rows), (-1, cols)))
    row, col = divmod(rank, cols)
    low, margin = halo - around, halo + around
    return padded[..., high[row] + low : high[row + 1] + margin, wide[col] + low : wide[col + 1] + margin]


def by_hand_body(comm: Communicator, rows: int, cols: int, halo_px: int) -> None:
    whole = torch.randint(-8, 9, (2, 3, 13, 11), dtype=torch.float64)
    tile = window(F.pad(whole, [halo_px] * 4), rows, cols, comm.rank, halo_px, 0)
    raw = halo.RawExchange(comm.mpi, (rows, cols), tile, halo_px)
    expected = window(F.pad(whole, [halo_px] * 4), rows, cols, comm.rank, halo_px, halo_px)
    assert torch.equal(raw.forward(tile), expected)
    padded = F.pad(tile, [halo_px] * 4)
    raw.swap(padded)
    assert torch.equal(padded, expected)

    # The sum of the gradients of all ranks' padded tiles, computed by autograd on the whole image.
    leaf = whole.clone().requires_grad_()
    windows = [window(F.pad(leaf, [halo_px] * 4), rows, cols, rank, halo_px, halo_px) for rank in range(comm.size)]
    gradients = [torch.randint(-8, 9, each.shape).double() for each in windows]
    torch.autograd.backward(windows, gradients)
    assert leaf.grad is not None
    home = window(F.pad(leaf.grad, [halo_px] * 4), rows, cols, comm.rank, halo_px, 0)
    assert torch.equal(raw.adjoint(gradients[comm.rank]), home)


@pytest.mark.parametrize(("rows", "cols", "halo_px"), [(1, 2, 1), (2, 1, 3), (2, 2, 2), (3, 2, 1), (2, 4, 2)])
@pytest.mark.sample(1)
def test_the_exchange_by_hand_is_that_of_the_whole_image(ranks: Ranks, rows: int, cols: int, halo_px: int) -> None:
    ranks(rows * cols).run(by_hand_body, rows, cols, halo_px)


class Stale(halo.RawExchange):
    """Rank 1 forgets a corner."""

    def forward(self, tile: Tensor) -> Tensor:
        padded = super().forward(tile)
        if self.mpi.rank == 1:
            padded[..., -2, 0] += 1
        return padded


class Lossy(halo.RawExchange):
    """Rank 0 forgets what its neighbours add to its gradients."""

    def adjoint(self, gradient: Tensor) -> Tensor:
        result = super().adjoint(gradient)
        return self.tile_of(gradient).clone() if self.mpi.rank == 0 else result


def wrong_exchange(comm: Communicator, kind: type[halo.RawExchange]) -> None:
    options = options_of("halo", "--grids 1x2 --sizes 16 --channels 2")
    with mock.patch.object(halo, "RawExchange", kind):
        halo.contests(options, 16, spatial.Grid(comm, 1, 2))


def stale(comm: Communicator) -> None:
    wrong_exchange(comm, Stale)


def lossy(comm: Communicator) -> None:
    wrong_exchange(comm, Lossy)


def wrong_sum(comm: Communicator) -> None:
    """Gloo is replaced by a sum that is wrong on rank 1."""

    def wrong(flat: torch.Tensor) -> None:
        comm.all_reduce(flat).mul_(2 if comm.rank == 1 else 1)

    with mock.patch("torch.distributed.all_reduce", wrong):
        allreduce.contests(comm)


def alone(comm: Communicator) -> None:
    """The sum of gradients per rank is left out: each rank trains on its own."""

    def without(self: Contests) -> Any:
        return self.loop(self.model(), self.own)

    with gloo(comm), mock.patch.object(Contests, "ours_per_rank", without):
        Contests(options_of("data_parallel", "--quick"), comm, torch.float64).check()


def far(comm: Communicator) -> None:
    must_agree(comm, "close", [1.0, 2.00001], [1.0, 2.0], 1e-4)
    must_agree(comm, "far", [1.0, 2.1 if comm.rank else 2.0, 9.0], [1.0, 2.0, 3.0], 1e-4)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (stale, "padded tensor"),
        (lossy, "gradient of the tile"),
        (wrong_sum, "gloo"),
        (alone, "ours, norm per rank: the loss of step 1"),
        (far, "far: the loss of step 2 is 9.000000 instead of 3.000000"),
    ],
)
@pytest.mark.sample(3)
@on_ranks(2)
def test_nothing_is_measured_where_a_contestant_differs(
    comm: Communicator, wrong: Callable[[Communicator], None], what: str
) -> None:
    with pytest.raises(Refusal) as caught:
        wrong(comm)
    said = str(caught.value)
    assert comm.all_gather_object(said) == [said] * 2
    assert what in said
    assert "nothing was measured" in said


def test_losses_are_compared_as_far_as_there_are_any() -> None:
    assert difference([1.0, 2.0], [1.0, 2.0 + 1e-5, 3.0], 1e-4) is None
    assert difference([1.0, 2.0], [1.0, 2.01], 1e-4) == "the loss of step 1 is 2.000000 instead of 2.010000"
    assert difference([float("nan")], [1.0], 1e-4) is not None


@on_ranks(2)
def test_a_burst_is_as_long_as_on_the_slowest_rank(comm: Communicator) -> None:
    calls = []

    def step() -> float:
        calls.append(1)
        time.sleep(0.05 * comm.rank)
        return 0.0

    seconds, calls = burst_seconds(comm, step, 3, torch.device("cpu")), len(calls)
    assert seconds >= 0.05
    assert calls == 4


REFUSED = """
from benchmarks.common.ranks import gloo
from mpi4dl.comm import world

with gloo(world()):
    world().agree("nothing was measured")
"""


def test_a_refusal_is_printed_while_gloo_is_there() -> None:
    assert refusal(mpirun(2, "-c", REFUSED)) == "nothing was measured"


def test_a_layer_sleeps_forward_and_for_either_gradient() -> None:
    model = sleeping_model(num_layers=2, seconds=0.05, num_classes=2)
    began = time.perf_counter()
    loss = model(torch.zeros(1, 3, 4, 4)).sum()
    middle = time.perf_counter()
    with SlowWeights(0.1):
        loss.backward()
    assert middle - began > 0.1
    assert time.perf_counter() - middle > 0.3


EVERYONE = [Contest(method, side) for method in METHODS for side in SIDES]
FEW = {
    "amoebanetd": [Contest("1f1b", GLOO), Contest("zero-bubble", ENGINE)],
    "transformer": [Contest("interleaved", ENGINE), Contest("DDP", GLOO), Contest("DDP", ENGINE)],
}
TASKS = [peers.Task(name, sizes, 32, 8, 4) for name, sizes in peers.QUICK_SIZES.items()]


def peers_body(comm: Communicator, task: peers.Task, chosen: list[Contest]) -> dict[Contest, list[float]]:
    """The losses of the contestants' steps on all ranks together."""
    found = {}
    for contest in chosen:
        stages = num_stages(contest, comm.size)
        counts = task.counts(stages) if stages > 1 else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.distributed, about AmoebaNet's views
            with joined(task, contest, counts, comm) as step:
                found[contest] = [loss * comm.size for loss in first_losses(comm, step, 2)]
    return found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)
@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)]
)  # 4: all contestants; our backend wants all ranks of the pool
@pytest.mark.sample(1)
def test_peers_train_as_plain_pytorch_does(ranks: Ranks, task: peers.Task, num_ranks: int) -> None:
    chosen = FEW[task.model] if num_ranks == 2 else EVERYONE
    for contest, losses in ranks(num_ranks).run(peers_body, task, chosen)[0].items():
        number = reference_of(contest, num_ranks, task.num_microbatches)
        step = plain(replace(task, num_microbatches=number))
        assert losses == pytest.approx([step(), step()], rel=1e-5), contest


def variants_body(comm: Communicator) -> dict[str, list[float]]:
    with gloo(comm):
        task = zero.task_of(16, 2, 32, 2 * comm.size)
        return {name: first_losses(comm, VARIANTS[name].make(task, comm).step, 3) for name in (PLAIN, *NAMES)}


def test_all_variants_of_zero_train_as_plain_pytorch_does(ranks: Ranks) -> None:
    found = ranks(2).run(variants_body)[0]
    expected = found[PLAIN]
    assert expected[2] < expected[1] < expected[0]
    assert found == {name: pytest.approx(expected, rel=1e-5) for name in (PLAIN, *NAMES)}


def test_every_variant_has_the_formula_of_its_paper() -> None:
    task = zero.task_of(16, 2, 32, 4)
    assert zero.num_parameters(task) == sum(p.numel() for p in task.layers().parameters())
    assert {name: VARIANTS[name].formula(4) for name in (PLAIN, *NAMES)} == {
        PLAIN: 16, "ZeRO-0": 16, "DDP": 16, "ZeRO-1": 10, "ZeroRedundancyOptimizer": 10, "ZeRO-2": 7, "FSDP2-kept": 4,
        "ZeRO-3": 4, "FSDP2": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["ZeRO-2", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ZeRO-0", "FSDP2"))]
)
@on_ranks(2)
def test_memory_is_that_of_the_formula(comm: Communicator, name: str) -> None:
    task = zero.task_of(64, 2, 16, comm.size)
    with gloo(comm):
        VARIANTS[name].make(task, comm).step()
        live = LiveTensors()
        made = VARIANTS[name].make(task, comm)
        made.step()
        found = max(count_bytes(made, live)) / zero.num_parameters(task)
    assert found == pytest.approx(VARIANTS[name].formula(2), rel=0.03)


def summed_body(comm: Communicator, sequence: bool) -> int:
    return Ours(options_of("tensor_parallel", "--quick"), comm, sequence).count()


@pytest.mark.parametrize("sequence", [False, True])
def test_the_bytes_that_ranks_add_up_are_those_of_the_formula_and_of_the_planner(ranks: Ranks, sequence: bool) -> None:
    options, plan = options_of("tensor_parallel", "--quick"), Plan(((1,),), tensor=2, sequence=sequence)
    cuttable = Cuttable(outline(lambda: build(options)))
    (site,) = sites_of(cuttable, plan, (options.batch_size, options.context))
    planned = sum(unit.summed_bytes for unit in count_units(cuttable, site))
    assert ranks(2).run(summed_body, sequence) == [formula_bytes(options, 2)] * 2 == [planned] * 2
