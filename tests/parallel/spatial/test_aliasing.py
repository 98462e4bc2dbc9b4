"""What an in-place operator changes is what it changes in plain PyTorch, or it is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, arrange
from tests.pool.ranks import Ranks


def add_to_channels(x: Tensor) -> Tensor:
    x[:, 1:3] += 1
    x[:, 1:3] *= x[:, :1]
    x[:, 0] = 3
    return x


# What makes a tensor of x; then one is added to it in place.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: x[:, 1:3],
    "a channel": lambda x: x[:, 1],
    "a chunk of channels": lambda x: x.chunk(2, 1)[1],
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "reshape": lambda x: x.reshape(2, 2, 2, 8, 9),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "contiguous": lambda x: x.contiguous(),
    "to the same dtype": lambda x: x.to(torch.float32),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "cat of one": lambda x: torch.cat([x], 1),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, False),
    "pooling by one": lambda x: F.avg_pool2d(x, 1, 1) + F.max_pool2d(x, 1, 1),
    "interpolate to the same size": lambda x: F.interpolate(x, size=x.shape[-2:]),
    "interpolate to the same size, bilinear": lambda x: F.interpolate(x, size=x.shape[-2:], mode="bilinear"),
    "pad by nothing": lambda x: F.pad(x, (0, 0, 0, 0)),
    "all rows": lambda x: x[:, :, :],
    "relu in place": lambda x: F.relu(x, inplace=True),
    "written channels": add_to_channels,
    "copy_": lambda x: x.copy_(torch.ones(2, 4, 8, 9)),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 3.0),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, :, 1:3],
    "columns": lambda x: x[..., 2:],
    "narrow": lambda x: x.narrow(2, 1, 4),
    "a chunk of rows": lambda x: x.chunk(2, 2)[0],
    "windows of rows": lambda x: x.unfold(2, 3, 1),
}


def change_in_place(comm: Communicator, arrangement: Arrangement) -> list[str]:
    """The names of those that leave something else than plain PyTorch."""
    image = torch.randn(2, 4, 8, 9)
    wrong = []
    for name, function in EXACT.items():
        ours, plain = arrange(image, comm, arrangement) * 1, image * 1
        our_result, plain_result = function(ours), function(plain)
        our_result.add_(1)
        plain_result.add_(1)
        same = torch.equal(spatial.gather(ours), plain) and torch.equal(spatial.gather(our_result), plain_result)
        wrong += [] if same else [name]
    for name, function in REFUSED.items():
        x = arrange(image, comm, arrangement) * 1
        try:
            function(x).add_(1)
        except spatial.NoRule:
            continue
        wrong.append(name)
    return wrong


@pytest.mark.parametrize("arrangement", [Arrangement(2, 1), Arrangement(2, 2, style="wide")], ids=str)
def test_in_place_operators_change_what_they_change_in_plain_pytorch(ranks: Ranks, arrangement: Arrangement) -> None:
    assert ranks(arrangement.size).run(change_in_place, arrangement) == [[]] * arrangement.size


def change_what_is_broadcast(comm: Communicator) -> None:
    """In place, the first operand keeps its tiles; the others come to it."""
    image = torch.randn(2, 4, 8, 8)
    grid = spatial.Grid(comm, rows=2)
    x = spatial.shard(image, grid) * 1
    other = F.avg_pool2d(spatial.widen(x, 1), 3, 1, 1)
    x += other
    expected = image + F.avg_pool2d(image, 3, 1, 1)
    assert torch.allclose(spatial.gather(x), expected)
    x *= torch.arange(8.0)
    assert torch.allclose(spatial.gather(x), expected * torch.arange(8.0))
    wide = spatial.widen(spatial.shard(image, grid), 2) * 1
    with pytest.raises(spatial.NoRule, match="written in place"):
        wide += spatial.shard(image, grid)


def test_the_operand_that_is_written_keeps_its_tiles(ranks: Ranks) -> None:
    ranks(2).run(change_what_is_broadcast)
