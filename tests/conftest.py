"""What all tests share: one thread of PyTorch per process, and the pool of MPI ranks."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()
