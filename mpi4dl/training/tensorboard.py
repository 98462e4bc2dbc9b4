"""Images of a run for TensorBoard: confusion matrices, examples, the plan and its timeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from mpi4dl._memory import MemoryMeter
from mpi4dl._palette import GOOD, INK, PAPER, WRONG, of_classes
from mpi4dl.engine import Engine
from mpi4dl.engine.runner import measured_as_is
from mpi4dl.options.data import normalisation
from mpi4dl.options.sources import DataSource
from mpi4dl.parallel import spatial
from mpi4dl.parallel.tables.simulator import Simulation
from mpi4dl.results.formats import write_object
from mpi4dl.results.names import PORTRAIT
from mpi4dl.runs.folder import RunFolder, RunSnapshot
from mpi4dl.tasks.formulas import main_output
from mpi4dl.tasks.metrics import THRESHOLD
from mpi4dl.tasks.task import Task

CELL_PX, LETTER_PX, MARGIN_PX = 44, 13, 6
MOST_LETTERS = 18
MOST_CLASSES = 40  # of a matrix that is drawn


def _short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 3] + "..."


def confusion_picture(matrix: Sequence[Sequence[float]] | Tensor, classes: Sequence[str]) -> Any:
    """An array (H, W, 3) of bytes: rows are the classes that samples have, columns those they were taken for.

    The darker, the larger the share of a row. None of a matrix of too many classes to be read.
    """
    rows = [[float(value) for value in row] for row in matrix]
    if not rows or len(rows) > MOST_CLASSES:
        return None
    names = [_short(classes[i]) if i < len(classes) else f"class {i}" for i in range(len(rows))]
    font = ImageFont.load_default(LETTER_PX)
    widest = round(max(font.getlength(name) for name in names)) + 2 * MARGIN_PX
    side, top = CELL_PX * len(rows), widest
    image = Image.new("RGB", (widest + side + MARGIN_PX, top + side + MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(image)
    for j, name in enumerate(names):
        label = Image.new("RGB", (widest, CELL_PX), PAPER)
        ImageDraw.Draw(label).text((MARGIN_PX, CELL_PX // 2), name, INK, font, anchor="lm")
        image.paste(label.rotate(90, expand=True), (widest + j * CELL_PX, 0))
    for i, row in enumerate(rows):
        y, total = top + i * CELL_PX, sum(row) or 1.0
        draw.text((widest - MARGIN_PX, y + CELL_PX // 2), names[i], INK, font, anchor="rm")
        for j, value in enumerate(row):
            share = min(1.0, max(0.0, value / total))
            colour = tuple(round(p + (c - p) * share) for p, c in zip(PAPER, GOOD, strict=True))
            x = widest + j * CELL_PX
            draw.rectangle((x, y, x + CELL_PX, y + CELL_PX), colour, outline=(200, 205, 210))
            place = (x + CELL_PX // 2, y + CELL_PX // 2)
            draw.text(place, f"{value:g}", PAPER if share > 0.55 else INK, font, anchor="mm")
    return np.asarray(image)


def overlaid(images_NCHW: Tensor, true_NHW: Tensor, predicted_NHW: Tensor) -> Any:
    """An array (H, W, 3) of bytes: a row for each image, of the image, its mask over it, and the predicted one.

    Masks have numbers of classes, of which 0 and negative ones stay uncoloured.
    """
    pixels = (images_NCHW.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    pixels = pixels.repeat(3, axis=3) if pixels.shape[3] == 1 else pixels
    colours = np.frombuffer(of_classes(256), np.uint8).reshape(-1, 3)
    rows = []
    for image, *masks in zip(pixels, true_NHW.numpy(), predicted_NHW.numpy(), strict=True):
        shown = [image]
        for mask in masks:
            mixed = (image // 2 + colours[mask % 256] // 2).astype(np.uint8)
            shown.append(np.where((mask > 0)[..., None], mixed, image))
        rows.append(np.concatenate([np.pad(each, ((0, 4), (0, 4), (0, 0)), constant_values=255) for each in shown], 1))
    return np.concatenate(rows) if rows else None


def captioned(images_NCHW: Tensor, labels: Sequence[str], predictions: Sequence[str]) -> Any:
    """An array (H, W, 3) of bytes: a few images with values 0 to 1 side by side, each with label and prediction."""
    font, line = ImageFont.load_default(LETTER_PX), LETTER_PX + 5
    pixels = (images_NCHW.detach().float().cpu().clamp(0, 1) * 255).round().byte()
    parts = []
    for image, label, prediction in zip(pixels, labels, predictions, strict=True):
        array = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
        shown = Image.fromarray(array.permute(1, 2, 0).contiguous().numpy())
        texts = ((_short(label), INK), (f"as {_short(prediction)}", INK if label == prediction else WRONG))
        width = max(shown.width, *(round(font.getlength(text)) + 4 for text, _ in texts))
        part = Image.new("RGB", (width + MARGIN_PX, shown.height + 2 * line), PAPER)
        part.paste(shown, (0, 0))
        for number, (text, colour) in enumerate(texts):
            ImageDraw.Draw(part).text((2, shown.height + number * line), text, colour, font)
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1) if parts else None


# A few images of a run, small, for TensorBoard: what the model is shown, and what it makes of what validates.

MOST_IMAGES = 4
MOST_PX = 256
NO_CLASS = -1  # of a pixel of a mask whose classes may overlap, or that does not count


# Of a few samples: what a model makes of them, and what they are: class maps (n, h, w), or numbers (n, ...).
Taken = tuple[Tensor, Tensor]


class Showing:
    """Gives rank 0's reporter the images of an engine's batches. Made on all ranks; `reporter` is None elsewhere.

    Of images that are streamed there are none: nobody has them whole. Nor are there of images of different sizes. Of
    volumes it is the slice in the middle, and a sequence is shown as one row.
    """

    def __init__(self, reporter: Any, engine: Engine, source: DataSource, task: Task, classes: Sequence[str]) -> None:
        wanted = reporter is not None and reporter.has_pictures and not (source.own_sizes or source.of_text)
        wanted = wanted and engine.stages.stream is None
        self._shows = bool(engine.comm.broadcast_object(wanted))
        self._reporter, self._engine, self._source, self._task = reporter, engine, source, task
        self._classes = classes
        self._images: Tensor | None = None
        self._found: Taken | None = None

    def measuring(self, metrics: Any) -> Callable[[Any, Any], Any]:
        """What an evaluation with these metrics is given as `measured`: nothing to do, if nobody looks at it."""
        return self.measured if metrics or self._shows else measured_as_is

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
        """The result of `Task.measured`; the first outputs are stored. Collective over the ranks that have them."""
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
        n = min(len(images), *map(len, found))
        predicted, true = (each[:n] for each in found)
        if predicted.dim() == 3:
            picture = overlaid(images[:n], *(_resized(mask, images.shape[2:]) for mask in (true, predicted)))
        else:
            words = ([self._task.words(each, self._classes) for each in values] for values in (true, predicted))
            picture = captioned(images[:n], *words)
        self._reporter.figure("validation/images", picture, self._engine.num_steps)

    def _seen(self, tiles: Sequence[Any], microbatch: Any) -> Tensor | None:
        """The first images of a microbatch, (n, 1 or 3, h, w), of at most 256 px, with the values of files, 0 to 1.

        None of other channels, and on ranks without the first stage. Collective over those with it.
        """
        part = self._engine.stages.parts.get((0, 0))
        if not self._shows or part is None:
            return None
        images = _small(self._engine.images(part, tiles[0], microbatch, self._source.size))
        if images.shape[1] not in (1, 3):
            return None
        mean, std = (
            images.new_tensor(each)[:, None, None] for each in normalisation(self._source.data, images.shape[1])
        )
        return images * std + mean

    def _of(self, outputs: Any, targets: Any) -> Taken | None:
        predicted = main_output(outputs)
        if not isinstance(predicted, Tensor) or not isinstance(targets, Tensor) or predicted.dim() == 3:
            return None
        if predicted.dim() < 3:
            whole = spatial.gather(predicted) if isinstance(predicted, spatial.SpatialTensor) else predicted
            few = self._task.predictions(whole[:MOST_IMAGES]).float().cpu()
            return few, targets[:MOST_IMAGES].clone().cpu()
        if not self._task.dense:
            return None
        overlaps = self._task.binary
        true = targets[:MOST_IMAGES]
        true = _class_map(true, True) if overlaps else true
        true = torch.where(true == self._task.ignore_index, NO_CLASS, true)
        few = self._task.predictions(_small(predicted))  # of few pixels: probabilities take as much as outputs
        return _class_map(few, overlaps).cpu(), _sampled(true)


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
    return torch.where(best > THRESHOLD, number, NO_CLASS) if overlaps else number


def _sampled(true: Tensor) -> Tensor:
    """Masks (n, ...) as `_small` has probabilities: every so many pixels of them."""
    if true.dim() == 4:
        depth = min(true.shape[1], MOST_PX) // 2
        true = true[:, depth * true.shape[1] // min(true.shape[1], MOST_PX)]
    return _resized(true, [min(pixels, MOST_PX) for pixels in true.shape[1:]]).cpu()


def _resized(masks: Tensor, size: Sequence[int]) -> Tensor:
    """Masks (n, h, w) of another size: that of images, of which a model's outputs may be a fraction."""
    return F.interpolate(masks[:, None].double(), size=tuple(size), mode="nearest-exact")[:, 0].long()


