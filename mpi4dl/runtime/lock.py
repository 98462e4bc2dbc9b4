"""One job at a time writes into a folder: its lock, which the system lets go when the process ends, however it ends."""

import fcntl
import os
import time
from pathlib import Path

LOCK = ".lock"
LOCK_SECONDS = 10.0  # for the ranks of a job that was killed to be gone
POLL_SECONDS = 0.05


def lock(folder: Path) -> int:
    """Lock a folder, which is there; `os.close` of what is returned lets it go.

    Raises:
        ValueError: another process has locked it, and does not let go within LOCK_SECONDS.
        OSError: the folder cannot be written to.
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
                    f"another job is writing to {folder}: wait for its end, or name another --run-folder"
                ) from None
            time.sleep(POLL_SECONDS)
        except OSError:  # a file system without locks
            return file
