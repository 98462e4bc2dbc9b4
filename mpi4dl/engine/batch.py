"""What goes into the first stage of the engine's plan, and what is made of what comes out of the last."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.comm.streams import carried
from mpi4dl.geometry import BATCH, Interval, Split, Tiling, even_cuts
from mpi4dl.parallel import spatial
from mpi4dl.parallel.microbatches import Microbatch
from mpi4dl.parallel.pipeline.held import Part
from mpi4dl.parallel.streaming.visits import ImageSource

Tile = Tensor | ImageSource
Tiles = Tensor | Sequence[Tile]
Size = tuple[int, ...]


def spread(part: Part, tile: Tensor, microbatch: Microbatch, size: Size, device: torch.device) -> Tensor:
    """A tile, such as (n, C, h, w), of images of `size` on this device, as part of the whole microbatch."""
    if part.plain:
        return carried(tile, device)
    space = part.grid.shape.space
    samples = Split.at([cut - microbatch.cuts[0] for cut in microbatch.cuts])
    cuts = (Split.at(even_cuts(pixels, n)) for pixels, n in zip(size[-len(space) :], space, strict=True))
    return spatial.from_tiling(tile, part.grid, Tiling.of_images(part.grid.shape, (samples, *cuts)), device)


class BatchFeed:
    """One batch on its way through the stages: what this rank feeds in, and what it finds at the end.

    `total` is the mean loss over the batch on the one rank that counts it, and 0 on others; `correct`, the number of
    samples classified correctly without training, likewise.
    """

    def __init__(
        self,
        engine: Any,
        tiles: Tiles,
        targets: Any,
        size: Size | None,
        microbatches: Sequence[Microbatch] | None,
        training: bool,
    ) -> None:
        self.engine, self.targets, self.training = engine, targets, training
        tiles = [tiles] if isinstance(tiles, Tensor) else list(tiles)
        if size is None and engine.plan.ranks_per_replica == 1 and tiles:
            size = tuple(tiles[0].shape[2:])
        if size is None:
            raise ValueError(f"{engine.plan} cuts images: pass their size, such as (height, width)")
        self.size = size
        divided = engine.plan.divide(_num_samples(targets), training) if microbatches is None else microbatches
        self.microbatches = tuple(divided)
        self.num_samples = self.microbatches[-1].samples.stop
        reads = engine.plan.reads(engine.comm.rank, self.microbatches, size)
        if len(reads) != len(tiles):
            raise ValueError(
                f"this rank reads {len(reads)} tiles of a batch, but {len(tiles)} were passed: see `reads`"
            )
        self.tiles = {(r.microbatch.direction, r.microbatch.number): tile for r, tile in zip(reads, tiles, strict=True)}
        self.total = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.correct, self.classified = 0, False

    def kind(self, microbatch: Microbatch) -> Any:
        return (self.size, microbatch.counts)

    def images(self, part: Part, microbatch: Microbatch) -> Any:
        tile = self.tiles.pop((microbatch.direction, microbatch.number))
        return self.engine.images(part, tile, microbatch, self.size)

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> Tensor | None:
        """The share of this rank in the mean over the batch: dense outputs stay spread over the ranks."""
        engine = self.engine
        if isinstance(outputs, spatial.SpatialTensor) and all(dim is None for dim in outputs.layout.dims[BATCH + 1 :]):
            outputs = spatial.gather(outputs)
        targets = self._targets(microbatch.samples)
        with engine.autocast():
            loss = engine.loss(outputs, targets)
        if loss.numel() != 1:
            raise ValueError(f"the loss must be one number, but has shape {tuple(loss.shape)}: take its mean")
        loss = loss.reshape(())
        weight = microbatch.samples.length / self.num_samples if len(self.microbatches) > 1 else 1.0
        if part.grid.rank == 0:
            self.total += loss.detach().double() * weight
            if not self.training and all(isinstance(x, Tensor) for x in (outputs, targets)):
                self.classified = outputs.dim() == 2 and targets.dim() == 1
            if self.classified:
                self.correct += int((outputs.argmax(1) == targets).sum())
        return loss * (weight / part.grid.size) * engine.scaler.scale if self.training else None

    def _targets(self, samples: Interval) -> Any:
        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return carried(leaf if len(self.microbatches) == 1 else leaf[slice(*samples)], self.engine.device)

        return pytree.tree_map(of, self.targets)


def _num_samples(targets: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else len(targets)
