"""A trained model over ranks, as its run or its weights say what it is: batch by batch, what it makes of images."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.base import BadImage, printable
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.split import Named
from mpi4dl.datasets.transform import FITTED, STRIDE_PX, Fit, View, as_fit
from mpi4dl.datasets.transformed import Batch, TransformedImages
from mpi4dl.engine import BatchOutputs, Runner
from mpi4dl.geometry import Box
from mpi4dl.inference.options import Inference, placed
from mpi4dl.inference.pictures import stride_of
from mpi4dl.inference.quantization import round_weights
from mpi4dl.options.config import ConfigError, facts
from mpi4dl.options.sources import unstained
from mpi4dl.parallel.inputs import Shape, own_or, size_of
from mpi4dl.parallel.pipeline.split import outline
from mpi4dl.runs.description import find_weights, folder_of, hold_trained
from mpi4dl.runs.folder import better_weights
from mpi4dl.runs.stopping import HangTimeout
from mpi4dl.tasks.task import Task
from mpi4dl.training.data import measure_stains
from mpi4dl.training.input_pipeline import BadImages
from mpi4dl.training.trained import TrainedOptions

if TYPE_CHECKING:
    from mpi4dl.inference.cell_maps import CellMaps
    from mpi4dl.parallel.streaming.patches import Attended

OWN = ("model", "transforms")  # parts of the user's that this process needs


class Prediction(NamedTuple):
    """The result of a batch: `errors` say by index which images cannot be read; `outputs` are those of the others,
    whose `indices` and `labels` are these, as the model sees them in these `sizes`. None if there are no others.
    """

    indices: tuple[int, ...]
    labels: Any
    outputs: BatchOutputs | None
    errors: dict[int, str]
    sizes: tuple[tuple[int, ...], ...] = ()


class Predictor:
    """A trained model of images over the ranks of `comm`. Collective, as are all methods.

    `source` is the folder of a run, a checkpoint, or weights that mpi4dl wrote. `framed` gives the options of training
    the size of other images, where that differs. `trained` are these, with the plan of now. `remarks` are
    on the weights and on their distribution over ranks. Raises Refusal on all
    ranks, in one sentence, if there are none, if code of the user's that the model needs is other than it was, or if
    the plan cannot be.
    """

    def __init__(
        self,
        source: str | Path,
        chosen: Inference,
        comm: Communicator,
        framed: Callable[[TrainedOptions], TrainedOptions] = lambda trained: trained,
    ) -> None:
        self.comm, self.source = comm, Path(source)
        comm.agree(None, source=str(source), **facts(chosen))
        self.folder = folder_of(comm, self.source)
        found = find_weights(comm, self.source)
        self.weights, self.average, self.remarks = found.weights, found.average, list(found.remarks)
        self.remarks += comm.broadcast_object(better_weights(self.source))
        owns = {name: getattr(chosen.inputs, name) for name in OWN}
        trained = TrainedOptions.of(comm, self.weights, self.folder, chosen.inputs.trust_code, owns)
        self.about = about = trained.about
        if trained.task.of_text:
            told = f"{source} is `model` {trained.name}, which was trained on text"
            comm.agree(f"{told}: continue text with mpi4dl generate")
        trained = framed(trained)
        with comm.together((ValueError,)):
            trained = _at_own_sizes(trained, chosen.inputs.fit)
            values, why = placed(trained, chosen, comm.size)
            self.trained = trained.with_values(values)
        self.precision, auto = chosen.placing.precision, chosen.inputs.fit == "auto"
        self.fit: Fit = about.fit if auto else as_fit(chosen.inputs.fit)
        self.fit = "own" if trained.fit == "own" else self.fit
        self.largest = about.largest if auto else None
        self.asked_to_crop = not auto and FITTED[self.fit].windows
        self.may_crop = self.asked_to_crop or FITTED[as_fit(trained.fit)].windows
        self.remarks += [why] if why else []
        self.assembly = self.trained.assemble(comm, OWN, self.trained.batch_size)
        self.plan = self.assembly.plan
        # Of code of the user's its name and its file, by option.
        prints = self.assembly.prints.items()
        self.own = {name: f"{part.rpartition(':')[2]} {found}" for (name, part), found in prints}
        self.digest = sha256(json.dumps([about.text, self.own.get("model")]).encode()).hexdigest()[:16]
        with self._watched():
            held, remarks = hold_trained(self.assembly, found, about.num_outputs, about.channels)
            self.remarks += remarks
            self.patience.feed()
            if self.precision == "int8":
                with comm.together((ValueError, TypeError)):
                    model = outline(lambda: self.trained.build(about.num_outputs, about.channels))
                self.remarks.append(round_weights(held, model))
            self.stride = self._stride() if trained.makes_pictures else STRIDE_PX
            self.runner = Runner(held, self.plan, comm=comm, precision=self.trained.precision)
        self.runner.executor.progress = lambda doing: self.patience.feed()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the job if a rank is silent for too long in here, where others wait for it."""
        self.patience = HangTimeout(self.trained.hang_timeout if self.comm.size > 1 else 0.0)
        try:
            yield
        finally:
            self.patience.stop()

    def title(self) -> list[str]:
        size = "x".join(map(str, self.trained.size))
        known = ", ".join(map(printable, self.about.classes[:10])) + " ..." * (len(self.about.classes) > 10)
        what = f"{self.trained.name} to {self.about.task}" + (f": {known}" if known else "")
        at_own = ""
        if self.trained.makes_pictures:
            padded = f", padded to multiples of {self.stride} px" if self.stride > 1 else ""
            at_own = f"each image at its own size{padded}"
        shown = at_own or self.assembly.source.described or f"images of {size}"
        return [f"{self.weights}: {what}; {shown}; {self.plan.describe()}", *self.remarks]

    @property
    def task(self) -> Task:
        return self.trained.task

    def _stride(self) -> int:
        """Of how many pixels the sides of images of their own size are multiples: as few as a model of images takes."""
        outputs, channels = self.about.num_outputs, self.about.channels

        def found() -> int:
            return stride_of(outline(lambda: self.trained.build(outputs, channels)), channels, self.task.predictions)

        return self.comm.from_first(found, (ValueError, TypeError))

    @property
    def by_windows(self) -> bool:
        """Whether masks of slides are made of windows."""
        return self.trained.source.of_slides and FITTED[self.fit].windows

    @property
    def skips_glass(self) -> bool:
        """Whether windows of slides that show no tissue are of the first class without a look at them."""
        return self.by_windows and not self.task.binary and self.trained.skips_glass

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """A name for each output; those without one are called by their number."""
        return self.task.names(self.about.classes)

    @property
    def attended(self) -> "tuple[Attended, ...]":
        """The patches of the images of the last batch and their weights; empty of models without attention."""
        streams = (getattr(module, "streamed", None) for module in self.runner.stages.modules())
        return next((stream.seen for stream in streams if stream is not None), ())

    def predictions(
        self, images: Named, of: Callable[[Any], Tensor], maps: "CellMaps | None" = None
    ) -> Iterator[Prediction]:
        """The outputs of the model for images, batch by batch, in order; `of(outputs)` selects the wanted values.
        `maps` maps the images of each batch. Collective.

        Raises Refusal on all ranks for what is no image's fault.
        """
        trained, runner = self.trained, self.runner
        measure_stains(self.comm, images)
        with self.comm.together((ValueError,)):
            told = [*unstained(images), *trained.remarks_on(images)]
        for remark in told if self.comm.rank == 0 else ():
            print(remark, flush=True)
        with self.comm.together((ValueError, TypeError)):
            view = replace(trained.view(self.fit), stride=self.stride)
        loader = Loader(
            images,
            view,
            trained.batch_size,
            self._boxes,
            num_workers=trained.num_workers,
            on_bad_image="report",
            lazy=trained.streams,
        )
        bad = BadImages(self.comm, "skip", logs=False)
        with self._watched(), self.assembly.running(self.about.num_outputs, self.about.channels):
            for batch in loader.epoch(0):
                self.patience.begin("batch")
                size = trained.size
                count = len(batch.indices)
                microbatches, reads = (
                    self.plan.divide(count, False),
                    runner.reads(count, own_or(batch.sizes, size), False),
                )
                bad.require_alike(batch)
                readable = bad.agree(batch, microbatches, reads)
                errors = {index: bad.of_index[index] for index in batch.indices if index in bad.of_index}
                if readable is None:
                    yield Prediction((), None, None, errors)
                    continue
                left, microbatches = readable
                try:
                    seen = self._predicted(left, microbatches, of, errors, maps)
                except Refusal as refusal:
                    if not self._found_late(refusal):
                        raise
                    yield Prediction((), None, None, errors)
                    yield from self._one_by_one(images, view, left.indices, of, maps)
                    continue
                yield seen

    def _predicted(
        self,
        batch: Batch,
        microbatches: Any,
        of: Callable[[Any], Tensor],
        errors: dict[int, str],
        maps: "CellMaps | None",
    ) -> Prediction:
        given = (batch.tiles, len(batch.indices), microbatches)
        sizes = own_or(batch.sizes, self.trained.size)
        watching: AbstractContextManager[None] = nullcontext()
        if maps is not None:
            watching, of = maps.watching(size_of(sizes, microbatches[0])), partial(maps.of, of)
        with watching:
            outputs = next(iter(self.runner.predict([given], sizes, of)))
        shown = batch.sizes or (self.trained.size,)
        return Prediction(batch.indices, batch.labels, outputs, errors, shown)

    def _found_late(self, refusal: Refusal) -> bool:
        """Whether an image that is read box by box was found to be damaged, by all ranks together."""
        together = self.plan.num_stages == 1 and not self.plan.bidirectional
        if not (together and self.trained.streams):
            return False
        cause = refusal.__cause__
        while isinstance(cause, Refusal):
            cause = cause.__cause__
        found = isinstance(cause, BadImage)
        return any(self.comm.all_gather_object(found)) if self.plan.local_batches else found

    def _one_by_one(
        self,
        images: Named,
        view: View,
        indices: tuple[int, ...],
        of: Callable[[Any], Tensor],
        maps: "CellMaps | None",
    ) -> Iterator[Prediction]:
        """The images of a batch of which one is damaged, each alone."""
        shown = TransformedImages(images, view, reports=True, lazy=True)
        for index in indices:
            sizes = shown.sizes((index,))
            batch = replace(shown.read((index,), 0, self._boxes(1, sizes)), sizes=sizes)
            try:
                seen = self._predicted(batch, self.plan.divide(1, False), of, {}, maps)
            except Refusal as refusal:
                if not self._found_late(refusal):
                    raise
                seen = Prediction((), None, None, {index: str(refusal)})
            yield seen

    def _boxes(self, num_samples: int, of_samples: Sequence[Shape] | None = None) -> list[Box]:
        sizes = own_or(of_samples, self.trained.size)
        return [read.box for read in self.runner.reads(num_samples, sizes, False)]


def _at_own_sizes(trained: TrainedOptions, asked_fit: str) -> TrainedOptions:
    """The options by which a model that makes images sees each file whole, at its own size. Raises ConfigError."""
    if not trained.makes_pictures:
        return trained
    if asked_fit != "auto":
        raise ConfigError(f"`fit` {asked_fit}: a model that makes images sees each at its own size: leave it out")
    background = {"background": "keep"} if trained.value("background") == "auto" else {}  # as in training
    return trained.with_values({"fit": "own", **background})
