"""Inputs of the first stage of the engine's plan, and losses and metrics of the outputs of the last."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.streams import carried
from mpi4dl.geometry import BATCH, Interval, Split, Tiling, even_cuts
from mpi4dl.parallel import spatial
from mpi4dl.parallel.inputs import Microbatch
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages, Part
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.visits import ImageSource
from mpi4dl.parallel.tables.table import Table
from mpi4dl.tasks.formulas import SummedLoss
from mpi4dl.tasks.measuring import Measures

# Mixed precision (Micikevicius et al., ICLR 2018): weights of low precision, and the loss scaling of fp16.
#
# The loss is scaled by the norm of the gradient, which all ranks know. PyTorch's GradScaler looks at the gradients of
# one rank: where stages differ, ranks would skip different steps.

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 65536.0
SMALLEST_SCALE = 2.0**-24
GROWTH_INTERVAL = 2000  # steps
MAX_SKIPPED = 20  # steps in a row: by then it is no longer the scale that is wrong
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def lower_precision(module: nn.Module, dtype: torch.dtype) -> None:
    """Turn the float32 parameters of all but normalization layers, few and sensitive, into `dtype`."""
    for part in module.modules():
        if isinstance(part, Stage):
            for looked in part.looked.values():
                looked.lower(dtype)
        if not isinstance(part, NORMS):
            for p in part.parameters(recurse=False):
                if p.dtype is torch.float32:
                    p.data = p.data.to(dtype)


class LossScaler:
    """`scale` is what the loss is multiplied by: halved after a step that overflows, doubled after many that do not.

    Steps that overflow are skipped: `num_skipped` so far, `skipped_in_a_row` up to now.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self.finite_steps = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0

    def update(self, finite: bool) -> None:
        """After a step whose gradient was finite, or was not."""
        if not self.enabled:
            return
        self.finite_steps = self.finite_steps + 1 if finite else 0
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if not finite:
            self.num_skipped += 1
            self.scale = max(self.scale / 2, SMALLEST_SCALE)
        elif self.finite_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.finite_steps = 0


Tile = Tensor | ImageSource
Tiles = Tensor | Sequence[Tile]
Size = tuple[int, ...]


class Computing(Protocol):
    """The part of the engine that a running batch needs."""

    plan: Plan
    comm: Communicator
    stages: LocalStages
    device: torch.device
    loss: Callable[[Any, Any], Tensor]
    scaler: LossScaler
    executor: Executor
    evaluation_table: Callable[[int], Table]

    def autocast(self) -> AbstractContextManager[Any]: ...
    def images(self, part: Part, tile: Tile, microbatch: Microbatch, size: Size) -> Any: ...


def spread(part: Part, tile: Tensor, microbatch: Microbatch, size: Size, device: torch.device) -> Tensor:
    """A tile, such as (n, C, h, w), of images of `size` on this device, as part of the whole microbatch."""
    if part.plain:
        return carried(tile, device)
    space = part.grid.shape.space
    samples = Split.at([cut - microbatch.cuts[0] for cut in microbatch.cuts])
    cuts = (Split.at(even_cuts(pixels, n)) for pixels, n in zip(size[-len(space) :], space, strict=True))
    return spatial.from_tiling(tile, part.grid, Tiling.of_images(part.grid.shape, (samples, *cuts)), device)


def settled(outputs: Any) -> Any:
    """Outputs with those whole that differ only along the batch, such as logits; dense ones stay spread."""

    def of(x: Any) -> Any:
        small = isinstance(x, spatial.SpatialTensor) and all(dim is None for dim in x.layout.dims[BATCH + 1 :])
        return spatial.gather(x) if small else x

    return pytree.tree_map(of, outputs)


def require_batches_for(loss: Any, plan: Plan) -> None:
    """Raise Refusal if a plan cuts batches that a loss looks at as a whole."""
    if isinstance(loss, SummedLoss) and loss.whole_batch and plan.num_microbatches > 1:
        raise Refusal(
            f"the loss compares all samples of a batch with each other, but {plan.describe()} cuts it into "
            f"{plan.num_microbatches}: leave out `microbatches`, `accumulate` and `bidirectional`, or choose another "
            "`loss`"
        )


class InputFeed:
    """A batch of `num_samples` on its way into the stages: the tiles that this rank reads of it."""

    def __init__(
        self,
        engine: Computing,
        tiles: Tiles,
        num_samples: int,
        size: Size | None,
        microbatches: Sequence[Microbatch] | None,
        training: bool = False,
    ) -> None:
        self.engine = engine
        tiles = [tiles] if isinstance(tiles, Tensor) else list(tiles)
        if size is None and engine.plan.ranks_per_replica == 1 and tiles:
            size = tuple(tiles[0].shape[2:])
        if size is None:
            raise ValueError(f"{engine.plan} cuts images: pass their size, such as (height, width)")
        self.size = size
        divided = engine.plan.divide(num_samples, training) if microbatches is None else microbatches
        self.microbatches = tuple(divided)
        self.num_samples = self.microbatches[-1].samples.stop
        reads = engine.plan.reads(engine.comm.rank, self.microbatches, size)
        if len(reads) != len(tiles):
            raise ValueError(
                f"this rank reads {len(reads)} tiles of a batch, but {len(tiles)} were passed: see `reads`"
            )
        self.tiles = {(r.microbatch.direction, r.microbatch.number): tile for r, tile in zip(reads, tiles, strict=True)}

    @property
    def num_microbatches(self) -> int:
        """Of an evaluation, whose microbatches have one direction."""
        return 1 + self.microbatches[-1].number

    def kind(self, microbatch: Microbatch) -> Any:
        return (self.size, microbatch.counts)

    def images(self, part: Part, microbatch: Microbatch) -> Any:
        tile = self.tiles.pop((microbatch.direction, microbatch.number))
        return self.engine.images(part, tile, microbatch, self.size)


