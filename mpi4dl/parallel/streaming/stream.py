"""Streaming: a part of a model runs on one tile after the other, and again tile by tile in the backward pass.

forward    passes over all tiles, one for each statistic and a last one: each tile reads its pixels, runs the part, and
           in the last pass writes the output that it owns
backward   the same passes with the gradient of that output: each tile runs the part again, then its backward pass

So the memory is that of one tile and of the part's output, whatever the size of the image. Margins are computed by
several tiles. Only the output pixels that a tile owns get a gradient, so the sum over all tiles is exact.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl._randomness import RandomStates
from mpi4dl._wording import quietly
from mpi4dl.comm import Refusal
from mpi4dl.comm.exchange import LocalFunction, narrow, once_differentiable
from mpi4dl.comm.streams import carried
from mpi4dl.datasets import DatasetError
from mpi4dl.parallel.disk import ON_DEVICE, Keep, NoRoom, let_go
from mpi4dl.parallel.pipeline.decisions import Buffers, ForwardState, watches_of
from mpi4dl.parallel.replicas.optimizer_traits import set_aside
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part, owned, wrap
from mpi4dl.parallel.streaming.background import BackgroundTiles, PositionCheck, TilesDiffer
from mpi4dl.parallel.streaming.margins import StreamPlan
from mpi4dl.parallel.streaming.norms import RunningNorms, TileMoments
from mpi4dl.parallel.streaming.stream_tiles import (
    AwaitStatistics,
    Contribution,
    ImageSource,
    InputSpec,
    OutputBuffer,
    StreamGrid,
)

DRIFTED = (
    "the streamed part of the model does not do the same when a tile of the image runs again: as it runs it changes "
    "what streaming does not put back, such as a weight, or in place a tensor that is no buffer, or a hook on a "
    "gradient changes an attribute; keep numbers in attributes of modules, and write to buffers in place, in forward"
)
SAME = {8: 1e-12, 4: 1e-5, 2: 1e-2}  # by the bytes of a number: what kernels without an order of sums differ by
TOUCHED_BYTES = 64 << 20  # of inputs that tiles read of files until these leave the memory
Contributions = dict[int, Contribution]  # by tile
TilePixels = Sequence[Tensor | None]  # for each input the pixels that a tile read; None for an input that is a tensor


class Input:
    """One input of a part, `values`, of which this rank holds the boxes of its tiles, and the gradient of it.

    Making one is collective: other ranks send the boxes that the tiles of this rank need and it does not own.
    """

    def __init__(self, x: Tensor | ImageSource, spec: InputSpec, plan: StreamPlan, grid: Grid, keep: Keep) -> None:
        self.values, self.spec, self._plan, self._keep = x, spec, plan, keep
        self._layout: Layout | None = None
        self._gradient: Tensor | None = None
        self._is_copy = False
        if spec.tiling is not None and isinstance(x, Tensor):
            self._layout = plan.rank_layout(spec, grid)
            if isinstance(x, SpatialTensor):
                self._is_copy = self._layout.tiling != x.layout.tiling
                self.values = retile(x, self._layout.tiling).local

    def move(self) -> None:
        """Move what came with a halo of other ranks to where it is kept. Raises NoRoom."""
        if self._is_copy and isinstance(self.values, Tensor):
            self.values = self._keep.moved(self.values)

    def read(self, tile: int) -> Tensor | None:
        """The pixels of a tile; None if this input is a tensor in memory."""
        return None if isinstance(self.values, Tensor) else self.values.read(self._plan.box(self.spec, tile))

    def for_tile(self, grid: StreamGrid, device: torch.device, read: Tensor | None) -> Tensor:
        """A copy of the box of the tile of this grid, detached from any graph. `read` is the result of `read()`."""
        if self.spec.tiling is None:
            assert isinstance(self.values, Tensor)
            return self.values.detach().clone().requires_grad_(self.values.requires_grad)
        layout = self._plan.layout(self.spec, grid)
        if not isinstance(self.values, Tensor):
            assert read is not None
            return SpatialTensor(carried(read, device), layout)
        assert self._layout is not None
        local = narrow(self.values.detach(), layout.dims, self._layout.held, layout.held).to(device, copy=True)
        return SpatialTensor(local.requires_grad_(self.values.requires_grad), layout)

    def add(self, value: Tensor, gradient: Tensor) -> None:
        """Add the gradient of `value`, a result of `for_tile()`."""
        assert isinstance(self.values, Tensor)
        if self._gradient is None:
            self._gradient = self._keep.zeros(self.values.shape, self.values.dtype, self.values.device)
        total = self._gradient
        if isinstance(value, SpatialTensor):
            assert self._layout is not None
            total = narrow(total, value.layout.dims, self._layout.held, value.layout.held)
        total.add_(gradient.to(total.device))

    def let_go(self) -> None:
        """Keep nothing of it in memory that is in a file."""
        let_go(self.values if isinstance(self.values, Tensor) else None, self._gradient)

    def total(self) -> Tensor | None:
        """The sum of the gradients, of the shape of `values`, which is then forgotten; None if there were none."""
        found, self._gradient = self._gradient, None
        return found


Progress = Callable[[str], None]
Use = Callable[..., None]  # takes the inputs and the outputs of a tile that ran to its end


class Streaming:
    """One forward pass of a batch through a streamed part of a model, and its backward pass.

    Ranks that share the images make all calls together.

    Args:
        part: the part, which returns a tuple of tensors.
        inputs: for each input a SpatialTensor of `grid`, a plain tensor where one rank has all, or an `ImageSource`.
        plan: the tiles, and the margin.
        grid: the ranks that share the images.
        norms: the mode of batch norms, one of `norms.MODES`.
        progress: is called with a line of text before each tile.
        name: what that line calls the part.
        keep: where the inputs and their gradients are kept, or the outputs; by default on the device.
        device: that of the part, which need not have parameters.
    """

    def __init__(
        self,
        part: nn.Module,
        inputs: Sequence[Tensor | ImageSource],
        plan: StreamPlan,
        grid: Grid,
        norms: str = "exact",
        progress: Progress = quietly,
        name: str = "",
        keep: tuple[Keep, Keep] = (ON_DEVICE, ON_DEVICE),
        device: torch.device | None = None,
    ) -> None:
        self._progress, self._name, self._keep = progress, name, keep[1]
        self._part, self._plan, self._grid, self._norms = part, plan, grid, norms
        self._recorded: list[Sequence[Contribution]] = []  # the statistics: contributions by tile
        self._statistics = RunningNorms()
        self._buffers = Buffers(part)
        self._initial_buffers = self._buffers.values()
        self._parameters = [p for p in part.parameters() if p.requires_grad]
        self._device = device or next(part.parameters(), torch.empty(0)).device
        kind = self._device.type
        autocast: dict[str, Any] = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        self._autocast = partial(torch.autocast, kind, **autocast)
        self._globals = watches_of(part)
        self._before = ForwardState(part, self._globals)
        self._states = RandomStates.now((self._device,))
        self._digests = self._states.digests()
        self._differentiable = torch.is_grad_enabled()
        self._is_first = True  # no tile of this pass has been differentiated
        self._inputs = [Input(x, spec, plan, grid, keep[0]) for x, spec in zip(inputs, plan.inputs, strict=True)]
        self._touched_bytes = 0
        with grid.comm.together((NoRoom,)):
            for each in self._inputs:
                each.move()
        self._outputs: list[OutputBuffer | None] = []  # None for an output that every tile has whole
        self._sketches: dict[int, list[Tensor]] = {}  # by tile: of its outputs in the forward pass
        self._drift: list[Tensor] = []  # how far they were from these in the backward pass, beyond rounding
        self._hooked = False  # whether differentiating a tile changed an attribute
        of_images = len(self._inputs) == 1 and not isinstance(self._inputs[0].values, Tensor)
        self._background = BackgroundTiles(plan) if of_images and BackgroundTiles.applies_to(plan) else None

    def run(self) -> tuple[Tensor, ...]:
        """The part's outputs: this rank's part of each, as a SpatialTensor; a plain tensor where one rank has all."""
        tensors = [x.values for x in self._inputs if isinstance(x.values, Tensor)]
        found = _Streamed.apply(self, len(tensors), *tensors, *self._parameters)
        return tuple(
            value if buffer is None or self._grid.size == 1 else wrap(value, buffer.layout)
            for value, buffer in zip(found, self._outputs, strict=True)
        )

    def forward(self) -> list[Tensor]:
        """The local tensors of the outputs."""
        found: list[Tensor] = []

        def write(values: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            if not found:
                for y in outputs:
                    if not isinstance(y, Tensor):
                        raise TypeError(f"the streamed part returns a {type(y).__name__}: only tensors can be streamed")
                    buffer = None
                    if isinstance(y, SpatialTensor):
                        buffer = OutputBuffer(self._plan.tiles, self._grid, y, self._keep)
                    self._outputs.append(buffer)
                    found.append(y.detach() if buffer is None else buffer.local)
            for y, buffer in zip(outputs, self._outputs, strict=True):
                if buffer is not None and isinstance(y, SpatialTensor):
                    buffer.write(y)

        try:
            self._all_passes(self._forward_pass, write)
        except TilesDiffer:
            self._background, self._plan.skips_equal = None, False
            self._recorded, self._statistics = [], RunningNorms()
            self._all_passes(self._forward_pass, write)
        for buffer in self._outputs:
            if buffer is not None:
                del buffer.local  # the memory now belongs to the output
        if self._norms == "frozen":
            self._buffers.assign(self._initial_buffers)
        elif self._norms == "running":
            self._statistics.merge(self._grid.comm)
        return found

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs that are tensors, and of the parameters, summed over the tiles of this rank."""
        sums: list[Tensor | None] = [None] * len(self._parameters)

        def collect(i: int, gradient: Tensor, weight: int) -> None:
            known = sums[i]  # a copy at first: two parameters may get one tensor
            sums[i] = gradient.clone() if known is None else known.add_(gradient, alpha=weight)

        def differentiate(values: Sequence[Tensor], outputs: Sequence[Tensor], zero_weight: int = 0) -> None:
            """Add the gradients of a tile. `zero_weight` > 0: add them so many times, for an output gradient of 0."""
            if self._is_first:
                sums[:] = [None] * len(sums)  # a pass that ended at a statistic had found some of them
            roots, of_roots = [], []
            for y, buffer, gradient in zip(outputs, self._outputs, gradients, strict=True):
                if gradient is None or not y.requires_grad:
                    continue
                if buffer is not None and isinstance(y, SpatialTensor):
                    own = self._gradient(y.layout.grid.rank, buffer, gradient).to(self._device)
                    roots.append(owned(y))
                    of_roots.append(torch.zeros_like(own) if zero_weight else own)
                else:  # every tile has the whole output, so its gradient goes to the first tile of a pass only
                    roots.append(y)
                    of_roots.append(gradient if self._is_first else torch.zeros_like(gradient))
            self._is_first = False
            if not roots:
                return
            wanted = [(x, value) for x, value in zip(self._inputs, values, strict=True) if value.requires_grad]
            leaves = [value.local if isinstance(value, SpatialTensor) else value for _, value in wanted]
            take = partial(collect, weight=zero_weight or 1)
            found = gradients_of(roots, of_roots, leaves, self._parameters, take)
            for (x, value), gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    x.add(value, gradient)

        self._buffers = Buffers(self._part)  # under GEMS these are not the buffers of the forward pass
        buffers = self._buffers.values()
        state, after = RandomStates.now((self._device,)), ForwardState(self._part, self._globals)
        self._all_passes(self._backward_pass, differentiate)
        state.put()
        after.restore()
        self._buffers.assign(buffers)
        return [*(x.total() for x in self._inputs if isinstance(x.values, Tensor)), *sums]

    def _all_passes(self, one_pass: Callable[[Use], tuple[Contributions, Exception | None]], use: Use) -> None:
        """Pass over all tiles until every statistic is recorded. In the last pass `use` takes the outputs."""
        while contributions := self._gather(*one_pass(use)):
            self._recorded.append([contributions[tile] for tile in range(self._plan.tiles.grid.size)])

    def _forward_pass(self, use: Use) -> tuple[Contributions, Exception | None]:
        """One pass over the tiles of this rank.

        Returns:
            The contributions of the tiles to the next statistic; none in the last pass.
            The error that ended the pass: an image that cannot be read, no room for outputs, or `TilesDiffer`.
        """
        found: Contributions = {}
        background = self._background
        number, count = len(self._recorded) + 1, self._plan.profile.num_statistics + 1
        for tile, read in self._read_ahead(f"forward, pass {number} of {count}"):
            if isinstance(read, DatasetError):
                return found, read
            key = None if background is None or read[0] is None else background.key(tile, read[0])
            if background is not None and key is not None and background.skip(key, tile):
                continue
            try:
                result = self._run_tile(tile, read, use, self._norms == "running", compare=key is not None)
            except NoRoom as error:
                return found, error
            if result.contribution is not None:
                found[tile] = result.contribution
            if background is not None and key is not None:
                try:
                    background.compare(key, tile, result.comparable, result.moments)
                except TilesDiffer as error:
                    return found, error
        for tile, first, equal in () if background is None else background.skipped():
            if first in found:
                found[tile] = found[first]
                continue
            for buffer, pixel in zip(self._outputs, equal.pixels, strict=True):
                assert buffer is not None
                buffer.owned_part(tile, buffer.local).copy_(pixel)
            self._statistics.add(equal.moments)
        return found, None

    def _backward_pass(self, use: Use) -> tuple[Contributions, Exception | None]:
        """The same with gradients. `background.py` explains the gradient of equal tiles."""
        self._is_first = True
        found: Contributions = {}
        done = len(self._recorded) - self._plan.profile.num_statistics
        for tile, read in self._read_ahead(f"backward, pass {done + 1}"):
            if isinstance(read, DatasetError):
                return found, read
            equal = [] if self._background is None else self._background.equal_to(tile)
            try:
                result = self._run_tile(tile, read, use)
            except NoRoom as error:
                return found, error
            constant = None
            if equal and done and (result.contribution is None or result.additive):
                constant = self._run_tile(tile, read, partial(use, zero_weight=len(equal))).contribution
            if result.contribution is None:
                continue
            if equal and not result.additive:
                self._background = None
                return self._backward_pass(use)
            found[tile] = result.contribution if constant is None else result.contribution + len(equal) * constant
            found |= {other: torch.zeros_like(result.contribution) for other in equal}
        drifted = bool(self._drift) and float(torch.stack(self._drift).max()) > 0
        return found, Refusal(DRIFTED) if not found and (drifted or self._hooked) else None

    def _run_tile(
        self, tile: int, read: TilePixels, use: Use, record_moments: bool = False, compare: bool = False
    ) -> "_TileResult":
        """Run the part on one tile, and free all that it made.

        `record_moments`: sum the moments of batch norms' inputs. `compare`: also return tensors for a comparison.
        """
        grid = self._plan.grid(tile, self._recorded)
        values = [x.for_tile(grid, self._device, own) for x, own in zip(self._inputs, read, strict=True)]
        norms: AbstractContextManager[TileMoments | None]
        norms = nullcontext() if self._norms == "exact" else self._statistics.for_tile(record_moments)
        contribution, additive, comparable = None, False, []
        check = PositionCheck(self._plan.cut_axes)
        self._buffers.assign(self._initial_buffers)  # each tile starts with the state of the first one
        self._before.restore()
        self._states.put()
        try:
            with self._autocast(), torch.set_grad_enabled(self._differentiable), norms as moments:
                with check if compare else nullcontext():
                    outputs = self._part(*values)
                grid.halo_prefetch.flush()
                self._compare(tile, outputs)
                left = ForwardState(self._part, self._globals)
                use(values, outputs)
                self._hooked = self._hooked or next(left.changes(), None) is not None
            if compare:
                comparable = [owned(y).detach() for y in outputs]
        except AwaitStatistics as stop:
            contribution, additive = stop.contribution, stop.additive
            if isinstance(contribution, Tensor):
                comparable = [contribution.flatten()[None]]
        self._let_go(values)
        drew = compare and RandomStates.now((self._device,)).digests() != self._digests
        equal_positions = comparable and check.holds and not drew
        return _TileResult(contribution, additive, comparable if equal_positions else None, moments or [])

    def _compare(self, tile: int, outputs: Sequence[Tensor]) -> None:
        """Note how far a tile is that runs again, for its backward pass, from its outputs in the forward pass."""
        values = [local_part(y.detach()) for y in outputs if y.is_floating_point()]
        sketches = list(map(_sketch, values))
        for x, before, now in zip(values, self._sketches.setdefault(tile, sketches), sketches, strict=True):
            self._drift.append((now - before).abs().max() - SAME[x.itemsize] * before[1])

    def _let_go(self, values: Sequence[Tensor]) -> None:
        """Keep no more of files in memory than a few tiles had of them, which cost time to come back."""
        self._touched_bytes += sum(local_part(value).nbytes for value in values)
        if self._touched_bytes >= TOUCHED_BYTES:
            self._touched_bytes = 0
            for each in self._inputs:
                each.let_go()
            let_go(*(getattr(buffer, "local", None) for buffer in self._outputs))

    def _gradient(self, tile: int, buffer: OutputBuffer, gradient: Tensor) -> Tensor:
        """The gradient of the output that a tile owns, plus those of the equal tiles that were skipped for it.

        Of tiles with the same part of an output, one gets its gradient.
        """
        equal = [] if self._background is None else self._background.equal_to(tile)
        total = torch.zeros_like(buffer.owned_part(tile, gradient))
        for each in (tile, *equal):
            if each in buffer.owners:
                total = total + buffer.owned_part(each, gradient)
        return total

    def _read_ahead(self, doing: str) -> Iterator[tuple[int, TilePixels | DatasetError]]:
        """The tiles that this rank runs in one pass, with their pixels or the error of reading them.

        A thread reads the pixels of the next tile while a tile runs, unless reading draws random numbers.
        """

        def read(tile: int) -> TilePixels | DatasetError:
            try:
                return [x.read(tile) for x in self._inputs]
            except DatasetError as error:
                return error

        skipped = {} if self._background is None else self._background.first_of
        own = [tile for tile in self._plan.tiles.own if tile not in skipped]
        at_once = all(isinstance(x.values, Tensor) or x.values.draws for x in self._inputs)
        with ThreadPoolExecutor(1) as thread:
            coming = None if at_once else thread.submit(read, own[0])
            for count, (tile, following) in enumerate(zip_longest(own, own[1:]), start=1):
                found = read(tile) if coming is None else coming.result()
                if coming is not None and following is not None:
                    coming = thread.submit(read, following)
                self._progress(f"{self._name}{doing}, tile {count} of {len(own)}")
                yield tile, found

    def _gather(self, contributions: Contributions, error: Exception | None) -> Contributions:
        """The contributions of the tiles of all ranks. Collective.

        Raises on all ranks:
            Refusal: a rank could not read an image, or had no room for outputs.
            TilesDiffer: tiles of a rank that look equal have different results.
        """
        of_ranks = self._grid.comm.all_gather_object((contributions, error))
        errors = [problem for _, problem in of_ranks if problem is not None]
        for problem in errors:
            if isinstance(problem, DatasetError | NoRoom):
                raise Refusal(str(problem)) from problem
        if errors:
            raise errors[0]
        return {tile: own for of_rank, _ in of_ranks for tile, own in of_rank.items()}


