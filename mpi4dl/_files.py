"""Files and folders that others write to as well: opened without waiting, locked, and named by their errors."""

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"
LOCK_SECONDS = 10.0  # for the ranks of a job that was killed to be gone
POLL_SECONDS = 0.05
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer


def open_regular(path: Path) -> int:
    """A file descriptor for reading. Raises OSError, also for what is no regular file: a pipe would be waited for."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(None, "it is no regular file", str(path))
    except OSError:
        os.close(file)
        raise
    return file


def read_regular(path: Path) -> bytes:
    """All of a file. Raises OSError as `open_regular` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of writing to an open file, such as that the disk is full, the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def lock(folder: Path) -> int | None:
    """Lock a folder, which is there; `os.close` of what is returned lets it go.

    None, with a warning, if the file system has no locks: then nothing keeps another job out.

    Raises:
        ValueError: another process has locked it, and does not let go within LOCK_SECONDS.
        OSError: the folder cannot be written to, or not be locked for a reason of the system's own.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise ValueError(
                    f"another job is writing to {folder}: wait for its end, or name another `run_folder`"
                ) from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            os.close(file)
            if error.errno not in NO_LOCKS:
                raise OSError(error.errno, error.strerror, str(folder / LOCK)) from error
            message = "%s is on a file system without locks (%s): see to it that no other job writes there"
            logging.getLogger("mpi4dl").warning(message, folder, error.strerror)
            return None
