"""A thread that looks after this rank once a second: does it still come further, or wait for who has ended?"""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import stat
import sys
import termios
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from os import _exit as exit_now  # as it is before the guard puts its own there
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

from mpi4dl.comm.requests import Waits
from mpi4dl.comm.shutdown import met, mpi_has_started

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.shutdown import Meeting

# Ranks that wait in vain, for one that has ended or failed, or for each other: found by asking them.
#
# A rank may end early, as long as nobody needs it any more; so that alone is no error. It is one when every rank has
# ended or waits for a message, and none of them comes further. Rank 0 finds out, however long healthy ranks may take:
#
#     rank r          as it ends, and when it has been in one wait for STUCK_SECONDS:  its state   ->  rank 0
#     rank 0          once all have ended or are stuck:                                "still so?"    ->  who is stuck
#     rank r          if it is still in the same wait:                                 its state   ->  rank 0
#
# Who answers was in the same wait all the time from its first word to its answer. So there was a moment, when rank 0
# asked, at which nobody was left who could have sent what the others wait for. Ranks at work send and receive nothing.
#
# A rank that failed where all are to hear of it waits for the others too, and its state says how it failed. Where
# none has ended or failed, all wait for each other, as in different calls. That is looked at for longer, since it is
# rare: for longest on several machines, where a network may pause, and with GPUs, which at work may look like it.

STUCK_SECONDS = 5.0  # a wait for a small message may take as long on a slow network
DEADLOCK_SECONDS, DEADLOCK_SECONDS_OF_NEAR = 300.0, 20.0
RANK_STATE, ASKING, BEATING = 3, 4, 5  # tags


class RankState(NamedTuple):
    """Where a rank is: it has ended, or is in the wait that began at `since`, by its own clock, at this `place`.

    `answer` is the number of the question that this answers. `failure`: the message and the exit code of a rank that
    waits for the others to hear how it failed. `limited`: the wait ends by itself.
    """

    ended: bool
    since: float
    place: str
    answer: int = 0
    failure: tuple[str, int] | None = None
    limited: bool = False


class Verdict(NamedTuple):
    """The message to the user about a job that can never end, and its exit code."""

    message: str
    code: int = 1


class ExitNotification:
    """One rank's part of it, for one thread."""

    def __init__(self, meeting: "Meeting") -> None:
        self.comm, self.rank, self.size = meeting.comm, meeting.rank, meeting.size
        self._said: RankState | None = None
        self._sent: list[MPI.Request] = []
        self._standings: dict[int, RankState] = {}  # of rank 0: those who ended or are stuck
        self._asked: dict[int, float] = {}
        self._asked_since = 0.0
        self._question = 0

    def look(self, rank_state: RankState | None, near: bool) -> Verdict | None:
        """Take part, as long as this rank's state is worth to be told (None: it is at work). Call it now and then.

        Returns a verdict, on rank 0, if the job can never end. `near`: all ranks are on CPUs of one machine.
        """
        if rank_state != self._said:
            self._said = rank_state
            self._tell(rank_state)
        if self.rank == 0:
            limit = DEADLOCK_SECONDS_OF_NEAR if near else DEADLOCK_SECONDS
            return None if rank_state is None else self._judge(limit)
        while rank_state is not None and self.comm.Iprobe(0, ASKING):
            question = self.comm.recv(source=0, tag=ASKING)
            if not rank_state.ended:
                self._tell(rank_state._replace(answer=question))
        return None

    def _tell(self, rank_state: RankState | None) -> None:
        if self.rank == 0:
            self._note(0, rank_state)
        else:
            self._send(rank_state, 0, RANK_STATE)

    def _send(self, value: RankState | int | None, to: int, tag: int) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self.comm.isend(value, to, tag))

    def _note(self, rank: int, rank_state: RankState | None) -> None:
        if rank_state is None:
            self._standings.pop(rank, None)
        else:
            self._standings[rank] = rank_state

    def _judge(self, deadlock_seconds: float) -> Verdict | None:
        from mpi4py import MPI

        status = MPI.Status()
        while self.comm.Iprobe(tag=RANK_STATE, status=status):
            self._note(status.source, self.comm.recv(source=status.source, tag=RANK_STATE))
        ended = [rank for rank, rank_state in sorted(self._standings.items()) if rank_state.ended]
        stuck = [rank for rank, rank_state in sorted(self._standings.items()) if not rank_state.ended]
        waits = {rank: self._standings[rank].since for rank in stuck}
        if len(self._standings) < self.size or not stuck:
            self._asked = {}
            return None
        if waits != self._asked:
            self._asked, self._asked_since = waits, time.monotonic()
            self._question += 1
            for rank in stuck:
                if rank != 0:
                    self._send(self._question, rank, ASKING)
            return None
        if any(self._standings[rank].answer != self._question for rank in stuck if rank != 0):
            return None
        failed = [
            rank_state.failure for _, rank_state in sorted(self._standings.items()) if rank_state.failure is not None
        ]
        if failed:
            return Verdict(*failed[0])
        if ended:
            return Verdict(_of_ended(ended, stuck, self._standings))
        limited = any(rank_state.limited for rank_state in self._standings.values())
        if limited or time.monotonic() - self._asked_since < deadlock_seconds:
            return None
        return Verdict(_of_all(stuck, self._standings))


