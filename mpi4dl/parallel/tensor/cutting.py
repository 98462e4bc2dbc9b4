"""Cut parameters over ranks: modules see a tensor of the whole shape, of which each rank has its part.

    module.weight            SpatialTensor (out, in), made of the part when it is asked for
    parameters(), optimizer  the part, (out / N, in): a leaf like any other

Rules for tensors that are spread do the rest: a linear layer whose outputs are cut makes features that are cut; one
whose inputs are cut sums over the ranks. What a model does in between (views as heads, attention, activations)
goes by global shapes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.geometry import Split, Tiling, ceil_div, even_cuts
from mpi4dl.parallel.replicas.groups import Stretch
from mpi4dl.parallel.spatial.grid import Factor, Flat, Grid, Layout
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.tensor import wrap
from mpi4dl.parallel.tensor.styles import Cut


def cut_parameters(model: nn.Module, cuts: Mapping[str, Cut], grid: Grid) -> dict[str, Layout]:
    """Leave of each parameter that is cut this rank's part in the model; returns the layouts, by name.

    Tied parameters stay tied. `grid` has an axis of features.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    layouts: dict[str, Layout] = {}
    for name, cut in cuts.items():
        if name in layouts:
            continue  # tied to one before
        whole = model.get_parameter(name)
        layout = layout_of(cut, whole.shape, grid)
        part = nn.Parameter(part_of(whole.detach(), cut, layout).clone(), whole.requires_grad)
        for each in names[id(whole)]:
            path, _, leaf = each.rpartition(".")
            _hold(model.get_submodule(path), leaf, part, layout)
            layouts[each] = layout
    return layouts


def with_cuts(model: nn.Module, grid: Grid, cuts: Mapping[str, Cut]) -> nn.Module:
    """A copy of the model with this rank's parts of its parameters; itself, if nothing of it is cut."""
    own = own_cuts(model, cuts)
    if not own:
        return model
    held = deepcopy(model)
    cut_parameters(held, own, grid)
    return held


def layout_of(cut: Cut, shape: torch.Size, grid: Grid) -> Layout:
    """How ranks hold a parameter of this shape."""
    size, axis = shape[cut.dim] // cut.outer, _features(grid)
    splits = [Split.at(range(parts + 1)) for parts in grid.shape]
    splits[axis] = Split.at([n * cut.unit for n in even_cuts(size // cut.unit, grid.shape[axis])])
    dims = [cut.dim if other == axis else None for other in grid.axes]
    flat = () if cut.outer == 1 else (Flat(cut.dim, (Factor(None, cut.outer), Factor(axis))),)
    return Layout(grid, Tiling(tuple(splits)), tuple(dims), flat)


def largest_part(cut: Cut, shape: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The shape of the largest of the parts of a parameter of this shape, which the last of the ranks has."""
    units = shape[cut.dim] // cut.outer // cut.unit
    length = cut.outer * cut.unit * ceil_div(units, num_ranks)
    return (*shape[: cut.dim], length, *shape[cut.dim + 1 :])


def own_cuts(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Those of `cuts` that are of parameters of this module which are trained."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {name: cut for name, cut in cuts.items() if name in named and named[name].requires_grad}


def part_of(whole: Tensor, cut: Cut, layout: Layout) -> Tensor:
    """This rank's part of a parameter."""
    mine = layout.owned[_features(layout.grid)]
    opened = whole.unflatten(cut.dim, (cut.outer, whole.shape[cut.dim] // cut.outer))
    return opened.narrow(cut.dim + 1, mine.start, mine.length).flatten(cut.dim, cut.dim + 1)


def runs_of(cut: Cut, shape: Sequence[int], layout: Layout, start: int, stop: int) -> Iterator[Stretch]:
    """Where elements [start, stop) of a part, flattened, are in the whole."""
    mine, behind = layout.owned[_features(layout.grid)], math.prod(shape[cut.dim + 1 :])
    length, whole = mine.length * behind, shape[cut.dim] // cut.outer * behind
    for number in range(start // length, ceil_div(stop, length)):
        first, last = max(start, number * length), min(stop, (number + 1) * length)
        begin = number * (whole - length) + mine.start * behind
        yield Stretch(first - start, begin + first, begin + last)


def _features(grid: Grid) -> int:
    assert grid.features is not None
    return grid.features


def whole_of(part: Tensor, layout: Layout) -> Tensor:
    """The parameter, or its gradient, of which this is the rank's part. Collective over the grid."""
    return gather(wrap(part.detach(), layout))


def _hold(module: nn.Module, name: str, part: nn.Parameter, layout: Layout) -> None:
    """Let a module have a part of a parameter, which it sees as a part of the whole."""

    def seen(self: Any) -> Tensor:
        known: Tensor = self._parameters[name]
        return wrap(known.view_as(known), layout)  # a function of it, so that who keeps it elsewhere brings it

    module._parameters[name] = part
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: property(seen), "__module__": kind.__module__})
