"""The findings of a dry run: what a configuration would train, passes over tiles, and what fits into memory."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil, isfinite
from typing import Any

import torch

from mpi4dl._memory import NodeMemory, memory_of_node
from mpi4dl._randomness import forked
from mpi4dl._wording import counted, mebibytes
from mpi4dl.engine import Engine
from mpi4dl.estimate.passes import SLOW_PASSES, Passes, passes_of_needs, passes_of_patches, patches_words
from mpi4dl.estimate.summary import PlanSummary, overview
from mpi4dl.estimate.workload import Workload, kept_outputs
from mpi4dl.options.declare import ConfigError
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.parallel import spatial
from mpi4dl.parallel.costs.cost_model import Profiler, flop_seconds
from mpi4dl.parallel.costs.meter import needs_values
from mpi4dl.parallel.costs.sites import planned_cuts
from mpi4dl.parallel.costs.store import machine, versions
from mpi4dl.parallel.cut import ChooseStream
from mpi4dl.parallel.disk import byte_seconds
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions, segments_of
from mpi4dl.parallel.streaming.memory_limit import ASSUMED_SPEEDS, Speeds, describe
from mpi4dl.parallel.tensor.cutting import with_cuts


def passes_of(work: Workload, stages: LocalStages) -> Passes | None:
    """The passes of a step over streamed tiles; None without streaming, or if norms need no statistics passes."""
    if work.parallel.stream_norm != "exact" or not work.streams_images:
        return None
    if work.patch is not None:
        return passes_of_patches(work, stages.plan)
    if not isinstance(stages.stream, StreamOptions):
        return None
    estimator = work.estimator(stages.plan, stages.device, Profiler.of_user())
    return passes_of_needs(estimator.streaming(stages.plan, stages.counts, stages.stream), stages.plan)


def look_ahead(
    work: Workload, plan: Plan, device: torch.device, stream: StreamOptions | ChooseStream | None, **options: Any
) -> PlanSummary:
    """The summary of a training by this plan; `options` are others of `overview`, and the `profiler`.

    With patches it estimates those that each rank runs at once, as an image of its own, and multiplies by their number.
    """
    patches, (shown, of_tile) = work.patches_by(plan), work.one_tile(plan)
    profiler = options.pop("profiler", None) or Profiler.of_user()
    found = overview(
        work.name,
        shown.estimator(of_tile, device, profiler),
        of_tile,
        accept=work.require_loss,
        recompute=work.training.recompute,
        stream=stream if patches is None else None,
        **options,
    )
    if patches is None:
        return found
    passes = passes_of_patches(work, plan)
    here, everywhere = (p.microbatch(w.batch)[0] * w.patches_each for w, p in ((shown, of_tile), (work, plan)))
    remark = f"{patches.remark}; {counted(passes.tiles, 'tile')} of each rank in every pass over them"
    if work.patches is not None:
        remark += f"\n{patches_words(work, passes)}"
    return found.of_patches(plan, work.batch, passes, here / everywhere, remark)


def require_rules(work: Workload, plan: Plan) -> None:
    """Raise ValueError if a model in one stage calls what has no rule, on tiles or a batch that ranks share.

    A model in several stages is not looked at: which of its stages share what is known to their ranks. Nor is one any
    further from where it looks at values, which there are not.
    """
    if plan.num_stages > 1 or plan.is_plain(0) or work.patch is not None:
        return
    try:
        model = work.model()
        cuts = planned_cuts(model, plan, work.styles)
        spatial.require_rules(model, plan.microbatch(work.batch), plan.shape(0), partial(with_cuts, cutting=cuts))
    except (spatial.NoRule, ValueError) as problem:
        raise ValueError(f"`model` {work.name}: {problem}") from problem
    except RuntimeError as error:
        if not needs_values(error):
            raise


def explain(work: Workload, engine: Engine) -> Iterator[str]:
    """The messages of each operator of a model in one stage, or the ranks of each stage; and the memory of a rank."""
    stages, patches = engine.stages, work.patch
    balance = stages.counts if stages.plan.num_stages > 1 else "flops"
    found = look_ahead(work, stages.plan, torch.device("cpu"), stages.stream, balance=balance)
    if engine.plan.num_stages == 1 and patches is None:
        # With cut parameters the rank has no more than its part of the model.
        model = work.model() if stages.cutting else stages.modules_of[0].train()
        try:
            as_held = partial(with_cuts, cutting=stages.cutting)
            yield str(spatial.explain(model, work.batch, stages.parts[0, 0].grid, as_held))
        except spatial.NoRule as problem:
            raise ValueError(f"`model` {work.name}: {problem}") from problem
        except RuntimeError as error:
            if not needs_values(error):
                raise
            yield "the messages of operators are not known before a step: the model looks at values of tensors"
        yield from (*found.sums(), *found.streaming(), *found.memory())
    elif patches is not None:
        yield from (*found.streaming(), *found.memory())
    else:
        yield from (*found.stages(), *found.sums(), *found.images())
        yield from (*found.streaming(), *found.memory(), *found.ranks())


# How the images of a run are streamed, as the flags say, or as the limit of memory does.


def stream_of(
    work: Workload, plan: Plan, device: torch.device, speeds: Speeds | None = None
) -> StreamOptions | ChooseStream | None:
    """How the images are streamed; None if they are not. Raises ConfigError where options contradict each other.

    Where that is to be chosen, it is what chooses for stages of so many units, alike on all ranks if they are given the
    same `speeds`; these are measured if they are left out.
    """
    chosen, limit = work.parallel, work.parallel.memory_limit
    asked = chosen.stream
    if asked is None and chosen.stream_until is not None:
        raise ConfigError(f"`stream_until` {chosen.stream_until} says where streaming ends, but `stream` is missing")
    if asked == "auto" and limit is None:
        raise ConfigError("`stream` auto needs `memory_limit`: the limit of a rank's memory, such as 6GiB")
    if asked != "auto" and limit is not None:
        raise ConfigError(f"`memory_limit` {mebibytes(limit)} is for `stream` auto, which chooses the tiles by it")
    if asked is None:
        return None
    if not isinstance(asked, str):
        segments = segments_of(chosen.stream_segments)
        return StreamOptions(asked, chosen.stream_until, chosen.stream_norm, segments, kept_outputs(chosen))
    if plan.bidirectional and chosen.stream_norm != "exact":
        raise ConfigError("copies in both directions share their statistics later: stream with `stream_norm` exact")
    estimator = work.estimator(None, device, Profiler.of_user())
    estimator.speeds = speeds or measured_speeds(chosen, device)

    def choose(cuttable: Cuttable, counts: Sequence[int]) -> StreamOptions:
        found = estimator.choose_tiles(plan, counts, limit or 0, any_zero=False)
        estimated = f"estimated {mebibytes(found.num_bytes)} of {mebibytes(limit or 0)}"
        return replace(found.options, remark=f"`stream` auto: {describe(found)}, {estimated}")

    return choose


def measured_speeds(chosen: Parallel, device: torch.device, local_size: int = 1) -> Speeds:
    """How fast this machine, of so many ranks, computes, and its disk is, where `stream` auto has to know.

    It is measured once, and remembered, so that the same job is streamed alike again. Of the memory that ranks leave,
    files get half.
    """
    if chosen.stream != "auto" or chosen.memory_limit is None:
        return ASSUMED_SPEEDS
    cached = max(0.0, memory_of_node() / local_size - chosen.memory_limit) / 2
    store, facts = Profiler.of_user().store, {"what": "speeds", "folder": tempfile.gettempdir()}
    facts |= {**machine(device), **versions()}
    found = store.get(facts)
    if found is None:
        found = [flop_seconds(device), *byte_seconds()]
        if isfinite(found[-1]):  # or else there was no room
            store.put(facts, found)
    flop, cached_byte, disk_byte = found
    return Speeds(flop, cached_byte, disk_byte, cached)


REFUSED = 1.25  # times the memory: estimates are within that of what was measured


def looked_at(work: Workload, engine: Engine, places: Sequence[NodeMemory]) -> tuple[list[str], str | None]:
    """Remarks on a run, and the reason of a refusal, if any. No other rank is asked.

    `places` are where ranks compute; if there are none, memory is not counted.
    """
    remarks: list[str] = []
    try:
        with forked([engine.device]):  # other ranks draw nothing meanwhile
            passes = passes_of(work, engine.stages)
            if work.patches is not None:
                remarks.append(patches_words(work, passes))
            if passes is not None and passes.each_step >= SLOW_PASSES:
                remarks.append(passes.words(flop_seconds(engine.device)))
            if places:
                need = MemoryNeed(work, engine, places)
                problem = need.problem()
                refuses = work.parallel.memory_check == "error" and not work.run.dry_run
                if problem is not None and refuses and need.impossible:
                    return remarks, problem
                remarks += [] if problem is None else [f"warning: {problem}"]
    except Exception as error:
        # The model's own code runs on shapes here, which may fail in any way. Training then says what is wrong with it.
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return [*remarks, f"what this run needs could not be estimated ({what})"], None
    return remarks, None


class MemoryNeed:
    """The memory that a run needs on its nodes, and other ways to run that need less."""

    def __init__(self, work: Workload, engine: Engine, places: Sequence[NodeMemory]) -> None:
        self.work, self.device = work, engine.device
        self.ranks: dict[NodeMemory, list[int]] = {}
        for rank, place in enumerate(places):
            self.ranks.setdefault(place, []).append(rank)
        shown, self.plan = work.one_tile(engine.plan)
        self.estimator = shown.estimator(self.plan, self.device, Profiler.of_user())
        self.counts = engine.stages.counts if self.plan.num_stages > 1 else (len(self.estimator.cuttable),)
        self.stream = engine.stages.stream if work.patch is None else None
        needs = self.of_ranks(work.batch_size, work.training.recompute, self.stream)
        self.place = max(self.ranks, key=lambda place: self.on_place(place, needs) / place.num_bytes)
        self.most = max(needs)
        self.needed = self.on_place(self.place, needs)

    def of_ranks(self, size: int, recompute: bool, stream: StreamOptions | ChooseStream | None) -> list[int]:
        """The memory of each rank of a replica for batches of this size, with the cut of this run."""
        estimator = replace(self.estimator, image=self.work.of_batches(size).one_tile(self.plan)[0].batch)
        needs = None if stream is None else estimator.streaming(self.plan, self.counts, stream)
        memory = estimator.memory(self.plan, self.counts, recompute, needs, exact=True)
        return memory.of_ranks(self.plan.zero, self.work.parallel.offload == "disk")

    def on_place(self, place: NodeMemory, needs: Sequence[int]) -> int:
        """The memory of all ranks there together; `needs` are those of the ranks of one replica."""
        return sum(needs[rank % len(needs)] for rank in self.ranks[place])

    def fits(self, size: int, recompute: bool, stream: StreamOptions | ChooseStream | None = None) -> bool:
        """Whether batches of this size do."""
        with suppress(ValueError, RuntimeError):
            return self.on_place(self.place, self.of_ranks(size, recompute, stream)) <= self.place.num_bytes
        return False

    @property
    def impossible(self) -> bool:
        """Whether the run cannot fit: what is frozen, and types of 2 bytes, make it smaller than is counted."""
        return (
            not (self.work.tuning.freeze or self.work.tuning.lora)
            and self.work.training.precision == "fp32"
            and self.needed > REFUSED * self.place.num_bytes
        )

    def problem(self) -> str | None:
        """The sentence for the user; None if the run fits."""
        if self.needed <= self.place.num_bytes:
            return None
        ranks, has = self.ranks[self.place], gibibytes(self.place.num_bytes)
        fits = [*self.remedies()]
        nodes = ceil(self.needed / self.place.num_bytes)
        such = f"{nodes} such {'GPUs' if self.device.type == 'cuda' else 'nodes'}"
        spread = len(ranks) >= nodes and self.most <= self.place.num_bytes
        fits.append(f"{such} for the same ranks" if spread else f"more ranks, for more `tiles`, on {such} or more")
        return (
            f"{counted(len(ranks), 'rank')} on {self.place.name} need about {gibibytes(self.needed)} together, "
            f"{gibibytes(self.most)} at most each, but it has {has} of memory. What fits: {'; '.join(fits)}. "
            "`memory_check` none starts the run anyway"
        )

    def remedies(self) -> Iterator[str]:
        """Remedies that fit, in words; each was counted."""
        work, own, plan = self.work, self.work.batch_size, self.plan
        least = plan.replicas * max(plan.batch_ways) * ceil(plan.num_microbatches / work.training.accumulate)
        limit = int(0.9 * self.place.num_bytes / len(self.ranks[self.place]))
        by_limit = replace(work.parallel, stream="auto", memory_limit=limit)
        streams = not work.streams_images
        speeds = measured_speeds(by_limit, self.device) if streams else ASSUMED_SPEEDS
        estimator = replace(self.estimator, streams=streams, speeds=speeds)
        for again, needs in estimator.ways(plan, self.counts, limit, any_zero=False):
            if again and (work.training.recompute or work.patch is not None):
                continue
            word = f"`stream` auto with `memory_limit` {max(1, limit >> 20)}MiB" if needs else "`recompute`" * again
            recompute, stream = again or work.training.recompute, self.stream if needs is None else needs.options
            for size in smaller(own, least) if needs is None else (own,):
                if (word or size != own) and self.fits(size, recompute, stream):
                    yield " with ".join(filter(None, (f"`batch_size` {size}" * (size != own), word)))
                    break


def smaller(batch_size: int, least: int) -> Iterator[int]:
    """The batch itself, and then halves of it, as small as the plan allows."""
    while batch_size > least:
        yield batch_size
        batch_size = max(least, batch_size // 2)
    yield least


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
