"""No hang, ever: a rank that fails, or waits too long, ends the whole job with one readable message.

MPI itself goes on waiting when a rank leaves with an uncaught exception or `sys.exit(3)`.
"""

import atexit
import ctypes
import errno
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mpi4dl.comm.communicator import Communicator

USER_ERROR = 2
FAILURE = 1
MEETING_SECONDS = 2.0
TURN_SECONDS = 0.25
LAST_TURN_SECONDS = 1.0
LEAVING_SECONDS = 15.0  # at the most: on a busy machine, libraries take seconds to unload
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
SPEAKING = 1  # the tag of "I say what went wrong"


def install(comm: "Communicator") -> None:
    """Make an uncaught exception in any thread, and a `sys.exit` with a code other than 0, end all ranks of the job.

    Python calls nothing of ours for a bare `raise SystemExit(3)`: only `run` sees that.
    """

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(comm, error.with_traceback(trace))

    def on_thread_exception(hook: threading.ExceptHookArgs) -> None:
        if hook.exc_value is not None and hook.exc_type is not SystemExit:
            fail(comm, hook.exc_value)

    codes: list[Any] = []
    leave = sys.exit

    def remember_and_exit(status: Any = None) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            codes[:] = [status]
        leave(status)

    def on_exit() -> None:
        if codes and codes[0] not in (None, 0) and comm.size > 1:
            leave_early(comm, codes[0] if isinstance(codes[0], int) else FAILURE)
        for farewell in comm.farewells:
            farewell()

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
    sys.exit = remember_and_exit
    atexit.register(on_exit)


def fail(comm: "Communicator", error: BaseException) -> NoReturn:
    """Say what went wrong, once for the whole job, and end all ranks."""
    from mpi4dl.comm.communicator import Refusal

    if isinstance(error, KeyboardInterrupt):
        os._exit(130)
    if isinstance(error, Refusal):
        refuse(comm, error)
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        refuse(comm, f"rank {comm.rank} cannot write: {error.strerror}: {error.filename or 'a file of this job'}")
    _wait_for_turn(comm)
    text = "".join(traceback.format_exception(error))
    who = f"[rank {comm.rank} of {comm.size}] " if comm.size > 1 else ""
    _say(f"{who}{text}", end="")
    _end_job(comm, FAILURE)


def refuse(comm: "Communicator", error: BaseException | str) -> NoReturn:
    """End all ranks with the message alone and exit code 2: all came here together, or those of one stage did."""
    together = _meet(comm)
    if not together:
        _wait_for_turn(comm)
    if comm.rank == 0 or not together:
        _say(f"mpi4dl: {error}")
    if not together:
        _end_job(comm, USER_ERROR)
    _leave(USER_ERROR)


def _meet(comm: "Communicator") -> bool:
    """Whether all ranks come here within a moment."""
    if comm.meeting is None:
        return False
    arrival, deadline = comm.meeting.Ibarrier(), time.monotonic() + MEETING_SECONDS
    while not arrival.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def leave_early(comm: "Communicator", status: Any) -> NoReturn:
    """End all ranks because this one called `sys.exit(status)`, which is a code or a message."""
    _wait_for_turn(comm)
    who = f"[rank {comm.rank} of {comm.size}] " if comm.size > 1 else ""
    _say(f"{who}{f'ended by sys.exit({status})' if isinstance(status, int) else status}")
    _end_job(comm, status if isinstance(status, int) else FAILURE)


def run(comm: "Communicator", main: Callable[[], None]) -> None:
    """Run a command: `main` ends the job cleanly however it ends."""
    try:
        main()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            leave_early(comm, stop.code)
        raise
    except BaseException as error:
        fail(comm, error)


def _say(text: str, end: str = "\n") -> None:
    """Print the last words of this rank to the true stderr.

    torch.distributed wraps `sys.excepthook`, and keeps what it prints until it returns: ours ends the job instead.
    """
    print(text, end=end, file=sys.__stderr__ or sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """Leave together: MPI shuts down, then the process ends at once, whatever threads of Python still run.

    MPICH signs off from its launcher in an exit handler of C, which `os._exit` would skip: the launcher would take
    the first rank to end for a crash, kill the others, and report that.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.Finalize()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LEAVING_SECONDS)
    ctypes.PyDLL(None).exit(code)
    os._exit(code)


def _wait_for_turn(comm: "Communicator") -> None:
    """Where all ranks fail alike, one speaks: it tells the others, who leave the rest to it."""
    if comm.meeting is None or comm.size == 1:
        return
    from mpi4py import MPI

    deadline = time.monotonic() + min(TURN_SECONDS * min(comm.rank, 1) + 0.05 * comm.rank, LAST_TURN_SECONDS)
    while True:
        if comm.meeting.Iprobe(tag=SPEAKING):
            time.sleep(MEETING_SECONDS)
            os._exit(FAILURE)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.005)
    for other in range(comm.size):
        if other != comm.rank:
            comm.meeting.Isend([b"", MPI.BYTE], other, SPEAKING)


def _end_job(comm: "Communicator", code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    if comm.size > 1:
        comm.mpi.Abort(code)
    os._exit(code)


class Watchdog:
    """Ends the job, showing where every thread of this rank stands, if `feed` is not called for `seconds`.

    It works while the rank is blocked inside MPI. 0 seconds: never.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.feed()

    def feed(self) -> None:
        if self.seconds > 0:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
