"""Between two stages: the values that the first hands on land on the grid of the second, whatever its tiles and ways.

    stage s on 2x2 tiles         stage s + 1 on 1x2
      [ 0 ][ 1 ]                     [   ][   ]          forward:   every box goes to whoever needs a part of it
      [ 2 ][ 3 ]       ----->        [ 4 ][ 5 ]          backward:  its gradient returns to its owner (the adjoint)

The sender announces nesting, shapes and cuts of the values once, ahead of the first microbatch of a kind. They hold for
all that follow. Messages have a tag for each microbatch of a run, so receives may be posted in any order. A rank posts
those of the next microbatch while the form of a present one is still unknown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.exchange import Dims, Exchange, ExchangePlan, Incoming, Like, Slab, plan_exchange
from mpi4dl.geometry import BATCH, Box, GridShape, Interval, Split, Tiling, even_cuts
from mpi4dl.parallel.inputs import nested_cuts
from mpi4dl.parallel.pipeline.program import Header, TensorSpec, pack, unpack
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.flattening import copies_in, open_dims, opened
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import gather_axes
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned, wrap

# Tensors between stages in which several axes are one dim: all axes travel, and the entries that every rank has.
#
# (N, 1 + H * W, C)      ->  (N, H, W, C)  +  (N, 1, C)       what has an axis a dim can be cut anew for other tiles
#   flat, with a class token                                 and is put together again behind the boundary


class Assembly(NamedTuple):
    """How a tensor is made of what crosses: the shape of what is spread, and the dim with entries that every rank has,
    if any has: some before the others, some behind them, or both.
    """

    shape: tuple[int, ...]
    dim: int | None
    before: bool = False
    behind: bool = False


def take_apart(x: Tensor) -> tuple[list[Tensor], Assembly | None]:
    """The tensors that are sent for x, and how x is made of them; x itself if it has no flat dims."""
    if not isinstance(x, SpatialTensor) or not x.layout.flat:
        return [x], None
    flats = x.layout.flat
    having = [flat for flat in flats if flat.copies]
    if having and len(flats) > 1:
        return [gather_axes(x, ())], None
    rest: Tensor = x
    beside = []
    for flat in having:
        size = x.shape[flat.dim]
        beside = [x.narrow(flat.dim, start, length) for start, length in copies_in(size, flat) if length]
        rest = x.narrow(flat.dim, flat.prefix, size - flat.copies)
    assert isinstance(rest, SpatialTensor)
    layout = rest.layout
    apart = SpatialTensor(open_dims(rest.local, layout, layout.held), opened(layout))
    shape = tuple(rest.shape)
    assemblies = [Assembly(shape, flat.dim, flat.prefix > 0, flat.suffix > 0) for flat in having]
    return [apart, *beside], assemblies[0] if assemblies else Assembly(shape, None)


def put_together(parts: Iterator[Tensor], assembly: Assembly | None) -> Tensor:
    """The way back on the next stage's grid, of the next parts."""
    x = next(parts)
    if assembly is None:
        return x
    x = x.reshape(assembly.shape)
    if assembly.dim is None:
        return x
    before = [next(parts)] if assembly.before else []
    behind = [next(parts)] if assembly.behind else []
    return torch.cat([*before, x, *behind], assembly.dim)


ANNOUNCED, FORWARD, BACKWARD, USED, NUM_TAGS = 0, 1, 2, 3, 4
MOST_TAGS = 32768  # those that any MPI library has


class StageLayout(NamedTuple):
    """How a tensor lies on the next stage's grid, and which box each of its ranks needs for that."""

    tiling: Tiling
    dims: Dims
    needed: tuple[Box, ...]


class StageMessage(NamedTuple):
    """The values of one microbatch, or their gradients: `number` is the microbatch's among those of its direction.

    `kind` is whatever is equal exactly for microbatches whose values have the same shapes: both sides know it.
    """

    kind: Any
    number: int


