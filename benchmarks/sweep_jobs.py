"""One job of a sweep: started, waited for within its limit of time, and what came of it, an answer or a reason.

    driver (no MPI)   mpirun -n 4 python -m benchmarks.sweep_worker [====]
                                                                          mpirun -n 4 ... [== too long =|

A job that ends in any other way than by its answer leaves one line that says why; no other job knows of it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from benchmarks.turns import launcher

STOP_SECONDS = 15.0
KILLED = (9, -9, 137)
REFUSED = "mpi4dl: "
RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Refusal|Interrupt|NoRule)\b.*")


class Outcome(NamedTuple):
    """The job's answer, or why there is none."""

    answer: dict[str, Any] | None
    failure: str | None


def run_job(ranks: int, arguments: Sequence[str], seconds: float) -> Outcome:
    """Start so many ranks of `python arguments`, whose last line on standard output is an answer, as JSON."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        job = subprocess.Popen(
            [*launcher(ranks), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complained,
            start_new_session=True,
        )
        try:
            code = job.wait(seconds)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"it took longer than the limit of {seconds:g} s")
        finally:
            stop(job)
        said.seek(0), complained.seek(0)
        lines = said.read().splitlines()
        if code == 0 and lines:
            with suppress(ValueError):
                return Outcome(json.loads(lines[-1]), None)
        return Outcome(None, reason(code, complained.read()))


def stop(job: "subprocess.Popen[bytes]") -> None:
    """End a job that has not ended, and all of its ranks: asked first, as mpirun hands it on."""
    if job.poll() is None:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def reason(code: int, complained: str) -> str:
    """Why a job ended with this exit code, in one line of what it said: a refusal, or else the last exception."""
    lines = [" ".join(line.split()) for line in complained.splitlines()]
    refused = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
    raised = [line for line in lines if RAISED.match(line)]
    if refused:
        return refused[0]
    if raised:
        return raised[-1]
    if code == 0:
        return "it ended without an answer"
    return f"exit code {code}" + (": out of memory?" if code in KILLED else "")
