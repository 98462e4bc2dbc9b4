"""The options of commands that use a trained model: changes to options of the training, plan and devices."""

from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any

from mpi4dl.comm import Refusal
from mpi4dl.geometry import near_square
from mpi4dl.options.config import Data, Parallel, Slides
from mpi4dl.options.declare import ConfigError, instead, like, neutral, option, same_as
from mpi4dl.options.kinds import (
    BOOLEAN,
    COUNT,
    COUNT_OR_ZERO,
    COUNTS,
    GRIDS,
    NAME,
    NOT_NEGATIVE,
    PART,
    PROPER_FRACTION,
    THRESHOLD,
    choice,
    optional,
)

if TYPE_CHECKING:
    from mpi4dl.training.trained import ModelOptions

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
MAPS = ("auto", "attention", "activation", "gradient", "none")
LARGE_PIXELS = 1 << 22  # of an image, from which on ranks share each one


@dataclass(frozen=True)
class Inputs:
    """How the model sees images, and how many at once."""

    model: Any = option(
        None,
        "your own model again, such as my_code.py:build, if its file was moved or changed; none: as in training",
        optional(PART),
    )
    transforms: Any = option(None, "your own --transforms again; none: as in training", optional(PART))
    fit: str = option(
        "auto",
        "how images get the image size: resize whole images, or crop their centre; auto: as in training, but without "
        "its automatic crop, and masks by windows over whole images",
        choice("auto", "resize", "crop"),
    )
    trust_code: bool = neutral(
        False, "load code that the run or the weights name, even if your training did not sign it", BOOLEAN
    )
    batch_size: int | None = neutral(
        None,
        "images in each batch, over all ranks together; none: as in training, and at least one for each replica",
        optional(COUNT),
        brief="images at once, over all ranks",
        known_as=same_as("b batch eval-batch-size per-device-eval-batch-size"),
    )
    num_workers: int = like(Data, "num_workers")


@dataclass(frozen=True)
class Placing:
    """How ranks share the work, and where it is computed."""

    tiles: tuple[tuple[int, ...], ...] | None = neutral(
        None,
        "grid of tiles of every image, one tile per rank; none: one tile for each rank for large images",
        optional(GRIDS),
        brief="the grid of tiles that each image is cut into",
    )
    stages: int = like(Parallel, "stages")
    data: int | None = neutral(
        None,
        "number of data replicas that share the batch; none: as many as the ranks allow",
        optional(COUNT),
        brief="groups of ranks that share the images",
        called="replicas",
        known_as=same_as("dp"),
    )
    tensor: int = like(Parallel, "tensor")
    stream: tuple[int, ...] | str | None = like(Parallel, "stream")
    stream_until: str | None = like(Parallel, "stream_until")
    memory_limit: int | None = like(Parallel, "memory_limit")
    no_rule: str = like(Parallel, "no_rule")
    precision: str = option(
        "fp32",
        "the type to compute in; int8: fp32, with the weights of linear and convolutional layers rounded to 8 bits",
        choice(*PRECISIONS),
        brief="fp32, bf16, fp16 or int8",
        known_as=same_as("dtype mixed-precision amp-dtype quantization")
        | instead("use {option} bf16 or {option} fp16", "amp")
        | instead("use {option} fp16", "fp16 half")
        | instead("use {option} bf16", "bf16")
        | instead("use {option} int8", "load-in-8bit"),
    )
    threads: int | None = like(Parallel, "threads")
    device: str = like(Parallel, "device")
    gpu_wire: str = like(Parallel, "gpu_wire")
    hang_timeout: float = like(Parallel, "hang_timeout")


@dataclass(frozen=True)
class Inference:
    """How a trained model is used, whatever for."""

    inputs: Inputs = field(default_factory=Inputs)
    placing: Placing = field(default_factory=Placing)


@dataclass(frozen=True)
class TableColumns:
    """Columns of the table of --slides; none: as in training, or the usual names."""

    slide_column: str | None = like(Slides, "slide_column", changes_results=False)
    patient_column: str | None = like(Slides, "patient_column")
    annotation_column: str | None = like(Slides, "annotation_column")


