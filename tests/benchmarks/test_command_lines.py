"""The command lines of the benchmarks: help comes at once."""

import subprocess
import sys

import pytest

from tests.pool.zygote import ROOT

BENCHMARKS = (
    *(
        "allreduce",
        "context",
        "data_parallel",
        "generate",
        "halo",
        "operators",
        "peers",
        "spatial",
        "stages",
        "tensor_parallel",
    ),
    *("waiting", "zero"),
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_help_starts_neither_mpi_nor_torch(name: str) -> None:
    program = f"import sys, benchmarks.{name}; print(sorted({{'mpi4py', 'torch', 'matplotlib'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")
