"""What other people wrote for torch.distributed runs over our backend: PyTorch's own tests, and two trainers.

The packages are those of the extra `foreign`; what is not installed is not collected.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.comm.foreign_bodies import PASSED, Results
from tests.comm.foreign_trainers import TRAINERS
from tests.pool.job import mpirun

pytestmark = pytest.mark.exhaustive
HANG_SECONDS = 7200.0
PYTORCHS = ["distributed_test"] if find_spec("expecttest") else []


@pytest.mark.parametrize("name", [name for name in TRAINERS if find_spec(name)])
def test_a_trainer_gives_the_weights_of_plain_pytorch(name: str) -> None:
    done = mpirun(2, "-m", "tests.comm.foreign_trainers", name, timeout=HANG_SECONDS)
    assert done.code == 0, done.stderr
    assert done.stdout.count("as plain PyTorch") == 2


@pytest.mark.parametrize("_", PYTORCHS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_bodies_of_pytorchs_tests_pass_where_they_pass_over_gloo(_: str, size: int, tmp_path: Path) -> None:
    ours, gloo = (run_bodies(backend, size, tmp_path) for backend in ("mpi4dl", "gloo"))
    for rank in range(size):
        expected = {name for name, result in gloo[rank].items() if result == PASSED}
        failed = {name: result for name, result in ours[rank].items() if name in expected and result != PASSED}
        assert not failed, "\n".join(f"{name} on rank {rank}: {result}" for name, result in failed.items())
        assert len(expected) > 50


def run_bodies(backend: str, size: int, folder: Path) -> list[dict[str, str]]:
    """What became of each body, by rank: each that fails ends its job, and the next job goes on after it."""
    results: list[dict[str, str]] = []
    while True:
        done = mpirun(size, "-m", "tests.comm.foreign_bodies", backend, str(folder), timeout=HANG_SECONDS)
        before, results = results, [Results(folder / f"{backend}-{rank}.json").by_name for rank in range(size)]
        if done.code == 0:
            return results
        assert results != before, done.stderr
