"""What an in-place operator changes is what it changes in plain PyTorch, or it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, arrange
from tests.pool.ranks import on_ranks


def add_to_channels(x: Tensor) -> Tensor:
    x[:, 1:3] += 1
    x[:, 1:3] *= x[:, :1]
    x[:, 0] = 3
    return x


def write_rows(x: Tensor) -> Tensor:
    x[:, :, 1:5] = 3
    x[..., 2:4] *= x[..., 5:7]
    x[:, 1, 2] = 5
    x[:, :, :, -1] = 7
    x[:, 1:3, ::2] = torch.arange(9.0)
    return x


def write_channels(x: Tensor) -> Tensor:
    x[:, [0, 2]] = 3
    x[:, 1:][:, [2, 0], 1:5] = x[:, :2, 1:5] * 2
    x.data[0, [1, 3]] = 5
    return x


def write_by_mask(x: Tensor) -> Tensor:
    x[x > 0.5] = 0
    x[torch.arange(8.0).view(8, 1).expand(2, 4, 8, 9) == 3] = -1
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
    "data": lambda x: x.data,
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
    "zero_ of channels": lambda x: x[:, 1:3].zero_(),
    "rows": lambda x: x[:, :, 1:3],
    "every second row of the last columns": lambda x: x[:, :, ::2, 5:],
    "narrow": lambda x: x.narrow(2, 1, 4),
    "a chunk of rows": lambda x: x.chunk(2, 2)[0],
    "relu of rows in place": lambda x: F.relu(x[:, :, 2:6], inplace=True),
    "a view of rows": lambda x: x[:, :, 2:6].unsqueeze(0).permute(0, 3, 4, 2, 1),
    "written rows": write_rows,
    "channels written by lists": write_channels,
    "a mask": write_by_mask,
}
# What is a copy where PyTorch makes a view: to write to it is refused, or to read what it is a copy of.
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "windows of rows": lambda x: x.unfold(2, 3, 1),
    "a view of windows": lambda x: x.unfold(2, 3, 2).unsqueeze(0),
    "a view of a view of windows": lambda x: x.unfold(2, 3, 1).transpose(0, 1)[:, 1:],
    "windows of windows": lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2),
    "pixels in lines of 16": lambda x: x.view(-1, 16),
    "one row": lambda x: x[:, :, 3:4].squeeze(2),
    "rows of some channels": lambda x: x.flatten(1, 2)[:, 5:20],
}
# What PyTorch copies, and what would be a view of the local part on ranks without row 0, or with one sample.
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, :, 1:].contiguous(),
    "rows of some channels": lambda x: x[:, 1:3].narrow(2, 1, 7).flatten(1, 2),
    "rows of channels that come last": lambda x: x.contiguous(memory_format=torch.channels_last)[:, :, 1:].to(
        memory_format=torch.channels_last
    ),
    "samples second": lambda x: x.transpose(0, 1).contiguous(),
    "samples second, in one dim": lambda x: x.transpose(0, 1).reshape_as(torch.empty(8, 8, 9)),
    "some channels": lambda x: x.cpu()[:, 1:3].flatten(0, 1),
    "a view": lambda x: x[:, :, 1:].mT.mT.flatten(0, 1),
}


# Views of what a rank owns: copies where it holds more.
FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels in one dim": lambda x: x.flatten(2),
    "pixels as tokens": lambda x: x.flatten(2).transpose(1, 2),
    "all in one dim": lambda x: x.view(-1),
    "windows": lambda x: x.view(2, 4, 2, 4, 9).transpose(2, 3),
}


def unlike_plain(
    functions: dict[str, Any], image: torch.Tensor, comm: Communicator, arrangement: Arrangement
) -> list[str]:
    """The functions after whose results were written to they, or their source, differ from plain PyTorch's."""
    wrong = []
    for name, function in functions.items():
        ours, plain = arrange(image, comm, arrangement) * 1, image * 1
        our_result, plain_result = function(ours), function(plain)
        our_result.add_(1)
        plain_result.add_(1)
        same = torch.equal(spatial.gather(ours), plain) and torch.equal(spatial.gather(our_result), plain_result)
        wrong += [] if same else [name]
    return wrong


