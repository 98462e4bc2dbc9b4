"""What is tried: how cases are drawn, and what is wrong with one."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.damaged.kinds import kinds
from tests.damaged.test_damaged import problems
from tests.pool.ranks import Ranks
from tools.nets.fuzz import commands, operators, requests, tables, texts, trainings

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
        Target("tables", tables.__name__, tables.sheets, tables.problem),
        Target("files", __name__, files, problem),
    )
}
