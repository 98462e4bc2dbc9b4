"""The fake GPU finds what a real one would suffer from, and the wire on it does nothing of the kind."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpi4dl.checkpoints.json_values import SavedRandomness
from mpi4dl.comm import Communicator, Pending, failure, streams, world
from mpi4dl.comm.allreduce import pick
from mpi4dl.comm.packing import Message, Piece
from mpi4dl.geometry import GridShape
from mpi4dl.models.experts import grouped_linear
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import shard
from mpi4dl.parallel.spatial.tensor import numbers_on
from mpi4dl.torch_backend.work import MpiWork
from tests.fakegpu.clocks import Race
from tests.fakegpu.device import CUDA, Event, Stream, WrongPlace, installed, stream_context
from tests.pool.ranks import Ranks, on_ranks
from tests.support.commands import mpirun


def test_a_kernel_on_another_stream_has_to_wait() -> None:
    with installed():
        x, side = torch.ones(4, device=CUDA), Stream()
        with stream_context(side), pytest.raises(Race, match=r"aten.add.* memory without a wait"):
            x + 1
        event = Event()
        event.record()
        side.wait_event(event)
        with stream_context(side):
            x + 1


def test_a_copy_to_pinned_memory_is_not_there_before_its_event() -> None:
    with installed() as gpu:
        x, host = torch.ones(4, device=CUDA), torch.empty(4, pin_memory=True)
        host.copy_(x, non_blocking=True)
        with pytest.raises(Race, match=r"aten.* on the host"):
            host.sum()
        event = Event()
        event.record()
        assert not event.query()
        assert event.query()
        assert host.sum() == 4
        assert (gpu.counters.to_host, gpu.counters.waits, gpu.counters.blocking) == (1, 1, 0)


def test_what_is_blocking_is_counted_and_a_mix_of_places_refused() -> None:
    with installed() as gpu:
        x = torch.ones(4, device=CUDA)
        assert x.is_cuda
        assert (x * 2).device == CUDA
        assert x.sum().item() == 4
        assert not x.cpu().is_cuda
        assert gpu.counters.blocking == 2
        with pytest.raises(WrongPlace):
            x + torch.ones(4)


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_the_gradient_of_what_was_moved_is_where_the_value_was(tmp_path: Path, where: str) -> None:
    with installed() as gpu:
        x = torch.ones(4, device=CUDA, requires_grad=True)
        Keep(where, tmp_path).moved(x).sum().backward()
        assert x.grad is not None
        assert gpu.on_device(x.grad)


def test_the_generator_of_a_gpu_that_nobody_uses_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def makes_a_context() -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", makes_a_context)
    state = SavedRandomness.now()
    assert state.cuda is None
    state._replace(cuda=state.torch).states("state").put()


def test_matrices_that_begin_between_16_bytes_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's grouped product takes no others, and ZeRO's buckets have such."""
    with installed():
        rows, counts = torch.randn(6, 8, device=CUDA), torch.tensor([2, 4], device=CUDA)
        flat = torch.randn(1 + 2 * 4 * 8, device=CUDA)
        weight = flat[1:].view(2, 4, 8)
        expected = torch.cat([rows[:2] @ weight[0].T, rows[2:] @ weight[1].T])
        monkeypatch.setattr(torch.nn.functional, "grouped_mm", None, raising=False)
        assert torch.allclose(grouped_linear(rows, weight, counts), expected)


def test_lists_of_indices_are_uploaded_once(ranks: Ranks) -> None:
    for first, second in ranks(2).run(uploads_of_two_steps):
        assert first
        assert not second


def uploads_of_two_steps(comm: Communicator) -> list[int]:
    comm.gpu_wire = "direct"
    image = torch.randn(1, 2, 8, 8)
    with installed() as gpu:
        x = shard(image.to(CUDA), Grid.of(comm, GridShape(1, 1, 2)))
        pool = torch.nn.AvgPool2d(3, 1, 1, count_include_pad=False)

        def step() -> None:
            pool(torch.nn.functional.pad(x.roll(3, 3).flip(3), (2, 2, 2, 2), mode="reflect"))

        made = [0]
        upload = torch.tensor

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            made[-1] += torch.device(kwargs.get("device") or "cpu").type == "cuda"
            return upload(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "tensor", counted)
            numbers_on.cache_clear()
            gpu.counters.since(step)
            made.append(0)
            gpu.counters.since(step)
        return made


