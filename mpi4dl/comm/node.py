"""The cores and GPUs that the ranks of one machine share, and how a rank waits for others.

A wait begins by spinning, which is fastest for messages within microseconds. The longer it takes, the more it cedes its
core: other ranks, another job or another program may need it.

    0            SPIN_SECONDS                 YIELD_SECONDS
    |--- looks ---|--- looks, yields its core ---|--- looks, naps of a share of the time waited so far --->

With more ranks than cores there is no spinning, and longer naps come after LOOKS_OVERSUBSCRIBED. They do not come at
once: a rank that wakes up, by a timer or by another rank, takes the core and the caches of one that computes. So with
earlier naps, or with ranks that wake each other, waits cost less, but work costs more and steps take longer.
"""

import os
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpi4dl._files import control_groups
from mpi4dl.comm.requests import Driven, Request, Waits
from mpi4dl.comm.watchdog import watchdog_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

SPIN_SECONDS = 50e-6
YIELD_SECONDS = 1e-3
LOOKS_BETWEEN_CLOCKS = 8
LOOKS_OVERSUBSCRIBED = 100
SHORTEST_NAP_SECONDS, LONG_NAP_SECONDS, LONGEST_NAP_SECONDS = 50e-6, 5e-3, 20e-3
NAP_SHARE, NAP_SHARE_OVERSUBSCRIBED = 1 / 200, 1 / 20
ALARM_SECONDS = 0.02


@dataclass
class Node:
    """This rank's place on its machine, as MPI reports it: never read from a launcher's environment.

    `wait_seconds` counts the time that this rank has spent waiting for others, in all communicators; `waits` marks when
    it does. `underway` is the communication that this rank has to drive forward while it waits for anything. `probe`
    makes MPI look after its messages, where some ranks are on other nodes.
    """

    local_rank: int
    local_size: int
    cores: int
    threads: int
    wait_seconds: float = 0.0
    _waited: threading.local = field(default_factory=threading.local)  # `cpu`: seconds of work at waiting
    waits: Waits = field(default_factory=Waits)
    underway: list[Driven] = field(default_factory=list)
    probe: "Callable[[], Any] | None" = None
    chose_threads: bool = False  # nobody said how many threads: the share of the cores was taken

    @classmethod
    def of(cls, comm: "MPI.Comm") -> "Node":
        from mpi4py import MPI

        local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        mine = os.sched_getaffinity(0)
        allowed, quotas = zip(*local.allgather((mine, quota())), strict=True)
        cores = max(1, int(min(len(set().union(*allowed)), *quotas)))
        node = cls(local.rank, local.size, cores, max(1, min(len(mine), cores // local.size)))
        node.probe = comm.Iprobe if local.size < comm.size else None
        local.Free()
        return node

    @cached_property
    def oversubscribed(self) -> bool:
        return self.local_size > self.cores

    def share_cores(self, asked: int | None = None, spare: int = 0) -> None:
        """Compute with as many threads as are `asked` for, or OMP_NUM_THREADS says, or else this rank's share of cores.

        PyTorch's default is all cores for each rank. `spare`: how many of the share are left to others.
        """
        asked = asked or asked_threads()
        self.chose_threads = asked is None
        torch.set_num_threads(asked or max(1, self.threads - spare))

    def device(self, kind: str = "auto") -> torch.device:
        """The device of this rank. Where there are more ranks than GPUs, they share them in turn.

        `kind` is "auto" (a GPU where there is one), "cpu" or "cuda".
        """
        if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU here: use `device` cpu")
        device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        watchdog_thread().device = partial(torch.cuda.set_device, device)  # of its thread, which calls MPI, too
        return device

    def wait(self, request: Request, alarm: "Callable[[float], None] | None" = None) -> None:
        """Return when this is complete. Meanwhile this rank drives forward all that is `underway`.

        `alarm(seconds)` is called now and then by who waits long: it may raise what makes waiting pointless.
        """
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        with self.waits:
            self.waits.request, self.waits.limited = request, alarm is not None
            waited, next_alarm = 0.0, ALARM_SECONDS
            looks = LOOKS_OVERSUBSCRIBED if self.oversubscribed else LOOKS_BETWEEN_CLOCKS
            yields = self.oversubscribed
            while not self._look(request, looks, yields):
                waited = time.perf_counter() - begin
                if alarm is not None and waited > next_alarm:
                    alarm(waited)
                    next_alarm = waited + ALARM_SECONDS
                yields = waited > SPIN_SECONDS
                if self.oversubscribed or waited > YIELD_SECONDS:
                    looks, yields = 1, False
                    time.sleep(nap_seconds(waited, self.oversubscribed))
        self.wait_seconds += time.perf_counter() - begin
        self._waited.cpu = getattr(self._waited, "cpu", 0.0) + time.thread_time() - begin_cpu

    def drive(self) -> None:
        """Drive messages between nodes forward while this rank computes, as `wait` does while it waits.

        A large message goes by TCP only while both MPIs look after it. Within a node there is nothing to be gained.
        """
        if self.probe is not None:
            self.probe()
            for each in list(self.underway):
                each.advance()

    def work_seconds(self) -> float:
        """For how long this thread has worked, on a core, at anything but waiting: what others compute counts not."""
        waited: float = getattr(self._waited, "cpu", 0.0)
        return time.thread_time() - waited

    def _look(self, request: Request, times: int, yields: bool) -> bool:
        """Drive forward all that is under way, some times; whether this is complete."""
        test, underway = request.test, self.underway
        for _ in range(times):
            if underway:  # others may wait for what this rank has to drive forward
                for each in list(underway):
                    each.advance()
            if test():
                return True
            if yields:
                os.sched_yield()
        return False


def nap_seconds(waited: float, oversubscribed: bool) -> float:
    """How long a rank sleeps that has waited for `waited` seconds, until it looks again."""
    share = NAP_SHARE_OVERSUBSCRIBED if oversubscribed else NAP_SHARE
    nap = min(share * waited, max(LONG_NAP_SECONDS, NAP_SHARE * waited))
    return min(max(SHORTEST_NAP_SECONDS, nap), LONGEST_NAP_SECONDS)


def asked_threads() -> int | None:
    """How many threads the user's OMP_NUM_THREADS asks for; None if it says nothing."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first[:9]) or None if first.isdecimal() else None


def core_wait_seconds() -> float | None:
    """How long this thread could have run so far, and waited for a core instead; None where Linux does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def cores() -> int:
    """How many cores this process alone may use."""
    return max(1, int(min(len(os.sched_getaffinity(0)), quota())))


def quota(*places: Path) -> float:
    """How many cores' time the control groups of this process allow to all that is in them."""
    allowed = [float("inf")]
    for words in control_groups("cpu", ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"), *places):
        most, *period = words
        if most not in ("max", "-1"):
            allowed.append(int(most) / int(*period))
    return min(allowed)
