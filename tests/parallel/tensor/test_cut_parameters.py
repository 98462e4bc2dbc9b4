"""Layers whose parameters are cut over ranks, against plain PyTorch: outputs, and gradients of parts."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.tensor import wrap
from mpi4dl.parallel.tensor.cutting import cut_parameters
from mpi4dl.parallel.tensor.styles import Degrees, cutting_of
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, assert_close

VOCABULARY, HEADS, HIDDEN = 23, 6, 24
TOKENS = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Queries, keys and values of one product, or of three with fewer heads of keys."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, kv_heads
        self.size = HIDDEN // HEADS
        if kv_heads == HEADS:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        else:
            self.query, self.key = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, kv_heads * self.size, bias=False)
            self.value = nn.Linear(HIDDEN, kv_heads * self.size)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_kv_heads != HEADS)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(HIDDEN), Attention(kv_heads)
        self.between = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, 17), nn.Linear(HIDDEN, 17, bias=False)
        self.down = nn.Linear(17, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        z = self.between(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Language(nn.Module):
    """A transformer with tied embeddings."""

    def __init__(self, kv_heads: int, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=-2), nn.Embedding(16, HIDDEN)
        self.blocks = nn.Sequential(Block(kv_heads), Block(kv_heads))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.blocks(x))
        return logits


STYLES = {
    "words": "vocabulary",
    "head": "vocabulary",
    "blocks.*.attention.out": "heads-row",
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
FUSED = STYLES | {"blocks.*.attention.qkv": "fused-heads"}
GROUPED = STYLES | {f"blocks.*.attention.{name}": "heads" for name in ("query", "key", "value")}


def build(kv_heads: int, tied: bool = True) -> Language:
    torch.manual_seed(0)
    return Language(kv_heads, tied).double()


def loss_of(logits: Tensor, **options: Any) -> Tensor:
    targets = TOKENS.roll(-1, 1).clone()
    targets[0, :3] = -100
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), **options)


def compare(comm: Communicator, kv_heads: int, tied: bool, options: Mapping[str, Any]) -> None:
    plain, model = build(kv_heads, tied), build(kv_heads, tied)
    expected = plain(TOKENS)
    loss = loss_of(expected, **options)
    loss.backward()
    cuts = cutting_of(model, FUSED if kv_heads == HEADS else GROUPED, Degrees(comm.size))
    grid = Grid(comm, features=comm.size)
    layouts = cut_parameters(model, cuts, grid)
    logits = model(TOKENS)
    assert isinstance(logits, spatial.SpatialTensor)
    assert logits.local.shape[-1] < VOCABULARY
    assert_close(spatial.gather(logits).detach(), expected.detach(), EXACT, "logits")
    found = loss_of(logits, **options)
    assert_close(found.detach(), loss.detach(), EXACT, "loss")
    (found / comm.size).backward()
    assert_parts_learn_alike(model, plain, layouts, grid)


def assert_parts_learn_alike(model: nn.Module, plain: nn.Module, layouts: Mapping[str, Layout], grid: Grid) -> None:
    """The gradients of all ranks' parts make those of the plain model, and ranks have parts of what has a layout."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        if name in layouts:
            whole = grid.along(grid.space).all_reduce(spatial.gather(wrap(p.grad, layouts[name])).clone())
        else:
            whole = grid.comm.all_reduce(p.grad.clone())
        assert_close(whole, q.grad, EXACT, name)
        assert name not in layouts or p.numel() < q.numel()


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "smoothed and weighted": {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 2, VOCABULARY).double()},
    "sum": {"reduction": "sum"},
}


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_transformer(ranks: Ranks, num_ranks: int) -> None:
    """Four ranks share six heads unevenly, three 23 words."""
    ranks(num_ranks).run(compare, HEADS, True, {})


@pytest.mark.parametrize("name", OPTIONS)
def test_grouped_queries_and_losses(ranks: Ranks, name: str) -> None:
    ranks(2).run(compare, 3 if name == "sum" else 2, False, OPTIONS[name])


REFUSED = {
    "heads of keys": (2, {"blocks.*.attention.key": "heads"}, 3, "has 2 heads of keys, which 3 ranks cannot share"),
    "words": (6, {"words": "vocabulary"}, 24, "has 23 rows, which 24 ranks cannot share: use fewer for `tensor`"),
    "features": (6, {"blocks.*.up": "column"}, 18, "has 17 features, which 18 ranks cannot share"),
    "no such module": (6, {"blocks.*.attention.q": "heads"}, 2, "no module or parameter of Language has a name like"),
    "no such style": (6, {"words": "rows"}, 2, "'rows', but must have one of column, gated-column, row"),
    "no matrix": (6, {"blocks.*.before": "column"}, 2, "has no matrix called weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut(name: str) -> None:
    kv_heads, styles, num_ranks, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        cutting_of(build(kv_heads), styles, Degrees(num_ranks))


def test_parts_of_experts_that_would_not_add_up() -> None:
    """All ranks would add the same bias, or have the gates of some features and the values of others."""
    model = nn.Module()
    model.experts = nn.Module()
    sizes = {"gate_up": (4, 2 * 6, 5), "down": (4, 5, 6), "bias": (4, 5)}
    for name, size in sizes.items():
        setattr(model.experts, name, nn.Parameter(torch.zeros(size)))
    model.experts.num_experts = 4  # type: ignore[assignment]
    styles = {"experts": "experts", "experts.gate_up": "column", "experts.down": "row"}
    with pytest.raises(ValueError, match=re.escape("experts.bias is whole, but ranks of `tensor` that have parts")):
        cutting_of(model, styles, Degrees(2))
    assert cutting_of(model, styles, Degrees(2, 1, whole_experts=True))
    del model.experts.bias
    with pytest.raises(ValueError, match="along different features, 12 of gate_up, 6 of down"):
        cutting_of(model, styles, Degrees(2))
    assert cutting_of(model, styles | {"experts.gate_up": "gated-column"}, Degrees(2))
