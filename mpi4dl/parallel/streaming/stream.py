"""Streaming: the leading part of a model, run on one tile after the other, and again tile by tile in backward.

forward    for each round of statistics, and once more: every visit reads its tile, runs the part, keeps what it owns
backward   the same with the gradient of what it owns: every visit runs the part again, and its own backward pass

So memory is that of one visit and of the part's output, whatever the image's size. What a visit computes of its margin
others compute too; whatever is made of the output's own pixels counts once, so gradients add up to those of the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.tensor import SpatialTensor, wrap
from mpi4dl.parallel.streaming.norms import KnownStatistics
from mpi4dl.parallel.streaming.route import Route
from mpi4dl.parallel.streaming.script import Script, Suspended, Told
from mpi4dl.parallel.streaming.visits import Collected, Source, owned


class Streaming:
    """One pass of images through a part of a model: `run()` gives the part's outputs, spread over the ranks of `grid`.

    `lead(images)` is the part; it returns tensors, in any nest. Its parameters and buffers are `module`'s. `norms` is
    one of `norms.MODES`. Ranks that share the images call everything together.
    """

    def __init__(
        self,
        lead: Callable[[Tensor], Any],
        module: nn.Module,
        source: Source,
        route: Route,
        grid: Grid,
        norms: str = "exact",
    ) -> None:
        self._lead, self._source, self._route, self._grid, self._norms = lead, source, route, grid, norms
        self._script = Script()
        self._statistics = KnownStatistics()
        self._module = module
        self._buffers = list(module.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._device = next(module.parameters(), torch.empty(0)).device
        self._autocast = _autocast_now(self._device)
        self._states = _random_states(self._device)
        self._differentiable = torch.is_grad_enabled()
        self._collected: list[Collected | None] = []
        self._structure: Any = None

    def run(self) -> Any:
        """The part's outputs: this rank's part of each, as a SpatialTensor; a plain tensor where one rank has all."""
        found = _Streamed.apply(self, *self._parameters)
        leaves = [
            value if collected is None or self._grid.size == 1 else wrap(value, collected.layout)
            for value, collected in zip(found, self._collected, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._structure)

    def forward(self) -> list[Tensor]:
        """The local tensors of the outputs."""
        found: list[Tensor] = []

        def keep(outputs: Any) -> None:
            leaves, self._structure = pytree.tree_flatten(outputs)
            if not found:
                for y in leaves:
                    if not isinstance(y, Tensor):
                        raise TypeError(f"the streamed part returns a {type(y).__name__}: only tensors can be streamed")
                    self._collected.append(
                        Collected(self._route.visits, self._grid, y) if isinstance(y, SpatialTensor) else None
                    )
                found.extend(
                    y.detach() if collected is None else collected.local
                    for y, collected in zip(leaves, self._collected, strict=True)
                )
            for y, collected in zip(leaves, self._collected, strict=True):
                if collected is not None:
                    collected.take(y)

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
        """The gradients of the parameters, summed over this rank's visits."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        is_first = True

        def differentiate(outputs: Any) -> None:
            nonlocal is_first
            roots, of_roots = [], []
            for y, collected, gradient in zip(pytree.tree_leaves(outputs), self._collected, gradients, strict=True):
                if gradient is None or not y.requires_grad:
                    continue
                if collected is not None:
                    roots.append(owned(y))
                    of_roots.append(collected.part(y, gradient))
                else:  # every visit has the whole of it, so that it counts in one of them
                    roots.append(y)
                    of_roots.append(gradient if is_first else torch.zeros_like(gradient))
            if roots:
                found = torch.autograd.grad(roots, self._parameters, of_roots, allow_unused=True)
                for i, (known, value) in enumerate(zip(sums, found, strict=True)):
                    if value is not None:
                        sums[i] = value if known is None else known.add_(value)
            is_first = False

        self._buffers = list(self._module.buffers())  # GEMS has others in forward
        after = [buffer.clone() for buffer in self._buffers]
        self._all_rounds(differentiate, forward=False)
        _put(self._buffers, after)
        return sums

    def _all_rounds(self, use: Callable[[Any], None], forward: bool) -> None:
        """Visit all tiles until every round is known: `use(outputs)` is called in the visits of the last pass."""
        state = _random_states(self._device)
        while told := self._one_pass(use, forward):
            every: dict[int, Told] = {}
            for of_rank in self._grid.comm.all_gather_object(told):
                every |= of_rank
            self._script.rounds.append([every[tile] for tile in range(self._route.visits.grid.size)])
        if not forward:
            _set_random_states(self._device, state)

    def _one_pass(self, use: Callable[[Any], None], forward: bool) -> dict[int, Told]:
        """Visit all tiles of this rank; what they told in the first round that is not known, if there is one."""
        told: dict[int, Told] = {}
        for tile in self._route.visits.own:
            try:
                with self._as_before(), self._by_its_norms(forward), torch.set_grad_enabled(self._differentiable):
                    use(self._visit(tile))
            except Suspended as suspended:
                told[tile] = suspended.told
        return told

    def _visit(self, tile: int) -> Any:
        route = self._route
        grid = route.grid(tile, self._script)
        values = self._source.read(route.visits.box(tile)).to(self._device)
        outputs = self._lead(SpatialTensor(values, route.visits.layout(grid, values.dim())))
        grid.foresight.pay()
        return outputs

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Every visit finds buffers and random numbers as the first one did."""
        _put(self._buffers, self._before)
        _set_random_states(self._device, self._states)
        with self._autocast():
            yield

    def _by_its_norms(self, forward: bool) -> AbstractContextManager[None]:
        if self._norms == "exact":
            return nullcontext()
        return self._statistics.one_visit(noted=forward and self._norms == "running")


class _Streamed(torch.autograd.Function):
    """The outputs of a part, of its parameters."""

    @staticmethod
    def forward(ctx: Any, streaming: Streaming, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.streaming = streaming
        ctx.set_materialize_grads(False)
        found = streaming.forward()
        ctx.mark_non_differentiable(*(y for y in found if not (y.is_floating_point() or y.is_complex())))
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.streaming.backward(gradients))


def _put(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _autocast_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context of autocast that there is now."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    host = (torch.get_rng_state(),)
    return (*host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else host


def _set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