@dataclass(frozen=True)
class LabelledColumns(TableColumns):
    """Columns of a table of slides or images; none: as in training, or the usual names."""

    label_columns: tuple[str, ...] | None = like(Data, "label_columns")


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
    slides_folder: str | None = like(Slides, "slides_folder", changes_results=False)
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
        choice(*MAPS, switch=("auto", "none")),
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
    out: str | None = neutral(
        None,
        "folder for predictions.csv, predictions.jsonl and masks; images with a line there are skipped; none: "
        "predictions-IMAGES in that of the run",
        optional(NAME),
        brief="the folder for predictions and masks",
        known_as=same_as("output output-dir results-dir"),
    )
    overwrite: bool = neutral(False, "predict of all images again, whatever the folder has", BOOLEAN)


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
    slides_folder: str | None = like(Slides, "slides_folder", changes_results=False)
    features: str | None = option(
        None,
        "a folder of features of the slides of --slides, for a model that was trained on features",
        optional(NAME),
        brief="a folder of features of slides",
    )
    out: str | None = neutral(
        None,
        "folder for evaluation.json and evaluation.csv; none: that of the run, with the date in their names",
        optional(NAME),
        brief="the folder for evaluation.json and evaluation.csv",
        known_as=same_as("output output-dir results-dir"),
    )
    resamples: int = option(
        1000, "number of bootstrap resamples for the intervals of metrics; 0: no intervals", COUNT_OR_ZERO
    )
    level: float = option(0.95, "confidence level of the intervals", PROPER_FRACTION, called="confidence")
    part: str | None = option(
        None,
        "the slides of this part of the split: of --slides, or of the run; none: test, else val; of the run val",
        optional(choice("train", "val", "test")),
        called="split",
    )
    patients: str = option(
        "mean",
        "how predictions of slides become that of their patient: their mean, or the largest",
        choice("mean", "max"),
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
    seams: tuple[int, ...] | None = option(
        None,
        "also make each image in tiles of so many px, each alone, and measure their seams: such as 256, or 256,64 with "
        "an overlap, which is averaged; for a model that makes images",
        optional(COUNTS),
        brief="the side of tiles made alone, whose seams are measured",
    )
    lpips: str | None = option(
        None,
        "also the learned perceptual distance (LPIPS) of images from their targets, by a file of torchvision's weights "
        "of alexnet, vgg16 or squeezenet1_1; for a model that makes images",
        optional(NAME),
        brief="a file of weights of alexnet or vgg16, for LPIPS",
    )


@dataclass(frozen=True)
class PredictionOptions:
    """What is predicted of, as Python asks for it."""

    predicting: ToPredict = field(default_factory=ToPredict)
    columns: TableColumns = field(default_factory=TableColumns)


@dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated on, as Python asks for it."""

    evaluating: Evaluating = field(default_factory=Evaluating)
    columns: LabelledColumns = field(default_factory=LabelledColumns)


def others_of(images: Any, asked: ToPredict | Evaluating) -> str | None:
    """The slides or features that are asked for instead of images. Raises Refusal, alike on all ranks."""
    others = asked.slides or asked.features
    if images is not None and others is not None:
        raise Refusal(f"`images` and `{'slides' if asked.slides else 'features'}` were both given: choose one")
    return others


def placed(trained: "ModelOptions", chosen: Inference, num_ranks: int) -> tuple[dict[str, Any], str]:
    """The options of training that are others for the plan that is asked for now, or that fits so many ranks; and why
    it was chosen.

    Raises ConfigError for a size of batches that cannot be.
    """
    asked, size = chosen.placing, trained.size
    batch_size, what = chosen.inputs.batch_size or trained.batch_size, trained.source.sample_noun
    own_sizes = trained.source.own_sizes
    tiles, data, why = asked.tiles, asked.data, ""
    alone = asked.stages == asked.tensor == 1
    if tiles is None and data is None and alone and num_ranks > 1:
        shared = prod(size) >= LARGE_PIXELS or (chosen.inputs.batch_size or num_ranks) < num_ranks
        if trained.patch is not None:
            tiles, why = ((1, num_ranks),), f"`tiles` 1x{num_ranks}: ranks share the patches of each {what}"
        elif shared or own_sizes:
            tiles = (near_square(num_ranks, len(size)),)
            grid = "x".join(map(str, tiles[0]))
            why = f"`tiles` {grid}: all ranks share each {what}; `data` {num_ranks} would share out the {what}s"
        else:
            why = f"`data` {num_ranks}: ranks share out the {what}s; `tiles` would spread each one over them"
    if tiles is None:
        tiles = ((1,) * max(2, len(size)) if len(size) != 1 else (1,),)
    if data is None:
        grids = (tiles[min(stage, len(tiles) - 1)] for stage in range(asked.stages))  # the last is that of all behind
        others = asked.tensor * sum(map(prod, grids))
        data = max(1, num_ranks // others)
    if own_sizes:
        batch_size = data
        if chosen.inputs.batch_size not in (None, batch_size):
            held = f"with `data` {data} a batch has {batch_size}"
            raise ConfigError(
                f"`batch_size` {chosen.inputs.batch_size}: by `fit` own {what}s differ in size, so {held}: leave it out"
            )
    elif chosen.inputs.batch_size is None:
        batch_size = max(batch_size, data)
    computed = "fp32" if asked.precision == "int8" else asked.precision  # int8 is of weights alone
    more = {"batch_size": batch_size, "num_workers": chosen.inputs.num_workers, "precision": computed}
    same = {name: getattr(asked, name) for name in _SAME}
    return {**same, "tiles": tiles, "data": data, "balance": "flops", **more}, why


_SAME = frozenset(each.name for each in fields(Placing)) & frozenset(each.name for each in fields(Parallel))
_SAME -= {"tiles", "data"}  # None of which is to be chosen