def test_an_array_of_device_memory_is_refused() -> None:
    with installed(), pytest.raises(TypeError, match="can't convert cuda"):
        torch.ones(4, device=CUDA).numpy()


def move(comm: Communicator, wire: str, step: Callable[[Communicator], Any]) -> tuple[Any, dict[str, int]]:
    comm.gpu_wire = wire
    with installed() as gpu:
        found = step(comm)
        return found, vars(gpu.counters)


def numbers(count: int, rank: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32, device=CUDA) + 100 * rank


def everything(comm: Communicator) -> list[Tensor]:
    """Messages, views, collectives and all-reduces, one after the other and side by side."""
    other = 1 - comm.rank
    x, into = numbers(24, comm.rank).view(4, 6), torch.zeros(4, 6, device=CUDA)
    strip, corner = torch.zeros(4, 2, device=CUDA), torch.zeros(1, 1, device=CUDA)
    swap = comm.iexchange(
        [Piece(other, x[:, :2]), Piece(other, x[3:, 5:])], [Piece(other, strip), Piece(other, corner)], 1
    )
    second = comm.iexchange([Piece(other, x)], [Piece(other, into)], 1)
    x2 = x * 2  # on the caller's stream, meanwhile
    second.wait()
    swap.wait()
    total = comm.all_reduce(x2 + 1)
    low = comm.all_reduce(x.bfloat16())
    most = comm.all_reduce(x.mT.clone(), "max")
    gathered = comm.all_gather(x[:, 1])
    root = comm.broadcast(x.clone() if comm.rank else torch.zeros_like(x), 1)
    letters = [torch.zeros(8, device=CUDA) for _ in range(12)]  # more than there are buffers
    for number in range(12):
        comm.send(numbers(8, comm.rank) + number, other, 2)  # small enough to be on its way at once
    for letter in letters:
        comm.recv(letter, other, 2)
    flat = x.reshape(-1).clone()
    comm.ireduce_scatter(flat).wait()
    summed = [x.reshape(-1).clone() for _ in range(3)]
    waits = [pick(comm, name)(y) for name, y in zip(("direct", "ring", "library"), summed, strict=True)]
    for pending in reversed(waits):
        pending.wait()
    results = [into, strip, corner, total, low.float(), most, gathered, root, *letters, *summed]
    return [y.cpu() for y in (*(y * 1 for y in results), flat[12 * comm.rank :][:12].clone())]


def on_the_host(comm: Communicator) -> list[Tensor]:
    global CUDA
    before, CUDA = CUDA, torch.device("cpu")
    try:
        return everything(comm)
    finally:
        CUDA = before


@pytest.mark.parametrize("wire", ["staged", "direct"])
def test_everything_arrives_and_waits_for_what_it_has_to(ranks: Ranks, wire: str) -> None:
    plain = ranks(2).run(on_the_host)
    for (found, _), expected in zip(ranks(2).run(move, wire, everything), plain, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def without_e0(staging: Any, begun: Any, work: Callable[[], Any]) -> Any:
    return AFTER(staging, Event(), work)


def without_e1(staging: Any, packed: Tensor, begun: Any) -> tuple[Tensor, Any]:
    return TO_HOST(staging, packed, begun)[0], streams.Condition(lambda: True)


def without_e2(staging: Any, host: Tensor, packed: Tensor, begun: Any) -> None:
    staging.give(host, AFTER(staging, begun, lambda: packed.copy_(host, non_blocking=True)))


def given_at_once(staging: Any, buffer: Tensor, event: Any = None) -> None:
    GIVE(staging, buffer)


def begun_already(staging: Any) -> tuple[Any, Any]:
    return BEGIN(staging)[0], streams.Condition(lambda: True)


AFTER, TO_HOST, GIVE, BEGIN = (
    streams.StagingBuffers._after,
    streams.StagingBuffers.to_host,
    streams.StagingBuffers.give,
    streams.StagingBuffers.begin,
)
DEFECTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "C does not wait for S": ("staged", "_after", without_e0),
    "MPI does not wait for the copy": ("staged", "to_host", without_e1),
    "S does not wait for what arrives": ("staged", "to_device", without_e2),
    "a buffer is reused before it was copied": ("staged", "give", given_at_once),
    "MPI does not wait for the kernels": ("direct", "begin", begun_already),
}


