"""How alike two images are, from bands of their rows: PSNR, SSIM and the mean absolute error of whole images.

They are those of scikit-image: `peak_signal_noise_ratio` with `data_range=1`, and `structural_similarity` with also
`gaussian_weights=True, sigma=1.5, use_sample_covariance=False`, the mean over channels. As there, values below 0 or
above 1 are not clipped; files of integers, which `mpi4dl predict` writes, are clipped and rounded.

Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity".
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

SIGMA = 1.5
RADIUS = 5  # 3.5 sigma, rounded
SIDE = 2 * RADIUS + 1
C1, C2 = 0.01**2, 0.03**2  # of values from 0 to 1


class Likeness:
    """Sums over an image that comes in bands from top to bottom; no more than a band is in memory."""

    def __init__(self) -> None:
        self._absolute = self._squared = self._similar = 0.0
        self._num_values = self._num_windows = 0
        self._last: Tensor | None = None

    def add(self, made: Tensor, target: Tensor) -> None:
        """The next rows of both, (channels, rows, columns)."""
        both = torch.stack((made.double(), target.double()))
        difference = both[0] - both[1]
        self._absolute += float(difference.abs().sum())
        self._squared += float(difference.square().sum())
        self._num_values += difference.numel()
        both = both if self._last is None else torch.cat((self._last, both), 2)
        if min(both.shape[2:]) >= SIDE:
            found = similarity(both[0], both[1])
            self._similar += float(found.sum())
            self._num_windows += found.numel()
        self._last = both[:, :, -(SIDE - 1) :].clone()

    def values(self) -> dict[str, float]:
        """The metrics; SSIM is NaN of images that are smaller than its window of 11 px."""
        mean = self._squared / self._num_values
        return {
            "psnr": -10 * math.log10(mean) if mean > 0 else math.inf if mean == 0 else math.nan,
            "ssim": self._similar / self._num_windows if self._num_windows else math.nan,
            "mae": self._absolute / self._num_values,
        }


def similarity(made: Tensor, target: Tensor) -> Tensor:
    """The structural similarity at each window that lies inside, (channels, rows - 10, columns - 10)."""
    brightness, structure = similarities(made[None], target[None])
    return (brightness * structure)[0]


def similarities(made: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How alike brightness is at each window inside, and contrast and structure: (N, channels, rows - 10, columns - 10)
    of images (N, channels, rows, columns).
    """
    num_channels = made.shape[1]
    places = torch.arange(-RADIUS, RADIUS + 1, dtype=made.dtype, device=made.device)
    window = torch.exp(-0.5 * (places / SIGMA) ** 2)
    window = (window / window.sum()).expand(5 * num_channels, 1, SIDE)
    fields = torch.cat((made, target, made * made, target * target, made * target), 1)
    down = F.conv2d(fields, window[..., None], groups=len(window))
    x, y, xx, yy, xy = F.conv2d(down, window[:, :, None], groups=len(window)).split(num_channels, 1)
    varies_x, varies_y, together = xx - x * x, yy - y * y, xy - x * y
    brightness = (2 * x * y + C1) / (x * x + y * y + C1)
    return brightness, (2 * together + C2) / (varies_x + varies_y + C2)
