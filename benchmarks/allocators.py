"""Allocators of memory that contestants are given: settings of the C library's, and libraries that replace it.

default     the C library's, as it is                    keep      freed memory stays (mpi4dl._memory)
return      large tensors give theirs back at once       tcmalloc, jemalloc, or NAME=/path/lib.so: preloaded
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from types import MappingProxyType

from benchmarks.turns import Contestant, median

SETTINGS = ("default", "keep", "return")
LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tcmalloc": ("tcmalloc", "tcmalloc_minimal"), "jemalloc": ("jemalloc",)}
)
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
HELP = (
    "of default (the C library's), keep (freed memory stays, as the training command has it), return (large tensors "
    "give theirs back at once), tcmalloc, jemalloc (where installed), and NAME=/path/to/library.so: each contestant "
    "runs with each of them"
)


def library(name: str) -> str | None:
    """What the loader is to preload for an allocator of this name; None if it is not installed."""
    for stem in LIBRARIES[name]:
        found = find_library(stem)
        if found is not None:
            return found
        for folder in FOLDERS:
            files = sorted(Path(folder).glob(f"lib{stem}.so*"))
            if files:
                return str(files[0])
    return None


def environments(names: str) -> dict[str, dict[str, str]]:
    """The environment of contestants for each allocator, such as of "default,keep,jemalloc"; those not installed are
    left out, which is said.

    Raises:
        ValueError: there is no allocator of that name, no such file, or none is left.
    """
    found: dict[str, dict[str, str]] = {}
    for text in names.split(","):
        name, _, path = text.partition("=")
        if path:
            if not Path(path).exists():
                raise ValueError(f"{text}: there is no such file")
            found[name] = {"LD_PRELOAD": path}
        elif name in SETTINGS:
            found[name] = {}
        elif name not in LIBRARIES:
            raise ValueError(f"{text}: choose of {', '.join((*SETTINGS, *LIBRARIES))}, or NAME=/path/to/library.so")
        else:
            preloaded = library(name)
            if preloaded is None:
                print(f"{name} is not installed: left out", file=sys.stderr)
            else:
                found[name] = {"LD_PRELOAD": preloaded}
    if not found:
        raise ValueError(f"{names}: none of them is installed; default, keep and return always are")
    return found


def with_each(contestants: Iterable[Contestant], names: str) -> list[Contestant]:
    """Each contestant with each allocator, of which it is told by `--allocator`, its first flag behind the module."""
    several, chosen = environments(names), list(contestants)
    return [
        Contestant(
            contestant.name,
            contestant.ranks,
            [*contestant.arguments[:2], f"--allocator={name}", *contestant.arguments[2:]],
            environment=environment,
            allocator=name if len(several) > 1 else "",
        )
        for name, environment in several.items()
        for contestant in chosen
    ]


def least_memory(contestants: Sequence[Contestant]) -> float:
    """The median peak of plain PyTorch, which comes first, with the allocator with which it needs least."""
    plain = [each for each in contestants if each.name == contestants[0].name]
    return min(median([answer["peak_bytes"] for answer in each.answers]) for each in plain)


def use(name: str) -> None:
    """Set this process's C library so; what is preloaded is there already."""
    from mpi4dl._memory import keep_freed_memory

    if name in ("keep", "return"):
        keep_freed_memory(name == "keep")
