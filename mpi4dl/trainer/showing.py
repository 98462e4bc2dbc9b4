"""A few images of a run, small, for TensorBoard: what the model is shown, and what it makes of what validates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.engine import Engine
from mpi4dl.options.config import Config
from mpi4dl.options.data import normalisation
from mpi4dl.parallel import spatial
from mpi4dl.tasks.heads import main_output
from mpi4dl.tasks.task import Task
from mpi4dl.trainer.pictures import captioned, overlaid

MOST_IMAGES = 4
MOST_PX = 256
NO_CLASS = -1  # of a pixel of a mask whose classes may overlap, or that does not count
LIKELY = 0.5  # the probability from which on a label counts as there


class Taken(NamedTuple):
    """Of a few samples: what a model makes of them, and what they are: class maps (n, h, w), or numbers (n, ...)."""

    predicted: Tensor
    true: Tensor
    dense: bool


class Showing:
    """Gives rank 0's reporter the images of an engine's batches. Made on all ranks; `reporter` is None elsewhere.

    Of images that are streamed there are none: nobody has them whole. Of volumes it is the slice in the middle, and a
    sequence is shown as one row.
    """

    def __init__(self, reporter: Any, engine: Engine, config: Config, task: Task, classes: Sequence[str]) -> None:
        wanted = reporter is not None and reporter.has_pictures and config.data.text is None
        self._shows = bool(engine.comm.broadcast_object(wanted)) and engine.held.stream is None
        self._reporter, self._engine, self._config, self._task = reporter, engine, config, task
        self._classes = classes
        self._images: Tensor | None = None
        self._found: Taken | None = None

    def samples(self, tiles: Sequence[Any], microbatch: Any) -> None:
        """Show the first images of a microbatch. Collective."""
        images = self._seen(tiles, microbatch)
        if images is not None and self._reporter is not None:
            self._reporter.images("samples", images, self._engine.num_steps)

    def watch(self, tiles: Sequence[Any], microbatch: Any) -> None:
        """Remember the first images that validate; of later batches nothing. Collective."""
        if self._images is None and self._found is None:
            self._images = self._seen(tiles, microbatch)

    def measured(self, outputs: Any, targets: Any) -> Any:
        """What `Task.measured` gives; the first outputs are remembered. Collective over the ranks that have them."""
        if self._shows and self._found is None:
            self._found = self._of(outputs, targets)
        return self._task.measured(outputs, targets)

    def validated(self) -> None:
        """Show what was watched, with what it was taken for, and begin anew. Collective."""
        images, found, self._images, self._found = self._images, self._found, None, None
        if not self._shows:
            return
        everywhere = self._engine.comm.all_gather_object(found)
        found = next((each for each in everywhere if each is not None), None)
        if images is None or found is None or self._reporter is None:
            return
        n = min(len(images), len(found.predicted), len(found.true))
        predicted, true = found.predicted[:n], found.true[:n]
        if found.dense:
            picture = overlaid(images[:n], *(_resized(mask, images.shape[2:]) for mask in (true, predicted)))
        else:
            picture = captioned(images[:n], [*map(self._words, true)], [*map(self._words, predicted)])
        self._reporter.figure("validation/images", picture, self._engine.num_steps)

    def _seen(self, tiles: Sequence[Any], microbatch: Any) -> Tensor | None:
        """The first images of a microbatch, (n, 1 or 3, h, w), of at most 256 px, with the values of files, 0 to 1.

        None of other channels, and on ranks without the first stage. Collective over those with it.
        """
        part = self._engine.held.parts.get((0, 0))
        if not self._shows or part is None:
            return None
        images = _small(self._engine.images(part, tiles[0], microbatch, self._config.data.image_size))
        if images.shape[1] not in (1, 3):
            return None
        mean, std = (images.new_tensor(each)[:, None, None] for each in normalisation(self._config, images.shape[1]))
        return images * std + mean

    def _of(self, outputs: Any, targets: Any) -> Taken | None:
        predicted = main_output(outputs)
        if not isinstance(predicted, Tensor) or not isinstance(targets, Tensor) or predicted.dim() == 3:
            return None
        if predicted.dim() < 3:
            whole = spatial.gather(predicted) if isinstance(predicted, spatial.SpatialTensor) else predicted
            few = self._task.predictions(whole[:MOST_IMAGES]).float().cpu()
            return Taken(few, targets[:MOST_IMAGES].clone().cpu(), False)
        if self._task.name != "segment":
            return None
        overlaps = bool(getattr(self._task, "binary", False))
        true = targets[:MOST_IMAGES]
        true = _class_map(true, True) if overlaps else true
        true = torch.where(true == self._task.ignore_index, NO_CLASS, true)
        few = self._task.predictions(_small(predicted))  # of few pixels: probabilities take as much as outputs
        return Taken(_class_map(few, overlaps).cpu(), _sampled(true), True)

    def _words(self, value: Tensor) -> str:
        """A label, a prediction, or several numbers."""
        names, task = self._classes, self._task.name
        if task == "classify":
            number = int(value if value.dim() == 0 else value.argmax())
            return names[number] if number < len(names) else f"class {number}"
        if task == "multilabel" and value.dim() == 1:
            there = [names[i] if i < len(names) else f"label {i}" for i in (value >= LIKELY).nonzero().flatten()]
            return ", ".join(there) or "none"
        return ", ".join(f"{float(number):.3g}" for number in value.reshape(-1)[:MOST_IMAGES])


def _small(values: Any) -> Tensor:
    """The first few of (N, C, ...), spread or not, as (n, C, h, w) of at most 256 px. Collective if it is spread."""
    size = tuple(values.shape[2:])
    shrink: Any = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(size)]
    small = shrink(values, [min(pixels, MOST_PX) for pixels in size])
    whole = (spatial.gather(small) if isinstance(small, spatial.SpatialTensor) else small)[:MOST_IMAGES].float()
    return whole[:, :, whole.shape[2] // 2] if len(size) == 3 else whole.unsqueeze(2) if len(size) == 1 else whole


def _class_map(values: Tensor, overlaps: bool) -> Tensor:
    """The likeliest class of each pixel of (n, classes, ...); of those that overlap `NO_CLASS` where none is likely."""
    best, number = values.max(1)
    return torch.where(best >= LIKELY, number, NO_CLASS) if overlaps else number


def _sampled(true: Tensor) -> Tensor:
    """Masks (n, ...) as `_small` has probabilities: every so many pixels of them."""
    if true.dim() == 4:
        depth = min(true.shape[1], MOST_PX) // 2
        true = true[:, depth * true.shape[1] // min(true.shape[1], MOST_PX)]
    return _resized(true, [min(pixels, MOST_PX) for pixels in true.shape[1:]]).cpu()


def _resized(masks: Tensor, size: Sequence[int]) -> Tensor:
    """Masks (n, h, w) of another size: that of images, of which a model's outputs may be a fraction."""
    return F.interpolate(masks[:, None].double(), size=tuple(size), mode="nearest-exact")[:, 0].long()
