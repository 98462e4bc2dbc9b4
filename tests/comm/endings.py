"""Programs for tests of how a job ends. They do without torch, which takes seconds to import, on every rank."""

from typing import NamedTuple

from tests.pool.job import mpirun

PROGRAM = """
import os, signal, sys, threading, time, types
from mpi4dl.comm import watchdog, failure
from mpi4dl.comm import Refusal
from mpi4dl.comm.watchdog import Watchdog, watchdog_thread
watchdog.LAST_WORDS_SECONDS = 5.0
watchdog.STUCK_SECONDS, watchdog.LOOK_SECONDS = 0.5, 0.2
sys.modules["mpi4dl.comm.communicator"] = types.SimpleNamespace(world=lambda: comm)
def wait(step):
    with watchdog_thread().waits:
        step()
def wait_for_next():
    wait(lambda: comm.recv(source=(comm.rank + 1) % comm.size))
def main(*ignored):
{main}
if "{how}" == "run":
    {before}
    comm = types.SimpleNamespace(rank=int(os.environ.get("PMI_RANK", 0)))
    def started(*ignored):
        global comm
        failure.start()
        from mpi4py.MPI import COMM_WORLD as comm
        main()
    failure.run(started, {patience})
else:
    failure.start()
    from mpi4py.MPI import COMM_WORLD as comm
    main()
{after}
"""
HOOKS, RUN = "hooks", "run"  # an own program, whose world() puts the guard there, and a command
HANG_SECONDS = 600.0


class Ended(NamedTuple):
    """How a job ended: its exit code, and what it printed, without the launcher's own lines."""

    code: int
    stdout: str
    stderr: str


def ended(
    num_ranks: int, main: str, how: str = HOOKS, before: str = "pass", after: str = "", patience: float = 600.0
) -> Ended:
    """Run `main` on each rank; `before` it starts MPI, `after` it has returned; `patience` is a command's."""
    indented = "\n".join(f"    {line}" for line in main.strip().splitlines())
    text = PROGRAM.format(main=indented, how=how, before=before, after=after, patience=patience)
    job = mpirun(num_ranks, "-c", text, timeout=HANG_SECONDS)
    said = [line for line in job.stderr.splitlines(keepends=True) if not line.startswith("Abort(")]
    return Ended(job.code, job.stdout, "".join(said))
