"""No hang, ever: a rank that fails, leaves early, or waits too long, ends the whole job with one readable message.

MPI itself goes on waiting when a rank leaves with an uncaught exception or `sys.exit(3)`. So a guard stands at each way
out of Python: uncaught exceptions, `SystemExit`, `os._exit`, and the end of the program. Where one process runs alone,
or a user at a prompt, there is nobody to save from waiting, and Python does as ever.
"""

import atexit
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

from mpi4dl.comm import RankFailed, Refusal
from mpi4dl.comm.shutdown import LOCAL_RANKS, Meeting, little_shared_memory, meeting, met, mpi_has_started, mpi_is_over
from mpi4dl.comm.watchdog import (
    FAILURE,
    SILENT_SECONDS,
    Watchdog,
    end_job,
    end_within,
    exit_now,
    flush,
    leave,
    output_is_lost,
    say,
    watchdog_thread,
)

__all__ = ["Watchdog", "arm", "run", "start"]

USER_ERROR = 2
SIGNALLED = 128  # and the number of the signal
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # of launchers, before MPI starts
INTERRUPTED, BROKEN_PIPE = 130, 141  # as shells count Ctrl-C and a reader that has gone
START_SECONDS = 600.0  # at least, for all ranks to have imported what starts MPI
MEETING_SECONDS = 2.0
LATE_SECONDS = 60.0  # for the others to come to where a rank says that it failed
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class Leaving(SystemExit):
    """The exception that `sys.exit` raises in the main thread. Uncaught, it ends all ranks.

    Python asks for the code without any frame of Python around only then.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and value not in (None, 0) and sys._getframe().f_back is None and _others_may_wait():
            _leave_early(value, f"sys.exit({value})")
        return value


@dataclass(frozen=True)
class Python:
    """Python's own functions at its exits, without the guard, in the process of the guard, not in a forked child."""

    process: int
    show: Callable[..., Any]
    show_of_thread: Callable[..., Any]
    exit: Callable[..., NoReturn]


@cache
def arm() -> Python:
    """Stand at the ways out of this process, from the first call on."""
    before = Python(os.getpid(), sys.excepthook, threading.excepthook, sys.exit)
    sys.excepthook, threading.excepthook, sys.exit, os._exit = _on_exception, _on_thread_exception, _exit, _exit_at_once
    atexit.register(_on_end, before.process)
    return before


def _in_charge() -> bool:
    """Whether this is the process, and at no prompt, whose end is the guard's."""
    at_a_prompt = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")
    return os.getpid() == arm().process and not at_a_prompt


def _others_may_wait() -> bool:
    """Whether this process must not end without the others. Before MPI has started, nobody knows: it may be."""
    opened = met()
    return _in_charge() and not (mpi_is_over() if opened is None else opened.size == 1)


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _others_may_wait() or (_in_charge() and isinstance(error, KeyboardInterrupt)):
        fail(error.with_traceback(trace))
    arm().show(kind, error, trace)


def _on_thread_exception(hook: threading.ExceptHookArgs) -> None:
    if _others_may_wait() and hook.exc_value is not None and not issubclass(hook.exc_type, SystemExit):
        fail(hook.exc_value)
    arm().show_of_thread(hook)


def _exit(status: Any = None) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        raise Leaving(status)
    arm().exit(status)


def _exit_at_once(status: int) -> NoReturn:
    if _others_may_wait():
        opened = met()
        if status == 0 and opened is not None:
            for exit_notification in opened.exit_notifications:
                exit_notification()
            if opened.gathers(float("inf") if opened.exit_notifications else MEETING_SECONDS):
                leave(0)
        _leave_early(status or FAILURE, f"os._exit({status})")
    exit_now(status)


def _on_end(process: int, patience: float = 0.0, finalize: bool = False) -> None:
    """Wait for all other ranks to end too, as MPI would, but so that it shows if they never can."""
    opened = met()
    if opened is None or os.getpid() != process:
        return
    watchdog, watchman = Watchdog(patience), watchdog_thread()
    watchman.ended = True
    for exit_notification in opened.exit_notifications:
        exit_notification()
    opened.gathers()
    watchdog.seconds = min(patience, SILENT_SECONDS)  # no rank has anything left to do
    watchdog.feed()
    for closing in opened.closings:
        closing()
    watchman.rest()
    if finalize:
        opened.close()
        watchdog.stop()
        end_within(patience)


def start() -> Meeting:
    """Start MPI, guarded, without torch. Collective in the first call."""
    arm()
    _require_shared_memory()
    opened = meeting()
    watchdog_thread()
    return opened