def run_with_a_defect(name: str) -> None:
    """The program of a job that is to end with a Race."""
    wire, method, instead = DEFECTS[name]
    setattr(streams.StagingBuffers, method, instead)
    failure.run(lambda: print(move(world(), wire, everything)))


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.sample(2)
def test_no_wait_may_be_left_out(name: str) -> None:
    job = mpirun(2, "-c", f"from tests.fakegpu.test_fake import run_with_a_defect as run; run({name!r})")
    assert job.code != 0
    assert re.search(r"Race: .* (without a wait for|may still use it)", job.stderr), job.stderr


@on_ranks(2)
def test_device_memory_is_not_handed_to_an_mpi_that_cannot_read_it(comm: Communicator) -> None:
    with installed():
        message = Message(1 - comm.rank, (numbers(8, 0),), 32)
        with pytest.raises(WrongPlace, match="not CUDA-aware"):
            comm._post([message], [], 0, None)


def swap(comm: Communicator) -> tuple[Tensor, Pending]:
    """Eight numbers of the other of two ranks, on their way."""
    other, into = 1 - comm.rank, torch.zeros(8, device=CUDA)
    return into, comm.iexchange([Piece(other, numbers(8, comm.rank))], [Piece(other, into)])


@on_ranks(2)
def test_whoever_waits_comes_after_what_arrives(comm: Communicator) -> None:
    """The stream on which somebody waits comes after what arrives, also if it has been delivered on another one."""
    other, side = 1 - comm.rank, Stream()
    with installed():
        into, pending = swap(comm)
        comm.barrier()
        while not pending.test():
            pass
        pending.conclude()
        with stream_context(side):
            pending.wait()
            assert (into + 1).sum() == 36 + 800 * other


@on_ranks(2)
def test_a_work_that_a_later_call_completes_is_waited_for_on_any_stream(comm: Communicator) -> None:
    """As in FSDP2: an operation is found complete by another call, on another stream, than it is waited for on."""
    other, first, second = 1 - comm.rank, Stream(), Stream()
    with installed():
        into, pending = swap(comm)
        work = MpiWork("exchange", comm, pending, [into], timedelta(seconds=60), lambda: None)
        with stream_context(first):
            while not work.poke():
                pass
        with stream_context(second):
            work.wait()
            assert (into + 1).sum() == 36 + 800 * other


def send_from_0_to_1(comm: Communicator) -> float:
    """Nothing that all three ranks would have to take part in is hidden in the first message."""
    with installed():
        x = numbers(4, comm.rank)
        if comm.rank == 0:
            comm.send(x, 1)
        if comm.rank == 1:
            comm.recv(x, 0)
        return x.sum().item()


def test_the_first_message_concerns_two_ranks_alone(ranks: Ranks) -> None:
    assert ranks(3).run(send_from_0_to_1) == [6.0, 6.0, 806.0]


WITHOUT_THREADS = """
import mpi4py, sys, torch
mpi4py.rc.thread_level = sys.argv[1]
torch.cuda.is_available = lambda: True
from mpi4dl.comm import gpu, world
gpu.decide = lambda *_: ("staged", "as asked")
world()
print("threads of autograd:", torch._C._is_multithreading_enabled())
"""


@pytest.mark.parametrize(("level", "expected"), [("single", False), ("funneled", False), ("multiple", True)])
def test_backward_stays_on_its_thread_where_mpi_has_no_others(level: str, expected: bool) -> None:
    job = mpirun(1, "-c", WITHOUT_THREADS, level)
    assert job.stdout.split()[-1] == str(expected), job.stderr


class OnTheHost(torch.autograd.Function):
    """Gives back its gradient from where the values went."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to("cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_gradient_is_on_the_device_of_its_input() -> None:
    with installed():
        x = torch.ones(4, device=CUDA).requires_grad_()
        with pytest.raises(RuntimeError, match=r"OnTheHost.* expected device cuda:0 but got cpu"):
            OnTheHost.apply(x).sum().backward()
        Keep("host").moved(x).sum().backward()
        assert x.grad is not None
        assert x.grad.is_cuda


def test_what_has_no_deterministic_kernel_is_refused_when_that_is_asked_for() -> None:
    with installed():
        x = torch.ones(1, 1, 4, 4, device=CUDA).requires_grad_()
        y = torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear").sum()
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match=r"upsample_bilinear2d_backward.*deterministic"):
                y.backward()
        finally:
            torch.use_deterministic_algorithms(False)
