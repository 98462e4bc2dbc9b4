"""Interpolation in every mode, and pixel shuffle, on tiles are those of the whole image."""

import pytest
from torch import nn
from torch.nn import functional as F

from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, Case, check_table, chosen, functions, modules
from tests.pool.ranks import Ranks

MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")


def resize(mode: str, **options: object) -> dict[str, Case]:
    name = f"{mode} " + " ".join(f"{key}={value}" for key, value in options.items())
    return functions({name: lambda x: F.interpolate(x, mode=mode, **options)})  # type: ignore[arg-type]


CASES: dict[str, Case] = {}
for mode in MODES:
    CASES |= resize(mode, size=(26, 34))
    CASES |= resize(mode, size=(7, 11))
    CASES |= resize(mode, size=3)
    CASES |= resize(mode, size=(40, 5))
    CASES |= resize(mode, scale_factor=2)
    CASES |= resize(mode, scale_factor=(1.7, 0.6))
    CASES |= resize(mode, scale_factor=2.3, recompute_scale_factor=True)
for mode in ("bilinear", "bicubic"):
    CASES |= resize(mode, size=(26, 34), align_corners=True)
    CASES |= resize(mode, size=(7, 1), align_corners=True)
    CASES |= resize(mode, scale_factor=2, align_corners=True)
    CASES |= resize(mode, scale_factor=0.4, align_corners=True)
    CASES |= resize(mode, size=(13, 20), align_corners=False)
    CASES |= resize(mode, size=(4, 20), antialias=True)
    CASES |= resize(mode, scale_factor=(0.3, 1.5), antialias=True)
    CASES |= resize(mode, size=(5, 5), antialias=True, align_corners=True)
CASES |= modules(
    lambda: nn.Upsample(scale_factor=2),
    lambda: nn.UpsamplingBilinear2d(scale_factor=3),
    lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 4, 3)),
    lambda: nn.PixelShuffle(2),
    lambda: nn.Sequential(nn.Conv2d(4, 18, 3, padding=1), nn.PixelShuffle(3), nn.AvgPool2d(3, 2)),
)
CASES |= modules(lambda: nn.PixelUnshuffle(2), sizes=[(14, 18), (6, 8)])
CASES |= modules(lambda: nn.PixelUnshuffle(3), sizes=[(15, 9)])
CASES |= functions({"area": lambda x: F.interpolate(x, (3, 5), mode="area")}, spread=False)


@pytest.mark.parametrize("arrangement", chosen(ARRANGEMENTS), ids=str)
def test_resampling_equals_that_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
