"""What a process holds: memory, open files, threads; and whether it holds more and more."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MORE_BYTES = 48 << 20  # than before: caches fill, and heaps are cut to pieces
MORE_FILES = 8
MORE_THREADS = 16  # a server has some for requests at once


class Resources(NamedTuple):
    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Resources":
        """Those of a process that runs."""
        folder = Path(f"/proc/{pid}")
        pages = int((folder / "statm").read_text().split()[1])
        files = len(list((folder / "fd").iterdir()))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files, len(list((folder / "task").iterdir())))


def grown(before: Sequence[Resources], after: Sequence[Resources]) -> list[str]:
    """What there is much more of than before, of some processes in the same order."""
    wrong = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if new.memory > old.memory + MORE_BYTES:
            wrong.append(f"rank {number}: {(new.memory - old.memory) >> 20} MiB more memory")
        if new.files > old.files + MORE_FILES:
            wrong.append(f"rank {number}: {new.files} open files, {old.files} before")
        if new.threads > old.threads + MORE_THREADS:
            wrong.append(f"rank {number}: {new.threads} threads, {old.threads} before")
    return wrong
