"""NCCL that is not there: Gloo carries what it would, as strictly as NCCL where that is what programs stumble over.

A group does one thing after the other, in a thread that is its stream: a call starts when all messages of the one
before it have gone and come. Messages have no tags, and go and come in groups alone. On the fake GPU, memory is read
and written on a stream of the group's own. What was asked of all groups is kept as steps, and `stuck` finds out whether
ranks that make them one after the other come to the end, whatever the times of a run happened to be.
"""

import contextlib
import queue
import threading
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm import Communicator, nccl
from tests.fakegpu.device import Event, FakeGpu, Stream, WrongPlace, gpu, installed

GLOO: Any = dist.ProcessGroupGloo


class Step(NamedTuple):
    """One call of a group of `size` by its rank `rank`: (peer, bytes) of what goes and comes, or the bytes it sums."""

    group: str
    rank: int
    size: int
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()
    sums: int = 0


class Mismatch(AssertionError):
    """What one rank sends is not what the other receives."""


def stuck(rows: Sequence[Sequence[Step]]) -> list[Step]:
    """Where ranks that make these steps, each one after the other, wait for each other for ever; empty if nowhere."""
    ahead = [list(row) for row in rows]
    while _goes_on(ahead):
        pass
    return [row[0] for row in ahead if row]


def _goes_on(ahead: list[list[Step]]) -> bool:
    """Let one message pass between the first steps of two ranks, or one sum be made by those of all ranks."""
    first = {(row[0].group, row[0].rank): row for row in ahead if row}
    for (group, _), row in first.items():
        step = row[0]
        members = [first[group, rank] for rank in range(step.size) if (group, rank) in first]
        if step.sums and [member[0].sums for member in members] == [step.sums] * step.size:
            for member in members:
                del member[0]
            return True
        for peer, num_bytes in step.sends:
            other = first.get((group, peer), [step])
            due = [message for message in other[0].receives if message[0] == step.rank]
            if due:
                if due[0][1] != num_bytes:
                    raise Mismatch(f"{num_bytes} bytes go, {due[0][1]} are to come: {step}, {other[0]}")
                _pass(row, "sends", (peer, num_bytes))
                _pass(other, "receives", due[0])
                return True
    return False


def _pass(row: list[Step], way: str, message: tuple[int, int]) -> None:
    open_ones = list(getattr(row[0], way))
    open_ones.remove(message)
    row[0] = row[0]._replace(**{way: tuple(open_ones)})
    if not row[0].sends and not row[0].receives:
        del row[0]


class Work:
    """torch's work: complete when Gloo is done and the GPU would be."""

    def __init__(self, event: Event) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self.event = event

    def is_completed(self) -> bool:
        return self.done.is_set() and self.event.query()

    def wait(self) -> None:
        assert self.done.is_set()
        if self.error is not None:
            raise self.error
        self.event.wait()


class StandIn:
    """What `mpi4dl.comm.nccl` uses of torch's process group."""

    def __init__(self, steps: list[Step], store: dist.Store, rank: int, size: int) -> None:
        options = GLOO._Options()
        options._devices, options._timeout = [GLOO.create_device(interface="lo")], timedelta(seconds=300)
        if rank == 0:
            store.set("name", str(uuid.uuid4()))
        self.name = store.get("name").decode()
        self.rank, self.size, self.steps = rank, size, steps
        self.aborted = False
        self._gloo = GLOO(store, rank, size, options)
        self._stream = Stream()
        self._open: list[tuple[str, Tensor, int]] | None = None
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            work, operations = call
            try:
                for operation in [start() for start in operations]:
                    operation.wait()
            except Exception as error:
                work.error = error
            work.done.set()

    def _start_coalescing(self) -> None:
        assert self._open is None
        self._open = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add("recv", tensors, peer)

    def _add(self, kind: str, tensors: list[Tensor], peer: int) -> None:
        assert self._open is not None, "a message that is in no group"
        assert peer != self.rank
        self._open.append((kind, tensors[0], peer))

    def _end_coalescing(self) -> Work:
        assert self._open
        messages, self._open = self._open, None
        sends, receives = (tuple((p, x.nbytes) for k, x, p in messages if k == kind) for kind in ("send", "recv"))
        self.steps.append(Step(self.name, self.rank, self.size, sends, receives))
        starts = [partial(getattr(self._gloo, kind), [x], peer, 0) for kind, x, peer in messages]
        return self._begin([(x, kind == "recv") for kind, x, _ in messages], starts)

    def allreduce(self, tensors: list[Tensor]) -> Work:
        self.steps.append(Step(self.name, self.rank, self.size, sums=tensors[0].nbytes))
        return self._begin([(tensors[0], True)], [partial(self._gloo.allreduce, tensors)])

    def _begin(self, tensors: list[tuple[Tensor, bool]], starts: list[Any]) -> Work:
        for timeline in (gpu().current, gpu().host):
            self._stream.learn(timeline.snapshot())
        for x, writes in tensors:
            if not gpu().on_device(x):
                raise WrongPlace(f"NCCL is handed memory of the host: {tuple(x.shape)}")
            gpu().touch(self._stream, x, writes, "NCCL")
        work = Work(Event())
        work.event.record(self._stream)
        self._calls.put((work, starts))
        return work

    def abort(self) -> None:
        self.aborted = True
        self._calls.put(None)


@contextlib.contextmanager
def joined(comm: Communicator) -> Iterator[tuple[Communicator, FakeGpu, list[Step]]]:
    """A GPU that is not there, the ranks of `comm` as NCCL joins them, and the steps that this one makes."""
    steps: list[Step] = []
    on_gpus = comm.split(0, comm.rank)
    with installed() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "check", lambda comm: None)
        patch.setattr(nccl, "join", partial(nccl.join, open_group=partial(StandIn, steps)))
        assert on_gpus.choose_gpu_wire("nccl") == ("nccl", "forced")
        assert on_gpus.nccl is not None
        try:
            yield on_gpus, fake, steps
        finally:
            on_gpus.nccl._groups.close()
