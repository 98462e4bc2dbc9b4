"""Boxes to boxes: these ranks own these boxes, those ranks need those boxes, send every intersection.

Halo exchange, tiling an image, gathering tiles, cutting a tensor anew: all of them are this one linear map.

                 rank 0          rank 1
    owns         [ a b c d ]     [ e f g h ]         forward:  each slab is copied to whoever needs it
    needs    [ 0 a b c d e ]     [ d e f g h 0 ]     backward: each gradient slab returns and is added (the adjoint)
                           ^       ^
                    slabs that are sent, "strips" to the rank that receives them; outside the whole is `fill`
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm import Refusal
from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.geometry import Box, GridShape, Interval, Tiling, suffices

FORWARD_TAG, BACKWARD_TAG = 1, 2
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Dims = tuple[int | None, ...]  # for each axis of the boxes the dim of a tensor that it is, or None


class Slab(NamedTuple):
    """A box of the whole that travels to, or comes from, a peer."""

    peer: int
    box: Box


Cut = tuple[tuple[int, int, int], ...]  # what `narrow` of a tensor is called with, in turn


@dataclass(frozen=True)
class ExchangePlan:
    """The sends, receives and copies of one rank. Boxes are in the coordinates of the whole.

    `silent`: no rank sends anything, for all hold what they need.
    """

    held: Box
    needed: Box
    sends: tuple[Slab, ...]
    receives: tuple[Slab, ...]
    kept: Box
    silent: bool = field(default=False, compare=False)

    @classmethod
    def silence(cls, held: Box, needed: Box) -> "ExchangePlan":
        """That of a rank that holds what it needs, among others of which that is true."""
        return cls(held, needed, (), (), held.intersect(needed), silent=True)

    @cached_property
    def adjoint(self) -> "ExchangePlan":
        return ExchangePlan(self.needed, self.held, self.receives, self.sends, self.kept, self.silent)


class Moves(NamedTuple):
    """A plan, as what is done to tensors of one shape.

    `edges` are cut out of the result where neither what is kept nor a strip is: together those are a box. `keeps` says
    whether anything is kept, and `bare` that a single strip is all there is.
    """

    shape: list[int]
    arriving: tuple[tuple[int, list[int]], ...]
    leaving: tuple[tuple[int, Cut], ...]
    into: tuple[Cut, ...]
    kept: Cut
    kept_into: Cut
    edges: tuple[Cut, ...] | None
    keeps: bool
    bare: bool

    @classmethod
    def of(cls, plan: ExchangePlan, dims: "Dims", shape: Sequence[int]) -> "Moves":
        return cls(
            shape_of(plan.needed, dims, shape),
            tuple((slab.peer, shape_of(slab.box, dims, shape)) for slab in plan.receives),
            tuple((slab.peer, cut_of(dims, plan.held, slab.box)) for slab in plan.sends),
            tuple(cut_of(dims, plan.needed, slab.box) for slab in plan.receives),
            cut_of(dims, plan.held, plan.kept),
            cut_of(dims, plan.needed, plan.kept),
            _edges(plan, dims),
            not plan.kept.empty,
            plan.kept.empty and len(plan.receives) == 1 and plan.receives[0].box == plan.needed,
        )


def _edges(plan: ExchangePlan, dims: "Dims") -> tuple[Cut, ...] | None:
    """Where nothing comes from; None: nothing comes from anywhere."""
    parts = [box for box in (plan.kept, *(slab.box for slab in plan.receives)) if not box.empty]
    if not parts:
        return None
    edges = []
    for axis, dim in enumerate(dims):
        if dim is not None:
            needed = plan.needed[axis]
            first = min(box[axis].start for box in parts) - needed.start
            last = max(box[axis].stop for box in parts) - needed.start
            edges += [((dim, start, length),) for start, length in ((0, first), (last, needed.length - last)) if length]
    return tuple(edges)


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
        return ExchangePlan.silence(held[rank], wanted)
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


@lru_cache(maxsize=2048)
def plan_retiling(rank: int, have: Tiling, want: Tiling) -> ExchangePlan:
    """The same where all boxes are those of tilings: found axis by axis, however many ranks there are.

    By `have` ranks own and hold, by `want` they come to hold.
    """
    held, wanted = have.held(rank), want.held(rank)
    if suffices(have, want):
        return ExchangePlan.silence(held, wanted)
    mine = have.owned(rank)
    sends = _meetings(rank, mine, [split.held for split in want.splits])
    receives = _meetings(rank, wanted, [split.narrow().held for split in have.splits])
    return ExchangePlan(held, wanted, sends, receives, mine.intersect(wanted))


def _meetings(rank: int, mine: Box, parts: Sequence[Sequence[Interval]]) -> tuple[Slab, ...]:
    """The overlaps of `rank` with each other rank, whose box has one of the `parts` of each axis."""
    shape = GridShape(*map(len, parts))
    along = []
    for interval, others in zip(mine, parts, strict=True):
        common = ((part, interval.intersect(other)) for part, other in enumerate(others))
        along.append([(part, found) for part, found in common if not found.empty])
    slabs = (
        Slab(shape.number([part for part, _ in each]), Box(*(found for _, found in each))) for each in product(*along)
    )
    return tuple(slab for slab in slabs if slab.peer != rank)


def cut_of(dims: Sequence[int | None], origin: Box, box: Box) -> Cut:
    """How `box` is cut out of a tensor that holds `origin`."""
    return tuple(
        (dim, 0 if box[axis].empty else box[axis].start - origin[axis].start, box[axis].length)
        for axis, dim in enumerate(dims)
        if dim is not None and origin[axis] != box[axis]
    )


def at(x: Tensor, cut: Cut) -> Tensor:
    """The view that is cut out of x."""
    for dim, start, length in cut:
        x = x.narrow(dim, start, length)
    return x


def narrow(x: Tensor, dims: Sequence[int | None], origin: Box, box: Box) -> Tensor:
    """The view of `box` in a tensor that holds `origin`. `dims` are the tensor's dims of each axis."""
    return at(x, cut_of(dims, origin, box))


