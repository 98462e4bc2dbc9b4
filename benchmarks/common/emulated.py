"""Step times of clusters that nobody has here: messages and collectives of ranks carry the time at which they arrive.

    virtual time    rank 0   |== work ==|-+             |==== work ====|
                                           \\ latency + bytes * byte_seconds
                    rank 1   |= work =|.... skipped ....|=== work ===|
    real time       rank 0   |= work =  waits for a core   work =|-+  waits for a core, polls, naps ...

A rank's virtual clock advances by the CPU seconds of its thread, without waits and without time inside MPI. To wait
for a message sets it to the arrival of that message. So 16 ranks on 2 cores have the times of ranks with a core each.

With the `MonotonicClock`, which all processes of a machine share, messages are really late: no rank reports one as
complete before it arrives. That is for emulated nodes, whose network has a bandwidth but no delay.

Each communicator has a twin. For each message, its arrival is sent over the twin with the same tag; each collective has
an all-reduce there, which finds the rank that comes last. `EmulatedComm` has the methods of an MPI communicator that
`Communicator` calls; any other one is an AttributeError, as its messages would take no time.

What is modelled, and what is not:

    sender       has one port for each kind of link, on which messages follow each other, and no overhead of its own
    link         latency and bandwidth by the two ranks; no contention with messages of other senders
    receiver     takes in any number of messages at once
    collective   ends on all ranks when the last one has come and its cost has passed; those of one communicator
                 follow each other
    phases       an algorithm in phases continues when its rank waits or looks. A phase that becomes due while its rank
                 is found to compute starts when it is due, as if a thread drove it
    work         CPU seconds of one thread on a machine that other ranks use too: caches are colder, and as many ranks
                 share the memory as there are cores here, not as there would be there. To measure work undisturbed,
                 bind all ranks to one core. Files, loaders, GPUs and threads of libraries take no virtual time
"""

import math
import time
import weakref
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from statistics import median
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F

from benchmarks.common.ranks import random_batch
from mpi4dl.comm import Communicator
from mpi4dl.comm.node import Node
from mpi4dl.comm.pending import Phases
from mpi4dl.comm.requests import Driven, Request
from mpi4dl.engine import Engine
from mpi4dl.parallel.costs.cost_model import MESSAGE_SECONDS, Link
from mpi4dl.parallel.costs.machine import LinkLevel, Machine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions

INFINITY = math.inf
NAP_SECONDS = 20e-6
KEPT_INTERVALS = 4096


# Networks, and what collectives cost on them.


@dataclass(frozen=True)
class Network:
    """Nodes of `ranks_per_node` neighbouring ranks of the job, joined by the link `between`; without these, one node.

    With `cyclic`, ranks are dealt out over so many nodes instead.
    """

    within: Link
    between: Link | None = None
    ranks_per_node: int | None = None
    cyclic: int | None = None

    @classmethod
    def of(cls, machine: Machine) -> "Network":
        """The network of a machine of one or two kinds of links, each rank with a port of its own."""
        inside, *further = (Link(each.latency_seconds, 1 / each.bytes_per_second) for each in machine.links)
        cyclic = machine.nodes if machine.distribution == "cyclic" else None
        return cls(inside, further[0], machine.ranks_per_node, cyclic) if further else cls(inside)

    def link(self, source: int, to: int) -> Link:
        near = self.between is None or self.node(source) == self.node(to)
        return self.within if near or self.between is None else self.between

    def node(self, rank: int) -> int:
        """The number of the node that this rank is on."""
        if self.cyclic is not None:
            return rank % self.cyclic
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node


def emulated_machine(
    nodes: int, ranks_per_node: int, within: Link, between: Link, distribution: str = "block"
) -> Machine:
    """Nodes of so many ranks as data, between which each rank has a link of its own; a node of one rank has none."""
    sizes = {"node": (within, ranks_per_node), "network": (between, nodes * ranks_per_node)}
    links, inside = [], 1
    for name, (link, ranks) in sizes.items():
        if ranks > inside:
            links.append(LinkLevel(name, link.latency_seconds, 1 / link.byte_seconds, ranks))
            inside = ranks
    return Machine(
        "emulated", nodes, ranks_per_node, tuple(links), message_seconds=MESSAGE_SECONDS, distribution=distribution
    )


