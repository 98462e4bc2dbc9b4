"""A trained model over ranks, as its run or its weights say what it is: batch by batch, what it makes of images."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl._memory import keep_freed_memory, load_libraries
from mpi4dl.checkpoints.weights import load_weights
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.base import BadImage, printable
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.split import Named
from mpi4dl.datasets.transform import Fit, View
from mpi4dl.datasets.transformed import Batch, TransformedImages
from mpi4dl.engine import Engine
from mpi4dl.engine.evaluating import BatchOutputs
from mpi4dl.estimate.dry_run import stream_of
from mpi4dl.geometry import Box
from mpi4dl.inference.images import require_sight
from mpi4dl.inference.options import Inference, placed
from mpi4dl.options import build, parts
from mpi4dl.options.config import facts
from mpi4dl.options.data import build_views
from mpi4dl.options.models import blaming_the_model, hold_model, without_rules
from mpi4dl.runs.trained import description_of, find_weights, folder_of
from mpi4dl.tasks.task import TASKS, Task
from mpi4dl.training.best import BEST
from mpi4dl.training.input_pipeline import BadImages
from mpi4dl.training.stopping import Patience


class Seen(NamedTuple):
    """The result of a batch: `errors` say by index which images cannot be read; `outputs` are those of the others,
    whose `indices` and `labels` are these. None if there are no others.
    """

    indices: tuple[int, ...]
    labels: Any
    outputs: BatchOutputs | None
    errors: dict[int, str]


class SeeingModel:
    """A trained model of images over the ranks of `comm`. Collective, as are all methods.

    `source` is the folder of a run, a checkpoint, or weights that mpi4dl wrote. Raises Refusal on all ranks, in one
    sentence, if there are none, if code of the user's that the model needs is other than it was, or if the plan cannot
    be.
    """

    def __init__(self, source: str | Path, chosen: Inference, comm: Communicator) -> None:
        self.comm, self.source = comm, Path(source)
        comm.agree(None, source=str(source), **facts(chosen))
        self.folder = folder_of(comm, self.source)
        found = find_weights(comm, self.source, chosen.inputs.average)
        self.weights, self.average, self.remarks = found.weights, found.average, list(found.remarks)
        best = self.folder / BEST
        if comm.broadcast_object(best.is_file() and self.source.is_dir()):
            self.remarks.append(f"these are the newest weights; the best ones of this run are {best}")
        self.about, ours = about, _ = description_of(comm, self.weights, self.folder)
        with comm.together((ValueError, OSError)):
            owns = {name: getattr(chosen.inputs, name) for name in ("model", "transforms")}
            config = about.config(str(self.weights), ours, chosen.inputs.trust_code, **owns)
            require_sight(config, about, str(source))
            prints = {f"the file of `{name}`": parts.print_of(part) for name, part in _own_parts(config).items()}
        comm.agree(None, **prints)
        self.asked_fit = chosen.inputs.fit
        self.fit: Fit = about.fit if self.asked_fit == "auto" else "crop" if self.asked_fit == "crop" else "resize"
        self.may_crop = "crop" in (self.asked_fit, config.data.fit)
        self.digest = sha256(json.dumps([about.text, prints], sort_keys=True).encode()).hexdigest()[:16]
        with comm.together((ValueError,)):
            self.config, why = placed(config, chosen, comm.size)
            self.plan = build.build_plan(self.config)
        data = self.config.data
        comm.agree(self.plan.problem(comm.size, data.image_size, data.batch_size))
        self.remarks += [why] if why else []
        comm.node.share_cores(chosen.placing.threads)
        keep_freed_memory(True)
        self.patience = self._patience()
        try:
            self.engine = self._engine()
        finally:
            self.patience.stop()

    def _patience(self) -> Patience:
        """How long a silence may last, if there is anybody to wait for in vain."""
        return Patience(self.config.parallel.hang_timeout if self.comm.size > 1 else 0.0)

    def _engine(self) -> Engine:
        comm, config, about = self.comm, self.config, self.about
        with comm.together((ValueError,)):
            device = comm.node.device(config.parallel.device)
        if device.type == "cuda" or config.parallel.gpu_wire == "nccl":
            comm.choose_gpu_wire(config.parallel.gpu_wire)
        load_libraries(device)
        self.patience.feed()
        with comm.together((ValueError, TypeError)):
            stream = stream_of(config, self.plan, about.num_outputs, about.channels, device)
            stages = hold_model(config, self.plan, about.num_outputs, about.channels, comm, device, stream)
        stages.eval().requires_grad_(False)
        self.remarks += load_weights(stages, str(self.weights), strict=True, average=self.average)[1:]
        self.patience.feed()
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.0)  # which makes no step
        precision, halo = config.training.precision, config.parallel.halo
        engine = Engine(stages, self.plan, optimizer, _no_loss, comm=comm, precision=precision, halo=halo)
        engine.executor.progress = lambda doing: self.patience.feed()
        return engine

    def title(self) -> list[str]:
        """The title, in lines."""
        size = "x".join(map(str, self.config.data.image_size))
        known = ", ".join(map(printable, self.about.classes[:10])) + " ..." * (len(self.about.classes) > 10)
        what = f"{self.config.model_name} to {self.about.task}" + (f": {known}" if known else "")
        return [f"{self.weights}: {what}; images of {size}; {self.plan.describe()}", *self.remarks]

    @cached_property
    def task(self) -> Task:
        """The task of the training. The loss tells only whether classes of a mask may overlap, if it has a name."""
        loss = self.config.training.loss
        named = loss if isinstance(loss, str) and not parts.is_own(loss) else None
        options = self.config.training.loss_options if named or loss is None else {}
        return TASKS[self.about.task](self.about.num_outputs, named, options)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """A name for each output; those without one are called by their number."""
        return self.task.names(self.about.classes)

    def see(self, images: Named, of: Callable[[Any], Tensor]) -> Iterator[Seen]:
        """The outputs of the model for images, batch by batch, in order; `of(outputs)` selects the wanted values.
        Collective.

        Raises Refusal on all ranks for what is no image's fault.
        """
        config, engine, data = self.config, self.engine, self.config.data
        with self.comm.together((ValueError, TypeError)):
            _, view = build_views(config, self.about.channels, self.fit)
        loader = Loader(
            images,
            view,
            data.batch_size,
            self._boxes,
            num_workers=data.num_workers,
            on_bad_image="report",
            lazy=config.visits,
        )
        bad = BadImages(self.comm, "skip", logs=False)
        with self._blaming():
            for batch in loader.epoch(0):
                self.patience.begin("batch")
                size = data.image_size
                count = len(batch.indices)
                microbatches, reads = self.plan.divide(count, False), engine.reads(count, size, False)
                bad.require_alike(batch)
                readable = bad.agree(batch, microbatches, reads)
                errors = {index: bad.of_index[index] for index in batch.indices if index in bad.of_index}
                if readable is None:
                    yield Seen((), None, None, errors)
                    continue
                left, microbatches = readable
                try:
                    seen = self._see(left, microbatches, of, errors)
                except Refusal as refusal:
                    if not self._found_late(refusal):
                        raise
                    yield Seen((), None, None, errors)
                    yield from self._one_by_one(images, view, left.indices, of)
                    continue
                yield seen

    def _see(self, batch: Batch, microbatches: Any, of: Callable[[Any], Tensor], errors: dict[int, str]) -> Seen:
        given = (batch.tiles, len(batch.indices), microbatches)
        outputs = next(iter(self.engine.predict([given], self.config.data.image_size, of)))
        return Seen(batch.indices, batch.labels, outputs, errors)

    def _found_late(self, refusal: Refusal) -> bool:
        """Whether an image that is read box by box was found to be damaged, by all ranks together."""
        together = self.plan.num_stages == 1 and not self.plan.bidirectional
        return together and self.config.visits and isinstance(refusal.__cause__, BadImage)

    def _one_by_one(
        self, images: Named, view: View, indices: tuple[int, ...], of: Callable[[Any], Tensor]
    ) -> Iterator[Seen]:
        """The images of a batch of which one is damaged, each alone."""
        shown = TransformedImages(images, view, reports=True, lazy=True)
        for index in indices:
            batch = shown.read((index,), 0, self._boxes(1))
            try:
                seen = self._see(batch, self.plan.divide(1, False), of, {})
            except Refusal as refusal:
                if not self._found_late(refusal):
                    raise
                seen = Seen((), None, None, {index: str(refusal)})
            yield seen

    def _boxes(self, num_samples: int) -> list[Box]:
        return [read.box for read in self.engine.reads(num_samples, self.config.data.image_size, False)]

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        self.patience = self._patience()
        with ExitStack() as within:
            within.callback(self.patience.stop)
            within.enter_context(without_rules(self.config))
            about = self.about
            within.enter_context(blaming_the_model(self.config, self.plan, about.num_outputs, about.channels))
            yield


def _own_parts(config: Any) -> dict[str, Any]:
    """The parts of the user's that this process needs, loaded. Raises ConfigError."""
    found = {"model": config.model.model, "transforms": getattr(config.data, "transforms", None)}
    own = {name: part for name, part in found.items() if part is not None and parts.is_own(part)}
    for name, part in own.items():
        parts.load(name, part)
    return own


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise AssertionError("a trained model is not trained here")
