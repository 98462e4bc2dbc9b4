"""One job of a sweep: `mpirun -n 4 python -m mpi4dl.sweeps.job HOW -- FLAGS` trains by a plan on one batch.

FLAGS are those of mpi4dl train. HOW are the numbers of steps and the limit of memory. The last line of output is the
answer: seconds, CPU seconds, bytes. Imports, building the model, reading images and the first steps do not count.

The sweep waits for each job within a limit of time. A job that fails leaves one line with the reason.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4dl._wording import to_install
from mpi4dl.comm import failure

if __name__ == "__main__":
    failure.arm()  # before anything else that may fail on one rank alone

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.sweeps.meter import Meter

STOP_SECONDS = 15.0
KILLED = (9, -9, 137)
REFUSED = "mpi4dl: "
RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Refusal|Interrupt|NoRule)\b.*")


class Outcome(NamedTuple):
    """The job's answer, or why there is none."""

    answer: dict[str, Any] | None
    failure: str | None


def launcher(ranks: int) -> list[str]:
    """The start of a command line that runs a program on so many ranks."""
    mpirun = Path(sys.executable).with_name("mpirun")
    found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if found is None:
        raise SystemExit(f"mpirun is not on the PATH; run {to_install('mpich')}")
    return [found, "-n", str(ranks)]


def run_job(ranks: int, arguments: Sequence[str], seconds: float) -> Outcome:
    """Start so many ranks of `python arguments`, whose last line on standard output is an answer, as JSON."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        job = subprocess.Popen(
            [*launcher(ranks), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = job.wait(seconds)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"it took longer than the limit of {seconds:g} s")
        finally:
            stop(job)
        out.seek(0), errors.seek(0)
        lines = out.read().splitlines()
        if code == 0 and lines:
            with suppress(ValueError):
                return Outcome(json.loads(lines[-1]), None)
        return Outcome(None, reason(code, errors.read()))


def stop(job: "subprocess.Popen[bytes]") -> None:
    """End a job and all of its ranks: by SIGTERM first, which mpirun hands on."""
    if job.poll() is None:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def reason(code: int, errors: str) -> str:
    """Why a job ended with this exit code, in one line of its errors: a refusal, or else the last exception."""
    lines = [" ".join(line.split()) for line in errors.splitlines()]
    refused = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
    raised = [line for line in lines if RAISED.match(line)]
    if refused:
        return refused[0]
    if raised:
        return raised[-1]
    if code == 0:
        return "it ended without an answer"
    return f"exit code {code}" + (": out of memory?" if code in KILLED else "")


def main() -> None:
    """The job's side: train by the command line, and print the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--memory", type=int, help="bytes that a rank may use above its imports")
    where = sys.argv.index("--")
    options, flags = parser.parse_args(sys.argv[1:where]), sys.argv[where + 1 :]

    def begin() -> None:
        from mpi4dl._memory import within_limits
        from mpi4dl.comm import world

        comm = world()
        within_limits(lambda: train(comm, options, flags), comm.rank)

    failure.run(begin, 0.0)  # the sweep has its own limit of time


def train(comm: "Communicator", options: argparse.Namespace, flags: list[str]) -> None:
    """Train on the first batch, built as the training command builds it, and print the answer. Collective."""
    import torch

    from mpi4dl._memory import ActivationMeter
    from mpi4dl.options.config import Config
    from mpi4dl.options.config import parse as parse_training
    from mpi4dl.options.declare import speaking, spelling
    from mpi4dl.sweeps.meter import Meter
    from mpi4dl.training.setup import set_up

    spell = spelling(Config)
    with speaking(spell):
        with comm.together((ValueError,)):
            config = parse_training(flags)
            meter = Meter(comm.node.device(config.parallel.device), comm)
        setup = set_up(config, comm, spell, flags)
        engine, size = setup.engine, config.data.image_size
        batch = next(iter(setup.training.epoch(0, 0)))

        def step() -> None:
            engine.step(batch.tiles, batch.labels, size)

        with setup.assembly.running(setup.num_outputs, setup.channels):
            for _ in range(options.warm_up):
                step()
                require_room(meter, options.memory)
            found = meter.measure(step, options.steps)
            require_room(meter, options.memory)
            kept = ActivationMeter()
            with kept.counting():  # which takes time, and is not measured
                step()
    setup.patience.stop()
    found["activation_bytes_of_ranks"] = meter.of_ranks(kept.peak_bytes)
    found["images"] = len(batch.labels) * options.steps
    found["threads_of_a_rank"] = torch.get_num_threads()
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def require_room(meter: "Meter", most_bytes: int | None) -> None:
    """Raise Refusal on all ranks if one of them has used more than `most_bytes`. Collective."""
    from mpi4dl.comm import Refusal

    peaks = meter.of_ranks(meter.memory.peak_bytes())
    if most_bytes is not None and max(peaks) > most_bytes:
        rank, shown = peaks.index(max(peaks)), f"{max(peaks) / 2**20:.0f} MiB"
        raise Refusal(f"out of memory: rank {rank} takes {shown}, and may have {most_bytes / 2**20:.0f} MiB (--memory)")


if __name__ == "__main__":
    main()
