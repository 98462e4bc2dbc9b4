"""Boxes to boxes: these ranks own these boxes, those ranks need those boxes, send every intersection.

Halo exchange, tiling an image, gathering tiles, cutting a tensor anew: all of them are this one linear map.

                 rank 0          rank 1
    owns         [ a b c d ]     [ e f g h ]         forward:  each slab is copied to whoever needs it
    needs    [ 0 a b c d e ]     [ d e f g h 0 ]     backward: each gradient slab returns and is added (the adjoint)
                           ^       ^
                    slabs that are sent, "strips" to the rank that receives them; outside the whole is `fill`
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator, Pending
from mpi4dl.geometry import AXES, Box

FORWARD_TAG, BACKWARD_TAG = 1, 2


class Slab(NamedTuple):
    """A box of the whole that travels to, or comes from, a peer."""

    peer: int
    box: Box


class ExchangePlan(NamedTuple):
    """What one rank sends, receives and keeps. Boxes are in the coordinates of the whole."""

    held: Box
    needed: Box
    sends: tuple[Slab, ...]
    receives: tuple[Slab, ...]
    kept: Box


@lru_cache(maxsize=8192)
def plan_exchange(
    rank: int, owned: tuple[Box, ...], held: tuple[Box, ...], needed: tuple[Box, ...], whole: Box
) -> ExchangePlan:
    """The part of `rank` in an exchange where rank i owns owned[i], holds held[i] and comes to hold needed[i].

    Owned boxes are disjoint, so every element of the whole has one owner, who sends it to those who need it. If what
    every rank holds suffices, nothing is sent.
    """
    wanted = needed[rank]
    if all(have.covers(want.intersect(whole)) for have, want in zip(held, needed, strict=True)):
        return ExchangePlan(held[rank], wanted, (), (), held[rank].intersect(wanted))
    mine = owned[rank]
    sends = (Slab(peer, mine.intersect(box)) for peer, box in enumerate(needed) if peer != rank)
    receives = (Slab(peer, wanted.intersect(box)) for peer, box in enumerate(owned) if peer != rank)
    return ExchangePlan(
        held[rank],
        wanted,
        tuple(slab for slab in sends if not slab.box.empty),
        tuple(slab for slab in receives if not slab.box.empty),
        mine.intersect(wanted),
    )


def narrow(x: Tensor, dims: Sequence[int | None], origin: Box, box: Box) -> Tensor:
    """The view of `box` in a tensor that holds `origin`. `dims` are the tensor's dims of batch, rows and columns."""
    for axis in AXES:
        dim = dims[axis]
        if dim is not None and origin[axis] != box[axis]:
            start = 0 if box[axis].empty else box[axis].start - origin[axis].start
            x = x.narrow(dim, start, box[axis].length)
    return x


def shape_of(box: Box, dims: Sequence[int | None], shape: Sequence[int]) -> list[int]:
    """The shape of this box of a tensor that is `shape` but for its dims of batch, rows and columns."""
    local = list(shape)
    for axis, dim in enumerate(dims):
        if dim is not None:
            local[dim] = box[axis].length
    return local


