"""Seconds of units as they will run: on the tile that a rank of their stage has, with its rules, packing and padding.

A site is where units run: a microbatch of images on one rank of a grid, of which no other rank need exist. One unit
at a time is copied there and run forward and backward on made-up values. WaitSeconds for others are not in that.

large images     timed at two sizes that are small enough, and drawn out along a straight line: a fixed part of each
                 unit (Python, messages), and a part that grows with the number of pixels
many tokens      likewise with fewer samples, each as long as it is: attention grows faster than their length
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import mpi4dl
from mpi4dl._files import Replacement
from mpi4dl._randomness import forked
from mpi4dl.comm.traffic import Recorder, Round, Traffic, traffic_of
from mpi4dl.geometry import GridShape
from mpi4dl.parallel.inputs import made_up, of_tokens, space_of
from mpi4dl.parallel.pipeline.program import map_leaves
from mpi4dl.parallel.pipeline.split_backward import WeightGradients
from mpi4dl.parallel.pipeline.stage import made_up_stage
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.dry_run_grid import (
    DryRunCommunicator,
    DryRunGrid,
    dry_run_grid,
    rank_in_the_middle,
)
from mpi4dl.parallel.spatial.grid import Arrangement, Grid
from mpi4dl.parallel.spatial.rules.normalization import right_gradients
from mpi4dl.parallel.spatial.sharding import even_layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned
from mpi4dl.parallel.tensor.cutting import cut_parameters
from mpi4dl.parallel.tensor.styles import NOT_CUT, Cutting, Styles, cutting_of

REPEATS = 3
MOST_PIXELS = 1 << 22  # of all samples on a rank; more are not timed
FEWEST_PIXELS = 1 << 13  # from which on a smaller image says little of a large one
SMALLEST_SIDE = 32
FEWEST_TOKENS = 1 << 7  # which are worth many pixels each

Clock = Callable[[], float]


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
    of inputs.
    """

    image: tuple[int, ...]
    shape: GridShape
    tracks_batch: bool
    plain: bool
    cutting: Cutting = NOT_CUT
    arrangement: Arrangement = Arrangement()
    splits: bool = False

    @classmethod
    def of(cls, plan: Plan, stage: int, image: tuple[int, ...], cutting: Cutting = NOT_CUT) -> "Site":
        place = image, plan.shape(stage), plan.tracks_batch(stage), plan.is_plain(stage)
        return cls(*place, cutting, plan.arrangement(stage), stage in plan.split_stages)

    @property
    def pixels(self) -> int:
        """How many pixels, or tokens, of all samples a rank has; those who share features have the same ones."""
        return self.image[0] * math.prod(space_of(self.image)) // (self.shape.batch * math.prod(self.shape.space))


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


class UnitSeconds(NamedTuple):
    """The time of a unit on one rank, and what it and others send each other meanwhile, `there` and `back`.

    `handed_bytes` are those of all that is needed behind it, on this rank. `weight` is the part of `backward` for
    gradients of weights, where a schedule takes them later.
    """

    forward: float
    backward: float
    there: Traffic = ()
    back: Traffic = ()
    handed_bytes: int = 0
    weight: float = 0.0

    @classmethod
    def of(cls, forward: float, backward: float, there: Any, back: Any, handed: int, weight: float) -> "UnitSeconds":
        """What came back from JSON."""
        return cls(forward, backward, traffic_of(there), traffic_of(back), handed, weight)


Column = tuple[UnitSeconds, ...]  # of all units, at one site


def clock_on(device: torch.device) -> Clock:
    """A clock of this process's work: on one thread of a CPU, other processes do not count."""
    if device.type == "cuda":

        def synchronized() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronized
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def time_column(
    cuttable: Units,
    site: Site,
    device: torch.device,
    budget_seconds: float,
    clock: Clock | None = None,
    grid_of: Callable[[Site], Grid] | None = None,
    most: Callable[[float], float] = float,
) -> Column:
    """Seconds of every unit at a site, found within about so many seconds. The model stays as it is.

    The model may lie on the meta device. `grid_of(site)` is a grid of ranks that all do the same, one that is imagined
    if it is left out; among such ranks `most(seconds)` is the longest that one of them took, known to all.
    """
    clock = clock_on(device) if clock is None else clock
    measure = partial(_measure, cuttable, device=device, clock=clock, grid_of=grid_of or imagined)

    def timed(size: Site, repeats: int) -> _Timed:
        rounds = [measure(size, repeats=each) for each in _rounds(repeats)]
        column = tuple(_fastest(units) for units in zip(*rounds, strict=True))
        return _Timed(size, column, most(sum(unit.forward + unit.backward for unit in column)), repeats)

    sizes = list(_halved(site))[::-1]
    try:
        known = [timed(sizes[0], REPEATS)]
    except (RuntimeError, ValueError, AssertionError):
        if grid_of is not None or len(sizes) == 1 or site.pixels > MOST_PIXELS:
            raise
        return measure(site, repeats=1)  # a model that takes images of one size alone
    while (larger := _next(sizes, known, budget_seconds)) is not None:
        known.append(timed(*larger))
    if known[-1].site == site:
        return known[-1].column
    small, large = known[-2:]
    drawn_out = partial(_drawn_out, small=small.site.pixels, large=large.site.pixels, wanted=site.pixels)
    return tuple(map(drawn_out, small.column, large.column))


