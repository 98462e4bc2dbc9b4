"""What a run's plan and model look like, for whoever looks at the run later: `portrait.json` in its folder.

{"title": ..., "plan": ..., "num_steps": ..., "source": where the seconds are from,
 "timeline": [[[kind, direction, stage, microbatch, start, end], ...] of each rank of a replica],
 "modules": [[name, values, of them trained], ...],
 "memory": [{purpose: bytes} of each rank, as measured after the first steps]}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpi4dl.parallel.tables.simulator import Simulation, TimeSpan
from mpi4dl.parallel.tables.table import Action

PORTRAIT = "portrait.json"


@dataclass(frozen=True)
class Portrait:
    """See above; `timeline` is None of a plan of one stage, in which no rank waits for another stage."""

    title: str
    plan: str
    num_steps: int
    modules: tuple[tuple[str, int, int], ...]
    memory: tuple[Mapping[str, int], ...]
    source: str = ""
    timeline: Simulation | None = None

    def text(self) -> str:
        """As a file has it."""
        found = dict(vars(self))
        if self.timeline is not None:
            found["timeline"] = [[[*span.action, *span[1:]] for span in row] for row in self.timeline.rows]
        return json.dumps(found) + "\n"

    @classmethod
    def of(cls, told: Any) -> "Portrait":
        """Of what `text` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        rows = told["timeline"]
        timeline = None
        if rows is not None:
            spans = (tuple(_span(*values) for values in row) for row in rows)
            timeline = Simulation(tuple(spans), (0,) * len(rows))
        memory = tuple({str(k): int(v) for k, v in rank.items()} for rank in told["memory"])
        modules = tuple((str(name), int(values), int(trained)) for name, values, trained in told["modules"])
        title, plan, source = (str(told[key]) for key in ("title", "plan", "source"))
        return cls(title, plan, int(told["num_steps"]), modules, memory, source, timeline)


def _span(kind: Any, direction: int, stage: int, microbatch: int, start: float, end: float) -> TimeSpan:
    if kind not in ("forward", "backward", "input", "weight") or direction not in (0, 1):
        raise ValueError(f"no action is {kind!r} in direction {direction!r}")
    return TimeSpan(Action(kind, int(direction), int(stage), int(microbatch)), float(start), float(end))
