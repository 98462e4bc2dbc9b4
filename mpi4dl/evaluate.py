"""Metrics of a trained model: `mpirun -n 4 mpi4dl evaluate runs/mine --images test`.

It prints metrics with intervals and the confusion matrix, of slides by slide and by patient. It writes them beside the
run, with a line for each image, curves and calibration.
"""

from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._wording import counted
from mpi4dl.inference.options import Inference, Inputs, Placing
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import Slides
from mpi4dl.options.declare import like, option, same_as
from mpi4dl.options.kinds import COUNT_OR_ZERO, NAME, PROPER_FRACTION, THRESHOLD, choice, optional

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

HOW = ("mean", "max")  # as inference.samples has them, which imports torch
USAGE = "RUN_OR_WEIGHTS [--images FOLDER] [--FLAG VALUE ...]"
DESCRIPTION = "Measure how well a trained model does on images with labels."


@dataclass(frozen=True)
class Evaluating:
    """Options of evaluation: images, intervals and output."""

    images: str | None = option(
        None,
        "a folder with one subfolder per class, with labels.csv, or with images and masks; an .npz file; none: the "
        "validation images of the training",
        optional(NAME),
        brief="a folder of images with labels",
        known_as=same_as("data-dir data-path data-root"),
    )
    slides: str | None = option(
        None,
        "a table of slides with labels, or a folder with one subfolder per class, for a model trained on slides",
        optional(NAME),
        brief="a table of slides with labels",
    )
    slides_folder: str | None = like(Slides, "slides_folder")
    features: str | None = option(
        None,
        "a folder of features of the slides of --slides, for a model that was trained on features",
        optional(NAME),
        brief="a folder of features of slides",
    )
    out: str | None = option(
        None,
        "folder for evaluation.json and evaluation.csv; none: that of the run, with the date in their names",
        optional(NAME),
        brief="the folder for evaluation.json and evaluation.csv",
        known_as=same_as("output output-dir results-dir"),
    )
    resamples: int = option(
        1000, "number of bootstrap resamples for the intervals of metrics; 0: no intervals", COUNT_OR_ZERO
    )
    level: float = option(0.95, "confidence level of the intervals", PROPER_FRACTION)
    part: str | None = option(
        None,
        "the slides of this part of the split: of --slides, or of the run; none: test, else val; of the run val",
        optional(choice("train", "val", "test")),
    )
    patients: str = option(
        "mean", "how predictions of slides become that of their patient: their mean, or the largest", choice(*HOW)
    )
    threshold: float | str = option(
        0.5,
        "the probability from which a class is called, for sensitivity, specificity, ppv and npv; or a rule that "
        "chooses it on the validation images of the run",
        THRESHOLD,
    )
    positive: str | None = option(
        None,
        "the class of two that is looked for; none: the second",
        optional(NAME),
        known_as=same_as("positive-class"),
    )


@dataclass(frozen=True)
class EvaluateConfig:
    evaluating: Evaluating = field(default_factory=Evaluating)
    inputs: Inputs = field(default_factory=Inputs)
    placing: Placing = field(default_factory=Placing)


@command(EvaluateConfig, USAGE, DESCRIPTION, source="the folder of a run, a checkpoint, or weights")
def evaluate(comm: "Communicator", asked: CommandLine[EvaluateConfig]) -> None:
    """Measure the model that `asked.source` names. Collective."""
    from mpi4dl.datasets.slides.record import record_of
    from mpi4dl.inference.images import framed_for, open_labelled, open_labelled_slides, open_slides_of_run, seen_before
    from mpi4dl.inference.model import Predictor
    from mpi4dl.inference.scoring import file_names, judging_by, score

    config, options = asked.config, asked.config.evaluating
    others = options.slides or options.features
    comm.agree("`images` and `slides` were both given: choose one" if options.images and others else None)
    chosen = Inference(config.inputs, config.placing)
    if _is_folder_of_folds(comm, asked.source):
        from mpi4dl.inference.folds import summarise
        from mpi4dl.inference.samples import Judging

        given = others or options.images
        comm.agree(f"{asked.source} has folds: evaluate one of them, such as fold_0, on others" if given else None)
        judging = Judging(options.threshold, options.positive, options.patients)
        out = None if options.out is None else Path(options.out)
        how: dict[str, Any] = {"resamples": options.resamples, "level": options.level, "spell": asked.spell}
        summarise(comm, Path(asked.source), chosen, judging, part=options.part, out=out, **how)
        return
    judging = judging_by(
        comm, asked.source, chosen, options.threshold, options.positive, options.patients,
        on_others=bool(others or options.images or options.part not in (None, "val")),
    )  # fmt: skip
    framed = partial(framed_for, comm, options.slides, options.slides_folder, options.features)
    model = Predictor(asked.source, chosen, comm, framed)
    of_slides = model.config.slides.slides is not None
    comm.agree(None if of_slides or options.part is None else "`part` is for a model that was trained on `slides`")
    if others is not None:
        images, which = open_labelled_slides(comm, model.config, model.about, options.part)
    elif of_slides and options.images is None:
        images, which = open_slides_of_run(comm, model.config, model.about, model.folder, options.part or "val")
    else:
        images, which = open_labelled(comm, model.config, model.about, options.images)
    warnings: list[str] = []
    with comm.together((ValueError, OSError)):
        if comm.rank == 0 and others is not None:
            warnings = seen_before(images, model.folder)
    for line in (*model.title(), f"evaluated on {which}", *warnings) if comm.rank == 0 else ():
        print(asked.spell(line), flush=True)
    scores = score(model, images, resamples=options.resamples, level=options.level, speaks=True, judging=judging)
    files = file_names(model.folder, None if options.out is None else Path(options.out), datetime.now())
    told: dict[str, Any] = {
        "source": asked.source,
        "weights": str(model.weights),
        "images": others or options.images,
        "part": options.part,
        "warnings": warnings,
        "plan": str(model.plan),
    }
    slides = record_of(images)
    told |= {} if slides is None else {"slides": slides}
    with comm.together():
        if comm.rank == 0:
            remarks = scores.write(*files, told, options.level)
            print("\n".join((*scores.table(options.level, intervals=options.resamples > 0), *remarks)))
            bad = f", {len(scores.bad)} could not be read" if scores.bad else ""
            print(f"{counted(scores.count, scores.what)} evaluated{bad}; see {files[0]} and {files[1].name}")


def _is_folder_of_folds(comm: "Communicator", source: str) -> bool:
    """Whether a folder has the runs of folds, and is none itself. Collective."""
    if comm.rank == 0:
        folder = Path(source)
        there = not (folder / "config.toml").is_file() and any(folder.glob("fold_*/config.toml"))
    found: bool = comm.broadcast_object(comm.rank == 0 and there)
    return found


main = evaluate.main

if __name__ == "__main__":
    main()
