"""Puts a mutant in the place of its original, in a process that runs, and takes it out again.

All functions with the original's code get the mutant's, whoever holds them, and what functions have remembered is
forgotten, since it came from other code. A process that starts with MPI4DL_MUTANT in its environment has the mutant
from its start (`tests.pool.zygote`).
"""

import functools
import gc
import importlib
import json
import os
from types import CodeType, FunctionType
from typing import Any

from tools.nets.mutation.mutants import Mutant, code_of

VARIABLE = "MPI4DL_MUTANT"


def put_in(comm: Any, mutant: Mutant) -> int:
    """Let functions of this process be those of the mutant; returns how many there are. A body of the pool's ranks."""
    return _swap(mutant, code_of(mutant))


def take_out(comm: Any, mutant: Mutant) -> int:
    """Let them be the original's again."""
    return _swap(mutant, code_of(mutant, original=True))


def put_in_from_environment() -> None:
    if VARIABLE in os.environ:
        put_in(None, Mutant(*json.loads(os.environ[VARIABLE])))


def _swap(mutant: Mutant, code: CodeType) -> int:
    importlib.import_module(mutant.module)
    gc.unfreeze()  # what is frozen, as pytest's process is (tests.conftest), is not among the objects
    alike = [each for each in gc.get_objects() if type(each) is FunctionType and _same_place(each.__code__, code)]
    for function in alike:
        function.__code__ = code
    _forget(mutant.module.partition(".")[0])
    return len(alike)


def _same_place(code: CodeType, other: CodeType) -> bool:
    return (
        code.co_qualname == other.co_qualname
        and code.co_filename == other.co_filename
        and code.co_firstlineno == other.co_firstlineno
        and code.co_freevars == other.co_freevars
    )


def _forget(package: str) -> None:
    """Empty the caches of all functions of a package."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and str(each.__module__).partition(".")[0] == package:
            each.cache_clear()
