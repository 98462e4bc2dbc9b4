"""Who holds the same parameters: the ranks of a stage, of several stages that use one, or those with the same part.

stage 0    embedding  blocks                   ranks 0 1      its own: blocks, on 0 1
stage 1                       blocks  head     ranks 2 3      its own: blocks, on 2 3
               |________ tied _________|                      of both: embedding = head, on 0 2 1 3
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

from torch import nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.grid import PartPlace


class Together(NamedTuple):
    """Parameters, by name, that the ranks of `comm` hold alike, since each of them works on some of `stages`.

    `zero` and `copies` are how these ranks share them out, as Plan.zero_at says. Where parameters are cut, `across` are
    the ranks that have all parts of them, this one among them, in the order of the parts.
    """

    stages: tuple[int, ...]
    comm: Communicator
    parameters: list[tuple[str, nn.Parameter]]
    zero: int
    copies: int
    across: tuple[int, ...]


def names_by_first(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by that which comes first in the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {same[0]: same for same in names.values()}


def become_one(modules: Mapping[int, nn.Module], names: Sequence[str]) -> nn.Parameter | None:
    """Let the stages of one rank have one parameter where several use it by one of `names`; None if none does."""
    found: nn.Parameter | None = None
    for module in modules.values():
        for name in names:
            path, _, leaf = name.rpartition(".")
            try:
                holder = module.get_submodule(path)
            except AttributeError:
                continue
            known = holder._parameters.get(leaf)
            if known is not None:
                found = known if found is None else found
                holder._parameters[leaf] = found
    return found


def sharing(
    plan: Plan,
    comm: Communicator,
    modules: Mapping[int, nn.Module],
    shared: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, Sequence[str]],
    axes: Callable[[str], tuple[str, ...]],
    groups: Mapping[int, Communicator],
    place: PartPlace,
) -> Iterator[Together]:
    """Of this rank, whose stages are `modules`, in an order in which all ranks come to those they have in common.

    `shared` are the stages of parameters that several use, by the first of their `aliases`. `axes(name)` are those over
    which a parameter is cut, of which this rank has the part at `place`. `groups` are all holders of each stage.
    Collective.
    """
    ordered = not plan.bidirectional
    several = {name for first in shared for name in aliases[first]}
    cut = [axis for axis, (_, count) in place._asdict().items() if count > 1]
    parts = [along for number in range(len(cut) + 1) for along in combinations(cut, number)]
    for stage, module in modules.items():
        own = [(name, p) for name, p in module.named_parameters() if name not in several]
        for along in parts:
            part = {axis: getattr(place, axis)[0] for axis in along}
            holders = comm.subset(plan.holders(stage, part=part), ordered) if along else groups[stage]
            named = [(name, p) for name, p in own if axes(name) == along]
            others = _across(plan, comm.rank, place, along, stage)
            yield Together((stage,), holders, named, *plan.zero_at(stage, part=part), others)
    for stages in sorted({stages for stages in shared.values() if not modules.keys().isdisjoint(stages)}):
        for along in parts:
            part = {axis: getattr(place, axis)[0] for axis in along}
            firsts = [first for first in aliases if shared.get(first) == stages and axes(first) == along]
            if firsts:
                holders = comm.subset(plan.holders(*stages, part=part), ordered)
                named = [(first, p) for first in firsts if (p := become_one(modules, aliases[first])) is not None]
                zero = plan.zero_at(*stages, part=part)
                yield Together(stages, holders, named, *zero, _across(plan, comm.rank, place, along, *stages))


def _across(plan: Plan, rank: int, place: PartPlace, along: Sequence[str], *stages: int) -> tuple[int, ...]:
    """Of each part along these axes one holder: the one whose number among them is that of this rank."""
    own = {axis: getattr(place, axis)[0] for axis in along}
    every = product(*(range(getattr(place, axis)[1]) for axis in along))
    holders = {numbers: plan.holders(*stages, part=dict(zip(along, numbers, strict=True))) for numbers in every}
    mine = holders[tuple(own.values())]
    return tuple(alike[mine.index(rank)] for alike in holders.values())
