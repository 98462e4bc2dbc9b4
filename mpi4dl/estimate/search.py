"""The search for the plan with most samples a second on a number of ranks, within their memory: all are simulated.

candidates   tiles x stages x schedules x GEMS x replicas x microbatches x tensor x experts, but for what is pointless
search       the best, by samples a second, each with as little to save memory as it fits with (plan_estimate.py)
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isqrt
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from mpi4dl._wording import Tell, aligned, counted, quietly
from mpi4dl.estimate.plan_estimate import Estimator, Measurement, PlanEstimate
from mpi4dl.parallel.costs.cost_model import OutOfTime
from mpi4dl.parallel.costs.machine import Machine
from mpi4dl.parallel.inputs import space_of
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tensor.styles import Degrees, Styles, cutting_of

MOST_STAGES = 8
MOST_MICROBATCHES = 16
CHUNKS = 2
MANY_PLANS = 1000
PROMISING = 1.5  # times as fast as another plan by its 1F1B: then no other schedule of that one is looked at
TIMING_SECONDS = 25.0  # for all shapes of tiles together
LEAST_SECONDS = 0.4  # for one of them


def candidates(
    num_ranks: int,
    num_units: int,
    image: Sequence[int],
    degrees: Iterable[Degrees] = (Degrees(),),
    kept: Mapping[str, Any] = MappingProxyType({}),
    accumulate: int = 1,
) -> Iterator[Plan]:
    """The plans for so many ranks and batches of this shape, (N, C, H, W), or (N, T) of tokens.

    `degrees` are by how many ranks the parameters of layers, and experts, can be shared. `kept` are fields of plans
    that are not searched. All microbatches together are those of `accumulate` batches.

    It leaves out plans that are no faster than another one in the same memory (gpipe, and layer for several
    microbatches, beside 1f1b). It leaves out uneven numbers of tiles other than many first and few last, all of one
    shape each.
    """
    batch_size, size = image[0], space_of(image)
    powers = [accumulate * 2**e for e in range(10) if 2**e <= min(batch_size // accumulate, MOST_MICROBATCHES)]
    for tensor, experts, whole_experts in degrees:
        own = {"moe": "expert" if whole_experts else "tensor", "sequence": tensor > 1 and kept.get("sequence", False)}
        fixed: dict[str, Any] = {**kept, **own, "tensor": tensor, "experts": experts}
        each, rest = divmod(num_ranks, tensor * experts)
        for data in _divisors(each) if rest == 0 else ():
            for places in _places(each // data, min(num_units, MOST_STAGES), len(size)):
                options = [fixed | each for m in powers for each in _schedules(len(places), m, num_units)]
                yield from _possible([{**each, "tiles": places, "data": data} for each in options], num_ranks, image)


def _possible(options: Iterable[Mapping[str, Any]], num_ranks: int, image: Sequence[int]) -> Iterator[Plan]:
    """Those of plans with these fields that there can be, for so many ranks and such batches."""
    for fields in options:
        with suppress(ValueError):
            plan = Plan(**fields)
            if image[0] % plan.num_microbatches == 0 and not plan.problem(num_ranks, space_of(image), image[0]):
                yield plan


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _places(num_ranks: int, most_stages: int, dims: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Grids of the stages of one replica: the first few on many tiles, the others on fewer."""
    for stages in range(1, min(num_ranks, most_stages) + 1):
        seen = set()
        for first in range(1, stages + 1):
            most = num_ranks // stages
            powers = (2**e for e in range(most.bit_length()))
            for few in powers if num_ranks > MANY else range(1, most + 1):
                many, rest = divmod(num_ranks - few * (stages - first), first)
                numbers = (many,) * first + (few,) * (stages - first)
                if rest == 0 and many >= few and numbers not in seen and _is_square(many):
                    seen.add(numbers)
                    yield tuple(_grid(number, dims) for number in numbers)


# Ranks of a replica, beyond which the numbers of tiles are powers of two, or have grids that are not too long.
MANY = 64
LONGEST = 2  # times as many columns as rows


def _is_square(number: int) -> bool:
    return number <= MANY or number <= LONGEST * max(n for n in range(1, isqrt(number) + 1) if number % n == 0) ** 2