def _rounds(repeats: int) -> list[int]:
    """Repeats in two passes over all units: a machine that others use, too, may be slow for longer than one unit is."""
    return [repeats] if repeats == 1 else [repeats - repeats // 2, repeats // 2]


def _fastest(units: Sequence[UnitSeconds]) -> UnitSeconds:
    """Of the same unit: each way the fastest."""
    back = min(units, key=lambda unit: unit.backward)
    return back._replace(forward=min(unit.forward for unit in units))


class _Timed(NamedTuple):
    """Times of units at one size: `pass_seconds` for all of them once, of which each round has one to warm up."""

    site: Site
    column: Column
    pass_seconds: float
    repeats: int

    @property
    def seconds(self) -> float:
        return self.pass_seconds * (self.repeats + len(_rounds(self.repeats)))


def _next(sizes: Sequence[Site], known: Sequence[_Timed], budget_seconds: float) -> tuple[Site, int] | None:
    """The largest size for which there is time, if every pixel takes what it took last, and how often to repeat it.

    None: that is enough.
    """
    last, left = known[-1], budget_seconds - sum(each.seconds for each in known)
    larger = [size for size in sizes if size.pixels > last.site.pixels]
    for size in reversed(larger):
        passes = int(left * last.site.pixels / max(last.pass_seconds * size.pixels, 1e-9))
        repeats = passes - 2 if passes > 3 else passes // 2  # without those to warm up
        if repeats >= 1 and size.pixels <= MOST_PIXELS:
            return size, min(repeats, REPEATS)
    return (larger[0], 1) if larger and len(known) == 1 else None  # nothing can be drawn out of one size


def _halved(site: Site) -> Iterator[Site]:
    """The site, and the same with images of half the sides, a quarter, and so on."""
    smallest: Site | None = site
    while smallest is not None:
        yield smallest
        smallest = _half(smallest)


def _half(site: Site) -> Site | None:
    """The site with images of half the sides, or half as many samples of tokens.

    None where they, or their tiles, would be too small to tell anything.
    """
    if of_tokens(site.image):
        half = site._replace(image=(site.image[0] // 2, *site.image[1:]))
        return half if half.image[0] >= site.shape.batch and half.pixels >= FEWEST_TOKENS else None
    image = (*site.image[:2], *(side // 2 for side in site.image[2:]))
    half, parts = site._replace(image=image), site.shape.space
    sides = [*image[2:], *(2 * side // n for side, n in zip(image[-len(parts) :], parts, strict=True))]
    return half if half.pixels >= FEWEST_PIXELS and min(sides) >= SMALLEST_SIDE else None


def _drawn_out(a: UnitSeconds, b: UnitSeconds, small: int, large: int, wanted: int) -> UnitSeconds:
    """The time of a unit for a number of pixels, extrapolated from two smaller numbers."""

    def along(x: float, y: float) -> float:
        slope = max(0.0, (y - x) / (large - small))
        return max(y + slope * (wanted - large), y)

    growth = partial(_grown, small=small, large=large, wanted=wanted)
    there, back = growth(a.there, b.there), growth(a.back, b.back)
    handed = round(along(a.handed_bytes, b.handed_bytes))
    seconds = (along(getattr(a, way), getattr(b, way)) for way in ("forward", "backward", "weight"))
    forward, backward, weight = seconds
    return UnitSeconds(forward, backward, there, back, handed, weight)


def _grown(a: Traffic, b: Traffic, small: int, large: int, wanted: int) -> Traffic:
    """The rounds for a number of pixels, from those for two smaller numbers: bytes grow as a power of it.

    Those of halos grow with its root, and those of statistics not at all.
    """
    known = {each.alike: dict(each.parts) for each in a}

    def parts(found: Round) -> tuple[tuple[tuple[int, ...], int], ...]:
        before = known.get(found.alike, {})
        return tuple(
            (at, round(size * _power(before.get(at, size), size, large / small, wanted / large)))
            for at, size in found.parts
        )

    return tuple(found._replace(parts=parts(found)) for found in b)


def _power(before: int, size: int, step: float, steps: float) -> float:
    """By how much a number grows with `steps` times the pixels that grew from `before` to `size` with `step` times."""
    if not before or not size or step == 1:
        return 1.0
    exponent = min(max(math.log(size / before) / math.log(step), 0.0), 2.0)
    return float(steps**exponent)


def _measure(
    cuttable: Units, site: Site, device: torch.device, clock: Clock, grid_of: Callable[[Site], Grid], repeats: int
) -> Column:
    grid = grid_of(site)
    grid.foresight.steps = True
    values: tuple[Any, ...] = (input_at(site, grid, cuttable.model, device),)
    found = []
    with forked((device,)):
        for i in range(len(cuttable)):
            unit = cut_at(site, made_up_stage(cuttable.unit(i), device), grid)
            right_gradients(unit)
            seconds, values = _time(unit, values, grid, clock, repeats, site.splits)
            found.append(seconds)
    return tuple(found)


def _time(
    unit: nn.Module, values: tuple[Any, ...], grid: Grid, clock: Clock, repeats: int, splits: bool
) -> tuple[UnitSeconds, tuple[Any, ...]]:
    forward, backward, later = [], [], []
    for _ in range(repeats + 1):
        received = map_local(_fresh, values)  # some units overwrite what they receive
        recorder = _recorder(grid)
        recorder.take()
        grid.foresight.begin()
        weights = WeightGradients()
        start = clock()
        with weights.deferred() if splits else nullcontext():
            results = unit(*received)
        grid.foresight.pay()
        forward.append(clock() - start)
        there = recorder.take()
        roots = [t for t in local_tensors(results) if t.requires_grad]
        gradients = [torch.ones_like(t) for t in roots]
        del received
        start = clock()
        if roots:
            torch.autograd.backward(roots, gradients)
        backward.append(clock() - start)
        back = recorder.take()
        start = clock()
        weights.compute()
        later.append(clock() - start if splits else 0.0)
        grid.foresight.settle()
    handed = sum(t.nbytes for t in local_tensors(results))
    weight = min(later[1:])
    seconds = UnitSeconds(min(forward[1:]), min(backward[1:]) + weight, there, back, handed, weight)
    return seconds, map_local(as_received, results)


def _recorder(grid: Grid) -> Recorder:
    """What records exchanges; nothing comes there from ranks that exist, whose clock includes them."""
    return grid.comm.recorder if isinstance(grid.comm, DryRunCommunicator) else Recorder()


def imagined(site: Site) -> DryRunGrid:
    """As the rank in the middle sees it, who has most neighbours, on a way with most samples."""
    grid = dry_run_grid(site.shape, rank_in_the_middle(site.shape, site.image[0]), site.tracks_batch)
    grid.arrangement = site.arrangement
    return grid


def input_at(site: Site, grid: Grid, model: nn.Module, device: torch.device) -> Tensor:
    """The inputs of the model there, with made-up values."""
    if site.plain:
        return made_up(model, site.image, site.image, device)
    layout = even_layout(grid, site.image)
    return SpatialTensor(made_up(model, layout.local_shape(site.image), site.image, device), layout)


def local_tensors(results: Any) -> list[Tensor]:
    """A rank's parts of the tensors in these values, each once."""
    leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)}
    return [owned(leaf) if isinstance(leaf, SpatialTensor) else leaf for leaf in leaves.values()]


def map_local(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The values with the rank's parts of their tensors changed."""

    def leaf(value: Any) -> Any:
        if isinstance(value, SpatialTensor):
            return SpatialTensor(change(value.local), value.layout)
        return change(value) if isinstance(value, Tensor) else value

    return map_leaves(leaf, values)


def _fresh(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def as_received(t: Tensor) -> Tensor:
    """A tensor as the next unit receives it."""
    return t.detach().requires_grad_(t.requires_grad)


# The cache of times on this machine: a folder with a small file for each entry.
#
# A file is written beside its place and then renamed, so that processes that write at the same time do each other no
# harm: what is read is whole, and one of them was last. An entry that cannot be written or read counts as missing.

CPUINFO = Path("/proc/cpuinfo")


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "mpi4dl" / "timings"


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and versions on which times depend."""
    if device.type == "cuda":
        where: Any = torch.cuda.get_device_name(device)
    else:
        where = [_processor(), torch.get_num_threads()]
    return {"on": where}


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "mpi4dl": mpi4dl.__version__}


def _processor() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")


@dataclass(frozen=True)
class Remembered:
    """Values of JSON by facts of JSON, in `folder`."""

    folder: Path

    def get(self, facts: Mapping[str, Any]) -> Any:
        """The cached entry for these facts; None if there is none."""
        try:
            known = json.loads(self._file(facts).read_text())
            return known["value"] if known["facts"] == _plain(facts) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, facts: Mapping[str, Any], value: Any) -> None:
        file = self._file(facts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with Replacement(file, shared=True) as temporary:
                temporary.write_text(json.dumps({"facts": facts, "value": value}))
        except OSError:
            return

    def _file(self, facts: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


def _plain(facts: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(facts))