@pytest.mark.parametrize("arrangement", [Arrangement(2, 1), Arrangement(2, 2, style="wide")], ids=str)
@on_ranks()
def test_in_place_operators_change_what_they_change_in_plain_pytorch(
    comm: Communicator, arrangement: Arrangement
) -> None:
    image = torch.randn(2, 4, 8, 9)
    wide = arrangement.style == "wide"
    wrong = unlike_plain(EXACT if wide else EXACT | FLAT, image, comm, arrangement)
    for function in (REFUSED | FLAT if wide else REFUSED).values():
        x = arrange(image, comm, arrangement) * 1
        copy = function(x)
        with pytest.raises(spatial.NoRule, match="a copy"):
            x.add_(1)
        with pytest.raises(spatial.NoRule, match="copy"):
            spatial.gather(x + copy.add_(1).sum())
    assert not wrong, wrong


@pytest.mark.parametrize("arrangement", [Arrangement(4, 1), Arrangement(2, 1, batch=2)], ids=str)
@on_ranks(4)
def test_what_pytorch_copies_is_no_view_of_the_local_part(comm: Communicator, arrangement: Arrangement) -> None:
    assert unlike_plain(COPIES, torch.randn(2, 4, 8, 9), comm, arrangement) == []


@on_ranks(2)
def test_the_operand_that_is_written_keeps_its_tiles(comm: Communicator) -> None:
    """In place, the first operand keeps its tiles; the others come to it. Of a halo it keeps what all have."""
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
    view = wide[:, 1:3]
    wide += spatial.shard(image, grid)
    assert not wide.layout.wide
    assert not view.layout.wide
    assert torch.equal(spatial.gather(wide), 2 * image)
    assert torch.equal(spatial.gather(view), 2 * image[:, 1:3])


@on_ranks(2)
def test_copies_count_as_long_as_they_matter(comm: Communicator) -> None:
    """A copy that is there no longer, or that nobody reads the source of, is in nobody's way."""
    image = torch.randn(2, 4, 8, 9)
    x = spatial.shard(image, spatial.Grid(comm, rows=2)) * 1
    lines = x.view(-1, 16)
    lines.mul_(2)
    assert torch.equal(lines, 2 * image.view(-1, 16))
    with pytest.raises(spatial.NoRule, match="was written in place"):
        x + 1
    y = spatial.shard(image, spatial.Grid(comm, rows=2)) * 1
    assert y.view(-1, 16).shape == (36, 16)
    y.add_(1)
    assert torch.equal(spatial.gather(y), image + 1)
    y.unfold(2, 2, 2).unsqueeze(0).add_(1)  # windows of own rows, side by side, are a view
    assert torch.allclose(spatial.gather(y), image + 2)
    with torch.inference_mode():
        z = spatial.shard(image, spatial.Grid(comm, rows=2)) * 1
        z.view(-1, 16).add_(1)
        with pytest.raises(spatial.NoRule, match="was written in place"):
            z + 1


@on_ranks(4)
def test_what_is_written_in_place_keeps_its_gradients(comm: Communicator) -> None:
    """Gradients of what was written arrive, and a reentrant checkpoint, which would swallow them, is still refused."""
    image, weight = (
        torch.randn(1, 4, 8, 8, dtype=torch.float64),
        torch.ones((), dtype=torch.float64, requires_grad=True),
    )
    x = spatial.shard(image, spatial.Grid(comm, rows=2, cols=2))
    canvas, expected = torch.zeros_like(x), torch.zeros_like(image)
    canvas[:, :2] = x[:, :2] * weight
    canvas[:, :, 3:6, 2:7].mul_(2)
    expected[:, :2] = image[:, :2] * weight
    expected[:, :, 3:6, 2:7].mul_(2)
    assert torch.equal(spatial.gather(canvas), expected)
    gradient = torch.autograd.grad((canvas * canvas).sum() / comm.size, weight)[0]
    assert torch.allclose(comm.all_reduce(gradient), torch.autograd.grad((expected * expected).sum(), weight)[0])
    with pytest.raises(spatial.NoRule, match="use_reentrant=True"):
        spatial.gather(checkpoint(torch.sin, canvas, use_reentrant=True)).sum().backward()
