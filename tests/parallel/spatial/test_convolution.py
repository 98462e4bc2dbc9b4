"""Convolutions on tiles of many kernels, strides, paddings and groups, also transposed ones, are those of the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import Window
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.halo import reach
from mpi4dl.parallel.spatial.rules import convolution
from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, chosen, compare_table, modules, table_test
from tests.pool.ranks import Ranks

CASES = {
    **modules(
        lambda: nn.Conv2d(4, 6, 1),
        lambda: nn.Conv2d(4, 6, 1, stride=2),
        lambda: nn.Conv2d(4, 6, 1, padding=1),
        lambda: nn.Conv2d(4, 6, 2),
        lambda: nn.Conv2d(4, 6, 2, stride=2),
        lambda: nn.Conv2d(4, 6, 2, padding=1),
        lambda: nn.Conv2d(4, 6, 3),
        lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False),
        lambda: nn.Conv2d(4, 6, 3, stride=2),
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
        lambda: nn.Conv2d(4, 6, 3, stride=3, padding=1),
        lambda: nn.Conv2d(4, 6, 3, stride=4, padding=2),
        lambda: nn.Conv2d(4, 6, 3, padding=4),
        lambda: nn.Conv2d(4, 6, 4, stride=2, padding=1),
        lambda: nn.Conv2d(4, 6, 5, padding=2),
        lambda: nn.Conv2d(4, 6, 5, stride=3, padding=2),
        lambda: nn.Conv2d(4, 6, 7, stride=2, padding=3, bias=False),
        lambda: nn.Conv2d(4, 6, 7, stride=4, padding=3),
        lambda: nn.Conv2d(4, 6, 11, stride=2, padding=5),
        lambda: nn.Conv2d(4, 6, (1, 7), padding=(0, 3)),
        lambda: nn.Conv2d(4, 6, (7, 1), padding=(3, 0)),
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 0)),
        lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2),
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=4, dilation=3),
        lambda: nn.Conv2d(4, 6, 2, padding=(2, 1), dilation=(3, 1)),
        lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
        lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        lambda: nn.Conv2d(4, 6, 3, padding="same"),
        lambda: nn.Conv2d(4, 6, 4, padding="same"),
        lambda: nn.Conv2d(4, 6, (2, 5), padding="same", dilation=(3, 1)),
        lambda: nn.Conv2d(4, 6, 3, padding="valid"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        lambda: nn.Conv2d(4, 6, 5, stride=2, padding=2, padding_mode="reflect"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(4, 6, 5, padding=(2, 1), padding_mode="circular"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"),
        lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="reflect"),
    ),
    **modules(
        lambda: nn.Conv2d(4, 6, 9, stride=8, padding=4),
        lambda: nn.Conv2d(4, 6, 13),
        lambda: nn.Conv2d(4, 6, 3, padding=6, dilation=6),
        lambda: nn.Conv2d(4, 6, 3, padding=5, padding_mode="reflect"),
        sizes=[(13, 17)],
    ),
    **modules(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 7, padding=6), nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 5, 3)),
    ),
    **{
        f"{name} of whole tiles": case
        for name, case in modules(
            lambda: nn.Conv2d(4, 6, 3, padding=1),
            lambda: nn.Conv2d(4, 6, 7, 2, 3),
            lambda: nn.Conv2d(4, 6, 3, 2),
            lambda: nn.Conv2d(4, 6, 3, 2, 1),
            lambda: nn.Conv2d(4, 6, 4, 2, 1),
            lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
            lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
            lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Upsample(scale_factor=2, mode="bilinear")),
            lambda: nn.Sequential(
                nn.Conv2d(4, 8, 7, 2, 3, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
                nn.Conv2d(8, 8, 3),
            ),
            sizes=[(64, 32), (62, 32)],
        ).items()
    },
}

test_convolutions_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


def always(exchange: Exchange, x: Tensor, weight: Tensor) -> bool:
    return True


def compare_apart(comm: Communicator, arrangement: Arrangement) -> tuple[dict[str, str], int, int]:
    """The table, strips kept apart where they can be: what is wrong, and how many convolutions were in each way."""
    ways, plain = [], convolution.choose

    def choose(*args: Any) -> convolution.Way:
        ways.append(plain(*args))
        return ways[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_pays", always)
        patch.setattr(convolution, "choose", choose)
        wrong = compare_table(comm, __name__, "CASES", arrangement)
    apart = sum(isinstance(way, convolution.Apart) for way in ways)
    return wrong, apart, len(ways) - apart


def ways(comm: Communicator, cases: list[tuple[int, int, torch.dtype]]) -> list[str]:
    """How images of so many channels and pixels are convolved on two tiles."""
    found = []
    for channels, size, dtype in cases:
        tile = torch.empty(1, channels, size, size // 2, dtype=dtype)
        x = spatial.from_tile(tile, spatial.Grid(comm, cols=2), (size, size))
        window, kernel = Window(3, 1, 1, 1), torch.empty(channels, channels, 3, 3, dtype=dtype)
        options = convolution.ConvolutionOptions((1, 1), (1, 0), (1, 1), False, (0, 0), 1)
        reached = reach(x, {1: window, 2: window}, itself=(1,))
        found.append(type(convolution.choose(reached, x, tile, kernel, (window, window), options)).__name__)
    return found


@pytest.mark.parametrize("arrangement", chosen(ARRANGEMENTS), ids=str)
@pytest.mark.sample(1)
def test_convolutions_that_keep_their_strips_apart_are_the_same(ranks: Ranks, arrangement: Arrangement) -> None:
    results = ranks(arrangement.size).run(compare_apart, arrangement)
    assert [wrong for wrong, _, _ in results] == [{}] * arrangement.size
    if arrangement.style == "even" and arrangement.batch == 1:
        assert sum(apart for _, apart, _ in results) > 20 * arrangement.size


def test_the_way_of_a_convolution_is_chosen_by_what_copies_cost(ranks: Ranks) -> None:
    """Large tiles are not copied; small ones are, those of many channels, and halves, that would be rounded twice."""
    cases = [(8, 512, torch.float32), (8, 64, torch.float32), (512, 64, torch.float32), (8, 512, torch.bfloat16)]
    assert ranks(2).run(ways, cases) == [["Apart", "Joined", "Joined", "Joined"]] * 2


TRANSPOSED = modules(
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

test_transposed_convolutions_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS), "TRANSPOSED")
