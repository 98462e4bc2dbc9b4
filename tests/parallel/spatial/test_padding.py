"""Padding in every mode, and cropping by negative padding, on tiles are those of the whole image."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, Traffic, chosen, functions, modules, table_test
from tests.pool.ranks import Ranks, on_ranks

SPREAD = {
    "constant": lambda x: F.pad(x, (1, 2, 3, 4)),
    "constant value": lambda x: F.pad(x, (1, 2, 0, 3), value=-7.5),
    "constant wider than the image": lambda x: F.pad(x, (20, 0, 0, 20)),
    "one side": lambda x: F.pad(x, (0, 0, 2, 0)),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)),
    "rows, columns and channels": lambda x: F.pad(x, (1, 0, 0, 2, 1, 0), value=2.0),
    "crop": lambda x: F.pad(x, (-1, -2, -2, -1)),
    "crop and pad": lambda x: F.pad(x, (-3, 2, 3, -2)),
    "reflect, channels too": lambda x: F.pad(x, (1, 2, 0, 1, 3, 1), mode="reflect"),
    "replicate, channels cropped": lambda x: F.pad(x, (1, 2, 0, 1, -1, 5), mode="replicate"),
    "circular, channels too": lambda x: F.pad(x, (1, 2, 0, 1, 4, 2), mode="circular"),
    "reflect channels alone": lambda x: F.pad(x, (0, 0, 0, 0, 3, 1), mode="reflect"),
    "reflect": lambda x: F.pad(x, (2, 1, 3, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1, 9, 4), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1, 3, 4), mode="circular"),
    "replicate what is cropped away": lambda x: F.pad(x, (-x.shape[3], 5, 3, -x.shape[2]), mode="replicate"),
    "replicate and crop": lambda x: F.pad(x, (2, -3, -1, 4), mode="replicate"),
    "reflect and crop": lambda x: F.pad(x, (-2, 4, 3, -2), mode="reflect"),
    "circular, as wide as the image": lambda x: F.pad(x, (x.shape[3], 1, 0, x.shape[2]), mode="circular"),
    "circular on one side": lambda x: F.pad(x, (0, 4, 0, 0), mode="circular"),
    "constant, along a batch too": lambda x: F.pad(x, (1, 0, 0, 1, 0, 0, 0, 0), value=1.5),
    "circular and crop": lambda x: F.pad(x, (-2, 3, 2, -1), mode="circular"),
    "pad, then pool": lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 2),
    "roll channels": lambda x: x.roll(1, 1),
}
CASES = functions(SPREAD)
CASES |= modules(
    lambda: nn.ZeroPad2d(2),
    lambda: nn.ConstantPad2d((1, 2, 3, 0), 3.5),
    lambda: nn.ReflectionPad2d(4),
    lambda: nn.ReplicationPad2d((0, 7, 7, 0)),
    lambda: nn.CircularPad2d((5, 3, 2, 4)),
    lambda: nn.Sequential(nn.ReflectionPad2d(3), nn.Conv2d(4, 4, 7, stride=2), nn.ReplicationPad2d(1)),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.CircularPad2d(1), nn.Conv2d(4, 4, 3)),
)

test_padding_equals_that_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


test_padding_of_parts_of_few_rows_and_of_none = pytest.mark.sample(1)(
    table_test(__name__, [Arrangement(1, 3, style="empty"), Arrangement(3, 1, style="uneven"), Arrangement(1, 4)])
)


def count_what_travels(comm: Communicator) -> dict[str, int]:
    x = spatial.shard(torch.randn(1, 1, 8, 20), spatial.Grid(comm, cols=comm.size))
    traffic, found = Traffic(comm), {}
    for mode in ("constant", "reflect", "replicate", "circular"):
        traffic.clear()
        F.pad(x, (2, 3, 1, 0), mode=mode)
        found[mode] = traffic.pixels
    return found


def test_nothing_travels_but_the_strips_that_others_show(ranks: Ranks) -> None:
    """Only circular padding shows what another rank has: 2 and 3 columns, of 8 rows and the one that is added."""
    first, inner, last = ranks(3).run(count_what_travels)
    assert first == {"constant": 0, "reflect": 0, "replicate": 0, "circular": 9 * 3}
    assert last == {"constant": 0, "reflect": 0, "replicate": 0, "circular": 9 * 2}
    assert not any(inner.values())


@on_ranks(2)
def test_more_reflection_than_image_is_refused(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(1, 1, 4, 4), spatial.Grid(comm, cols=2))
    with pytest.raises(ValueError, match="padding of 4 in mode 'reflect' must be at most 3 for 4 pixels"):
        F.pad(x, (4, 0), mode="reflect")
