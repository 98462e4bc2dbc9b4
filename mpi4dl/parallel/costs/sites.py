"""Where units run: on the tile of a rank, beside which no other need exist; and large sites, from small ones.

    wanted     a rank of 32 x 64 tiles of 2048 x 1024 px          4 samples
    base       a rank of  3 x  3 tiles of 128 and 512 px          1 sample, and 2 of 128 px       the rank in the middle

Costs are a + b samples + c pixels: what is fixed, what a classifier's layers take for a sample, and what layers of
images take for a pixel. Bytes of halos grow with the sides of a tile, and rounds stay as many. Of tokens, whose
attention grows faster than their number, only samples are left out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mpi4dl.comm.traffic import Traffic
from mpi4dl.geometry import GridShape, ceil_div
from mpi4dl.parallel.costs.meter import COUNTS, Column
from mpi4dl.parallel.inputs import made_up, of_tokens, space_of
from mpi4dl.parallel.pipeline.program import map_leaves
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.dry_run_grid import DryRunGrid, dry_run_grid, rank_in_the_middle
from mpi4dl.parallel.spatial.grid import Arrangement, Grid
from mpi4dl.parallel.spatial.rules.normalization import FEW
from mpi4dl.parallel.spatial.sharding import even_layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.tensor.cutting import cut_parameters
from mpi4dl.parallel.tensor.styles import NOT_CUT, Cutting, Styles, cutting_of

MOST_PARTS = 3  # tiles along an axis: the one in the middle has all neighbours
SIDES = {1: (1024, 4096), 2: (128, 512), 3: (32, 64)}  # of base tiles, by the number of axes of space
SMALLER = 4  # times as small are base tiles for tiles that are smaller than those
ALIKE = 1.2  # up to this factor bytes of halos count as growing with a tile's sides


class Units(Protocol):
    """A model as modules that run one after the other, each on what the one before returns; see `Cuttable`."""

    model: nn.Module
    names: tuple[str, ...]

    def __len__(self) -> int: ...

    def unit(self, i: int) -> nn.Module: ...


class Site(NamedTuple):
    """Where units run: `shape` is the grid of their stage; `plain`: on plain tensors.

    `image` is the shape of a microbatch, (N, C, H, W), or (N, T) of tokens, over all ranks. `cutting` says which
    parameters are cut, and `arrangement` what ranks share beside. `splits`: gradients of weights come later than those
    of inputs. `norms_bring_halos`: as on GPUs.
    """

    image: tuple[int, ...]
    shape: GridShape
    tracks_batch: bool
    plain: bool
    cutting: Cutting = NOT_CUT
    arrangement: Arrangement = Arrangement()
    splits: bool = False
    norms_bring_halos: bool = False

    @classmethod
    def of(cls, plan: Plan, stage: int, image: tuple[int, ...], cutting: Cutting = NOT_CUT) -> "Site":
        place = image, plan.shape(stage), plan.tracks_batch(stage), plan.is_plain(stage)
        return cls(*place, cutting, plan.arrangement(stage), stage in plan.split_stages)

    @property
    def samples(self) -> int:
        """Those of the ways that have most."""
        return ceil_div(self.image[0], self.shape.batch)

    @property
    def pixels(self) -> int:
        """The pixels, or tokens, of all samples of a rank of such a way; those who share features have the same."""
        return self.samples * math.prod(space_of(self.image)) // math.prod(self.shape.space)

    @property
    def tile(self) -> list[float]:
        """The sides of a tile."""
        sides, parts = space_of(self.image), self.shape.space
        cut = [1] * (len(sides) - len(parts)) + list(parts)
        return [side / n for side, n in zip(sides, cut, strict=True)]

    def strip(self, offset: Sequence[int]) -> float:
        """The pixels of a strip of unit width that goes so far along the axes of the grid: the sides across its way."""
        uncut = len(self.tile) - len(self.shape.space)
        along = zip(self.tile[uncut:], offset[1:], strict=False)
        return self.samples * math.prod(self.tile[:uncut]) * math.prod(side for side, step in along if step == 0)


def on_one_rank(image: tuple[int, ...]) -> Site:
    """The site of one rank with all of a microbatch of this shape, (N, C, H, W) or (N, T), as plain tensors."""
    return Site(image, GridShape(1, *(1 for _ in image[2:] or image[1:])), tracks_batch=False, plain=True)


def planned_cuts(model: nn.Module, plan: Plan, styles: Styles | None = None) -> Cutting:
    """How a plan cuts the parameters of a model. Raises ValueError as `cutting_of`."""
    return cutting_of(model, styles, plan.degrees) if plan.num_ranks > 1 else NOT_CUT


def sites_of(cuttable: Units, plan: Plan, image: tuple[int, ...], styles: Styles | None = None) -> tuple[Site, ...]:
    """The site of each stage of a plan."""
    cuts = planned_cuts(cuttable.model, plan, styles)
    return tuple(Site.of(plan, stage, image, cuts) for stage in range(plan.num_stages))


def cut_at(site: Site, unit: nn.Module, grid: Grid) -> nn.Module:
    """Leave of a unit's parameters those parts that a rank of this site has."""
    cut_parameters(unit, site.cutting, grid)
    return unit


