"""How often a training step computes what is visited, tiles or patches, and what it tells the user of that.

Norms with the statistics of the whole batch take a round for each norm, in which all visits repeat what was before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from mpi4dl._wording import counted, duration
from mpi4dl.geometry import GridShape, Split, ceil_div, even_cuts
from mpi4dl.models.patches import PatchModel, patches_in
from mpi4dl.options.config import Config
from mpi4dl.options.models import bag_options, build_model
from mpi4dl.parallel.inputs import batch_shape
from mpi4dl.parallel.pipeline.balance import FlopCounter
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions, choose
from mpi4dl.parallel.streaming.margins import rehearse, run
from mpi4dl.parallel.streaming.memory_limit import StreamNeeds, needs_of
from mpi4dl.parallel.streaming.patches import BagOptions, Bags
from mpi4dl.parallel.streaming.visits import Given, Visits


@dataclass(frozen=True)
class Passes:
    """How often a training step computes what is visited; of each segment one entry.

    `rounds` are those of norms, forward and backward, and `flops` those of a rank's visits together, forward and once.
    A rank makes so many `visits` in each pass.
    """

    visits: int
    rounds: tuple[tuple[int, int], ...]
    flops: tuple[float, ...]

    @property
    def forward(self) -> int:
        """The most passes over a segment in the forward pass of a step."""
        return 1 + max(there for there, _ in self.rounds)

    @property
    def backward(self) -> int:
        return 1 + max(back for _, back in self.rounds)

    @property
    def each_step(self) -> int:
        return self.forward + self.backward

    @property
    def step_visits(self) -> int:
        """The visits of a rank in a step, through all segments."""
        return sum(self.visits * (2 + there + back) for there, back in self.rounds)

    @property
    def repeats(self) -> bool:
        """Whether norms make visits repeat themselves."""
        return any(map(any, self.rounds))

    @property
    def mean_rounds(self) -> tuple[float, float]:
        """The rounds forward and backward, of all segments by what these compute."""
        total = sum(self.flops) or 1.0
        forward, backward = zip(*self.rounds, strict=True)
        return tuple(  # type: ignore[return-value]
            sum(map(prod, zip(each, self.flops, strict=True))) / total for each in (forward, backward)
        )

    def step_flops(self, exact: bool = True) -> float:
        """Those of a rank in a step, or in one whose norms need no rounds.

        A visit that ends at a norm computes half of the segment on the average, and a backward pass is two forwards.
        """
        passes = [(there, back) if exact else (0, 0) for there, back in self.rounds]
        times = [1 + there / 2 + (1 + back) + 2 * (1 + back / 2) for there, back in passes]
        return sum(flops * factor for flops, factor in zip(self.flops, times, strict=True))

    def words(self, flop_seconds: float | None = None) -> str:
        """Lines about a step, with its seconds if a FLOP takes that many, and about faster choices."""
        slow, fast = ("", "")
        if flop_seconds is not None:
            slow, fast = (
                f", about {duration(self.step_flops(exact) * flop_seconds)} a step" for exact in (True, False)
            )
        found = (
            f"`stream_norm` exact reads each part of the images {self.each_step} times a step, {self.forward} forward "
            f"and {self.backward} backward, with {counted(self.visits, 'tile')} of a rank each time{slow}; "
            f"`stream_norm` running, by running statistics, reads them 2 times{fast}"
        )
        if max(map(max, self.rounds)) > 1:
            found += f"; more `stream_segments` than {len(self.rounds)} repeat less, and keep more memory"
        return found


def passes_of(config: Config, stages: LocalStages, num_classes: int, channels: int) -> Passes | None:
    """How often a step repeats its visits for exact norms; None where nothing is visited, or norms need no rounds.

    `stages` is the model, distributed over ranks. Nothing is computed but shapes.
    """
    if config.parallel.stream_norm != "exact" or not config.visits:
        return None
    plan = stages.plan
    model = outline(lambda: build_model(config, num_classes, channels)).train()
    bags = bag_options(config, plan)
    if bags is not None:
        assert isinstance(model, PatchModel)
        return passes_of_patches(config, plan, model, bags, channels)
    if not isinstance(stages.stream, StreamOptions):
        return None
    batch, grid = batch_shape(config.samples_per_step, channels, config.data.image_size), plan.shape(0)
    microbatch = (max(1, batch[0] // plan.num_microbatches), *batch[1:])
    cuttable = Cuttable(model, image=microbatch)
    opening = choose(cuttable, stages.counts[0], stages.stream, grid, microbatch)
    return passes_of_needs(needs_of(opening, model, grid, microbatch), plan)


def passes_of_needs(needs: StreamNeeds, plan: Plan) -> Passes:
    """Those of tiles that take so much."""
    microbatches, ranks = plan.num_microbatches, plan.shape(0).size
    return Passes(
        prod(needs.options.counts) * microbatches,
        tuple((each.forward_rounds, each.backward_rounds) for each in needs.segments),
        tuple(each.flops * microbatches / ranks for each in needs.segments),
    )


def passes_of_patches(config: Config, plan: Plan, model: PatchModel, bags: BagOptions, channels: int) -> Passes:
    """Those of patches, if all of them are looked at; `model` has no values."""
    encoder, size = model.encoder, (model.patch, model.patch)
    samples = max(1, config.samples_per_step // plan.num_microbatches)
    ranks, ways = plan.shape(0).size, plan.shape(0).batch
    patches = [n * patches_in(config.data.image_size, model.patch) for n in _sizes(even_cuts(samples, ways))]
    each = max(ceil_div(count, ranks // ways * bags.at_once) for count in patches)
    num_visits = each * plan.num_microbatches

    # Cut as the run cuts them, since the norms of parallel branches may share a round or not.
    cuts = [0]
    for count in patches:
        cuts += [cuts[-1] + cut for cut in even_cuts(count, ranks // ways * each)[1:]]
    shape = torch.Size((sum(patches), channels, *size))
    visits = Visits(GridShape(ranks, 1, 1), 0, (1, 1), True, each)
    givens: Sequence[Given] = (visits.images(shape, image_dtype(encoder), Split.at(tuple(cuts))),)
    rounds, flops = [], []
    for part in Bags(model, bags, channels)._segments.parts(encoder):
        found = rehearse(part, visits, givens, size)
        with FlopCounter() as counter:
            run(part, visits, givens, size, found.margin)
        there = found.num_rounds if bags.norms == "exact" else 0
        rounds.append((there, there))  # each norm of the forward pass has its round of the backward pass
        flops.append(counter.total * num_visits)
        givens = tuple(map(Given.like, found.outputs))
    return Passes(num_visits, tuple(rounds), tuple(flops))


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(cuts)]
