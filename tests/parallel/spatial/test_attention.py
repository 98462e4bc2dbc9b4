"""Attention where ranks share the batch, or the tokens of an image, equals attention on the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.geometry import Split, Tiling
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import ring_attention
from tests.parallel.spatial import comparing
from tests.parallel.spatial.comparing import Arrangement, Case, arrange, compare, functions, grid_of, table_test
from tests.pool.ranks import Ranks, on_ranks

BATCH, TOKENS, FEATURES = 3, 6, 4  # of 3 images, ranks have 1 and 2
MASK = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill_(torch.ones(TOKENS, TOKENS).triu(1) > 0, -1e9)
PADDING = torch.arange(TOKENS) >= torch.tensor([[4], [6], [5]])  # of the keys of each image the last ones
MASKS = torch.linspace(-1, 1, 2 * BATCH * TOKENS * TOKENS, dtype=torch.float64).view(2 * BATCH, TOKENS, TOKENS)
KEYS = torch.linspace(-1, 1, BATCH * 5 * FEATURES, dtype=torch.float64).view(BATCH, 5, FEATURES)
sdpa = F.scaled_dot_product_attention


def sequence(image: Tensor) -> Tensor:
    """(N, FEATURES, 2, 3) -> (N, TOKENS, FEATURES)."""
    return image.flatten(2).transpose(1, 2)


def heads(image: Tensor) -> Tensor:
    """(N, FEATURES, 2, 3) -> (N, 2 heads, TOKENS, FEATURES / 2)."""
    return sequence(image).unflatten(2, (2, 2)).transpose(1, 2)


def bright(image: Tensor) -> Tensor:
    """Flags (N, TOKENS), spread as the image is."""
    return sequence(image).detach().mean(-1) > -0.3


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


class Padded(nn.Module):
    """Multi-head attention that leaves out keys by what is in their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

    def forward(self, image: Tensor) -> Any:
        x = sequence(image)
        return self.attention(x, x, x + 1, key_padding_mask=~bright(image))


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


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mha": lambda: Attention({"need_weights": False}, batch_first=True),
    "mha, weights": lambda: Attention({}, batch_first=True),
    "mha, weights of heads": lambda: Attention({"average_attn_weights": False}),
    "mha, tokens first": lambda: Attention({"need_weights": False}),
    "mha, mask": lambda: Attention({"attn_mask": MASK, "need_weights": False}, batch_first=True),
    "mha, own dims": lambda: Attention({}, batch_first=True, kdim=FEATURES, vdim=FEATURES),
    "mha, causal": lambda: Attention({"attn_mask": MASK, "is_causal": True, "need_weights": False}, batch_first=True),
    "mha, padding": lambda: Attention({"key_padding_mask": PADDING}, batch_first=True),
    "mha, masks": lambda: Attention({"attn_mask": MASKS, "need_weights": False}, batch_first=True),
    "mha, padding of pixels": Padded,
    "with a token": lambda: WithToken(),
}
SHAPE = (BATCH, FEATURES, 2, 3)
WHOLE = {
    "sdpa": lambda x: sdpa(sequence(x), sequence(x), sequence(x) * 2),
    "sdpa, heads": lambda x: sdpa(*(sequence(x).unflatten(2, (2, 2)).transpose(1, 2) for _ in range(3))),
    "sdpa, mask": lambda x: sdpa(sequence(x), sequence(x), sequence(x), attn_mask=MASK),
    "sdpa, causal": lambda x: sdpa(sequence(x), sequence(x), sequence(x), is_causal=True, scale=0.3),
    "sdpa, masks": lambda x: sdpa(sequence(x), sequence(x), sequence(x), attn_mask=MASKS[:BATCH]),
    "sdpa, padding": lambda x: sdpa(heads(x), heads(x), heads(x), attn_mask=~PADDING[:, None, None]),
    "sdpa, padding of pixels": lambda x: sdpa(heads(x), heads(x), heads(x), attn_mask=bright(x)[:, None, None]),
    "sdpa, masks of pixels": lambda x: sdpa(
        *(sequence(x),) * 3,
        attn_mask=bright(x)[:, None] & bright(x)[..., None] | torch.eye(TOKENS, dtype=torch.bool),
    ),
    "sdpa, biases of pixels": lambda x: sdpa(*(sequence(x),) * 3, attn_mask=sequence(x).mean(-1)[:, None]),
    "sdpa, keys of all": lambda x: sdpa(sequence(x), KEYS, KEYS * 2),
    "sdpa, asked by all": lambda x: sdpa(KEYS, sequence(x), sequence(x) * 2),
    "sdpa, of one head's keys": lambda x: sdpa(
        sequence(x).unflatten(2, (2, 2)).transpose(1, 2),
        *(sequence(x)[..., :2].unsqueeze(1),) * 2,
        enable_gqa=True,
    ),
    "written out": lambda x: (sequence(x) @ sequence(x).mT + MASK).softmax(-1) @ sequence(x),
    "einsum": lambda x: torch.einsum(
        "nst,ntf->nsf", torch.einsum("nsf,ntf->nst", sequence(x), sequence(x)), sequence(x)
    ),
}
CASES = functions(WHOLE, FEATURES, [SHAPE[2:]], spread=False) | {
    name: Case(make, (SHAPE,), spread=False) for name, make in MODULES.items()
}
IN_EVALUATION = {name: Case(lambda make=make: make().eval(), (SHAPE,), spread=False) for name, make in MODULES.items()}
TOGETHER = {
    "mha, biases": Case(lambda: Attention({}, batch_first=True, add_bias_kv=True), (SHAPE,), spread=False),
    "mha, of zero": Case(lambda: Attention({}, batch_first=True, add_zero_attn=True), (SHAPE,), spread=False),
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


sample = pytest.mark.sample(1)
test_attention_is_that_of_the_whole_batch = sample(table_test(__name__, ARRANGEMENTS))
test_attention_in_evaluation_is_that_of_the_whole_batch = sample(table_test(__name__, ARRANGEMENTS, "IN_EVALUATION"))
test_attention_where_ranks_share_the_batch_alone = table_test(__name__, ARRANGEMENTS[:1], "TOGETHER")


ROUND = ("sdpa", "sdpa, heads", "sdpa, causal", "mha", "mha, causal", "mha, tokens first")


def in_a_ring(comm: Communicator, arrangement: Arrangement) -> spatial.Grid:
    grid = grid_of(comm, arrangement)
    grid.attention = "ring"
    return grid


def compare_round(comm: Communicator, arrangement: Arrangement, kernel: bool) -> int:
    """How often keys and values went round the ranks."""
    torch.set_default_dtype(torch.float64)
    rounds, plain = [], ring_attention.RingAttention

    class Counted(plain):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            rounds.append(args)
            return plain.forward(ctx, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention, "RingAttention", Counted)
        if not kernel:
            patch.setattr(ring_attention, "kernel_of", lambda *block: ring_attention.Explicit)
        patch.setattr(ring_attention, "CHUNK", 2)
        patch.setattr(comparing, "grid_of", in_a_ring)
        wrong = [text for name in ROUND for text in compare(comm, CASES[name], SHAPE, arrangement)]
    assert not wrong, wrong
    return len(rounds)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("arrangement", [each for each in ARRANGEMENTS if each.rows * (each.cols or 1) > 1], ids=str)
@pytest.mark.sample(4)
def test_keys_and_values_that_go_round_the_ranks(ranks: Ranks, arrangement: Arrangement, kernel: bool) -> None:
    """What is causal goes round where each rank has tokens one after the other: rows of all columns."""
    one_after_another = arrangement.cols == 1
    assert set(ranks(arrangement.num_ranks).run(compare_round, arrangement, kernel)) == {6 if one_after_another else 4}


def sequences(comm: Communicator, lengths: list[int], causal: bool) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """What attention over a sequence finds and should find, and how many pairs of tokens this rank compares."""
    torch.set_default_dtype(torch.float64)
    grid = spatial.Grid(comm, tokens=len(lengths), batch=comm.size // len(lengths))
    grid.attention = "ring"
    cuts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shape = (2, 3 * 4, cuts[-1])
    whole = Tiling.even(grid.shape, (2, cuts[-1])).replace(1, Split.at(cuts))
    plain = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    box, work = whole.owned(comm.rank), []

    def own(x: Tensor) -> Tensor:
        return x[box.batch.start : box.batch.stop, :, box.space[0].start : box.space[0].stop]

    def attend(x: Sequence[Tensor]) -> Tensor:
        heads = [each.unflatten(1, (3, 4)).transpose(2, 3) for each in x]
        return sdpa(*heads, is_causal=causal, scale=0.0 if lengths[0] == 0 and not causal else None)

    class Counted(ring_attention.CpuFlash):
        @staticmethod
        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
            work.append(q.shape[1] * q.shape[2] * k.shape[2] / (2 if causal else 1))
            return ring_attention.CpuFlash.forward(q, k, v, causal, scale)

    layout = spatial.Layout(grid, whole, (0, 2))
    parts = [own(x.detach()).clone().requires_grad_() for x in plain]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention, "kernel_of", lambda *block: Counted)
        patch.setattr(ring_attention, "BLOCK_BYTES", 2 * max(lengths) * 4 * 8)  # two heads at once
        ours = attend([spatial.SpatialTensor(x, layout) for x in parts])
    assert isinstance(ours, spatial.SpatialTensor)
    theirs = attend(plain)
    weights = torch.linspace(-1, 1, theirs.numel()).view(theirs.shape).cos()
    (theirs * weights).sum().backward()
    ours.local.backward(own(weights.transpose(2, 3).flatten(1, 2)).unflatten(1, (3, 4)).transpose(2, 3))
    pairs = [(ours.local.transpose(2, 3).flatten(1, 2), own(theirs.detach().transpose(2, 3).flatten(1, 2)))]
    pairs += [
        (x.grad, own(y.grad)) for x, y in zip(parts, plain, strict=True) if x.grad is not None and y.grad is not None
    ]
    return [(a.detach(), b) for a, b in pairs], int(sum(work))


LENGTHS = {
    "2": [6, 6],
    "3": [4, 4, 4],
    "4": [4, 4, 4, 4],
    "4, odd": [5, 5, 4, 4],
    "3, uneven": [7, 1, 2],
    "4, empty": [0, 5, 0, 3],
    "2, two replicas": [4, 4],
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_go_round_with_as_much_work_for_each_rank(ranks: Ranks, name: str, causal: bool) -> None:
    lengths = LENGTHS[name]
    found = ranks(len(lengths) * (2 if "replicas" in name else 1)).run(sequences, lengths, causal)
    for pairs, _ in found:
        assert len(pairs) == 4
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    if len(set(lengths)) == 1:
        assert len({work for _, work in found}) == 1


@on_ranks(2)
def test_autocast_holds_for_what_goes_round(comm: Communicator) -> None:
    """Under autocast keys and values travel, and scores are, in 16 bits; as far from float64 as plain PyTorch's."""
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    tiles = spatial.Grid(comm, tokens=2)
    tiles.attention = "ring"
    layout = spatial.Layout(tiles, Tiling.even(tiles.shape, (1, 64)), (None, 2))
    mine = slice(32 * comm.rank, 32 * (comm.rank + 1))
    with torch.autocast("cpu", torch.bfloat16):
        found = sdpa(*(spatial.SpatialTensor(x[:, :, mine], layout) for x in (q, k, v)))
        plain = sdpa(q, k, v)
    exact = sdpa(q.double(), k.double(), v.double())
    assert plain.dtype == found.dtype
    error = float((plain - exact).abs().max())
    assert found.dtype == torch.bfloat16
    assert float((spatial.gather(found) - exact).abs().max()) < 2 * error


UNIFORM: dict[str, Callable[[Tensor], Tensor]] = {
    "sdpa": lambda x: sdpa(sequence(x) * 0, sequence(x), x.new_ones(BATCH, TOKENS, 1), dropout_p=0.5),
    "causal": lambda x: sdpa(sequence(x) * 0, sequence(x), sequence(x) * 0 + 1, dropout_p=0.5, is_causal=True),
    "grouped": lambda x: sdpa(
        sequence(x).unflatten(2, (2, 2)).transpose(1, 2) * 0,
        *(sequence(x)[..., :2].unsqueeze(1),) * 2,
        dropout_p=1.0,
        enable_gqa=True,
    ),
    "masked": lambda x: sdpa(
        sequence(x), sequence(x), sequence(x), attn_mask=torch.zeros(TOKENS, TOKENS, dtype=torch.bool), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@on_ranks()
def test_weights_are_dropped_one_by_one(comm: Communicator, arrangement: Arrangement) -> None:
    """Equal weights of a row of ones: what remains is twice the share of those that were kept."""
    image = torch.randn(BATCH, FEATURES, 2, 3)
    tiles = arrange(image, comm, arrangement)
    encoder = nn.TransformerEncoderLayer(FEATURES, 2, 8, 0.1, batch_first=True)
    assert spatial.gather(encoder(sequence(tiles))).isfinite().all()
    ours, plain = (spatial.gather(encoder.eval()(sequence(x))) for x in (tiles, image))
    torch.testing.assert_close(ours, plain)
    found = {name: spatial.gather(function(tiles)) for name, function in UNIFORM.items()}
    kept = found["sdpa"] * TOKENS / 2
    torch.testing.assert_close(kept, kept.round())
    assert 0.2 < float(kept.mean()) / TOKENS < 0.8
    assert len(kept.unique()) > 2
    first = found["causal"][:, 0]  # asks one token
    assert set(first.unique().tolist()) <= {0.0, 2.0}
    assert not found["grouped"].any()
    assert not found["masked"].any()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sdpa, features": (lambda x: sdpa(x, x, x), "features are spread over ranks"),
    "mha, biases": (Attention({}, batch_first=True, add_bias_kv=True), "keys or values are added"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_ranks_cannot_compute_apart_is_refused(comm: Communicator, name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(spatial.NoRule, match=f"attention.* has no exact rule.*{words}"):
        function(arrange(torch.randn(BATCH, FEATURES, 2, 3), comm, Arrangement(1, 2)))
