"""Predictions of a trained model for new images: `mpirun -n 4 mpi4dl predict runs/mine --images new`.

It writes a line for each image as soon as it is ready, and masks. Started again, it continues with the rest.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._wording import counted
from mpi4dl.inference.options import Inference, Inputs, Placing
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import Slides
from mpi4dl.options.declare import ConfigError, like, option, same_as
from mpi4dl.options.kinds import NAME, NOT_NEGATIVE, choice, optional

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.datasets.split import Named

USAGE = "RUN_OR_WEIGHTS --images FOLDER [--FLAG VALUE ...]"
MAPS = ("auto", "attention", "activation", "gradient", "none")
DESCRIPTION = "Let a trained model predict of images without labels."


@dataclass(frozen=True)
class ToPredict:
    """Images to predict of, and where predictions go."""

    images: str | None = option(
        None,
        "a folder, with all images below it; an image; a pattern such as 'new/*.png'; or a .txt file with a path in "
        "each line",
        optional(NAME),
        brief="a folder, an image, a pattern, or a .txt list",
        known_as=same_as("data-dir data-path input source i"),
    )
    slides: str | None = option(
        None,
        "slides instead of --images, for a model that was trained on slides: a table, whose labels are not read, or a "
        "folder; with heat maps of what the model attends to",
        optional(NAME),
        brief="a table of slides, or a folder of them",
        known_as=same_as("wsi-dir"),
    )
    slides_folder: str | None = like(Slides, "slides_folder")
    features: str | None = option(
        None,
        "a folder of features of slides, for a model that was trained on features; --slides may be a table of some of "
        "them, and --slides-folder has the slides for pictures of maps",
        optional(NAME),
        brief="a folder of features of slides",
    )
    min_area: float = option(
        0.0,
        "smallest area of the polygons of class maps of slides, in square microns; without microns per pixel in pixels "
        "of level 0",
        NOT_NEGATIVE,
    )
    maps: str = option(
        "auto",
        "write a heat map of each slide, PNG, GeoJSON and OME-TIFF: what patches count (attention), cells of the last "
        "feature map (activation), or pixels (gradient); auto: attention or activation, as the model is",
        choice(*MAPS, formerly={True: "auto", False: "none"}, switch=("auto", "none")),
    )
    map_class: str | None = option(
        None,
        "the class that activation and gradient maps are of; none: of two the second, else the predicted one",
        optional(NAME),
    )
    map_layer: str | None = option(
        None,
        "the module whose output activation maps are of; none: the last tensor with rows and columns",
        optional(NAME),
    )
    out: str | None = option(
        None,
        "folder for predictions.csv, predictions.jsonl and masks; images with a line there are skipped; none: "
        "predictions-IMAGES in that of the run",
        optional(NAME),
        brief="the folder for predictions and masks",
        known_as=same_as("output output-dir results-dir"),
    )


@dataclass(frozen=True)
class PredictConfig:
    predicting: ToPredict = field(default_factory=ToPredict)
    inputs: Inputs = field(default_factory=Inputs)
    placing: Placing = field(default_factory=Placing)


@command(PredictConfig, USAGE, DESCRIPTION, source="the folder of a run, a checkpoint, or weights")
def predict(comm: "Communicator", asked: CommandLine[PredictConfig]) -> None:
    """Let the model that `asked.source` names look at images. Collective."""
    config, chosen = asked.config, asked.config.predicting
    where = chosen.images or chosen.slides or chosen.features
    with comm.together((ConfigError,)):
        if where is None:
            raise ConfigError(
                "`images` is missing: a folder, an image, a pattern, or a .txt file with paths; or `slides`, or "
                "`features`"
            )
        other = "slides" if chosen.slides is not None else "features" if chosen.features is not None else None
        if chosen.images is not None and other is not None:
            raise ConfigError(f"`images` and `{other}` were both given: choose one")

    from mpi4dl.inference.images import framed_for, open_any, open_any_slides
    from mpi4dl.inference.model import Predictor
    from mpi4dl.inference.predicting import MapsAsked, Predicting

    framed = partial(framed_for, comm, chosen.slides, chosen.slides_folder, chosen.features)
    model = Predictor(asked.source, Inference(config.inputs, config.placing), comm, framed)
    images: Named
    if chosen.images is not None:
        images = open_any(comm, model.config, model.about, where)
    else:
        images = open_any_slides(comm, model.config, model.about)
    name = f"predictions-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(where).absolute().name).strip('-')}"
    out = model.folder / name if config.predicting.out is None else Path(config.predicting.out)
    asked_maps = MapsAsked("none" if chosen.images is not None else chosen.maps, chosen.map_class, chosen.map_layer)
    predicting = Predicting(model, images, where, out, speaks=True, maps=asked_maps, min_area=chosen.min_area)
    for line in (*model.title(), *predicting.remarks) if comm.rank == 0 else ():
        print(asked.spell(line), flush=True)
    count = sum(1 for _ in predicting)
    if comm.rank == 0:
        for problem in predicting.bad[:10]:
            print(f"could not be read: {problem}")
        for line in predicting.summary():
            print(line)
        bad = f", {len(predicting.bad)} of which could not be read" if predicting.bad else ""
        print(f"{counted(count, 'image')} looked at{bad}; see {out}", flush=True)
    nothing = count > 0 and len(predicting.bad) == count == len(images)
    comm.agree(f"none of {counted(count, 'image')} can be read: {predicting.bad[0]}" if nothing else None)


main = predict.main

if __name__ == "__main__":
    main()
