"""Two nodes for the tests of this folder, where the machine lets anybody make them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.nodes import Cluster, NoNodes, two_nodes


def nodes_or_skip(folder: Path, megabytes: float | None = None) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes(folder, megabytes))
        except NoNodes as none:
            pytest.skip(str(none))
        yield nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from nodes_or_skip(tmp_path_factory.mktemp("nodes"))


@pytest.fixture
def slow_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """With 20 MB/s between the nodes."""
    yield from nodes_or_skip(tmp_path, megabytes=20.0)
