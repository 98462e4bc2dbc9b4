"""Files that anybody may have put there: opened without waiting for what is no regular file."""

import os
import stat
from pathlib import Path


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
