"""Views, slices, joins and splits of tiles are those of the whole image; one pixel against many; copies."""

import torch
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import ARRANGEMENTS, chosen, functions, table_test
from tests.pool.ranks import on_ranks

SPREAD = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute, a convolution's way back": lambda x: x.permute(2, 3, 0, 1).permute((2, 3, 0, 1)),
    "torch.permute": lambda x: torch.permute(x, (3, 1, 0, 2)),
    "transpose": lambda x: x.transpose(1, 2),
    "transpose of rows and columns": lambda x: x.transpose(-1, -2),
    "swapaxes": lambda x: torch.swapaxes(x, 1, 3),
    "movedim": lambda x: x.movedim(1, -1),
    "movedim of several": lambda x: x.movedim((1, 2), (3, 0)),
    "mT": lambda x: x.mT,
    "T of a matrix": lambda x: x[0, 0].T,
    "t of a matrix": lambda x: x[0, 0].t(),
    "mH": lambda x: x.mH,
    "view of channels": lambda x: x.view(x.shape[0], 2, 2, x.shape[2], x.shape[3]),
    "reshape": lambda x: x.reshape(x.shape[0], 4, *x.shape[2:]),
    "reshape as": lambda x: (x + 1).reshape_as(x),
    "view as": lambda x: x.view_as(x),
    "shuffle channels": lambda x: x.view(-1, 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
    "torch.channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze what is not one": lambda x: x.squeeze(1),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "expand a new dim": lambda x: x.expand(2, *x.shape),
    "expand an axis": lambda x: x * x[:, :, 1:2].expand(-1, -1, x.shape[2], -1),
    "expand as": lambda x: x[:, :1].expand_as(x),
    "repeat": lambda x: x.repeat(1, 3, 1, 1),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "contiguous channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a channel": lambda x: x[:, 1],
    "the last channel": lambda x: x[:, -1],
    "channels": lambda x: x[:, 1:3],
    "every second channel": lambda x: x[:, ::2],
    "None and ...": lambda x: x[:, None, ..., :],
    "... and channels": lambda x: x[..., 1:3, :, :],
    "rows": lambda x: x[:, :, 1:-1],
    "rows and columns": lambda x: x[..., 1:4, 2:],
    "every second row": lambda x: x[:, :, ::2],
    "every second row from one, every third column": lambda x: x[:, :, 1::2, ::3],
    "one row, kept": lambda x: x[:, :, 2:3],
    "the last columns": lambda x: x[..., -3:],
    "all of it": lambda x: x[:],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "narrow rows": lambda x: torch.narrow(x, 2, 1, 3),
    "narrow the last rows": lambda x: x.narrow(-2, -2, 2),
    "select": lambda x: x.select(1, 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 2])),
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split(3, 1),
    "split by sizes": lambda x: x.split([1, 2, 1], dim=1),
    "split rows": lambda x: x.split(2, 2),
    "chunk": lambda x: x.chunk(2, 1),
    "chunk columns": lambda x: x.chunk(3, dim=3),
    "tensor_split": lambda x: x.tensor_split((1, 3), dim=1),
    "cat": lambda x: torch.cat([x, 2 * x, x[:, :1]], 1),
    "cat of the batch's channels by name": lambda x: torch.cat(tensors=[x, x], dim=-3),
    "concat by axis": lambda x: torch.concat([x, x], axis=1),
    "cat with a plain tensor": lambda x: torch.cat([x, torch.ones(3, 1, *x.shape[2:])], 1),
    "cat with nothing": lambda x: torch.cat([x, torch.empty(0)], 1),
    "stack": lambda x: torch.stack([x, -x], 2),
    "stack at the end": lambda x: torch.stack([x, -x], -1),
    "space to depth": lambda x: torch.cat([x[..., :4:2, :8:2], x[..., 1:5:2, 1:9:2]], 1),
}
WHOLE = {
    "view that merges batch and channels": lambda x: x.view(-1, x.size(2), x.size(3)),
    "flatten batch and channels": lambda x: x.flatten(0, 1),
    "flatten the image": lambda x: x.flatten(1),
    "flatten all": lambda x: x.flatten(),
    "reshape rows and columns together": lambda x: x.reshape(x.shape[0], x.shape[1], -1),
    "view of pixels as tokens": lambda x: x.flatten(2).transpose(1, 2),
}
CASES = functions(SPREAD) | functions(WHOLE, spread=False)

test_views_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


SPREAD_PITFALLS = {
    "an image times its mean, by a window as large as the image": lambda x: x * F.avg_pool2d(x, x.shape[2:]),
    "an image plus the largest of each row": lambda x: x + F.max_pool2d(x, (1, x.shape[3])),
    "padding by nothing is a copy": lambda x: F.relu_(F.pad(x * 1, (0, 0, 0, 0))) + x,
    "padding on one side only is a copy on every rank": lambda x: F.relu_(F.pad(x * 2, (0, 1, 0, 1))),
    "cropping by padding is a copy": lambda x: F.relu_(F.pad(x * 1, (-1, 0, -1, 0))),
    "interpolating to the same size is a copy": lambda x: F.relu_(F.interpolate(x, size=x.shape[2:])) + x,
}
WHOLE_PITFALLS = {
    "one pixel, flattened": lambda x: F.avg_pool2d(x, x.shape[2:]).flatten(2),
    "one pixel, flattened from the channels": lambda x: F.avg_pool2d(x, x.shape[2:]).flatten(1),
    "one pixel, flattened, a new dim": lambda x: F.max_pool2d(x, x.shape[2:]).flatten(2).unsqueeze(2),
    "one pixel, its view": lambda x: F.avg_pool2d(x, x.shape[2:]).view(x.shape[0], x.shape[1], -1),
    "one pixel, dims of one more": lambda x: F.avg_pool2d(x, x.shape[2:]).reshape(1, -1, 1, 1, 1, 1),
    "one pixel, squeezed": lambda x: F.avg_pool2d(x, x.shape[2:]).squeeze(),
    "one row, squeezed": lambda x: F.avg_pool2d(x, (x.shape[2], 1)).squeeze(2),
    "one column, flattened": lambda x: F.avg_pool2d(x, (1, x.shape[3])).flatten(2),
    "one row, flattened with the channels": lambda x: x[:, :, 2:3].flatten(1, 2),
    "one window": lambda x: F.unfold(x, x.shape[2:]),
    "squeeze and excite by a window": lambda x: (
        x * F.avg_pool2d(x, x.shape[2:]).flatten(1).softmax(1).view(*x.shape[:2], 1, 1)
    ),
    "no channels": lambda x: x[:, :0].reshape(x.shape[0], 0, x.shape[2] * x.shape[3]),
}
WHOLE_PITFALLS_2 = {"one pixel against plain ones": lambda x: F.avg_pool2d(x, x.shape[2:]) * x.new_ones(3, 4, 5, 6)}
PITFALLS = (
    functions(SPREAD_PITFALLS) | functions(WHOLE_PITFALLS, spread=False) | functions(WHOLE_PITFALLS_2, spread=False)
)


@on_ranks(2)
def test_average_pooling_does_not_overflow(comm: Communicator) -> None:
    """Means over windows of 1024 pixels of 100, whose sum float16 cannot hold."""
    x = torch.full((1, 1, 64, 64), 100.0, dtype=torch.float16)
    y = spatial.gather(F.avg_pool2d(spatial.shard(x, spatial.Grid(comm, rows=2)), 32))
    assert torch.equal(y, F.avg_pool2d(x, 32))


test_pitfalls = table_test(__name__, chosen(ARRANGEMENTS), "PITFALLS")
