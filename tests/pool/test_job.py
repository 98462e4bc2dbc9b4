"""A fresh job returns its exit code and what it printed; one that hangs is killed."""

import pytest

from tests.pool.job import mpirun

PROGRAM = """
import sys
from mpi4py import MPI
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} {sys.argv[1:]}\\n")
sys.stderr.write("complaint\\n")
"""


def test_a_job_returns_its_code_and_its_output() -> None:
    job = mpirun(2, "-c", PROGRAM, "a", "b")
    assert sorted(job.stdout.splitlines()) == ["rank 0 ['a', 'b']", "rank 1 ['a', 'b']"]
    assert (job.code, job.stderr) == (0, "complaint\n" * 2)
    assert mpirun(1, "-c", "raise SystemExit(3)").code == 3


@pytest.mark.exhaustive
def test_a_job_that_hangs_is_killed_and_shows_what_it_printed() -> None:
    said = ""
    for seconds in (4.0, 16.0, 64.0):  # a busy machine takes longer to begin
        if "before" not in said:
            with pytest.raises(TimeoutError, match=f"did not end in {seconds} s") as caught:
                mpirun(2, "-c", "import time; print('before', flush=True); time.sleep(600)", timeout=seconds)
            said = str(caught.value).partition("it had printed")[2]
    assert "before" in said