def shape_of(box: Box, dims: Sequence[int | None], shape: Sequence[int]) -> list[int]:
    """The shape of this box of a tensor that is `shape` but for its dims of axes."""
    local = list(shape)
    for axis, dim in enumerate(dims):
        if dim is not None:
            local[dim] = box[axis].length
    return local


class Like(NamedTuple):
    """The form of the tensors of an exchange: this shape, except for their dims of axes."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    memory_format: torch.memory_format = torch.contiguous_format

    @classmethod
    def of(cls, x: Tensor) -> "Like":
        memory_format = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
        other = not x.is_contiguous() and x.is_contiguous(memory_format=memory_format)
        return cls(x.shape, x.dtype, x.device, memory_format if other else torch.contiguous_format)


class Incoming(NamedTuple):
    """Posted receives: the strips, one for each slab of the plan's, and the wait for them, unless they have come. They
    are of tensors `like` these, which are moved so.
    """

    strips: list[Tensor]
    pending: Pending | None
    like: Like
    moves: Moves


class Exchange:
    """One exchange of tensors whose dims of the axes are `dims` (None where there is none).

    A rank at both ends calls `start` and `assemble`. A rank at one end calls `send`, or `expect` and `assemble`.
    `adjoint` is the exchange of gradients: needed boxes return to their owners, who add them up.
    """

    def __init__(
        self, plan: ExchangePlan, comm: Communicator, dims: Dims, fill: float = 0.0, adds: bool = False
    ) -> None:
        self.plan = plan
        self.comm = comm
        self.dims = dims
        self.fill = fill
        self.adds = adds  # the strips to what is there
        self.tag = BACKWARD_TAG if adds else FORWARD_TAG
        self._moves: dict[Sequence[int], Moves] = {}

    @cached_property
    def adjoint(self) -> "Exchange":
        return Exchange(self.plan.adjoint, self.comm, self.dims, adds=True)

    def start(self, x: Tensor) -> Incoming:
        """Send what others need of x, and expect what this rank needs of them."""
        leaving = self.leaving(x)
        strips, arriving = self.arriving(x)
        pending = self.comm.iexchange(leaving, arriving, self.tag, collective=not self.plan.silent)
        return Incoming(strips, pending, Like.of(x), self.moves(x.shape))

    def bring(self, x: Tensor) -> Tensor:
        """The needed box of the whole that x is this rank's part of."""
        return self.assemble(x, self.start(x))

    def send(self, x: Tensor, tag: int) -> Pending:
        return self.comm.iexchange(self.leaving(x), [], tag)

    def expect(self, like: Like, tag: int) -> Incoming:
        strips, arriving = self.arriving(like)
        return Incoming(strips, self.comm.iexchange([], arriving, tag), like, self.moves(like.shape))

    def again(self, x: Tensor, strips: list[Tensor]) -> Tensor:
        """The needed box, of x and strips that came before."""
        return self.assemble(x, Incoming(strips, None, Like.of(x), self.moves(x.shape)))

    def moves(self, shape: Sequence[int]) -> Moves:
        """How tensors of this shape are moved."""
        found = self._moves.get(shape)
        if found is None:
            found = self._moves[tuple(shape)] = Moves.of(self.plan, self.dims, shape)
        return found

    def leaving(self, x: Tensor) -> list[Piece]:
        """The pieces of x that this rank sends."""
        pieces = []
        for peer, cut in self.moves(x.shape).leaving:
            pieces.append(Piece(peer, at(x, cut)))
        return pieces

    def arriving(self, like: "Tensor | Like") -> tuple[list[Tensor], list[Piece]]:
        """Memory for what this rank receives, one strip for each slab; and the strips as pieces."""
        strips, pieces = [], []
        for peer, shape in self.moves(like.shape).arriving:
            strip = torch.empty(shape, dtype=like.dtype, device=like.device)
            strips.append(strip)
            pieces.append(Piece(peer, strip))
        return strips, pieces

    def assemble(self, x: Tensor | None, incoming: Incoming) -> Tensor:
        """The needed box: what is kept of x, the strips, once they have come, and `fill` outside the whole.

        A rank that holds nothing has no x. Where x is all that this rank needs, it is that, or a view of it.
        """
        strips, pending, like, moves = incoming
        if x is not None and not strips and self.plan.kept == self.plan.needed:
            return at(x, moves.kept)
        result = None if moves.bare else self._begun(x, like, moves)
        if pending is not None:
            pending.wait()
        if result is None:
            return strips[0]
        for strip, cut in zip(strips, moves.into, strict=True):
            if self.adds:
                at(result, cut).add_(strip)
            else:
                at(result, cut).copy_(strip)
        return result

    def memory(self, like: Like) -> Tensor:
        """Memory for the needed box."""
        shape = self.moves(like.shape).shape
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=like.memory_format)

    def _begun(self, x: Tensor | None, like: Like, moves: Moves) -> Tensor:
        """The needed box, with what is kept of x, and with `fill` where no rank sends anything: zeros to add to."""
        result = torch.empty(moves.shape, dtype=like.dtype, device=like.device, memory_format=like.memory_format)
        if not self.adds:
            for cut in ((),) if moves.edges is None else moves.edges:
                at(result, cut).fill_(self.fill)
        elif self.plan.kept != self.plan.needed:
            result.zero_()
        if x is not None and moves.keeps:
            at(result, moves.kept_into).copy_(at(x, moves.kept))
        return result

    def __call__(self, x: Tensor) -> Tensor:
        """`bring`, differentiable."""
        return _Linear.apply(x, self._own, self.adjoint.bring)

    def _own(self, x: Tensor) -> Tensor:
        y = self.bring(x)
        alias = torch._C._is_alias_of(y, x)  # type: ignore[attr-defined]
        return y.clone() if alias else y  # nobody may find itself writing to x


