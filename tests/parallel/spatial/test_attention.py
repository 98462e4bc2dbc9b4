"""Attention where ranks share the batch, or the tokens of an image, equals attention on the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import attention, ring
from tests.parallel.spatial.comparing import Arrangement, arrange, grid_of
from tests.pool.ranks import Ranks

BATCH, TOKENS, FEATURES = 3, 6, 4  # of 3 images, ranks have 1 and 2
MASK = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill_(torch.ones(TOKENS, TOKENS).triu(1) > 0, -1e9)
PADDING = torch.arange(TOKENS) >= torch.tensor([[4], [6], [5]])  # of the keys of each image the last ones
MASKS = torch.linspace(-1, 1, 2 * BATCH * TOKENS * TOKENS, dtype=torch.float64).view(2 * BATCH, TOKENS, TOKENS)
KEYS = torch.linspace(-1, 1, BATCH * 5 * FEATURES, dtype=torch.float64).view(BATCH, 5, FEATURES)
sdpa = F.scaled_dot_product_attention


def sequence(image: Tensor) -> Tensor:
    """(N, FEATURES, 2, 3) -> (N, TOKENS, FEATURES)."""
    return image.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention over the pixels of an image; `options` are those of the call."""

    def __init__(self, options: dict[str, Any], **own: Any) -> None:
        super().__init__()
        self.options, self.attention = options, nn.MultiheadAttention(FEATURES, 2, **own)

    def forward(self, image: Tensor) -> Any:
        x = sequence(image)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        found, weights = self.attention(x, x * 2, x + 1, **self.options)
        return found if weights is None else (found, weights)


class WithToken(nn.Module):
    """A class token beside the pixels, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, FEATURES))
        self.positions = nn.Parameter(torch.randn(1, TOKENS + 1, FEATURES))
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(image.shape[0], -1, -1), sequence(image)], 1) + self.positions
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        return self.head(x[:, 0])


ALIKE: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "sdpa": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x) * 2),
    "sdpa, heads": lambda: lambda x: sdpa(*(sequence(x).unflatten(2, (2, 2)).transpose(1, 2) for _ in range(3))),
    "sdpa, mask": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x), attn_mask=MASK),
    "sdpa, causal": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x), is_causal=True, scale=0.3),
    "mha": lambda: Attention({"need_weights": False}, batch_first=True),
    "mha, weights": lambda: Attention({}, batch_first=True),
    "mha, weights of heads": lambda: Attention({"average_attn_weights": False}),
    "mha, tokens first": lambda: Attention({"need_weights": False}),
    "mha, mask": lambda: Attention({"attn_mask": MASK, "need_weights": False}, batch_first=True),
    "mha, own dims": lambda: Attention({}, batch_first=True, kdim=FEATURES, vdim=FEATURES),
    "mha, causal": lambda: Attention({"attn_mask": MASK, "is_causal": True, "need_weights": False}, batch_first=True),
    "mha, padding": lambda: Attention({"key_padding_mask": PADDING}, batch_first=True),
    "mha, masks": lambda: Attention({"attn_mask": MASKS, "need_weights": False}, batch_first=True),
    "sdpa, masks": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x), attn_mask=MASKS[:BATCH]),
    "sdpa, keys of all": lambda: lambda x: sdpa(sequence(x), KEYS, KEYS * 2),
    "sdpa, asked by all": lambda: lambda x: sdpa(KEYS, sequence(x), sequence(x) * 2),
    "sdpa, of one head's keys": lambda: (
        lambda x: sdpa(
            sequence(x).unflatten(2, (2, 2)).transpose(1, 2), *(sequence(x)[..., :2].unsqueeze(1),) * 2, enable_gqa=True
        )
    ),
    "written out": lambda: lambda x: (sequence(x) @ sequence(x).mT + MASK).softmax(-1) @ sequence(x),
    "einsum": lambda: (
        lambda x: torch.einsum("nst,ntf->nsf", torch.einsum("nsf,ntf->nst", sequence(x), sequence(x)), sequence(x))
    ),
    "with a token": lambda: WithToken(),
}
TOGETHER: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "mha, biases": lambda: Attention({}, batch_first=True, add_bias_kv=True),
    "mha, of zero": lambda: Attention({}, batch_first=True, add_zero_attn=True),
}
ARRANGEMENTS = [
    Arrangement(1, 1, batch=2),
    Arrangement(1, 2),
    Arrangement(2, 1),
    Arrangement(2, 2),
    Arrangement(1, 2, batch=2),
    Arrangement(1, 3, style="uneven"),
    Arrangement(2, 1, style="empty"),
]


def compare(comm: Communicator, name: str, training: bool, arrangement: Arrangement, way: Any = "auto") -> None:
    """Outputs, and the gradients of the image and of all parameters."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    function = (ALIKE | TOGETHER)[name]()
    parameters = []
    if isinstance(function, nn.Module):
        parameters = list(function.train(training).parameters())
    image = torch.randn(BATCH, FEATURES, 2, 3, requires_grad=True)

    def run(image: Tensor, share: int) -> list[Tensor]:
        found = function(image)
        outputs = [spatial.gather(x) for x in (found if isinstance(found, tuple) else (found,))]
        weights = [torch.arange(float(x.numel())).view(x.shape).cos() for x in outputs]
        loss = sum(((x * w).sum() for x, w in zip(outputs, weights, strict=True)), torch.zeros(()))
        gradients = torch.autograd.grad(loss / share, [source, *parameters])
        return [*outputs, *gradients]

    source = image
    expected = run(image, 1)
    grid = grid_of(comm, arrangement)
    grid.attention = way
    tiles = arrange(image, comm, arrangement, grid)
    found = run(tiles, comm.size)
    num_outputs = len(expected) - 1 - len(parameters)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        whole = ours if i < num_outputs else comm.all_reduce(ours.clone())
        torch.testing.assert_close(whole, theirs, rtol=1e-10, atol=1e-12)


