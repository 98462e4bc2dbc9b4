"""The images that a configuration names, and how they are shown."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mpi4dl import datasets
from mpi4dl.datasets.split import Named, split
from mpi4dl.datasets.view import Fit
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.parts import call, load

RGB = 3  # channels


def build_datasets(config: Config, validating: Mapping[str, bool] | None = None) -> tuple[Named, Named]:
    """The training and the validation images; `validating` says of some, by name, which they were before."""
    if config.data.dataset is not None:
        return own_datasets(config, validating or {})
    held_out = max(1, round(config.data.num_samples * config.data.val_fraction))
    return datasets.open(
        config.data.images,
        size=config.data.image_size,
        num_classes=config.model.num_classes or 10,
        num_train=config.data.num_samples,
        num_val=held_out,
        validation_fraction=config.data.val_fraction,
        seed=config.training.seed,
        validating=validating,
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
    return split(found, config.data.val_fraction, config.training.seed, validating)


def build_views(config: Config, channels: int, fit: Fit) -> tuple[datasets.View, datasets.View]:
    """How training images are shown, varied at random, and how validation images are."""
    data = config.data
    augmentation = datasets.Augmentation(
        crop=0.8 if data.random_crop else 1.0,
        flip_rows=data.flip,
        flip_cols=data.flip,
        brightness=data.jitter,
        contrast=data.jitter,
        saturation=data.jitter if channels == RGB else 0.0,
        flip_depth=data.flip,
    )
    common: Mapping[str, Any] = {"fit": fit, "mean": (data.mean,) * channels, "std": (data.std,) * channels}
    training = datasets.View(data.image_size, augmentation=augmentation, seed=config.training.seed, **common)
    return training, datasets.View(data.image_size, **common)


def number_of_classes(config: Config, classes: Sequence[str]) -> int:
    """What was asked for, or else as many as the images have. Raises ConfigError if that is too few."""
    asked = config.model.num_classes
    if asked is not None and asked < len(classes):
        names = datasets.printable(", ".join(classes[:10]))
        raise ConfigError(f"`num_classes` {asked}, but the images have {len(classes)}: {names}")
    return asked or len(classes)
