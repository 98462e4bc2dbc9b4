"""The ranks of each stage, the actions on it, and their order on every rank: the terms of a schedule.

A *table* gives each rank its actions in order. It is a projection of one order of all actions. So ranks that share a
stage (its tiles) come to every action in the same order, and such a table cannot deadlock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeAlias

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """One microbatch through one stage: `forward`, or `backward`, or its halves `input` and `weight`.

    `input` computes the gradient of the stage's input only, `weight` that of its parameters later. `direction` 0 is
    the model, 1 its mirrored copy (GEMS).
    """

    kind: Kind
    direction: int
    stage: int
    microbatch: int

    def __str__(self) -> str:
        mirrored = " of the mirrored copy" if self.direction else ""
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}{mirrored}"


Table: TypeAlias = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Placement:
    """Which ranks hold which stage: `holders[direction][stage]` work together on it, each on its tile.

    A rank may hold several stages: chunks of an interleaved schedule, or one of the model and one of its mirrored copy.
    """

    holders: tuple[tuple[tuple[int, ...], ...], ...]

    def __post_init__(self) -> None:
        if not self.holders or not self.holders[0]:
            raise ValueError("a placement needs at least one direction of at least one stage")
        for direction, stages in enumerate(self.holders):
            if len(stages) != self.num_stages:
                raise ValueError(
                    f"direction {direction} has {len(stages)} stages, but direction 0 has {self.num_stages}: "
                    "both copies of a model are cut into the same stages"
                )
            for stage, ranks in enumerate(stages):
                if not ranks or len(set(ranks)) != len(ranks):
                    raise ValueError(f"stage {stage} of direction {direction} is held by {ranks}: name each rank once")
            held = sorted({rank for ranks in stages for rank in ranks})
            if held != list(range(self.num_ranks)):
                raise ValueError(
                    f"direction {direction} is held by ranks {held}, but a placement of {self.num_ranks} ranks "
                    f"gives each of 0 to {self.num_ranks - 1} a stage in every direction"
                )

    @classmethod
    def row(cls, ranks_per_stage: Sequence[int], directions: int = 1, chunks: int = 1) -> "Placement":
        """Stage after stage on neighbouring ranks; a second direction lies mirrored, rank P - 1 - r for rank r.

        With `chunks`, further stages are dealt out over the same ranks so many times in all.
        """
        ends = [0, *accumulate(ranks_per_stage)]
        stages = tuple(tuple(range(*ends)) for ends in pairwise(ends)) * chunks
        mirrored = tuple(tuple(ends[-1] - 1 - rank for rank in ranks) for ranks in stages)
        if directions not in (1, 2):
            raise ValueError(f"directions (={directions}) must be 1, or 2 for a mirrored copy")
        return cls((stages, mirrored)[:directions])

    @property
    def num_directions(self) -> int:
        return len(self.holders)

    @property
    def num_stages(self) -> int:
        return len(self.holders[0])

    @property
    def num_ranks(self) -> int:
        return 1 + max(rank for stages in self.holders for ranks in stages for rank in ranks)

    def held_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (direction, stage) pairs that this rank works on."""
        return tuple(
            (direction, stage)
            for direction, stages in enumerate(self.holders)
            for stage, ranks in enumerate(stages)
            if rank in ranks
        )

    def ranks_of(self, action: Action) -> tuple[int, ...]:
        """The ranks that do this action together."""
        return self.holders[action.direction][action.stage]

    def only(self, direction: int) -> "Placement":
        """This direction by itself, as direction 0."""
        return Placement((self.holders[direction],))

    def rows(self, order: Iterable[Action]) -> Table:
        """The table in which every rank does its share of `order`, in that order."""
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for action in order:
            for rank in self.ranks_of(action):
                rows[rank].append(action)
        return tuple(tuple(row) for row in rows)


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions before this one: the sender of its input, and its own stage's earlier part."""
    kind, _, stage, _ = action
    if kind == "forward":
        return (action._replace(stage=stage - 1),) if stage > 0 else ()
    if kind == "weight":
        return (action._replace(kind="input"),)
    own = action._replace(kind="forward")
    return (own, action._replace(stage=stage + 1)) if stage + 1 < num_stages else (own,)


def precedence(rows: Iterable[Sequence[Action]], num_stages: int) -> dict[Action, list[Action]]:
    """For every action the actions before it: those that it needs, and its predecessor in each row that has it."""
    before: dict[Action, list[Action]] = {}
    for row in rows:
        for action in row:
            if action not in before:
                before[action] = list(needs(action, num_stages))
        for earlier, later in pairwise(row):
            before[later].append(earlier)
    return before


def undivided(row: Sequence[Action]) -> list[Action]:
    """A row whose backwards are whole in stages where each half directly follows the other: PyTorch's own is quicker.

    The first stage of zero-bubble is one. Ranks that share a stage have its actions in the same order, and agree.
    """
    after = dict(pairwise(row))
    divided = {one.stage for one in row if one.kind == "input" and after.get(one) != one._replace(kind="weight")}
    return [
        action._replace(kind="backward") if action.kind == "input" and action.stage not in divided else action
        for action in row
        if action.kind != "weight" or action.stage in divided
    ]
