"""Costs of units at any site from those at a few small ones, so that thousands of plans can be looked at.

    wanted     a rank of 32 x 64 tiles of 2048 x 1024 px          4 samples
    base       a rank of  3 x  3 tiles of 128 and 512 px          1 sample, and 2 of 128 px       the rank in the middle

Seconds and bytes are a + b samples + c samples x pixels: what is fixed, what a classifier's layers take for a sample,
and what layers of images take for a pixel. Bytes of halos grow with the sides of a tile, and rounds stay as many. Of
tokens, whose attention grows faster than their number, only samples are left out.

Seconds are timed here, or come from a file that was made on another machine, or follow from its rates: FLOPs over those
that it reaches, the bytes of all other operators over its memory's rate, and a time for each operator to start (after
Williams, Waterman and Patterson, "Roofline", 2009).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from mpi4dl._files import Replacement, read_regular
from mpi4dl._progress import Tell
from mpi4dl.comm.traffic import Traffic
from mpi4dl.geometry import GridShape, ceil_div
from mpi4dl.parallel.costs.cost_model import MissingTimings, Profiler
from mpi4dl.parallel.costs.machine import Machine
from mpi4dl.parallel.costs.timing import Column, Site, Units, UnitSeconds
from mpi4dl.parallel.costs.units import UnitCounts
from mpi4dl.parallel.inputs import of_tokens, space_of
from mpi4dl.parallel.plan import grid_name
from mpi4dl.parallel.spatial.rules.normalization import FEW

ANYWHERE = ("on", "torch", "mpi4dl")  # facts that a file of timings leaves open
MOST_PARTS = 3  # tiles along an axis: the one in the middle has all neighbours
SIDES = {1: (1024, 4096), 2: (128, 512), 3: (32, 64)}  # of base tiles, by the number of axes of space
SMALLER = 4  # times as small are base tiles for tiles that are smaller than those
ALIKE = 1.2  # up to this factor bytes of halos count as growing with a tile's sides
BACKWARD = 2  # times as many FLOPs and bytes as forward


class TimingsFile:
    """Timings in a file, by facts of JSON as `timing.Remembered` has them, but for the machine, which is named once.

    Seconds of elsewhere hold for other versions too; counts do not, since each version can count them.
    """

    def __init__(self, path: str | Path, entries: Sequence[Mapping[str, Any]] = (), measured_on: str = "") -> None:
        self.path, self.measured_on = Path(path), measured_on
        self._entries: dict[str, Any] = {self._key(each["facts"]): each for each in entries}

    @classmethod
    def load(cls, path: str | Path) -> "TimingsFile":
        """Raises ValueError if it is no such file, OSError if it cannot be read."""
        try:
            found = json.loads(read_regular(Path(path)).decode())
            entries = [{"facts": each["facts"], "value": each["value"]} for each in found["timings"]]
            return cls(path, entries, str(found["measured on"]))
        except (ValueError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
            raise ValueError(f"--timings {path} is no file of timings, as --time-only writes it") from None

    @staticmethod
    def _key(facts: Mapping[str, Any]) -> str:
        left_open = ANYWHERE if "on" in facts else ()
        return json.dumps({name: value for name, value in facts.items() if name not in left_open}, sort_keys=True)

    def get(self, facts: Mapping[str, Any]) -> Any:
        found = self._entries.get(self._key(facts))
        return None if found is None else found["value"]

    def put(self, facts: Mapping[str, Any], value: Any) -> None:
        self._entries[self._key(facts)] = {"facts": dict(facts), "value": value}

    def save(self) -> None:
        """Write the file, beside its place first. Raises OSError."""
        found = {"measured on": self.measured_on, "timings": list(self._entries.values())}
        with Replacement(self.path, shared=True) as temporary:
            temporary.write_text(json.dumps(found, indent=1))


@dataclass(frozen=True)
class ScaledProfiler(Profiler):
    """A profiler that looks at small sites alone. `rates` are those of a machine that is not timed.

    `given`: timings come from a file, and nothing is timed here.
    """

    rates: Machine | None = None
    given: TimingsFile | None = None
    counts_at_once: ClassVar[bool] = True
    _columns: dict[Any, Any] = field(default_factory=dict)
    _counts: dict[Any, Any] = field(default_factory=dict)
    _small: dict[Any, "SmallCounts"] = field(default_factory=dict)
    _refused: dict[Any, Exception] = field(default_factory=dict)

    def column(self, cuttable: Units, site: Site, device: torch.device, num_sites: int = 1) -> Column:
        known = self._columns.get(site)
        if known is None:
            known = self._columns[site] = self._column(cuttable, site, device, num_sites)
        found: Column = known
        return found

    def _column(self, cuttable: Units, site: Site, device: torch.device, num_sites: int) -> Column:
        counts = self.counts(cuttable, site)
        if self.rates is not None and self.rates.flops_per_second is not None:
            return tuple(_by_rates(unit, self.rates) for unit in counts)
        bases = self._bases(cuttable, site)
        columns = [self._base_column(cuttable, base, device, num_sites * len(bases)) for base in bases]

        def along(i: int, name: str) -> float:
            return float(drawn(bases, [getattr(column[i], name) for column in columns], site))

        return tuple(
            UnitSeconds(
                along(i, "forward"), along(i, "backward"), unit.there, unit.back, unit.handed, along(i, "weight")
            )
            for i, unit in enumerate(counts)
        )

    def _base_column(self, cuttable: Units, base: Site, device: torch.device, num_sites: int) -> Column:
        if base not in self._columns:
            if self.given is not None and self.given.get(self.facts_of_seconds(cuttable, base, device)) is None:
                raise MissingTimings(
                    f"--timings {self.given.path} has no timings of this model on {grid_name(base.shape.space)} tiles: "
                    "make the file by --time-only with the same model and options, and at least as many --ranks"
                )
            self._columns[base] = super().column(cuttable, base, device, num_sites)
        found: Column = self._columns[base]
        return found

    def counts(self, cuttable: Units, site: Site) -> tuple[UnitCounts, ...]:
        site = site._replace(splits=False)
        known = self._counts.get(site)
        if known is None:
            bases = self._bases(cuttable, site)
            if bases not in self._small:
                self._small[bases] = SmallCounts(bases, [self._base_counts(cuttable, base) for base in bases])
            known = self._counts.setdefault(site, self._small[bases].at(site))
        found: tuple[UnitCounts, ...] = known
        return found

    def prepare(self, cuttable: Units, sites: Iterable[Site], tell: Tell) -> None:
        """Count all base sites that these need, which is most of the work of a search. Sites may be refused later."""
        of_bases = {next(base_choices(site)): site for site in sites}
        missing = [site for bases, site in of_bases.items() if bases not in self._small and bases not in self._refused]
        for number, site in enumerate(missing):
            tell("kinds of tiles that were counted", number, len(missing))
            with suppress(RuntimeError, ValueError, AssertionError):
                self.counts(cuttable, site)

    def _base_counts(self, cuttable: Units, base: Site) -> tuple[UnitCounts, ...]:
        base = base._replace(splits=False)
        if base not in self._counts:
            self._counts[base] = super().counts(cuttable, base)
        found: tuple[UnitCounts, ...] = self._counts[base]
        return found

    def _bases(self, cuttable: Units, site: Site) -> tuple[Site, ...]:
        """The first base sites that the model takes. Raises what it raises if it takes none."""
        first: Exception | None = None
        for bases in base_choices(site):
            if bases not in self._refused:
                try:
                    for base in bases:
                        self._base_counts(cuttable, base)
                    return bases
                except (RuntimeError, ValueError, AssertionError) as error:
                    self._refused[bases] = error
            first = first or self._refused[bases]
        assert first is not None
        raise first


def base_choices(site: Site) -> Iterator[tuple[Site, ...]]:
    """Base sites for one, of which a model may refuse the first ones.

    Batch norm refuses a single value, and some models take no images but those of one size.
    """
    numbers = (1, 2) if _samples(site) > 1 else (1,)
    yield from (base_sites(site, number) for number in numbers)
    if not of_tokens(site.image):
        yield from (_whole_sites(site, number) for number in numbers)


def base_sites(site: Site, number: int = 1) -> tuple[Site, ...]:
    """The small sites for one: with `number` samples of each way, of little and of many pixels, and twice as many.

    Of tokens there are so many samples, and twice as many.
    """
    if of_tokens(site.image):
        return _whole_sites(site, number)
    batch, *space = _few(site.shape, _few_ways(site))
    base, uncut = _with_axes(site.shape, batch, space), len(site.image) - 2 - len(space)
    small, large = SIDES[len(site.image) - 2]
    if min(_tile(site)) < small:
        small, large = small // SMALLER, small

    def of(samples: int, side: int) -> Site:
        sides = (*(side for _ in range(uncut)), *(side * parts for parts in space))
        return site._replace(shape=base, image=(batch * samples, site.image[1], *sides))

    return of(number, small), of(number, large), of(2 * number, small)


def _whole_sites(site: Site, number: int) -> tuple[Site, ...]:
    """The same images on the same tiles, but few samples."""
    batch = _few_ways(site)
    base = _with_axes(site.shape, batch, site.shape.space)
    return tuple(site._replace(shape=base, image=(batch * n, *site.image[1:])) for n in (number, 2 * number))


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


def drawn(bases: Sequence[Site], values: Sequence[Any], wanted: Site) -> Any:
    """The value at a site, from those at its base sites; neither samples nor pixels make it smaller.

    Values are numbers, or arrays of them.
    """
    number, more = (_samples(base) for base in (bases[0], bases[-1]))
    if len(bases) == 2:
        by_sample = np.maximum(0.0, values[1] - values[0]) / (more - number)
        return np.maximum(0.0, values[0] + by_sample * (_samples(wanted) - number))
    small, large = (_pixels(base) for base in bases[:2])
    by_pixel = np.maximum(0.0, values[1] - values[0]) / (large - small)
    by_sample = np.maximum(0.0, values[2] - values[0] - by_pixel * small) / (more - number)
    fixed = values[0] - by_sample * number - by_pixel * small
    return np.maximum(0.0, fixed + by_sample * _samples(wanted) + by_pixel * _pixels(wanted))


def _samples(site: Site) -> int:
    """Those of the ways that have most."""
    return ceil_div(site.image[0], site.shape.batch)


def _pixels(site: Site) -> float:
    """Those of all samples of a rank of such a way."""
    return _samples(site) * math.prod(space_of(site.image)) / math.prod(site.shape.space)


NUMBERS = tuple(name for name in UnitCounts._fields if name not in ("there", "back"))


class SmallCounts:
    """Counts of all units at base sites, as arrays, from which those at any site like them follow.

    Rounds are as many as at the largest of the base sites, and as large as the site's sides make them.
    """

    def __init__(self, bases: Sequence[Site], columns: Sequence[Sequence[UnitCounts]]) -> None:
        self.bases = bases
        self._numbers = [np.array([[getattr(u, name) for name in NUMBERS] for u in column]) for column in columns]
        ways = [[way for unit in column for way in (unit.there, unit.back)] for column in columns]
        self._rounds = ways[1]  # of each unit there and back
        self._sizes: list[list[float]] = [[] for _ in bases]  # of all parts of all rounds, one after the other
        self._grows: list[int] = []  # with which offset's sides a part grows; -1: as numbers do
        self._offsets: list[tuple[int, ...]] = []
        for of_bases in zip(*ways, strict=True):
            known = [{each.alike: dict(each.parts) for each in way} for way in of_bases]
            for each in of_bases[1]:
                for offset, size in each.parts:
                    self._add(offset, [of_base.get(each.alike, {}).get(offset, size) for of_base in known], size)

    def _add(self, offset: tuple[int, ...], sizes: Sequence[int], size: int) -> None:
        small, large = self.bases[:2]
        halo = len(offset) == len(large.shape)
        expected = sizes[0] * _sides(large, offset) / _sides(small, offset) if halo else 0.0
        grows = halo and size / ALIKE <= expected <= size * ALIKE
        if grows and offset not in self._offsets:
            self._offsets.append(offset)
        self._grows.append(self._offsets.index(offset) if grows else -1)
        for of_base, of_part in zip(self._sizes, sizes, strict=True):
            of_base.append(of_part)

    def at(self, site: Site) -> tuple[UnitCounts, ...]:
        numbers = np.ceil(drawn(self.bases, self._numbers, site)).astype(np.int64).tolist()
        sizes = iter(self._parts(site))

        def way(rounds: Traffic) -> Traffic:
            return tuple(
                each._replace(parts=tuple((offset, next(sizes)) for offset, _ in each.parts)) for each in rounds
            )

        traffic = [way(rounds) for rounds in self._rounds]
        return tuple(
            UnitCounts(**dict(zip(NUMBERS, of_unit, strict=True)), there=traffic[2 * i], back=traffic[2 * i + 1])
            for i, of_unit in enumerate(numbers)
        )

    def _parts(self, site: Site) -> list[int]:
        """The bytes of all parts of all rounds."""
        if not self._grows:
            return []
        sizes = [np.array(of_base, dtype=np.float64) for of_base in self._sizes]
        factors = [_sides(site, offset) / _sides(self.bases[1], offset) for offset in self._offsets]
        grows = np.array(self._grows)
        grown = sizes[1] * np.array([*factors, 1.0])[grows]
        parts = np.rint(np.where(grows >= 0, grown, drawn(self.bases, sizes, site)))
        found: list[int] = parts.astype(np.int64).tolist()
        return found


def _tile(site: Site) -> list[float]:
    """The sides of a tile."""
    sides, parts = space_of(site.image), site.shape.space
    cut = [1] * (len(sides) - len(parts)) + list(parts)
    return [side / n for side, n in zip(sides, cut, strict=True)]


def _sides(site: Site, offset: Sequence[int]) -> float:
    """The pixels of a strip of unit width that goes so far along the axes: the sides along which it does not go."""
    space, sides = site.shape.space, _tile(site)
    uncut, cut = sides[: len(sides) - len(space)], sides[len(sides) - len(space) :]
    along = offset[1 : 1 + len(space)]
    stays = (side for side, step in zip(cut, along, strict=True) if step == 0)
    return _samples(site) * math.prod(uncut) * math.prod(stays)


def _by_rates(unit: UnitCounts, machine: Machine) -> UnitSeconds:
    """The seconds of a unit: its FLOPs, its bytes and the start of its operators, one after the other."""
    assert machine.flops_per_second is not None
    forward = unit.flops / machine.flops_per_second + unit.touched / machine.bytes_per_second
    forward += unit.operators * machine.operator_seconds
    weight = unit.flops / machine.flops_per_second  # half of the FLOPs of the backward pass
    return UnitSeconds(forward, BACKWARD * forward, unit.there, unit.back, unit.handed, weight)


def for_machine(profiler: Profiler, machine: Machine | None, timings: TimingsFile | None) -> ScaledProfiler:
    """The profiler of another machine, or of this one for many ranks."""
    where, rates = "units timed here, on small tiles", None
    if timings is not None:
        where = f"units timed on {timings.measured_on}, by {timings.path.name}"
    elif machine is not None and machine.flops_per_second is not None:
        where, rates = f"by the rates of {machine.name}", machine
    return ScaledProfiler(
        profiler.remembered if timings is None else timings,
        profiler.time,
        profiler.budget_seconds,
        rank_gflops=profiler.rank_gflops,
        timed_on=where,
        rates=rates,
        given=timings,
    )