def _with_gradients(tensors: list[Tensor], header: Header, known: Header) -> tuple[list[Tensor], Header]:
    """Tensors that others know to want a gradient, and that no longer do since a stage was frozen, as leaves."""
    if len(tensors) != len(known.tensors):
        return tensors, header
    pairs = [*zip(header.tensors, known.tensors, strict=True)]
    if any(theirs != mine == replace(theirs, requires_grad=True) for mine, theirs in pairs):
        raise ValueError(
            "a parameter is trained now that was frozen when the next stage first got values (`requires_grad_()`): "
            "call engine.unfreeze() on all ranks between steps, or train in one stage"
        )
    frozen = [mine != theirs == replace(mine, requires_grad=True) for mine, theirs in pairs]
    tensors = [x.detach().requires_grad_() if each else x for x, each in zip(tensors, frozen, strict=True)]
    specs = tuple(pair[each] for pair, each in zip(pairs, frozen, strict=True))
    return tensors, replace(header, tensors=specs)


class Received(NamedTuple):
    """The values of the previous stage, and the tensors in them that gather gradients."""

    values: tuple[Any, ...]
    leaves: list[Tensor]


def layout_behind(
    tiling: Tiling, dims: Dims, target: GridShape, replicas: int, plain: bool, tracks_batch: bool
) -> StageLayout:
    """How a tensor that was cut by `tiling` is cut on a stage of grid `target`.

    Samples stay in their replica. Cuts stay where they were if both grids are alike along an axis. Of an axis that the
    tensor does not have, every rank of either stage holds a copy: each one of the target takes one of those.
    """
    splits, lands, parts = [], list(dims), []
    for axis in range(len(target)):
        split, ways = tiling.splits[axis], target[axis]
        if dims[axis] is None:
            splits.append(Split.at(range(ways + 1)))
            chosen = [part * split.parts // ways for part in range(ways)]
            parts.append([Interval(copy, copy + 1) for copy in chosen])
            continue
        if split.parts == ways:
            cut = Split.at(split.cuts)
        elif axis == BATCH:
            cut = Split.at(nested_cuts(split.cuts[:: split.parts // replicas], ways // replicas))
        else:
            cut = Split.at(even_cuts(split.size, ways))
        parts.append([cut.owned(part) for part in range(ways)])
        if plain or (axis == BATCH and not tracks_batch):
            lands[axis] = None
            cut = Split.at(range(ways + 1))
        splits.append(cut)
    places = (target.coordinates(rank) for rank in range(target.size))
    needed = tuple(Box(*(part[i] for part, i in zip(parts, where, strict=True))) for where in places)
    return StageLayout(Tiling(tuple(splits)), tuple(lands), needed)


def crossing(tiling: Tiling, needed: Sequence[Box], ends: Sequence[int], place: int) -> ExchangePlan:
    """The exchange of the rank at `place` among `ends`: the ranks that own the tensor, then those that need it."""
    nowhere = Box(*(Interval(0, 0) for _ in tiling.splits))
    held = (*tiling.all_owned, *(nowhere,) * len(needed))
    plan = plan_exchange(place, held, held, (*(nowhere,) * tiling.grid.size, *needed), tiling.whole)

    def by_rank(slabs: tuple[Slab, ...]) -> tuple[Slab, ...]:
        return tuple(Slab(ends[slab.peer], slab.box) for slab in slabs)

    return ExchangePlan(plan.held, plan.needed, by_rank(plan.sends), by_rank(plan.receives), plan.kept)


class Sent(NamedTuple):
    """One tensor that crosses: what it is, and how it lies where it was made."""

    spec: TensorSpec
    tiling: Tiling
    dims: Dims


class Announcement(NamedTuple):
    """The form of the values, and how their tensors are made of those that are sent."""

    header: Header
    assemblies: tuple[Assembly | None, ...]
    tensors: tuple[Sent, ...]


class Transfer(NamedTuple):
    """How one tensor crosses: what its boxes are like, and the exchanges of them and of their gradients."""

    like: Like
    values: Exchange
    gradients: Exchange


class TransferPlan(NamedTuple):
    """The exchanges for one kind of microbatch: how to send each tensor, and its layout at the target."""

    announcement: Announcement
    transfers: tuple[Transfer, ...]
    layouts: tuple[StageLayout, ...]


class StageBoundary:
    """One end of the boundary behind `stage` in one direction: of a rank that holds `stage`, or the one after it.

    `grid` is this rank's grid on that side.
    """

    def __init__(
        self, plan: Plan, comm: Communicator, direction: int, stage: int, grid: Grid, device: torch.device, sends: bool
    ) -> None:
        sources, targets = (plan.partners(comm.rank, direction, each) for each in (stage, stage + 1))
        self.comm, self.plan, self.stage, self.grid, self.device = comm, plan, stage, grid, device
        self.ends, self.others = (*sources, *targets), targets if sends else sources
        self.place = sources.index(comm.rank) if sends else len(sources) + targets.index(comm.rank)
        self.tag = direction * plan.num_stages + stage
        self.num_tags = plan.num_directions * plan.num_stages
        # A target gets announcements from one source of its own replica.
        hears_of = [i * len(sources) // len(targets) for i in range(len(targets))]
        self.listeners = [targets[i] for i, source in enumerate(hears_of) if sends and sources[source] == comm.rank]
        self.speaker = None if sends else sources[hears_of[targets.index(comm.rank)]]
        self._known: dict[Any, TransferPlan] = {}
        self._expected: dict[tuple[StageMessage, bool], list[Incoming]] = {}

    def forget(self) -> None:
        """Announce the values again: other values need gradients."""
        self._known.clear()

    def knows(self, message: StageMessage) -> bool:
        return message.kind in self._known

    def _tag(self, what: int, message: StageMessage) -> int:
        """Numbers that are far apart may share a tag: their messages come in order."""
        numbers = MOST_TAGS // (NUM_TAGS * self.num_tags)
        return (message.number % numbers * NUM_TAGS + what) * self.num_tags + self.tag

    def send(
        self, message: StageMessage, values: Sequence[Any], names: Sequence[str]
    ) -> tuple[Pending, list[GradientEdge]]:
        """Hand values on; where they came from, for those whose gradients will come back."""
        packed, header = pack(values, names)
        if self.knows(message):
            packed, header = _with_gradients(packed, header, self._known[message.kind].announcement.header)
        tensors: list[Tensor] = []
        sent: list[Sent] = []
        assemblies: list[Assembly | None] = []
        for tensor, spec in zip(packed, header.tensors, strict=True):
            parts, assembly = take_apart(tensor)
            assemblies.append(assembly)
            for part in parts:
                layout = part.layout.narrow if isinstance(part, SpatialTensor) else Layout.of_copies(self.grid)
                sent.append(Sent(replace(spec, shape=tuple(part.shape)), layout.tiling, layout.dims))
                tensors.append(owned(part) if isinstance(part, SpatialTensor) else part)
        announcement = Announcement(header, tuple(assemblies), tuple(sent))
        pending = []
        if not self.knows(message):
            self._known[message.kind] = self._plan_transfers(announcement)
            tag = self._tag(ANNOUNCED, message)
            pending += [self.comm.isend_object(announcement, listener, tag) for listener in self.listeners]
        known = self._known[message.kind]
        if announcement != known.announcement:
            raise ValueError(
                f"stage {self.stage} hands on other values than it did for an earlier microbatch of the same shape: "
                f"{announcement.header} instead of {known.announcement.header}; a model whose shapes or numbers "
                "depend on what is in the images cannot be cut there"
            )
        tag = self._tag(FORWARD, message)
        pending += [
            transfer.values.send(tensor, tag) for transfer, tensor in zip(known.transfers, tensors, strict=True)
        ]
        edges = [get_gradient_edge(x) for x, (spec, *_) in zip(tensors, sent, strict=True) if spec.requires_grad]
        return Pending.all(self.comm.node, pending), edges

    def expect(self, message: StageMessage, back: bool = False) -> None:
        """Post the receives of a microbatch whose shapes are known: of its values, or of gradients that come back."""
        if back:
            tag = self._tag(BACKWARD, message)
            posted = [transfer.gradients.expect(transfer.like, tag) for transfer in self._differentiable(message)]
        else:
            tag = self._tag(FORWARD, message)
            posted = [transfer.values.expect(transfer.like, tag) for transfer in self._known[message.kind].transfers]
        self._expected[message, back] = posted

    def receive(self, message: StageMessage) -> Received:
        """The values of a microbatch."""
        if not self.knows(message):
            assert self.speaker is not None
            announcement = self.comm.recv_object(self.speaker, self._tag(ANNOUNCED, message))
            self._known[message.kind] = self._plan_transfers(announcement)
        announcement, transfers, layouts = self._known[message.kind]
        parts: list[Tensor] = []
        leaves: list[Tensor] = []
        each = zip(transfers, self._posted(message), layouts, announcement.tensors, strict=True)
        for transfer, incoming, place, (spec, *_) in each:
            leaf = transfer.values.assemble(None, incoming)
            if spec.requires_grad:
                leaves.append(leaf.requires_grad_())
            parts.append(wrap(leaf, Layout(self.grid, place.tiling, place.dims)))
        left = iter(parts)
        values = [put_together(left, assembly) for assembly in announcement.assemblies]
        return Received(unpack(values, announcement.header), leaves)

    def send_back(self, message: StageMessage, leaves: Sequence[Tensor]) -> Pending:
        """Return the gradients of the tensors that were received, and which took part in the loss at all."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        tag = self._tag(BACKWARD, message)
        sent = [
            transfer.gradients.send(gradient, tag)
            for transfer, gradient in zip(self._differentiable(message), gradients, strict=True)
        ]
        if leaves:
            used = torch.tensor([leaf.grad is not None for leaf in leaves], dtype=torch.uint8)
            sent += [self.comm.isend(used, source, self._tag(USED, message)) for source in self.others]
        return Pending.all(self.comm.node, sent)

    def receive_back(self, message: StageMessage) -> list[Tensor | None]:
        """The gradients of the values that were handed on and wanted one; None for those without a part in the loss."""
        arrived, transfers = self._posted(message, back=True), self._differentiable(message)
        found = [each.gradients.assemble(None, coming) for each, coming in zip(transfers, arrived, strict=True)]
        used = torch.zeros(len(found), dtype=torch.uint8)
        for target in self.others if found else ():
            used |= self.comm.recv(torch.empty_like(used), target, self._tag(USED, message))
        return [x if part else None for x, part in zip(found, used.tolist(), strict=True)]

    def _posted(self, message: StageMessage, back: bool = False) -> list[Incoming]:
        if (message, back) not in self._expected:
            self.expect(message, back)
        return self._expected.pop((message, back))

    def _differentiable(self, message: StageMessage) -> list[Transfer]:
        known = self._known[message.kind]
        each = zip(known.transfers, known.announcement.tensors, strict=True)
        return [transfer for transfer, (spec, *_) in each if spec.requires_grad]

    def _plan_transfers(self, announcement: Announcement) -> TransferPlan:
        plan, following = self.plan, self.stage + 1
        how = plan.shape(following), plan.replicas_together, plan.is_plain(following), plan.tracks_batch(following)
        transfers, layouts = [], []
        for spec, tiling, dims in announcement.tensors:
            place = layout_behind(tiling, dims, *how)
            exchange = Exchange(crossing(tiling, place.needed, self.ends, self.place), self.comm, dims)
            transfers.append(Transfer(Like(spec.shape, spec.dtype, self.device), exchange, exchange.adjoint))
            layouts.append(place)
        return TransferPlan(announcement, tuple(transfers), tuple(layouts))
