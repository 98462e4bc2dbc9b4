"""Boxes to boxes: these ranks own these boxes, those ranks need those boxes, send every intersection.

Halo exchange, tiling an image, gathering tiles, cutting a tensor anew: all of them are this one linear map.

                 rank 0          rank 1
    owns         [ a b c d ]     [ e f g h ]         forward:  each slab is copied to whoever needs it
    needs    [ 0 a b c d e ]     [ d e f g h 0 ]     backward: each gradient slab returns and is added (the adjoint)
                           ^       ^
                    slabs that are sent, "strips" to the rank that receives them; outside the whole is `fill`
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.geometry import AXES, Box

FORWARD_TAG, BACKWARD_TAG = 1, 2

Dims = tuple[int | None, int | None, int | None]


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


class Like(NamedTuple):
    """What tensors of an exchange are: this shape, but for its dims of batch, rows and columns."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    memory_format: torch.memory_format = torch.contiguous_format

    @classmethod
    def of(cls, x: Tensor) -> "Like":
        channels_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return cls(x.shape, x.dtype, x.device, torch.channels_last if channels_last else torch.contiguous_format)


class Incoming(NamedTuple):
    """What was posted to arrive: the strips, one for each slab of the plan's, and the wait for them."""

    strips: list[Tensor]
    pending: Pending


class Exchange:
    """One exchange of tensors whose dims of batch, rows and columns are `dims` (None where there is none).

    Who has both ends of it may `start` it and `assemble` what comes; a rank at one end only `send`s, or `expect`s and
    assembles. `adjoint` is the exchange of gradients: needed boxes return to their owners, who add them up.
    """

    tag = FORWARD_TAG

    def __init__(self, plan: ExchangePlan, comm: Communicator, dims: Dims, fill: float = 0.0) -> None:
        self.plan = plan
        self.comm = comm
        self.dims = dims
        self.fill = fill

    @cached_property
    def adjoint(self) -> "Exchange":
        held, needed, sends, receives, kept = self.plan
        return _Adjoint(ExchangePlan(needed, held, receives, sends, kept), self.comm, self.dims)

    @property
    def inert(self) -> bool:
        """Whether this rank needs just what it holds, and nobody needs anything of it."""
        plan = self.plan
        return not plan.sends and not plan.receives and plan.held == plan.needed == plan.kept

    def start(self, x: Tensor) -> Incoming:
        """Send what others need of x, and expect what this rank needs of them."""
        strips = self._strips(Like.of(x))
        return Incoming(strips, self.comm.iexchange(self._leaving(x), self._arriving(strips), self.tag))

    def bring(self, x: Tensor) -> Tensor:
        """The needed box of the whole that x is this rank's part of."""
        return self.assemble(x, self.start(x))

    def send(self, x: Tensor, tag: int) -> Pending:
        return self.comm.iexchange(self._leaving(x), [], tag)

    def expect(self, like: Like, tag: int) -> Incoming:
        strips = self._strips(like)
        return Incoming(strips, self.comm.iexchange([], self._arriving(strips), tag))

    def again(self, strips: list[Tensor]) -> Incoming:
        """Strips that came before."""
        return Incoming(strips, Pending(self.comm.node))

    def _leaving(self, x: Tensor) -> list[Piece]:
        return [Piece(slab.peer, narrow(x, self.dims, self.plan.held, slab.box)) for slab in self.plan.sends]

    def _arriving(self, strips: list[Tensor]) -> list[Piece]:
        return [Piece(slab.peer, strip) for slab, strip in zip(self.plan.receives, strips, strict=True)]

    def _strips(self, like: Like) -> list[Tensor]:
        shapes = [shape_of(slab.box, self.dims, like.shape) for slab in self.plan.receives]
        return [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes]

    def assemble(self, x: Tensor | None, incoming: Incoming, like: Like | None = None) -> Tensor:
        """The needed box: what is kept of x, the strips, once they have come, and `fill` outside the whole.

        A rank that holds nothing, and so has no x, says what the box is `like`.
        """
        if x is not None and self.inert:
            return x
        plan = self.plan
        if like is None:
            assert x is not None
            like = Like.of(x)
        if plan.kept.empty and len(plan.receives) == 1 and plan.receives[0].box == plan.needed:
            incoming.pending.wait()
            return incoming.strips[0]
        shape = shape_of(plan.needed, self.dims, like.shape)
        result = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=like.memory_format)
        self._begin(result)
        if x is not None and not plan.kept.empty:
            narrow(result, self.dims, plan.needed, plan.kept).copy_(narrow(x, self.dims, plan.held, plan.kept))
        incoming.pending.wait()
        for slab, strip in zip(plan.receives, incoming.strips, strict=True):
            self._put(strip, narrow(result, self.dims, plan.needed, slab.box))
        return result

    def _begin(self, result: Tensor) -> None:
        """Fill what neither what is kept nor a strip covers: together those are a box."""
        plan = self.plan
        parts = [box for box in (plan.kept, *(slab.box for slab in plan.receives)) if not box.empty]
        if not parts:
            result.fill_(self.fill)
            return
        for axis, dim in enumerate(self.dims):
            if dim is not None:
                needed = plan.needed[axis]
                first = min(box[axis].start for box in parts) - needed.start
                last = max(box[axis].stop for box in parts) - needed.start
                for start, length in ((0, first), (last, needed.length - last)):
                    if length:
                        result.narrow(dim, start, length).fill_(self.fill)

    def _put(self, strip: Tensor, into: Tensor) -> None:
        into.copy_(strip)

    def __call__(self, x: Tensor) -> Tensor:
        """`bring`, differentiable."""
        return _Exchange.apply(x, self)


class _Adjoint(Exchange):
    tag = BACKWARD_TAG

    def _begin(self, result: Tensor) -> None:
        if self.plan.kept != self.plan.needed:
            result.zero_()

    def _put(self, strip: Tensor, into: Tensor) -> None:
        into.add_(strip)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        result = exchange.bring(x)
        return result.clone() if result is x else result  # nobody may find itself writing to x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.adjoint.bring(gradient), None
