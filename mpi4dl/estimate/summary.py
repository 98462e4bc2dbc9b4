"""The description of a training by a plan: data, messages and memory of each rank, and the timeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from torch import nn

from mpi4dl._wording import aligned, counted, mebibytes, runs
from mpi4dl.estimate.memory import PlanMemory
from mpi4dl.estimate.passes import Passes, passes_of_needs
from mpi4dl.estimate.plan_estimate import Estimator, PlanEstimate, Step
from mpi4dl.estimate.step_time import StepTime
from mpi4dl.geometry import SPACE, Interval
from mpi4dl.options.build import title_of
from mpi4dl.parallel.costs.cost_model import costs_for
from mpi4dl.parallel.costs.sites import Units, on_one_rank
from mpi4dl.parallel.costs.units import count_units
from mpi4dl.parallel.cut import ChooseStream, Costing, Counts, choose_cut
from mpi4dl.parallel.inputs import of_tokens, space_of
from mpi4dl.parallel.pipeline.split import unfit
from mpi4dl.parallel.plan import Plan, grid_name
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from mpi4dl.parallel.streaming.memory_limit import StreamNeeds
from mpi4dl.parallel.tables.drawing import as_text
from mpi4dl.parallel.tables.simulator import Costs, Simulation, check, simulate


class Work(NamedTuple):
    """The work of one stage for a microbatch, over all its ranks together: counted, not measured.

    `forward_flops` of convolutions and matrix products, and `output_bytes` of what goes to the next stage.
    """

    units: tuple[str, ...]
    num_parameters: int
    forward_flops: float
    output_bytes: int


TEXT_COLUMNS = 120
MOST_READERS = 10
MOST_INTERVALS = 4


@dataclass(frozen=True)
class PlanSummary:
    """A plan for a model and a batch of images, or tokens, of shape `image`, and what it comes to; `str` writes it.

    `work` has one entry a stage. `costs` are those of the table of `step`, whose `time` is that with all that follows.
    `command` is what starts the training, and `remark` says how images are streamed.
    """

    name: str
    plan: Plan
    image: tuple[int, ...]
    num_parameters: int
    work: tuple[Work, ...]
    step: Step
    costs: Costs
    time: StepTime | None = None
    command: str = ""
    remark: str = ""
    passes: Passes | None = None

    @cached_property
    def simulation(self) -> Simulation:
        """The table of the ranks of one replica."""
        return simulate(self.plan.table(), self.plan.placement, self.costs)

    @property
    def rank_memory(self) -> PlanMemory:
        return self.step.memory

    @property
    def estimate(self) -> PlanEstimate:
        """The plan as searches have it; of patches of slides its speed is 0."""
        speed = 0.0 if self.time is None else self.image[0] / self.time.seconds
        step, num_bytes = self.step, max(self.rank_memory.of_ranks(self.plan.zero))
        stream = None if step.needs is None else step.needs.options
        return PlanEstimate(self.plan, speed, num_bytes, step.costs.timed, step.recompute, stream, self.time)

    def __str__(self) -> str:
        parts = (self.title(), self.stages(), self.sums(), self.images(), self.streaming(), self.memory(), self.ranks())
        return "\n\n".join("\n".join(part) for part in parts if part)

    def title(self) -> list[str]:
        """The model, the plan, the images, and how to start."""
        line = title_of(self.name, self.num_parameters, self.plan, self.image)
        return [line, *([f"start: {self.command}"] if self.command else [])]

    def stages(self) -> list[str]:
        """A table with one line a stage."""
        plan = self.plan
        seconds = [sum(both) for both in zip(self.costs.forward_seconds, self.costs.backward_seconds, strict=True)]
        mean = sum(seconds) / plan.num_stages or 1.0
        total = sum(work.forward_flops for work in self.work) or 1.0
        traced, staged, mirrored = bool(self.work[0].units), plan.num_stages > 1, plan.num_directions > 1
        columns = ["stage", "ranks", *["mirrored"] * mirrored, "tiles", "ways", *["units"] * traced, "parameters"]
        columns += ["FLOPs", *["cost/mean", "hands on"] * staged]
        rows = [columns]
        for stage, work in enumerate(self.work):
            shape = plan.shape(stage)
            cells = [str(stage), *(runs(ranks[stage]) for ranks in plan.placement.holders)]
            cells += [grid_name(shape.space), str(shape.batch // plan.replicas_together)]
            if traced:
                ends = dict.fromkeys((work.units[0], work.units[-1]))
                cells.append(f"{len(work.units)}: {' .. '.join(ends)}")
            cells += [f"{work.num_parameters:,}", f"{100 * work.forward_flops / total:.1f} %"]
            if staged:
                cells.append(f"{seconds[stage] / mean:.2f}")
                cells.append(mebibytes(work.output_bytes) if stage + 1 < plan.num_stages else "-")
            rows.append(cells)
        lines = list(aligned(rows, left={"tiles", "units"}))
        samples, *_ = plan.microbatch(self.image)
        cost = "; cost/mean: of a rank's time; hands on: from all ranks of the stage together" if staged else ""
        lines.append(f"a microbatch of {samples}: {total / 1e9:.4g} GFLOP forward{cost}")
        if plan.replicas > 1:
            lines.append(f"replica d of {plan.replicas} has these ranks + d x {plan.ranks_per_replica}")
        return lines

    def sums(self) -> list[str]:
        """What ranks that share features add up in a step, and have of the parameters: those who add up most."""
        plan, degree, memory = self.plan, self.plan.tensor, self.rank_memory
        if degree == 1:
            return []
        stages_of = [sorted({stage for _, stage in plan.held_by(rank)}) for rank in range(plan.ranks_per_replica)]
        summed = [plan.num_microbatches * sum(memory.stages[stage].summed for stage in stages) for stages in stages_of]
        most = max(range(len(stages_of)), key=lambda rank: summed[rank])
        states = [state for stage in stages_of[most] for state in (memory.states[stage] if memory.states else ())]
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
        found, report = [], check(self.plan.table(), self.plan.placement)
        for rank, bubble in enumerate(self.simulation.bubbles):
            live = counted(report.peak_live[rank], "microbatch", "microbatches")
            kept = mebibytes(self.simulation.peak_bytes[rank])
            found.append(f"at most {live} with {kept} of activations, idle {100 * bubble:.1f} %")
        again = "those of blocks recomputed" if self.step.recompute else "none recomputed"
        lines = [f"a step, simulated ({self.step.costs.source}; activations in fp32, {again}):"]
        for what, group in groupby(enumerate(found), key=lambda item: item[1]):
            ranks = [rank for rank, _ in group]
            lines.append(f"  {'rank' if len(ranks) == 1 else 'ranks'} {runs(ranks)}: {what}")
        if self.time is not None:
            seconds, parts = self.time.seconds, self.time.parts
            lines.append(
                f"with gradients and optimizer {seconds:.3g} s; of the rank that works longest: {parts.words()}"
            )
        return [*lines, as_text(self.simulation, TEXT_COLUMNS)]

    def streaming(self) -> list[str]:
        """Lines about streaming: the tiles, their memory, and the passes over them."""
        needs = self.step.needs
        passes = passes_of_needs(needs, self.plan) if needs is not None else self.passes
        streamed = "" if needs is None else streaming_words(needs)
        slow = "" if passes is None or passes.each_step == 2 else passes.words()
        return [*filter(None, (self.remark, streamed, slow))]

    def of_patches(
        self, plan: Plan, image: tuple[int, ...], passes: Passes, share: float, remark: str
    ) -> "PlanSummary":
        """The summary of a step over all patches of a batch of shape `image`, from this one of one tile of each rank.

        A tile has this share of all patches. Its memory is that of the step.
        """
        there, back = (1 + number / 2 for number in passes.mean_statistics)
        again = 1 + passes.mean_statistics[1]
        tiles = passes.tiles / self.plan.num_microbatches
        forward = tuple(tiles * there * seconds for seconds in self.costs.forward_seconds)
        both = zip(self.costs.forward_seconds, self.costs.backward_seconds, strict=True)
        backward = tuple(tiles * (again * f + back * b) for f, b in both)
        costs = replace(self.costs, forward_seconds=forward, backward_seconds=backward)
        work = tuple(each._replace(forward_flops=each.forward_flops / share) for each in self.work)
        return replace(self, plan=plan, image=image, passes=passes, remark=remark, costs=costs, work=work, time=None)

    def memory(self) -> list[str]:
        """What the rank that needs most has in its memory, for each ZeRO stage."""
        if not self.rank_memory.states:
            return []
        head = ["zero", "rank", "parameters", "gradients", "optimizer", "activations", "buffers", "process", "together"]
        rows = [head]
        for zero, rank, part in self.rank_memory.breakdown():
            name = f"--zero {zero}{' (this plan)' if zero == self.plan.zero else ''}"
            beside = self.rank_memory.process(rank)
            sizes = [*part[:-1], beside, part.together + beside]
            rows.append([name, str(rank), *(f"{num_bytes / 2**20:,.1f}" for num_bytes in sizes)])
        return [
            "memory of the rank that needs most, in MiB (activations with what layers need as they compute; process: "
            "what libraries and the heap take beside):",
            *aligned(rows, left={"zero"}),
        ]


def _cut(estimator: Estimator, plan: Plan, balance: str | Sequence[int]) -> Counts:
    """How many units each stage gets, and what they cost. Raises ValueError where the model cannot be cut so."""
    units, device, profiler = estimator.cuttable, estimator.device, estimator.profiler
    if plan.num_stages == 1:
        kind = balance if isinstance(balance, str) else "flops"
        costs = costs_for(units, plan, estimator.sites(plan), kind, device, profiler)
        return Counts((len(units),), costs)
    image = plan.microbatch(estimator.image)
    found = choose_cut(units, plan, None, balance, image, Costing(device, profiler, estimator.styles))
    units.shared(found.counts)  # raises ValueError where two stages would need the same buffer
    return found


def overview(
    name: str,
    estimator: Estimator,
    plan: Plan,
    *,
    balance: str | Sequence[int] = "flops",
    command: str = "",
    accept: Callable[[Any], None] = lambda outputs: None,
    stream: StreamOptions | ChooseStream | None = None,
    recompute: bool = False,
) -> PlanSummary:
    """The summary of training the model `name` by this plan, as `estimator` says of its units and batches.

    Units are timed if `balance` is "auto", or a number for each stage; else nothing is allocated. The first stage may
    `stream` its images, and blocks `recompute`. `accept` raises ValueError for outputs of the model that the loss would
    not take. Not collective: no MPI is used.

    Raises:
        ValueError: the plan does not fit the images, or the model cannot be cut so, or cannot run on such images.
    """
    units, image = estimator.cuttable, estimator.image
    if problem := plan.problem(plan.num_ranks, space_of(image), image[0]):
        raise ValueError(problem)
    microbatch, model = plan.microbatch(image), units.model
    with told_of(name, model, microbatch):
        counts, costs = _cut(estimator, plan, balance)
        work = count_work(units, counts, microbatch, accept)
        needs = None if stream is None else estimator.streaming(plan, counts, stream)
    assert costs is not None
    step = estimator.step(plan, counts, costs, recompute, needs, exact=True)
    time, num_parameters = step.time(plan), sum(p.numel() for p in model.parameters())
    return PlanSummary(name, plan, image, num_parameters, work, step, time.costs, time, command)


@contextmanager
def told_of(name: str, model: nn.Module, image: tuple[int, ...]) -> Iterator[None]:
    """Errors in here are ValueErrors that name the model: those that it has too, alone on samples of this shape."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:  # the model's own code may raise any
        reason = unfit(model, image)
        if reason is None:
            raise
        raise ValueError(f"{name}: {reason}") from error


