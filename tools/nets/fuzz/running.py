"""Draws cases, tries them, and writes what goes wrong as a script."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure, FlakyStrategyDefinition, Unsatisfiable

from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT
from tools.nets.fuzz.targets import Target

FOLDER = ROOT / ".fuzz"
REFUSED = "refused: "
SHRINK_SECONDS = 180.0
REPEAT = "python -m tools.nets.fuzz --targets {name} --seed {seed} --cases {count}"
SCRIPT = '''"""{said}

Found by: {repeat}
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from {module} import *  # noqa: F403
from tools.nets.fuzz.running import try_alone

if __name__ == "__main__":
    try_alone(problem, {case!r})  # noqa: F405
'''


class Wrong(AssertionError):
    """A case went wrong."""


def try_alone(problem: Callable[[Ranks, Any], str | None], case: Any) -> None:
    """Say what is wrong with a case, and end with code 1 if anything is."""
    ranks = Ranks()
    try:
        said = problem(ranks, case)
    finally:
        ranks.stop()
    print(said or "nothing is wrong")
    sys.exit(said is not None and not said.startswith(REFUSED))


class Hunt:
    """What came out so far: how many cases of each target were exact, refused and wrong, and the scripts."""

    def __init__(self, ranks: Ranks, end: float) -> None:
        self.ranks, self.end = ranks, end
        self.words: dict[str, Counter[str]] = {}
        self.refusals: Counter[str] = Counter()
        self.scripts: list[Path] = []

    def round(self, target: Target, number: int, count: int) -> None:
        """So many cases, by a seed. The first that goes wrong is shrunk, and written."""
        words = self.words.setdefault(target.name, Counter())
        end, worst = self.end, None

        def tried(case: Any) -> None:
            nonlocal end, worst
            if time.monotonic() > end:
                return  # nothing more is tried
            said = target.problem(self.ranks, case)
            refused = said is not None and said.startswith(REFUSED)
            if worst is None:
                words["exact" if said is None else "refused" if refused else "wrong"] += 1
            if said is None:
                return
            if refused:
                self.refusals[f"{target.name}: {said.removeprefix(REFUSED)[:100]}"] += 1
                return
            if worst is None:
                end = time.monotonic() + SHRINK_SECONDS
            worst = case, said
            raise Wrong

        how = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        with suppress(Wrong, FlakyFailure, FlakyStrategyDefinition, Unsatisfiable):
            seed(number)(how(given(target.cases())(tried)))()
        if worst is not None:
            self._write(target, number, count, *worst)

    def _write(self, target: Target, number: int, count: int, case: Any, said: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"{target.name}-{number}.py"
        shown = said.replace("\\", "\\\\").replace('"""', "'''")
        repeat = REPEAT.format(name=target.name, seed=number, count=count)
        path.write_text(SCRIPT.format(said=shown, repeat=repeat, module=target.module, case=case))
        self.scripts.append(path)
        print(f"wrong, {path.relative_to(ROOT)}:\n  {case!r}\n  {said[:2000]}\n  again: {repeat}", flush=True)