def compare_all(comm: Communicator, training: bool, arrangement: Arrangement) -> None:
    for name in ALIKE:
        compare(comm, name, training, arrangement)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_attention_is_that_of_the_whole_batch(ranks: Ranks, training: bool, arrangement: Arrangement) -> None:
    ranks(arrangement.size).run(compare_all, training, arrangement)


ROUND = ("sdpa", "sdpa, heads", "sdpa, causal", "mha", "mha, causal", "mha, tokens first")


def compare_round(comm: Communicator, arrangement: Arrangement, kernel: bool) -> int:
    """How often keys and values went round the ranks."""
    rounds = []

    class Counted(ring.RingAttention):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            rounds.append(args)
            return ring.RingAttention.forward(ctx, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "RingAttention", Counted)
        patch.setattr(ring, "_has_kernel", lambda q: kernel)
        patch.setattr(ring, "CHUNK", 2)
        for name in ROUND:
            compare(comm, name, True, arrangement, "ring")
    return len(rounds)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("arrangement", [each for each in ARRANGEMENTS if each.rows * (each.cols or 1) > 1], ids=str)
def test_keys_and_values_that_go_round_the_ranks(ranks: Ranks, arrangement: Arrangement, kernel: bool) -> None:
    """What is causal goes round where each rank has tokens one after the other: rows of all columns."""
    one_after_another = arrangement.cols == 1
    assert set(ranks(arrangement.size).run(compare_round, arrangement, kernel)) == {6 if one_after_another else 4}


@pytest.mark.parametrize("name", TOGETHER)
def test_attention_where_ranks_share_the_batch_alone(ranks: Ranks, name: str) -> None:
    ranks(2).run(compare, name, True, Arrangement(1, 1, batch=2))


DROPS = "choose a dropout of 0 within attention"
TILES, SHARED = Arrangement(1, 2), Arrangement(1, 1, batch=2)
REFUSED: dict[str, tuple[Arrangement, Callable[[Tensor], Any], str]] = {
    "sdpa, features": (TILES, lambda x: sdpa(x, x, x), "features are spread over ranks"),
    "sdpa, dropout": (SHARED, lambda x: sdpa(x, x, x, dropout_p=0.1), DROPS),
    "mha, dropout": (SHARED, Attention({}, batch_first=True, dropout=0.1), DROPS),
    "mha, biases": (TILES, Attention({}, batch_first=True, add_bias_kv=True), "keys or values are added"),
}


def refuse(comm: Communicator, name: str) -> str:
    arrangement, function, _ = REFUSED[name]
    tiles = arrange(torch.randn(BATCH, FEATURES, 2, 3), comm, arrangement)
    with pytest.raises(spatial.NoRule) as refused:
        function(tiles)
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_compute_apart_is_refused(ranks: Ranks, name: str) -> None:
    for said in ranks(2).run(refuse, name):
        assert REFUSED[name][2] in said
        assert "attention" in said.split(" has no exact rule")[0]
