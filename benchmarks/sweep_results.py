"""What a sweep has found so far: plans with their turns or why they failed, in a file that it goes on from."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import environment, save_json, spread
from benchmarks.sweep_jobs import Outcome
from benchmarks.sweep_options import Space, Sweep, decided_flags
from benchmarks.turns import median

if TYPE_CHECKING:
    from mpi4dl.estimate.plan_estimate import PlanEstimate
    from mpi4dl.parallel.plan import Plan

MEASURED = ("images_per_second", "images_per_second_min", "images_per_second_max", "cpu_seconds_per_image")
MEASURED += ("work_seconds_per_image", "idle_share", "peak_bytes", "activation_bytes", "threads_of_a_rank")


@dataclass
class Tried:
    """A plan: the flags that it is trained by, what is foreseen of it, each turn's answer, and why it failed if so."""

    plan: str
    ranks: int
    flags: list[str]
    predicted: dict[str, float] | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def by(cls, plan: "Plan", outlook: "PlanEstimate | None") -> "Tried":
        from mpi4dl.estimate.plan_estimate import plan_flags

        flags = [word for flag in plan_flags(plan).items() for word in flag]
        if outlook is None:
            return cls(plan.describe(), plan.num_ranks, flags)
        predicted = {"images_per_second": outlook.samples_per_second, "peak_bytes": outlook.num_bytes}
        return cls(str(outlook), plan.num_ranks, [*flags, *outlook.saving], predicted)

    @property
    def key(self) -> str:
        return shlex.join(self.flags)

    @property
    def measured(self) -> bool:
        return bool(self.turns) and self.failure is None

    def take(self, outcome: Outcome) -> None:
        if outcome.answer is None:
            self.failure = outcome.failure
        else:
            self.turns.append(outcome.answer)

    def row(self, training: tuple[str, ...]) -> dict[str, Any]:
        """Medians over the turns, the forecast, and the command that trains so; None where there is no such number."""
        parts = dict(zip(self.flags[::2], self.flags[1::2], strict=False))
        start = ["mpirun", "-n", str(self.ranks), "python", "-m", "mpi4dl.train"]
        predicted = self.predicted or {}
        return {
            "plan": self.plan,
            "ranks": self.ranks,
            **{name: parts[f"--{name}"] for name in vars(Space)["__dataclass_fields__"] if f"--{name}" in parts},
            "tiles": parts["--tiles"],
            "schedule": parts["--schedule"],
            **(self._medians() if self.measured else dict.fromkeys(MEASURED)),
            "predicted_images_per_second": predicted.get("images_per_second"),
            "predicted_peak_bytes": predicted.get("peak_bytes"),
            "turns": len(self.turns),
            "failure": self.failure,
            "command": shlex.join([*start, *training, *self.flags]),
        }

    def _medians(self) -> dict[str, float]:
        def of(key: str) -> list[float]:
            return [turn[key] / turn["images"] for turn in self.turns]

        idle = [turn["idle_seconds"] / (turn["seconds"] * self.ranks) for turn in self.turns]
        return {
            **spread("images_per_second", [turn["images"] / turn["seconds"] for turn in self.turns]),
            "cpu_seconds_per_image": median(of("cpu_seconds")),
            "work_seconds_per_image": median(of("work_seconds")),
            "idle_share": median(idle),
            "peak_bytes": median([turn["peak_bytes"] for turn in self.turns]),
            "activation_bytes": median([max(turn["activation_bytes_of_ranks"]) for turn in self.turns]),
            "threads_of_a_rank": self.turns[-1]["threads_of_a_rank"],
        }


class Results:
    """The plans of a sweep, in the file of its name; `asked_before` says that it was begun by the same command."""

    def __init__(self, sweep: Sweep, cores: int) -> None:
        self.path = Path(f"{sweep.out}.json")
        self.cores = cores
        self.asked: dict[str, Any] = json.loads(json.dumps({"space": asdict(sweep.space), "best": sweep.best}))
        self.settings = settings_of(sweep, cores)
        self.tried: list[Tried] = []
        self.asked_before = False

    @property
    def known(self) -> dict[str, Tried]:
        return {each.key: each for each in self.tried}

    def take_up(self) -> None:
        """Read what there is. Raises ValueError if that was measured otherwise, or is no such file."""
        if not self.path.exists():
            return
        try:
            there = json.loads(self.path.read_text())
            before, found = there["results"]["settings"] | there["environment"], there["results"]
            self.tried = [Tried(**each) for each in found["plans"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no file of a sweep: choose another --out") from None
        before = training_options(()) | before  # options that are new since then were what they are by default
        for name, value in (self.settings | environment()).items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.path} was measured with {name} {before.get(name)}, and this is {value}: numbers of both "
                    "are not to be compared, so choose another --out"
                )
        self.asked_before = found["asked"] == self.asked

    def add(self, plans: list[Tried]) -> None:
        known = self.known
        self.tried += [each for each in plans if each.key not in known]
        self.save()

    def save(self) -> None:
        what = {"settings": self.settings, "asked": self.asked, "plans": [asdict(each) for each in self.tried]}
        save_json(self.path, what)

    def rows(self, training: tuple[str, ...]) -> list[dict[str, Any]]:
        """All plans, the fastest first and those that failed last, numbered; and whether one is on the front."""
        rows = [each.row(training) for each in self.tried]
        rows.sort(key=lambda row: (row["images_per_second"] is None, -(row["images_per_second"] or 0.0)))
        best = front(rows)
        return [
            {"number": number, **row, "on_front": any(row is each for each in best)}
            for number, row in enumerate(rows, 1)
        ]


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plans of which no other one is as fast and as small, and better in one of both (Pareto)."""
    there = [row for row in rows if row["images_per_second"] is not None]

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        a = one["images_per_second"], -one["peak_bytes"]
        b = other["images_per_second"], -other["peak_bytes"]
        return a != b and a[0] >= b[0] and a[1] >= b[1]

    return [row for row in there if not any(beats(other, row) for other in there)]


def settings_of(sweep: Sweep, cores: int) -> dict[str, Any]:
    """What measurements depend on beside their plans: the options of the training, and how it was measured."""
    plan = {*decided_flags(), *(f"--{name}" for name in vars(sweep.space))}
    training = {flag: value for flag, value in training_options(sweep.training).items() if flag not in plan}
    how = {"--steps": sweep.steps, "--warm-up": sweep.warm_up, "--memory": sweep.memory, "--cores": cores}
    return {**training, **how, "LD_PRELOAD": os.environ.get("LD_PRELOAD")}


def training_options(flags: Sequence[str]) -> dict[str, str]:
    """Every option of a training by these flags, by its flag."""
    from mpi4dl.options.config import parse, shared_options

    return {f"--{name.replace('_', '-')}": value for name, value in shared_options(parse(flags)).items()}