class Exchange:
    """One exchange of tensors whose dims of batch, rows and columns are `dims` (None where there is none)."""

    def __init__(
        self, plan: ExchangePlan, comm: Communicator, dims: tuple[int | None, int | None, int | None], fill: float = 0.0
    ) -> None:
        self.plan = plan
        self.comm = comm
        self.dims = dims
        self.fill = fill

    def shape(self, x: Tensor, box: Box) -> list[int]:
        return shape_of(box, self.dims, x.shape)

    @property
    def inert(self) -> bool:
        """Whether this rank needs just what it holds, and nobody needs anything of it."""
        plan = self.plan
        return not plan.sends and not plan.receives and plan.held == plan.needed == plan.kept

    def start(self, x: Tensor) -> tuple[list[Tensor], Pending]:
        """Send what others need of x; the strips that this rank needs of others are there after `wait()`."""
        strips = [x.new_empty(self.shape(x, slab.box)) for slab in self.plan.receives]
        return strips, self._post(x, self.plan.held, self.plan.sends, strips, self.plan.receives, FORWARD_TAG)

    def assemble(self, x: Tensor, strips: Sequence[Tensor], pending: Pending | None = None) -> Tensor:
        """The needed box: what is kept of x, the strips, once they have come, and `fill` outside the whole."""
        if self.inert:
            return x
        kept = narrow(x, self.dims, self.plan.held, self.plan.kept)
        result = torch.empty(self.shape(x, self.plan.needed), dtype=x.dtype, device=x.device, memory_format=_layout(x))
        for edge in self._outside(result):
            edge.fill_(self.fill)
        if not self.plan.kept.empty:
            narrow(result, self.dims, self.plan.needed, self.plan.kept).copy_(kept)
        if pending is not None:
            pending.wait()
        for slab, strip in zip(self.plan.receives, strips, strict=True):
            narrow(result, self.dims, self.plan.needed, slab.box).copy_(strip)
        return result

    def _outside(self, result: Tensor) -> Iterator[Tensor]:
        """The parts of the needed box that neither what is kept nor a strip covers: together those are a box."""
        parts = [box for box in (self.plan.kept, *(slab.box for slab in self.plan.receives)) if not box.empty]
        if not parts:
            yield result
            return
        for axis, dim in enumerate(self.dims):
            if dim is not None:
                needed = self.plan.needed[axis]
                first = min(box[axis].start for box in parts) - needed.start
                last = max(box[axis].stop for box in parts) - needed.start
                yield result.narrow(dim, 0, first)
                yield result.narrow(dim, last, needed.length - last)

    def start_adjoint(self, gradient: Tensor) -> tuple[Tensor, list[Tensor], Pending]:
        """Send the gradients of strips back to their owners; `finish_adjoint` adds what comes back to this rank."""
        returned = [gradient.new_empty(self.shape(gradient, slab.box)) for slab in self.plan.sends]
        pending = self._post(gradient, self.plan.needed, self.plan.receives, returned, self.plan.sends, BACKWARD_TAG)
        return gradient, returned, pending

    def finish_adjoint(self, started: tuple[Tensor, list[Tensor], Pending]) -> Tensor:
        gradient, returned, pending = started
        if self.inert:
            return gradient
        shape = self.shape(gradient, self.plan.held)
        result = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=_layout(gradient))
        if self.plan.kept != self.plan.held:
            result.zero_()
        if not self.plan.kept.empty:
            kept = narrow(gradient, self.dims, self.plan.needed, self.plan.kept)
            narrow(result, self.dims, self.plan.held, self.plan.kept).copy_(kept)
        pending.wait()
        for slab, strip in zip(self.plan.sends, returned, strict=True):
            narrow(result, self.dims, self.plan.held, slab.box).add_(strip)
        return result

    def __call__(self, x: Tensor) -> Tensor:
        """The needed box of the whole that x is this rank's part of; differentiable."""
        return _Exchange.apply(x, self)

    def _post(
        self, x: Tensor, origin: Box, sends: Sequence[Slab], into: list[Tensor], receives: Sequence[Slab], tag: int
    ) -> Pending:
        pending = [self.comm.irecv(strip, slab.peer, tag) for strip, slab in zip(into, receives, strict=True)]
        pending += [self.comm.isend(narrow(x, self.dims, origin, slab.box), slab.peer, tag) for slab in sends]
        return Pending.all(self.comm.node, pending)


def _layout(x: Tensor) -> torch.memory_format:
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


class Incoming(NamedTuple):
    """What was posted to arrive: the strips, the box that they make up, and the wait for them."""

    strips: list[Tensor]
    slabs: tuple[Slab, ...]
    box: Box
    pending: Pending


class Transfer:
    """An exchange between ranks that own and other ranks that need: each rank works at one of its two ends.

    `plan` is this rank's part of it, whose peers are ranks of `comm`. Tensors are `shape` but for `dims`. Forward,
    owners `send` and the others `expect` and `land`; backward, the roles change, and what comes back is added up.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        comm: Communicator,
        dims: tuple[int | None, int | None, int | None],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan, self.comm, self.dims, self.shape = plan, comm, dims, shape
        self.dtype, self.device = dtype, device

    def send(self, x: Tensor, tag: int) -> Pending:
        return self._send(x, self.plan.held, self.plan.sends, tag)

    def expect(self, tag: int) -> Incoming:
        return self._expect(self.plan.needed, self.plan.receives, tag)

    def send_back(self, gradient: Tensor, tag: int) -> Pending:
        return self._send(gradient, self.plan.needed, self.plan.receives, tag)

    def expect_back(self, tag: int) -> Incoming:
        return self._expect(self.plan.held, self.plan.sends, tag)

    def land(self, incoming: Incoming) -> Tensor:
        """The box that the strips make up. Where none comes there are zeros, where several do their sum."""
        incoming.pending.wait()
        if len(incoming.slabs) == 1 and incoming.slabs[0].box == incoming.box:
            return incoming.strips[0]
        whole = torch.zeros(shape_of(incoming.box, self.dims, self.shape), dtype=self.dtype, device=self.device)
        for slab, strip in zip(incoming.slabs, incoming.strips, strict=True):
            narrow(whole, self.dims, incoming.box, slab.box).add_(strip)
        return whole

    def _send(self, x: Tensor, origin: Box, slabs: Sequence[Slab], tag: int) -> Pending:
        sent = [self.comm.isend(narrow(x, self.dims, origin, slab.box), slab.peer, tag) for slab in slabs]
        return Pending.all(self.comm.node, sent)

    def _expect(self, box: Box, slabs: tuple[Slab, ...], tag: int) -> Incoming:
        shapes = [shape_of(slab.box, self.dims, self.shape) for slab in slabs]
        strips = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        posted = [self.comm.irecv(strip, slab.peer, tag) for strip, slab in zip(strips, slabs, strict=True)]
        return Incoming(strips, slabs, box, Pending.all(self.comm.node, posted))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        result = exchange.assemble(x, *exchange.start(x))
        return result.clone() if result is x else result  # nobody may find itself writing to x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        return exchange.finish_adjoint(exchange.start_adjoint(gradient)), None
