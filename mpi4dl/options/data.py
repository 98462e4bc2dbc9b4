"""The images that a configuration names, and how they are shown."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mpi4dl import datasets
from mpi4dl.datasets.augment import Mixup
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.split import Named, split
from mpi4dl.datasets.transform import NORMALISATIONS, Fit, Pointwise
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.kinds import part_name
from mpi4dl.options.parts import blaming, call, load

RGB = 3  # channels


def build_datasets(config: Config, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
    """The training and the validation images; `validating` says of some, by name, which they were before."""
    if config.data.dataset is not None:
        return own_datasets(config, validating or {})
    held_out = max(1, round(config.data.num_samples * config.data.val_fraction))
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
        ignore_index=config.data.ignore_index,
        validates=config.training.eval_every is not None,
    )


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
        otherwise="give a pair of datasets, or one that takes split='train' and split='val'",
        validates=config.training.eval_every is not None,
    )


def build_views(config: Config, channels: int, fit: Fit) -> tuple[datasets.View, datasets.View]:
    """How training images are shown, varied at random, and how validation images are."""
    data, all_axes = config.data, config.data.flip == "all"
    augmentation = datasets.Augmentation(
        crop=0.8 if data.random_crop else 1.0,
        flip_rows=all_axes,
        flip_cols=all_axes or data.flip == "horizontal",
        brightness=data.jitter,
        contrast=data.jitter,
        saturation=data.jitter if channels == RGB else 0.0,
        flip_depth=all_axes,
    )
    mean, std = normalisation(config, channels)
    common: Mapping[str, Any] = {"fit": fit, "mean": mean, "std": std, "transform": build_transform(config, channels)}
    training = datasets.View(data.image_size, augmentation=augmentation, seed=config.training.seed, **common)
    return training, datasets.View(data.image_size, **common)


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


def build_mixup(config: Config, task: str, num_classes: int) -> Mixup | None:
    """How training images are mixed; None if they are not. Raises ConfigError for labels that cannot be."""
    if not config.data.mixup:
        return None
    if not FORMS[task].have_means:
        mixed = ", ".join(form.task for form in FORMS.values() if form.have_means)
        raise ConfigError(f"`mixup` {config.data.mixup}: labels to {task} have no means; it is for {mixed}")
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
