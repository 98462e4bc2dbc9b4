"""`TrainedModel`: a model as training left it, for scripts: what it says of images, and how well it does."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mpi4dl import datasets
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.split import Named
from mpi4dl.inference.images import difference, framed_for, open_any, open_any_slides, open_to_evaluate
from mpi4dl.inference.model import Predictor
from mpi4dl.inference.options import (
    Evaluating,
    EvaluationOptions,
    Inference,
    PredictionOptions,
    TableColumns,
    ToPredict,
    others_of,
)
from mpi4dl.inference.predicting import predictions_of
from mpi4dl.inference.scoring import Scores, about_evaluation, judging_by, score
from mpi4dl.options.config import facts
from mpi4dl.options.declare import from_keywords
from mpi4dl.results.evaluations import file_of_evaluation, require_writable
from mpi4dl.results.formats import Record

T = TypeVar("T")


class TrainedModel(Predictor):
    """A trained model over the ranks of an MPI job, or in one process, from the folder of a run of `mpi4dl train`, a
    checkpoint in it, or weights that it or `mpi4dl export` wrote.

    The model, its options, the names of its classes and the transforms of its images come from there. The plan is free:
    pass the options of `mpi4dl predict --help`, with underscores for dashes: `tiles`, `stages`, `data`, `stream`,
    `precision`, `batch_size` and others. A run with `ema` gives the average of its weights.
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
        self.chosen = chosen
        super().__init__(source, chosen, comm)

    def predict(self, images: Any = None, out: str | Path | None = None, **options: Any) -> Iterator[Record]:
        """A record of each image, in order, the same on all ranks.

        `images` is a folder, of which all images below it are taken, an image, a pattern such as "new/*.png", a text
        file with a path in each line, or a `mpi4dl.datasets.Dataset`. Records have `image`, its name, and what the task
        gives: `prediction`, `probabilities` by class, or `error`. With a folder `out` they are written there as they
        come, with masks, and what has one already is not looked at again, if its file is the same. All ranks go through
        all of them.

        A model of slides takes `slides` instead, a table or a folder, and one of features `features`, a folder. The
        `options` are those of `mpi4dl predict`: also `slides_folder`, `maps`, `map_class`, `map_layer` and `min_area`.
        """
        given = self._asked(PredictionOptions, options)
        asked = given.predicting
        others = others_of(images, asked)
        model = self._framed(asked, given.columns)
        if others is not None:
            found = open_any_slides(self.comm, model.trained)
        elif images is None:
            raise Refusal("`images` is missing: a folder, an image, a pattern or a dataset; or `slides`, or `features`")
        elif isinstance(images, str | Path):
            found = open_any(self.comm, self.trained, str(images))
        else:
            found = self._adapted(images)
        folder = None if out is None else Path(out)
        return iter(predictions_of(model, found, str(others or images), folder, (self.chosen, given)))

    def evaluate(self, images: Any = None, out: str | Path | None = None, **options: Any) -> Scores:
        """Metrics of the task with intervals, and a record of each image, on rank 0.

        `images` is what training takes: a folder with classes, a table of labels, or masks, a `Dataset`; None: what
        validated in training. With a folder `out` evaluation.json and evaluation.csv are written there.

        A model of slides takes `slides` instead, a table with labels, and one of features `features`, too. The
        `options` are those of `mpi4dl evaluate`: also `part`, `threshold`, such as 0.3, "youden" or "sensitivity=0.95",
        `positive`, `patients`, `resamples`, `level`, `seams` and `lpips`.
        """
        given = self._asked(EvaluationOptions, options)
        asked = given.evaluating
        others = others_of(images, asked)
        judging = judging_by(self.comm, str(self.source), self.chosen, asked, images, speaks=False)
        source = str(images) if isinstance(images, str | Path) else None
        model = self._framed(replace(asked, images=source), given.columns)
        if images is None or source is not None:
            found, _ = open_to_evaluate(
                self.comm, model.trained, self.folder, source, given.columns, others is not None, asked.part
            )
        else:
            found = self._adapted(images, self.about.task)
            self.comm.agree(difference(found, self.about))
        if out is not None:
            self.comm.from_first(lambda: require_writable(Path(out)))
        scores = score(model, found, judging, seams=asked.seams, lpips=asked.lpips)
        if out is not None:
            file = file_of_evaluation(self.folder, Path(out), datetime.now())
            what = None if others is None and images is None else str(others or images)
            told = about_evaluation(model, found, images=what, part=asked.part)
            self.comm.from_first(lambda: scores.write(file, told))
        return scores

    def _asked(self, kind: type[T], options: dict[str, Any]) -> T:
        """The options of a call, checked as those of the command; paths may be objects. Raises Refusal."""
        given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        with self.comm.together((ValueError,)):
            asked = from_keywords(kind, given)
        self.comm.agree(None, **facts(asked))
        return asked

    def _framed(self, asked: ToPredict | Evaluating, columns: TableColumns) -> Predictor:
        """This model, or the same one for slides of other sizes."""
        framed = partial(framed_for, self.comm, asked, columns)
        if asked.slides is None and asked.features is None:
            framed(self.trained)  # refuses columns of no table
            return self
        return Predictor(self.source, self.chosen, self.comm, framed)

    def _adapted(self, images: Any, task: str | None = None) -> Named:
        with self.comm.together((ValueError, OSError)):
            found = datasets.adapt(images, task)
            if isinstance(found, tuple):
                raise ValueError("`images` is a pair of datasets: pass one of them")
        self.comm.agree(None, **{"the number of images": len(found)})
        return found
