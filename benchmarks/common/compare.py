"""Two results of a benchmark, an old and a new one: ratios of all numbers, and which of them exceed the noise."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._wording import aligned

# Numbers that tell rows apart, and are not measured; text always tells rows apart.
IDENTITY = frozenset("ranks job_ranks size_px size_kb tokens rate experts".split())
NOTES = frozenset("plan picked wrong peer algorithm".split())  # text that does not


class Number(NamedTuple):
    """A median, and the ends of its spread where there is one."""

    value: float
    low: float
    high: float


Row = tuple[dict[str, str], dict[str, Number]]  # what tells it apart, and its numbers by name


@dataclass(frozen=True)
class Result:
    """A file of results."""

    path: Path
    conditions: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    def describe(self) -> str:
        """Where, when and under which load it was measured."""
        known = self.conditions
        if "load" not in known:
            return f"{self.path}: on {known.get('cpu', 'an unknown CPU')}; load unknown"
        loaded = " LOADED MACHINE: compare memory and counts, not times;" * bool(known["loaded"])
        return (
            f"{self.path}:{loaded} commit {known['commit']}, {known['date']}, on {known['machine']} "
            f"({known['cpu']}, {known['cores']} cores), load {known['load']} at the beginning, "
            f"other programs used {known['cores_of_others']} cores"
        )

    def named(self, keys: Set[str]) -> dict[str, dict[str, Number]]:
        """The numbers of each row, by its parts that have these keys; by all parts if they do not tell rows apart."""
        found = {_name(told, keys): numbers for told, numbers in self.rows}
        if len(found) == len(self.rows):
            return found
        return {_name(told, told.keys()): numbers for told, numbers in self.rows}


def _name(told: Mapping[str, str], keys: Set[str]) -> str:
    return ", ".join(text for key, text in told.items() if key in keys)


def read(path: Path) -> Result:
    """Read a file that `run` wrote. Raises ValueError for another one, and OSError."""
    try:
        content = json.loads(path.read_text())
        results = content["results"]
        conditions = {**content["environment"], **content.get("conditions", {})}
        rows = list(_rows(results))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise ValueError(f"{path} is no result of a benchmark") from None
    return Result(path, conditions, results.get("settings", {}), rows)


def _rows(results: Mapping[str, Any]) -> Iterator[Row]:
    for name, found in results.items():
        if isinstance(found, dict) and name != "settings":
            yield {"part": name}, dict(_numbers(found))
        for row in found if isinstance(found, list) else ():
            if isinstance(row, dict):
                told = {key: value for key, value in row.items() if isinstance(value, str) and key not in NOTES}
                told |= {key: f"{key} {value}" for key, value in row.items() if key in IDENTITY}
                yield told, dict(_numbers(row))


def _numbers(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Number]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif type(value) in (int, float) and name not in IDENTITY and not name.endswith(("_min", "_max")):
            low, high = found.get(f"{name}_min", value), found.get(f"{name}_max", value)
            yield f"{prefix}{name}", Number(value, low, high)


def compare(old: Result, new: Result, only: str = "") -> str:
    """A table of all numbers whose names contain `only`, below the conditions of both results.

    The ratio is new over old. Its range follows from the spreads. `*` marks ratios whose range does not contain 1.
    """
    lines = [old.describe(), new.describe()]
    for name in sorted({*old.settings, *new.settings}):
        before, after = old.settings.get(name), new.settings.get(name)
        if str(before) != str(after):
            lines.append(f"other settings: --{name.replace('_', '-')} {before}, then {after}")
    shared = {key for told, _ in old.rows for key in told} & {key for told, _ in new.rows for key in told}
    olds, news = old.named(shared), new.named(shared)
    rows = [("", "number", "old", "new", "new / old", "range", "")]
    for row, numbers in news.items():
        for name, after in numbers.items():
            before = olds.get(row, {}).get(name)
            if before is not None and only in name:
                rows.append((row, name, f"{before.value:.4g}", f"{after.value:.4g}", *_ratio(before, after)))
    if len(rows) == 1:
        raise ValueError(f"{old.path} and {new.path} have no number in common")
    missing = [f"only in one of both: {row}" for row in sorted(olds.keys() ^ news.keys())]
    return "\n".join([*lines, *aligned(rows, {"", "number"}), *missing])


def _ratio(before: Number, after: Number) -> tuple[str, str, str]:
    """The ratio, its range, and the mark."""
    if before.low <= 0 or after.low < 0:
        return "1.00" if before == after else "-", "", ""
    ratio = f"{after.value / before.value:.2f}"
    if (before.low, after.low) == (before.high, after.high):
        return ratio, "no spread", ""
    low, high = after.low / before.high, after.high / before.low
    return ratio, f"{low:.2f}-{high:.2f}", "*" * (not low <= 1 <= high)
