"""From what an operator reads to what has to be exchanged: the halo of every operator that looks at neighbours.

      held by this rank            an operator says by its AxisMap which input rows
  ___|________________|___         its output rows need; the plan says whether what is
     |                |            held suffices, and if not, which boxes to exchange
  ___|________________|___
needed: may reach over several neighbours, and beyond the edge of the image, where `fill` is
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torch import Tensor

from mpi4dl.comm.exchange import Cut, Exchange, at, cut_of
from mpi4dl.geometry import AxisMap, AxisPlan, Box, Interval, Split, Tiling, Window, plan_axis, widest
from mpi4dl.parallel.spatial.flattening import among_copies, close_dims, open_dims, opened
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo_prefetch import OfWindows
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    guards,
    local_part,
    open_flat_dims,
    refusal,
    tell_gathered,
    with_halo_sources,
    wrap,
)

Maps = tuple[tuple[int, AxisMap], ...]


@dataclass(frozen=True)
class HaloPlan:
    """The layout of an operator's output, and the box of its input from which this rank computes it.

    `exchange` brings that box here; without one, it is cut out of what this rank holds already. `needed` may reach
    beyond the image.
    """

    source: Layout
    output: Layout
    needed: Box
    exchange: Exchange | None
    maps: Maps
    missing_halo: Tiling | None = None  # what ranks would have to hold so that nothing had to be sent

    def fetch(self, x: Tensor) -> Tensor:
        """The needed box of x, this rank's part; differentiable."""
        return self.crop(x) if self.exchange is None else self.exchange(x)

    def crop(self, x: Tensor) -> Tensor:
        """The needed box, where this rank holds all of it."""
        return at(x, self._cut)

    def begin(self, x: SpatialTensor) -> Tensor:
        """The part of x from which this rank begins: to which the exchange brings the rest, if there is one."""
        return self.crop(x.local) if self.exchange is None else x.local

    @cached_property
    def _cut(self) -> Cut:
        return cut_of(self.source.dims, self.source.held, self.needed)

    def request_halo(self, x: SpatialTensor) -> None:
        """Ask those who made x to hold what is missing, where messages take longer than that."""
        if self.missing_halo is not None and (self.source.grid.halo_prefetch.everywhere or x.local.is_cuda):
            for halo_source in x.halo_sources:
                halo_source.request_halo(self.missing_halo)

    def result(self, x: SpatialTensor, local: Tensor) -> Tensor:
        """This rank's part `local` of what was made of x, whose norms can be asked so that more of it is held."""
        tilings = self.source.tiling, self.output.tiling
        return with_halo_sources(
            wrap(local, self.output), tuple(OfWindows(o, *tilings, self.maps) for o in x.halo_sources)
        )


def plan_halo(x: SpatialTensor, maps: Mapping[int, AxisMap], fill: float = 0.0, pads: bool = False) -> HaloPlan:
    """Plan an operator that depends on neighbours along the axes in `maps`, and on nothing but itself along others.

    Beyond the edge of the image it finds `fill`; but an operator that `pads` does so itself where both sides get the
    same padding, and takes all of an axis that is not cut.
    """
    layout, of_axes = x.layout, tuple(maps.items())
    halo_plan = layout.cached((plan_halo, of_axes, fill, pads), lambda: _plan_of_halo(layout, of_axes, fill, pads))
    halo_plan.request_halo(x)
    return halo_plan


def _plan_of_halo(layout: Layout, maps: Maps, fill: float, pads: bool) -> HaloPlan:
    needed, output, exchange, missing_halo = _plan(layout.tiling, maps, pads)
    made = layout.grid.intern(Layout(layout.grid, output, layout.dims))
    if not exchange:
        return HaloPlan(layout, made, needed.held(layout.grid.rank), None, maps, missing_halo)
    plan = layout.exchange_to(needed, fill)
    return HaloPlan(layout, made, plan.plan.needed, plan, maps, missing_halo)


@lru_cache(maxsize=4096)
def _plan(tiling: Tiling, maps: Maps, pads: bool) -> tuple[Tiling, Tiling, bool, Tiling | None]:
    """The input that each rank will hold, the tiling of the output, and whether anything is exchanged.

    And what ranks would have to hold of the input so that nothing had to be sent, if they do not.
    """
    plans = {axis: plan_axis(axis_map, tiling.splits[axis]) for axis, axis_map in maps}
    if pads:
        plans = {axis: _unpadded(axis_map, tiling.splits[axis], plans[axis]) for axis, axis_map in maps}
    moved = any(plan.exchange for plan in plans.values())
    wholes = {axis: Interval(0, tiling.splits[axis].size) for axis in plans}
    exchange = moved or not all(wholes[axis].covers(rows) for axis, plan in plans.items() for rows in plan.needed)
    needed, output = tiling, tiling
    for axis, split in enumerate(tiling.splits):
        if axis in plans:
            needed = needed.replace(axis, Split(split.cuts, plans[axis].needed))
            output = output.replace(axis, plans[axis].output)
        elif moved:  # what lies beyond the image comes from nobody
            needed = needed.replace(axis, split.narrow())
            output = output.replace(axis, split.narrow())
    enough = widest(tiling, needed) if exchange else tiling
    return needed, output, exchange, enough if enough != tiling else None


