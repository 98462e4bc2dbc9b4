"""Streaming: a part of a model, run on one tile after the other, and again tile by tile in backward.

forward    for each round of statistics, and once more: every visit reads its tile, runs the part, keeps what it owns
backward   the same with the gradient of what it owns: every visit runs the part again, and its own backward pass

So memory is that of one visit and of the part's output, whatever the image's size. Other visits compute the pixels of a
margin, too. Only the output's own pixels count, each once, so gradients add up to those of the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl._progress import quietly
from mpi4dl._randomness import RandomStates
from mpi4dl.comm import Refusal
from mpi4dl.comm.exchange import narrow
from mpi4dl.datasets import DatasetError
from mpi4dl.parallel.blocks import Attributes
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned, wrap
from mpi4dl.parallel.streaming.background import AlikeEverywhere, BareTiles, NotAlike
from mpi4dl.parallel.streaming.margins import Route
from mpi4dl.parallel.streaming.norms import KnownStatistics, Seen
from mpi4dl.parallel.streaming.visits import Collected, Given, ImageSource, Script, Suspended, Told, VisitedGrid

# The inputs of a streamed part, and their gradients: every visit reads, and adds to, the boxes that it holds.


class Input:
    """The inputs of a part: `values`, of which this rank holds the parts that its visits need, and their gradient."""

    def __init__(self, values: Tensor | ImageSource, given: Given, layout: Layout | None) -> None:
        self.values, self.given, self.layout = values, given, layout
        self._gradient: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor | ImageSource, given: Given, route: Route, grid: Grid) -> "Input":
        """Other ranks send the parts that visits need and this rank does not own."""
        if given.tiling is None or not isinstance(x, Tensor):
            return cls(x, given, None)
        layout = route.of_rank(given, grid)
        if isinstance(x, SpatialTensor):
            return cls(retile(x, layout.tiling).local, given, layout)
        return cls(x, given, layout)

    def read(self, route: Route, tile: int) -> Tensor | None:
        """The pixels for the visit of a tile, if this is a source."""
        return None if isinstance(self.values, Tensor) else self.values.read(route.box(self.given, tile))

    def of_visit(self, grid: VisitedGrid, route: Route, device: torch.device, read: Tensor | None) -> Tensor:
        """The inputs of the visit of this grid, apart from any graph: a copy, which layers may overwrite.

        `read` is what was read for it.
        """
        if self.given.tiling is None:
            assert isinstance(self.values, Tensor)
            return self.values.detach().clone().requires_grad_(self.values.requires_grad)
        layout = route.layout(self.given, grid)
        if not isinstance(self.values, Tensor):
            assert read is not None
            return SpatialTensor(read.to(device), layout)
        assert self.layout is not None
        local = narrow(self.values.detach(), layout.dims, self.layout.held, layout.held).to(device, copy=True)
        return SpatialTensor(local.requires_grad_(self.values.requires_grad), layout)

    def add(self, value: Tensor, gradient: Tensor) -> None:
        """Add the gradient of what a visit was given."""
        assert isinstance(self.values, Tensor)
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.values)
        total = self._gradient
        if isinstance(value, SpatialTensor):
            assert self.layout is not None
            total = narrow(total, value.layout.dims, self.layout.held, value.layout.held)
        total.add_(gradient)

    def total(self) -> Tensor | None:
        found, self._gradient = self._gradient, None
        return found


Progress = Callable[[str], None]
Use = Callable[..., None]  # what is done with what a visit was given, and made


class Streaming:
    """One pass of what it is given through a part of a model: `run()` gives the part's outputs.

    `lead(*values)` is the part, which returns a tuple of tensors. `inputs` are this rank's part of what it takes: each
    a SpatialTensor of `grid`, or a plain tensor where one rank has all; images may be an `ImageSource`. `norms` is one
    of `norms.MODES`. `progress` is called with a description of every visit, of the part called `name`. Ranks that
    share the images call everything together.
    """

    def __init__(
        self,
        lead: nn.Module,
        inputs: Sequence[Tensor | ImageSource],
        route: Route,
        grid: Grid,
        norms: str = "exact",
        progress: Progress = quietly,
        name: str = "",
    ) -> None:
        self._progress, self._name = progress, name
        self._lead, self._route, self._grid, self._norms = lead, route, grid, norms
        self._script = Script()
        self._statistics = KnownStatistics()
        self._buffers = list(lead.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._parameters = [p for p in lead.parameters() if p.requires_grad]
        self._device = next(lead.parameters(), torch.empty(0)).device
        self._autocast = _autocast_now(self._device)
        self._attributes = Attributes(lead.modules())
        self._states = RandomStates.now((self._device,))
        self._digests = self._states.digests()
        self._differentiable = torch.is_grad_enabled()
        self._inputs = [Input.of(x, given, route, grid) for x, given in zip(inputs, route.givens, strict=True)]
        self._collected: list[Collected | None] = []
        of_images = len(self._inputs) == 1 and not isinstance(self._inputs[0].values, Tensor)
        self._bare = BareTiles(route) if of_images and BareTiles.may_be(route) else None

    def run(self) -> tuple[Tensor, ...]:
        """The part's outputs: this rank's part of each, as a SpatialTensor; a plain tensor where one rank has all."""
        tensors = [x.values for x in self._inputs if isinstance(x.values, Tensor)]
        found = _Streamed.apply(self, len(tensors), *tensors, *self._parameters)
        return tuple(
            value if collected is None or self._grid.size == 1 else wrap(value, collected.layout)
            for value, collected in zip(found, self._collected, strict=True)
        )

    def forward(self) -> list[Tensor]:
        """The local tensors of the outputs."""
        found: list[Tensor] = []

        def keep(values: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            if not found:
                for y in outputs:
                    if not isinstance(y, Tensor):
                        raise TypeError(f"the streamed part returns a {type(y).__name__}: only tensors can be streamed")
                    self._collected.append(
                        Collected(self._route.visits, self._grid, y) if isinstance(y, SpatialTensor) else None
                    )
                found.extend(
                    y.detach() if collected is None else collected.local
                    for y, collected in zip(outputs, self._collected, strict=True)
                )
            for y, collected in zip(outputs, self._collected, strict=True):
                if collected is not None and isinstance(y, SpatialTensor):
                    collected.take(y)

        try:
            self._all_rounds(keep, forward=True)
        except NotAlike:
            self._bare, self._route.spares = None, False
            self._script, self._statistics = Script(), KnownStatistics()
            self._all_rounds(keep, forward=True)
        for collected in self._collected:
            if collected is not None:
                collected.close()
        if self._norms == "frozen":
            _put(self._buffers, self._before)
        elif self._norms == "running":
            self._statistics.merge(self._grid.comm)
        return found

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs that are tensors, and of the parameters, summed over this rank's visits."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        is_first = True

        def differentiate(values: Sequence[Tensor], outputs: Sequence[Tensor], constant: int = 0) -> None:
            """Add up the gradients of a visit; `constant`: so many times those of one whose outputs' are 0."""
            nonlocal is_first
            roots, of_roots = [], []
            for y, collected, gradient in zip(outputs, self._collected, gradients, strict=True):
                if gradient is None or not y.requires_grad:
                    continue
                if collected is not None and isinstance(y, SpatialTensor):
                    share = self._gradient(y.layout.grid.rank, collected, gradient)
                    roots.append(owned(y))
                    of_roots.append(torch.zeros_like(share) if constant else share)
                else:  # every visit has the whole of it, so that it counts in one of them
                    roots.append(y)
                    of_roots.append(gradient if is_first else torch.zeros_like(gradient))
            is_first = False
            if not roots:
                return
            wanted = [(x, value) for x, value in zip(self._inputs, values, strict=True) if value.requires_grad]
            leaves = [value.local if isinstance(value, SpatialTensor) else value for _, value in wanted]
            found = torch.autograd.grad(roots, [*leaves, *self._parameters], of_roots, allow_unused=True)
            for (x, value), gradient in zip(wanted, found, strict=False):
                if gradient is not None:
                    x.add(value, gradient)
            for i, gradient in enumerate(found[len(wanted) :]):
                if gradient is not None:
                    known = sums[i]
                    sums[i] = gradient if known is None else known.add_(gradient, alpha=constant or 1)

        self._buffers = list(self._lead.buffers())  # GEMS has others in forward
        after = [buffer.clone() for buffer in self._buffers]
        self._all_rounds(differentiate, forward=False)
        _put(self._buffers, after)
        return [*(x.total() for x in self._inputs if isinstance(x.values, Tensor)), *sums]

    def _all_rounds(self, use: Use, forward: bool) -> None:
        """Visit all tiles until every round is known; visits of the last pass are ended by `use`."""
        state, attributes = RandomStates.now((self._device,)), Attributes(self._lead.modules())
        while told := self._told_by_all(*(self._forward_pass(use) if forward else self._backward_pass(use))):
            self._script.rounds.append([told[tile] for tile in range(self._route.visits.grid.size)])
        if not forward:
            state.put()
            attributes.put()

    def _forward_pass(self, use: Use) -> tuple[dict[int, Told], Exception | None]:
        """Visit all tiles of this rank: what they told in the first round that is not known, if there is one.

        And why it could not be done: an image that cannot be read, or tiles that are `NotAlike`.
        """
        told: dict[int, Told] = {}
        bare = self._bare
        known, rounds = len(self._script.rounds), self._route.rehearsed.num_rounds
        for tile, read in self._read_ahead(f"forward, pass {known + 1} of {rounds + 1}"):
            if isinstance(read, DatasetError):
                return told, read
            kind = None if bare is None or read[0] is None else bare.kind(tile, read[0])
            if bare is not None and kind is not None and bare.spare(kind, tile):
                continue
            visit = self._visit(tile, read, use, self._norms == "running", compared=kind is not None)
            if visit.told is not None:
                told[tile] = visit.told
            if bare is not None and kind is not None:
                try:
                    bare.saw(kind, tile, visit.made, visit.seen)
                except NotAlike as error:
                    return told, error
        for tile, first, of_kind in () if bare is None else bare.spared():
            if first in told:
                told[tile] = told[first]
                continue
            for collected, pixel in zip(self._collected, of_kind.made, strict=True):
                assert collected is not None
                collected.part(tile, collected.local).copy_(pixel)
            self._statistics.add(of_kind.seen)
        return told, None

    def _backward_pass(self, use: Use) -> tuple[dict[int, Told], Exception | None]:
        """The same with gradients."""
        told: dict[int, Told] = {}
        rounds = len(self._script.rounds) - self._route.rehearsed.num_rounds
        for tile, read in self._read_ahead(f"backward, pass {rounds + 1}"):
            if isinstance(read, DatasetError):
                return told, read
            others = [] if self._bare is None else self._bare.others(tile)
            visit = self._visit(tile, read, use)
            if visit.told is None:
                if others and rounds:
                    self._visit(tile, read, partial(use, constant=len(others)))
                continue
            if others and not visit.additive:
                self._bare = None
                return self._backward_pass(use)
            told[tile] = visit.told
            if others and rounds:
                told[tile] = visit.told + len(others) * self._visit(tile, read, partial(use, constant=len(others))).told
            told |= {other: torch.zeros_like(visit.told) for other in others}
        return told, None

    def _visit(
        self, tile: int, read: Sequence[Tensor | None], use: Use, noted: bool = False, compared: bool = False
    ) -> "_Visit":
        """Visit one tile; nothing else that it made is there any more when the next visit begins.

        `noted`: what batch norms see is to be merged into their running statistics. `compared`: what it made is, with
        that of another one.
        """
        grid = self._route.grid(tile, self._script)
        values = [x.of_visit(grid, self._route, self._device, mine) for x, mine in zip(self._inputs, read, strict=True)]
        told, additive, made = None, False, []
        watched = AlikeEverywhere(self._route.cut)
        try:
            with self._as_before(), self._by_its_norms(noted) as seen:
                with watched if compared else nullcontext():
                    outputs = self._lead(*values)
                grid.foresight.pay()
                use(values, outputs)
            if compared:
                made = [owned(y).detach() for y in outputs]
        except Suspended as suspended:
            told, additive = suspended.told, suspended.additive
            if isinstance(told, Tensor):
                made = [told.flatten()[None]]
        drew = compared and RandomStates.now((self._device,)).digests() != self._digests
        return _Visit(told, additive, made if made and watched.alike and not drew else None, seen or [])

    def _gradient(self, tile: int, collected: Collected, gradient: Tensor) -> Tensor:
        """The gradient of what a tile owns of an output, and of what other tiles do that it stands for."""
        total = collected.part(tile, gradient)
        for other in () if self._bare is None else self._bare.others(tile):
            total = total + collected.part(other, gradient)
        return total

    def _read_ahead(self, doing: str) -> Iterator[tuple[int, Sequence[Tensor | None] | DatasetError]]:
        """The tiles that this rank visits in one pass, with what was read for each, or why it could not be.

        While one is visited, a thread reads for the next.
        """

        def read(tile: int) -> Sequence[Tensor | None] | DatasetError:
            try:
                return [x.read(self._route, tile) for x in self._inputs]
            except DatasetError as error:
                return error

        instead = {} if self._bare is None else self._bare.instead
        own = [tile for tile in self._route.visits.own if tile not in instead]
        in_memory = all(isinstance(x.values, Tensor) for x in self._inputs)
        with ThreadPoolExecutor(1) as thread:
            coming = None if in_memory else thread.submit(read, own[0])
            for count, (tile, following) in enumerate(zip_longest(own, own[1:]), start=1):
                found = read(tile) if coming is None else coming.result()
                if coming is not None and following is not None:
                    coming = thread.submit(read, following)
                self._progress(f"{self._name}{doing}, tile {count} of {len(own)}")
                yield tile, found

    def _told_by_all(self, told: dict[int, Told], problem: Exception | None) -> dict[int, Told]:
        """The contributions of the visits of all ranks.

        Raises on all of them:
            Refusal: one could not read an image.
            NotAlike: tiles of one are.
        """
        every: dict[int, Told] = {}
        problems = []
        for of_rank, trouble in self._grid.comm.all_gather_object((told, problem)):
            every |= of_rank
            problems.append(trouble)
        for trouble in problems:
            if isinstance(trouble, DatasetError):
                raise Refusal(str(trouble)) from trouble
        for trouble in problems:
            if trouble is not None:
                raise trouble
        return every

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Every visit finds buffers, counters and random numbers as the first one did."""
        _put(self._buffers, self._before)
        self._attributes.put()
        self._states.put()
        with self._autocast(), torch.set_grad_enabled(self._differentiable):
            yield

    def _by_its_norms(self, noted: bool) -> AbstractContextManager[Seen | None]:
        return nullcontext() if self._norms == "exact" else self._statistics.one_visit(noted)


class _Visit(NamedTuple):
    """The result of a visit: its contribution `told`, if it was suspended, or the statistics of its norms.

    `additive`: only the sum of what all tiles tell matters. `made` is what may be compared with what another one made.
    """

    told: Told
    additive: bool
    made: Sequence[Tensor] | None
    seen: Seen


class _Streamed(torch.autograd.Function):
    """The outputs of a part, of its inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, streaming: Streaming, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.streaming = streaming
        ctx.save_for_backward(*tensors[:num_inputs])  # so that nobody changes them
        ctx.set_materialize_grads(False)
        found = streaming.forward()
        ctx.mark_non_differentiable(*(y for y in found if not (y.is_floating_point() or y.is_complex())))
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return (None, None, *ctx.streaming.backward(gradients))


def _put(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _autocast_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes the present context of autocast."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)
