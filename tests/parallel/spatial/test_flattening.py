"""Dims that several axes became: tokens of an image, windows, columns; in other orders too, as in TransMIL."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator
from mpi4dl.geometry import Split
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.redistribution import redistribute
from tests.parallel.spatial.comparing import (
    CHOSEN,
    OF_TOKENS,
    Arrangement,
    Case,
    Function,
    Traffic,
    arrange,
    functions,
    table_test,
)
from tests.parallel.spatial.test_gathering import kept_of_plain
from tests.pool.ranks import on_ranks

H, W = 12, 8
WEIGHT = torch.linspace(-1, 1, 4 * 5, dtype=torch.float64).view(5, 4)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).permute(0, 2, 1)


def image(x: Tensor, height: int = H, width: int = W) -> Tensor:
    return x.permute(0, 2, 1).reshape(x.shape[0], -1, height, width)


def windows(x: Tensor, size: int) -> Tensor:
    n, c, h, w = x.shape
    x = x.view(n, c, h // size, size, w // size, size)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, c)


def from_windows(x: Tensor, size: int, height: int = H, width: int = W) -> Tensor:
    x = x.view(-1, height // size, width // size, size, size, x.shape[-1])
    return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], x.shape[-1], height, width)


def attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(-2, -1)).softmax(-1) @ x


def with_token(x: Tensor) -> Tensor:
    token = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype).expand(x.shape[0], 1, -1)
    return torch.cat([token, x], 1)


def bags(x: Tensor) -> Tensor:
    """Attention over patches as it is written for slides (Ilse et al. 2018), by permute and reshape."""
    n, c, h, w = x.shape
    patches = x.permute(0, 2, 3, 1).reshape(-1, c)
    weights = F.linear(
        torch.tanh(F.linear(patches, WEIGHT)) * torch.sigmoid(F.linear(patches, WEIGHT)),
        torch.ones(1, 5, dtype=x.dtype),
    )
    weights = weights.reshape(n, 1, h * w).softmax(-1)
    return torch.bmm(weights, patches.reshape(n, h * w, c)).squeeze(1)


SPREAD: dict[str, Function] = {
    "softmax of all tokens": lambda x: tokens(x).softmax(1) * tokens(x),
    "log_softmax of all tokens": lambda x: F.log_softmax(x.flatten(2), -1),
    "tokens": tokens,
    "tokens and back": lambda x: F.avg_pool2d(image(tokens(x) * 2), 3, 1, 1),
    "reshape": lambda x: x.reshape(3, 4, H * W),
    "ordinary dims regrouped": lambda x: x.unsqueeze(1).expand(3, 3, 4, H, W).reshape(3, 6, 2, H, W) * 2,
    "unflatten": lambda x: x.flatten(2).unflatten(2, (H, W)).roll(1, 2),
    "linear": lambda x: F.linear(tokens(x), WEIGHT).tanh(),
    "layer norm": lambda x: F.layer_norm(tokens(x), (4,)),
    "positions": lambda x: tokens(x) + torch.linspace(-1, 1, H * W * 4, dtype=x.dtype).view(1, H * W, 4),
    "an entry for all": lambda x: tokens(x) * torch.ones(1, 1, 4, dtype=x.dtype) + tokens(x).mean(-1, keepdim=True),
    "softmax of features": lambda x: tokens(x).softmax(-1),
    "heads": lambda x: tokens(x).view(3, H * W, 2, 2).permute(0, 2, 1, 3).reshape(6, H * W, 2) * 3,
    "batch and tokens": lambda x: F.linear(x.permute(0, 2, 3, 1).reshape(-1, 4), WEIGHT).view(3, H, W, 5),
    "channels and all": lambda x: x.flatten(1) * 2,
    "windows": lambda x: windows(x, 2),
    "windows of 4": lambda x: windows(x, 4).tanh(),
    "windows and back": lambda x: F.avg_pool2d(from_windows(windows(x, 4), 4), 3, 1, 1),
    "attention in windows": lambda x: from_windows(attention(windows(x, 2)), 2),
    "shifted windows": lambda x: from_windows(attention(windows(x.roll((1, 1), (2, 3)), 4)), 4).roll((-1, -1), (2, 3)),
    "bias of each window": lambda x: (
        windows(x, 4).view(3, 6, 16, 4) + torch.linspace(0, 1, 6 * 16, dtype=x.dtype).view(6, 16, 1)
    ).view(-1, 16, 4),
    "chunks": lambda x: torch.cat(tokens(x).chunk(2, -1)[::-1], -1),
    "stacked": lambda x: torch.stack([tokens(x), tokens(x) * 2], 0)[1],
    "einsum": lambda x: torch.einsum("ntc,kc->nkt", tokens(x), WEIGHT),
    "expand a token": lambda x: torch.cat([tokens(x), tokens(x)[:, 2:3].expand(-1, H * W, -1)], 2),
    "expand": lambda x: tokens(x).unsqueeze(1).expand(3, 2, H * W, 4).sum(1),
    "token dropped": lambda x: with_token(tokens(x))[:, 1:],
    "token and norm": lambda x: F.linear(F.layer_norm(with_token(tokens(x)), (4,)), WEIGHT),
    "token and positions": lambda x: (
        with_token(tokens(x)) + torch.linspace(0, 1, (H * W + 1) * 4, dtype=x.dtype).view(1, H * W + 1, 4)
    ),
}
WHOLE: dict[str, Function] = {
    "attention over patches": bags,
    "token": lambda x: F.linear(with_token(tokens(x)), WEIGHT)[:, 0],
    "mean of tokens": lambda x: tokens(x).mean(1),
    "mean with a token": lambda x: with_token(tokens(x)).mean(1),
    "classifier": lambda x: F.linear(x.flatten(1), torch.linspace(0, 1, 4 * H * W * 2, dtype=x.dtype).view(2, -1)),
    "sort": lambda x: tokens(x).sort(1).values,
    "softmax of tokens": lambda x: tokens(x).softmax(1).contiguous()[:, 3:7],
    "group norm": lambda x: F.group_norm(tokens(x).mT, 2) * F.group_norm(x.flatten(2), 4, x.new_ones(4) * 2),
    "group norm behind a token": lambda x: F.group_norm(torch.cat([x.new_ones(3, 4, 1), x.flatten(2)], 2), 2),
    "no rule for flat dims": lambda x: tokens(x).cumsum(1),
    "largest": lambda x: tokens(x).amax(1),
    "factored attention": lambda x: F.linear(
        with_token(tokens(x)) @ (with_token(tokens(x)).softmax(1).mT @ with_token(tokens(x))), WEIGHT
    ),
    "other windows": lambda x: windows(x, 2).reshape(3, -1, 4) + windows(x, 4).reshape(3, -1, 4),
    "windows across": lambda x: windows(x, 4).reshape(3, -1).tanh().view(3, 6, 16, 4)[:, 2:4],
    "one row": lambda x: x[:, :, :1].reshape(3, 4, W),
    "one row among ones": lambda x: x[:, :1, :1].reshape(3, 1, 1, W, 1) * 2,
    "axis begins within": lambda x: x.reshape(3, H, 4, W).tanh(),
    "uneven reshape": lambda x: x.reshape(3, 2, -1).cumsum(-1),
}
CASES: dict[str, Case] = {
    **functions(SPREAD, sizes=[(H, W)]),
    **functions(WHOLE, sizes=[(H, W)], spread=False),
}

test_flat_dims_equal_those_of_the_whole = pytest.mark.sample(3)(table_test(__name__, OF_TOKENS))


# Functions along the features of tokens, (N * T, features) of all of them, (N, T, features), or with a class token. No
# token travels for them. And the same along tokens, where all do.


def rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, 4)


def both(function: Function) -> Function:
    """Of the rows, of tokens, and with a class token."""
    return lambda x: (function(rows(x)), function(tokens(x)), function(with_token(tokens(x)) * 2))


BESIDE: dict[str, Function] = {
    "argmax": both(lambda x: x.argmax(-1)),
    "argmin": both(lambda x: x.argmin(-1, keepdim=True)),
    "max": both(lambda x: x.max(-1)),
    "min, kept": both(lambda x: x.min(dim=-1, keepdim=True)),
    "max of two": both(lambda x: torch.max(x, -x) + torch.min(x, other=2 * x)),
    "amax and amin": both(lambda x: x.amax(-1) - x.amin((-1,), keepdim=True).squeeze(-1)),
    "aminmax": both(lambda x: torch.aminmax(x, dim=-1)),
    "logsumexp": both(lambda x: x.logsumexp(-1).square()),
    "prod": both(lambda x: x.prod(-1)),
    "cumulative": both(lambda x: x.cumsum(-1) * x.cumprod(-1) + x.logcumsumexp(-1)),
    "cumulative extrema": both(lambda x: (x.cummax(-1).values - x.cummin(-1).values, x.cummax(-1).indices)),
    "variances": both(lambda x: x.var(-1) + x.std(-1, unbiased=False) * torch.var_mean(x, -1)[1]),
    "truth": both(lambda x: ((x > 1).any(-1), (x > -1).all(-1), torch.count_nonzero(x > 0, -1))),
    "nansum and nanmean": both(lambda x: torch.where(x > 1, math.nan, x).nansum(-1) + x.nanmean(-1)),
    "norms": both(lambda x: x.norm(dim=-1) + torch.linalg.norm(x, 3, -1)),
    "distances": both(lambda x: F.pairwise_distance(x, 2 * x + 1) + F.cosine_similarity(x, x.roll(1, -1), -1)),
    "one_hot": both(lambda x: F.one_hot(x.argmax(-1), 4) * x),
    "embedding": both(lambda x: F.embedding(x.argmax(-1), WEIGHT)),
    "gather": both(lambda x: x.gather(-1, x.argsort(-1)[..., :2]) * x.take_along_dim(x.argmax(-1, True), -1)),
    "index_select": both(lambda x: x.index_select(-1, torch.tensor([2, 0, 2]))),
    "lists": both(lambda x: x[..., [1, -1, 0]] * 2),
    "roll and flip": both(lambda x: x.roll(1, -1) * x.flip(-1)),
    "losses": both(
        lambda x: F.mse_loss(x, x.flip(-1), reduction="none") * F.kl_div(x, (2 * x).exp(), reduction="none")
    ),
}
if torch.__version__ < "2.13":  # it has no derivative there
    BESIDE = {name: each for name, each in BESIDE.items() if not name.startswith("aminmax")}
ALONG: dict[str, Function] = {
    "extrema": lambda x: (rows(x).amax(0), rows(x).max(0), tokens(x).min(1), x.flatten(1).argmax(1), rows(x).max()),
    "sums": lambda x: (rows(x).logsumexp(0), tokens(x).prod(1) * 1e3, torch.linalg.norm(rows(x)), rows(x).nansum()),
    "variances": lambda x: (rows(x).var(0), tokens(x).std(1), with_token(tokens(x)).var((0, 1)), rows(x).std()),
    "truth": lambda x: ((rows(x) > 2).any(0), (tokens(x) > -3).all(1), torch.count_nonzero(rows(x) > 0)),
    "chosen rows": lambda x: (rows(x)[[5, -1]], tokens(x).index_select(1, torch.tensor([3, 70])), rows(x)[7:40, 1]),
    "gather": lambda x: rows(x).gather(0, torch.arange(30).view(10, 3) * 7),
    "order": lambda x: (rows(x).cumsum(0)[-2:], tokens(x).roll(5, 1)[:, 8], tokens(x).flip(1)[:, 7]),
    "roll of all": lambda x: (tokens(x).roll(3), rows(x)[:, 0].roll(2) * 2),
}
ROWS: dict[str, Case] = {
    **functions(BESIDE, sizes=[(H, W)]),
    **functions(ALONG, sizes=[(H, W)], spread=False),
}
test_features_of_tokens_are_those_of_the_whole = pytest.mark.sample(3)(table_test(__name__, OF_TOKENS, "ROWS"))


@on_ranks(4)
def test_nothing_travels_for_the_features_of_tokens(comm: Communicator) -> None:
    torch.set_default_dtype(torch.float64)
    grid = spatial.Grid(comm, rows=2, cols=2)
    for name, function in BESIDE.items():
        torch.manual_seed(0)
        x = arrange(torch.randn(3, 4, H, W).requires_grad_(), comm, Arrangement(2, 2), grid)
        traffic = Traffic(grid.comm)
        results = [y for y in pytree.tree_leaves(function(x)) if y.requires_grad]
        torch.autograd.backward([y.local for y in results], [torch.ones_like(y.local) for y in results])
        assert traffic.bytes == 0, name


SIZE = (13, 17)
UNFOLDED = {
    "overlapping": {"kernel_size": 3, "padding": 1},
    "apart": {"kernel_size": 2, "stride": 3},
    "side by side": {"kernel_size": (3, 2), "stride": (3, 2)},
    "dilated": {"kernel_size": (2, 3), "dilation": (3, 2), "stride": 2, "padding": (1, 0)},
    "large": {"kernel_size": (9, 7), "padding": 4, "stride": (1, 2)},
    "in the padding": {"kernel_size": 1, "padding": 2, "stride": (1, 3)},
}


class Around(nn.Module):
    """A layer on columns, between modules that unfold an image and fold it."""

    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.fold = nn.Unfold(5, stride=2, padding=2), nn.Fold(SIZE, 5, stride=2, padding=2)
        self.layer = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.unfold(x)
        folded = self.fold(self.layer(columns.mT).tanh().mT) / self.fold(torch.ones_like(columns))
        return F.avg_pool2d(folded.relu_(), 3, 1, 1) + x


def there_and_back(options: dict[str, Any]) -> Function:
    return lambda x: F.fold(F.unfold(x, **options).square(), x.shape[-2:], **options)


FOLDED: dict[str, Function] = {
    **{name: there_and_back(options) for name, options in UNFOLDED.items()},
    "columns": lambda x: F.unfold(x, 3, padding=1) * 2,
    "one image": lambda x: F.fold(F.unfold(x[0], (2, 3)), (13, 17), (2, 3)),
    "pixels become patches": lambda x: F.fold(x.flatten(2), (26, 34), 2, stride=2).relu_(),
    "pixels of a square": lambda x: F.fold(x[:, :, :12, :12].flatten(2), 25, 2, 1, 0, 2),
}
FOLDED_WHOLE: dict[str, Function] = {
    "rows alone": lambda x: F.fold(x.mean(3).unsqueeze(3).expand(-1, -1, -1, 5).flatten(2), (14, 6), 2),
    "one row of windows": lambda x: F.fold(F.unfold(x, (13, 2)), SIZE, (13, 2)),
    "other windows": lambda x: F.fold(F.unfold(x, (1, 2)), (17, 13), (2, 1)),
    "behind a token": lambda x: F.fold(torch.cat([x.new_ones(3, 4, 1), x.flatten(2)], 2), (3, 112), 2),
}
FOLDS: dict[str, Case] = {
    "layer on columns": Case(Around, ((3, 4, *SIZE),)),
    **functions(FOLDED, sizes=[SIZE]),
    **functions(FOLDED_WHOLE, sizes=[SIZE], spread=False),
}


test_folded_columns_equal_those_of_the_whole_image = pytest.mark.sample(3)(
    table_test(
        __name__, [*CHOSEN, Arrangement(1, 3), Arrangement(2, 1, batch=2), Arrangement(1, 2, style="empty")], "FOLDS"
    )
)


HEIGHT, WIDTH = 7, 5  # 35 tokens: the first one stands again behind them, in a square of 6 x 6


def squared(x: Tensor) -> Tensor:
    """Tokens, the first of them once more behind the last, so that they fill a square."""
    side = math.ceil(math.sqrt(x.shape[1]))
    return torch.cat([x, x[:, : side * side - x.shape[1]]], 1)


def with_last_token(x: Tensor) -> Tensor:
    return torch.cat([x, torch.linspace(0, 1, x.shape[-1], dtype=x.dtype).expand(x.shape[0], 1, -1)], 1)


def in_square(x: Tensor) -> Tensor:
    side = math.isqrt(x.shape[1])
    return F.avg_pool2d(x.transpose(1, 2).view(x.shape[0], x.shape[2], side, side), 3, 1, 1)


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)


def column(x: Tensor) -> Tensor:
    """Along tokens, head by head."""
    weight = torch.linspace(-1, 1, 2 * 5, dtype=x.dtype).view(2, 1, 5, 1)
    return F.conv2d(heads(x), weight, padding=(2, 0), groups=2)


REORDERED_SPREAD: dict[str, Function] = {
    "repeated": lambda x: squared(tokens(x)) * 2,
    "both twice": lambda x: torch.cat([tokens(x), tokens(x)], 1),
    "both behind a token": lambda x: torch.cat([with_token(tokens(x)), tokens(x) * 2, with_token(tokens(x))], 1),
    "repeated often": lambda x: torch.cat([tokens(x), tokens(x)[:, :9], tokens(x)[:, 3:20:4]], 1),
    "class token last": lambda x: F.layer_norm(with_last_token(tokens(x)), (4,)),
    "class token first": lambda x: F.linear(with_token(squared(tokens(x))), WEIGHT).relu(),
    "tokens between both": lambda x: with_last_token(with_token(tokens(x)))[:, 1:],
    "last token dropped": lambda x: with_last_token(tokens(x))[:, :-1],
    "positions": lambda x: (
        squared(tokens(x)) + torch.linspace(0, 1, 36 * 4, dtype=x.dtype).view(1, 36, 4) * squared(tokens(x))
    ),
    "softmax of tokens": lambda x: with_token(squared(tokens(x))).softmax(1),
    "attention": lambda x: attention(with_token(squared(tokens(x)))),
    "sdpa": lambda x: F.scaled_dot_product_attention(*(heads(with_token(squared(tokens(x)))),) * 3),
    "square": lambda x: in_square(squared(tokens(x))),
    "square and back": lambda x: with_token(in_square(with_token(squared(tokens(x)))[:, 1:]).flatten(2).mT) * 3,
    "square, channels last": lambda x: squared(tokens(x)).view(3, 6, 6, 4).roll(1, 2),
    "another grid": lambda x: F.max_pool2d(x.flatten(2).reshape(3, 4, WIDTH, HEIGHT), 3, 2, 1),
    "long and narrow": lambda x: squared(tokens(x)).transpose(1, 2).reshape(3, 4, 2, 18) ** 2,
    "one of its dims": lambda x: squared(tokens(x)).view(3, 1, 12, 3, 4) * 2,
    "more dims": lambda x: squared(tokens(x)).view(3, 3, 2, 6, 4).sum(2),
    "landmarks": lambda x: heads(squared(tokens(x))).reshape(3, 2, 4, 9, 2) * 2,
    "in both orders": lambda x: squared(tokens(x)) * in_square(squared(tokens(x))).flatten(2).mT,
    "another order": lambda x: x.flatten(2).reshape(3, 4, WIDTH, HEIGHT).flatten(2).tanh() * x.flatten(2),
    "padded in front": lambda x: F.pad(squared(tokens(x)), (0, 0, 4, 0), value=0.5).tanh()[:, -36:],
    "padded behind": lambda x: F.pad(with_token(tokens(x)), (0, 1, 0, 3)).exp(),
    "convolution along tokens": lambda x: column(with_token(squared(tokens(x)))),
    "residual of it": lambda x: heads(with_token(squared(tokens(x)))) + column(with_token(squared(tokens(x)))),
    "channels of a square": lambda x: F.conv2d(
        squared(tokens(x)).view(3, 36, 4).mT.reshape(3, 4, 6, 6), WEIGHT.view(5, 4, 1, 1)
    ),
    "dropout": lambda x: torch.manual_seed(5) and F.dropout(with_token(squared(tokens(x)))),
    "keys of few queries": lambda x: torch.einsum(
        "nid,njd->nij", tokens(x)[:, :3], with_token(squared(tokens(x)))
    ).softmax(-1),
}
REORDERED_WHOLE: dict[str, Function] = {
    "class token": lambda x: F.linear(with_token(squared(tokens(x))), WEIGHT)[:, 0],
    "last class token": lambda x: F.linear(with_last_token(squared(tokens(x))), WEIGHT)[:, -1],
    "tokens here and there": lambda x: tokens(x)[:, 2:20:3] * 2,
    "one token": lambda x: squared(tokens(x))[:, 17] - squared(tokens(x)).select(1, -3),
    "none": lambda x: squared(tokens(x))[:, :0],
    "no rows": lambda x: (x[:, :, 3:3], x[:, :, :, 9:]),
    "sum": lambda x: with_token(squared(tokens(x))).sum(1),
    "mean": lambda x: with_last_token(with_token(squared(tokens(x)))).mean((1, 2)),
    "weighed sum": lambda x: squared(tokens(x)).softmax(1).mT @ with_last_token(squared(tokens(x)))[:, :-1],
    "few queries": lambda x: (
        torch.einsum("nid,njd->nij", tokens(x)[:, :3], with_token(squared(tokens(x)))).softmax(-1)
        @ with_token(squared(tokens(x)))
    ),
    "sums of landmarks": lambda x: heads(squared(tokens(x))).reshape(3, 2, 4, 9, 2).sum(3),
}
REORDERED: dict[str, Case] = {
    **functions(REORDERED_SPREAD, sizes=[(HEIGHT, WIDTH)]),
    **functions(REORDERED_WHOLE, sizes=[(HEIGHT, WIDTH)], spread=False),
}

test_tokens_in_another_order_equal_those_of_the_whole = pytest.mark.sample(2)(
    table_test(__name__, OF_TOKENS, "REORDERED")
)


@on_ranks(4)
def test_tokens_of_two_images_in_a_row(comm: Communicator) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 6)
    x = spatial.shard(image, spatial.Grid(comm, rows=2, cols=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.cat([tokens(x), tokens(x) * 2], 1)
    assert torch.equal(spatial.gather(found), torch.cat([tokens(image), tokens(image) * 2], 1))


@on_ranks(4)
def test_features_of_heads_that_ranks_share_are_gathered_for_a_square(comm: Communicator) -> None:
    """A convolution over tokens and features of each head, where the features are cut."""
    torch.manual_seed(0)
    image, weight = torch.randn(2, 4, 4, 5), torch.randn(2, 1, 3, 3)
    grid = spatial.Grid(comm, rows=1, cols=2, features=2)
    y = heads(tokens(spatial.shard(image, grid)))
    layout = y.layout
    dims = (*layout.dims[:-1], 3)
    cut = redistribute(y, replace(layout, dims=dims, tiling=layout.tiling.replace(3, Split.at([0, 1, 2]))))
    found = F.conv2d(cut, weight, padding=1, groups=2)
    expected = F.conv2d(heads(tokens(image)), weight, padding=1, groups=2)
    assert_close(spatial.gather(found), expected)


class Attention(nn.Module):
    """Softmax attention with a residual, written out or by PyTorch's function."""

    def __init__(self, dim: int, fused: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(each) for each in self.qkv(self.norm(x)).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Nystrom(Attention):
    """Attention by landmarks (Xiong et al. 2021): zeros pad the tokens in front, a convolution goes along them."""

    def __init__(self, dim: int, landmarks: int = 8, kernel: int = 5) -> None:
        super().__init__(dim)
        self.landmarks = landmarks
        self.along = nn.Conv2d(2, 2, (kernel, 1), padding=(kernel // 2, 0), groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, m = self.norm(x), self.landmarks
        y = F.pad(y, (0, 0, -x.shape[1] % m, 0), value=0)
        q, k, v = (heads(each) for each in self.qkv(y).chunk(3, -1))
        q = q * q.shape[-1] ** -0.5
        few_q, few_k = (each.reshape(*each.shape[:2], m, -1, each.shape[-1]).mean(3) for each in (q, k))
        first = torch.einsum("...id,...jd->...ij", q, few_k).softmax(-1)
        middle = torch.einsum("...id,...jd->...ij", few_q, few_k).softmax(-1)
        last = torch.einsum("...id,...jd->...ij", few_q, k).softmax(-1)
        inverse = middle.transpose(-1, -2) / (middle.abs().sum(-1).max() * middle.abs().sum(-2).max())
        one = torch.eye(m, dtype=x.dtype, device=x.device)
        for _ in range(3):
            product = middle @ inverse
            inverse = 0.25 * inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
        found = first @ inverse @ (last @ v) + self.along(v)
        return x + self.out(found.transpose(1, 2).reshape(y.shape))[:, -x.shape[1] :]  # type: ignore[no-any-return]


class TransMIL(nn.Module):
    """Patches of a slide in a square (Shao et al. 2021), behind a backbone that finds them in its pixels."""

    def __init__(self, attend: Callable[[int], nn.Module], dim: int = 8, last: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU())
        self.features, self.last = nn.Sequential(nn.Linear(6, dim), nn.ReLU()), last
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.first, self.second = attend(dim), attend(dim)
        self.around = nn.ModuleList(nn.Conv2d(dim, dim, k, 1, k // 2, groups=dim) for k in (7, 5, 3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 2)

    def beside(self, token: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x, token] if self.last else [token, x], 1)

    def forward(self, image: Tensor) -> Tensor:
        x = squared(self.features(self.backbone(image).flatten(2).transpose(1, 2)))
        n, side = x.shape[1], math.isqrt(x.shape[1])
        x = self.first(self.beside(self.token.expand(x.shape[0], -1, -1), x))
        token, x = (x[:, -1], x[:, :n]) if self.last else (x[:, 0], x[:, 1:])
        square = x.transpose(1, 2).view(x.shape[0], -1, side, side)
        square = square + sum(convolution(square) for convolution in self.around)
        x = self.second(self.beside(token.unsqueeze(1), square.flatten(2).transpose(1, 2)))
        return self.head(self.norm(x)[:, -1 if self.last else 0])  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "written out": lambda: TransMIL(Attention),
    "fused": lambda: TransMIL(lambda dim: Attention(dim, fused=True)),
    "token last": lambda: TransMIL(Attention, last=True),
    "by landmarks": lambda: TransMIL(Nystrom),
}
# 35 tokens, and 36 that are no square.
TRANSMIL = {name: Case(make, ((2, 3, 14, 9), (2, 3, 8, 18)), spread=False) for name, make in MODELS.items()}
ON = [Arrangement(1, 2), Arrangement(2, 2), Arrangement(4, 1, style="uneven"), Arrangement(2, 1, batch=2)]
test_a_step_of_transmil_is_that_on_the_whole = pytest.mark.sample(1)(table_test(__name__, ON, "TRANSMIL"))


@pytest.mark.parametrize("name", ["token last", "by landmarks"])
def test_what_transmil_keeps_for_backward_is_spread(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_of_plain(MODELS[name]().to("meta"), 128) < 0.3