# Describes plan, modules and memory of a run, from its engine, for the report and TensorBoard.

MOST_SPANS = 20_000  # of a timeline that is kept
MOST_DRAWN = 2_000  # of one that is drawn for TensorBoard
REST = "activations and the rest"


class Painter:
    """Writes plan, modules and memory of a run into its folder and TensorBoard; made on rank 0, before the first step.

    A folder that cannot be written gives a warning, and ends nothing.
    """

    def __init__(
        self, reporter: Any, folder: RunFolder, options: str, engine: Engine, title: str, num_steps: int
    ) -> None:
        self._reporter, self._folder, self._step = reporter, folder, engine.num_steps
        costs, plan = engine.stages.costs, engine.plan.describe()
        source, timeline = "" if costs is None else costs.source, timeline_of(engine)
        modules = tuple(modules_of(engine))
        self.portrait = RunSnapshot(title, plan, num_steps, modules, (), source, timeline)
        reporter.text("run/options", options, self._step)
        reporter.rows("run/parameters by module", ("module", "values", "of them trained"), modules, self._step)
        if timeline is not None:
            from mpi4dl.parallel.tables.drawing import as_image, as_text

            if reporter.has_pictures and sum(map(len, timeline.rows)) <= MOST_DRAWN:
                reporter.figure("run/timeline", np.asarray(as_image(timeline)), self._step)
            reporter.text("run/timeline", f"{as_text(timeline)}\n{source}", self._step)
        self._write()

    def remember(self, memory: Sequence[Mapping[str, int]]) -> None:
        """Add what the memory of each rank is for."""
        self.portrait = replace(self.portrait, memory=tuple(memory))
        rows = [[rank, *(f"{n / 2**20:,.1f}" for n in one.values())] for rank, one in enumerate(memory)]
        self._reporter.rows("run/memory in MiB", ("rank", *memory[0]), rows, self._step)
        self._write()

    def _write(self) -> None:
        path = self._folder.path / PORTRAIT
        try:
            write_object(path, self.portrait.content())
        except OSError as error:
            self._reporter.say(f"{path} cannot be written: {error.strerror}; the run goes on without")