def _require_shared_memory() -> None:
    """Raise Refusal, in the first of the ranks that mpirun started here, if MPI would die of a bus error."""
    names = next((pair for pair in LOCAL_RANKS if pair[1] in os.environ), LOCAL_RANKS[0])
    rank, size = (int(os.environ.get(name) or 0) for name in names)
    problem = little_shared_memory(size) if size > 1 and not mpi_has_started() else None
    if problem is not None and rank > 0:
        time.sleep(MEETING_SECONDS)
        exit_now(USER_ERROR)
    if problem is not None:
        raise Refusal(problem)


def die_by_ctrl_c() -> None:
    """Let Ctrl-C end this process without a traceback, as long as there is nothing to save."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _on_stop(number: int, frame: object) -> None:
    """Say which signal ended the job, where no run is under way that hears it, saves, and stops after its step."""
    opened = met()
    rank = int(next(filter(None, map(os.environ.get, RANKS)), 0)) if opened is None else opened.rank
    if rank > 0:
        time.sleep(MEETING_SECONDS)  # for rank 0, which says it if it had the signal too
    name = signal.Signals(number).name
    say(f"mpi4dl: ended by {name}; what was written until then is whole")
    end_job(SIGNALLED + number)  # not every launcher ends the others when one has left


def run(main: Callable[[], None], patience: float = START_SECONDS) -> None:
    """Run a command, from before MPI starts and torch is imported: the job ends cleanly however `main()` ends.

    `patience`: the seconds that it may take all ranks to start, START_SECONDS at least, and to end. 0: for ever, also
    where a rank no longer answers.
    """
    die_by_ctrl_c()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # which ask a job to stop
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _on_stop)
    atexit.register(_on_end, arm().process, patience, finalize=True)
    watchdog = Watchdog(patience and max(patience, START_SECONDS))
    try:
        if sys.stdout is None:
            raise Refusal("standard output is closed: where nobody reads it, start with > /dev/null")
        start()
        watchdog_thread().listens = patience > 0
        main()
        lost = flush()
        if lost is not None:
            raise lost
    except SystemExit as stop:
        if (stop.code not in (None, 0) and _others_may_wait()) or met() is None:
            _leave_early(stop.code, f"sys.exit({stop.code})")
        raise
    except BaseException as error:
        fail(error)
    finally:
        watchdog.stop()


@contextmanager
def failing(error: Exception | None) -> Iterator[None]:
    """Tell the others of `error`. If they do not come to hear it, since they wait for this rank elsewhere, end all.

    The sentries find that out in seconds, where a thread may ask; else it is taken to be so after a minute.
    """
    if error is None:
        yield
        return
    watchman = watchdog_thread() if met() is not None else None
    if watchman is not None:
        watchman.failure = last_words(error)
    late = threading.Timer(LATE_SECONDS, lambda: fail(error) if _others_may_wait() else None)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        if watchman is not None:
            watchman.failure = None


def fail(error: BaseException) -> NoReturn:
    """Say what went wrong, once for the whole job, and end all ranks."""
    opened = met()
    rank = 0 if opened is None else opened.rank
    if isinstance(error, KeyboardInterrupt):
        exit_now(INTERRUPTED)
    if isinstance(error, Refusal):
        refuse(str(error))
    if isinstance(error, OSError) and error.filename is None and output_is_lost():
        if isinstance(error, BrokenPipeError):
            end_job(BROKEN_PIPE)
        refuse(f"rank {rank} cannot write to standard output: {error.strerror}")
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        refuse(f"rank {rank} cannot write: {error.strerror}: {error.filename or 'a file of this job'}")
    _wait_for_turn()
    text, code = last_words(error)
    say(text)
    end_job(code)


def last_words(error: BaseException) -> tuple[str, int]:
    """The message of a job that ends by `error` says, and its exit code."""
    if isinstance(error, Refusal):
        return f"mpi4dl: {error}", USER_ERROR
    opened = met()
    text = f"{error}" if isinstance(error, RankFailed) else "".join(traceback.format_exception(error))
    return f"{'' if opened is None else opened.name()}{text}", FAILURE


def refuse(message: str) -> NoReturn:
    """End all ranks with the message alone and exit code 2: all came here together, or those of one stage did."""
    opened = met()
    together = opened is not None and opened.gathers(MEETING_SECONDS)
    if not together:
        _wait_for_turn()
    if opened is None or not together or opened.speaks():  # others may have come to a good end
        say(f"mpi4dl: {message}")
    if together:
        leave(USER_ERROR)
    end_job(USER_ERROR)


def _leave_early(code: Any, how: str) -> NoReturn:
    """End all ranks because this one leaves by `how`, with a code or a message."""
    opened = met()
    _wait_for_turn()
    say(f"{'' if opened is None else opened.name()}{f'ended by {how}' if isinstance(code, int) else code}")
    end_job(code if isinstance(code, int) else FAILURE)


def _wait_for_turn() -> None:
    """Go on if this rank is to say what went wrong. Else another did, and ends all ranks."""
    opened = met()
    if opened is not None and not opened.speaks():
        time.sleep(MEETING_SECONDS)
        exit_now(FAILURE)
