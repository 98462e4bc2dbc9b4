"""A run to serve, and a server of it that the short tests share."""

from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM

import pytest

from tests.pool.ranks import Ranks
from tests.text.serving.command import Server, make_run, server


@pytest.fixture(scope="session")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(ranks, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def shared(run: Path) -> Iterator[Server]:
    """One rank that serves. It ends well when it is told to, and has lost nothing of what it held."""
    with server(1, run, "--max-queue", "200") as one:
        yield one
        assert one.metrics()["mpi4dl_pages_used"] == 0
        one.job.send_signal(SIGTERM)
        assert one.ended() == 0
    assert one.complained == ""
    assert "stopping by SIGTERM: no new requests" in one.said.splitlines()
