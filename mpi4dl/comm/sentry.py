"""A thread that looks after this rank once a second: does it still come further, or wait for who has ended?"""

import faulthandler
import sys
import threading
import time
import traceback
import weakref
from functools import cache

from mpi4dl.comm import farewell
from mpi4dl.comm.ending import FAILURE, end_job, say, stderr
from mpi4dl.comm.meeting import met

LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0  # then C ends what a thread of Python cannot
SETTLING_SECONDS = 1.0  # for the last words of other ranks, whose time is up too
STACK_FRAMES = 6
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
            sentry().watch(self)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        sentry().watch(None)


class Waits:
    """Marks where this rank waits for others: `with waits: ...`. `since`: when, by time.perf_counter; 0 at work.

    `request`: what it waits for, where that is known; `limited`: the wait has a limit of its own.
    """

    since = 0.0
    request: object = None
    limited = False

    def __enter__(self) -> None:
        self.since = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.since, self.request, self.limited = 0.0, None, False

    def patience(self) -> float:
        """How many seconds this wait may take on a slow network, without anything being wrong."""
        num_bytes = getattr(self.request, "num_bytes", None)
        return farewell.STUCK_SECONDS + (0 if num_bytes is None else num_bytes() / SLOW_BYTES_PER_SECOND)


class Sentry(threading.Thread):
    """The thread. `waits` is where this rank waits for others; `ended` says that its program has come to its end.

    `failure`, a message and an exit code, is what this rank waits to tell the others.
    """

    def __init__(self) -> None:
        super().__init__(name="sentry", daemon=True)
        self.waits = Waits()
        self.ended = False
        self.failure: tuple[str, int] | None = None
        self._fed: tuple[weakref.ref[Watchdog], float] | None = None
        self._farewell: farewell.Farewell | None = None
        self._standing: farewell.Standing | None = None
        self._rests = threading.Event()

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
        self._farewell = self._farewell or farewell.Farewell(meeting)
        self._standing = self._stand()
        verdict = self._farewell.look(self._standing)
        if verdict is not None:
            say(verdict.message)
            end_job(verdict.code)

    def _stand(self) -> farewell.Standing | None:
        """Where this rank is, as others need to know it: what was said of a wait stays as it was said."""
        if self.ended:
            return farewell.Standing(True, 0.0, "")
        since = self.waits.since
        if not since or time.perf_counter() - since < self.waits.patience():
            return None
        if self._standing is not None and self._standing.since == since:
            return self._standing
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
        return farewell.Standing(False, since, place, failure=self.failure, limited=self.waits.limited)


@cache
def sentry() -> Sentry:
    """The sentry of this process, who begins with the first call."""
    new = Sentry()
    new.start()
    return new
