"""Plans measured by short trainings: `mpi4dl plan --measure` starts `mpirun` with `mpi4dl.train` for each plan.

    turn 1   [plan 1][plan 2][plan 3: out of memory][plan 4]      other load on the machine affects all plans
    turn 2   [plan 1][plan 2][plan 4]

A record in the folder of the measurements holds a plan's command, its estimate, and the medians of each turn, or why it
failed. A command with enough turns is not run again. The first step of a training does not count.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mpi4dl._files import make_folder, read_regular, write_durably
from mpi4dl._numbers import parse_json
from mpi4dl._wording import Tell, counted, to_install
from mpi4dl.estimate.plan_options import Measuring
from mpi4dl.options.config import ConfigError, parse, shared_options
from mpi4dl.options.declare import flags_for
from mpi4dl.results.formats import table
from mpi4dl.results.names import METRICS

if TYPE_CHECKING:
    from mpi4dl.estimate.plan_estimate import PlanEstimate

# A training with these options validates nothing and writes little. None of them changes a step's time or memory.
SHORT: dict[str, Any] = {
    "eval_every": None,
    "monitor": None,
    "patience": None,
    "save_every": "none",
    "resume": "none",
    "callbacks": (),
    "tensorboard": False,
    "log_interval": 1,
    "scheduler": "",
    "scheduler_options": {},
    "lr_schedule": "constant",
    "warmup": 0,
    "dry_run": False,
}
STOP_SECONDS = 15.0
KILLED = (9, -9, 137)
REFUSED, PROGRESS = "mpi4dl: ", re.compile(r".*, \d+ s")
RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Refusal|Interrupt|NoRule)\b.*")


@dataclass
class Record:
    """A plan with the command that trains by it, its estimate, the medians of each turn, and the reason if it failed.

    `name` is that of its file: other commands have another one, and so have other options in the file of a `--config`.
    """

    name: str
    plan: str
    ranks: int
    command: list[str]
    estimated_samples_per_second: float
    estimated_bytes: int
    turns: list[dict[str, float]] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def of(cls, estimate: "PlanEstimate", flags: Sequence[str], how: Measuring) -> "Record":
        """The record of a training by these flags, with the turns that are in its file."""
        config, num_steps, ranks = parse(flags), how.measure_steps + 1, estimate.plan.num_ranks
        short = flags_for(config, {**SHORT, "epochs": num_steps, "max_steps": num_steps})
        command = ["mpirun", "-n", str(ranks), "python", "-m", "mpi4dl.train", *flags, *short]
        name = hashlib.sha256(json.dumps([command, shared_options(config)]).encode()).hexdigest()[:16]
        found = cls(name, str(estimate), ranks, command, estimate.samples_per_second, estimate.num_bytes)
        with suppress(OSError, ValueError, TypeError, KeyError):
            found.turns = [{**turn} for turn in parse_json(read_regular(found.path(how)))["turns"]]
        return found

    def path(self, how: Measuring) -> Path:
        return Path(how.measure_folder, f"{self.name}.json")

    def train(self, how: Measuring) -> None:
        """Train for a turn, and save what it takes, or why it failed."""
        with tempfile.TemporaryDirectory(dir=how.measure_folder) as folder:
            arguments = [*self.command[4:], "--run-folder", f"{folder}/run"]
            self.failure = run_job(self.ranks, arguments, how.measure_limit)
            if self.failure is None:
                self.turns.append(medians(Path(folder, "run", METRICS), parse(arguments[2:]).data.context))
        write_durably(self.path(how), (json.dumps(asdict(self), indent=2) + "\n").encode())

    def median(self, name: str) -> float:
        """The median over the turns; 0 without any."""
        return median([turn[name] for turn in self.turns] or [0.0])

    def row(self) -> dict[str, Any]:
        found = {name: self.median(name) for name in self.turns[0]} if self.turns else {}
        told = {"turns": len(self.turns), "failure": self.failure, "command": shlex.join(self.command)}
        return {**asdict(self), **found, **told}


COLUMNS = (
    *("plan", "ranks", "samples_per_second", "estimated_samples_per_second", "peak_bytes", "estimated_bytes"),
    *("data_wait", "comm_wait", "turns", "failure", "command"),
)


def medians(metrics: Path, context: int) -> dict[str, float]:
    """Of all steps that a run reported but the first: the medians, and the memory. A text has `context` tokens."""
    steps = [parse_json(line) for line in read_regular(metrics).splitlines()][1:]
    speeds = [step.get("images_per_second") or step["tokens_per_second"] / context for step in steps]
    waits = {name: median(step[name] for step in steps) for name in ("data_wait", "comm_wait")}
    return {"samples_per_second": median(speeds), "peak_bytes": steps[-1]["peak_memory_bytes"], **waits}


def measured(
    plans: Sequence["PlanEstimate"], flags: Sequence[str], how: Measuring, tell: Tell, searched: bool = True
) -> list["PlanEstimate"]:
    """The plans, of which those that `how` names are measured. Raises ConfigError.

    `flags` are those of the command that are for a training. If no plan is `searched`, they describe the only plan.
    """
    import torch

    from mpi4dl.estimate.plan_estimate import Measurement

    asked, found = how.measure or (), [*plans]
    numbers = asked if len(asked) > 1 else range(1, min(*asked, len(plans)) + 1) if asked else ()
    if max(numbers, default=0) > len(plans):
        raise ConfigError(f"--measure {max(numbers)}: the search found {counted(len(plans), 'plan')} that fit")
    if not numbers:
        return found
    launcher(1)
    torch.cuda.empty_cache()  # of what was timed here
    make_folder(Path(how.measure_folder))
    records = {n: Record.of(plans[n - 1], plans[n - 1].flags(flags) if searched else flags, how) for n in numbers}
    todo = [each for turn in range(how.measure_turns) for each in records.values() if len(each.turns) <= turn]
    for number, each in enumerate(todo):
        tell(f"trainings that are measured ({each.plan})", number, len(todo))
        if each.failure is None:
            each.train(how)
    for n, each in records.items():
        speed, num_bytes = each.median("samples_per_second"), int(each.median("peak_bytes"))
        found[n - 1] = plans[n - 1]._replace(measured=Measurement(speed, num_bytes, each.failure))
    publish(Path(how.measure_folder))
    return found


def publish(folder: Path) -> None:
    rows = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            rows.append(Record(**parse_json(read_regular(path))).row())
    rows.sort(key=lambda row: -row.get("samples_per_second", 0.0))
    write_durably(folder / "plans.csv", table(COLUMNS, rows))


def launcher(ranks: int) -> list[str]:
    """The start of a command line that runs a program on so many ranks. Raises ConfigError without MPI."""
    mpirun = Path(sys.executable).with_name("mpirun")
    found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(f"mpirun is not on the PATH; run {to_install('mpich')}")
    return [found, "-n", str(ranks)]


def run_job(ranks: int, arguments: Sequence[str], seconds: float) -> str | None:
    """Run so many ranks of `python arguments`; why it failed, in one line, or None."""
    with tempfile.TemporaryFile("w+") as errors:
        job = subprocess.Popen(
            [*launcher(ranks), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = job.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it took longer than the limit of {seconds:g} s"
        finally:
            stop(job)
        errors.seek(0)
        return reason(code, errors.read()) if code else None


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
    refused = [line for line in lines if line.startswith(REFUSED) and not PROGRESS.fullmatch(line)]
    raised = [line for line in lines if RAISED.match(line)]
    if refused:
        return refused[0].removeprefix(REFUSED)
    if raised:
        return raised[-1]
    return f"exit code {code}" + (": out of memory?" if code in KILLED else "")
