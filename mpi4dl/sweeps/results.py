"""Results of a sweep: plans with their turns or their failures, in a file that a sweep continues, as table and CSV."""

import csv
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mpi4dl._files import write_durably
from mpi4dl._wording import aligned
from mpi4dl.sweeps.job import Outcome
from mpi4dl.sweeps.machine import Conditions, environment
from mpi4dl.sweeps.space import Space, Sweep, decided_flags

if TYPE_CHECKING:
    from mpi4dl.estimate.plan_estimate import PlanEstimate
    from mpi4dl.parallel.plan import Plan

MIB = 2**20
MEASURED = (  # the numbers of a row that are None if the plan failed
    *("images_per_second", "images_per_second_min", "images_per_second_max", "cpu_seconds_per_image"),
    *("work_seconds_per_image", "idle_share", "peak_bytes", "activation_bytes", "threads_of_a_rank"),
)
LONGEST = 110  # characters of a reason in a table


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median of values as `name`, and their ends as `name`_min and `name`_max."""
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write results with the environment. An old file stays whole until the new one replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, (json.dumps({"environment": environment(), **content}, indent=2) + "\n").encode())


@dataclass
class Tried:
    """A plan: its flags for the training, its estimate, the answer of each turn, and the reason if it failed."""

    plan: str
    ranks: int
    flags: list[str]
    predicted: dict[str, float] | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def by(cls, plan: "Plan", estimate: "PlanEstimate | None") -> "Tried":
        from mpi4dl.estimate.plan_estimate import plan_flags

        flags = [word for flag in plan_flags(plan).items() for word in flag]
        if estimate is None:
            return cls(plan.describe(), plan.num_ranks, flags)
        predicted = {"images_per_second": estimate.samples_per_second, "peak_bytes": estimate.num_bytes}
        return cls(str(estimate), plan.num_ranks, [*flags, *estimate.saving], predicted)

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
        """Medians over the turns, the estimate, and the command that trains so; None where there is no number."""
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
        def of_an_image(key: str) -> float:
            return median([turn[key] / turn["images"] for turn in self.turns])

        idle = [turn["idle_seconds"] / (turn["seconds"] * self.ranks) for turn in self.turns]
        return {
            **spread("images_per_second", [turn["images"] / turn["seconds"] for turn in self.turns]),
            "cpu_seconds_per_image": of_an_image("cpu_seconds"),
            "work_seconds_per_image": of_an_image("work_seconds"),
            "idle_share": median(idle),
            "peak_bytes": median([turn["peak_bytes"] for turn in self.turns]),
            "activation_bytes": median([max(turn["activation_bytes_of_ranks"]) for turn in self.turns]),
            "threads_of_a_rank": self.turns[-1]["threads_of_a_rank"],
        }


class Results:
    """The plans of a sweep, read from the file of its name if there is one, and saved there.

    `asked_before`: the same command began the file. Raises ValueError if the file was measured with other options,
    versions or cores, or is not one of a sweep.
    """

    def __init__(self, sweep: Sweep, cores: int) -> None:
        self.path, self.cores, self.conditions = Path(f"{sweep.out}.json"), cores, Conditions()
        self.asked: dict[str, Any] = json.loads(json.dumps({"space": asdict(sweep.space), "best": sweep.best}))
        self.settings = settings_of(sweep, cores)
        self.tried: list[Tried] = []
        self.asked_before = False
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            there = json.loads(self.path.read_text())
            before, found = there["results"]["settings"] | there["environment"], there["results"]
            self.tried = [Tried(**each) for each in found["plans"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no file of a sweep: choose another --out") from None
        before = training_options(()) | before  # options that are new since then had their defaults
        for name, value in (self.settings | environment()).items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.path} was measured with {name} {before.get(name)}, and this is {value}: numbers of both "
                    "cannot be compared, so choose another --out"
                )
        self.asked_before = found["asked"] == self.asked

    def add(self, plans: list[Tried]) -> list[Tried]:
        """These plans, with the turns that they had before. Saves the new ones."""
        known = {each.key: each for each in self.tried}
        self.tried += [each for each in plans if each.key not in known]
        self.save()
        return [known.get(each.key, each) for each in plans]

    def save(self) -> None:
        found = {"settings": self.settings, "asked": self.asked, "plans": [asdict(each) for each in self.tried]}
        save_json(self.path, {"conditions": self.conditions.found(), "results": found})

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
    """The Pareto front: no other plan is as fast and as small, and better in one of both."""
    there = measured(rows)

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        a = one["images_per_second"], -one["peak_bytes"]
        b = other["images_per_second"], -other["peak_bytes"]
        return a != b and a[0] >= b[0] and a[1] >= b[1]

    return [row for row in there if not any(beats(other, row) for other in there)]


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["images_per_second"] is not None]


def settings_of(sweep: Sweep, cores: int) -> dict[str, Any]:
    """The settings of measurements besides their plans: the options of the training, and how a job measures."""
    plan = {*decided_flags(), *(f"--{name}" for name in vars(sweep.space))}
    training = {flag: value for flag, value in training_options(sweep.training).items() if flag not in plan}
    how = {"--steps": sweep.steps, "--warm-up": sweep.warm_up, "--memory": sweep.memory, "--cores": cores}
    return {**training, **how, "LD_PRELOAD": os.environ.get("LD_PRELOAD")}


def training_options(flags: Sequence[str]) -> dict[str, str]:
    """The value of every option of a training with these flags, by its flag."""
    from mpi4dl.options.config import parse as parse_training
    from mpi4dl.options.config import shared_options

    return {f"--{name.replace('_', '-')}": value for name, value in shared_options(parse_training(flags)).items()}


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """All plans, `*` those on the front, failures, and how far estimates are off."""
    head = ("plan", "ranks", "images/s", "(min-max)", "estimate", "CPU s", "idle %", "peak MiB", "estimate", "front")
    lines = [head]
    for row in measured(rows):
        speed, size = row["predicted_images_per_second"], row["predicted_peak_bytes"]
        lines.append(
            (
                f"{row['number']}: {row['plan']}",
                str(row["ranks"]),
                f"{row['images_per_second']:.2f}",
                f"({row['images_per_second_min']:.2f}-{row['images_per_second_max']:.2f})",
                "-" if speed is None else f"{speed:.2f}",
                f"{row['cpu_seconds_per_image']:.2f}",
                f"{100 * row['idle_share']:.0f}",
                f"{row['peak_bytes'] / MIB:.1f}",
                "-" if size is None else f"{size / MIB:.1f}",
                "*" * row["on_front"],
            )
        )
    failed = [f"{row['number']}: {row['plan']}: failed: {shortened(row['failure'])}" for row in rows if row["failure"]]
    return "\n".join([*aligned(lines, {"plan"}), *failed, *accuracy(rows)])


def shortened(reason: str) -> str:
    return reason if len(reason) <= LONGEST else f"{reason[: LONGEST - 3]}..."


def accuracy(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How far off estimates are, and the share of pairs of plans that they put into the measured order."""
    found = []
    for key, what in (("images_per_second", "images/s, ranks with a core each"), ("peak_bytes", "memory")):
        pairs = [(row[f"predicted_{key}"], row[key]) for row in measured(rows) if row[f"predicted_{key}"]]
        if pairs:
            off = median([abs(guess / there - 1) for guess, there in pairs])
            ratio = median([guess / there for guess, there in pairs])
            line = f"estimate of {what}: off by {100 * off:.0f} % (median; {ratio:.2f} of the measurement)"
            order = in_order(pairs)
            found.append(line if order is None else f"{line}, {100 * order:.0f} % of pairs in the measured order")
    return found


def in_order(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The share of pairs of plans whose estimates differ as their measurements do; None without two plans apart."""
    apart = [((a[0] - b[0]) * (a[1] - b[1])) for a, b in combinations(pairs, 2) if a[1] != b[1]]
    return sum(sign > 0 for sign in apart) / len(apart) if apart else None


def as_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a line for each plan, with all fields of its row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["plan"])
        writer.writeheader()
        writer.writerows(rows)
