"""Small rotations and changes of scale: those of torchvision on the whole image, alike in every box, masks too."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mpi4dl._torchvision import import_torchvision
from mpi4dl.datasets.augment import Augmentation, Variation
from mpi4dl.datasets.base import IGNORED, Values, WholeImage
from mpi4dl.datasets.transform import View
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image

MARGIN = 200  # px of white around an image, more than any pixel moves
VARIATIONS = {
    "turned": Variation(degrees=11.0),
    "enlarged": Variation(scale=1.3137),
    "reduced": Variation(scale=0.8071),
    "both": Variation(degrees=-23.0, scale=1.1),
}


def as_torchvision(image: npt.NDArray[Any], variation: Variation, around: int) -> npt.NDArray[np.float64]:
    """The whole image (height, width, channels) in float64; of a mask, (height, width), the nearest pixels."""
    import_torchvision()
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    planes = torch.from_numpy(np.atleast_3d(image).astype(np.float64)).permute(2, 0, 1)
    found = functional.affine(
        functional.pad(planes, [MARGIN], fill=around),
        angle=-variation.degrees,  # clockwise there
        translate=[0, 0],
        scale=variation.scale,
        shear=[0.0],
        interpolation=InterpolationMode.NEAREST if image.ndim == 2 else InterpolationMode.BILINEAR,
        fill=[float(around)] * len(planes),
    )[:, MARGIN:-MARGIN, MARGIN:-MARGIN]
    return found.permute(1, 2, 0).numpy().reshape(image.shape)


def shown(view: View, pixels: Values, variation: Variation) -> Values:
    return view.pixels(WholeImage(pixels), *(Interval(0, side) for side in view.size), variation=variation)


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
@pytest.mark.parametrize("size", [(61, 88), (300, 280)])
def test_images_and_masks_are_those_of_torchvision(size: tuple[int, int], variation: Variation) -> None:
    pixels, view = noise_image(*size), View(size, fit="pad")
    found = shown(view, pixels, variation)
    assert found.dtype == np.uint8
    assert np.abs(found - as_torchvision(pixels, variation, 255)).max() < 0.51  # by rounding
    mask = np.random.default_rng(1).integers(0, 5, size)
    assert (view.mask(mask, variation) != as_torchvision(mask, variation, IGNORED)).mean() < 1e-3  # halves of a pixel


@pytest.mark.parametrize("fit", ["resize", "crop", "pad"])
@pytest.mark.parametrize("patch", [None, 16])
@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.sample(5)
def test_every_box_has_the_pixels_of_the_whole(fit: Any, patch: int | None, turns: int) -> None:
    """Bit by bit, with flips and quarter turns after it, and in floating point."""
    view = View((320, 288) if not turns or patch else (320, 320), fit, patch=patch)
    variation = Variation(
        crop=0.9, flip_rows=True, flip_cols=True, degrees=7.0, scale=0.9, across=0.3, quarter_turns=turns
    )
    for pixels in (noise_image(270, 280), noise_image(400, 390) if fit != "pad" else noise_image(320, 288)):
        for image in (pixels, (pixels / 255).astype(np.float32)):
            whole = shown(view, image, variation)
            for rows, cols in (
                ((0, 7), (0, 288)),
                ((250, 320), (31, 258)),
                ((100, 101), (5, 6)),
                ((255, 257), (0, 288)),
            ):
                box = view.pixels(WholeImage(image), Interval(*rows), Interval(*cols), variation=variation)
                assert np.array_equal(box, whole[slice(*rows), slice(*cols)])


@pytest.mark.parametrize("fit", ["resize", "crop", "pad"])
@pytest.mark.parametrize("turns", [0, 1])
def test_masks_follow_their_images(fit: Any, turns: int) -> None:
    """An image that shows its mask; near borders of classes pixels are means."""
    mask = np.kron(np.random.default_rng(0).integers(0, 2, (10, 10)), np.ones((27, 27), int))
    image = np.repeat((mask * 255).astype(np.uint8)[..., None], 3, axis=2)
    variation = Variation(degrees=9.0, scale=1.2, flip_cols=True, down=0.2, quarter_turns=turns)
    view = View((288, 288), fit)
    seen, classes = shown(view, image, variation)[..., 0], view.mask(mask, variation)
    certain = ((seen == 0) | (seen == 255)) & (classes != IGNORED)
    assert certain.mean() > 0.7
    assert np.array_equal(seen[certain] == 255, classes[certain] == 1)


def test_patches_turn_in_their_places() -> None:
    """Each about its own middle, with its neighbours' pixels in its corners."""
    pixels, patch, variation = noise_image(96, 128), 32, Variation(degrees=15.0, scale=1.05)
    found = shown(View((96, 128), "pad", patch=patch), pixels, variation)
    padded = np.pad(pixels, ((64, 64), (64, 64), (0, 0)), constant_values=255)
    for row in range(3):
        for col in range(4):
            around = padded[32 * row :, 32 * col :][: 5 * 32, : 5 * 32]
            expected = as_torchvision(around, variation, 255)[64:96, 64:96]
            assert np.abs(found[32 * row :, 32 * col :][:32, :32] - expected).max() < 0.51


def test_drawn_angles_and_scales_leave_other_numbers_as_they_are() -> None:
    plain, moved = Augmentation(turns=4, stains=0.1), Augmentation(turns=4, stains=0.1, degrees=15.0, scale=(0.8, 1.2))
    drawn = [moved.draw(0, 0, index) for index in range(200)]
    assert [replace(each, degrees=0.0, scale=1.0) for each in drawn] == [plain.draw(0, 0, i) for i in range(200)]
    for values, least, most in (([v.degrees for v in drawn], -15, 15), ([v.scale for v in drawn], 0.8, 1.2)):
        assert least <= min(values) < least + (most - least) / 20
        assert most - (most - least) / 20 < max(values) <= most
    with pytest.raises(ValueError, match="scale"):
        Augmentation(scale=(1.2, 0.8))