def _of_ended(ended: list[int], stuck: list[int], standings: dict[int, RankState]) -> str:
    return (
        f"mpi4dl: {_ranks(ended)} ended, but {_ranks(stuck)} still waited, and so would have for ever: no rank may end "
        f"before the others have all that they need of it\n{_ranks(stuck[:1])} waited here:\n"
        f"{standings[stuck[0]].place}"
    )


def _of_all(stuck: list[int], standings: dict[int, RankState]) -> str:
    places: dict[str, list[int]] = {}
    for rank in stuck:
        places.setdefault(standings[rank].place, []).append(rank)
    found = "\n".join(f"{_ranks(ranks)} waited here:\n{place}" for place, ranks in places.items())
    return (
        "mpi4dl: all ranks waited for each other, and would have for ever: all must make the same collective calls in "
        f"the same order\n{found}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


# Ranks that no longer answer: stopped by a signal, or on a machine that is gone.
#
# In a ring, each rank's thread tells the next rank that it lives, whatever its program does. A function of C that keeps
# the interpreter's lock silences it, too. So a rank judges only where it has no watchdog: where it waits for slower
# ranks, and at its end. It counts its own looks, not seconds: a job that was stopped as a whole goes on.

SILENT_SECONDS = 120.0
BEAT_SECONDS = 10.0


class Heartbeat:
    """One rank's part of it, for one thread."""

    def __init__(self, meeting: "Meeting") -> None:
        self.comm, self.size = meeting.comm, meeting.size
        self.before, self.after = (meeting.rank - 1) % self.size, (meeting.rank + 1) % self.size
        self._sent: MPI.Request | None = None
        self._looks = 0
        self._silent_looks = 0

    def look(self, judges: bool) -> Verdict | None:
        """Take part; call it every LOOK_SECONDS. Returns a verdict if this rank `judges`, and another is silent."""
        from mpi4py import MPI

        if self._looks % round(BEAT_SECONDS / LOOK_SECONDS) == 0 and (self._sent is None or self._sent.Test()):
            self._sent = self.comm.Isend([b"", MPI.BYTE], self.after, BEATING)
        self._looks += 1
        self._silent_looks = self._silent_looks + 1 if judges else 0
        while self.comm.Iprobe(self.before, BEATING):
            self.comm.Recv([bytearray(), MPI.BYTE], self.before, BEATING)
            self._silent_looks = 0
        if self._silent_looks * LOOK_SECONDS < SILENT_SECONDS:
            return None
        return Verdict(
            f"mpi4dl: rank {self.before} of {self.size} has given no sign of life for {SILENT_SECONDS:g} s: it was "
            "stopped by a signal, or its machine is gone"
        )


# A rank's last words, and how it takes the job with it: nothing here raises, or waits for long, whatever is broken.

FAILURE = 1
LAST_WORDS_SECONDS = 10.0  # for readers of the pipe
DRAIN_SECONDS, DRAIN_LOOK_SECONDS = 2.0, 1e-3  # for a launcher to take them
LEAVING_SECONDS = 15.0  # at the most: on a busy machine, libraries take seconds to unload


def stderr() -> TextIO:
    """The true standard error, whatever takes its place: torch.distributed keeps what it prints until its hook returns,
    which ours never does. Nowhere, if it was closed before the program began.
    """
    return sys.__stderr__ or sys.stderr or open(os.devnull, "w")


def hurry() -> None:
    """Be over soon, also where a write or MPI blocks."""
    faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=os.open(os.devnull, os.O_WRONLY))


