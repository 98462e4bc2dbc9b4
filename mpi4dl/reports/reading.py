"""The folder of a run as it is found: what is missing or damaged in it becomes a remark, never an error.

A run that was killed leaves a last line that is half written, no weights, or nothing but its options; another one was
written by another version. All of that can be looked at.
"""

import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import read_regular
from mpi4dl._wording import counted
from mpi4dl.options.kinds import dump
from mpi4dl.reports.evaluations import DAMAGED, Evaluated, evaluations_in, is_matrix
from mpi4dl.tasks.directions import MEASURES, higher_is_better, read_directions
from mpi4dl.trainer.folder import METRICS
from mpi4dl.trainer.portrait import PORTRAIT, Portrait

CONFIG, VERSIONS, IMAGES, LOG, WEIGHTS, DESCRIPTION = (
    "config.toml",
    "versions.json",
    "images.json",
    "log-rank0.txt",
    "model.safetensors",
    "model.json",
)
LOG_BYTES = 1 << 16  # that are read, from its end
TAIL_LINES = 12
LOG_LINE = re.compile(r"\S+ \S+ [A-Z]+ mpi4dl[\w.]*: (.*)")
ENDS = ("done: ", "stopped by ", "ended by ")
COORDINATES = ("phase", "step", "epoch")
Number = int | float
Values = Mapping[str, Any]


class Recorded(NamedTuple):
    """One line of metrics.jsonl: `numbers` by name, those of nests as "nest/name"; `matrices` are lists of lists."""

    phase: str
    step: int
    numbers: dict[str, float]
    matrices: dict[str, list[list[float]]]


@dataclass(frozen=True)
class FoundRun:
    """What a folder tells of a run. `options` and `versions` are text by name; `remarks` what is missing or damaged."""

    name: str
    path: Path
    title: str
    state: str
    options: Mapping[str, str]
    versions: Mapping[str, str]
    records: tuple[Recorded, ...]
    classes: tuple[str, ...]
    portrait: Portrait | None
    evaluations: tuple[Evaluated, ...]
    tail: tuple[str, ...]
    remarks: tuple[str, ...]
    task: str = ""
    directions: Mapping[str, bool] = field(default_factory=dict)

    def higher_is_better(self, metric: str) -> bool | None:
        """As the run recorded it, or as it is declared for metrics of this name; None if nobody says so."""
        found = self.directions.get(metric, self.directions.get(metric.partition("/")[0]))
        return higher_is_better(metric) if found is None else found

    def series(self, phase: str, metric: str) -> list[tuple[int, float]]:
        """The values of a metric by step."""
        return [(r.step, r.numbers[metric]) for r in self.records if r.phase == phase and metric in r.numbers]

    def metrics(self, phase: str) -> dict[str, None]:
        """The names of those with a value, in order."""
        return dict.fromkeys(name for record in self.records if record.phase == phase for name in record.numbers)

    def last_matrix(self) -> tuple[str, list[list[float]]] | None:
        """The confusion matrix of the last validation that has one, and where it is from."""
        for record in reversed(self.records):
            for matrix in record.matrices.values():
                return f"validation at step {record.step}", matrix
        return None


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / METRICS).is_file()


def read_runs(paths: Sequence[Path]) -> list[FoundRun]:
    """The runs in these folders, named so that no two have the same name. Raises ValueError for what is no run."""
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: no such folder; name the folder of a run, such as runs/resnet18-20260131-120000")
        if not is_run(path):
            raise ValueError(
                f"{path} is no folder of a run: it has neither {CONFIG} nor {METRICS}; name one that mpi4dl.train wrote"
            )
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells them apart; of what is given twice, a number too."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    return [f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names)]