def count_work(
    units: Units, counts: Sequence[int], microbatch: tuple[int, ...], accept: Callable[[Any], None]
) -> tuple[Work, ...]:
    """The work of stages of that many units; `accept` is called with the model's outputs, on shapes."""
    counted, found = count_units(units, on_one_rank(microbatch), accept, backward=False), []
    for start, stop in pairwise(accumulate(counts, initial=0)):
        own, last = counted[start:stop], stop == len(units)
        parameters = {id(p): p.numel() for i in range(start, stop) for p in units.unit(i).parameters()}
        flops, output_bytes = sum(unit.flops for unit in own), 0 if last else own[-1].output_bytes
        found.append(Work(units.names[start:stop], sum(parameters.values()), flops, output_bytes))
    return tuple(found)


def streaming_words(needs: StreamNeeds) -> str:
    """How the first stage is streamed, and what a tile takes."""
    options, num_units = needs.options, needs.num_units
    most = mebibytes(max(segment.read_bytes + segment.tile_bytes for segment in needs.segments))
    chosen = f"{options.remark}; " if options.remark else ""
    kept = f"; outputs between segments take {mebibytes(needs.kept_bytes)}" if needs.kept_bytes else ""
    kept += f" on {options.keep.where}" if kept and options.keep.where != "device" else ""
    return (
        f"{chosen}each rank streams {grid_name(options.counts)} tiles, {options.norms} norms, through the "
        f"first {counted(num_units, 'unit')} in {counted(len(needs.segments), 'segment')}; a tile reads "
        f"{needs.margin} px around itself and takes at most {most}{kept}"
    )


def _box(space: Sequence[Interval], samples: Sequence[Interval]) -> str:
    shown = [f"{start}-{stop}" for start, stop in samples[:MOST_INTERVALS]] + ["..."] * (len(samples) > MOST_INTERVALS)
    names = ({"cols": "columns"}.get(name, name) for name in SPACE[len(space)])
    where = ", ".join(f"{name} {start}-{stop}" for name, (start, stop) in zip(names, space, strict=True))
    return f"{where} of samples {', '.join(shown)}"
