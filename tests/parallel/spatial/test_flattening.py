"""Dims that several axes became: tokens of an image, windows, and back again, spread all the while."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parallel.spatial.comparing import OF_TOKENS, Arrangement, Case, Function, check_table, functions
from tests.pool.ranks import Ranks

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


@pytest.mark.parametrize("arrangement", OF_TOKENS, ids=str)
@pytest.mark.sample(3)
def test_flat_dims_equal_those_of_the_whole(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
