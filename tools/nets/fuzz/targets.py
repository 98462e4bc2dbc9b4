"""What is tried: how cases are drawn, and what is wrong with one."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.pool.ranks import Ranks
from tools.nets.damaged.kinds import kinds
from tools.nets.fuzz import commands, loops, operators, requests, stacks, stages, streams, tables, texts, trainings

AT_ONCE = 20


class Target(NamedTuple):
    """`problem` says what is wrong with a case, None if nothing is, or "refused: " and why.

    It can be imported from `module` with all names that the text of a case speaks of.
    """

    name: str
    module: str
    cases: Callable[[], st.SearchStrategy[Any]]
    problem: Callable[[Ranks, Any], str | None]


def files() -> st.SearchStrategy[tuple[str, int]]:
    """A kind of file, and the number of the first of some that are damaged."""
    return st.tuples(st.sampled_from([*kinds()]), st.integers(0, 10**6))


def problems(folder: Path, first: int, count: int, names: list[str]) -> list[str]:
    """What goes wrong with so many damaged files of each kind, from a number on, in a process of limited memory."""
    command = [sys.executable, "-m", "tools.nets.damaged.worker", str(folder), str(first), str(count), *names]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    found = [f"{line['kind']} {line['which']}: {line['problem']}" for line in lines if "problem" in line]
    if ended.returncode:
        last = f"{lines[-1]['kind']} {lines[-1]['which']}" if lines else "nothing"
        found.append(f"{last}: the process ended with code {ended.returncode}: {ended.stderr[-1500:]}")
    assert lines
    return found


def problem(ranks: Ranks, case: tuple[str, int]) -> str | None:
    """What is wrong with how some damaged files of a kind are read."""
    kind, first = case
    with tempfile.TemporaryDirectory() as folder:
        found = problems(Path(folder), first, AT_ONCE, [kind])
    return "; ".join(found) or None


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("trainings", trainings.__name__, trainings.trainings, trainings.problem),
        Target("texts", texts.__name__, texts.trainings, texts.problem),
        Target("commands", commands.__name__, commands.runs, commands.problem),
        Target("requests", requests.__name__, requests.cases, requests.problem),
        Target("operators", operators.__name__, operators.cases, operators.problem),
        Target("stacks", stacks.__name__, stacks.cases, stacks.problem),
        Target("stages", stages.__name__, stages.cases, stages.problem),
        Target("loops", loops.__name__, loops.cases, loops.problem),
        Target("streams", streams.__name__, streams.cases, streams.problem),
        Target("tables", tables.__name__, tables.sheets, tables.problem),
        Target("files", __name__, files, problem),
    )
}