def _unpadded(axis_map: AxisMap, split: Split, plan: AxisPlan) -> AxisPlan:
    """The plan without the padding that an operator does itself."""
    if split.parts == 1 and not (isinstance(axis_map, Window) and axis_map.before != axis_map.after):
        return plan._replace(needed=split.held)
    if not isinstance(axis_map, Window):
        return plan
    parts = zip(plan.needed, plan.output.held, strict=True)
    return plan._replace(needed=tuple(axis_map.unpadded(*part, split.size) for part in parts))


def retile(x: SpatialTensor, tiling: Tiling) -> SpatialTensor:
    """The same tensor, held as `tiling` says: cut elsewhere, or with more or less of a halo."""
    if x.layout.tiling == tiling:
        return x
    layout = replace(x.layout, tiling=tiling)
    if not layout.flat:
        return SpatialTensor(x.layout.exchange_to(tiling)(x.local), layout)
    brought = opened(x.layout).exchange_to(tiling)(open_dims(x.local, x.layout, x.layout.held))
    return SpatialTensor(_among_copies(x, close_dims(brought, layout, layout.held)), layout)


def _among_copies(x: SpatialTensor, rest: Tensor) -> Tensor:
    """`rest` among the entries of x's flat dim that every rank has, if there are any."""
    having = [flat for flat in x.layout.flat if flat.copies]
    if len(having) > 1:
        raise refusal("a tensor", "two of its dims have entries that every rank has beside those that are spread")
    return among_copies(rest, x.local, having[0]) if having else rest


def widen(x: SpatialTensor, halo: int) -> SpatialTensor:
    """Let every rank hold up to `halo` more pixels on each side of what it owns, along each axis of space.

    One such exchange at the entry of a block of layers replaces one per layer: rules exchange only if what is held does
    not suffice. `halo` is in pixels of x.
    """
    batch, *space = x.layout.tiling.splits
    return retile(x, Tiling((batch, *(split.widen(halo) for split in space))))


def gather(x: Tensor) -> Tensor:
    """The whole of x on every rank; a plain tensor passes through. Gradients of all ranks' copies are summed."""
    if not isinstance(x, SpatialTensor):
        return x
    if guards and (instead := guards[0](gather, (x,), {})) is not None:
        return instead()
    return gather_axes(x, x.layout.grid.axes)


def gather_dim(x: Tensor, dim: int) -> Tensor:
    """x with all of this dim on every rank."""
    return gather_axes(x, x.layout.axes_at([dim % x.dim()])) if isinstance(x, SpatialTensor) else x


TOLD_BYTES = 16 << 20  # more that an operator gathers gives a warning


def gather_axes(x: Tensor, axes: Sequence[int], tell: bool = True) -> Tensor:
    """x with all of these axes, and those of flat dims, on every rank; x itself, where there are none.

    Where an operator needs that, and it is much, users get a warning.
    """
    if not isinstance(x, SpatialTensor) or not (axes or x.layout.flat):
        return x
    y = _gathered(x, axes)
    more = local_part(y).nbytes - x.local.nbytes
    if tell and more >= TOLD_BYTES and list(axes) != [x.layout.grid.features]:
        tell_gathered(x, more)
    return y


def _gathered(x: SpatialTensor, axes: Sequence[int]) -> Tensor:
    layout, tiling = x.layout, x.layout.tiling
    layout.grid.halo_prefetch.flush()  # nobody may look at a grid's tensors after this
    if layout.flat:
        carried = tuple(layout.carried)
        # Entries of every rank are cut along other axes, such as the batch, as the rest is: those come afterwards.
        first = carried if any(flat.copies for flat in layout.flat) else [*axes, *carried]
        bare = _gathered(SpatialTensor(open_dims(x.local, layout, layout.held), opened(layout)), first)
        left = layout.with_dims(None if axis in first else dim for axis, dim in enumerate(layout.dims))
        y = wrap(_among_copies(x, close_dims(local_part(bare), layout, layout.tiling.whole)), left)
        rest = [axis for axis in axes if axis not in first]
        return _gathered(y, rest) if rest and isinstance(y, SpatialTensor) else y
    for axis in axes:
        if layout.dims[axis] is not None:
            split = tiling.splits[axis]
            tiling = tiling.replace(axis, Split(split.cuts, (Interval(0, split.size),) * split.parts))
    local = layout.exchange_to(tiling)(x.local)
    dims = [None if axis in axes else dim for axis, dim in enumerate(layout.dims)]
    return wrap(local, Layout(layout.grid, tiling, layout.dims).with_dims(dims))


open_flat_dims.append(lambda x: gather_axes(x, ()))
