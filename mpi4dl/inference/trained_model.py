"""`TrainedModel`: a model as training left it, for scripts: what it says of images, and how well it does."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from mpi4dl import datasets
from mpi4dl.comm import Communicator, world
from mpi4dl.datasets.split import Named
from mpi4dl.inference.images import open_any, open_labelled, open_slides_of_run, require_alike
from mpi4dl.inference.model import Predictor
from mpi4dl.inference.options import Inference
from mpi4dl.inference.predicting import Predicting
from mpi4dl.inference.records import Record
from mpi4dl.inference.scoring import Scores, file_names, score
from mpi4dl.options.declare import from_keywords

LEVEL = 0.95  # the share of resampled metrics that an interval holds


class TrainedModel(Predictor):
    """A trained model over the ranks of an MPI job, or in one process, from the folder of a run of `mpi4dl train`, a
    checkpoint in it, or weights that it or `mpi4dl export` wrote.

    The model, its options, the names of its classes and the transforms of its images come from there. The plan is free:
    pass the options of `mpi4dl predict --help`, with underscores for dashes: `tiles`, `stages`, `data`, `stream`,
    `precision`, `batch_size` and others. A run with `ema` gives the average of its weights, unless `average=False`.
    `fit` chooses how images are resized. If the model was an object of a script, pass it again as `model`.

    All ranks create it and call its methods together. Errors raise `mpi4dl.Refusal` (a ValueError) on all ranks.

        model = mpi4dl.TrainedModel("runs/mine", tiles="2x2")
        print(model.evaluate("test").metrics["accuracy"].value)
        for record in model.predict("new"):
            print(record["image"], record["prediction"])
    """

    def __init__(self, source: str | Path, *, comm: Communicator | None = None, **options: Any) -> None:
        comm = world() if comm is None else comm
        with comm.together((ValueError,)):
            chosen = from_keywords(Inference, options)
        super().__init__(source, chosen, comm)

    def predict(self, images: Any, out: str | Path | None = None) -> Iterator[Record]:
        """A record of each image, in order, the same on all ranks.

        `images` is a folder, of which all images below it are taken, an image, a pattern such as "new/*.png", a text
        file with a path in each line, or a `mpi4dl.datasets.Dataset`. Records have `image`, its name, and what the task
        gives: `prediction`, `probabilities` by class, or `error`. With a folder `out` they are written there as they
        come, with masks, and what has one already is not looked at again, if its file is the same. All ranks go through
        all of them.
        """
        if isinstance(images, str | Path):
            found: Named = open_any(self.comm, self.config, self.about, str(images))
        else:
            found = self._adapted(images)
        return iter(Predicting(self, found, str(images), None if out is None else Path(out)))

    def evaluate(
        self, images: Any = None, out: str | Path | None = None, *, resamples: int = 1000, level: float = LEVEL
    ) -> Scores:
        """Metrics of the task with intervals, and a record of each image, on rank 0.

        `images` is what training takes: a folder with classes, a table of labels, or masks, a `Dataset`; None: what
        validated in training. With a folder `out` evaluation.json and evaluation.csv are written there.
        """
        if images is None and self.config.slides.slides is not None:
            found, _ = open_slides_of_run(self.comm, self.config, self.about, self.folder, "val")
        elif images is None or isinstance(images, str | Path):
            source = None if images is None else str(images)
            found, _ = open_labelled(self.comm, self.config, self.about, source)
        else:
            found = self._adapted(images)
            require_alike(self.comm, found, self.about)
        scores = score(self, found, resamples=resamples, level=level)
        if out is not None:
            files = file_names(self.folder, Path(out), datetime.now())
            with self.comm.together():
                if self.comm.rank == 0:
                    scores.write(*files, {"source": str(self.source), "images": str(images)}, level)
        return scores

    def _adapted(self, images: Any) -> Named:
        with self.comm.together((ValueError, OSError)):
            found = datasets.adapt(images)
            if isinstance(found, tuple):
                raise ValueError("`images` is a pair of datasets: pass one of them")
        self.comm.agree(None, **{"the number of images": len(found)})
        return found
