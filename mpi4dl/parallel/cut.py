"""Where a model is cut into stages, so that the slowest is as fast as can be; and the stages of this rank.

stages = split(build, plan, comm, device=..., seed=..., image=(1, 3, 256, 256))
optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from mpi4dl._progress import QUIET_SECONDS, ProgressLine
from mpi4dl._randomness import seeded
from mpi4dl.comm import Communicator
from mpi4dl.parallel.costs.cost_model import ASSUMED, Profiler, StageCosts, costs_for, measured_costs
from mpi4dl.parallel.costs.sites import sites_of
from mpi4dl.parallel.costs.units import count_bytes
from mpi4dl.parallel.pipeline.checking import Checked, check_cut
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.pipeline.split import Cuttable, materialize, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions, choose_leading_part
from mpi4dl.parallel.tensor.styles import Styles

ChooseStream = Callable[[Cuttable, Sequence[int]], StreamOptions]
BALANCES = ("auto", "flops", "memory", "measured")


def _exact_norms(options: StreamOptions | None, plan: Plan) -> StreamOptions | None:
    """The options, if they stream copies in both directions with exact norms alone. Raises ValueError."""
    if options is not None and plan.bidirectional and options.norms != "exact":
        raise ValueError(
            f"copies in both directions share their statistics later: stream with exact norms, not {options.norms}"
        )
    return options


def split(
    build: Callable[[], nn.Module],
    plan: Plan,
    comm: Communicator,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    balance: str | Sequence[int] = "flops",
    image: tuple[int, ...],
    whole: Collection[str] = (),
    profiler: Profiler | None = None,
    stream: StreamOptions | ChooseStream | None = None,
    styles: Styles | None = None,
    check: bool = True,
) -> LocalStages:
    """Cut the model that `build()` makes with this seed, and hold this rank's stages on `device`.

    The seed is that of torch.manual_seed, random.seed and numpy.random.seed; all three go on behind it as before.
    `balance` decides how many units of the model each stage gets, for images of shape `image`: a number for each stage;
    "flops", by counted FLOPs, which are the same everywhere; "auto", by seconds that rank 0 times on the tiles of each
    stage and caches; "measured", by seconds that all ranks time together; or "memory", by the bytes that training
    keeps. `whole` are paths of modules not to be cut. With a `profiler` there are costs of cuts by numbers too. With
    `stream` the first stage begins with a part that is streamed, tile by tile; how, may be chosen once it is known how
    many units the stages have, on each rank alike. With `check`, rank 0 first compares the cut model with the plain
    one, on small samples. Collective.

    Raises:
        ValueError: the model cannot be traced, or cannot be cut or streamed so; on all ranks alike.
    """
    with seeded(seed):
        model = outline(build)
    if plan.num_stages == 1 and stream is None:
        with seeded(seed):
            return LocalStages.whole(build(), plan, comm, styles=styles, device=device)
    cuttable = Cuttable(model, whole, image)
    counts, costs = Counts((len(cuttable),), None)
    if plan.num_stages > 1:
        counts, costs = choose_cut(cuttable, plan, comm, balance, image, Costing(device, profiler, styles))
    options = _exact_norms(stream(cuttable, counts) if callable(stream) else stream, plan)
    shared = cuttable.shared(counts)
    name = type(model).__name__
    compare = partial(check_cut, build=build, seed=seed, image=image, mirrored=plan.num_directions > 1)
    if check:
        processes = [[stage.stage_program] for stage in cuttable.stages(counts)]
        _check(name, partial(compare, cuttable, processes), plan, comm, options is not None)
    else:
        _warn(comm, f"{name} in stages is not compared with the plain model")
    own, uncut = sorted({stage for _, stage in plan.held_by(comm.rank)}), "cpu" if plan.cuts_parameters else device
    modules = {stage: materialize(cuttable.stage(counts, stage), build, uncut, seed) for stage in own}
    if options is not None:
        leading = choose_leading_part(cuttable, counts[0], options, plan.shape(0), image)
        if 0 in modules:
            modules[0].opening = leading
            leading.segments.watch(modules[0])
        if check and (leading.source is not cuttable or len(leading.segments.programs) > 1):
            _check(name, partial(compare, leading.source, [leading.programs()]), plan, comm, True)
        options = replace(options, remark="; ".join(filter(None, (options.remark, leading.describe(cuttable.names)))))
    stages = LocalStages(modules, model, plan, comm, counts, cuttable.names, costs, options, styles, shared, device)
    stages.watch(model, cuttable.program.watched)
    return stages


def _check(name: str, compare: Callable[[], Checked], plan: Plan, comm: Communicator, streams: bool) -> None:
    """Refuse the model `name` if `compare`, called on rank 0, finds that its parts differ from it. Collective."""
    with comm.together():
        found = None
        if comm.rank == 0:
            with ProgressLine(first=QUIET_SECONDS) as progress:
                progress("comparing the cut model with the plain one (--no-check leaves this out)")
                found = compare()
    checked: Checked = comm.broadcast_object(found)
    if checked.problem is not None:
        raise ValueError(f"{name}: {checked.problem}")
    if plan.bidirectional and checked.own_buffers:
        raise ValueError(
            f"{name} changes its buffer {checked.own_buffers[0]} as it runs, which is no batch norm's: its copies in "
            "both directions would differ; leave out `bidirectional`"
        )
    if checked.recomputed and (streams or plan.num_microbatches > 1):
        how = "streaming computes tiles again anyway" if streams else "stages do so after other microbatches"
        raise ValueError(
            f"{name} changes its buffer {checked.recomputed[0]} once more when torch.utils.checkpoint computes it "
            f"again, and {how}: leave out checkpoint{'' if streams else ', or train with one of `microbatches`'}"
        )
    if checked.left_out is not None:
        _warn(comm, f"{name} in stages was not compared with the plain model: {checked.left_out}")


def _warn(comm: Communicator, message: str) -> None:
    """Warn on rank 0; all ranks learn if that is an error there. Collective."""
    with comm.together(()):
        if comm.rank == 0:
            warnings.warn(message, stacklevel=3)


class Counts(NamedTuple):
    """How many units each stage gets, and what they cost; the latter is None where nobody asked."""

    counts: tuple[int, ...]
    costs: StageCosts | None


class Costing(NamedTuple):
    """How units are costed: on `device`, by `profiler` (None: that of the user), with parameters cut by `styles`."""

    device: torch.device | str = "cpu"
    profiler: Profiler | None = None
    styles: Styles | None = None


COUNTED = Costing()


def choose_cut(
    cuttable: Cuttable,
    plan: Plan,
    comm: Communicator | None,
    balance: str | Sequence[int],
    image: tuple[int, ...],
    costing: Costing = COUNTED,
) -> Counts:
    """The cut by `balance`, the same on all ranks of `comm`. Collective. Without it, it may be for another machine."""
    counts = None
    if not isinstance(balance, str):
        counts = by_hand(cuttable, balance, plan.num_stages)
        if costing.profiler is None:
            return Counts(counts, None)
    elif balance not in BALANCES:
        raise ValueError(f"balance {balance!r} must be one of {', '.join(BALANCES)}, or one number for each stage")
    elif len(cuttable) < plan.num_stages:
        raise ValueError(
            f"{type(cuttable.model).__name__} has {len(cuttable)} units, too few for {plan.num_stages} stages"
            f"{cuttable.hint()}"
        )
    how = balance if isinstance(balance, str) else "auto"
    costs = _stage_costs(cuttable, plan, comm, how, image, costing)
    if counts is None:
        by_memory = balance == "memory"
        matrix = shared_out(count_bytes(cuttable, image), plan.sharing) if by_memory else costs.matrix
        counts = partition(matrix)
    return Counts(counts, costs)


def _stage_costs(
    cuttable: Cuttable, plan: Plan, comm: Communicator | None, how: str, image: tuple[int, ...], costing: Costing
) -> StageCosts:
    """Costs of units on each stage: found by rank 0, or by all ranks, and the same on all of `comm`. Collective."""
    device, styles, profiler = torch.device(costing.device), costing.styles, costing.profiler or Profiler.of_user()
    if comm is None:
        return costs_for(cuttable, plan, sites_of(cuttable, plan, image, styles), how, device, profiler)
    if how == "measured":
        return measured_costs(cuttable, plan, comm, image, device, styles=styles)
    link = profiler.link_of(comm, device) if how == "auto" else ASSUMED
    with comm.together():
        found = None
        if comm.rank == 0:
            machine = link.machine(plan.num_ranks, "assumed" if link == ASSUMED else "as measured")
            sites = sites_of(cuttable, plan, image, styles)
            found = costs_for(cuttable, plan, sites, how, device, replace(profiler, machine=machine))
    return comm.broadcast_object(found)


def partition(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The number of units of each stage, at least one, that minimises the largest cost of a stage.

    `costs[s][i]` is what unit i costs on stage s, on each of its ranks. Exact, by dynamic programming in
    O(stages * units^2). Of equally good partitions, always the same one.

    Raises:
        ValueError: fewer units than stages, no stage, or a cost that is negative or not finite.
    """
    stages, units = len(costs), len(costs[0]) if costs else 0
    if not 1 <= stages <= units:
        raise ValueError(
            f"{stages} stages cannot be made of {units} units: every stage needs at least one; "
            f"choose between 1 and {units} stages"
        )
    for stage, row in enumerate(costs):
        wrong = next((i for i, cost in enumerate(row) if not 0 <= cost < float("inf")), None)
        if wrong is not None:
            raise ValueError(
                f"the cost of unit {wrong} on stage {stage} is {row[wrong]}, but must be finite and not negative"
            )
    best = np.full(units + 1, np.inf)  # best[j]: the slowest stage's cost if the first j units are dealt out so far
    best[0] = 0
    starts = []
    for row in costs:
        sums = np.array([0, *accumulate(map(float, row))])
        # spans[i, j] is the cost of units i to j - 1; a stage of none is no stage.
        spans = sums[None, :] - sums[:, None]
        spans[np.tril_indices(len(sums))] = np.inf
        slowest = np.maximum(best[:, None], spans)
        starts.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    counts, end = [], units
    for start in reversed(starts):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return tuple(reversed(counts))


def shared_out(costs: Sequence[float], sharing: Sequence[int]) -> list[list[float]]:
    """Costs as `partition` takes them, if ranks share the work of a stage evenly: stage s has `sharing[s]` of them."""
    return [[cost / ranks for cost in costs] for ranks in sharing]


def by_hand(cuttable: Cuttable, counts: Sequence[int], stages: int) -> tuple[int, ...]:
    """`counts`, if they are one number of units for each stage and add up to the model's.

    Raises:
        ValueError: they do not.
    """
    if len(counts) != stages:
        raise ValueError(
            f"balance {','.join(map(str, counts))} has {len(counts)} numbers, but there are {stages} stages"
        )
    cuttable.check(counts)
    return tuple(counts)
