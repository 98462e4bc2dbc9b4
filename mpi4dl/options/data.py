"""The images that a configuration names, and how they are shown."""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl import datasets
from mpi4dl._progress import ProgressLine, Tell, quietly
from mpi4dl._wording import counted
from mpi4dl.datasets.arrays import is_cifar
from mpi4dl.datasets.augment import Mixup
from mpi4dl.datasets.kinds import PICTURES, VOLUMES
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.sources import SYNTHETIC, SampleFiles, open_files
from mpi4dl.datasets.split import Named, split
from mpi4dl.datasets.transform import NORMALISATIONS, STRIDE_PX, Fit, Pointwise
from mpi4dl.options.config import Config, ConfigError, Slides
from mpi4dl.options.declare import with_values
from mpi4dl.options.kinds import AUTO, part_name
from mpi4dl.options.parts import blaming, call, load

if TYPE_CHECKING:
    from mpi4dl.datasets.named import NamedTransform
    from mpi4dl.datasets.slides.dataset import SlideFolder
    from mpi4dl.datasets.stains import StainNormalization
    from mpi4dl.parallel.plan import Plan

RGB = 3  # channels
TURNS = {"none": 1, "half": 2, "quarter": 4}  # by `rotate`: how many an image can have
FOLDS = "folds.csv"  # in the folder of the runs of all folds: which samples are in which
FEATURES_MODEL = "features"  # how files of a run name the model that has no encoder


