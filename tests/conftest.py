"""What all tests share: one thread of PyTorch per process, the pool of MPI ranks, and a run to compare others with."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool.ranks import Ranks

# A shell that starts tests in the background makes them ignore Ctrl-C, which some of them test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is slow, and that is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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
