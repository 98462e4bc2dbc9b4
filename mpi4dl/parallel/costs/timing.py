"""Seconds of units as they will run: on the tile that a rank of their stage has, with its rules, packing and padding.

One unit at a time is copied to a site and run forward and backward on made-up values, within a budget of seconds.
Waits for other ranks are not in that.

large images     timed at two sizes that are small enough, and extrapolated: a fixed part of each unit (Python,
                 messages), and a part that grows with the number of pixels
many tokens      likewise with fewer samples, each as long as it is: attention grows faster than their length
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mpi4dl._randomness import forked
from mpi4dl.comm import Communicator
from mpi4dl.parallel.costs.meter import local_tensors
from mpi4dl.parallel.costs.sites import Site, Units, as_received, cut_at, extrapolate, imagined, input_at, map_local
from mpi4dl.parallel.inputs import of_tokens
from mpi4dl.parallel.pipeline.split_backward import WeightGradients
from mpi4dl.parallel.pipeline.stage import made_up_stage
from mpi4dl.parallel.spatial.grid import Grid

REPEATS = 3
MOST_PIXELS = 1 << 22  # of all samples on a rank; more are not timed
FEWEST_PIXELS = 1 << 13  # from which on a smaller image says little of a large one
SMALLEST_SIDE = 32
FEWEST_TOKENS = 1 << 7  # which are worth many pixels each

Clock = Callable[[], float]
Seconds = np.ndarray[Any, np.dtype[np.float64]]  # (units, 3): forward, backward, and of that of gradients of weights


def clock_on(device: torch.device) -> Clock:
    """A clock of this process's work: on one thread of a CPU, other processes do not count."""
    if device.type == "cuda":

        def synchronized() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronized
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def time_units(
    cuttable: Units,
    site: Site,
    device: torch.device,
    budget_seconds: float,
    clock: Clock | None = None,
    comm: Communicator | None = None,
) -> Seconds:
    """Seconds of every unit at a site, found within about so many seconds. The model stays as it is.

    The model may lie on the meta device. All ranks of `comm` do the same together; without it they are imagined.
    """
    measure = partial(_measure, cuttable, device=device, clock=clock or clock_on(device), comm=comm)

    def timed(size: Site, repeats: int) -> _Timed:
        seconds = np.minimum.reduce([measure(size, repeats=each) for each in _rounds(repeats)])
        of_pass = seconds[:, :2].sum()
        longest = of_pass if comm is None else comm.all_reduce(torch.tensor(of_pass, dtype=torch.float64), "max")
        return _Timed(size, seconds, float(longest), repeats)

    sizes = [site]  # the smallest first
    while (half := _half(sizes[0])) is not None:
        sizes.insert(0, half)
    try:
        known = [timed(sizes[0], REPEATS)]
    except (RuntimeError, ValueError, AssertionError):
        if comm is not None or len(sizes) == 1 or site.pixels > MOST_PIXELS:
            raise
        return measure(site, repeats=1)  # a model that takes images of one size alone
    while (larger := _next(sizes, known, budget_seconds)) is not None:
        known.append(timed(*larger))
    last = known[-1:] if known[-1].site == site else known[-2:]
    return extrapolate([each.site for each in last], [each.seconds for each in last], site)


def _rounds(repeats: int) -> list[int]:
    """Repeats in two passes over all units: a machine that others use, too, may be slow for longer than one unit is."""
    return [repeats] if repeats == 1 else [repeats - repeats // 2, repeats // 2]


class _Timed(NamedTuple):
    """Times of units at one size: `pass_seconds` for all of them once, of which each round has one to warm up."""

    site: Site
    seconds: Seconds
    pass_seconds: float
    repeats: int

    @property
    def spent(self) -> float:
        return self.pass_seconds * (self.repeats + len(_rounds(self.repeats)))


def _next(sizes: Sequence[Site], known: Sequence[_Timed], budget_seconds: float) -> tuple[Site, int] | None:
    """The largest size for which there is time, if every pixel takes what it took last, and how often to repeat it.

    None: that is enough.
    """
    last, left = known[-1], budget_seconds - sum(each.spent for each in known)
    larger = [size for size in sizes if size.pixels > last.site.pixels]
    for size in reversed(larger):
        passes = int(left * last.site.pixels / max(last.pass_seconds * size.pixels, 1e-9))
        repeats = passes - 2 if passes > 3 else passes // 2  # without those to warm up
        if repeats >= 1 and size.pixels <= MOST_PIXELS:
            return size, min(repeats, REPEATS)
    return (larger[0], 1) if larger and len(known) == 1 else None  # nothing can be extrapolated from one size


def _half(site: Site) -> Site | None:
    """The site with images of half the sides, or half as many samples of tokens.

    None where they, or their tiles, would be too small to tell anything.
    """
    if of_tokens(site.image):
        half = site._replace(image=(site.image[0] // 2, *site.image[1:]))
        return half if half.image[0] >= site.shape.batch and half.pixels >= FEWEST_TOKENS else None
    half = site._replace(image=(*site.image[:2], *(side // 2 for side in site.image[2:])))
    smallest = min(*half.image[2:], *(2 * side for side in half.tile))
    return half if half.pixels >= FEWEST_PIXELS and smallest >= SMALLEST_SIDE else None


def _measure(
    cuttable: Units, site: Site, device: torch.device, clock: Clock, comm: Communicator | None, repeats: int
) -> Seconds:
    grid = imagined(site) if comm is None else Grid.of(comm, site.shape, site.tracks_batch)
    grid.halo_prefetch.steps = True
    values: tuple[Any, ...] = (input_at(site, grid, cuttable.model, device),)
    found = []
    with forked((device,)):
        for i in range(len(cuttable)):
            unit = cut_at(site, made_up_stage(cuttable.unit(i), device), grid)
            seconds, values = _time(unit, values, grid, clock, repeats, site.splits)
            found.append(seconds)
    return np.array(found)


def _time(
    unit: nn.Module, values: tuple[Any, ...], grid: Grid, clock: Clock, repeats: int, splits: bool
) -> tuple[Any, tuple[Any, ...]]:
    times = []
    for _ in range(repeats + 1):
        # Copies, since some units overwrite what they receive.
        received = map_local(lambda t: t.detach().clone().requires_grad_(t.requires_grad), values)
        grid.halo_prefetch.begin()
        weights = WeightGradients()
        start = clock()
        with weights.deferred() if splits else nullcontext():
            results = unit(*received)
        grid.halo_prefetch.flush()
        forward = clock() - start
        roots = [t for t in local_tensors(results) if t.requires_grad]
        gradients = [torch.ones_like(t) for t in roots]
        del received
        start = clock()
        if roots:
            torch.autograd.backward(roots, gradients)
        backward = clock() - start
        start = clock()
        weights.compute()
        times.append((forward, backward, clock() - start if splits else 0.0))
        grid.halo_prefetch.commit()
    forward, backward, weight = np.min(times[1:], axis=0)
    return (forward, backward + weight, weight), map_local(as_received, results)
