"""A fresh MPI job as a subprocess, for tests of how jobs start and end; `ranks` is faster for all else."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.pool.zygote import ROOT, launcher, python

PATIENCE_SECONDS = 600.0  # a job that has not ended by then hangs, however busy the machine


class Finished(NamedTuple):
    """How a job ended, what it printed, and how long it took."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def start(command: Sequence[str], folder: Path = ROOT) -> subprocess.Popen[str]:
    """A job in a session of its own, in `folder`, whose ranks have one thread each and find this project.

    Their output is buffered, whatever the environment says: a line that is printed in several writes can be torn by
    another rank's.
    """
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**buffered, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def mpirun(
    num_ranks: int,
    *arguments: str,
    timeout: float = PATIENCE_SECONDS,
    sends: tuple[str, signal.Signals] | None = None,
    folder: Path = ROOT,
) -> Finished:
    """Run `python *arguments` on ranks: `mpirun(2, "-c", program)`, `mpirun(4, "-m", "mpi4dl.train", "--help")`.

    They start in `folder`. With `sends`, mpirun gets a signal when a line that begins like this has been printed.

    Raises:
        TimeoutError: the job did not end in time. It was killed; the message holds what it had printed.
    """
    command = [launcher(), "-n", str(num_ranks), python(), *arguments]
    begin = time.monotonic()
    job = start(command, folder)
    printed = ""
    while sends is not None and job.stdout is not None and (line := job.stdout.readline()):
        printed += line
        if line.startswith(sends[0]):
            job.send_signal(sends[1])
            break
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=20)
        raise TimeoutError(
            f"{command} did not end in {timeout} s; it had printed:\n{printed}{stdout}\n{stderr}"
        ) from None
    return Finished(job.returncode, printed + stdout, stderr, time.monotonic() - begin)