def _grid(number: int, dims: int) -> tuple[int, ...]:
    """So many tiles, as square as can be; of volumes the depth stays whole, of sequences there is but one way."""
    if dims == 1:
        return (number,)
    rows = max(n for n in _divisors(number) if n * n <= number)
    return (*(1,) * (dims - 2), rows, number // rows)


def _schedules(stages: int, microbatches: int, num_units: int) -> Iterator[dict[str, Any]]:
    yield {"microbatches": microbatches}
    if stages > 1:
        yield {"microbatches": microbatches, "bidirectional": 1}
    if stages > 1 and microbatches > 1:
        yield {"microbatches": microbatches, "schedule": "zero-bubble"}
        if CHUNKS * stages <= num_units:
            yield {"microbatches": microbatches, "schedule": "interleaved", "chunks": CHUNKS}


def degrees_of(
    model: nn.Module,
    num_ranks: int,
    ranks_per_node: int,
    styles: Styles | None = None,
    whole_experts: bool = False,
) -> Iterator[Degrees]:
    """By how many of so many ranks a model's parameters can be shared, if they are on one node, and its experts.

    `whole_experts`: ranks that share features have whole experts.
    """
    for tensor in _divisors(ranks_per_node):
        for experts in _divisors(num_ranks // tensor):
            degrees = Degrees(tensor, experts, whole_experts)
            with suppress(ValueError):  # no table for such models, too few heads, or no experts
                cutting_of(model, styles, degrees)
                yield degrees


class Ranking(NamedTuple):
    """The plans that fit, the best first, and how many were looked at."""

    best: tuple[PlanEstimate, ...]
    num_plans: int
    num_too_large: int
    smallest: PlanEstimate


def search(
    estimator: Estimator,
    plans: Iterable[Plan],
    most_bytes: float = float("inf"),
    tell: Tell = quietly,
    until: float = float("inf"),
) -> Ranking:
    """All plans by samples a second; of those that are equally fast, the one that needs less memory first.

    `until` says when to be content with those that were looked at, by time.monotonic.
    """
    found = promising(estimator, list(plans), most_bytes, tell, until)
    if not found:
        raise ValueError("no plan is for so many ranks and such batches: raise `batch_size`, or choose fewer `ranks`")
    fitting = sorted(
        (each for each in found if each.num_bytes <= most_bytes), key=lambda o: (-o.samples_per_second, o.num_bytes)
    )
    return Ranking(tuple(fitting), len(found), len(found) - len(fitting), min(found, key=lambda o: o.num_bytes))


def promising(
    estimator: Estimator,
    plans: Sequence[Plan],
    most_bytes: float = float("inf"),
    tell: Tell = quietly,
    until: float = float("inf"),
) -> list[PlanEstimate]:
    """The estimates of plans. Of many, other schedules and mirrored copies are looked at for promising stages alone.

    Then images are streamed only if nothing else fits.
    """
    if len(plans) <= MANY_PLANS:
        return [each for each in estimates(estimator, plans, most_bytes, tell, until) if each is not None]
    plain = [plan for plan in plans if plan.schedule == "1f1b" and not plan.bidirectional]
    known, streams = {*plain}, estimator.streams
    estimator.streams = False
    try:
        found = [each for each in estimates(estimator, plain, most_bytes, tell, until) if each is not None]
        speeds: dict[Any, float] = {}
        for each in found:
            if each.num_bytes <= most_bytes:
                key = _stages_of(each.plan)
                speeds[key] = max(speeds.get(key, 0.0), each.samples_per_second)
        if not speeds:  # then those count that come near
            near = PROMISING * min((each.num_bytes for each in found), default=0)
            speeds = {_stages_of(each.plan): 1.0 for each in found if each.num_bytes <= near}
        least = max(speeds.values(), default=0.0) / PROMISING
        others = [plan for plan in plans if plan not in known and speeds.get(_stages_of(plan), -1.0) >= least]
        found += [each for each in estimates(estimator, others, most_bytes, tell, until) if each is not None]
    finally:
        estimator.streams = streams
    if streams and all(each.num_bytes > most_bytes for each in found):
        found += [each for each in estimates(estimator, plain, most_bytes, tell, until) if each is not None]
    return found


def _stages_of(plan: Plan) -> tuple[Any, ...]:
    return plan.tiles, plan.batch_ways, plan.data, plan.degrees


def estimates(
    estimator: Estimator,
    plans: Sequence[Plan],
    most_bytes: float = float("inf"),
    tell: Tell = quietly,
    until: float = float("inf"),
) -> list[PlanEstimate | None]:
    """The estimate of each of these plans; None for one that is refused. All are timed in TIMING_SECONDS.

    With less than `most_bytes` of memory, a plan may come back with more to save memory than it had. Plans that are not
    done `until` then, by time.monotonic, have none, but for the first.
    """
    shapes = {site for plan in plans for site in estimator.sites(plan)}
    seconds = max(LEAST_SECONDS, TIMING_SECONDS / max(1, len(shapes)))
    found: list[PlanEstimate | None] = []
    with suppress(OutOfTime):
        for number, plan in enumerate(plans):
            limit = until if any(found) else float("inf")
            estimator.profiler = replace(estimator.profiler, site_seconds=seconds, until=limit)
            tell("plans that were timed and simulated", number, len(plans))
            made = None
            with suppress(ValueError, RuntimeError):  # a schedule, or batch norm, that cannot be
                made = estimator.estimate(plan, most_bytes)
            found.append(made)
    return found


# The result of a search for plans: a table of the fastest, and the command that starts each of them.

SHOWN = 10


def ranked(
    found: Ranking,
    num_ranks: int,
    most_bytes: float | None,
    flags: Sequence[str],
    num_tokens: int | None = None,
    machine: Machine | None = None,
    timed_on: str = "",
) -> list[str]:
    """The lines. `flags` are those of the command that are for the training; each plan replaces what it decides.

    Samples of text have so many tokens, of which its users count those that are trained each second. With another
    `machine` there is the time of a step, and what it costs and is spent on. `timed_on` says where units were timed.
    """
    limited = most_bytes is not None and most_bytes < float("inf")
    too_large = f", {found.num_too_large} of which need more than {_mebibytes(most_bytes)}" if limited else ""
    lines = [f"{counted(found.num_plans, 'plan')} for {counted(num_ranks, 'rank')} looked at{too_large}"]
    if not found.best:
        return [
            *lines,
            f"none fits; the smallest needs {_mebibytes(found.smallest.num_bytes)}, "
            f"{_mebibytes(found.smallest.num_bytes - (most_bytes or 0))} more than there are: {found.smallest}",
            "larger images fit on more ranks, with `recompute`, `stream` or smaller batches",
        ]
    shown = max([SHOWN, *(n for n, each in enumerate(found.best, 1) if each.measured is not None)])
    best = found.best[:shown]
    timed = (
        (timed_on or "units timed on this machine")
        if all(each.timed for each in best)
        else "by counted FLOPs where not timed"
    )
    where = "ranks with a core each" if machine is None else f"on {machine.name}"
    lines += [f"the fastest, simulated ({timed}; {where}), with the memory of the rank that needs most:"]
    lines += table(best, most_bytes, num_tokens)
    if machine is not None:
        lines += _spent(best, machine.num_nodes(num_ranks))
    if not num_tokens:
        lines += ["batch norm sees a microbatch: fewer of them train as one device would on more images at a time"]
    for i, each in enumerate(best):
        command = ["mpirun", "-n", str(num_ranks), "python", "-m", "mpi4dl.train", *each.flags(flags)]
        lines.append(f"{i + 1}: {shlex.join(command)}")
    return lines


def table(best: Sequence[PlanEstimate], most_bytes: float | None, num_tokens: int | None) -> Iterator[str]:
    """A line for each plan; measurements beside estimates, if there are any, and what follows from them."""
    beside, tokens = ["measured"] * any(each.measured is not None for each in best), num_tokens or 1
    rows = [["", "tokens/s" if num_tokens else "images/s", *beside, "memory", *beside, "plan"]]
    for n, each in enumerate(best, 1):
        numbers = [(each.samples_per_second, each.num_bytes)]
        if beside:
            numbers.append((each.measured.samples_per_second, each.measured.num_bytes) if each.measured else (0.0, 0))
        speeds = [f"{speed * tokens:.3g}" if speed else "-" for speed, _ in numbers]
        sizes = [_mebibytes(num_bytes) if num_bytes else "-" for _, num_bytes in numbers]
        rows.append([str(n), *speeds, *sizes, str(each)])
    yield from aligned(rows, left={"plan"})
    yield from _of_measured(best, most_bytes)


def _of_measured(best: Sequence[PlanEstimate], most_bytes: float | None) -> Iterator[str]:
    """Which measured plans failed or are too large, which no other one beats, and how far off their estimates are."""
    ran: dict[int, tuple[PlanEstimate, Measurement]] = {}
    for n, each in enumerate(best, 1):
        found = each.measured
        if found is not None and found.failure is not None:
            yield f"{n}: failed: {found.failure}"
        elif found is not None:
            ran[n] = each, found
            if most_bytes is not None and found.num_bytes > most_bytes:
                yield f"{n}: takes more than {_mebibytes(most_bytes)}"
    if len(ran) > 1:
        front = [n for n, (_, a) in ran.items() if not any(_beats(b, a) for _, b in ran.values())]
        yield f"no other measured plan beats {', '.join(map(str, front))} in both speed and memory"
    pairs = [(each, a) for each, a in ran.values() if each.samples_per_second]  # of patches nobody knows it
    if pairs:
        speed = median(abs(each.samples_per_second / a.samples_per_second - 1) for each, a in pairs)
        size = median(abs(each.num_bytes / max(1, a.num_bytes) - 1) for each, a in pairs)
        yield f"estimates are off by {100 * speed:.0f} % in speed and {100 * size:.0f} % in memory (medians)"


def _beats(a: Measurement, b: Measurement) -> bool:
    return a != b and a.samples_per_second >= b.samples_per_second and a.num_bytes <= b.num_bytes


def _spent(best: Sequence[PlanEstimate], nodes: int) -> Iterator[str]:
    """Of each plan the time of a step, the node-hours of a thousand, and what its busiest ranks spend the time on."""
    yield "of the ranks that compute longest in a step:"
    for i, each in enumerate(best):
        if each.time is not None:
            seconds, hours = each.time.seconds, 1000 * each.time.seconds * nodes / 3600
            yield f"{i + 1}: {seconds:.3g} s, {hours:.3g} node-hours for 1,000 steps: {each.time.parts.words()}"


def _mebibytes(num_bytes: float | None) -> str:
    return f"{(num_bytes or 0) / 2**20:,.0f} MiB"
