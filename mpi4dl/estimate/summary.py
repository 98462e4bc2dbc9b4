"""The description of a training by a plan: data, messages and memory of each rank, and the timeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._wording import aligned, counted, mebibytes, runs
from mpi4dl.estimate.memory import (
    HEAP_KEPT,
    Allocator,
    BuildOptimizer,
    Share,
    StageState,
    activations_of,
    anatomy,
    count_state,
    share,
)
from mpi4dl.estimate.passes import Passes, passes_of_needs
from mpi4dl.geometry import SPACE, Interval
from mpi4dl.parallel.costs.cost_model import (
    RANK_GFLOPS,
    Profiler,
    StageCosts,
    assumed,
    bytes_recomputed,
    counted_prices,
    groups_in,
    image_bytes,
)
from mpi4dl.parallel.costs.link import Link
from mpi4dl.parallel.costs.memory import StageBytes, bytes_of_stages, count_atoms
from mpi4dl.parallel.costs.meter import KnownValues, SavedTensors, TensorMeter
from mpi4dl.parallel.costs.timing import AtomSeconds, planned_cuts, sites_of
from mpi4dl.parallel.inputs import of_tokens, shape_only, space_of
from mpi4dl.parallel.pipeline.balance import FlopCounter, count_flops
from mpi4dl.parallel.pipeline.local_stages import ChooseStream, choose_cut
from mpi4dl.parallel.pipeline.program import map_leaves, pack
from mpi4dl.parallel.pipeline.split import Cuttable, outline, unfit
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.plan import Plan, grid_name
from mpi4dl.parallel.streaming.leading_part import StreamOptions, choose
from mpi4dl.parallel.streaming.memory_limit import StreamNeeds, needs_of
from mpi4dl.parallel.tables.drawing import as_text
from mpi4dl.parallel.tables.simulator import Costs, Report, Simulation, check, simulate
from mpi4dl.parallel.tensor.styles import Styles

# The work of the stages of a model for a microbatch, counted by running them on the meta device.


class Work(NamedTuple):
    """The work of one stage for a microbatch, over all its ranks together: counted, not measured.

    `forward_flops` of convolutions and matrix products; `activation_bytes` that autograd keeps for the backward pass,
    and `working_bytes` at most beside them while layers compute; `handed_bytes` of what goes to the next stage, and
    `largest_bytes` of the largest tensor.
    """

    atoms: tuple[str, ...]
    num_parameters: int
    forward_flops: float
    activation_bytes: int
    working_bytes: int
    handed_bytes: int
    largest_bytes: int = 0


def count_work(
    stages: Sequence[nn.Module],
    names: Sequence[tuple[str, ...]],
    microbatch: tuple[int, ...],
    accept: Callable[[Any], None] = lambda outputs: None,
) -> tuple[Work, ...]:
    """Run the stages of a model on the meta device one after the other, and backward, and count what they do.

    `accept` is called with the final result.
    """
    values: tuple[Any, ...] = (shape_only(nn.ModuleList(stages), microbatch),)
    found = []
    for stage, atoms in zip(stages, names, strict=True):
        saved, meter = SavedTensors([*stage.parameters(), *stage.buffers()]), TensorMeter()
        with torch.enable_grad(), KnownValues(), meter:
            with saved.counting(), FlopCounter() as counter:
                results = stage(*values)
            last = stage is stages[-1]
            if last:
                accept(results)
            handed = pack(results, stage.recipe.outputs)[0] if isinstance(stage, Stage) and not last else []
            kept = saved.num_bytes
            saved.let_go()
            _backward(stage, results)
        most = meter.peak_bytes + sum(value.nbytes for value in pytree.tree_leaves(values) if isinstance(value, Tensor))
        size = sum(p.numel() for p in stage.parameters())
        flops, out = counter.total, sum(t.nbytes for t in handed)
        found.append(Work(atoms, size, flops, kept, max(0, most - kept), out, meter.largest_bytes))
        if not last:
            values = map_leaves(_received, results)
    return tuple(found)


def _backward(stage: nn.Module, results: Any) -> None:
    """The backward pass of a stage, whose parameters' gradients are let go of as they come."""
    roots = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    handles = [
        p.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for p in stage.parameters()
        if p.requires_grad
    ]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    for handle in handles:
        handle.remove()


