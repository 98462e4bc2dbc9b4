"""Transposed convolutions on tiles are those of the whole image."""

import pytest
from torch import nn

from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, check_table, chosen, modules
from tests.pool.ranks import Ranks

CASES = modules(
    lambda: nn.ConvTranspose2d(4, 6, 1),
    lambda: nn.ConvTranspose2d(4, 6, 1, stride=2),
    lambda: nn.ConvTranspose2d(4, 6, 2, stride=2),
    lambda: nn.ConvTranspose2d(4, 6, 2, stride=3),
    lambda: nn.ConvTranspose2d(4, 6, 3, bias=False),
    lambda: nn.ConvTranspose2d(4, 6, 3, padding=1),
    lambda: nn.ConvTranspose2d(4, 6, 3, padding=2),
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    lambda: nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1),
    lambda: nn.ConvTranspose2d(4, 6, 5, stride=3, padding=2, output_padding=2),
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=2, dilation=2, output_padding=1),
    lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(1, 2), padding=(1, 0)),
    lambda: nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1, groups=2),
    lambda: nn.ConvTranspose2d(4, 4, 7, stride=2, padding=3, output_padding=1, groups=4),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2)),
)


@pytest.mark.parametrize("arrangement", chosen(ARRANGEMENTS), ids=str)
def test_transposed_convolutions_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
