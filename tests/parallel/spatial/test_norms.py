"""Norms, and what is made of them, along the image are those of the whole."""

import pytest
import torch
from torch.nn import functional as F

from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, Arrangement, check_table, functions
from tests.pool.ranks import Ranks

CASES = {
    **functions(
        {
            "norm of rows": lambda x: x.norm(dim=2),
            "norm, p=1, kept": lambda x: x.norm(1, 3, keepdim=True),
            "norm, p=3": lambda x: torch.norm(x, p=3, dim=2),
            "norm, p=0.5": lambda x: torch.linalg.vector_norm(x, 0.5, 3),
            "norm, p=0": lambda x: torch.linalg.vector_norm(x.round(), 0, 3) + x.sum(3),
            "norm, p=inf, of equals": lambda x: x.clamp(-0.2, 0.2).norm(torch.inf, 2),
            "norm of the image, kept": lambda x: x * x.norm(dim=(2, 3), keepdim=True),
            "norm of zeros": lambda x: x + x.clamp(0, 0).norm(dim=(2, 3), keepdim=True),
            "linalg.norm": lambda x: torch.linalg.norm(x, dim=(2, 3), keepdim=True) * x,
            "response norm": lambda x: x / (x.norm(p=2, dim=(2, 3), keepdim=True).mean(1, keepdim=True) + 1e-6),
            "normalize rows": lambda x: F.normalize(x, dim=2),
            "normalize images": lambda x: F.normalize(x, dim=(2, 3)),
            "normalize, p=1": lambda x: F.normalize(x, 1, 3),
            "cosine_similarity of channels": lambda x: F.cosine_similarity(x, x.roll(1, 1)),
            "cosine_similarity of columns": lambda x: F.cosine_similarity(x, x.detach().flip(1), dim=3),
            "cosine_similarity that broadcasts": lambda x: F.cosine_similarity(x, x.mean(2, keepdim=True), dim=2),
            "cosine_similarity with zeros": lambda x: F.cosine_similarity(x, x.clamp(0, 0), dim=2),
            "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(1)),
        }
    ),
    **functions(
        {
            "norm": lambda x: x.norm(),
            "norm of all": lambda x: torch.linalg.vector_norm(x),
            "linalg.norm of all": lambda x: torch.linalg.norm(x),
            "norm of an image": lambda x: x[0].norm(p=1, dim=(-2, -1)),
            "dist": lambda x: torch.dist(x, x.detach().flip(1), 3),
        },
        spread=False,
    ),
}


@pytest.mark.parametrize("arrangement", SOME_ARRANGEMENTS, ids=str)
def test_norms_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
