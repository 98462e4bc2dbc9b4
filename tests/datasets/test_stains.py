"""mpi4dl.datasets.stains: the published formulas in float64, scikit-image where it has the same, and box by box."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl.datasets import Augmentation, View
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.stains import HED, LEAST_PIXELS, METHODS, StainNormalization, densities_of, stain_variation
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image, whole

COLOURS = np.array([[0.6, 0.75, 0.28], [0.2, 0.9, 0.4]])
COLOURS /= np.linalg.norm(COLOURS, axis=1, keepdims=True)


def stained(height: int = 90, width: int = 110, colours: np.ndarray = COLOURS, strong: float = 1.0) -> np.ndarray:
    """Pixels with random concentrations of two stains, some of them of one alone; the upper rows are glass."""
    random = np.random.default_rng(3)
    concentrations = strong * random.gamma(2.0, 0.5, (height, width, 2)) * random.integers(0, 2, (height, width, 2))
    concentrations[:5] = 0
    return np.clip(np.rint(255 * np.exp(-concentrations @ colours)), 0, 255).astype(np.uint8)


def normalised(pixels: np.ndarray, method: str) -> np.ndarray:
    normalization = StainNormalization(method, METHODS[method][1])
    measured = normalization.measured(pixels.reshape(-1, 3))
    assert measured is not None
    return normalization.recolour(measured)(pixels)


def test_the_variation_of_stains_is_that_of_the_colour_space_of_scikit_image() -> None:
    color = pytest.importorskip("skimage.color")
    raw = color.rgb_from_hed
    concentrations = np.random.default_rng(0).uniform(0.005, 0.03, (40, 50, 3))
    pixels = np.rint(255 * color.hed2rgb(concentrations)).astype(np.uint8)
    factors, added = np.array([1.1, 0.9, 1.05]), np.array([0.05, 0.02, 0.01])
    unit = -np.log(1e-6) * np.linalg.norm(raw, axis=1)  # of concentrations in scikit-image, for colours of length 1
    found = color.rgb2hed(pixels)
    sure = (found > 0).all(-1)  # scikit-image sets negative concentrations to 0
    assert sure.mean() > 0.8
    expected = 255 * color.hed2rgb(found * factors + added / unit)
    ours = stain_variation((*factors, *added))(pixels)
    assert np.abs(ours - expected)[sure].max() <= 0.51
    assert np.allclose(HED * np.linalg.norm(raw, axis=1, keepdims=True), raw)


def test_no_variation_changes_nothing_and_every_byte_stays_a_byte() -> None:
    pixels = noise_image(64, 64)
    assert np.array_equal(stain_variation((1, 1, 1, 0, 0, 0))(pixels)[pixels > 0], pixels[pixels > 0])
    for numbers in ((2, 0, 2, 1, -1, 1), (0, 2, 0, -1, 1, -1)):
        made = stain_variation(numbers)(pixels)
        exact = 255 * np.exp(-(densities_of(pixels) @ np.linalg.inv(HED) * numbers[:3] + numbers[3:]) @ HED)
        assert np.abs(made - np.clip(exact, 0, 255)).max() <= 0.51


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_box_has_the_normalised_colours_of_the_whole(data: st.DataObject) -> None:
    pixels = stained(70, 70)
    rows, cols = (Interval(*sorted(data.draw(st.tuples(st.integers(0, 70), st.integers(0, 70))))) for _ in "rc")
    box = (slice(*rows), slice(*cols))
    for method, (kind, reference) in METHODS.items():
        measured = kind.measured(pixels.reshape(-1, 3))
        assert measured is not None
        recolour = StainNormalization(method, reference).recolour(measured)
        assert np.array_equal(recolour(pixels[box]), recolour(pixels)[box])


def test_macenko_is_the_published_method() -> None:
    pixels = stained()
    densities = -np.log(np.maximum(pixels.reshape(-1, 3), 1) / 255)
    tissue = densities[(densities >= 0.15).all(1)]
    plane = np.linalg.svd(tissue, full_matrices=False)[2][:2].T
    plane *= np.where(plane.sum(0) < 0, -1, 1)
    angles = np.arctan2(tissue @ plane[:, 1], tissue @ plane[:, 0])
    ends = [plane @ [np.cos(a), np.sin(a)] for a in np.percentile(angles, (1, 99))]
    own = np.array(sorted(ends, key=lambda colour: -colour[0]))
    largest = np.percentile(np.linalg.lstsq(own.T, tissue.T, rcond=None)[0], 99, axis=1)
    reference = np.array(METHODS["macenko"][1])
    concentrations = np.linalg.lstsq(own.T, densities.T, rcond=None)[0].T * reference[6:] / largest
    expected = np.clip(255 * np.exp(-concentrations @ reference[:6].reshape(2, 3)), 0, 255)
    found = normalised(pixels, "macenko")
    assert np.abs(found.reshape(-1, 3) - expected).max() <= 0.51
    assert own == pytest.approx(COLOURS, abs=0.03)
    assert (found[:5] == 255).all()


def test_reinhard_is_the_published_method_and_leaves_glass_white() -> None:
    pixels = stained()
    cones = [[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]]
    lab_of = np.diag([3**-0.5, 6**-0.5, 2**-0.5]) @ [[1, 1, 1], [1, 1, -2], [1, -1, 0]]
    flat = np.maximum(pixels.reshape(-1, 3).astype(float), 1)
    coloured = flat.min(1) <= 255 * np.exp(-0.15)
    lab = np.log(flat @ np.transpose(cones)) @ lab_of.T
    mean, std = np.reshape(METHODS["reinhard"][1], (2, 3))
    moved = (lab - lab[coloured].mean(0)) / lab[coloured].std(0) * std + mean
    expected = np.clip(np.exp(moved @ np.linalg.inv(lab_of).T) @ np.linalg.inv(cones).T, 0, 255)
    found = normalised(pixels, "reinhard")
    dense, glass = (flat.min(1) <= 255 * np.exp(-0.2)), flat.min(1) >= 255 * np.exp(-0.1)
    assert np.abs(found.reshape(-1, 3) - expected)[dense].max() <= 0.51
    assert np.array_equal(found.reshape(-1, 3)[glass], pixels.reshape(-1, 3)[glass])
    assert (found[:5] == 255).all()


@pytest.mark.parametrize("method", METHODS)
def test_slides_of_two_laboratories_become_alike(method: str) -> None:
    """The same tissue in other stains: the difference nearly goes away."""
    other = np.array([[0.55, 0.78, 0.3], [0.15, 0.85, 0.5]])
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    one, two = stained(), stained(colours=other, strong=0.8)
    before, after = (
        np.abs(a.astype(float) - b).mean() for a, b in ((one, two), (normalised(one, method), normalised(two, method)))
    )
    assert after < 0.35 * before


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_measured_is_none(method: str) -> None:
    """Glass, one colour, and too few pixels."""
    measured = METHODS[method][0].measured
    grey = np.full((2 * LEAST_PIXELS, 3), 120, np.uint8)
    assert measured(np.full((2 * LEAST_PIXELS, 3), 250, np.uint8)) is None
    assert measured(grey) is None
    assert measured(stained()[:12].reshape(-1, 3)[: LEAST_PIXELS // 2]) is None
    assert measured(np.empty((0, 3), np.uint8)) is None


def test_stains_of_grey_images_are_refused() -> None:
    view = View((4, 4), augmentation=Augmentation(stains=0.1), mean=(0.0,), std=(1.0,))
    with pytest.raises(ValueError, match="stains need pictures of 3 channels of bytes, these have 1 of uint8"):
        view.tile(WholeImage(noise_image(4, 4, 1)), *whole(4, 4), variation=view.variation(0, 0))
