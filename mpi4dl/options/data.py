"""How images become inputs of a model: views, transforms, and how they are mixed."""

import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpi4dl import datasets
from mpi4dl._torchvision import prepare_torchvision
from mpi4dl.datasets.augment import Mixup
from mpi4dl.datasets.labels import FORMS, files_of
from mpi4dl.datasets.transform import FITTED, NORMALISATIONS, Fit, Pointwise
from mpi4dl.options.config import Config, ConfigError, Data
from mpi4dl.options.declare import saying
from mpi4dl.options.kinds import part_name
from mpi4dl.options.parts import blaming, call, load

if TYPE_CHECKING:
    from mpi4dl.datasets.named import NamedTransform

RGB = 3  # channels
TURNS = {"none": 1, "half": 2, "quarter": 4}  # by `rotate`: how many an image can have


def build_views(config: Config, channels: int, fit: Fit) -> tuple[datasets.View, datasets.View]:
    """How training images are shown, varied at random, and how validation images are."""
    data, all_axes = config.data, config.data.flip == "all"
    size = data.image_size
    alike = size[-2:-1] == size[-1:] or FITTED[fit].own_sizes or config.model.sees_patches
    if data.rotate == "quarter" and not alike:
        raise ConfigError(
            f"`rotate` quarter swaps the sides of images, and `image_size` {'x'.join(map(str, size))} is not square: "
            "choose `rotate` half, or a square `image_size`"
        )
    if data.stain_jitter and (channels != RGB or data.channels not in ("auto", "rgb")):
        raise ConfigError(
            f"`stain_jitter` {data.stain_jitter} is for pictures in colours, and images have {channels} channels"
        )
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
    mean, std = normalisation(data, channels)
    common: Mapping[str, Any] = {"fit": fit, "mean": mean, "std": std, "transform": build_transform(config, channels)}
    common = {**common, "patch": config.model.patches, "covariates": config.slides.covariates}
    training = datasets.View(data.image_size, augmentation=augmentation, seed=config.training.seed, **common)
    return training, datasets.View(data.image_size, **common)


def normalisation(data: Data, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of each channel. Raises ConfigError for other channels."""
    found = []
    for place, (name, asked) in enumerate((("mean", data.mean), ("std", data.std))):
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
    told = f"`transforms` {part_name(part)}"
    with saying(told, datasets.DatasetError), blaming("transforms", part, datasets.DatasetError):
        transform = Pointwise(made)
        transform.check(len(config.data.image_size), channels, len(config.data.image_size) == 2)
    return transform


def build_augment(config: Config, channels: int, task: str) -> "tuple[NamedTransform, ...]":
    """The transforms by name of training images, which were tried.

    Raises ConfigError: there is none of this name, or it needs whole images that ranks or streaming cut, or it would
    move pixels away from their masks.
    """
    if not config.data.augment:
        return ()
    from mpi4dl.datasets.named import named_transform

    with suppress(ModuleNotFoundError):  # which a transform of torchvision will say
        prepare_torchvision()
    if len(config.data.image_size) != 2:
        raise ConfigError("`augment` is for pictures: leave it out")
    tiles, stream = config.parallel.tiles[0], config.parallel.stream
    cut = None
    if not config.model.sees_patches:
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
        if files_of(task) and transform.moves:
            raise ConfigError(
                f"`augment` {text} moves pixels, and {files_of(task)}s would stay: choose `rotate_degrees`, `scale`, "
                f"`flip` or `rotate`, which {files_of(task)}s follow"
            )
        found.append(transform)
    return tuple(found)


def build_mixup(config: Config, task: str, num_classes: int, of_slides: bool) -> Mixup | None:
    """How training images are mixed; None if they are not. Raises ConfigError for labels that cannot be."""
    if not config.data.mixup:
        return None
    if not FORMS[task].have_means:
        mixed = ", ".join(form.task for form in FORMS.values() if form.have_means)
        raise ConfigError(f"`mixup` {config.data.mixup}: labels to {task} have no means; it is for {mixed}")
    if of_slides and config.model.sees_patches:
        raise ConfigError(
            f"`mixup` {config.data.mixup} mixes whole images, but each slide has `patches` at other places"
        )
    return Mixup(config.data.mixup, num_classes, config.training.seed)
