"""Allocators of memory for contestants: settings of the C library's, and libraries that replace it.

default     the C library's own settings                 keep      freed memory stays (mpi4dl._memory)
return      large tensors return theirs at once          tcmalloc, jemalloc, or NAME=/path/lib.so: preloaded
"""

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.common.options import Option
from benchmarks.common.turns import Contestant

SETTINGS = ("default", "keep", "return")
LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tcmalloc": ("tcmalloc", "tcmalloc_minimal"), "jemalloc": ("jemalloc",)}
)
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
VARIABLE = "MPI4DL_BENCHMARK_ALLOCATOR"
HELP = (
    "of default (the C library's), keep (freed memory stays, as the training command has it), return (large tensors "
    "return theirs at once), tcmalloc, jemalloc (where installed), and NAME=/path/to/library.so: each contestant "
    "runs with each of them"
)


def library(name: str) -> str | None:
    """The file that the loader preloads for an allocator of this name; None if it is not installed."""
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
    """The environment of contestants for each allocator, such as of "default,keep,jemalloc".

    Those that are not installed are left out, with a note.

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
    """Each contestant with each allocator."""
    several, chosen = environments(names), list(contestants)
    return [
        replace(
            contestant,
            answers=[],
            environment=contestant.environment | environment | {VARIABLE: name},
            allocator=name if len(several) > 1 else "",
        )
        for name, environment in several.items()
        for contestant in chosen
    ]


def use_allocator() -> None:
    """Set this process's C library as `with_each` says; libraries are preloaded already."""
    from mpi4dl._memory import keep_freed_memory

    name = os.environ.get(VARIABLE)
    if name in ("keep", "return"):
        keep_freed_memory(name == "keep")


def _known(names: str) -> str:
    try:
        environments(names)
    except ValueError as problem:
        raise ArgumentTypeError(str(problem)) from None
    return names


ALLOCATORS = Option("--allocators", _known, "keep", HELP)
