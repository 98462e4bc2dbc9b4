"""A rank that is killed, or leaves while others wait in a barrier, ends them; whoever is merely slow is left alone."""

import time

import pytest

from tests.pool.job import Finished, mpirun

PROGRAM = """
import os, signal, sys, time
from mpi4dl.comm import guard, world
from mpi4dl.comm.guard import Watchdog
comm = world()
comm.barrier()
sys.stdout.write(f"started {{time.time()}}\\n")
sys.stdout.flush()
def main():
{main}
guard.run(comm, main)
"""
SECONDS = 15.0  # at the most, on a busy machine; without the guard they wait for ever


def run(num_ranks: int, main: str) -> tuple[Finished, float]:
    """How a job ended, and how many seconds after all of its ranks had started."""
    text = PROGRAM.format(main="\n".join(f"    {line}" for line in main.strip().splitlines()))
    job = mpirun(num_ranks, "-c", text, timeout=60.0)
    ended = time.time()
    return job, ended - max(float(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("started "))


@pytest.mark.parametrize(
    ("num_ranks", "failure"),
    [
        (4, "os.kill(os.getpid(), signal.SIGKILL)"),
        (2, "raise KeyError('the failing line')"),
        (2, "sys.exit(3)"),
    ],
)
def test_ranks_that_wait_in_a_barrier_do_not_outlive_one_that_fails(num_ranks: int, failure: str) -> None:
    """In one of ours, which polls, or in one of MPI's own, which does not return to Python."""
    job, seconds = run(
        num_ranks, f"if comm.rank == 1:\n    {failure}\ncomm.mpi.Barrier() if comm.rank else comm.barrier()"
    )
    assert job.code != 0
    assert seconds < SECONDS
    assert job.stderr.count("the failing line") == ("KeyError" in failure)


def test_a_watchdog_that_is_fed_leaves_slow_ranks_alone() -> None:
    main = """
watchdog = Watchdog(2.0)
for step in range(6):
    time.sleep(0.4 * (comm.rank == step % 2))
    comm.barrier()
    watchdog.feed()
watchdog.stop()
"""
    job, seconds = run(2, main)
    assert (job.code, job.stderr) == (0, "")
    assert seconds > 2.0


def test_leaving_a_thread_by_sys_exit_ends_that_thread_alone() -> None:
    main = """
import threading
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
comm.barrier()
"""
    job, _ = run(2, main)
    assert (job.code, job.stderr) == (0, "")
