"""What other people wrote for torch.distributed runs over our backend: PyTorch's own tests, and two trainers.

The packages are those of the extra `foreign`; what is not installed is not collected.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

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
    for backend in ("mpi4dl", "gloo"):
        # Gloo's own threads now and then abort a process that ends, which has stored all by then.
        done = mpirun(size, "-m", "tests.comm.foreign_bodies", backend, str(tmp_path), timeout=HANG_SECONDS)
        assert done.code == 0 or backend == "gloo", done.stderr
    for rank in range(size):
        ours, gloo = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("mpi4dl", "gloo"))
        failed = {name: text for name, text in ours.items() if gloo.get(name) == "passed" and text != "passed"}
        assert not failed, "\n".join(f"{name} on rank {rank}: {text}" for name, text in failed.items())
        assert sum(text == "passed" for text in ours.values()) > 50
