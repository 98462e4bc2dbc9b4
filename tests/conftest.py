"""What all tests share: one thread of PyTorch per process, the pool of MPI ranks, and a run to compare others with."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is timed here is remembered for this run alone, so that all its trainings cut models alike.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mpi4dl-tests-")

from tests.pool.ranks import Ranks

# A shell that starts tests in the background makes them ignore Ctrl-C, which some of them test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is slow, and that is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _no_cache_left() -> Iterator[None]:
    folder = os.environ["XDG_CACHE_HOME"]
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def uninterrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of tests.interrupted that went from its beginning to its end."""
    from mpi4dl.train import train
    from tests.interrupted import flags_of

    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    ranks(2).run(train, flags_of(folder))
    return folder