def say(text: str) -> None:
    """Print the last words of this rank, after what it has printed. Where nobody takes them, it ends without."""
    hurry()
    flush()
    with contextlib.suppress(OSError, ValueError):
        print(text, end="" if text.endswith("\n") else "\n", file=stderr(), flush=True)


def flush() -> OSError | None:
    """Write out what was printed; why that cannot be done, if so."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            return error
        except ValueError:  # it was closed
            pass
    return None


def drain(files: Sequence[int] = (1, 2), seconds: float = DRAIN_SECONDS) -> None:
    """Wait until pipes were read: a launcher that aborts a job may drop what it has not read of a rank's output."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(_unread_bytes, files)):
        time.sleep(DRAIN_LOOK_SECONDS)


def _unread_bytes(file: int) -> int:
    try:
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # it is closed
        return 0


def output_is_lost() -> bool:
    """Whether standard output cannot be written. It may have been the first write that failed, and nothing is left."""
    hurry()
    try:
        print(flush=True)
    except OSError:
        return True
    except ValueError:  # it was closed by the program itself
        pass
    finally:
        faulthandler.cancel_dump_traceback_later()
    return False


def end_job(code: int) -> NoReturn:
    """End this rank and all others at once."""
    hurry()
    flush()
    drain()
    meeting = met()
    if meeting is not None and meeting.size > 1:
        meeting.abort(code)
    elif not mpi_has_started() and any(name.startswith("PMI") for name in os.environ):
        _abort_by_launcher(code)
    exit_now(code)


