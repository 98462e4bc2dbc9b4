"""What a run's plan and model look like, for whoever looks at the run later: `portrait.json` in its folder.

{"title": ..., "plan": ..., "num_steps": ..., "source": where the seconds are from,
 "timeline": [[[kind, direction, stage, microbatch, start, end], ...] of each rank of a replica],
 "modules": [[name, values, of them trained], ...],
 "memory": [{purpose: bytes} of each rank, as measured after the first steps]}
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mpi4dl.parallel.tables.simulator import Simulation, TimeSpan
from mpi4dl.parallel.tables.table import Action

if TYPE_CHECKING:
    from torch import Tensor

    from mpi4dl.engine import Engine

PORTRAIT = "portrait.json"
MOST_SPANS = 20_000  # of a timeline that is kept
REST = "activations and the rest"


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


def timeline_of(engine: "Engine") -> Simulation | None:
    """How a step of a plan of several stages was foreseen, where what its atoms cost is known."""
    from mpi4dl.forecast.forecast import foreseen

    held, plan = engine.held, engine.plan
    if held.prices is None or plan.num_stages == 1:
        return None
    found = foreseen(plan, held.prices, held.counts)
    return found if sum(map(len, found.rows)) <= MOST_SPANS else None


def modules_of(engine: "Engine") -> Iterator[tuple[str, int, int]]:
    """The values of each part of the model, tied ones once: its first two levels, or one where that says enough."""
    held = engine.held
    sizes = {name: prod(shape) for name, (shape, _) in held.shapes.items() if name not in held.ties}
    tops = {name.partition(".")[0] for name in sizes}
    levels = 1 if len(tops) > 3 else 2
    found: dict[str, list[int]] = {}
    for name, size in sizes.items():
        *above, _ = name.split(".")
        row = found.setdefault(".".join(above[:levels]) or name, [0, 0])
        row[0] += size
        row[1] += size * (name in held.trained)
    return ((name, values, trained) for name, (values, trained) in found.items())


def purposes_of(engine: "Engine", peak_bytes: int, on_disk: bool = False) -> dict[str, int]:
    """What this rank's memory is for, in bytes, once steps were made; of the peak the rest is activations' and others'.

    Storages count once, whole: flat buckets too. Gradients are those that stay until the step. What the optimizer has
    on disk is none of the memory.
    """
    held, optimizer = engine.held, engine.optimizer
    kept: list[Tensor] = [*held.parameters(), *held.buffers()]
    updated: list[Tensor] = []
    gradients = 0
    for group in engine.groups:
        for piece in (piece for bucket in group.update.pieces for piece in bucket):
            size = piece.span.stop - piece.span.start
            own = piece.value if piece.target is None else piece.target
            kept.append(own.detach())
            if piece.target is not None:
                updated.append(piece.value.detach())
            gradients += size * own.element_size() if group.zero > 1 else 0
        if group.zero <= 1:
            gradients += sum(p.numel() * p.element_size() for p in group.parameters)
    updated += [each for state in optimizer.state.values() for each in state.values() if hasattr(each, "nbytes")]
    found = {
        "parameters and buffers": _bytes_of(kept),
        "gradients": gradients,
        "optimizer": 0 if on_disk else _bytes_of(updated),
    }
    return found | {REST: max(0, peak_bytes - sum(found.values()))}


def _bytes_of(tensors: Iterable["Tensor"]) -> int:
    """Of the storages of some tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
