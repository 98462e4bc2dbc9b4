"""Which functions of mpi4dl each test calls, on any rank: so a mutant is shown to the tests that may notice it.

    MPI4DL_SEEN=seen pytest -p tools.nets.mutation.seen -n 2

Each test gets a line in a file of its worker: its name, its seconds, and the functions. Processes that a test starts
have the same variable in their environment, and write theirs when they end, into files that are named by the test.
"""

import atexit
import json
import os
import sys
import threading
import uuid
from hashlib import sha256
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.pool.zygote import AT_START

VARIABLE, TEST = "MPI4DL_SEEN", "PYTEST_CURRENT_TEST"
INSIDE = f"{os.sep}mpi4dl{os.sep}"

_seen: set[CodeType] = set()


def _called(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _seen.add(frame.f_code)


def watch(comm: Any = None) -> None:
    """From now on calls are seen in this process, and in threads that it starts. A body of the pool's ranks."""
    threading.setprofile(_called)
    sys.setprofile(_called)


def names(comm: Any = None) -> list[str]:
    """The functions that were called since the last time, as `path:qualified name`. A body of the pool's ranks."""
    seen = _seen.copy()  # these lines are called, too
    _seen.clear()
    found = {
        f"{INSIDE}{code.co_filename.rpartition(INSIDE)[2]}:{code.co_qualname.partition('.<locals>')[0]}"[1:]
        for code in seen
        if INSIDE in code.co_filename
    }
    return sorted(found)


def _folder_of(test: str) -> Path:
    """Where processes of this test write."""
    name = test.rpartition(" (")[0]
    return Path(os.environ[VARIABLE]) / sha256(name.encode()).hexdigest()[:20]


def watch_from_environment() -> None:
    """In a process that a test starts: write what was called when it ends."""
    if VARIABLE in os.environ and TEST in os.environ:
        folder = _folder_of(os.environ[TEST])
        folder.mkdir(parents=True, exist_ok=True)

        def write() -> None:
            sys.setprofile(None)
            (folder / f"{uuid.uuid4()}.json").write_text(json.dumps(names()))

        atexit.register(write)
        watch()


SECONDS = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ[VARIABLE] = str(Path(os.environ[VARIABLE]).absolute())
    os.environ[AT_START] = f"{__name__}:{watch_from_environment.__name__}"
    item.stash[SECONDS] = 0.0
    watch()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    item.stash[SECONDS] += call.duration


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    found = set(names())
    if isinstance(item, pytest.Function) and "ranks" in item.funcargs:  # it is not if the test was skipped
        ranks: Any = item.funcargs["ranks"]
        for pool in ranks.pools.values():
            if pool.running:
                found.update(*pool.run(pool.size, names, ()))
    for path in _folder_of(f"{item.nodeid} (call)").glob("*.json"):
        found.update(json.loads(path.read_text()))
    line = {"test": item.nodeid, "seconds": item.stash[SECONDS], "seen": sorted(found)}
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with (Path(os.environ[VARIABLE]) / f"{worker}.jsonl").open("a") as file:
        file.write(f"{json.dumps(line)}\n")


def pytest_sessionfinish() -> None:
    sys.setprofile(None)
