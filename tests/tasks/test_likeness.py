"""mpi4dl.tasks.likeness: PSNR, SSIM and MAE are scikit-image's of whole images, in whatever bands they come."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from skimage import metrics

from mpi4dl.tasks.likeness import Likeness
from mpi4dl.tasks.metrics import make_metric

RANDOM = np.random.default_rng(0)
TARGET = RANDOM.random((3, 50, 37))
MADE = TARGET + 0.1 * RANDOM.standard_normal(TARGET.shape)


@pytest.mark.parametrize("cuts", [(0, 50), (0, 1, 2, 5, 11, 50), (*range(0, 50, 7), 50), (0, 45, 50)])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_in_bands(cuts: tuple[int, ...], channels: int) -> None:
    made, target = MADE[:channels], TARGET[:channels]
    alike = Likeness()
    for top, bottom in pairwise(cuts):
        alike.add(torch.from_numpy(made[:, top:bottom]), torch.from_numpy(target[:, top:bottom]))
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1}
    assert alike.values() == {
        "psnr": pytest.approx(metrics.peak_signal_noise_ratio(target, made, data_range=1), rel=1e-12),
        "ssim": pytest.approx(metrics.structural_similarity(target, made, channel_axis=0, **options), rel=1e-12),
        "mae": pytest.approx(np.abs(made - target).mean(), rel=1e-12),
    }


def test_equal_images_and_small_ones() -> None:
    alike = Likeness()
    alike.add(torch.ones(1, 10, 30), torch.ones(1, 10, 30))
    found = alike.values()
    assert (found["psnr"], found["mae"]) == (math.inf, 0)
    assert math.isnan(found["ssim"])  # fewer rows than a window


def test_psnr_of_several_images_is_that_of_all_their_pixels() -> None:
    whole, parts = (make_metric("image", "psnr", 3, -100) for _ in range(2))
    made, target = torch.from_numpy(MADE), torch.from_numpy(TARGET)
    whole.update(made, target)
    for rows in (slice(0, 20), slice(20, 50)):
        part = make_metric("image", "psnr", 3, -100)
        part.update(made[:, rows], target[:, rows])
        parts.merge_state(part)
    assert float(whole.compute()) == pytest.approx(metrics.peak_signal_noise_ratio(TARGET, MADE, data_range=1))
    assert float(parts.compute()) == pytest.approx(float(whole.compute()), rel=1e-12)
