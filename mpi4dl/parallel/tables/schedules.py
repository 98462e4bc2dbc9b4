"""Schedules: pure functions from a placement and a number of microbatches to the table that every rank follows.

A *table* gives each rank its actions in order. It is a projection of one order of all actions. So ranks that share a
stage (its tiles) come to every action in the same order, and such a table cannot deadlock.

A schedule writes for each stage the *program* of what it does in order; the programs are then merged into one order
of all actions, from which every rank takes its share. The drawings show one row a rank and time to the right, with
equal times for all actions. F0 is the forward of microbatch 0, B its backward, I and W the halves of a backward
(gradients of the input, of the weights). Small letters are the mirrored copy, and F2.0 is microbatch 0 in stage 2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise, zip_longest
from types import MappingProxyType
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

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups that hold the same: all of a group do the same actions."""
        held: dict[int, list[tuple[int, int]]] = {}
        for direction, stages in enumerate(self.holders):
            for stage, ranks in enumerate(stages):
                for rank in ranks:
                    held.setdefault(rank, []).append((direction, stage))
        groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in sorted(held):
            groups.setdefault(tuple(held[rank]), []).append(rank)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def merged(self) -> "Placement":
        """The same with one rank for each group of those that are `alike`."""
        group_of = {rank: number for number, ranks in enumerate(self.alike) for rank in ranks}
        return Placement(
            tuple(
                tuple(tuple(dict.fromkeys(group_of[rank] for rank in ranks)) for ranks in stages)
                for stages in self.holders
            )
        )

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


Schedule: TypeAlias = Callable[[Placement, int], Table]


# Two microbatches over three stages, one at a time:
#
#     rank 0 |F0             B0 F1             B1
#     rank 1 |   F0       B0       F1       B1
#     rank 2 |      F0 B0             F1 B1
def layer(placement: Placement, num_microbatches: int) -> Table:
    """Layer parallelism: each microbatch goes forward through all stages and back before the next one starts."""
    return _pipeline(placement, num_microbatches, ahead=lambda stage: 0)


# Three microbatches over three stages:
#
#     rank 0 |F0 F1 F2             B0 B1 B2
#     rank 1 |   F0 F1 F2       B0 B1 B2
#     rank 2 |      F0 F1 F2 B0 B1 B2
def gpipe(placement: Placement, num_microbatches: int) -> Table:
    """All forwards, then all backwards: every stage keeps all microbatches (Huang et al., NeurIPS 2019).

    Backwards go in the order of the forwards, so that gradients are summed as a plain loop sums them.
    """
    return _pipeline(placement, num_microbatches, ahead=lambda stage: num_microbatches)


# Four microbatches over four stages:
#
#     rank 0 |F0 F1 F2 F3          B0    B1    B2    B3
#     rank 1 |   F0 F1 F2       B0 F3 B1    B2    B3
#     rank 2 |      F0 F1    B0 F2 B1 F3 B2    B3
#     rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3
def one_f_one_b(placement: Placement, num_microbatches: int) -> Table:
    """Forward and backward in turn, so that stage s of p keeps at most p - s microbatches (PipeDream-flush, ICML 2021).

    It takes as long as GPipe.
    """
    return _pipeline(placement, num_microbatches, ahead=lambda stage: placement.num_stages - 1 - stage)


# Four microbatches over two ranks, each with two chunks of the model, stages 0 and 2, 1 and 3:
#
#     rank 0 |F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1      B2.2      B2.3 B0.2 B0.3
#     rank 1 |     F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
def interleaved(placement: Placement, num_microbatches: int) -> Table:
    """1F1B over several chunks of the model a rank, which divides the bubble by their number (Megatron-LM, SC'21).

    A rank takes as many microbatches as there are ranks through its first chunk, then through its second, and so on;
    where their number does not divide so, the last round is cut out of a full one. Raises ValueError unless stage s
    lies on the same ranks as stage s modulo the number of ranks (or groups of tiles), at least two of them a rank.
    """
    _require(placement, num_microbatches)
    stages = placement.holders[0]
    num_groups = len(set(stages))
    chunks, rest = divmod(len(stages), num_groups)
    if chunks < 2 or rest or stages != stages[:num_groups] * chunks:
        raise ValueError(
            f"interleaved 1F1B deals its stages out like cards, two or more to everyone, but here {len(stages)} stages "
            f"lie on ranks {list(stages)}: use 2 x {num_groups} stages, or one_f_one_b"
        )
    # A round that is not full would wait for itself. Dropping all of a microbatch from an order breaks no order.
    starts = range(0, num_microbatches, num_groups)
    rounds = [range(first, first + num_groups) for first in starts]
    programs = []
    for group in range(num_groups):
        own = range(group, len(stages), num_groups)
        forwards = [Action("forward", 0, s, m) for some in rounds for s in own for m in some]
        backwards = [Action("backward", 0, s, m) for some in rounds for s in reversed(own) for m in some]
        ahead = 2 * (num_groups - 1 - group) + (chunks - 1) * num_groups
        programs.append(_in_turn(forwards, backwards, ahead))
    order = _merge(programs, len(stages))
    return placement.rows(action for action in order if action.microbatch < num_microbatches)


