"""A rank that fails ends the whole job, soon, with one traceback; ranks that agree to stop show none.

Without the guard every one of these jobs hangs, since the other ranks wait in MPI for the one that left.
"""

import signal
import time
from typing import NamedTuple

import pytest

from tests.pool.job import mpirun

# Importing torch on four ranks takes most of the time; what is tested is the time from the failure on.
PROGRAM = """
import sys, threading, time
import torch
from mpi4dl.comm import Refusal, guard, world
comm = world()
comm.barrier()
def main():
{main}
    comm.recv(torch.zeros(1), (comm.rank + 1) % comm.size)
sys.stdout.write(f"started {{time.time()}}\\n")
sys.stdout.flush()
{start}
"""
SECONDS = 15.0  # at the most, on a busy machine; without the guard they wait for ever


class Ended(NamedTuple):
    """How a job ended: its exit code, what it printed, and the seconds after its ranks had started."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def run(num_ranks: int, main: str, start: str = "main()") -> Ended:
    text = PROGRAM.format(main="\n".join(f"    {line}" for line in main.splitlines()), start=start)
    job = mpirun(num_ranks, "-c", text, timeout=60.0)
    ended = time.time()
    started = max(float(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("started "))
    return Ended(job.code, job.stdout, job.stderr, ended - started)


HOOKS, RUN = "main()", "guard.run(comm, main)"
TWICE = pytest.mark.parametrize(("num_ranks", "start"), [(2, HOOKS), (4, RUN)], ids=["2", "4-guard.run"])


@TWICE
def test_an_uncaught_exception_on_one_rank_ends_all(num_ranks: int, start: str) -> None:
    job = run(num_ranks, "if comm.rank == 1:\n    raise KeyError('the failing line')", start)
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1
    assert f"[rank 1 of {num_ranks}]" in job.stderr


@TWICE
def test_the_same_exception_on_all_ranks_is_shown_once(num_ranks: int, start: str) -> None:
    job = run(num_ranks, "raise KeyError('the failing line')", start)
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert job.stderr.count(f" of {num_ranks}] Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("num_ranks", "start", "leave"),
    [(2, HOOKS, "sys.exit(3)"), (4, RUN, "sys.exit(3)"), (2, RUN, "raise SystemExit(3)")],
)
def test_leaving_with_an_exit_code_on_one_rank_ends_all(num_ranks: int, start: str, leave: str) -> None:
    job = run(num_ranks, f"if comm.rank == 1:\n    {leave}", start)
    assert job.code in (3, signal.SIGKILL)  # the launcher reports whom it saw go first: that rank, or one it killed
    assert job.seconds < SECONDS
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("start", [HOOKS, RUN])
def test_leaving_with_a_message_on_one_rank_ends_all_and_shows_it(start: str) -> None:
    job = run(2, "if comm.rank == 1:\n    sys.exit('no more data')", start)
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.stderr.count("no more data") == 1


@TWICE
def test_an_exception_in_a_thread_of_one_rank_ends_all_whatever_other_threads_do(num_ranks: int, start: str) -> None:
    main = """
def work():
    time.sleep(0.1)
    raise KeyError('the failing line')
threading.Thread(target=time.sleep, args=(60,)).start()
if comm.rank == 0:
    threading.Thread(target=work).start()
"""
    job = run(num_ranks, main, start)
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert "in work" in job.stderr


@TWICE
def test_a_refusal_is_one_message_and_exit_code_2(num_ranks: int, start: str) -> None:
    main = """
threading.Thread(target=time.sleep, args=(60,)).start()
comm.agree('there is no such file' if comm.rank == 1 else None)
"""
    job = run(num_ranks, main, start)
    assert job.code == 2
    assert job.seconds < SECONDS
    assert job.stderr.count("there is no such file") == 1
    assert "mpi4dl: rank 1: there is no such file" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("ranks", ["1", "12"])
def test_a_refusal_that_some_ranks_raise_alone_still_ends_all_with_one_message(ranks: str) -> None:
    job = run(4, f"if str(comm.rank) in '{ranks}':\n    raise Refusal('only here')")
    assert job.code != 0
    assert job.seconds < SECONDS
    assert job.stderr.count("only here") == 1


def test_a_full_disk_on_one_rank_ends_all_with_one_message() -> None:
    job = run(2, "if comm.rank == 1:\n    open('/dev/full', 'wb', buffering=0).write(b'x')", RUN)
    assert job.code in (2, signal.SIGKILL)
    assert job.seconds < SECONDS
    assert job.stderr.count("mpi4dl: rank 1 cannot write: No space left on device: a file of this job\n") == 1
    assert "Traceback" not in job.stderr


def test_one_process_without_mpirun_keeps_its_ordinary_traceback_and_codes() -> None:
    assert mpirun(1, "-c", "from mpi4dl.comm import world; world(); raise SystemExit(3)").code == 3
    job = mpirun(1, "-c", "from mpi4dl.comm import world; world(); raise KeyError('the failing line')")
    assert job.code == 1
    assert job.stderr.startswith("Traceback (most recent call last)")
    assert job.stderr.count("KeyError: 'the failing line'") == 1


def test_a_job_that_succeeds_ends_with_code_0_and_says_nothing() -> None:
    program = "import sys; from mpi4dl.comm import world; world().barrier(); world().rank or sys.exit(0)"
    job = mpirun(2, "-c", program)
    assert (job.code, job.stdout, job.stderr) == (0, "", "")


def test_a_rank_that_never_answers_ends_the_job_with_the_stacks() -> None:
    main = """
guard.Watchdog(1.0)
def a_long_wait():
    if comm.rank == 1:
        time.sleep(60)
    comm.mpi.Barrier()
a_long_wait()
"""
    job = run(2, main)
    assert job.code != 0
    assert 0.5 < job.seconds < SECONDS + 1
    assert "Timeout (0:00:01)!" in job.stderr
    assert "in a_long_wait" in job.stderr


def test_a_watchdog_that_is_fed_or_stopped_or_off_lets_the_job_go_on() -> None:
    program = """
import time
from mpi4dl.comm.guard import Watchdog
watchdog = Watchdog(1.5)
for _ in range(9):
    time.sleep(0.2)
    watchdog.feed()
watchdog.stop()
Watchdog(0.3).stop()
time.sleep(0.5)
Watchdog(0)
time.sleep(0.1)
print("done")
"""
    job = mpirun(1, "-c", program)
    assert (job.code, job.stdout, job.stderr) == (0, "done\n", "")


def test_a_user_interrupt_is_no_traceback() -> None:
    job = mpirun(1, "-c", "from mpi4dl.comm import world; world(); raise KeyboardInterrupt")
    assert (job.code, job.stderr) == (130, "")
