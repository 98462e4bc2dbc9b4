"""What all tests share: one thread of PyTorch per process, the pool of MPI ranks, and a run to compare others with."""

import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is timed here is remembered for this run alone, so that all its trainings cut models alike.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mpi4dl-tests-")
os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"]

from tests.pool import zygote
from tests.pool.ranks import Ranks

for name in {"tests.support", "tests.parallel", "tools.nets"} - sys.modules.keys():
    pytest.register_assert_rewrite(name)  # helpers that assert show values, too
zygote.keep_bytecode()
gc.disable()  # until all tests are collected
# A shell that starts tests in the background makes them ignore Ctrl-C, which some of them test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is slow, and that is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers of pytest-xdist fork ranks from the same two processes, and find the bytecode that they leave."""
    if getattr(config.option, "numprocesses", None) and zygote.SHARED not in os.environ:
        os.environ[zygote.SHARED] = zygote.python()
        for variable in ({}, {"PMI_RANK": "1"}):
            subprocess.run([zygote.python(), "-c", "pass"], env={**os.environ, **variable}, check=True)


def pytest_collection_finish() -> None:
    """What is there by now stays until the end: nobody need look through it for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(zygote.GARBAGE)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as exhaustive all cases of a test that `sample(n)` leaves out. The n others lie evenly in their list."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        assert " at 0x" not in item.nodeid, f"{item.nodeid} has an address, and so another name in each worker"
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("exhaustive") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("sample")
        assert marker is not None
        number = min(marker.args[0], len(found))
        kept = {(2 * i + 1) * len(found) // (2 * number) for i in range(number)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker("exhaustive")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End what is printed of a failure with the command that repeats it."""
    report = yield
    if report.failed:
        marked = " -m exhaustive" if item.get_closest_marker("exhaustive") else ""
        report.sections.append(("again", f"python -m pytest{marked} {shlex.quote(item.nodeid)}"))
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_cache_left() -> Iterator[None]:
    folder = os.environ["XDG_CACHE_HOME"]
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A run that is stopped within a test leaves signals ignored, also for the processes of later tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def uninterrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of tests.support.interrupted that went from its beginning to its end."""
    from mpi4dl.train import train
    from tests.support.interrupted import flags_of

    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    ranks(2).run(train, flags_of(folder))
    return folder