# Four microbatches over three stages:
#
#     rank 0 |F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
#     rank 1 |   F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
#     rank 2 |      F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
def zero_bubble(placement: Placement, num_microbatches: int) -> Table:
    """ZB-H1: 1F1B whose weight gradients wait, and leave a third of its bubble (Qi et al., ICLR 2024).

    Stage s is s weight gradients behind, so that every stage keeps as many microbatches as the first stage of 1F1B.
    """
    _require(placement, num_microbatches)
    last = placement.num_stages - 1
    programs = []
    for stage in range(placement.num_stages):
        forwards, inputs, weights = _actions(("forward", "input", "weight"), stage, num_microbatches)
        due = dict(zip(inputs[stage:], weights, strict=False))
        program = []
        for action in _in_turn(forwards, inputs, ahead=last - stage):
            program += [action, due[action]] if action in due else [action]
        programs.append(program + weights[len(due) :])
    return placement.rows(_merge(programs, placement.num_stages))


# One pair over layer parallelism, one microbatch each way: the copy's forward follows the model's backward.
#
#     rank 0 |F0             B0 f0 b0
#     rank 1 |   F0       B0 f0       b0
#     rank 2 |      F0 B0 f0             b0
def gems(placement: Placement, num_microbatches: int, pairs: int, inner: Schedule) -> Table:
    """GEMS: waves through the model and through its mirrored copy in turn (Jain et al., SC'20, MASTER).

    Each wave is a table of `inner` with `num_microbatches`; each direction has `pairs` of them, its microbatches
    numbered 0 to pairs x num_microbatches - 1. Every rank ends one wave before it begins the next; but the next enters
    where the backward of this one began and follows it, so that they overlap, and no rank keeps more than one wave.
    """
    if placement.num_directions != 2:
        raise ValueError("GEMS runs a model and its mirrored copy: give the placement directions=2")
    if pairs < 1:
        raise ValueError(f"pairs (={pairs}) of waves in GEMS must be at least 1")
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    waves = [inner(placement.only(direction), num_microbatches) for direction in (0, 1)]
    for pair in range(pairs):
        for direction, wave in enumerate(waves):
            for row, actions in zip(rows, wave, strict=True):
                row += [
                    Action(kind, direction, stage, microbatch + pair * num_microbatches)
                    for kind, _, stage, microbatch in actions
                ]
    return tuple(tuple(row) for row in rows)


# Three microbatches over three stages:
#
#     rank 0 |F0 F1 F2
#     rank 1 |   F0 F1 F2
#     rank 2 |      F0 F1 F2
def forward_only(placement: Placement, num_microbatches: int) -> Table:
    """For evaluation: nothing is kept for a backward."""
    _require(placement, num_microbatches)
    programs = [_actions(("forward",), stage, num_microbatches)[0] for stage in range(placement.num_stages)]
    return placement.rows(_merge(programs, placement.num_stages))


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "layer": layer,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
    }
)
SPLITTING = ("zero-bubble",)  # those with actions of their own for the gradients of weights


def table_for(name: str, placement: Placement, num_microbatches: int, pairs: int = 1) -> Table:
    """The table of a schedule by its name; on a placement of two directions, GEMS over it with `pairs` of waves."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    if placement.num_directions == 2:
        return gems(placement, num_microbatches, pairs, SCHEDULES[name])
    return SCHEDULES[name](placement, num_microbatches)


def _require(placement: Placement, num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches (={num_microbatches}) must be at least 1")
    if placement.num_directions != 1:
        raise ValueError("this schedule runs one direction, but the placement has 2: use gems over it")


def _actions(kinds: Iterable[Kind], stage: int, num_microbatches: int) -> list[list[Action]]:
    """For each kind a stage's actions, in the order of the microbatches."""
    return [[Action(kind, 0, stage, microbatch) for microbatch in range(num_microbatches)] for kind in kinds]


def _pipeline(placement: Placement, num_microbatches: int, ahead: Callable[[int], int]) -> Table:
    """Every stage is so many forwards ahead of its backwards."""
    _require(placement, num_microbatches)
    programs = []
    for stage in range(placement.num_stages):
        forwards, backwards = _actions(("forward", "backward"), stage, num_microbatches)
        programs.append(_in_turn(forwards, backwards, ahead(stage)))
    return placement.rows(_merge(programs, placement.num_stages))


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn while there are forwards, then the other backwards."""
    turns = zip_longest(forwards[ahead:], backwards)
    return [*forwards[:ahead], *(action for turn in turns for action in turn if action is not None)]


def _merge(programs: Iterable[Sequence[Action]], num_stages: int) -> list[Action]:
    """One order of all actions that follows every program: step by step, whatever can be done next."""
    sorter = TopologicalSorter(precedence(programs, num_stages))
    sorter.prepare()
    order: list[Action] = []
    while sorter.is_active():
        step = sorter.get_ready()
        order += sorted(step)  # on all ranks alike
        sorter.done(*step)
    return order