def remember(painter: Painter | None, on_disk: bool, engine: Engine, meter: MemoryMeter) -> bool:
    """Have rank 0's painter remember the memory of all ranks, once steps were made. Collective; True, as it is done."""
    own = purposes_of(engine, meter.peak_bytes(), on_disk)
    memory = engine.comm.all_gather_object(own)
    if painter is not None:
        painter.remember(memory)
    return True


def timeline_of(engine: Engine) -> Simulation | None:
    """The simulated timeline of a step of several stages, where the cost of the units is known."""
    stages, plan = engine.stages, engine.plan
    if stages.costs is None or plan.num_stages == 1:
        return None
    found = stages.costs.simulated(plan, stages.counts)
    return found if sum(map(len, found.rows)) <= MOST_SPANS else None


def modules_of(engine: Engine) -> Iterator[tuple[str, int, int]]:
    """The values of each part of the model, tied ones once: its first two levels, or one where that says enough."""
    stages = engine.stages
    sizes = {name: prod(shape) for name, (shape, _) in stages.shapes.items() if name not in stages.ties}
    tops = {name.partition(".")[0] for name in sizes}
    levels = 1 if len(tops) > 3 else 2
    found: dict[str, list[int]] = {}
    for name, size in sizes.items():
        *above, _ = name.split(".")
        row = found.setdefault(".".join(above[:levels]) or name, [0, 0])
        row[0] += size
        row[1] += size * (name in stages.trained)
    return ((name, values, trained) for name, (values, trained) in found.items())


def purposes_of(engine: Engine, peak_bytes: int, on_disk: bool = False) -> dict[str, int]:
    """The memory of this rank by purpose, in bytes, after some steps; the rest of the peak is activations and others.

    Storages count once, whole: flat buckets too. Gradients are those that stay until the step. The optimizer's state on
    disk does not count.
    """
    stages, optimizer = engine.stages, engine.optimizer
    kept: list[Tensor] = [*stages.parameters(), *stages.buffers()]
    updated: list[Tensor] = []
    gradients = 0
    for group in engine.groups:
        for master in (master for bucket in group.update.masters for master in bucket):
            size = master.segment.stop - master.segment.start
            own = master.value if master.target is None else master.target
            kept.append(own.detach())
            if master.target is not None:
                updated.append(master.value.detach())
            gradients += size * own.element_size() if group.zero > 1 else 0
        if group.zero <= 1:
            gradients += sum(p.numel() * p.element_size() for p in group.parameters)
        updated += [] if group.average is None else group.average.values
    updated += [each for state in optimizer.state.values() for each in state.values() if hasattr(each, "nbytes")]
    found = {
        "parameters and buffers": _bytes_of(kept),
        "gradients": gradients,
        "optimizer": 0 if on_disk else _bytes_of(updated),
    }
    return found | {REST: max(0, peak_bytes - sum(found.values()))}


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the storages of some tensors; of a subclass that wraps others, what it says of itself."""
    storages = ((tensor.untyped_storage(), tensor) for tensor in tensors)
    return sum({s._cdata: s.nbytes() if x.data_ptr() else x.nbytes for s, x in storages}.values())
