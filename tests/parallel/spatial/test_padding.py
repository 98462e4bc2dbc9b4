"""Padding in every mode, and cropping by negative padding, on tiles are those of the whole image."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, check_table, chosen, functions, modules
from tests.pool.ranks import Ranks

CASES = {
    **functions(
        {
            "constant": lambda x: F.pad(x, (1, 2, 3, 4)),
            "constant value": lambda x: F.pad(x, (1, 2, 0, 3), value=-7.5),
            "constant wider than the image": lambda x: F.pad(x, (20, 0, 0, 20)),
            "one side": lambda x: F.pad(x, (0, 0, 2, 0)),
            "channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)),
            "rows, columns and channels": lambda x: F.pad(x, (1, 0, 0, 2, 1, 0), value=2.0),
            "crop": lambda x: F.pad(x, (-1, -2, -2, -1)),
            "crop and pad": lambda x: F.pad(x, (-3, 2, 3, -2)),
            "reflect": lambda x: F.pad(x, (2, 1, 3, 4), mode="reflect"),
            "replicate": lambda x: F.pad(x, (2, 1, 9, 4), mode="replicate"),
            "circular": lambda x: F.pad(x, (2, 1, 3, 4), mode="circular"),
            "replicate what is cropped away": lambda x: F.pad(x, (-x.shape[3], 5, 3, -x.shape[2]), mode="replicate"),
            "replicate and crop": lambda x: F.pad(x, (2, -3, -1, 4), mode="replicate"),
            "reflect and crop": lambda x: F.pad(x, (-2, 4, 3, -2), mode="reflect"),
            "circular and crop": lambda x: F.pad(x, (-2, 3, 2, -1), mode="circular"),
            "pad, then pool": lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 2),
            "roll channels": lambda x: x.roll(1, 1),
        }
    ),
    **modules(
        lambda: nn.ZeroPad2d(2),
        lambda: nn.ConstantPad2d((1, 2, 3, 0), 3.5),
        lambda: nn.ReflectionPad2d(4),
        lambda: nn.ReplicationPad2d((0, 7, 7, 0)),
        lambda: nn.CircularPad2d((5, 3, 2, 4)),
        lambda: nn.Sequential(nn.ReflectionPad2d(3), nn.Conv2d(4, 4, 7, stride=2), nn.ReplicationPad2d(1)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.CircularPad2d(1), nn.Conv2d(4, 4, 3)),
    ),
}


@pytest.mark.parametrize("arrangement", chosen(ARRANGEMENTS), ids=str)
def test_padding_equals_that_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)


def pad_too_much(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(1, 1, 4, 4), spatial.Grid(comm, cols=2))
    with pytest.raises(ValueError, match="padding of 4 in mode 'reflect' must be at most 3 for 4 pixels"):
        F.pad(x, (4, 0), mode="reflect")


def test_more_reflection_than_image_is_refused(ranks: Ranks) -> None:
    ranks(2).run(pad_too_much)