def imagined(site: Site) -> DryRunGrid:
    """The grid as the rank in the middle sees it, who has most neighbours, on a way with most samples."""
    grid = dry_run_grid(site.shape, rank_in_the_middle(site.shape, site.image[0]), site.tracks_batch)
    grid.arrangement, grid.halo_prefetch.everywhere = site.arrangement, site.norms_bring_halos
    return grid


def input_at(site: Site, grid: Grid, model: nn.Module, device: torch.device) -> Tensor:
    """The inputs of the model there, with made-up values."""
    if site.plain:
        return made_up(model, site.image, site.image, device)
    layout = even_layout(grid, site.image)
    return SpatialTensor(made_up(model, layout.local_shape(site.image), site.image, device), layout)


def map_local(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The values with the rank's parts of their tensors changed."""

    def leaf(value: Any) -> Any:
        if isinstance(value, SpatialTensor):
            return SpatialTensor(change(value.local), value.layout)
        return change(value) if isinstance(value, Tensor) else value

    return map_leaves(leaf, values)


def as_received(t: Tensor) -> Tensor:
    """A tensor as the next unit receives it."""
    return t.detach().requires_grad_(t.requires_grad)


def base_choices(site: Site, small: bool) -> Iterator[tuple[Site, ...]]:
    """Base sites for one, of which a model may refuse all but the last, the site itself.

    `small` ones have few small tiles; others are the same tiles with few samples. Batch norm refuses a single value,
    some models take no images but those of one size, and those of patches none that is smaller than a patch.
    """
    numbers = (1, 2) if site.samples > 1 else (1,)
    if small and not of_tokens(site.image):
        yield from (_small_sites(site, number) for number in numbers)
    if small or site.samples > 2:
        ways = _few_ways(site) if small else site.shape.batch
        base = site._replace(shape=_with_axes(site.shape, ways, site.shape.space))
        for number in numbers:
            yield tuple(base._replace(image=(ways * n, *site.image[1:])) for n in (number, 2 * number))
    yield (site,)


def _small_sites(site: Site, number: int) -> tuple[Site, ...]:
    """Sites with `number` samples of each way, of little and of many pixels, and with twice as many samples."""
    batch, *space = _few(site.shape, _few_ways(site))
    base, uncut = _with_axes(site.shape, batch, space), len(site.image) - 2 - len(space)
    small, large = SIDES[len(site.image) - 2]
    if min(site.tile) < small:
        small, large = small // SMALLER, small

    def of(samples: int, side: int) -> Site:
        sides = (*(side for _ in range(uncut)), *(side * parts for parts in space))
        return site._replace(shape=base, image=(batch * samples, site.image[1], *sides))

    return of(number, small), of(number, large), of(2 * number, small)


def _few_ways(site: Site) -> int:
    ways, experts = site.arrangement.ways, site.arrangement.experts
    return site.shape.batch if experts > 1 else min(site.shape.batch, max(2, ways))


def _few(shape: GridShape, batch: int) -> list[int]:
    """Ways and tiles: few, but more than FEW in all where there are more, since norms then go another way.

    Of up to FEW each tells each other, so that the shape stays.
    """
    wanted = [shape.batch, *shape.space]
    if math.prod(wanted) <= FEW:
        return wanted
    found = [batch, *(min(parts, MOST_PARTS) for parts in shape.space)]
    while math.prod(found) <= FEW < math.prod(wanted):
        axis = max(range(len(found)), key=lambda i: wanted[i] / found[i])
        found[axis] += 1
    return found


def _with_axes(shape: GridShape, batch: int, space: Sequence[int]) -> GridShape:
    """The shape with other numbers of ways and tiles; ranks that share features stay."""
    return type(shape)(batch, *space, *shape[1 + len(shape.space) :])


def extrapolate(bases: Sequence[Site], values: Sequence[Any], wanted: Site) -> Any:
    """a + b samples + c pixels at a site, through the values at its base sites; b, c and the result are not below 0.

    Values are numbers or arrays. There is one base; or there are two, of fewer and more samples, or pixels if samples
    are as many; or three, of few and of many pixels, and of more samples.
    """
    if len(bases) == 1:
        return values[0]
    first, many = bases[:2]
    samples = pixels = 0.0
    if many.samples != first.samples:
        samples = np.maximum(0.0, values[1] - values[0]) / (many.samples - first.samples)
    else:
        pixels = np.maximum(0.0, values[1] - values[0]) / (many.pixels - first.pixels)
        for more, value in zip(bases[2:], values[2:], strict=True):
            rest = value - values[0] - pixels * (more.pixels - first.pixels)
            samples = np.maximum(0.0, rest) / (more.samples - first.samples)
    grown = samples * (wanted.samples - many.samples) + pixels * (wanted.pixels - many.pixels)
    return np.maximum(0.0, values[1] + grown)


class Fit:
    """The counts of all units at any site like some base sites, from the `columns` counted there.

    Rounds are as many as at the second base, and as large as the site's sides make them.
    """

    def __init__(self, bases: Sequence[Site], columns: Sequence[Column]) -> None:
        self.bases, self._column = bases, columns[min(1, len(columns) - 1)]
        self._numbers = [np.array([[getattr(u, name) for name in COUNTS] for u in column]) for column in columns]
        ways = [[way for unit in column for way in (unit.there, unit.back)] for column in columns]
        sizes: list[list[int]] = []  # of all parts of all rounds, at each base
        self._offsets: list[tuple[int, ...]] = []
        for of_bases in zip(*ways, strict=True):
            known = [{each.alike: dict(each.parts) for each in way} for way in of_bases]
            for each in of_bases[min(1, len(columns) - 1)]:
                self._offsets += [offset for offset, _ in each.parts]
                sizes += [[base.get(each.alike, {}).get(at, size) for base in known] for at, size in each.parts]
        self._sizes = list(np.array(sizes, dtype=np.float64).reshape(len(sizes), len(bases)).T)
        self._grows = np.zeros(len(sizes), dtype=bool)  # which of them grow with sides of the tile
        if len(bases) > 1:
            small, large = self._sizes[:2]
            factors = self._growth(bases[0], bases[1])
            self._grows = (factors > 0) & (small * factors <= large * ALIKE) & (small * factors >= large / ALIKE)

    def _growth(self, small: Site, large: Site) -> Any:
        """How many times as large halos of the offsets of all parts are; 0 of what is no halo."""
        halos = {offset for offset in self._offsets if len(offset) == len(large.shape)}
        factors = {offset: large.strip(offset) / small.strip(offset) for offset in halos}
        return np.array([factors.get(offset, 0.0) for offset in self._offsets])

    def at(self, site: Site) -> Column:
        if len(self.bases) == 1:
            return self._column
        numbers = np.ceil(extrapolate(self.bases, self._numbers, site)).astype(np.int64).tolist()
        sizes = extrapolate(self.bases, self._sizes, site)
        grown = np.where(self._grows, self._sizes[1] * self._growth(self.bases[1], site), sizes)
        parts = iter(np.rint(grown).astype(np.int64).tolist())

        def way(rounds: Traffic) -> Traffic:
            return tuple(
                each._replace(parts=tuple((offset, next(parts)) for offset, _ in each.parts)) for each in rounds
            )

        return tuple(
            unit._replace(**dict(zip(COUNTS, of_unit, strict=True)), there=way(unit.there), back=way(unit.back))
            for unit, of_unit in zip(self._column, numbers, strict=True)
        )
