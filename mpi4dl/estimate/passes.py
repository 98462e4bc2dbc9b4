"""How often a training step passes over streamed tiles or patches, and the message about it.

Norms with the statistics of the whole batch need one more pass each, in which all tiles run again up to that norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from mpi4dl._wording import counted, duration
from mpi4dl.estimate.workload import Workload
from mpi4dl.geometry import GridShape, even_cuts
from mpi4dl.models.patches import PatchModel
from mpi4dl.parallel.pipeline.split import image_dtype
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.memory_limit import SegmentNeeds, StreamNeeds, needs_of_segments
from mpi4dl.parallel.streaming.patches import PatchStream, patch_tiles

SLOW_PASSES = 4  # over the images in a step, from which on the run says so


@dataclass(frozen=True)
class Passes:
    """The passes of a training step over streamed tiles.

    A rank runs `tiles` tiles in each pass over a segment. The FLOPs of `segments` are those of a rank in a step.
    """

    tiles: int
    segments: tuple[SegmentNeeds, ...]

    @property
    def forward(self) -> int:
        """The most passes over a segment in the forward pass of a step."""
        return 1 + max(each.forward_statistics for each in self.segments)

    @property
    def backward(self) -> int:
        return 1 + max(each.backward_statistics for each in self.segments)

    @property
    def each_step(self) -> int:
        return self.forward + self.backward

    @property
    def mean_statistics(self) -> tuple[float, float]:
        """The statistics forward and backward, averaged over segments by their FLOPs."""
        total = sum(each.flops for each in self.segments) or 1.0
        return (
            sum(each.forward_statistics * each.flops for each in self.segments) / total,
            sum(each.backward_statistics * each.flops for each in self.segments) / total,
        )

    def step_flops(self, exact: bool = True) -> float:
        """The FLOPs of a rank in a step; `exact` False: without statistics passes."""
        changes = {} if exact else {"forward_statistics": 0, "backward_statistics": 0}
        return sum(each._replace(**changes).step_flops() for each in self.segments)

    def words(self, flop_seconds: float | None = None) -> str:
        """Lines about a step, with its seconds if a FLOP takes that many, and about faster choices."""
        slow, fast = ("", "")
        if flop_seconds is not None:
            slow, fast = (
                f", about {duration(self.step_flops(exact) * flop_seconds)} of arithmetic a step"
                for exact in (True, False)
            )
        found = (
            f"`stream_norm` exact reads each part of the images {self.each_step} times a step, {self.forward} forward "
            f"and {self.backward} backward, with {counted(self.tiles, 'tile')} of a rank each time{slow}; "
            f"`stream_norm` running, by running statistics, reads them 2 times{fast}"
        )
        if max(self.forward, self.backward) > 2:
            found += "; `stream_segments` norms repeats little, and keeps more memory, or files by `stream_keep` disk"
        return found


def passes_of_needs(needs: StreamNeeds, plan: Plan) -> Passes:
    """The passes over tiles."""
    return _passes(prod(needs.options.counts) * plan.num_microbatches, needs.segments, plan)


def _passes(tiles: int, segments: Sequence[SegmentNeeds], plan: Plan) -> Passes:
    share = plan.num_microbatches / plan.shape(0).size
    return Passes(tiles, tuple(each._replace(flops=each.flops * share) for each in segments))


def patches_words(work: Workload, passes: Passes | None = None) -> str:
    """How often a step runs how many patches of slides; without `passes` there are no statistics passes."""
    assert work.patches is not None
    forward, backward = (1, 1) if passes is None else (passes.forward, passes.backward)
    each = work.patches
    found = (
        f"a step runs about {counted(round(each.mean * work.batch[0]), 'patch', 'patches')} with tissue, "
        f"{forward} x forward and {backward} x backward (the mean of {counted(each.looked_at, 'slide')})"
    )
    if forward + backward >= SLOW_PASSES and each.all:
        found += f"; `most_patches` {max(1, round(each.mean / 2))} would draw half of them in each epoch"
    return found


def passes_of_patches(work: Workload, plan: Plan) -> Passes:
    """The passes over all patches. Segments are cut as in the run, because norms of branches may share a pass."""
    model, options = work.model(), work.patches_by(plan)
    assert isinstance(model, PatchModel)
    assert options is not None
    encoder, size, grid = model.encoder, (model.patch, model.patch), plan.shape(0)
    samples = max(1, work.batch[0] // plan.num_microbatches)
    cuts = [round(cut * work.patches_each) for cut in even_cuts(samples, grid.batch)]
    counts, shape = [stop - start for start, stop in pairwise(cuts)], torch.Size((cuts[-1], work.channels, *size))
    tiles, spec = patch_tiles(shape, image_dtype(encoder), counts, GridShape(grid.size, 1, 1), 0, options.at_once)
    segments = needs_of_segments(PatchStream(model, options, work.channels).segments, encoder, tiles, spec, size)
    return _passes(tiles.batch * plan.num_microbatches, segments, plan)