class CollectiveCost(NamedTuple):
    """The seconds of a collective: those that the next one on the same communicator overlaps, and those on the link."""

    latency_seconds: float
    transfer_seconds: float


CostOf = Callable[[str, int, int, Link], CollectiveCost]


def collective_cost(call: str, num_ranks: int, num_bytes: int, link: Link) -> CollectiveCost:
    """The cost of a "barrier", "allgather", "allreduce", "reduce" or "bcast" over `link`, the slowest of its ranks.

    `num_bytes` are those of the result. The last three are a tree or a ring, whichever takes less time.
    """
    rounds, others = (num_ranks - 1).bit_length(), num_ranks - 1
    share = others / num_ranks * num_bytes * link.byte_seconds
    if call in ("barrier", "allgather"):
        return CollectiveCost(rounds * link.latency_seconds, share if call == "allgather" else 0.0)
    tree = CollectiveCost(rounds * link.latency_seconds, rounds * num_bytes * link.byte_seconds)
    ring = CollectiveCost(2 * others * link.latency_seconds, 2 * share)
    return min(tree, ring, key=sum)


# Clocks: what time it is on this rank, and when something may be reported as complete.


class MonotonicClock:
    """The clock of the machine, or another function that gives seconds."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self.now = seconds

    def reached(self, seconds: float) -> bool:
        """Whether what is complete at `seconds` may be reported now."""
        return self.now() >= seconds

    def until(self, seconds: float) -> None:
        """Wait for that time."""
        while not self.reached(seconds):
            time.sleep(NAP_SECONDS)

    def pause(self) -> bool:
        """Stop counting work; returns whether it was counted."""
        return False

    def resume(self, counted: bool) -> None:
        pass


class Calendar:
    """The free time of something that does one thing at a time: intervals, in order, whose ends belong to them."""

    def __init__(self, *free: tuple[float, float]) -> None:
        self._free = list(free)

    def open(self, start: float) -> None:
        """It is free from here on."""
        self._free.append((start, INFINITY))
        if len(self._free) > KEPT_INTERVALS:
            del self._free[: KEPT_INTERVALS // 2]

    def close(self, end: float) -> None:
        """It is not free behind `end`."""
        while self._free and self._free[-1][0] > end:
            self._free.pop()
        if self._free:
            start, last = self._free[-1]
            self._free[-1] = start, min(last, end)

    def first(self, seconds: float, otherwise: float = -INFINITY) -> float:
        """The first free moment from `seconds` on; if none is known, this or a later time."""
        at = self._at(seconds)
        return max(seconds, self._free[at][0] if at < len(self._free) else otherwise)

    def take(self, seconds: float, duration: float) -> float:
        """Use the first gap from `seconds` on that is long enough; returns its beginning."""
        for start, end in self._free[self._at(seconds) :]:
            begin = max(start, seconds)
            if end - begin >= duration:
                self.use(begin, begin + duration)
                return begin
        raise ValueError(f"no gap of {duration} s is free from {seconds} s on")

    def use(self, start: float, end: float) -> float:
        """Use what is free of this interval; returns for how long it was not."""
        if end <= start:
            return 0.0
        at, used, left = self._at(start), 0.0, []
        stop = at
        while stop < len(self._free) and self._free[stop][0] < end:
            begin, last = self._free[stop]
            stop += 1
            used += max(0.0, min(last, end) - max(begin, start))
            if begin < start:
                left.append((begin, math.nextafter(min(last, start), -INFINITY)))
            if last > end:
                left.append((end, last))
        self._free[at:stop] = left
        return end - start - used

    def _at(self, seconds: float) -> int:
        """The number of the first interval that ends at `seconds` or later."""
        return bisect_left(self._free, seconds, key=lambda interval: interval[1])


class _Course:
    """One course of events on a rank: that of its program, or of communication in phases that the rank drives.

    It is at `seconds`, plus the work since `since` while it counts. `began`: since when it has worked without a break.
    """

    __slots__ = ("began", "seconds", "since")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.since: float | None = None
        self.began: float | None = None


# Communication in phases has a time of its own: when it is complete says nothing of when the program needs it.
#
#     program    |== work ==|.. waits ..|==== work ====|..... waits .....|
#     phase 1           ----+                 ----+ arrives
#     phase 2               +---- starts, as       +---- starts, as the rank looks in its next wait
#                                 the rank waits
#
# In real time the rank may find out in any later wait that phase 1 is complete. So it remembers when it has waited, and
# phase 2 starts at the first such moment since the arrival. Work of phases, such as sums, uses these gaps up.


class VirtualClock:
    """The CPU seconds of a rank outside of waits, and what it skips in waits. `work()` counts CPU seconds."""

    def __init__(self, work: Callable[[], float] = time.thread_time) -> None:
        self._work = work
        self._program = self._active = _Course(0.0)
        self._program.since = work()
        self._core = Calendar()
        self._waits = 0
        self._skipped_seconds = self._background_seconds = 0.0

    def now(self) -> float:
        course = self._active
        return course.seconds if course.since is None else course.seconds + self._work() - course.since

    def work_seconds(self) -> float:
        """For how long the core of this rank has worked, for its program and for phases while that waited."""
        return self.now() - self._skipped_seconds + self._background_seconds

    def pause(self) -> bool:
        course = self._active
        if course.since is None:
            return False
        course.seconds, course.since = self.now(), None
        return True

    def resume(self, counted: bool) -> None:
        if counted:
            self._active.since = self._work()

    def reached(self, seconds: float) -> bool:
        """In a wait, always: then the wait, or the phase that looks, is there at that time at the earliest."""
        program = self._program
        if not self._waits and seconds > (self.now() if self._active is program else program.seconds):
            return False
        if self._active is not program:
            self._continue(self._active, seconds)
        elif self._waits:
            program.seconds = max(program.seconds, seconds)
        return True

    def until(self, seconds: float) -> None:
        with self.waiting():
            self.reached(seconds)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The program of this rank waits, or a phase."""
        counted, program = self.pause(), self._program
        for_program, began = self._active is program, program.seconds
        if for_program:
            self._core.open(began)
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if for_program:
                program.seconds = self._core.first(program.seconds)
                self._core.close(program.seconds)
                self._skipped_seconds += program.seconds - began
            self.resume(counted)

    def adopt(self, driven: Driven) -> None:
        """Give communication that this rank drives a course of its own."""
        course, of = _Course(self.now()), weakref.ref(driven)
        driven.advance = partial(self._advance, of, course)  # type: ignore[method-assign]
        if isinstance(driven, Phases):
            driven.test = partial(self._test, of, course)  # type: ignore[method-assign]

    def _advance(self, of: "weakref.ref[Any]", course: _Course) -> None:
        driven = of()
        with self._on(course):
            type(driven).advance(driven)

    def _test(self, of: "weakref.ref[Any]", course: _Course) -> bool:
        driven = of()
        with self._on(course):
            complete = type(driven).test(driven)
        return complete and self.reached(course.seconds)

    @contextmanager
    def _on(self, course: _Course) -> Iterator[None]:
        outer, counted = self._active, self.pause()
        self._active = course
        try:
            yield
        finally:
            if outer is not course:
                self.pause()
                self._rest(course)
            self._active = outer
            self.resume(counted)

    def _continue(self, course: _Course, seconds: float) -> None:
        """What this course waited for is complete at `seconds`: it works on as soon as the core has time."""
        now = self.now()
        if course.began is not None and seconds <= now:
            return
        self.pause()
        self._rest(course)
        course.seconds = course.began = self._core.first(max(now, seconds), self._program.seconds)
        course.since = self._work()

    def _rest(self, course: _Course) -> None:
        """The core has done the work of a course up to here; the program is late by what did not fit into its waits."""
        if course.began is None:
            return
        late = self._core.use(course.began, course.seconds)
        self._background_seconds += course.seconds - course.began - late
        self._program.seconds += late
        if self._waits:
            self._skipped_seconds -= late
        course.began = None