def gradients_of(
    roots: Sequence[Tensor],
    of_roots: Sequence[Tensor],
    leaves: Sequence[Tensor],
    parameters: Sequence[Tensor],
    take: Callable[[int, Tensor], None],
) -> tuple[Tensor | None, ...]:
    """The gradients of `leaves`. `take` gets the number and gradient of each parameter as soon as it is there, so that
    autograd, which would keep all to the end, holds none of them. Users' hooks on parameters wait for the sum.
    """

    def each(i: int, gradient: Tensor) -> Tensor | None:
        take(i, gradient)
        return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

    with set_aside(parameters), ExitStack() as hooks:
        for i, p in enumerate(parameters):
            hooks.callback(p.register_hook(partial(each, i)).remove)
        return torch.autograd.grad(roots, [*leaves, *parameters], of_roots, allow_unused=True)[: len(leaves)]


class _TileResult(NamedTuple):
    """The result of running a tile: its `contribution` to the next statistic; None if it ran to its end.

    `additive`: only the sum over all tiles is used. `comparable` is the contribution or the outputs, to compare with
    those of equal tiles; None if the part treats positions differently. `moments` are those of batch norms' inputs.
    """

    contribution: Contribution
    additive: bool
    comparable: Sequence[Tensor] | None
    moments: TileMoments


class _Streamed(LocalFunction):
    """The outputs of a streamed part, as a function of its inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, streaming: Streaming, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.streaming = streaming
        ctx.save_for_backward(*tensors[:num_inputs])  # autograd then refuses changes of the inputs in place
        ctx.set_materialize_grads(False)
        found = streaming.forward()
        ctx.mark_non_differentiable(*(y for y in found if not (y.is_floating_point() or y.is_complex())))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return (None, None, *ctx.streaming.backward(gradients))


def _sketch(x: Tensor) -> Tensor:
    """The sum of x, divided by that of as many random numbers of norm 1, and the norm of x."""
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return torch.stack([x.sum(dtype=torch.float64) / max(1, x.numel()) ** 0.5, norm])
