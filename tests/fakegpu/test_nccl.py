"""What goes by NCCL arrives as it does by MPI, in one order on all ranks, and waits for what it has to."""

import os
import random
import re
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm import Communicator, Refusal, failure, nccl, world
from mpi4dl.comm.allreduce import pick
from mpi4dl.comm.exchange import Exchange, plan_exchange
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.requests import Works
from mpi4dl.geometry import Box, Interval
from tests.fakegpu.device import CUDA, installed
from tests.fakegpu.nccl import Mismatch, Step, joined, stuck
from tests.pool.ranks import Ranks, on_ranks
from tests.support.commands import mpirun, refusal

SIDE = 12


def step(rank: int, *messages: tuple[str, int, int]) -> Step:
    """`messages` are ("to" or "from", peer, bytes) in one group of three ranks."""
    sends, receives = (tuple((p, n) for w, p, n in messages if w == way) for way in ("to", "from"))
    return Step("all", rank, 3, sends, receives)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Rank 0 begins with rank 1, which begins with rank 2, which begins with rank 0; and so on."""
    pairs = [(step(a, ("to", b, 8), ("from", b, 8)), step(b, ("to", a, 8), ("from", a, 8))) for a, b in RING]
    (a01, b01), (b12, c12), (c20, a20) = pairs
    assert stuck([[a01, a20], [b01, b12], [c12, c20]]) == []
    assert stuck([[a01, a20], [b12, b01], [c20, c12]]) == [a01, b12, c20]
    assert stuck([[a01], [], []]) == [a01]
    ring = [[step(a, ("to", b, 8), ("from", (a - 1) % 3, 8))] for a, b in RING]
    assert stuck(ring) == []
    with pytest.raises(Mismatch):
        stuck([[step(0, ("to", 1, 8))], [step(1, ("from", 0, 4))]])
    sums = [[Step(group, rank, 2, sums=4) for rank in (0, 1)] for group in ("one", "two")]
    assert stuck([[sums[0][0], sums[1][0]], [sums[0][1], sums[1][1]]]) == []
    assert len(stuck([[sums[0][0], sums[1][0]], [sums[1][1], sums[0][1]]])) == 2


RING = ((0, 1), (1, 2), (2, 0))


def boxes(random: random.Random, size: int) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """What each of `size` ranks owns of SIDE x SIDE pixels, some of them nothing, and what it needs."""
    cuts = sorted(random.randint(0, SIDE) for _ in range(size - 1))
    rows = [Interval(a, b) for a, b in zip([0, *cuts], [*cuts, SIDE], strict=True)]
    whole = Interval(0, SIDE)
    order = random.sample(range(size), size)
    owned = tuple(Box(Interval(0, 2), rows[i], whole) for i in order)
    needed = []
    for _ in range(size):
        (top, bottom), (left, right) = (sorted(random.sample(range(SIDE + 1), 2)) for _ in range(2))
        needed.append(Box(Interval(0, 2), Interval(top, bottom), Interval(left, right)))
    return owned, tuple(needed)


def exchange_boxes(comm: Communicator, seed: int) -> list[Tensor]:
    """Tensors that are exchanged and come back, parts of them, rows and sums; side by side with messages."""
    shared, results = random.Random(seed), []
    other = comm.size - 1 - comm.rank
    for number in range(3):
        owned, needed = boxes(shared, comm.size)
        whole = Box(Interval(0, 2), Interval(0, SIDE), Interval(0, SIDE))
        plan = plan_exchange(comm.rank, owned, owned, needed, whole)
        exchange = Exchange(plan, comm, (0, 2, 3))
        values = torch.arange(2 * 3 * SIDE * SIDE, dtype=torch.float64, device=CUDA).view(2, 3, SIDE, SIDE) + number
        mine = values[:, :, plan.held.rows.start : plan.held.rows.stop]
        letter, answer = torch.zeros(5, device=CUDA), torch.zeros(5, device=CUDA)
        # Messages between two ranks, in an order that is none: the ends post and wait as they please.
        first = comm.rank < comm.size / 2
        if first:
            pending = [comm.isend(values[0, 0, 0, :5].float(), other, 7), comm.irecv(answer, other, 8)]
        incoming = exchange.start(mine)
        flat = values.reshape(-1).clone()
        swapping = comm.ireduce_scatter(flat)
        if not first:
            pending = [comm.isend(values[0, 0, 1, :5].float(), other, 8), comm.irecv(letter, other, 7)]
        ours = exchange.assemble(mine, incoming)
        back = exchange.adjoint.bring(ours * 2)
        swapping.wait()
        for one in reversed(pending):
            one.wait()
        part = flat.numel() // comm.size
        rows = comm.all_gather(back[0, 0, :0].sum() + values[0, 0, comm.rank, :7])
        sums = [comm.all_reduce(values[0, 1].mT.to(kind) * (comm.rank + 1)) for kind in (torch.float64, torch.bfloat16)]
        results += [ours, back, flat[part * comm.rank :][:part], rows, *(x.double() for x in sums), letter]
    return [x.cpu() for x in results]


def staged_and_by_nccl(comm: Communicator, seed: int) -> tuple[bool, list[Step]]:
    """Whether two halves of the world, and then the world in another order, get the same bits by both wires."""
    with joined(comm) as (gpus, _, steps):
        equal = True
        for group in (gpus.split(gpus.rank % 2), gpus.split(0, -gpus.rank)):
            by_nccl = exchange_boxes(group, seed)
            group.nccl = None
            before = len(steps)
            staged = exchange_boxes(group, seed)
            assert len(steps) == before
            equal = equal and all(torch.equal(a, b) for a, b in zip(by_nccl, staged, strict=True))
        return equal, steps


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(3, 60))])
@pytest.mark.sample(1)
def test_random_boxes_arrive_as_they_do_staged(ranks: Ranks, seed: int) -> None:
    found = ranks(4).run(staged_and_by_nccl, seed)
    assert all(equal for equal, _ in found)
    rows = [steps for _, steps in found]
    assert stuck(rows) == []
    assert min(map(len, rows)) > 12  # of 3 rounds on two communicators, and the connecting
    for rank, row in enumerate(rows):
        assert row[0].sends == row[0].receives == tuple((peer, 1) for peer in range(4) if peer != rank)
    assert stuck([rows[0][:-1], *rows[1:]]) != []


class Summed(NamedTuple):
    """What came of sums, how many copies to the host they made, and by how many groups of all kinds."""

    values: list[Tensor]
    described: str
    steps: list[Step]
    copies: int
    groups: int


def sum_up(comm: Communicator) -> Summed:
    with joined(comm) as (gpus, fake, steps):
        summing = pick(gpus, device=CUDA)
        x = torch.arange(6, dtype=torch.float64, device=CUDA) + 10 * gpus.rank
        low = (torch.arange(8, device=CUDA).float() / 256 + 1).bfloat16()
        strided = (x.view(2, 3) + 1).mT
        count = torch.tensor([gpus.rank + 1], device=CUDA)
        before = fake.counters.to_host
        pending = [summing(y) for y in (x, low, strided)]
        for each in reversed(pending):
            each.wait()
        copies = fake.counters.to_host - before
        summing(count).wait()
        described = summing.describe()
        again = pick(gpus, device=CUDA)  # while the first is in use
        del summing, pending, each
        third = pick(gpus, device=CUDA)  # by the group of the first
        third(again.comm.all_gather(x)).wait()
        assert gpus.nccl is not None
        groups = sum(map(len, gpus.nccl._groups._made.values()))
        return Summed([y.cpu() for y in (x, low.float(), strided, count)], described, steps, copies, groups)


def test_gradients_are_summed_by_a_group_of_their_own(ranks: Ranks) -> None:
    for (x, low, strided, count), described, steps, copies, groups in ranks(3).run(sum_up):
        one = torch.arange(6, dtype=torch.float64)
        assert torch.equal(x, 3 * one + 30)
        assert torch.equal(low, (3 * (torch.arange(8).float() / 256 + 1).bfloat16().float()).bfloat16().float())
        assert torch.equal(strided, (3 * one + 33).view(2, 3).mT)
        assert count.item() == 6  # no float: by MPI
        assert described.startswith("all-reduce over 3 ranks: NCCL, and what is not on GPUs by library")
        summed = [s for s in steps if s.sums]
        assert [s.sums for s in summed] == [48, 32, 48, 144]
        assert summed[0].group == summed[-1].group
        assert groups == 3  # of all, and two for sums, one of which was used again
        assert copies == 0


def run(body: Callable[[Communicator], None]) -> None:
    """The program of a job that is to fail."""
    failure.run(lambda: body(world()))


def without_waits(comm: Communicator) -> None:
    Works.test = Works.join = lambda works: True  # type: ignore[method-assign]
    with joined(comm) as (gpus, _, _steps):
        other, into = 1 - gpus.rank, torch.zeros(4, 2, device=CUDA)
        gpus.iexchange([Piece(other, into[:, :1])], [Piece(other, into[:, 1:])], collective=True).wait()


def test_no_wait_may_be_left_out() -> None:
    job = mpirun(
        2, "-c", f"from tests.fakegpu.test_nccl import *; failure.run(lambda: {without_waits.__name__}(world()))"
    )
    assert job.code != 0
    assert re.search(r"Race: .* without a wait for stream \d+, where NCCL", job.stderr), job.stderr


def fail_while_others_wait(comm: Communicator) -> None:
    """Rank 1 fails ahead of an exchange, in which rank 0 waits for it."""
    with joined(comm) as (gpus, _, _steps):
        if gpus.rank == 1:
            raise ArithmeticError("no luck")
        into = torch.zeros(4, device=CUDA)
        gpus.iexchange([Piece(1, into)], [Piece(1, into + 1)], collective=True).wait()


def test_a_rank_that_fails_ends_the_job() -> None:
    job = mpirun(2, "-c", "from tests.fakegpu.test_nccl import run, fail_while_others_wait as body; run(body)")
    assert job.code == 1
    assert job.stderr.count("Traceback") == 1
    assert "[rank 1 of 2]" in job.stderr
    assert "ArithmeticError: no luck" in job.stderr


@on_ranks(2)
def test_a_group_that_cannot_be_made_is_refused_together(comm: Communicator) -> None:
    def open_group(store: dist.Store, rank: int, size: int) -> Any:
        raise RuntimeError(f"NCCL says no on rank {rank}")

    with installed(), pytest.raises(Refusal, match=r"^NCCL says no on rank 0$"):
        nccl.join(comm, open_group)


@pytest.mark.skipif(dist.is_nccl_available(), reason="there is NCCL")
@pytest.mark.parametrize("command", [("mpi4dl.doctor",), ("mpi4dl.train", "--tiles", "1x2")])
def test_without_nccl_it_is_refused(command: tuple[str, ...]) -> None:
    said = refusal(mpirun(2, "-m", *command, "--gpu-wire", "nccl"))
    reason = f"PyTorch {torch.__version__} was built without NCCL"
    said = said.replace("--gpu-wire", "`gpu_wire`")
    assert said == f"gpu wire is 'nccl', but {reason}: use `gpu_wire` auto, or install one with CUDA"


@on_ranks(3)
def test_ranks_that_share_a_gpu_are_refused(comm: Communicator) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(Refusal, match="gpu wire is 'nccl', but PyTorch sees no GPU here: use `gpu_wire` auto"):
        nccl.check(comm)
    with installed():
        of_rank = [7, 8, 7]
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=of_rank[comm.rank]), raising=False
        )
        with pytest.raises(Refusal, match=r"ranks 0 and 2 share a GPU of .*: start one rank for each GPU, or"):
            nccl.check(comm)
        of_rank[2] = 9
        nccl.check(comm)
    patch.undo()


def test_torchs_group_is_connected_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
            calls.append((rank, size, options._timeout > timedelta(days=1), os.environ[nccl.CONNECTS_LATE]))

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(device)

    monkeypatch.setenv(nccl.CONNECTS_LATE, "")
    monkeypatch.delenv(nccl.CONNECTS_LATE)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert isinstance(nccl.open_group(dist.HashStore(), 2, 4), ProcessGroupNCCL)
    assert calls == [(2, 4, True, "0"), torch.device("cuda", 3)]
