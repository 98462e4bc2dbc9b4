"""Transforms by name: those of the package on the whole image, by the same numbers in every box and thread."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from mpi4dl._torchvision import prepare_torchvision
from mpi4dl.datasets.augment import Augmentation, Variation
from mpi4dl.datasets.base import DatasetError, Values, WholeImage
from mpi4dl.datasets.named import named_transform
from mpi4dl.datasets.transform import View
from mpi4dl.geometry import Interval
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.data import build_augment
from tests.datasets.boxes import noise_image

SINGLE, WHOLE, MOVES = (True, False), (False, False), (False, True)  # of single pixels, and whether pixels move
KINDS = {
    "ColorJitter(brightness=0.2,hue=0.05)": SINGLE,
    "ColorJitter(contrast=0.2)": WHOLE,  # about the mean of the image
    "RandomPosterize(bits=4)": SINGLE,
    "RandomSolarize(threshold=128,p=0.1)": SINGLE,
    "RandomGrayscale": SINGLE,
    "RandomChannelPermutation": SINGLE,
    "RandomEqualize": WHOLE,
    "GaussianBlur(3)": WHOLE,
    "GaussianNoise": WHOLE,
    "RandomErasing": WHOLE,
    "RandomHorizontalFlip": MOVES,
    "ElasticTransform": MOVES,
    "RandAugment": MOVES,  # takes no masks
}


@pytest.fixture(autouse=True, scope="module")
def _torchvision() -> None:
    prepare_torchvision()


@pytest.mark.parametrize("text", KINDS)
def test_what_a_transform_needs_is_found_by_trying_it(text: str) -> None:
    found = named_transform(text)
    assert (found.pointwise, found.moves) == KINDS[text]


@pytest.mark.parametrize("text", KINDS)
def test_they_are_those_of_torchvision_by_the_same_seed(text: str) -> None:
    """The global generator stays as it is, also when threads draw at once."""
    from torchvision.transforms import v2

    made = eval(text if "(" in text else f"{text}()", vars(v2))
    pixels, found = noise_image(48, 60), named_transform(text)
    before = torch.get_rng_state()
    seeds = range(20)
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda seed: found.apply(pixels, seed), seeds))
    assert torch.equal(torch.get_rng_state(), before)
    for seed, result in zip(seeds, results, strict=True):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            expected = made(torch.from_numpy(pixels).permute(2, 0, 1)).permute(1, 2, 0)
        assert np.array_equal(result, expected.numpy()), seed


def shown(view: View, pixels: Values, variation: Variation, *space: Interval) -> Any:
    return view.tile(WholeImage(pixels), *space, variation=variation)


@pytest.mark.parametrize(
    "text", ["ColorJitter(brightness=0.5,saturation=0.5)", "GaussianBlur(5)", "RandomPerspective(p=1)"]
)
@pytest.mark.parametrize("patch", [None, 32])
def test_every_box_has_the_pixels_of_the_whole(text: str, patch: int | None) -> None:
    """Also of whole patches, which draw for themselves, with other augmentation before; none in validation."""
    pixels, named = noise_image(96, 128), named_transform(text)
    augmentation = Augmentation(flip_rows=True, turns=2, degrees=10.0, stains=0.1)
    view = View((96, 128), "pad", augmentation, patch=patch, augment=(named,))
    variation = view.variation(3, 1)
    whole = shown(view, pixels, variation, Interval(0, 96), Interval(0, 128))
    for rows, cols in (((0, 32), (32, 96)), ((5, 70), (33, 34)), ((0, 96), (64, 128))):
        box = shown(view, pixels, variation, Interval(*rows), Interval(*cols))
        assert np.abs(box - whole[:, slice(*rows), slice(*cols)]).max() < 0.05  # a byte is 0.02
    plain = View((96, 128), "pad", augmentation, patch=patch)
    assert not np.array_equal(whole, shown(plain, pixels, variation, Interval(0, 96), Interval(0, 128)))
    still = [shown(each, pixels, Variation(), Interval(0, 96), Interval(0, 128)) for each in (view, plain)]
    assert np.array_equal(*still)


def test_patches_draw_for_themselves() -> None:
    pixels = np.tile(noise_image(32, 32), (2, 2, 1))
    view = View((64, 64), "pad", patch=32, augment=(named_transform("RandomPerspective(p=1)"),))
    found = shown(view, pixels, Variation(key=(0, 0, 0)), Interval(0, 64), Interval(0, 64))
    assert not np.array_equal(found[:, :32, :32], found[:, :32, 32:])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ColorJiter", "did you mean ColorJitter"),
        ("RandomPosterize", "missing 1 required"),
        ("RandomPosterize(bits=4,", "write a name"),
        ("ColorJitter(__import__('os'))", "write a name"),
        ("ColorJitter(**{})", "unexpected keyword"),
        ("os.system", "write a name"),
        ("A.RandomGamma(p=1)", "write a name of torchvision's, or albumentations.NAME"),
        ("RandomApply([ColorJitter(0.2)],p=0.5)", "list them one by one"),
        ("Resize(30)", "must keep size"),
        ("AugMix", "draws from"),
        ("MixUp", "cannot transform"),
    ],
)
def test_what_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        named_transform(text)


@pytest.mark.parametrize(
    ("flags", "task", "words"),
    [
        ("--augment GaussianBlur(3) --tiles 1x2", "classify", "`tiles` 1x2 cuts images"),
        ("--augment GaussianBlur(3) --stream 2x2", "classify", "`stream` cuts images"),
        ("--augment RandomHorizontalFlip --tiles 1x2", "classify", "cuts images: choose `flip`"),
        ("--augment ElasticTransform", "segment", "masks would stay"),
        ("--augment Nothing", "classify", "`augment` Nothing"),
        ("--augment RandomInvert --image-size 8x8x8", "classify", "for pictures"),
    ],
)
def test_what_it_does_not_go_with(flags: str, task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_augment(parse(["--image-size", "64", *flags.split()]), 3, task)


def test_several_and_their_arguments() -> None:
    config = parse("--augment RandomPosterize(bits=4,p=1),GaussianBlur((3,3)) --image-size 64 --patches 32".split())
    assert config.data.augment == ("RandomPosterize(bits=4,p=1)", "GaussianBlur((3,3))")
    assert [each.name for each in build_augment(config, 3, "classify")] == [*config.data.augment]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("RandomGamma", SINGLE), ("HueSaturationValue", SINGLE), ("GaussianBlur", WHOLE), ("ElasticTransform", MOVES)],
)
def test_albumentations(name: str, kind: tuple[bool, bool]) -> None:
    pytest.importorskip("albumentations")
    found = named_transform(f"albumentations.{name}(p=1)")
    assert (found.pointwise, found.moves) == kind
    pixels = noise_image(40, 40)
    assert np.array_equal(found.apply(pixels, 5), found.apply(pixels, 5))
    assert not np.array_equal(found.apply(pixels, 5), found.apply(pixels, 6))
