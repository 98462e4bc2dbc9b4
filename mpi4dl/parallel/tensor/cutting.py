"""Cut parameters over ranks: modules see a tensor of the whole shape, of which each rank has its part.

    module.weight            SpatialTensor (out, in), made of the part when it is asked for
    parameters(), optimizer  the part, (out / N, in): a leaf like any other; while the model runs, as module.weight

Rules for tensors that are spread do the rest: a linear layer whose outputs are cut makes features that are cut; one
whose inputs are cut sums over the ranks. The calls of a model in between (views as heads, attention, activations) use
global shapes. Layers of experts see their part as it is, and tokens come to them (`parallel.experts`).
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mpi4dl.comm import Refusal
from mpi4dl.geometry import Interval, Split, Tiling, ceil_div, even_cuts
from mpi4dl.parallel.experts import lay_over
from mpi4dl.parallel.inputs import copied
from mpi4dl.parallel.replicas.groups import Elements
from mpi4dl.parallel.spatial.grid import Factor, Flat, Grid, Layout, PartPlace
from mpi4dl.parallel.spatial.rules.hooks import whole_gradients
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.tensor.styles import Cut, Cuts, Cutting, Degrees, names_by_first


@dataclass(frozen=True)
class ParameterPart:
    """One rank's part of a parameter: a box of it, once each dim that is cut is opened, as `Cut` says."""

    opened: tuple[int, ...]
    box: tuple[Interval, ...]
    shape: tuple[int, ...]  # of the part

    @classmethod
    def of(cls, cuts: Cuts, shape: Sequence[int], place: PartPlace) -> "ParameterPart":
        """That of the rank at this place."""
        opened: list[int] = []
        box: list[Interval] = []
        closed: list[int] = []
        for dim, size in enumerate(shape):
            cut = next((each for each in cuts if each.dim == dim), None)
            outer, multiples = (1, size) if cut is None else (cut.outer, size // cut.outer // cut.multiple)
            index, count = (0, 1) if cut is None else place.among(cut.axes)
            width = 1 if cut is None else cut.multiple
            start, stop = (n * width for n in even_cuts(multiples, count)[index : index + 2])
            opened += [outer, size // outer]
            box += [Interval(0, outer), Interval(start, stop)]
            closed.append(outer * (stop - start))
        return cls(tuple(opened), tuple(box), tuple(closed))

    def of_whole(self, whole: Tensor) -> Tensor:
        """This part of a parameter."""
        return whole.reshape(self.opened)[tuple(slice(*side) for side in self.box)].reshape(self.shape)

    @cached_property
    def _last(self) -> int:
        """The last opened dim of which the rank has not all."""
        cut = [d for d, side in enumerate(self.box) if side.length < self.opened[d]]
        return max(cut, default=0)

    def runs(self, start: int, stop: int) -> Iterator[Elements]:
        """Where elements [start, stop) of the part, flattened, are in the whole."""
        last = self._last
        behind = math.prod(self.opened[last + 1 :])
        length = self.box[last].length * behind
        for number in range(start // length, ceil_div(stop, length)):
            place, rest, stride = self.box[last].start * behind, number, self.opened[last] * behind
            for side, size in zip(self.box[:last][::-1], self.opened[:last][::-1], strict=True):
                rest, index = divmod(rest, side.length)
                place += (side.start + index) * stride
                stride *= size
            first, end = max(start, number * length), min(stop, (number + 1) * length)
            begin = place - number * length
            yield Elements(first - start, begin + first, begin + end)


def cut_parameters(model: nn.Module, cutting: Cutting, grid: Grid) -> dict[str, Layout]:
    """Leave of each parameter that is cut this rank's part in the model; returns layouts of those seen whole, by name.

    Tied parameters stay tied. Experts are laid over the ranks of `grid`.
    """
    layouts: dict[str, Layout] = {}
    cut, known = cutting.of(model), Known()
    for names in names_by_first(model).values():
        name = next((each for each in names if each in cut), None)
        if name is None:
            continue
        whole = model.get_parameter(name)
        own = ParameterPart.of(cut[name], whole.shape, grid.place)
        part = nn.Parameter(own.of_whole(whole.detach()).clone(), whole.requires_grad)
        inside = name.rpartition(".")[0] in cutting.experts
        layout = None if inside else layout_of(cut[name][0], whole.shape, grid)
        for each in names:
            path, _, leaf = each.rpartition(".")
            holder = model.get_submodule(path)
            holder._parameters[leaf] = part
            if not isinstance(holder._parameters, CutParameters):
                holder._parameters = CutParameters(holder._parameters, {}, known)
            holder._parameters.layouts[leaf] = layout
            if layout is not None:
                layouts[each] = layout
    paths = dict(model.named_modules())
    for path, num_experts in cutting.experts.items():
        if path in paths:
            lay_over(paths[path], num_experts, cutting.axes_of_experts, grid)
    return layouts


def with_cuts(model: nn.Module, grid: Grid, cutting: Cutting) -> nn.Module:
    """A copy of the model with this rank's parts of its parameters; itself, if nothing of it is cut."""
    if not cutting:
        return model
    own = copied(model)
    cut_parameters(own, cutting, grid)
    return own


def layout_of(cut: Cut, shape: torch.Size, grid: Grid) -> Layout:
    """How ranks along the axis of features hold a parameter of this shape."""
    size, axis = shape[cut.dim] // cut.outer, grid.features
    assert axis is not None
    splits = [Split.at(range(parts + 1)) for parts in grid.shape]
    splits[axis] = Split.at([n * cut.multiple for n in even_cuts(size // cut.multiple, grid.shape[axis])])
    dims = [cut.dim if other == axis else None for other in grid.axes]
    flat = () if cut.outer == 1 else (Flat(cut.dim, (Factor(None, cut.outer), Factor(axis))),)
    return Layout(grid, Tiling(tuple(splits)), tuple(dims), flat)


def largest_part(cuts: Cuts, shape: Sequence[int], degrees: Degrees) -> tuple[int, ...]:
    """The shape of the largest of the parts of a parameter of this shape, which the last of the ranks has."""
    last = PartPlace((degrees.features - 1, degrees.features), (degrees.experts - 1, degrees.experts))
    return ParameterPart.of(cuts, shape, last).shape


# What there is of parts, seen whole, by their ids and whether they are trained: tied ones stay one.
Known = WeakValueDictionary[tuple[int, bool], Tensor]


class CutParameters(dict[str, "nn.Parameter | None"]):
    """The `_parameters` of a module with parts: each attribute with a layout is whole; while a model runs, all are."""

    def __init__(self, values: Any, layouts: "dict[str, Layout | None]", known: Known) -> None:
        super().__init__(values)
        self.layouts, self._known = layouts, known
        self._replaced = set[str]()  # those of which a model has put whole ones here, as functional_call

    def __deepcopy__(self, memo: dict[int, Any]) -> "CutParameters":
        return CutParameters(copy.deepcopy({**self}, memo), {**self.layouts}, Known())

    def __getitem__(self, name: str) -> Any:
        part, layout = dict.__getitem__(self, name), self.layouts.get(name)
        if part is None or layout is None or name in self._replaced:
            return part
        key = id(part), part.requires_grad and torch.is_grad_enabled()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = seen_whole(part, layout)
        return known

    def __setitem__(self, name: str, value: Any) -> None:
        known = getattr(value, "parameter", None)
        (self._replaced.add if known is None and _runs() else self._replaced.discard)(name)
        super().__setitem__(name, value if known is None else known)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if _runs() and name in self else dict.get(self, name, default)

    def values(self) -> Any:
        return (value for _, value in self.items())

    def items(self) -> Any:
        for name in self:
            if _runs() and self.layouts.get(name, self) is None:
                raise Refusal(
                    f"the model asks for all of its parameters, but ranks have parts of the experts' {name}: let it "
                    "leave experts out, or train without `experts` and `tensor`"
                )
            yield name, self.get(name)


def _runs() -> bool:
    """Whether a model does, forward or backward."""
    return whole_gradients.is_entered() or torch._C._current_graph_task_id() >= 0


def seen_whole(part: nn.Parameter, layout: Layout) -> SpatialTensor:
    """A rank's part of a parameter as one of the whole."""
    whole = SpatialTensor(part.view_as(part), layout)  # a function of it, so that who keeps it elsewhere brings it
    whole.parameter = part
    whole._is_param = True  # an nn.Parameter, as `get_parameter` asks
    return whole
