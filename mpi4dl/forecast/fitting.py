"""What a run says before its first step: whether it fits into its nodes' memory, and what makes its steps slow.

Rank 0 counts what each rank needs, on shapes. Each node adds up its own ranks, and compares the sum with what it has.

    need > REFUSED x memory    the run is refused, with what fits
    need > memory              the run warns, with what fits
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

import torch

from mpi4dl._memory import memory_of_node
from mpi4dl._randomness import forked
from mpi4dl._wording import counted
from mpi4dl.comm import Refusal
from mpi4dl.engine import Engine
from mpi4dl.forecast.dry_run import batch_of, look_ahead
from mpi4dl.forecast.overview import Overview
from mpi4dl.forecast.passes import passes_of
from mpi4dl.forecast.visiting import stream_of
from mpi4dl.options.config import Config
from mpi4dl.parallel.costs.prices import Clockwork
from mpi4dl.parallel.costs.speeds import compute_seconds
from mpi4dl.parallel.costs.timing import clock_on
from mpi4dl.parallel.inputs import of_tokens
from mpi4dl.parallel.plan import Plan

REFUSED = 1.25  # times the memory: estimates are within that of what was measured
SMALL = 0.25  # of the memory: a run that needs no more by a generous guess is not looked at
GUESSED_PER_VALUE, GUESSED_PER_WEIGHT = 2000, 20  # bytes of a value of an image, and of a weight, are four times that
SLOW_PASSES = 4  # over the images in a step, from which on the run says so


class NodeMemory(NamedTuple):
    """Where a rank computes: a node, or a GPU of one, and how many bytes of memory that has."""

    name: str
    num_bytes: int


def place_of(device: torch.device) -> NodeMemory:
    """That of this rank."""
    if device.type == "cuda":
        return NodeMemory(f"{device} of {platform.node()}", torch.cuda.get_device_properties(device).total_memory)
    return NodeMemory(platform.node(), memory_of_node())


def told_before(config: Config, engine: Engine, num_classes: int, channels: int) -> list[str]:
    """What to say of a run before it starts. Collective.

    Raises:
        Refusal: the run clearly does not fit into the memory of a node; on all ranks. A dry run only warns.
    """
    comm, own = engine.comm, place_of(engine.device)
    places = comm.all_gather_object(own)
    told: tuple[list[str], str | None] = ([], None)
    if comm.rank == 0:
        told = _looked_at(config, engine, num_classes, channels, places)
    remarks, refusal = comm.broadcast_object(told)
    if refusal is not None:
        raise Refusal(refusal)
    return list(remarks)


def _looked_at(
    config: Config, engine: Engine, num_classes: int, channels: int, places: Sequence[NodeMemory]
) -> tuple[list[str], str | None]:
    """What rank 0 finds: remarks, and why the run is refused, if so."""
    remarks: list[str] = []
    check = config.parallel.memory_check
    large = check != "none" and not is_small(config, engine, channels, min(place.num_bytes for place in places))
    try:
        with forked([engine.device]):  # other ranks draw nothing meanwhile
            passes = passes_of(config, engine.held, num_classes, channels)
            if passes is not None and passes.each_step >= SLOW_PASSES:
                seconds = compute_seconds(engine.device, torch.float32, clock_on(engine.device))[0] / 3
                remarks.append(passes.words(seconds))
            if large:
                need = MemoryNeed(config, engine, num_classes, channels, places)
                problem = need.problem()
                refuses = check == "error" and not config.run.dry_run
                if problem is not None and refuses and need.impossible:
                    return remarks, problem
                remarks += [] if problem is None else [f"warning: {problem}"]
    except Exception as error:
        # The model's own code runs on shapes here, which may fail in any way. Training then says what is wrong with it.
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return [*remarks, f"what this run needs could not be estimated ({what})"], None
    return remarks, None


def is_small(config: Config, engine: Engine, channels: int, num_bytes: int) -> bool:
    """Whether all ranks together need less than a share of so many bytes, by a guess that is far too high."""
    batch, weights = batch_of(config, channels), engine.held.num_parameters
    each = weights if of_tokens(batch) else GUESSED_PER_VALUE
    return 4 * (prod(batch) * each + engine.comm.size * weights * GUESSED_PER_WEIGHT) < SMALL * num_bytes


class MemoryNeed:
    """The memory that a run needs on its nodes, and other ways to run that need less."""

    def __init__(
        self, config: Config, engine: Engine, num_classes: int, channels: int, places: Sequence[NodeMemory]
    ) -> None:
        self.config, self.plan, self.device = config, engine.plan, engine.device
        self.num_classes, self.channels = num_classes, channels
        self.counts = engine.held.counts
        self.ranks: dict[NodeMemory, list[int]] = {}
        for rank, place in enumerate(places):
            self.ranks.setdefault(place, []).append(rank)
        self.stream = engine.held.stream if config.model.patches is None else None
        self.found = self.overview()
        needs = self.found.bytes_of_ranks(config.parallel.offload == "disk")
        self.place = max(self.ranks, key=lambda place: self.on_place(place, needs) / place.num_bytes)
        self.most = max(needs)
        self.needed = self.on_place(self.place, needs)

    def overview(self, config: Config | None = None, stream: object = None) -> Overview:
        """That of another configuration, with the cut of this one."""
        config = config or self.config
        balance = self.counts if self.plan.num_stages > 1 else "flops"
        chosen = self.stream if stream is None else stream
        shared = {"balance": balance, "clockwork": Clockwork.of_user(), "stream": chosen}
        return look_ahead(config, self.plan, self.num_classes, self.channels, **shared, device=self.device)

    def on_place(self, place: NodeMemory, needs: Sequence[int]) -> int:
        """What all ranks there need together; `needs` are those of the ranks of one replica."""
        return sum(needs[rank % len(needs)] for rank in self.ranks[place])

    @property
    def impossible(self) -> bool:
        """Whether the run cannot fit: what is frozen, and types of 2 bytes, make it smaller than is counted."""
        exact = not self.config.tuning.freeze and self.config.training.precision == "fp32"
        return exact and self.needed > REFUSED * self.place.num_bytes

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
        """What fits instead, in words, each of which was counted."""
        config, training = self.config, self.config.training
        again = replace(config, training=replace(training, recompute=True))
        tries = [(config, "")]
        if not training.recompute and config.model.patches is None:
            tries.append((again, "`recompute`"))
        for other, word in tries:
            for size in smaller(config.data.batch_size, self.least_batch):
                if (other, size) == (config, config.data.batch_size):
                    continue
                resized = replace(other, data=replace(config.data, batch_size=size))
                with suppress(ValueError, RuntimeError):
                    if self.fits(self.overview(resized)):
                        batch = f"`batch_size` {size}" if size != config.data.batch_size else ""
                        yield " with ".join(filter(None, (batch, word)))
                        break
        plan = self.plan
        streams = plan.schedule == "1f1b" and not plan.bidirectional and not plan.cuts_parameters
        if streams and config.data.text is None and not config.visits:
            yield from self.streamed()

    def streamed(self) -> Iterator[str]:
        """How the images can be streamed."""
        limit = int(0.9 * self.place.num_bytes / len(self.ranks[self.place]))
        parallel = replace(self.config.parallel, stream="auto", memory_limit=limit)
        chosen = replace(self.config, parallel=parallel)
        with suppress(ValueError, RuntimeError):
            stream = stream_of(chosen, self.plan, self.num_classes, self.channels, self.device)
            if self.fits(self.overview(chosen, stream)):
                yield f"`stream` auto with `memory_limit` {max(1, limit >> 20)}MiB"

    def fits(self, other: Overview) -> bool:
        needs = other.bytes_of_ranks(self.config.parallel.offload == "disk")
        return self.on_place(self.place, needs) <= self.place.num_bytes

    @property
    def least_batch(self) -> int:
        plan = self.plan
        return plan.replicas * max(plan.batch_ways) * ceil(plan.num_microbatches / self.config.training.accumulate)


def smaller(batch_size: int, least: int) -> Iterator[int]:
    """The batch itself, and then halves of it, as small as the plan allows."""
    while batch_size > least:
        yield batch_size
        batch_size = max(least, batch_size // 2)
    yield least


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def memory_of_command(config: Config, plan: Plan, num_classes: int = 2, channels: int = 3) -> int:
    """The bytes that all ranks of a training need together, if its samples are as these numbers say.

    Labels are unknown here, so that outputs of any shape are taken.
    """
    if config.data.task == "auto" and config.data.text is None:
        config = replace(config, data=replace(config.data, task="regress"))
    options: Mapping[str, object] = {"balance": "flops", "clockwork": Clockwork.of_user()}
    device = torch.device("cpu")
    stream = stream_of(config, plan, num_classes, channels, device)
    found = look_ahead(config, plan, num_classes, channels, **options, stream=stream, device=device)
    needs = found.bytes_of_ranks(config.parallel.offload == "disk")
    return sum(needs) * plan.replicas
