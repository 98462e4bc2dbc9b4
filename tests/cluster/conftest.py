"""Two nodes for the tests of this folder, where the machine lets anybody make them."""

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.common.nodes import Cluster, NoNodes, two_nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes(tmp_path_factory.mktemp("nodes")))
        except NoNodes as none:
            pytest.skip(str(none))
        yield nodes