class Terms(NamedTuple):
    """A microbatch's share of the terms of a loss, and their factors in the loss of the batch."""

    sums: Sequence[Tensor]
    factors: Sequence[float]


class BatchFeed(InputFeed):
    """A batch with its targets: what this rank feeds in, and the loss that it finds at the end.

    `total` is the loss of the batch on the one rank that counts it, and 0 on others. A loss that knows of sums has a
    term for each of `weights`; the mean over the samples of any other is one term.
    """

    def __init__(
        self,
        engine: Computing,
        tiles: Tiles,
        targets: Any,
        size: Size | None,
        microbatches: Sequence[Microbatch] | None,
        training: bool,
    ) -> None:
        super().__init__(engine, tiles, _num_samples(targets), size, microbatches, training)
        self.targets, self.training = targets, training
        self.total = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.summed = engine.loss if isinstance(engine.loss, SummedLoss) else None
        self.weights = [float(self.num_samples)] if self.summed is None else [*self.summed.weights(targets)]

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> Tensor | None:
        """The share of this rank in the loss of the batch: dense outputs stay spread over the ranks."""
        engine, outputs = self.engine, settled(outputs)
        targets = self.targets_of(microbatch.samples)
        with engine.autocast():
            terms = self._terms(outputs, targets, microbatch.samples.length)
        if part.grid.rank == 0:
            self.add(terms)
        if not self.training:
            self.see(part, outputs, targets)
            return None
        loss = sum(total * factor for total, factor in zip(*terms, strict=True))
        assert isinstance(loss, Tensor)
        return loss * (engine.scaler.scale / part.grid.size)

    def _terms(self, outputs: Any, targets: Any, num_samples: int) -> Terms:
        if self.summed is not None:
            return Terms(self.summed.sums(outputs, targets), [1 / each if each else 0.0 for each in self.weights])
        loss = self.engine.loss(outputs, targets)
        if loss.numel() != 1:
            raise ValueError(f"the loss must be one number, but has shape {tuple(loss.shape)}: take its mean")
        return Terms([loss.reshape(())], [num_samples / self.num_samples if len(self.microbatches) > 1 else 1.0])

    def add(self, terms: Terms) -> None:
        for total, factor in zip(*terms, strict=True):
            self.total += total.detach().double() * factor

    def see(self, part: Part, outputs: Any, targets: Any) -> None:
        """Look at the outputs of an evaluation."""

    def targets_of(self, samples: Interval) -> Any:
        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return carried(leaf if len(self.microbatches) == 1 else leaf[slice(*samples)], self.engine.device)

        return pytree.tree_map(of, self.targets)


class EvaluationFeed(BatchFeed):
    """A batch that is evaluated: its sums go to `found`, and its outputs to the metrics."""

    def __init__(
        self,
        engine: Computing,
        tiles: Tiles,
        targets: Any,
        size: Size | None,
        microbatches: Sequence[Microbatch] | None,
        found: "Found",
    ) -> None:
        super().__init__(engine, tiles, targets, size, microbatches, training=False)
        self.found = found
        found.count += self.num_samples
        found.weights = [a + b for a, b in zip(found.weights or [0.0] * len(self.weights), self.weights, strict=True)]
        if found.sums is None:
            found.sums = torch.zeros(len(self.weights), dtype=torch.float64, device=engine.device)

    def _terms(self, outputs: Any, targets: Any, num_samples: int) -> Terms:
        if self.found.kept is None:
            return super()._terms(outputs, targets, num_samples)
        return Terms([], [])  # of all samples at once, when they are there

    def add(self, terms: Terms) -> None:
        samples = self.num_samples if self.summed is None else 1
        for number, total in enumerate(terms.sums):
            factor = terms.factors[number] * samples if self.summed is None else 1.0
            assert self.found.sums is not None
            self.found.sums[number] += total.detach().double() * factor

    def see(self, part: Part, outputs: Any, targets: Any) -> None:
        found = self.found
        if part.grid.rank == 0:
            if found.kept is not None:
                found.kept.append((outputs, targets))
            if all(isinstance(x, Tensor) for x in (outputs, targets)):
                found.classified = outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point()
            if found.classified:
                found.correct += int((outputs.argmax(1) == targets).sum())
                found.undefined += int(outputs.isnan().any())  # of which argmax makes a class
        found.measures.update(part.grid, outputs, targets)


class Found:
    """Results of an evaluation so far: `kept` are outputs and targets of a loss of all samples at once."""

    def __init__(self, measures: Measures, whole_batch: bool) -> None:
        self.measures = measures
        self.kept: list[Any] | None = [] if whole_batch else None
        self.count, self.correct, self.classified = 0, 0, False
        self.undefined = 0  # batches with outputs that are not numbers
        self.weights: list[float] = []
        self.sums: Tensor | None = None


def _num_samples(targets: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else len(targets)