def _received(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


TEXT_COLUMNS = 120
MOST_READERS = 10
MOST_INTERVALS = 4


@dataclass(frozen=True)
class PlanSummary:
    """A plan for a model and a batch of images, or tokens, of shape `image`, and what it comes to; `str` writes it.

    `work`, and `bytes` of a rank's memory, have one entry a stage; `costs`, `report` and `simulation` are those of the
    ranks of one replica. `assumption` says where the seconds come from, `command` what starts the training, and
    `remark` how images are visited.
    """

    name: str
    plan: Plan
    image: tuple[int, ...]
    num_parameters: int
    work: tuple[Work, ...]
    costs: Costs
    report: Report
    simulation: Simulation
    assumption: str
    states: tuple[StageState, ...] = ()
    command: str = ""
    bytes: tuple[StageBytes, ...] = ()
    allocator: Allocator = HEAP_KEPT
    needs: StreamNeeds | None = None
    remark: str = ""
    recompute: bool = False
    passes: Passes | None = None

    def __str__(self) -> str:
        parts = (self.title(), self.stages(), self.sums(), self.images(), self.streaming(), self.memory(), self.ranks())
        return "\n\n".join("\n".join(part) for part in parts if part)

    def title(self) -> list[str]:
        """The model, the plan, the images, and how to start."""
        plan, ranks = self.plan, counted(self.plan.num_ranks, "rank")
        line = (
            f"{self.name}, {self.num_parameters:,} parameters, on {ranks}: {plan.describe()}, "
            f"{samples_in_words(self.image)}, batches of {self.image[0]}"
        )
        return [line, *([f"start: {self.command}"] if self.command else [])]

    def stages(self) -> list[str]:
        """A table with one line a stage."""
        plan = self.plan
        seconds = [sum(both) for both in zip(self.costs.forward_seconds, self.costs.backward_seconds, strict=True)]
        mean = sum(seconds) / plan.num_stages or 1.0
        total = sum(work.forward_flops for work in self.work) or 1.0
        traced, staged, mirrored = bool(self.work[0].atoms), plan.num_stages > 1, plan.num_directions > 1
        columns = ["stage", "ranks", *["mirrored"] * mirrored, "tiles", "ways", *["units"] * traced, "parameters"]
        columns += ["FLOPs", *["cost/mean", "hands on"] * staged]
        rows = [columns]
        for stage, work in enumerate(self.work):
            shape = plan.shape(stage)
            cells = [str(stage), *(runs(ranks[stage]) for ranks in plan.placement.holders)]
            cells += [grid_name(shape.space), str(shape.batch // plan.replicas)]
            if traced:
                ends = dict.fromkeys((work.atoms[0], work.atoms[-1]))
                cells.append(f"{len(work.atoms)}: {' .. '.join(ends)}")
            cells += [f"{work.num_parameters:,}", f"{100 * work.forward_flops / total:.1f} %"]
            if staged:
                cells.append(f"{seconds[stage] / mean:.2f}")
                cells.append(mebibytes(work.handed_bytes) if stage + 1 < plan.num_stages else "-")
            rows.append(cells)
        lines = list(aligned(rows, left={"tiles", "units"}))
        samples = samples_of(plan, self.image)
        cost = "; cost/mean: of a rank's time; hands on: from all ranks of the stage together" if staged else ""
        lines.append(f"a microbatch of {samples}: {total / 1e9:.4g} GFLOP forward{cost}")
        if plan.replicas > 1:
            lines.append(f"replica d of {plan.replicas} has these ranks + d x {plan.ranks_per_replica}")
        return lines

    def sums(self) -> list[str]:
        """The sums over ranks that share features in a step, and have of the parameters: those who add up most."""
        plan, degree = self.plan, self.plan.tensor
        if degree == 1:
            return []
        held = [sorted({stage for _, stage in plan.held_by(rank)}) for rank in range(plan.ranks_per_replica)]
        summed = [plan.num_microbatches * sum(self.bytes[stage].summed for stage in stages) for stages in held]
        most = max(range(len(held)), key=lambda rank: summed[rank])
        states = [state for stage in held[most] for state in (self.states[stage] if self.states else ())]
        cut, whole = (mebibytes(sum(s.parameters for s in states if bool(s.axes) == part)) for part in (True, False))
        had = f"have {cut} of parameters that are cut and {whole} of others, and " if states else ""
        sent = mebibytes(summed[most] * 2 * (degree - 1) // degree)
        ring = f"of that each sends 2 x {degree - 1} / {degree} round a ring, {sent}"
        return [f"ranks that share features {had}add up {mebibytes(summed[most])} in a step; {ring}"]

    def images(self) -> list[str]:
        """Which boxes of a batch each rank reads."""
        readers = list(self._readers())
        what = "tokens" if of_tokens(self.image) else "images"
        lines = [f"{what} read of each batch, from the first number up to, not including, the second:"]
        lines += [f"  rank {rank}: {what}" for rank, what in readers[:MOST_READERS]]
        if len(readers) > MOST_READERS:
            lines.append(f"  ... and {counted(len(readers) - MOST_READERS, 'rank')} more")
        others = self.plan.num_ranks - len(readers)
        return [*lines, f"  {counted(others, 'rank reads', 'ranks read')} none"] if others else lines

    def _readers(self) -> Iterator[tuple[int, str]]:
        size, microbatches = space_of(self.image), self.plan.divide(self.image[0])
        for rank in range(self.plan.num_ranks):
            samples: dict[tuple[Interval, ...], list[Interval]] = {}
            for read in self.plan.reads(rank, microbatches, size):
                found = samples.setdefault(read.box.space, [])
                adjoining = found and found[-1].stop == read.box.batch.start
                start = found.pop().start if adjoining else read.box.batch.start
                found.append(Interval(start, read.box.batch.stop))
            if samples:
                yield rank, "; ".join(_box(where, found) for where, found in samples.items())

    def ranks(self) -> list[str]:
        """Memory and idle time of each rank, and the timeline."""
        found = []
        for rank, bubble in enumerate(self.simulation.bubbles):
            live = counted(self.report.peak_live[rank], "microbatch", "microbatches")
            kept = mebibytes(self.simulation.peak_bytes[rank])
            found.append(f"at most {live} with {kept} of activations, idle {100 * bubble:.1f} %")
        again = "those of blocks recomputed" if self.recompute else "none recomputed"
        lines = [f"a step, simulated ({self.assumption}; activations in fp32, {again}):"]
        for what, group in groupby(enumerate(found), key=lambda item: item[1]):
            ranks = [rank for rank, _ in group]
            lines.append(f"  {'rank' if len(ranks) == 1 else 'ranks'} {runs(ranks)}: {what}")
        return [*lines, as_text(self.simulation, TEXT_COLUMNS)]

    def anatomy(self) -> Iterator[tuple[int, int, Share]]:
        """For each ZeRO stage the rank that needs most memory, and what it is for."""
        return anatomy(self.plan, self.states, activations_of(self.plan, self.simulation.peak_bytes, self.bytes))

    def streaming(self) -> list[str]:
        """Reads, memory and repetitions of a streamed tile."""
        passes = passes_of_needs(self.needs, self.plan) if self.needs is not None else self.passes
        streamed = "" if self.needs is None else streaming_words(self.needs)
        slow = "" if passes is None or not passes.repeats else passes.words()
        return [*filter(None, (self.remark, streamed, slow))]

    def of_patches(self, image: tuple[int, ...], passes: Passes, share: float, remark: str) -> "PlanSummary":
        """This overview of one visit of each rank, as that of a step which visits all patches of a batch of `image`.

        A visit has this share of all patches. Its memory is that of the step.
        """
        there, back = (1 + rounds / 2 for rounds in passes.mean_rounds)
        again = 1 + passes.mean_rounds[1]
        visits = passes.visits / self.plan.num_microbatches
        forward = tuple(visits * there * seconds for seconds in self.costs.forward_seconds)
        both = zip(self.costs.forward_seconds, self.costs.backward_seconds, strict=True)
        backward = tuple(visits * (again * f + back * b) for f, b in both)
        costs = replace(self.costs, forward_seconds=forward, backward_seconds=backward)
        work = tuple(each._replace(forward_flops=each.forward_flops / share) for each in self.work)
        simulation = simulate(self.plan.table(), self.plan.placement, costs)
        found = replace(self, image=image, passes=passes, remark=remark)
        return replace(found, costs=costs, work=work, simulation=simulation)

    def bytes_of_ranks(self, offloaded: bool = False) -> list[int]:
        """The memory of each rank of a replica in all; `offloaded`: its masters and optimizer state are elsewhere."""
        found = []
        for rank, kept in enumerate(activations_of(self.plan, self.simulation.peak_bytes, self.bytes)):
            part = share(self.plan, rank, self.states, kept)
            found.append(part.together + self._beside(rank, kept) - offloaded * part.optimizer)
        return found

    def _beside(self, rank: int, activations: int) -> int:
        """The memory of a rank's process besides its tensors."""
        largest = max(self.bytes[stage].largest for _, stage in self.plan.held_by(rank))
        return self.allocator.beside(activations, self.plan.num_microbatches, self.needs is not None, largest)

    def memory(self) -> list[str]:
        """The memory of the rank that needs most, for each ZeRO stage."""
        if not self.states:
            return []
        head = ["zero", "rank", "parameters", "gradients", "optimizer", "activations", "buffers", "process", "together"]
        rows = [head]
        for zero, rank, part in self.anatomy():
            name = f"--zero {zero}{' (this plan)' if zero == self.plan.zero else ''}"
            beside = self._beside(rank, part.activations)
            sizes = [*part[:-1], beside, part.together + beside]
            rows.append([name, str(rank), *(f"{num_bytes / 2**20:,.1f}" for num_bytes in sizes)])
        return [
            "memory of the rank that needs most, in MiB (activations with what layers need as they compute; process: "
            "what libraries and the heap take beside):",
            *aligned(rows, left={"zero"}),
        ]


def overview(
    name: str,
    build: Callable[[], nn.Module],
    plan: Plan,
    image: tuple[int, ...],
    *,
    balance: str | Sequence[int] = "flops",
    device: torch.device | str = "cpu",
    clockwork: Profiler | None = None,
    command: str = "",
    optimizer: BuildOptimizer | None = None,
    allocator: Allocator = HEAP_KEPT,
    low_precision: torch.dtype | None = None,
    averaged: bool = False,
    accept: Callable[[Any], None] = lambda outputs: None,
    stream: StreamOptions | ChooseStream | None = None,
    styles: Styles | None = None,
    recompute: bool = False,
) -> PlanSummary:
    """The summary of training the model `name`, which `build()` makes, by this plan, with batches of shape `image`.

    `clockwork` times atoms on `device`, if `balance` is "auto"; else nothing is allocated, and a rank is assumed to
    compute so many GFLOP per second. A plan of one stage needs no model that can be traced. With `optimizer`, which
    makes one for some parameters, the memory of a rank is counted, for weights of `low_precision` if there is one. The
    first stage may `stream` its images, and blocks `recompute`. `styles` say how parameters are cut, as in
    `Held.whole`. `accept` raises ValueError for outputs of the model that the loss would not take. Not collective: no
    MPI is used.

    Raises:
        ValueError: the plan does not fit the images, or the model cannot be cut so, or cannot run on such images.
    """
    problem = plan.problem(plan.num_ranks, space_of(image), image[0])
    if problem:
        raise ValueError(problem)
    model = outline(build).train()
    microbatch = (samples_of(plan, image), *image[1:])
    try:
        cuts = planned_cuts(model, plan, styles)
        cut = plan.num_stages > 1 or stream is not None
        traced = cut or cuts or recompute or of_tokens(image) or balance == "auto"
        cuttable = _cuttable(model, cut, microbatch) if traced else None
        if cuttable is None:
            stages: Sequence[nn.Module] = [model]
            work = count_work(stages, [_names(model, microbatch)], microbatch, accept)
            prices = flat_price(work[0], plan, RANK_GFLOPS if clockwork is None else clockwork.rank_gflops)
            counts: tuple[int, ...] = (1,)
        else:
            counts, cut_prices = choose_cut(cuttable, plan, None, balance, microbatch, device, clockwork, styles)
            prices, names = (
                cut_prices or counted_prices(cuttable, plan, microbatch),
                [cuttable.names[start:stop] for start, stop in _bounds(counts)],
            )
            stages = cuttable.stages(counts) if plan.num_stages > 1 else [model]
            work = count_work(stages, names, microbatch, accept)
        needs = None
        if cuttable is not None and stream is not None:
            options = stream(cuttable, counts) if callable(stream) else stream
            opening = choose(cuttable, counts[0], options, plan.shape(0), microbatch)
            needs = needs_of(opening, model, plan.shape(0), microbatch)
            prices = needs.prices(prices, count_flops(cuttable, shape_only(model, microbatch)))
    except (RuntimeError, AssertionError) as error:
        reason = unfit(model, microbatch)
        if reason is None:
            raise
        raise ValueError(f"{name}: {reason}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    kept = memory_of_stages(cuttable, plan, microbatch, counts, work, clockwork, needs, styles, recompute)
    costs = costs_of(plan, work, prices, counts, kept)
    table = plan.table()
    num_parameters = sum(p.numel() for p in model.parameters())
    states: tuple[StageState, ...] = ()
    if optimizer is not None:
        how = (optimizer, low_precision, cuts, plan.degrees, averaged)
        states = tuple(count_state((stage,), *how) for stage in stages)
    return PlanSummary(
        name,
        plan,
        image,
        num_parameters,
        work,
        costs,
        check(table, plan.placement),
        simulate(table, plan.placement, costs),
        prices.source,
        states,
        command,
        kept,
        allocator,
        needs,
        recompute=recompute,
    )


def streaming_words(needs: StreamNeeds) -> str:
    """How the first stage is streamed, and what a tile takes."""
    options, num_atoms = needs.options, needs.bounds[-1]
    most = mebibytes(max(segment.read_bytes + segment.visit_bytes for segment in needs.segments))
    chosen = f"{options.remark}; " if options.remark else ""
    return (
        f"{chosen}each rank streams {'x'.join(map(str, options.counts))} tiles, {options.norms} norms, through the "
        f"first {counted(num_atoms, 'unit')} in {counted(len(needs.segments), 'segment')}; a tile reads "
        f"{needs.margin} px around itself and takes at most {most}"
    )


def samples_of(plan: Plan, image: tuple[int, ...]) -> int:
    """How many images a microbatch has, over all replicas and ways."""
    return max(1, image[0] // plan.num_microbatches)


def memory_of_stages(
    cuttable: Cuttable | None,
    plan: Plan,
    microbatch: tuple[int, ...],
    counts: Sequence[int],
    work: Sequence[Work],
    clockwork: Profiler | None,
    needs: StreamNeeds | None = None,
    styles: Styles | None = None,
    recompute: bool = False,
) -> tuple[StageBytes, ...]:
    """Memory of stages on each rank: on its tiles, or where that is unknown, in even parts."""
    sizes = sharers(plan)
    if cuttable is not None:
        count = count_atoms if clockwork is None else clockwork.bytes
        sites = sites_of(cuttable, plan, microbatch, styles)
        with suppress(RuntimeError):  # an operator without a rule is one; the training reports it
            columns = {site: count(cuttable, site) for site in dict.fromkeys(sites)}
            if recompute:
                groups = groups_in(cuttable, counts)
                for site, column in columns.items():
                    columns[site] = bytes_recomputed(column, groups, image_bytes(cuttable, site))
            found = bytes_of_stages(counts, [columns[site] for site in sites])
            return found if needs is None else (needs.stage(columns[sites[0]], counts[0]), *found[1:])
    return tuple(
        StageBytes(*(-(-n // size) for n in (stage.activation_bytes, stage.working_bytes, stage.largest_bytes)))
        for stage, size in zip(work, sizes, strict=True)
    )


def sharers(plan: Plan) -> list[int]:
    """On how many ranks the samples of each stage are, those that share features having the same."""
    return [plan.shape(stage).size // plan.tensor for stage in range(plan.num_stages)]


def samples_in_words(image: Sequence[int]) -> str:
    """A description of the samples of such a batch."""
    size = " x ".join(map(str, space_of(image)))
    return f"samples of {size} tokens" if of_tokens(image) else f"images of {size} px"


def costs_of(
    plan: Plan, work: Sequence[Work], prices: StageCosts, counts: Sequence[int], memory: Sequence[StageBytes]
) -> Costs:
    """The costs of each rank of stages that have so many atoms."""
    sizes = sharers(plan)
    # The side with fewer ranks has more bytes to send or receive per rank, one after the other.
    messages = (
        prices.link.seconds(1, stage.handed_bytes / min(pair))
        for stage, pair in zip(work[:-1], pairwise(sizes), strict=True)
    )
    return Costs(*prices.of_stages(counts), tuple(messages), tuple(stage.kept for stage in memory))


def flat_price(work: Work, plan: Plan, rank_gflops: float) -> StageCosts:
    """That of a model in one stage which cannot be taken apart."""
    seconds = work.forward_flops / plan.shape(0).size / (rank_gflops * 1e9)
    return StageCosts(((AtomSeconds(seconds, 2 * seconds),),), Link(0.0, 0.0), assumed(rank_gflops), timed=False)


def _cuttable(model: nn.Module, cut: bool, image: tuple[int, ...]) -> Cuttable | None:
    """The model's atoms; of one that cannot be traced none, if it need not be cut."""
    try:
        return Cuttable(model, image=image)
    except ValueError:
        if cut:
            raise
        return None


def _names(model: nn.Module, image: tuple[int, ...]) -> tuple[str, ...]:
    """The names of a model's atoms; of one that cannot be traced, and so not be cut, none."""
    try:
        return Cuttable(model, image=image).names
    except ValueError:
        return ()


def _bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(counts, initial=0)))


def _box(space: Sequence[Interval], samples: Sequence[Interval]) -> str:
    shown = [f"{start}-{stop}" for start, stop in samples[:MOST_INTERVALS]] + ["..."] * (len(samples) > MOST_INTERVALS)
    names = ({"cols": "columns"}.get(name, name) for name in SPACE[len(space)])
    where = ", ".join(f"{name} {start}-{stop}" for name, (start, stop) in zip(names, space, strict=True))
    return f"{where} of samples {', '.join(shown)}"
