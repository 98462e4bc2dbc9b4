"""The watchdog ends a job that comes no further, from its first steps to its last, and leaves slow ranks alone."""

import pytest

from tests.comm.endings import HOOKS, RUN, ended
from tests.pool.job import mpirun

TIME_IS_UP = "came no further for 1 s, and a job waits no longer than that (the hang timeout); where it was:\n"


def test_a_rank_that_never_answers_ends_the_job_with_the_stacks() -> None:
    main = """
watchdog = Watchdog(1.0)
def a_long_wait():
    time.sleep(1000) if comm.rank == 1 else comm.Barrier()
a_long_wait()
"""
    job = ended(2, main)
    assert job.code != 0
    assert f"mpi4dl: rank 0 of 2 {TIME_IS_UP}" in job.stderr or f"mpi4dl: rank 1 of 2 {TIME_IS_UP}" in job.stderr
    assert "in a_long_wait" in job.stderr


def test_a_command_is_watched_before_mpi_starts() -> None:
    """Rank 0 cannot say anything: it waits in MPI_Init, which keeps all threads of Python waiting too."""
    before = """failure.START_SECONDS = 1.0
    def a_slow_import():
        time.sleep(1000)
    class Finder:
        def find_spec(self, name, *more):
            if name == "mpi4py.MPI" and os.environ["PMI_RANK"] == "1":
                a_slow_import()
    sys.meta_path.insert(0, Finder())
"""
    job = ended(2, "pass", RUN, before=before, patience=1.0)
    assert job.code != 0
    assert job.stderr.startswith(f"mpi4dl: a rank {TIME_IS_UP}")
    assert "in a_slow_import" in job.stderr


@pytest.mark.parametrize("late", ["atexit.register(time.sleep, 1000)", "sys.last_words = Slow()"])
@pytest.mark.sample(1)
def test_a_command_is_watched_until_it_has_ended(late: str) -> None:
    """In what Python does at the end, before MPI shuts down and after."""
    main = f"""
import atexit
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1000)
if comm.rank == 1:
    {late}
"""
    job = ended(2, main, RUN, patience=1.0)
    assert job.code != 0
    assert TIME_IS_UP in job.stderr or "last_words" in late


@pytest.mark.exhaustive
def test_a_watchdog_that_is_fed_or_stopped_or_off_or_gone_lets_the_job_go_on() -> None:
    main = """
watchdog = Watchdog(3.0)
for step in range(8):
    time.sleep(0.5 * (comm.rank == step % 2))
    comm.Barrier()
    watchdog.feed()
watchdog.stop()
Watchdog(0.5)
Watchdog(0.5).stop()
time.sleep(2)
Watchdog(0)
time.sleep(0.1)
"""
    assert ended(2, main, HOOKS) == (0, "", "")


def test_what_keeps_python_from_running_is_ended_by_c() -> None:
    """Nothing of Python runs while a function of C keeps the interpreter's lock."""
    program = """
import ctypes
from mpi4dl.comm import watchdog
watchdog.GRACE_SECONDS = 0.5
watchdog = watchdog.Watchdog(0.5)
ctypes.PyDLL(None).sleep(1000)
"""
    job = mpirun(1, "-c", program, timeout=600.0)
    assert job.code == 1
    assert job.stderr.startswith("Timeout (0:00:01)!\n")


SOON = "watchdog.SILENT_SECONDS, watchdog.BEAT_SECONDS = 2.0, 0.4"


@pytest.mark.parametrize(("where", "named"), [("main", 1), ("end", 1), ("end", 0)])
def test_a_rank_that_no_longer_answers_ends_the_job(where: str, named: int) -> None:
    """Where others wait for it without a watchdog, and at the end."""
    main = f"""
Watchdog(1.0).stop()
if comm.rank == {named}:
    if "{where}" == "end":
        watchdog_thread().ended = True  # as if it had just come there
    os.kill(os.getpid(), signal.SIGSTOP)
if "{where}" == "main":
    wait(comm.Barrier)
"""
    job = ended(2, main, RUN, before=SOON)
    assert job.code != 0
    said = f"mpi4dl: rank {named} of 2 has given no sign of life for 2 s: it was stopped by a signal, or its machine"
    assert job.stderr.count(said) == 1


def test_ranks_that_are_slow_or_were_stopped_together_are_left_alone() -> None:
    """Also one that was stopped while a watchdog looks after the other."""
    main = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, since Python 3.12
def stop_for_a_while(ranks):
    child = os.fork() if comm.rank == 0 else None
    if child == 0:
        for number in signal.SIGSTOP, signal.SIGCONT:
            for stopped in ranks:
                os.kill(stopped, number)
            time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if child is not None:
        os.waitpid(child, 0)
    wait(comm.Barrier)
Watchdog(1.0).stop()
time.sleep(3 * comm.rank)
ranks = comm.allgather(os.getpid())
stop_for_a_while(ranks)
dog = Watchdog(60.0)
stop_for_a_while(ranks[1:])
dog.stop()
"""
    assert ended(2, main, RUN, before=SOON) == (0, "", "")
