"""A part of a model, or all of it, in segments that are streamed one after the other.

Between segments the outputs are kept whole: visits of one segment begin there, so that they read less of a margin, and
repeat less for the rounds of their norms.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.parallel.pipeline.stage import Recipe, Stage
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.streaming.norms import KnownStatistics
from mpi4dl.parallel.streaming.route import Route
from mpi4dl.parallel.streaming.stream import Progress, Streaming, quietly
from mpi4dl.parallel.streaming.visits import Given, ImageSource, Visits

KNOWN = 64  # routes that are remembered before all are forgotten: bags of patches may have any size


@dataclass
class Segments:
    """What each segment of a module does, and batch norms by which of `norms.MODES`.

    Without recipes it is all of the module, which need not be traceable.
    """

    recipes: tuple[Recipe, ...]
    norms: str
    _parts: list["_Segment"] = field(default_factory=list)
    _routes: dict[Any, tuple[Route, ...]] = field(default_factory=dict)

    def run(
        self,
        module: nn.Module,
        source: Tensor | ImageSource,
        given: Given,
        visits: Visits,
        grid: Grid,
        size: tuple[int, ...],
        progress: Progress = quietly,
    ) -> Any:
        """What the last segment returns, of what the first is given: images of `size`."""
        parts = self._parts_of(module)
        found: tuple[Any, ...] = (source,)
        for number, (part, route) in enumerate(zip(parts, self._route(parts, given, visits, grid, size), strict=True)):
            name = f"segment {number + 1} of {len(parts)}, " if len(parts) > 1 else ""
            found = Streaming(part, found, route, grid, self.norms, progress, name).run()
        return parts[-1].nested(found)

    def parts(self, module: nn.Module) -> "list[_Segment]":
        """The segments, which share the modules of a model, or of a stage."""
        wanted: list[nn.Module] = [Stage(recipe, module) for recipe in self.recipes]
        found: list[_Segment] = []
        for part in wanted or [module]:
            found.append(_Segment(part, found[-1] if found else None))
        return found

    def _parts_of(self, module: nn.Module) -> "list[_Segment]":
        """The segments, in the modes of the module."""
        self._parts = self._parts or self.parts(module)
        for segment in self._parts:
            segment.training = module.training
            for name, inner in segment.part.named_modules():
                original = module.get_submodule(name)
                if inner is not original:
                    inner.training = original.training
        return self._parts

    def _route(
        self, parts: Sequence[nn.Module], given: Given, visits: Visits, grid: Grid, size: tuple[int, ...]
    ) -> tuple[Route, ...]:
        modes = tuple(inner.training for part in parts for inner in part.modules())
        key = (grid, given, visits, size, modes, torch.is_grad_enabled())
        if key not in self._routes:
            if len(self._routes) >= KNOWN:
                self._routes.clear()
            givens: tuple[Given, ...] = (given,)
            routes = []
            for part in parts:
                with nullcontext() if self.norms == "exact" else KnownStatistics().one_visit(noted=False):
                    routes.append(Route.of(part, visits, givens, size))
                givens = tuple(map(Given.like, routes[-1].rehearsed.outputs))
            self._routes[key] = tuple(routes)
        return self._routes[key]


class _Segment(nn.Module):
    """A part of a model, of the tensors in its values, which may be nests of them; `before` made them."""

    def __init__(self, part: nn.Module, before: "_Segment | None") -> None:
        super().__init__()
        self.part = part
        self.made: _Nest = _Nest()
        self._nest: _Nest = _Nest() if before is None else before.made

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found, self.made.structure = pytree.tree_flatten(self.part(*self._nest.of(tensors)))
        return tuple(found)

    def nested(self, tensors: Sequence[Tensor]) -> Any:
        """The part's outputs, of the tensors in them."""
        return self.made.of(tensors)


class _Nest:
    """How tensors lie in values; None: each is one. Copies of a module have it in common."""

    def __init__(self) -> None:
        self.structure: Any = None

    def of(self, tensors: Sequence[Tensor]) -> Any:
        return tensors if self.structure is None else pytree.tree_unflatten(tensors, self.structure)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Nest":
        return self


def spans_of(count: int, segments: int, rounds_of: Callable[[int], int | None]) -> list[tuple[int, int]]:
    """Of so many atoms the first of each segment, and the first behind it.

    Rounds are shared out evenly, and so are atoms where there are none: `rounds_of(n)` are those of the first n atoms;
    None if that is not known.
    """
    if segments == 1:
        return [(0, count)]
    rounds = [0]
    for end in range(1, count + 1):
        found = rounds_of(end)
        rounds.append(rounds[-1] if found is None else found)
    return list(pairwise([0, *_ends(rounds, min(segments, count)), count]))


def _ends(rounds: Sequence[int], segments: int) -> list[int]:
    """Behind how many atoms each segment but the last ends, if `rounds[i]` are those of the first i atoms."""
    ends: list[int] = []
    total, last = rounds[-1], len(rounds) - 1
    for segment in range(1, segments):
        if total:
            end = next(i for i, found in enumerate(rounds) if found * segments >= total * segment)
        else:
            end = last * segment // segments
        if end > (ends[-1] if ends else 0) and end < last:
            ends.append(end)
    return ends
