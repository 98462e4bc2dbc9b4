"""Writes files that others read: whole or not at all, also if the writer is killed."""

import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mpi4dl.datasets.base import DatasetError

DAY_SECONDS = 86_400.0


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes the name `path` at the end; an error leaves what was there.

    Several processes may do so at once: the last one's file stays. What killed ones left is removed after a day.

    Raises:
        DatasetError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        try:
            with temporary.open("x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DatasetError(f"{path}: cannot be written: {error.strerror or error}") from error


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        try:
            if time.time() - left.stat().st_mtime > DAY_SECONDS:
                left.unlink()
        except FileNotFoundError:  # another process was faster
            pass
