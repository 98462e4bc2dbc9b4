"""Tokens that leave the order of the image stay spread: repeated, padded, in a grid of other sides, as in TransMIL."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from tests.parallel.spatial.comparing import OF_TOKENS, Arrangement, Case, Function, check_table, compare, functions
from tests.parallel.spatial.test_flattening import WEIGHT, attention, tokens, with_token
from tests.parallel.spatial.test_gathering import kept_of_plain
from tests.pool.ranks import Ranks

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


SPREAD: dict[str, Function] = {
    "repeated": lambda x: squared(tokens(x)) * 2,
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
WHOLE: dict[str, Function] = {
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
    "both twice": lambda x: torch.cat([tokens(x), tokens(x)], 1),
    "sums of landmarks": lambda x: heads(squared(tokens(x))).reshape(3, 2, 4, 9, 2).sum(3),
}
CASES: dict[str, Case] = {
    **functions(SPREAD, sizes=[(HEIGHT, WIDTH)]),
    **functions(WHOLE, sizes=[(HEIGHT, WIDTH)], spread=False),
}


@pytest.mark.parametrize("arrangement", OF_TOKENS, ids=str)
@pytest.mark.sample(2)
def test_tokens_in_another_order_equal_those_of_the_whole(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)


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
ON = [Arrangement(1, 2), Arrangement(2, 2), Arrangement(4, 1, style="uneven"), Arrangement(2, 1, batch=2)]


def differences(comm: Communicator, name: str, arrangement: Arrangement) -> list[str]:
    torch.set_default_dtype(torch.float64)
    wrong = []
    for shape in ((2, 3, 14, 9), (2, 3, 8, 18)):  # 35 tokens, and 36 that are no square
        wrong += compare(comm, Case(MODELS[name], (shape,), spread=False), shape, arrangement)
    return wrong


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arrangement", ON, ids=str)
@pytest.mark.sample(2)
def test_a_step_of_transmil_is_that_on_the_whole(ranks: Ranks, name: str, arrangement: Arrangement) -> None:
    assert ranks(arrangement.size).run(differences, name, arrangement) == [[]] * arrangement.size


@pytest.mark.parametrize("name", ["token last", "by landmarks"])
def test_what_transmil_keeps_for_backward_is_spread(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_of_plain(MODELS[name]().to("meta"), 128) < 0.3
