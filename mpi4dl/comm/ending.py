"""A rank's last words, and how it takes the job with it: nothing here raises, or waits for long, whatever is broken."""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import stat
import sys
import termios
import time
from collections.abc import Sequence
from os import _exit as exit_now  # as it is before the guard puts its own there
from typing import NoReturn, TextIO

from mpi4dl.comm.meeting import met, mpi_has_started

FAILURE = 1
LAST_WORDS_SECONDS = 10.0  # for whoever reads them to take them
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
    """Wait until pipes were read: a launcher that is told to abort may drop what it has not read of a rank's output."""
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
        os.kill(os.getpid(), signal.SIGKILL)  # launchers do not mind how else a process ends that never came to MPI
    exit_now(code)


def leave(code: int) -> NoReturn:
    """Leave together: MPI shuts down, then the process ends at once, whatever threads of Python still run.

    MPICH signs off from its launcher in an exit handler of C, which `os._exit` would skip: the launcher would take
    the first rank to end for a crash, kill the others, and report that.
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