def _abort_by_launcher(code: int) -> None:
    """End all ranks before MPI has started, by the message of PMI-1 that `MPI_Abort` sends, or by a crash.

    Launchers do not mind how else a process ends that never came to MPI, and Intel's not even a crash.
    """
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ["PMI_FD"])
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # and no file of a process that a rank has started
            os.write(descriptor, f"cmd=abort exitcode={code or FAILURE}\n".encode())
            time.sleep(SETTLING_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """Leave together: MPI shuts down, then the process ends at once, whatever threads of Python still run.

    MPICH signs off from its launcher in an exit handler of C, which `os._exit` would skip. The launcher would then
    treat the first rank that ends as a crash, and kill the others.
    """
    from mpi4py import MPI

    flush()
    MPI.Finalize()
    end_within(LEAVING_SECONDS)
    ctypes.PyDLL(None).exit(code)
    exit_now(code)


def end_within(seconds: float) -> None:
    """Let the system end this process after so long, whatever it does by then. For the main thread."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0  # then C ends what a thread of Python cannot
SETTLING_SECONDS = 1.0  # for the last words of other ranks, whose time is up too
STACK_FRAMES = 8
HIDDEN = tuple(str(Path(place).parent) for place in (__file__, getattr(find_spec("torch"), "origin", __file__)))
SLOW_BYTES_PER_SECOND = 2e7


class Watchdog:
    """Ends the job, showing where every thread of this rank stands, if `feed` is not called for `seconds`.

    It works while the rank is blocked inside MPI. 0 seconds: never. A process has one: the one that was fed last.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.feed()

    def feed(self) -> None:
        if self.seconds > 0:
            faulthandler.dump_traceback_later(self.seconds + GRACE_SECONDS, exit=True, file=stderr())
            watchdog_thread().watch(self)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        watchdog_thread().watch(None)


class WatchdogThread(threading.Thread):
    """The thread. `waits` is where this rank waits for others; `ended` says that its program has come to its end.

    `failure`, a message and an exit code, is what this rank waits to tell the others. `listens`: whether it ends the
    job where another rank no longer answers. `near`: all ranks are on CPUs of one machine.
    """

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.waits = Waits()
        self.ended = False
        self.failure: tuple[str, int] | None = None
        self.listens = False
        self.near = False
        self._fed: tuple[weakref.ref[Watchdog], float] | None = None
        self._exit_notification: ExitNotification | None = None
        self._heartbeat: Heartbeat | None = None
        self._rank_state: RankState | None = None
        self._rests = threading.Event()
        self.device: Callable[[], None] | None = None  # makes this rank's GPU the thread's, as MPI may need it

    def watch(self, dog: Watchdog | None) -> None:
        """From now on this one counts, as long as somebody holds it."""
        self._fed = None if dog is None else (weakref.ref(dog), time.monotonic())

    def rest(self) -> None:
        """Returns when the thread is over, so that MPI may be."""
        self._rests.set()
        self.join()

    def run(self) -> None:
        pause = LOOK_SECONDS
        while not self._rests.wait(pause):
            if self.device is not None:
                self.device()
                self.device = None
            pause = self._look_at_time()
            self._look_at_others()

    def _look_at_time(self) -> float:
        """Seconds until the next look."""
        fed = self._fed
        dog = fed and fed[0]()
        if fed is None or dog is None:
            return LOOK_SECONDS
        left = fed[1] + dog.seconds - time.monotonic()
        if left <= 0:
            meeting = met()
            say(
                f"mpi4dl: {'a rank' if meeting is None else f'rank {meeting.rank} of {meeting.size}'} came no further "
                f"for {dog.seconds:g} s, and a job waits no longer than that (the hang timeout); where it was:"
            )
            faulthandler.dump_traceback(stderr())
            time.sleep(SETTLING_SECONDS)
            end_job(FAILURE)
        return min(left, LOOK_SECONDS)

    def _look_at_others(self) -> None:
        meeting = met()
        if meeting is None or meeting.size == 1 or not meeting.threads:
            return
        self._exit_notification = self._exit_notification or ExitNotification(meeting)
        self._rank_state = self._stand()
        verdict = self._exit_notification.look(self._rank_state, self.near)
        if self.listens and verdict is None:
            self._heartbeat = self._heartbeat or Heartbeat(meeting)
            watched = self._fed is not None and self._fed[0]() is not None
            verdict = self._heartbeat.look(self.ended or not watched)
        if verdict is not None:
            say(verdict.message)
            end_job(verdict.code)

    def _stand(self) -> RankState | None:
        """Where this rank is, as others need to know it: a description of a wait does not change."""
        if self.ended:
            return RankState(True, 0.0, "")
        since = self.waits.since
        # A large message may take long on a slow network, without anything being wrong.
        num_bytes = getattr(self.waits.request, "num_bytes", int)()
        if not since or time.perf_counter() - since < STUCK_SECONDS + num_bytes / SLOW_BYTES_PER_SECOND:
            return None
        if self._rank_state is not None and self._rank_state.since == since:
            return self._rank_state
        frame = sys._current_frames().get(self.waits.thread)
        place = "".join(traceback.format_list(_telling(traceback.extract_stack(frame))))
        return RankState(False, since, place, failure=self.failure, limited=self.waits.limited)


def _telling(stack: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """The last frames of a wait without PyTorch's and those of the wait itself, behind which a user's lines may be."""
    return ([each for each in stack if not each.filename.startswith(HIDDEN)] or stack)[-STACK_FRAMES:]


@cache
def watchdog_thread() -> WatchdogThread:
    """The watchdog thread of this process, which begins with the first call."""
    new = WatchdogThread()
    new.start()
    return new