TWICE = (
    "second derivatives are not computed through a model on tiles, stages or streams: for a gradient penalty or MAML, "
    'let each rank have the whole model and image, with DistributedDataParallel over the backend "mpi4dl"'
)
WITHIN = (
    "the model takes a gradient within its own forward pass, where each rank has a part of it: return what it is taken "
    "of, and take it outside of the model"
)
BATCHED = (
    "the gradients of several outputs in one backward pass (is_grads_batched=True, jacobian(vectorize=True)) are not "
    "computed through a model on tiles, stages or streams: take one after the other"
)
running_forward: list[Any] = []  # the forward passes over ranks that run; of an engine None
forward_pass: ContextVar[Any] = ContextVar("forward_pass", default=None)  # that of a model in a user's own loop


@contextmanager
def within_forward(runs: bool = True) -> Iterator[None]:
    """Within this context a model of an engine runs forward: gradients through messages of ranks are refused, but where
    it `runs` no longer, as ranks take theirs of what it made.
    """
    before, running_forward[:] = [*running_forward], [*running_forward, None] if runs else []
    try:
        yield
    finally:
        running_forward[:] = before


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an autograd.Function that cannot be differentiated, as it is computed without autograd.

    It is refused where it should be (create_graph=True), and within a forward pass. PyTorch's own decorator looks
    whether the gradients that come in require a gradient: that of a loss does not, and what depends on saved tensors
    would be missing in silence.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        if running_forward:
            raise Refusal(WITHIN)
        for gradient in gradients:
            if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
                raise RuntimeError(BATCHED)
        return backward(ctx, *gradients)

    return once