class _Underway(list[Driven]):
    """What a rank drives forward, all of which its clock knows."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def append(self, driven: Driven) -> None:
        self._clock.adopt(driven)
        super().append(driven)


class VirtualNode(Node):
    """A rank whose waits take virtual time."""

    clock: VirtualClock

    @classmethod
    def like(cls, node: Node, clock: VirtualClock) -> "VirtualNode":
        made = cls(node.local_rank, node.local_size, node.cores, node.threads, waits=node.waits)
        made.clock, made.underway = clock, _Underway(clock)
        return made

    def wait(self, request: Request, alarm: Callable[[float], None] | None = None) -> None:
        with self.clock.waiting():
            super().wait(request, alarm)

    def work_seconds(self) -> float:
        return self.clock.work_seconds()


Clock = MonotonicClock | VirtualClock


# The communicator, and its requests.


class _Job:
    """What all communicators of this rank share."""

    def __init__(self, comm: MPI.Comm, links: Network, clock: Clock, cost_of: CostOf) -> None:
        self.rank, self.group = comm.rank, comm.Get_group()
        self.links, self.clock, self.cost_of = links, clock, cost_of
        self._ports: dict[Link, Calendar] = defaultdict(lambda: Calendar((-INFINITY, INFINITY)))

    def send(self, to: int, num_bytes: int) -> tuple[float, float]:
        """When a message that is sent now has left the port of this rank, and when it arrives."""
        link, left = self.links.link(self.rank, to), self.clock.now()
        transfer = num_bytes * link.byte_seconds
        if transfer:
            left = self._ports[link].take(left, transfer) + transfer
        return left, left + link.latency_seconds

    def slowest_link(self, members: Sequence[int]) -> Link:
        links = [self.links.link(a, b) for a in members for b in members if a != b] or [Link(0.0, 0.0)]
        return Link(max(link.latency_seconds for link in links), max(link.byte_seconds for link in links))


class _Request:
    """Complete when all its parts are and its time has come."""

    def __init__(self, clock: Clock, parts: list[MPI.Request], seconds: float | None = None) -> None:
        self._clock, self._parts, self.seconds = clock, parts, seconds

    def Test(self) -> bool:
        return self.Testall([self])

    @staticmethod
    def Testall(requests: Sequence["_Request"]) -> bool:
        clock = requests[0]._clock
        counted = clock.pause()
        try:
            if not all([request._arrived() for request in requests]):
                return False
            return clock.reached(max(request.seconds or 0.0 for request in requests))
        finally:
            clock.resume(counted)

    def _arrived(self) -> bool:
        while self._parts and self._parts[-1].Test():
            self._parts.pop()
        return not self._parts


class _Collective(_Request):
    """Its time is known when those of all before it on the same communicator are."""

    def __init__(self, comm: "EmulatedComm", parts: list[MPI.Request], latest: "array[float]", cost: CollectiveCost):
        super().__init__(comm.job.clock, parts)
        self.comm, self.latest, self.cost = comm, latest, cost
        self.stamp = parts[-1]

    def _arrived(self) -> bool:
        return super()._arrived() and self.settled()

    def settled(self) -> bool:
        self.comm.settle()
        return self.seconds is not None


class _Receive:
    """Complete when the message and its stamp are there, and the time on the stamp has come."""

    def __init__(self, comm: "EmulatedComm", request: MPI.Request, source: int, tag: int) -> None:
        self._comm, self._clock, self._request = comm, comm.job.clock, request
        self.source, self._tag = source, tag
        self._stamp = array("d", [0.0])
        self._stamped: MPI.Request | None = None

    def Test(self, status: MPI.Status | None = None) -> bool:
        counted = self._clock.pause()
        try:
            self._comm.expect_stamps(self._tag)
            if self._stamped is None or not self._stamped.Test() or not self._request.Get_status():
                return False
            return self._clock.reached(self._stamp[0]) and self._request.Test(status)
        finally:
            self._clock.resume(counted)

    def knows_source(self) -> bool:
        if self.source == MPI.ANY_SOURCE:
            found = MPI.Status()
            try:
                complete = self._request.Get_status(found)
            except MPI.Exception:  # the message is too long, which `Test` raises too
                complete = True
            if complete:
                self.source = found.source
        return self.source != MPI.ANY_SOURCE

    def expect_stamp(self, twin: MPI.Comm) -> None:
        self._stamped = twin.Irecv([self._stamp, MPI.DOUBLE], self.source, self._tag)


def _uncounted(method: Callable[..., Any]) -> Callable[..., Any]:
    """The time that a rank spends in this method is no work of its own."""

    @wraps(method)
    def called(self: "EmulatedComm", *args: Any, **options: Any) -> Any:
        counted = self.job.clock.pause()
        try:
            return method(self, *args, **options)
        finally:
            self.job.clock.resume(counted)

    return called


class EmulatedComm:
    """A communicator of MPI whose messages and collectives take the time of a network."""

    def __init__(self, comm: MPI.Comm, job: _Job) -> None:
        self.comm, self.twin, self.job = comm, comm.Dup(), job
        self.rank, self.size = comm.rank, comm.size
        group = comm.Get_group()
        self.members = tuple(group.Translate_ranks(None, job.group))
        group.Free()
        self._slowest = job.slowest_link(self.members)
        self._expected: dict[int, deque[_Receive]] = defaultdict(deque)
        self._open: deque[_Collective] = deque()
        self._busy_until = -INFINITY

    @_uncounted
    def Isend(self, message: Any, to: int, tag: int = 0) -> _Request:
        left, arrives = self.job.send(self.members[to], _num_bytes(message))
        stamp = array("d", [arrives])
        parts = [self.comm.Isend(message, to, tag), self.twin.Isend([stamp, MPI.DOUBLE], to, tag)]
        return _Request(self.job.clock, parts, left)

    @_uncounted
    def Irecv(self, message: Any, source: int, tag: int) -> _Receive:
        receive = _Receive(self, self.comm.Irecv(message, source, tag), source, tag)
        self._expected[tag].append(receive)
        self.expect_stamps(tag)
        return receive

    def expect_stamps(self, tag: int) -> None:
        """Receive the stamps of messages in the order in which these match: none behind one of an unknown source."""
        expected = self._expected[tag]
        while expected and expected[0].knows_source():
            expected.popleft().expect_stamp(self.twin)

    @_uncounted
    def Iallreduce(self, own: Any, result: Any, operator: MPI.Op) -> _Request:
        return self._start("allreduce", _num_bytes(result), self.comm.Iallreduce(own, result, operator))

    @_uncounted
    def Ireduce(self, own: Any, result: Any, operator: MPI.Op, root: int) -> _Request:
        num_bytes = _num_bytes(own if result is None else result)
        return self._start("reduce", num_bytes, self.comm.Ireduce(own, result, operator, root))

    @_uncounted
    def Ibcast(self, message: Any, root: int) -> _Request:
        return self._start("bcast", _num_bytes(message), self.comm.Ibcast(message, root))

    @_uncounted
    def Iallgather(self, own: Any, result: Any) -> _Request:
        return self._start("allgather", _num_bytes(result), self.comm.Iallgather(own, result))

    @_uncounted
    def Ibarrier(self) -> _Request:
        return self._start("barrier", 0, self.comm.Ibarrier())

    @_uncounted
    def allgather(self, payload: bytes) -> list[bytes]:
        found: list[bytes] = self.comm.allgather(payload)
        self._finish("allgather", sum(map(len, found)))
        return found

    @_uncounted
    def bcast(self, payload: bytes | None, root: int) -> bytes:
        found: bytes = self.comm.bcast(payload, root)
        self._finish("bcast", len(found))
        return found

    def _start(self, call: str, num_bytes: int, *parts: MPI.Request) -> _Collective:
        own, latest = array("d", [self.job.clock.now()]), array("d", [0.0])
        stamp = self.twin.Iallreduce([own, MPI.DOUBLE], [latest, MPI.DOUBLE], MPI.MAX)
        cost = self.job.cost_of(call, self.size, num_bytes, self._slowest)
        self._open.append(_Collective(self, [*parts, stamp], latest, cost))
        return self._open[-1]

    def _finish(self, call: str, num_bytes: int) -> None:
        """A call that returned has its time."""
        collective = self._start(call, num_bytes)
        while not collective.settled():
            pass
        self.job.clock.until(collective.seconds or 0.0)

    def settle(self) -> None:
        """Find out when collectives end whose last rank is known, in their order."""
        while self._open and self._open[0].stamp.Test():
            collective = self._open.popleft()
            begins = max(collective.latest[0], self._busy_until)
            self._busy_until = begins + collective.cost.transfer_seconds
            collective.seconds = self._busy_until + collective.cost.latency_seconds

    def Get_group(self) -> MPI.Group:
        return self.comm.Get_group()

    def Dup(self) -> "EmulatedComm":
        return self._child(self.comm.Dup)

    def Split(self, color: int, key: int = 0) -> "EmulatedComm":
        return self._child(partial(self.comm.Split, color, key))

    def Split_type(self, kind: int, key: int = 0) -> "EmulatedComm":
        """The ranks of a node of the network, whatever machines there are."""
        if kind != MPI.COMM_TYPE_SHARED:
            raise ValueError(f"an emulated communicator is split by COMM_TYPE_SHARED alone, not by {kind}")
        return self._child(partial(self.comm.Split, self.job.links.node(self.job.rank), key))

    def Create_group(self, group: MPI.Group) -> "EmulatedComm":
        return self._child(partial(self.comm.Create_group, group))

    @_uncounted
    def _child(self, create: Callable[[], MPI.Comm]) -> "EmulatedComm":
        return EmulatedComm(create(), self.job)

    def Free(self) -> None:
        self.twin.Free()
        self.comm.Free()


def _num_bytes(message: Any) -> int:
    """Of what MPI takes as a message: memory, or a list that begins with it."""
    return memoryview(message[0] if isinstance(message, list | tuple) else message).nbytes


@contextmanager
def emulated(
    comm: Communicator, links: Network, clock: Clock | None = None, cost_of: CostOf = collective_cost
) -> Iterator[Communicator]:
    """A communicator of the same ranks, whose messages take the time of a network. Collective.

    Without a clock each rank has a `VirtualClock`. Communicators that are made of this one end with it.
    """
    clock = VirtualClock() if clock is None else clock
    job = _Job(comm.mpi, links, clock, cost_of)
    mpi = EmulatedComm(comm.mpi.Dup(), job)
    objects = mpi.Dup()
    node = VirtualNode.like(comm.node, clock) if isinstance(clock, VirtualClock) else comm.node
    world = Communicator(mpi, node, objects=objects)  # type: ignore[arg-type]
    try:
        yield world
    finally:
        world.pool.free()
        for each in (objects, mpi):
            each.Free()
        job.group.Free()


# Training steps, timed.


class TimedStep(NamedTuple):
    """A step on one rank, from when all began it: its seconds, of which for work, and otherwise waiting."""

    seconds: float
    work_seconds: float


@dataclass(frozen=True)
class TimedSteps:
    """`of_ranks[r][i]` is step i on rank r."""

    of_ranks: tuple[tuple[TimedStep, ...], ...]

    @property
    def seconds(self) -> float:
        """The median over the steps, each of which takes as long as on the slowest rank."""
        return median(max(time.seconds for time in step) for step in zip(*self.of_ranks, strict=True))

    @property
    def fastest(self) -> float:
        """The fastest step, on the slowest rank of it: what else runs on the machine only adds to it."""
        return min(max(time.seconds for time in step) for step in zip(*self.of_ranks, strict=True))

    @property
    def medians(self) -> tuple[TimedStep, ...]:
        """For each rank."""
        return tuple(TimedStep(*map(median, zip(*steps, strict=True))) for steps in self.of_ranks)


def time_steps(
    comm: Communicator, clock: Clock, step: Callable[[], object], num_steps: int, warm_up: int = 1
) -> TimedSteps:
    """Time steps by the clock of `comm`, after some that do not count. All ranks begin each at one time. Collective."""
    times = []
    for number in range(warm_up + num_steps):
        comm.barrier()
        began, worked = clock.now(), comm.node.work_seconds()
        step()
        if number >= warm_up:
            times.append(TimedStep(clock.now() - began, comm.node.work_seconds() - worked))
    return TimedSteps(tuple(comm.all_gather_object(tuple(times))))


def training_step(
    comm: Communicator,
    build: Callable[[], nn.Module],
    plan: Plan,
    batch_size: int,
    size: Sequence[int],
    num_classes: int,
    balance: str | Sequence[int] = "auto",
    stream: StreamOptions | None = None,
    **options: Any,
) -> Callable[[], object]:
    """A step of an engine by a plan, with SGD on random images (N, 3, *size).

    The model is cut by `balance`, and its first stage streamed by `stream`; `options` are those of `Engine`.
    """
    image = (max(1, batch_size // plan.num_microbatches), 3, *size)
    held = split(build, plan, comm, image=image, balance=balance, stream=stream)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.01), F.cross_entropy, comm=comm, **options)
    images, labels = random_batch(batch_size, size, num_classes)
    boxes = [read.box for read in engine.reads(batch_size, tuple(size))]
    tiles = [images[(slice(*box.batch), ..., *(slice(*rows) for rows in box.space))].contiguous() for box in boxes]
    return lambda: engine.step(tiles, labels, tuple(size))
