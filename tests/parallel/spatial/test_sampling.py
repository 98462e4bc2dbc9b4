"""Sampling at any places is that of the whole image."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, Arrangement, check_table, functions
from tests.pool.ranks import Ranks


def places(x: Tensor, depth: int = 2) -> Tensor:
    """Some beside the image, the same on every rank."""
    return torch.rand(x.shape[0], 7, 11, depth, generator=torch.Generator().manual_seed(3)) * 2.4 - 1.2


def turn(x: Tensor) -> Tensor:
    """An affine map for each image, made of the image."""
    return x.mean((1, 2, 3)).view(-1, 1, 1) * torch.tensor([[0.8, -0.6, 0.1], [0.6, 0.8, 0.2]])


CASES = {
    **functions(
        {
            "grid_sample, everybody's places": lambda x: F.grid_sample(x, places(x), align_corners=False),
            "grid_sample, spread places": lambda x: F.grid_sample(
                x, x[:, :2].tanh().permute(0, 2, 3, 1), mode="bicubic", align_corners=True
            ),
            "grid_sample of a plain image": lambda x: F.grid_sample(
                places(x, 4).permute(0, 3, 1, 2), x[:, :2].permute(0, 2, 3, 1), align_corners=False
            ),
            "grid_sample, nearest, reflected": lambda x: F.grid_sample(
                x, 2 * places(x), "nearest", "reflection", False
            ),
            "affine_grid": lambda x: F.grid_sample(x, F.affine_grid(turn(x), (3, 4, 6, 7), False), align_corners=False),
        }
    ),
}


@pytest.mark.parametrize("arrangement", SOME_ARRANGEMENTS, ids=str)
def test_samples_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