def _read(path: Path, name: str) -> FoundRun:
    remarks: list[str] = []

    def read(file: str, parse: Callable[[bytes], Any], otherwise: Any, why: str = "") -> Any:
        """What a file of the run holds; `otherwise`, with a remark, where it cannot be read."""
        try:
            return parse(read_regular(path / file))
        except FileNotFoundError:
            remarks.append(f"there is no {file}{why}")
        except OSError as error:
            remarks.append(f"{file} cannot be read: {error.strerror or error}")
        except DAMAGED as error:
            remarks.append(f"{file} is damaged: {' '.join(str(error).split())[:200]}")
        return otherwise

    options = read(CONFIG, lambda raw: flattened(tomllib.loads(raw.decode())), {})
    for later in sorted(path.glob("config-step-*.toml")):
        new = read(later.name, lambda raw: flattened(tomllib.loads(raw.decode())), {})
        changed = {key: value for key, value in new.items() if options.get(key) != value}
        words = ", ".join(f"{key} {options.get(key, '-')} -> {value}" for key, value in changed.items())
        step = int(re.sub(r"\D", "", later.stem) or 0)
        remarks.append(f"it went on after step {step} with {words or 'the same options'}")
        options = options | new
    records, damaged = read(METRICS, _records, ((), ()), ": nothing was reported")
    remarks += damaged
    tail = read(LOG, _tail, ())
    said = [found[1] for line in tail if (found := LOG_LINE.match(line))]
    portrait = read(PORTRAIT, lambda raw: Portrait.of(json.loads(raw)), None, ": it has no timeline and no memory")
    task, directions = "", {}
    if (path / DESCRIPTION).exists():
        task = read(DESCRIPTION, lambda raw: str(json.loads(raw)["task"]), "")
    if (path / MEASURES).exists():
        directions = read(MEASURES, read_directions, {})
    evaluations, faults = evaluations_in(path)
    for fault in faults:
        remarks.append(fault)
    return FoundRun(
        name,
        path,
        portrait.title if portrait else options.get("model.model", ""),
        _state(path, said, records),
        options,
        read(VERSIONS, lambda raw: flattened(json.loads(raw)), {}),
        records,
        read(IMAGES, lambda raw: tuple(map(str, json.loads(raw)["classes"])), ()) if (path / IMAGES).exists() else (),
        portrait,
        tuple(evaluations),
        tail[-TAIL_LINES:],
        tuple(remarks),
        task,
        directions,
    )


def flattened(tables: Any) -> dict[str, str]:
    """Values of tables as text, by "table.key"; text as it is."""
    if not isinstance(tables, dict):
        raise ValueError("it is no table")
    found: dict[str, str] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": shown(each) for key, each in value.items()}
        else:
            found[name] = shown(value)
    return found


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return shlex.join(value)
    try:
        return dump(value)
    except (TypeError, ValueError):
        return str(value)


def _records(raw: bytes) -> tuple[tuple[Recorded, ...], list[str]]:
    """Those of a file of metrics, and which of its lines are damaged."""
    found, damaged = [], []
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_recorded(json.loads(line)))
            except DAMAGED:
                damaged.append(number)
    if not damaged:
        return tuple(found), []
    first, rest = damaged[0], len(damaged) - 1
    half = "; it is half written, as by a run that was killed" if damaged == [len(lines)] else ""
    more = f", and {counted(rest, 'line')} more" if rest else ""
    return tuple(found), [f"of {METRICS} line {first}{more} cannot be read, and left out{half}"]


def _recorded(line: Any) -> Recorded:
    """Raises ValueError, TypeError or KeyError for what is no report."""
    if not isinstance(line, dict):
        raise ValueError("no object")
    phase, step = str(line.get("phase", "train")), line["step"]
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError("no step")
    values = {key: value for key, value in line.items() if key not in COORDINATES}
    matrices = {key: value for key, value in _leaves(values) if is_matrix(value)}
    return Recorded(phase, step, dict(_numbers(values)), matrices)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, "" if key == "metrics" else f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in _leaves(values):
        number = as_number(value)
        if number is not None:
            yield key, number
        elif isinstance(value, list) and value and all(as_number(each) is not None for each in value):
            alone = len(value) == 1
            yield from ((key if alone else f"{key} {i}", float(each)) for i, each in enumerate(value))


def as_number(value: Any) -> float | None:
    """A number as JSON has it, or as text where it is not finite."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, Number):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _tail(raw: bytes) -> tuple[str, ...]:
    """The last lines of a log."""
    return tuple(raw[-LOG_BYTES:].decode(errors="replace").splitlines())


def _state(path: Path, said: Sequence[str], records: Sequence[Recorded]) -> str:
    """How a run ended, as its log says."""
    reached = f" after step {records[-1].step}" if records else " before its first report"
    if said and said[-1].startswith(ENDS):
        return said[-1]
    if (path / WEIGHTS).is_file():
        return f"finished{reached}"
    return f"no end is recorded{reached}: it is still running, or was killed"


def finite(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def not_finite(run: FoundRun) -> list[str]:
    """What to say of numbers that are none."""
    found = []
    for phase in ("train", "validation"):
        for metric in run.metrics(phase):
            steps = [step for step, value in run.series(phase, metric) if not math.isfinite(value)]
            if steps:
                count = counted(len(steps), "report")
                found.append(f"{phase} {metric} is not finite in {count}, the first at step {steps[0]}")
    return found
