"""Where samples come from: a class for each kind of data, which answers whatever depends on the kind.

source_of(config)    FeatureSource   features of slides      SlideSource    whole slides
                     OwnSource       a dataset of the user's  TextSource     text
                     SyntheticSource images by a formula      DataSource         a folder, a table, or arrays
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpi4dl import datasets
from mpi4dl._progress import ProgressLine
from mpi4dl._wording import Tell, counted, quietly, some
from mpi4dl.datasets.arrays import is_cifar
from mpi4dl.datasets.base import task_of
from mpi4dl.datasets.kinds import PICTURES, VOLUMES
from mpi4dl.datasets.labels import FORMS, files_of, of_values
from mpi4dl.datasets.listed import LOOKED_AT, parts, spread
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.samples import COVARIATES, TABLE
from mpi4dl.datasets.sources import SYNTHETIC, SampleFiles, open_files
from mpi4dl.datasets.split import Named, in_whole, split
from mpi4dl.datasets.transform import FITTED, STRIDE_PX, Fit, as_fit
from mpi4dl.geometry import Box
from mpi4dl.models.registry import page_of, require_known, with_defaults
from mpi4dl.options.config import Config, ConfigError, Slides
from mpi4dl.options.data import build_augment, build_mixup, build_views
from mpi4dl.options.declare import value_of, with_values
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.parts import call, is_own, load
from mpi4dl.tasks.task import TASKS

if TYPE_CHECKING:
    from mpi4dl.datasets.slides.dataset import SlideFolder
    from mpi4dl.datasets.stains import StainNormalization
    from mpi4dl.parallel.plan import Plan

BoxesOf = Callable[[int], Sequence[Box]]

FILE_OPTIONS = ("folds", "split_file", "slide_column", "patient_column", "annotation_column", "weight_column")
OF_PIXELS = (
    *("rotate", "rotate_degrees", "scale", "stain_jitter", "stain_norm", "leave_out", "random_crop", "jitter", "mixup"),
    *("transforms", "augment", "stream", "stages"),
)
FOLDS = "folds.csv"  # in the folder of the runs of all folds: which samples are in which
FEATURES_MODEL = "features"  # how files of a run name the model that has no encoder
# Slides rather than pictures begin here, as for Pillow: 8192 x 8192 px.
SLIDE_PIXELS = 1 << 26


def source_of(config: Config) -> "DataSource":
    """Where the samples of a configuration come from."""
    data, slides = config.data, config.slides
    named = {FeatureSource: slides.features, SlideSource: slides.slides, OwnSource: data.dataset, TextSource: data.text}
    other = SyntheticSource if data.images == SYNTHETIC else DataSource
    return next((kind for kind, name in named.items() if name is not None), other)(config)


def with_frame(config: Config, fit_before: Callable[[], Fit | None] = lambda: None) -> Config:
    """The configuration as its source needs it, with what the sizes of samples decide. See `DataSource.framed`."""
    return source_of(source_of(config).prepared()).framed(fit_before)


class DataSource:
    """Images or volumes in a folder, a table or arrays; other kinds of data are below.

    Attributes:
        noun: what messages call a file of samples; sample_noun: a sample.
        inputs: what models of it take; other_model: what to do about one of others.
        of_slides: whether samples are slides, which have a resolution.
        is_own: whether it is the user's, which each rank opens for itself, and whose labels may need its images.
        size: that of samples as the model sees them; own_sizes: whether each sample keeps its own.
        windows: whether samples are windows of slides.
        may_pad: whether samples are padded, or nobody asked how they get the image size.
        is_pictures: whether samples are pictures, whose values are from 0 to 1.
        tokens: of a sample of text; None of others.
    """

    noun, inputs = "image", "images"
    other_model = "which `images` have not: give `text`, or choose a model of images"  # where a model has other inputs
    of_text = of_slides = is_own = reads_features = False

    def __init__(self, config: Config) -> None:
        self._config, self.data, self.slides = config, config.data, config.slides
        self.size, self.patch, self.seed = config.data.image_size, config.model.patches, config.training.seed
        self.validates = config.training.eval_every is not None
        fitted = FITTED[as_fit(config.data.fit)]
        self.own_sizes, self.windows = fitted.own_sizes, self.of_slides and fitted.windows
        self.may_pad = config.data.fit in ("auto", "pad")
        self.is_pictures = len(self.size) == 2 and not self.is_own
        self.tokens = config.data.context if self.of_text else None
        self.sample_noun = "window" if self.windows else self.noun

    @property
    def described(self) -> str:
        """How large samples are that a model sees, for titles; empty if they are images."""
        return ""

    @property
    def has_files(self) -> bool:
        """Whether samples are files of a table or folder."""
        path = Path(self.data.images).expanduser()
        return path.suffix != ".npz" and not is_cifar(path)

    # What is asked for.

    def prepared(self) -> Config:
        """The configuration as this kind of data needs it, with all options of a published encoder of tiles.

        Raises:
            ConfigError: options of other kinds of data, or two kinds.
        """
        data = self.data
        names = {"slides": self.slides.named, "dataset": data.dataset, "text": data.text}
        images = None if data.images == SYNTHETIC else data.images
        both = [name for name, value in {**names, "images": images}.items() if value is not None]
        if len(both) > 1:
            raise ConfigError(f"`{both[0]}` and `{both[1]}` were both given: choose one")
        for name in () if self.has_files else FILE_OPTIONS:
            value = getattr(self.slides, name)
            if value is not None:
                raise ConfigError(f"`{name}` {value} is for samples in files of a folder or table: leave it out")
        if self.slides.covariates and not (self.of_slides and (self.reads_features or self.patch)):
            shown = ",".join(each.text for each in self.slides.covariates)
            raise ConfigError(
                f"`covariates` {shown} stand beside the embedding of a slide: name a table by `slides`, with `patches` "
                "or `features`"
            )
        if data.channels != "auto" and not (self.has_files and self.is_pictures and not self.of_slides):
            raise ConfigError(f"`channels` is for files of pictures, not for other {self.inputs}: leave it out")
        self.require_model()
        if of_values(data.task):
            self._require_pictures(data.task)
        model = self._config.model
        if isinstance(model.model, str) and page_of(model.model):
            return with_values(self._config, {"model_options": with_defaults(model.model, model.model_options)})
        return self._config

    def _require_pictures(self, task: str | None) -> None:
        """Raise ConfigError for what is not there to make images out of images."""
        wrong = None
        if self.reads_features or self.of_text:
            kind = "text" if self.of_text else "features"
            wrong = f"is for pairs of pictures or slides, not for {kind}: name them by `images` or `slides`"
        elif self.size != AUTO and len(self.size) != 2:
            wrong = f"is for pictures, but `image_size` has {counted(len(self.size), 'number')}: give two"
        elif self.patch is not None:
            wrong = "makes whole images, and `patches` gives one answer for all: leave it out"
        elif self.data.fit in ("resize", "own"):
            wrong = f"trains on pixels as they are, and `fit` {self.data.fit} does not: choose crop or pad"
        elif self.data.random_crop:
            wrong = "trains on pixels as they are, and `random_crop` scales them: leave it out"
        elif self.slides.crops_on_classes:
            wrong = "has no classes: leave out `crops_on_classes`"
        if wrong is not None:
            raise ConfigError(f"`task` {task} {wrong}")

    def require_model(self) -> None:
        """Raise ValueError for a name of a model that there is not, before data is read and anything is counted."""
        if not is_own(self._config.model.model):
            require_known(self._config.model.model)

    def framed(self, fit_before: Callable[[], Fit | None] = lambda: None) -> Config:
        """The configuration with what the sizes of samples decide; `fit_before` is the `fit` of a run that goes on.

        Raises:
            ConfigError, DatasetError: samples do not fit.
        """
        return self._config

    def refusal(self, slides: str | None, features: str | None) -> str | None:
        """Why a model of this kind of data takes no such other slides, or features of slides."""
        return "`slides` is for a model that was trained on `slides`: name pictures by `images`"

    def require_plan(self, plan: "Plan") -> None:
        """Raise ConfigError for a plan that does not go with the data."""
        if plan.cuts_parameters and self._config.streams_images:
            raise ConfigError(f"{plan} with `stream` or `patches`: streamed tiles and patches need whole parameters")

    # What there is.

    def open(self, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
        """The training and the validation samples; `validating` says of some, by name, which they were before.

        Raises ConfigError, DatasetError.
        """
        data = self.data
        return datasets.open(
            data.images,
            size=self.size,
            num_train=data.num_samples,
            num_val=max(1, round(data.num_samples * data.val_fraction)),
            validation_fraction=data.val_fraction,
            validating=validating,
            num_classes=self._config.model.num_classes,
            ignore_index=data.ignore_index,
            channels=data.channels,
            **self._labels(),
            **self._split(),
        )

    def open_files(self, classes: tuple[str, ...] | None = None, labelled: bool = True) -> SampleFiles:
        """The files that are named, all of them, with labels of these `classes`, or without any if they may have none.

        Raises ConfigError, DatasetError.
        """
        kind, data = VOLUMES if len(self.size) > 2 else PICTURES, self.data
        values: dict[str, Any] = {"num_classes": self._config.model.num_classes, "ignore_index": data.ignore_index}
        values["channels"] = data.channels
        return open_files(Path(data.images).expanduser(), kind, classes=classes, **values, **self._labels())

    def _labels(self) -> dict[str, Any]:
        """Where labels are; of the task None if they tell it."""
        task, columns = self.data.task if self.data.task in FORMS else None, named_columns(self.slides)
        return {"task": task, "label_columns": self.data.label_columns, "columns": columns}

    def _split(self) -> dict[str, Any]:
        """How samples are split. Raises ConfigError."""
        fold = self.slides.fold if isinstance(self.slides.fold, int) else 0  # of all folds the first
        split_file, of_fold = self._split_file(fold)
        found = {"validates": self.validates, "folds": self.slides.folds, "fold": fold, "of_fold": of_fold}
        return {"seed": self.seed, "split_file": split_file, **found}

    def _split_file(self, fold: int) -> tuple[Path | None, bool]:
        """The file that says how samples are split, if any does, and whether it is that of one fold."""
        chosen, run = self.slides, self._config.run.run_folder
        if chosen.folds is None and fold:
            raise ConfigError(f"`fold` {fold} is one of several: say how many by `folds`")
        if chosen.folds is not None and not fold < chosen.folds > 1:
            raise ConfigError(f"`fold` {fold} of `folds` {chosen.folds}: choose two folds or more, and one from 0 on")
        if chosen.split_file is None:
            kept = None if chosen.folds is None or run is None else Path(run).parent / FOLDS
            return (kept, False) if kept is not None and kept.is_file() else (None, False)  # as the other folds have it
        path = Path(chosen.split_file).expanduser()
        if not path.is_dir():
            return path, False
        if chosen.folds is None:
            raise ConfigError(
                f"`split_file` {chosen.split_file} is a folder: choose one of its files by `folds` and `fold`"
            )
        return path / f"splits_{fold}.csv", True

    def task_of(self, samples: Any) -> str:
        """The task that the labels of samples are for."""
        return task_of(samples)

    def number_of_classes(self, samples: Any) -> int:
        """The number of classes by the option, or else by the samples. Raises ConfigError if that is too few."""
        asked, classes, form = self._config.model.num_classes, samples.classes, FORMS.get(self.data.task)
        if form is not None and form.classes:
            return len(form.classes)
        if not asked and not classes:
            raise ConfigError("the dataset does not name its classes: say `num_classes`, or give it `classes`")
        if asked is not None and asked < len(classes):
            names = datasets.printable(", ".join(classes[:10]))
            raise ConfigError(f"`num_classes` {asked}, but the images have {len(classes)}: {names}")
        return asked or len(classes)

    def loaders(self, images: Any, training: BoxesOf, validation: BoxesOf) -> tuple[Loader, Loader]:
        """The loaders of a rank's boxes of the `training` and `validation` samples of `images`, transformed to `fit`.

        They report unreadable images. Raises ConfigError, and ValueError as Loader.
        """
        config, data, of = self._config, self.data, images.training
        views = build_views(config, of.channels, images.fit)
        varied = replace(views[0], augment=build_augment(config, of.channels, task_of(of)))
        common: dict[str, Any] = {"seed": self.seed, "num_workers": data.num_workers}
        common |= {"on_bad_image": "report", "lazy": config.streams_images}
        ordered: dict[str, Any] = {"shuffle": True, "drop_last": True, "sampling": data.sampling}
        ordered["mixup"] = build_mixup(config, task_of(of), self.number_of_classes(of), self.of_slides)
        return (
            Loader(of, varied, config.samples_per_step, training, **ordered, **common),
            Loader(images.validation, views[1], data.batch_size, validation, **common),
        )

    def patches_of(self, samples: Any) -> Callable[[int], int] | None:
        """Gives the number of patches with tissue of a sample, where these are looked for before."""
        return None

    # What is said of it.

    def fit_of(self, sizes: Sequence[tuple[int, ...]], before: Fit | None) -> Fit:
        """One way for all images of a run, whatever their format. Raises ConfigError where they are of both kinds."""
        if self.data.fit != "auto":
            return as_fit(self.data.fit)
        if before is not None:
            return before
        large = [len(size) == 2 and prod(size) > SLIDE_PIXELS for size in sizes]
        if any(large) and not all(large):
            raise ConfigError(
                f"`fit` auto cannot choose for images of {_range(sizes)} px: say `fit` resize, or `fit` crop for "
                "windows of the image size"
            )
        return "crop" if any(large) else "resize"

    def describe(
        self, training: Named, validation: Named, before: Fit | None
    ) -> tuple[Fit, list[str], tuple[int, ...] | None]:
        """How images become those of the image size, remarks on them, and the largest size along each axis.

        Raises ConfigError for masks that are too large, or of images of their own sizes.
        """
        dense = bool(files_of(task_of(training)))
        if self._config.streams_images and dense and prod(self.size) > SLIDE_PIXELS:
            raise ConfigError(
                f"`image_size` {'x'.join(map(str, self.size))} with masks: every rank has whole masks of a batch, 8 "
                "bytes a pixel, and `stream` and `patches` are for more pixels than that: at most 8192x8192"
            )
        sizes = list(some_sizes(training))
        if TASKS[task_of(training)].makes_images:
            self._require_pictures(task_of(training))
            scaled = int(getattr(in_whole(training)[0], "target_scale", 1))
            moved = {"rotate_degrees": self.data.rotate_degrees, "scale": self.data.scale != (1.0, 1.0)}
            for name in (name for name, asked in moved.items() if asked and scaled > 1):
                raise ConfigError(
                    f"`{name}` is for targets of the size of their inputs, and these are {scaled} times as large: "
                    "choose `flip` or `rotate`"
                )
            before = before or "crop"
        fit = self.fit_of(sizes, before)
        if FITTED[fit].own_sizes and dense:
            raise ConfigError("`fit` own is not for masks and targets: choose `fit` pad, or crop for windows of slides")
        remarks = [
            *self._counted(training, validation),
            *(remark for whole in wholes((training, validation)) for remark in getattr(whole, "remarks", ())),
            *self._stained(training),
            self.shown(fit, sizes, len(training)),
        ]
        return fit, remarks, tuple(max(sides) for sides in zip(*sizes, strict=True)) if sizes else None

    def _counted(self, training: Named, validation: Named) -> list[str]:
        """How many samples there are, what is to be learnt of them, and where they lie."""
        said = f"{counted(len(training), self.sample_noun)} to train on + {len(validation)} to validate with"
        task, classes = task_of(training), training.classes
        if classes and not self.is_own:
            known = f"{said}, {TASKS[task].described(training, validation)}"
            return [known, *self._missing_classes(training, validation), *self._origin()]
        named = f": {counted(len(classes), 'class', 'classes')}, {some(list(classes))}" if classes else ""
        return [f"{said}, to {task}{named}" if classes or task != "classify" else said, *self._origin()]

    def _origin(self) -> list[str]:
        """The folders that training and validation samples lie in."""
        path = Path(self.data.images).expanduser()
        others = self.data.images == SYNTHETIC or any((path / name).exists() for name in ("batches.meta", TABLE))
        found = parts(path) if path.is_dir() and not others else None
        if found is None:
            return []
        unused = f"; {', '.join(found.unused)} beside them not read" if found.unused else ""
        return [f"trained on {path / found.training}, validated with {path / found.validation}{unused}"]

    def _missing_classes(self, training: Named, validation: Named) -> list[str]:
        """A warning of classes that only one of both parts has."""
        task = TASKS[task_of(training)]
        trained, validated = task.label_counts(training), task.label_counts(validation) if len(validation) else None
        if trained is None or validated is None:
            return []
        said = []
        for mine, others, what in (
            (validated, trained, f"validation shows no {self.sample_noun} of {{}}, of which metrics then say nothing"),
            (trained, validated, f"no {self.sample_noun} to train on shows {{}}, which is then not learnt"),
        ):
            names = [name for name, a, b in zip(training.classes, mine, others, strict=True) if not a and b]
            if names:
                said.append("warning: " + what.format(some(names)))
        return said

    def _stained(self, samples: Named) -> list[str]:
        return []

    def not_compared(self, samples: Sequence[Named]) -> list[str]:
        """Remarks on samples whose labels cannot be compared with those that a run began with."""
        return []

    def shown(self, fit: Fit, sizes: Sequence[tuple[int, ...]], count: int) -> str:
        """How samples, `count` of them, of which some have these `sizes`, are brought to the image size."""
        size, frame = self.size, "x".join(map(str, self.size))
        what = f"{self.sample_noun}s of {_range(sizes)} px" if sizes else f"{self.sample_noun}s"
        if count > LOOKED_AT:
            what += f" ({len(sizes)} of {count} looked at)"
        random_crop = FITTED[fit].scales and self.data.random_crop
        if sizes and set(sizes) == {size} and not random_crop:
            return f"{what} are shown as they are"
        smaller = any(a < b for each in sizes for a, b in zip(each, size, strict=True))
        padded = f", {'white' if len(size) == 2 else '0'} where they are smaller" if smaller else ""
        crops = " from random crops, validated whole" if random_crop else ""
        ways = {
            "resize": f"are resized to {frame}{crops}; `fit` crop would show windows of that size",
            "crop": f"are cropped to {frame} at random{padded}; validated on the centre",
            "pad": self._padded(frame),
            "own": f"keep their own sizes, padded with white to multiples of {STRIDE_PX} px",
        }
        return f"{what} {ways[fit]}"

    def _padded(self, frame: str) -> str:
        return f"are padded with white to {frame}"

    def patches_shown(self, at_once: int, norms: str) -> tuple[int, str]:
        """How many patches of a sample each rank runs at once, and which a model sees."""
        rows, cols = (side // (self.patch or 1) for side in self.size[-2:])
        return at_once, f"{self._patches(rows, cols)}: {at_once} at once on each rank, {norms} norms"

    def _patches(self, rows: int, cols: int) -> str:
        least = self._config.model.min_tissue
        which = f", those with at least {100 * least:g} % of tissue" if least else ""
        return f"{rows} x {cols} patches of {self.patch} px in each image{which}"


class SyntheticSource(DataSource):
    """Images that are computed from a formula."""

    has_files = False

    def _origin(self) -> list[str]:
        return ["the images are synthetic, computed from a formula: `images` names a folder of your own"]


class OwnSource(DataSource):
    """Datasets of the user's, whose pixels may have any values."""

    has_files, is_own = False, True

    def open(self, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
        """As `DataSource.open`; one dataset that is alone is split."""
        part, options = self.data.dataset, self.data.dataset_options
        made = part if isinstance(part, tuple) else load("dataset", part)
        if inspect.isclass(made) or inspect.isroutine(made):
            in_two = "split" in inspect.signature(made).parameters and "split" not in options
            made = (
                tuple(call("dataset", part, split=name, **options) for name in ("train", "val"))
                if in_two
                else call("dataset", part, **options)
            )
        found = datasets.adapt(made, self.data.task)
        if isinstance(found, tuple):
            return found
        return split(found, self.data.val_fraction, self.seed, validating or {}, validates=self.validates)

    def task_of(self, samples: Any) -> str:
        found = super().task_of(samples)
        if found == "segment":
            _require_masks(samples)
        return found

    def not_compared(self, samples: Sequence[Named]) -> list[str]:
        return [
            f"{each.kind} gives labels with its images alone: they are not compared with those that the run began "
            "with; a list `targets`, or a method label(index), tells them"
            for each in wholes(samples)
            if not each.tells_labels
        ]


class TextSource(DataSource):
    """Text, whose samples are so many tokens."""

    noun, inputs = "document", "tokens"
    other_model = "which `text` has not: choose a model of text such as gpt2"
    of_text, has_files = True, False

    def require_plan(self, plan: "Plan") -> None:
        if self._config.streams_images:
            raise ConfigError("`stream` and `patches` are for images, but `text` was given")
        super().require_plan(plan)

    def task_of(self, samples: Any) -> str:
        return "language"

    @property
    def token_folder(self) -> Path:
        """Where tokens are kept, which all runs beside each other share."""
        return Path(self._config.run.run_folder or "runs/RUN").parent / "tokens"

    def number_of_classes(self, samples: Any) -> int:
        """The number of different tokens. Raises ConfigError if another one was asked for."""
        asked, found = self._config.model.num_classes, int(samples.vocabulary)
        if asked is not None:
            raise ConfigError(f"`num_classes` {asked}: of text it is that of different tokens, {found} here")
        return found

    def loaders(self, images: Any, training: BoxesOf, validation: BoxesOf) -> tuple[Loader, Loader]:
        """The loaders of a rank's tokens of both. Raises ValueError as Loader."""
        from mpi4dl.datasets.text.dataset import TokenBatches

        common: dict[str, Any] = {"num_workers": self.data.num_workers}
        ordered: dict[str, Any] = {"seed": self.seed, "shuffle": True, "drop_last": True}
        samples = self._config.samples_per_step
        return (
            Loader(TokenBatches(images.training), None, samples, training, **ordered, **common),
            Loader(TokenBatches(images.validation), None, self.data.batch_size, validation, **common),
        )


class SlideSource(DataSource):
    """Whole slides, by a table or all of a folder."""

    noun = "slide"
    of_slides = has_files = True

    @property
    def described(self) -> str:
        return f"{self.sample_noun}s of {'at most ' * self.own_sizes}{' x '.join(map(str, self.size))} px"

    def refusal(self, slides: str | None, features: str | None) -> str | None:
        if features is None:
            return None
        return "`features` is for a model that was trained on `features`: leave it out, and name `slides` alone"

    def framed(self, fit_before: Callable[[], Fit | None] = lambda: None) -> Config:
        """The configuration with the image size in which its largest slide fits, where that is to be found out.

        Its sides are multiples of the patches, or of 32 px, which is the stride of most models; and of the tiles.
        Of features it is the number of patches of the slide that has the most.

        Raises:
            ConfigError, DatasetError: there are no such slides, one is larger than the image size, or one cannot be
                read, unless `on_bad_image` is skip.
        """
        fit, asked = self.data.fit, self.size
        config = self.with_reference()
        if self.patch is not None and not self.may_pad:
            raise ConfigError(f"`fit` {fit} is for whole images, and `patches` are cut from slides as they are")
        source = type(self)(config)
        slides = source.open_files(labelled=False)
        if fit == "auto":
            fit = fit_before() or source._usual_fit()
            config = with_values(config, {"fit": fit})
        if asked == AUTO and FITTED[fit].windows:
            raise ConfigError("`fit` crop takes windows of `image_size` from slides: say it, such as 512")
        if asked != AUTO and (FITTED[fit].windows or FITTED[fit].scales):
            return config
        unit = (1, 1) if self.patch else config.parallel.tiles[0][-2:]
        multiple = [(self.patch or STRIDE_PX) * count for count in unit]
        fitting, extremes = slides.frame(multiple, self.data.on_bad_image == "skip")
        if asked == AUTO:
            return with_values(config, {"image_size": fitting})
        for largest in sorted(extremes, key=lambda slide: -max(slide.size)):
            if any(side > most for side, most in zip(largest.size, asked, strict=False)):
                sides, frame, needed = ("x".join(map(str, each)) for each in (largest.size, asked, fitting))
                raise ConfigError(self._too_large(largest, sides, frame, needed))
        return config

    def _too_large(self, slide: Any, sides: str, frame: str, needed: str) -> str:
        return (
            f"{slide.file.path} has {sides} px, more than `image_size` {frame}: choose {needed}, auto, or a coarser "
            "`mpp`"
        )

    def _usual_fit(self) -> str:
        """Each slide at its own size, unless patches are cut from it or it has a mask."""
        task: str | None = self.data.task
        if task == AUTO:
            with suppress(datasets.DatasetError):  # which opening them with their labels will say
                task = self.open_files().labels_of
        return "pad" if self.patch is not None or files_of(task) else "own"

    def with_reference(self) -> Config:
        """The configuration with the numbers of the stains of its reference, if that is a file.

        Raises:
            ConfigError, DatasetError: there is no such file, or it shows too little tissue.
        """
        from mpi4dl.datasets.slides.slide import open_slide
        from mpi4dl.datasets.slides.tissue import tissue_pixels
        from mpi4dl.datasets.stains import METHODS

        method, reference = self.slides.stain_norm, self.slides.stain_reference
        if method == "none" or reference is None or _numbers_in(reference) is not None:
            return self._config
        path = Path(reference).expanduser()
        if not path.exists():
            raise ConfigError(f"`stain_reference` {reference}: there is no such file")
        measured = METHODS[method][0].measured(tissue_pixels(open_slide(path)))
        if measured is None:
            raise ConfigError(
                f"`stain_reference` {reference}: shows too little stained tissue to measure: choose another"
            )
        numbers = ",".join(f"{number:.6g}" for number in measured.numbers)
        return with_values(self._config, {"stain_reference": numbers})

    def stains(self) -> "StainNormalization | None":
        """How the colours of slides become those of a reference, which is numbers; None if they do not.

        Raises ConfigError if there are too few or too many numbers.
        """
        from mpi4dl.datasets.stains import METHODS, StainNormalization

        method, reference = self.slides.stain_norm, self.slides.stain_reference
        if method == "none":
            return None
        usual = METHODS[method][1]
        numbers = usual if reference is None else _numbers_in(reference)
        if numbers is None or len(numbers) != len(usual):
            raise ConfigError(
                f"`stain_reference` {reference}: must be a slide or picture, or {len(usual)} numbers with commas "
                f"between them for `stain_norm` {method}"
            )
        return StainNormalization(method, numbers)

    def open(self, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
        """As `DataSource.open`; windows of slides with masks by `fit` crop."""
        with ProgressLine() as tell:
            how: dict[str, Any] = {"fraction": self.data.val_fraction, "known": validating, **self._split()}
            training, validation = self.open_files(tell=tell).split(**how)
            whole: Any = training.whole
            if whole.pixels is not None and self.windows:
                return self._windows(whole, training.indices, validation.indices, tell)
        for name in ("crops_each", "crops_on_classes"):
            if getattr(self.slides, name) != getattr(Slides, name):
                raise ConfigError(f"`{name}` is for windows of slides: say `fit` crop, and `task` segment or image")
        return training, validation

    def _windows(
        self, slides: "SlideFolder", training: Sequence[int], validation: Sequence[int], tell: Tell
    ) -> tuple[Named, Named]:
        """Random windows of the slides to train on, and the grid of windows of those to validate with."""
        from mpi4dl.datasets.slides.windows import GridWindows, RandomWindows

        chosen = self.slides
        each = RandomWindows(slides, training, self.size, chosen.crops_each, chosen.crops_on_classes)
        grid = GridWindows(slides, validation if self.validates else validation[:1], self.size, tell)
        windows = counted(chosen.crops_each, "window")
        slides.remarks += (f"{windows} of each slide in an epoch; {len(grid)} windows with tissue validate",)
        return each, grid

    def open_files(
        self, classes: tuple[str, ...] | None = None, labelled: bool = True, tell: Tell = quietly
    ) -> "SlideFolder":
        """As `DataSource.open_files`, with or without labels; `tell(doing, done, total)` hears of annotations read."""
        from mpi4dl.datasets.slides.dataset import SlideOptions
        from mpi4dl.datasets.slides.masks import MaskOptions
        from mpi4dl.datasets.slides.slide import Resolution

        chosen, path, model = self.slides, Path(self.slides.named or "").expanduser(), self._config.model
        options = SlideOptions(
            Resolution(chosen.mpp, chosen.magnification, chosen.level, chosen.assume_mpp),
            None if isinstance(chosen.tissue, str) else chosen.tissue,
            model.min_tissue,
            chosen.most_patches,
            MaskOptions(
                chosen.unannotated == "ignore",
                chosen.annotation_origin == "bounds",
                model.num_classes,
                self.data.ignore_index,
            ),
            chosen.background == "white" or (chosen.background == "auto" and self.own_sizes),
            self.stains(),
            chosen.leave_out,
        )
        how = self._labels()
        if not labelled:  # a folder to predict of has no columns, whatever the table of training had
            kept = {role: name for role, name in how["columns"].items() if path.is_file() or role == COVARIATES}
            how |= {"task": None, "label_columns": (), "columns": kept}
        folder = None if chosen.slides_folder is None else Path(chosen.slides_folder).expanduser()
        return self._folder(path, options, folder, classes=classes, tell=tell, **how)

    def _folder(self, path: Path, options: Any, slides: Path | None, **how: Any) -> "SlideFolder":
        from mpi4dl.datasets.slides.dataset import SlideFolder

        return SlideFolder(path, options, folder=slides, **how)

    def patches_of(self, samples: Any) -> Callable[[int], int] | None:
        patch, most = self.patch, self.slides.most_patches

        def count(index: int) -> int:
            found = len(samples.tissue_patches(index, patch))
            return found if most is None else min(found, most)

        return None if patch is None else count

    def _stained(self, samples: Named) -> list[str]:
        method, reference = self.slides.stain_norm, self.slides.stain_reference
        to = "the built-in reference" if reference is None else f"`stain_reference` {reference}"
        return [*[f"stains are normalized to {to} by {method}"] * (method != "none"), *unstained(samples)]

    def _padded(self, frame: str) -> str:
        return super()._padded(frame) if self.patch is None else "are cut into patches"

    def _patches(self, rows: int, cols: int) -> str:
        return f"patches of {self.patch} px with tissue, of at most {rows} x {cols} in each slide"


class FeatureSource(SlideSource):
    """Features of the patches of slides, on which an aggregator is trained.

    A slide is an image of one row then, whose pixels are patches and whose channels are their features.
    """

    reads_features = True

    @property
    def described(self) -> str:
        return f"slides of at most {counted(self.size[-1], 'patch', 'patches')}"

    def prepared(self) -> Config:
        """As `DataSource.prepared`. Options of the encoder and of pixels are for `mpi4dl embed`: their defaults, and
        what a preset has, do no harm.

        Raises:
            ConfigError: options that would change patches, or need their pixels.
        """
        config, chosen = self._config, self.slides
        super().prepared()
        asked = [name for name in OF_PIXELS if value_of(config, name) != value_of(Config(), name)]
        asked += ["fit"] * (not self.may_pad) + ["task"] * bool(files_of(config.data.task))
        wrong = next(iter(asked), None)
        if wrong is not None:
            raise ConfigError(
                f"`{wrong}` is for models that see pixels, and `features` {chosen.features} has none: leave it out"
            )
        given: dict[str, Any] = {"model": FEATURES_MODEL, "model_options": {}, "patches": 1, "min_tissue": 0.0}
        given |= {"mean": (0.0,), "std": (1.0,), "flip": "none", "fit": "pad"}
        given |= {"mpp": None, "magnification": None, "level": None, "stream_segments": None, "stream_keep": None}
        given["slides"] = chosen.named
        if config.tuning.weights == "pretrained":
            given["weights"] = None
        return with_values(config, given)

    def require_model(self) -> None:
        """There is none but the aggregator."""

    def refusal(self, slides: str | None, features: str | None) -> str | None:
        if features is not None:
            return None
        return "the model was trained on `features`: name those of other slides, which mpi4dl embed writes"

    def _folder(self, path: Path, options: Any, slides: Path | None, **how: Any) -> "SlideFolder":
        from mpi4dl.datasets.slides.features import FeatureFolder

        chosen = self.slides
        return FeatureFolder(path, options, folder=Path(chosen.features or "").expanduser(), slides=slides, **how)

    def _too_large(self, slide: Any, sides: str, frame: str, needed: str) -> str:
        return f"a slide has {slide.size[1]} patches, more than `image_size` {frame}: leave it out"

    def patches_of(self, samples: Any) -> Callable[[int], int] | None:
        return None

    def shown(self, fit: Fit, sizes: Sequence[tuple[int, ...]], count: int) -> str:
        counts = [count for _, count in sizes]
        return f"slides of {min(counts, default=0)} to {max(counts, default=0)} patches, {self.size[1]} at most"

    def patches_shown(self, at_once: int, norms: str) -> tuple[int, str]:
        return self.size[-1], f"features of at most {counted(self.size[-1], 'patch', 'patches')} of each slide"


def wholes(parts: Sequence[Named]) -> list[Any]:
    """The datasets that some samples are parts of, each once."""
    found: list[Any] = []
    for part in parts:
        whole = in_whole(part)[0]
        found += [] if any(each is whole for each in found) else [whole]
    return found


def unstained(samples: Named) -> list[str]:
    """A remark on slides that keep their colours, if there are any."""
    whole, _ = in_whole(samples)
    found = whole.unstained() if hasattr(whole, "unstained") else None
    return [] if found is None else [found]


def named_columns(chosen: Any) -> dict[str, Any]:
    """The column of each role that an option names, and covariates."""
    found = {role: getattr(chosen, f"{role}_column", None) for role in ("slide", "patient", "annotation", "weight")}
    found[COVARIATES] = getattr(chosen, COVARIATES, ()) or None
    return {role: name for role, name in found.items() if name is not None}


def in_folder_of_fold(config: Config) -> Config:
    """The configuration with the run of a fold in a folder of its own, such as runs/mine/fold_2 in runs/mine."""
    chosen, run = config.slides, config.run.run_folder
    name = f"fold_{chosen.fold}"
    if chosen.folds is None or run is None or Path(run).name == name:
        return config
    return with_values(config, {"run_folder": str(Path(run) / name)})


def _numbers_in(text: str) -> tuple[float, ...] | None:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def some_sizes(dataset: Named) -> Iterator[tuple[int, ...]]:
    """The sizes of some images, from the first to the last; of those that can be read."""
    for index in spread(len(dataset)):
        with suppress(datasets.BadImage):
            yield dataset.image(index).size


def _range(sizes: Sequence[tuple[int, ...]]) -> str:
    least, most = min(sizes, key=prod), max(sizes, key=prod)
    return "x".join(map(str, least)) + ("" if least == most else " to " + "x".join(map(str, most)))


def _require_masks(dataset: Any) -> None:
    """Raise ConfigError if the targets of a dataset are images of values, for which no task follows."""
    with suppress(datasets.BadImage):  # which the training skips, or names
        target = dataset.label(0)
        if not hasattr(target, "read") and bool((torch.as_tensor(target) % 1 != 0).any()):
            raise ConfigError(
                f"a target of the dataset is an image of values, of shape {tuple(target.shape)}, and no mask: give "
                "masks whose values are numbers of classes, or choose `task` regress to learn each value"
            )