def build_datasets(config: Config, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
    """The training and the validation images; `validating` says of some, by name, which they were before."""
    if config.data.dataset is not None:
        return own_datasets(config, validating or {})
    if config.slides.slides is not None:
        return split_slides(config, validating)
    held_out = max(1, round(config.data.num_samples * config.data.val_fraction))
    split_file, of_fold = _split_file(config)
    return datasets.open(
        config.data.images,
        size=config.data.image_size,
        num_classes=config.model.num_classes,
        num_train=config.data.num_samples,
        num_val=held_out,
        validation_fraction=config.data.val_fraction,
        seed=config.training.seed,
        validating=validating,
        task=config.data.task if config.data.task in FORMS else None,
        label_columns=config.data.label_columns,
        columns=named_columns(config.slides),
        ignore_index=config.data.ignore_index,
        validates=config.training.eval_every is not None,
        folds=config.slides.folds,
        fold=fold_of_run(config),
        split_file=split_file,
        of_fold=of_fold,
    )


def open_slides(
    config: Config,
    labelled: bool = True,
    classes: tuple[str, ...] | None = None,
    tell: Tell = quietly,
) -> "SlideFolder":
    """The slides that a configuration names, with or without the labels of their table, which are of these `classes`.

    `tell(doing, done, total)` hears of annotations that were read. Raises ConfigError, DatasetError.
    """
    from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
    from mpi4dl.datasets.slides.masks import MaskOptions
    from mpi4dl.datasets.slides.slide import Resolution

    chosen, path = config.slides, Path(config.slides.slides or "").expanduser()
    try:
        resolution = Resolution(chosen.mpp, chosen.magnification, chosen.level, chosen.assume_mpp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    white = chosen.background == "white" or (chosen.background == "auto" and config.data.fit == "own")
    threshold = None if isinstance(chosen.tissue, str) else chosen.tissue
    masks = MaskOptions(
        chosen.unannotated == "ignore",
        chosen.annotation_origin == "bounds",
        config.model.num_classes,
        config.data.ignore_index,
    )
    options = SlideOptions(
        resolution,
        threshold,
        config.model.min_tissue,
        chosen.most_patches,
        masks,
        white,
        stains_of(config),
        chosen.leave_out,
    )
    folder = None if chosen.slides_folder is None else Path(chosen.slides_folder).expanduser()
    common: dict[str, Any] = {
        "task": config.data.task if labelled and config.data.task in FORMS else None,
        "label_columns": config.data.label_columns if labelled else (),
        "classes": classes,
        # A folder to predict of has no columns, whatever the table of training had.
        "columns": named_columns(chosen) if labelled or path.is_file() else {},
        "tell": tell,
    }
    if chosen.features is None:
        return SlideFolder(path, options, folder=folder, **common)
    from mpi4dl.datasets.slides.features import FeatureFolder

    return FeatureFolder(path, options, folder=Path(chosen.features).expanduser(), slides=folder, **common)


def has_files(config: Config) -> bool:
    """Whether samples are files of a table or folder, rather than arrays, text or a dataset of the user's."""
    if config.slides.slides is not None:
        return True
    path = Path(config.data.images).expanduser()
    own = config.data.dataset is not None or config.data.text is not None or config.data.images == SYNTHETIC
    return not own and path.suffix != ".npz" and not is_cifar(path)


def open_own_files(config: Config, classes: tuple[str, ...] | None = None) -> "SampleFiles":
    """The files that a configuration names, all of them, with labels of these `classes`. Raises as `open_slides`."""
    if config.slides.slides is not None:
        return open_slides(config, classes=classes)
    return open_files(
        Path(config.data.images).expanduser(),
        VOLUMES if len(config.data.image_size) > 2 else PICTURES,
        task=config.data.task if config.data.task in FORMS else None,
        label_columns=config.data.label_columns,
        classes=classes,
        columns=named_columns(config.slides),
        num_classes=config.model.num_classes,
        ignore_index=config.data.ignore_index,
    )


def named_columns(chosen: Any) -> dict[str, str]:
    """The column of each role that an option names."""
    found = {role: getattr(chosen, f"{role}_column") for role in ("slide", "patient", "annotation")}
    return {role: name for role, name in found.items() if name is not None}


def stains_of(config: Config) -> "StainNormalization | None":
    """How the colours of slides become those of a reference, which is numbers; None if they do not.

    Raises ConfigError if there are no slides, or too few or too many numbers.
    """
    from mpi4dl.datasets.stains import METHODS, StainNormalization

    method, reference = config.slides.stain_norm, config.slides.stain_reference
    if method == "none":
        if reference is not None:
            raise ConfigError(f"`stain_reference` {reference}: name the `stain_norm` that it is for")
        return None
    usual = METHODS[method][1]
    numbers = usual if reference is None else _numbers_in(reference)
    if numbers is None or len(numbers) != len(usual):
        raise ConfigError(
            f"`stain_reference` {reference}: must be a slide or picture, or {len(usual)} numbers with commas between "
            f"them for `stain_norm` {method}"
        )
    return StainNormalization(method, numbers)


def with_reference(config: Config) -> Config:
    """The configuration with the numbers of the stains of its reference, if that is a file.

    Raises:
        ConfigError, DatasetError: there is no such file, or it shows too little tissue.
    """
    from mpi4dl.datasets.slides.slide import open_slide
    from mpi4dl.datasets.slides.tissue import tissue_pixels
    from mpi4dl.datasets.stains import METHODS

    method, reference = config.slides.stain_norm, config.slides.stain_reference
    if config.slides.slides is None and method != "none":
        raise ConfigError(f"`stain_norm` {method} is for slides: name them by `slides`")
    if config.slides.slides is None and config.slides.leave_out:
        raise ConfigError(f"`leave_out` {','.join(config.slides.leave_out)} is for slides: name them by `slides`")
    if method == "none" or reference is None or _numbers_in(reference) is not None:
        return config
    path = Path(reference).expanduser()
    if not path.exists():
        raise ConfigError(f"`stain_reference` {reference}: there is no such file")
    measured = METHODS[method][0].measured(tissue_pixels(open_slide(path)))
    if measured is None:
        raise ConfigError(f"`stain_reference` {reference}: shows too little stained tissue to measure: choose another")
    return with_values(config, {"stain_reference": ",".join(f"{number:.6g}" for number in measured.numbers)})


def _numbers_in(text: str) -> tuple[float, ...] | None:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def split_slides(config: Config, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
    """The slides to train on and to validate with. Raises ConfigError, DatasetError."""
    chosen = config.slides
    fold = fold_of_run(config)
    split_file, of_fold = _split_file(config)
    with ProgressLine() as tell:
        training, validation = open_slides(config, tell=tell).split(
            fraction=config.data.val_fraction,
            seed=config.training.seed,
            known=validating,
            folds=chosen.folds,
            fold=fold,
            split_file=split_file,
            of_fold=of_fold,
            validates=config.training.eval_every is not None,
        )
        whole: Any = training.whole
        if whole.masks is not None and config.data.fit == "crop":
            return in_windows(config, whole, training.indices, validation.indices, tell)
    for name in ("crops_each", "crops_on_classes"):
        if getattr(chosen, name) != getattr(Slides, name):
            raise ConfigError(f"`{name}` is for windows of slides to segment: say `task` segment and `fit` crop")
    return training, validation


def fold_of_run(config: Config) -> int:
    """The number of the fold that validates; the first, of all."""
    return config.slides.fold if isinstance(config.slides.fold, int) else 0


def _split_file(config: Config) -> tuple[Path | None, bool]:
    """The file that says how slides are split, if any does, and whether it is that of one fold. Raises ConfigError."""
    chosen, run = config.slides, config.run.run_folder
    fold = fold_of_run(config)
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


def in_folder_of_fold(config: Config) -> Config:
    """The configuration with the run of a fold in a folder of its own, such as runs/mine/fold_2 in runs/mine."""
    chosen, run = config.slides, config.run.run_folder
    name = f"fold_{chosen.fold}"
    if chosen.folds is None or run is None or Path(run).name == name:
        return config
    return with_values(config, {"run_folder": str(Path(run) / name)})


def in_windows(
    config: Config, slides: "SlideFolder", training: Sequence[int], validation: Sequence[int], tell: Tell = quietly
) -> tuple[Named, Named]:
    """Random windows of the slides to train on, and the grid of windows of those to validate with."""
    from mpi4dl.datasets.slides.windows import GridWindows, RandomWindows

    size, chosen = config.data.image_size, config.slides
    each = RandomWindows(slides, training, size, chosen.crops_each, chosen.crops_on_classes)
    grid = GridWindows(slides, validation if config.training.eval_every is not None else validation[:1], size, tell)
    slides.remarks += (
        f"{counted(chosen.crops_each, 'window')} of each slide in an epoch; {len(grid)} windows with tissue validate",
    )
    return each, grid


def with_features(config: Config) -> Config:
    """The configuration of a model that aggregates features of slides, if it names some.

    A slide is an image of one row then, whose pixels are patches and whose channels are their features. Options of the
    encoder and of pixels are for `mpi4dl embed`: what they are by default or by a preset does no harm.

    Raises:
        ConfigError: options that would change patches, or need their pixels.
    """
    features, data, parallel = config.slides.features, config.data, config.parallel
    if features is None:
        return config
    asked = {
        "rotate": data.rotate != "none",
        "rotate_degrees": data.rotate_degrees,
        "scale": data.scale != (1.0, 1.0),
        "stain_jitter": data.stain_jitter,
        "stain_norm": config.slides.stain_norm != "none",
        "leave_out": config.slides.leave_out != (),
        "random_crop": data.random_crop,
        "jitter": data.jitter,
        "mixup": data.mixup,
        "transforms": data.transforms is not None,
        "augment": data.augment != (),
        "stream": parallel.stream is not None,
        "stages": parallel.stages > 1,
        "fit": data.fit not in ("auto", "pad"),
        "task": data.task == "segment",
    }
    wrong = next((name for name, given in asked.items() if given), None)
    if wrong is not None:
        raise ConfigError(f"`{wrong}` is for models that see pixels, and `features` {features} has none: leave it out")
    given: dict[str, Any] = {"model": FEATURES_MODEL, "model_options": {}, "patches": 1, "min_tissue": 0.0}
    given |= {"mean": (0.0,), "std": (1.0,), "flip": "none", "fit": "pad"}
    given |= {"mpp": None, "magnification": None, "level": None, "stream_segments": None, "stream_keep": None}
    given["slides"] = config.slides.slides or features
    if config.tuning.weights == "pretrained":
        given["weights"] = None
    return with_values(config, given)


def with_frame(config: Config) -> Config:
    """The configuration with the image size in which its largest slide fits, where that is to be found out.

    Its sides are multiples of the patches, or of 32 px, which is the stride of most models; and of the tiles.
    Of features it is the number of patches of the slide that has the most.

    Raises:
        ConfigError, DatasetError: there are no such slides, one is larger than the image size, or one cannot be
            read, unless `on_bad_image` is skip.
    """
    config = with_reference(with_features(config))
    if config.slides.slides is None:
        return config
    others = {"dataset": config.data.dataset, "text": config.data.text, "images": config.data.images}
    both = next((name for name, value in others.items() if value not in (None, datasets.sources.SYNTHETIC)), None)
    if both is not None:
        raise ConfigError(f"`slides` and `{both}` were both given: choose one")
    if config.model.patches is not None and config.data.fit not in ("auto", "pad"):
        raise ConfigError(f"`fit` {config.data.fit} is for whole images, and `patches` are cut from slides as they are")
    if config.data.image_size == AUTO and config.data.fit == "crop":
        raise ConfigError("`fit` crop takes windows of `image_size` from slides: say it, such as 512")
    slides = open_slides(config, labelled=False)
    if config.data.fit == "auto":
        config = with_values(config, {"fit": _fit_of_slides(config)})
    asked = config.data.image_size
    if asked != AUTO and config.data.fit not in ("pad", "own"):
        return config
    tiles = config.parallel.tiles[0][-2:]
    unit = (1, 1) if config.model.patches else tiles
    multiple = [(config.model.patches or STRIDE_PX) * count for count in unit]
    fitting, extremes = slides.frame(multiple, config.data.on_bad_image == "skip")
    if asked == AUTO:
        return with_values(config, {"image_size": fitting})
    for largest in sorted(extremes, key=lambda slide: -max(slide.size)):
        if not any(side > most for side, most in zip(largest.size, asked, strict=False)):
            continue
        sides, frame, needed = ("x".join(map(str, each)) for each in (largest.size, asked, fitting))
        if config.slides.features is not None:
            raise ConfigError(f"a slide has {largest.size[1]} patches, more than `image_size` {frame}: leave it out")
        raise ConfigError(
            f"{largest.file.path} has {sides} px, more than `image_size` {frame}: choose {needed}, auto, or a coarser "
            "`mpp`"
        )
    return config


def _fit_of_slides(config: Config) -> str:
    """Each slide at its own size, unless patches are cut from it or it has a mask."""
    dense = config.data.task == "segment"
    if config.data.task == AUTO:
        with suppress(datasets.DatasetError):  # which opening them with their labels will say
            dense = open_slides(config).labels_of == "segment"
    return "pad" if config.model.patches is not None or dense else "own"


def check_own_sizes(config: Config, plan: "Plan") -> None:
    """Raises ConfigError if images of their own size would have to share a microbatch, or have masks or partners."""
    if config.data.fit != "own":
        return
    data, ways = config.data, plan.replicas_together * max(plan.batch_ways)
    if ways > 1:
        raise ConfigError(
            f"{plan} shares out the images of a microbatch, and by `fit` own they differ in size: choose `tiles`, by "
            "which ranks share each image, `data` alone, by which each replica has images of its own, or `fit` pad"
        )
    if plan.bidirectional:
        raise ConfigError(
            f"`bidirectional` {plan.bidirectional} evaluates two images at once, and by `fit` own they differ in size: "
            "leave it out, or choose `fit` pad"
        )
    replicas, microbatches = plan.replicas, config.parallel.microbatches
    if data.batch_size != replicas * microbatches:
        asked = f"`batch_size` {data.batch_size} with `microbatches` {microbatches}"
        asked += f" of each of `data` {replicas}" if replicas > 1 else ""
        steps = max(1, data.batch_size * config.training.accumulate // replicas)
        raise ConfigError(
            f"{asked}: by `fit` own images differ in size, so a microbatch has one: choose `batch_size` {replicas} and "
            f"`accumulate` {steps}, or `fit` pad"
        )
    if data.mixup:
        raise ConfigError(f"`mixup` {data.mixup} mixes images of one size: choose `fit` pad or resize, not own")
    if len(data.image_size) != 2 or data.dataset is not None:
        raise ConfigError("`fit` own is for pictures and slides: leave it out")


def own_datasets(config: Config, validating: Mapping[str, bool]) -> tuple[Named, Named]:
    """The user's datasets; one that is alone is split. Raises ConfigError, DatasetError."""
    part, options = config.data.dataset, config.data.dataset_options
    made = part if isinstance(part, tuple) else load("dataset", part)
    if inspect.isclass(made) or inspect.isroutine(made):
        in_two = "split" in inspect.signature(made).parameters and "split" not in options
        made = (
            tuple(call("dataset", part, split=name, **options) for name in ("train", "val"))
            if in_two
            else call("dataset", part, **options)
        )
    found = datasets.adapt(made)
    if isinstance(found, tuple):
        return found
    return split(
        found,
        config.data.val_fraction,
        config.training.seed,
        validating,
        validates=config.training.eval_every is not None,
    )


def build_views(config: Config, channels: int, fit: Fit) -> tuple[datasets.View, datasets.View]:
    """How training images are shown, varied at random, and how validation images are."""
    data, all_axes = config.data, config.data.flip == "all"
    _require_square(config, fit)
    if data.stain_jitter and channels != RGB:
        raise ConfigError(f"`stain_jitter` {data.stain_jitter} is for pictures, and images have {channels} channels")
    for name, chosen in (("rotate_degrees", data.rotate_degrees), ("scale", data.scale != (1.0, 1.0))):
        if chosen and len(data.image_size) != 2:
            raise ConfigError(f"`{name}` is for pictures, and images have {len(data.image_size)} axes: leave it out")
    augmentation = datasets.Augmentation(
        crop=0.8 if data.random_crop else 1.0,
        flip_rows=all_axes,
        flip_cols=all_axes or data.flip == "horizontal",
        brightness=data.jitter,
        contrast=data.jitter,
        saturation=data.jitter if channels == RGB else 0.0,
        flip_depth=all_axes,
        turns=TURNS[data.rotate],
        stains=data.stain_jitter,
        degrees=data.rotate_degrees,
        scale=data.scale,
    )
    mean, std = normalisation(config, channels)
    common: Mapping[str, Any] = {"fit": fit, "mean": mean, "std": std, "transform": build_transform(config, channels)}
    common = {**common, "patch": config.model.patches}
    training = datasets.View(data.image_size, augmentation=augmentation, seed=config.training.seed, **common)
    return training, datasets.View(data.image_size, **common)


def _require_square(config: Config, fit: Fit) -> None:
    """Raise ConfigError for quarter turns of images that are not square."""
    size = config.data.image_size
    alike = size[-2:-1] == size[-1:] or fit == "own" or config.model.patches is not None
    if config.data.rotate != "quarter" or alike:
        return
    raise ConfigError(
        f"`rotate` quarter swaps the sides of images, and `image_size` {'x'.join(map(str, size))} is not square: "
        "choose `rotate` half, or a square `image_size`"
    )


def normalisation(config: Config, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of each channel. Raises ConfigError for other channels."""
    found = []
    for place, (name, asked) in enumerate((("mean", config.data.mean), ("std", config.data.std))):
        assert asked is not None
        values = NORMALISATIONS[asked][place] if isinstance(asked, str) else asked
        if len(values) not in (1, channels):
            shown = asked if isinstance(asked, str) else ",".join(map(str, asked))
            raise ConfigError(
                f"`{name}` {shown} is for {len(values)} channels, but images have {channels}: "
                f"give one number, or {channels}"
            )
        found.append(values * channels if len(values) == 1 else values)
    return found[0], found[1]


def build_transform(config: Config, channels: int) -> Pointwise | None:
    """The user's transform of pixels, tried on some. Raises ConfigError, or DatasetError if boxes differ."""
    part = config.data.transforms
    if part is None:
        return None
    made = load("transforms", part)
    made = call("transforms", part) if inspect.isclass(made) else made
    try:
        with blaming("transforms", part, datasets.DatasetError):
            transform = Pointwise(made)
            transform.check(len(config.data.image_size), channels, len(config.data.image_size) == 2)
    except datasets.DatasetError as problem:
        raise ConfigError(f"`transforms` {part_name(part)}: {problem}") from None
    return transform


def build_augment(config: Config, channels: int, task: str) -> "tuple[NamedTransform, ...]":
    """The transforms by name of training images, which were tried.

    Raises ConfigError: there is none of this name, or it needs whole images that ranks or streaming cut, or it would
    move pixels away from their masks.
    """
    if not config.data.augment:
        return ()
    from mpi4dl._torchvision import prepare_torchvision
    from mpi4dl.datasets.named import named_transform

    with suppress(ModuleNotFoundError):  # which a transform of torchvision will say
        prepare_torchvision()
    if len(config.data.image_size) != 2:
        raise ConfigError("`augment` is for pictures: leave it out")
    tiles, stream = config.parallel.tiles[0], config.parallel.stream
    cut = None
    if config.model.patches is None:
        shown = "x".join(map(str, tiles))
        cut = f"`tiles` {shown}" if math.prod(tiles) > 1 else "`stream`" if stream is not None else None
    found = []
    for text in config.data.augment:
        try:
            transform = named_transform(text, channels)
        except datasets.DatasetError as problem:
            raise ConfigError(f"`augment` {problem}") from None
        if cut is not None and not transform.pointwise:
            instead = "one that changes each pixel by itself, such as RandomPosterize(bits=4)"
            if transform.moves:
                instead = "`flip`, `rotate`, `rotate_degrees` or `scale`"
            raise ConfigError(
                f"`augment` {text} makes of a pixel what depends on others, and {cut} cuts images: choose {instead}, "
                "or `patches`, or leave images whole"
            )
        if task == "segment" and transform.moves:
            raise ConfigError(
                f"`augment` {text} moves pixels, and masks would stay: choose `rotate_degrees`, `scale`, `flip` or "
                "`rotate`, which masks follow"
            )
        found.append(transform)
    return tuple(found)


def build_mixup(config: Config, task: str, num_classes: int) -> Mixup | None:
    """How training images are mixed; None if they are not. Raises ConfigError for labels that cannot be."""
    if not config.data.mixup:
        return None
    if not FORMS[task].have_means:
        mixed = ", ".join(form.task for form in FORMS.values() if form.have_means)
        raise ConfigError(f"`mixup` {config.data.mixup}: labels to {task} have no means; it is for {mixed}")
    if config.slides.slides is not None and config.model.patches is not None:
        raise ConfigError(
            f"`mixup` {config.data.mixup} mixes whole images, but each slide has `patches` at other places"
        )
    return Mixup(config.data.mixup, num_classes, config.training.seed)


def number_of_classes(config: Config, classes: Sequence[str]) -> int:
    """The number of classes by the option, or else by the images. Raises ConfigError if that is too few."""
    asked = config.model.num_classes
    form = FORMS.get(config.data.task)
    if form is not None and form.classes:
        return len(form.classes)
    if not asked and not classes:
        raise ConfigError("the dataset does not name its classes: say `num_classes`, or give it `classes`")
    if asked is not None and asked < len(classes):
        names = datasets.printable(", ".join(classes[:10]))
        raise ConfigError(f"`num_classes` {asked}, but the images have {len(classes)}: {names}")
    return asked or len(classes)