# The linear maps between ranks that autograd sees, each with its exact adjoint as its backward pass.
#
# One convention makes every gradient right: *the objective is the sum of what the ranks contribute*. A loss that every
# rank of a group computes alike therefore counts 1 / size on each. The gradient of anything that ranks hold copies of,
# such as a parameter, is then the plain sum over those ranks. As in Hewett and Grady, "A linear algebraic approach to
# model parallelism in deep learning" (2020), each map A is tested by <A x, y> = <x, A' y> summed over the ranks.

Map = Callable[[Tensor], Tensor]


def no_view(y: Tensor, x: Tensor) -> Tensor:
    """The view y, which a custom function has made of x, as the owner of its memory, unless that is x's.

    PyTorch lets nobody write to a view that comes from a custom function. Callers ask first whether y is a view: few
    are, and calls of Python are what small tiles spend their time on.
    """
    return y if torch._C._is_alias_of(y, x) else y.data  # type: ignore[attr-defined]


APPLY = vars(torch.autograd.Function)["apply"]  # a class method, of Python or, since PyTorch 2.15, of C


class LocalFunction(torch.autograd.Function):
    """A function of tensors that this rank has. Its `apply` is PyTorch's own, which asks no tensor and no mode."""

    apply = APPLY


class _Linear(LocalFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Map, adjoint: Map) -> Tensor:
        ctx.adjoint = adjoint
        y = apply(x)
        return no_view(y, x) if y._is_view() else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear(x: Tensor, apply: Map, adjoint: Map) -> Tensor:
    """`apply(x)`, a linear map whose backward pass is `adjoint`."""
    return _Linear.apply(x, apply, adjoint)


def functions_behind(tensors: Iterable[Tensor], ends: Callable[[Any], bool]) -> Iterator[Any]:
    """The functions of autograd's graph behind these tensors, each once, as far as those for which `ends` is true."""
    pending, seen = [x.grad_fn for x in tensors], set[Any]()
    while pending:
        function: Any = pending.pop()
        if function is not None and function not in seen:
            seen.add(function)
            yield function
            if not ends(function):
                pending += [following for following, _ in function.next_functions]


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """The sum of x over all ranks, on all ranks. It is its own adjoint."""

    def total(t: Tensor) -> Tensor:
        return comm.all_reduce(t.clone(memory_format=torch.contiguous_format))

    return linear(x, total, total)
