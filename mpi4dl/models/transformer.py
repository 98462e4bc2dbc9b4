"""Parts of GPT, BERT and ViT: attention, feed-forward layers, pre-norm blocks, embeddings of tokens.

N sequences of T tokens with C = `hidden` features. Attention looks at them as H heads of D = C / H features each:

    x (N, T, C) -> query (N, T, H, D), key and value (N, T, K, D) -> attended (N, H, T, D) -> (N, T, C)

K, the number of key and value heads, divides H (grouped-query attention, Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245). Blocks carry nothing but x from one to the next, so that a pipeline can cut between
any two: each one counts the positions of its tokens itself.
"""

from collections.abc import Iterable
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

Activation = Literal["gelu", "swiglu"]
Positions = Literal["learned", "rotary"]
Norm = Literal["layer", "rms"]

INITIAL_STD = 0.02
ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
FF_MULTIPLE = 8  # a feed-forward width that is rounded is a multiple of this


class Past(Protocol):
    """The cache of attention for sequences whose next tokens it receives, those of several of them in each row."""

    @property
    def positions(self) -> Tensor:
        """The position of each token in its own sequence: (N, T), int64."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of queries (N, H, T, D) to their own sequences: to all tokens before, and to these keys and values
        (N, K, T, D), which are stored.
        """


def check_sizes(**sizes: int | None) -> None:
    """Raise ValueError for the first of these sizes that is below 1; None stands for a default."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} is not possible: it must be at least 1")


def default_ff_dim(hidden: int, activation: Activation) -> int:
    """4 * hidden; 8/3 * hidden, rounded up to a multiple of 8, for SwiGLU, whose three matrices then weigh as much."""
    return 4 * hidden if activation == "gelu" else -(-8 * hidden // (3 * FF_MULTIPLE)) * FF_MULTIPLE


def positions_of(x: Tensor) -> Tensor:
    """The position of each token of x (N, T) or (N, T, C) in its sequence, from 0 on: (N, T), int64."""
    one_each = x if x.dim() == 2 else x[:, :, 0]
    return torch.ones_like(one_each, dtype=torch.int64).cumsum(1) - 1


def documents_of(tokens: Tensor, separator: int) -> Tensor:
    """Document ids of tokens (N, T), counted from 0 in each sequence: each `separator` ends one, and belongs to it."""
    ends = (tokens == separator).long()
    return ends.cumsum(1) - ends


# torch.fx takes a wrapped function as one call, so these may look at shapes and make tensors.
fx.wrap("rotate")
fx.wrap("positions_of")
fx.wrap("documents_of")
fx.wrap("within_context")


def rotate(x: Tensor, positions: Tensor, base: float = ROTARY_BASE) -> Tensor:
    """Turn pairs of features of x (N, T, heads, D) by angles that grow with `positions` (N, T).

    Feature i < D/2 is paired with i + D/2, and its angle is position * base^(-2i/D). A product of a query and a key
    then depends on positions by their difference alone. Angles are computed in float32 or better.

    Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angles = positions[:, :, None, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def within_context(tokens: Tensor, context: int) -> Tensor:
    """These tokens (N, T). Raises ValueError if T > context."""
    if tokens.shape[1] > context:
        raise ValueError(
            f"sequences of {tokens.shape[1]} tokens are too long for a model with context={context}: "
            "cut them shorter, or build it with a larger context"
        )
    return tokens


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself: (N, T, C) to (N, T, C).

    `num_kv_heads` keys and values are shared by groups of heads (None: each head has its own). `head_dim` is D (None:
    hidden / num_heads). With `causal` no token sees later ones; with document ids (N, T) none sees another document.
    `rotary` turns queries and keys by their positions, with this `rotary_base`. `dropout` is of the attention weights
    and of the output. Text generation sets `past`, the cache of keys and values.

    Raises:
        ValueError: `hidden` is not divisible by `num_heads`, or `num_heads` not by `num_kv_heads`; `rotary` and heads
            of an odd size.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        causal: bool = False,
        rotary: bool = False,
        rotary_base: float = ROTARY_BASE,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(hidden=hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and hidden % num_heads:
            raise ValueError(f"hidden={hidden} must be divisible by num_heads={num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} must be divisible by num_kv_heads={num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim or hidden // num_heads
        if rotary and self.head_dim % 2:
            raise ValueError(
                "rotary positions need heads of an even size, but "
                + (f"hidden={hidden} / num_heads={num_heads}" if head_dim is None else "head_dim")
                + f" is {self.head_dim}"
            )
        self.causal, self.rotary, self.grouped = causal, rotary, num_kv_heads != num_heads
        self.rotary_base = rotary_base
        self.query = nn.Linear(hidden, num_heads * self.head_dim, bias)
        self.key = nn.Linear(hidden, num_kv_heads * self.head_dim, bias)
        self.value = nn.Linear(hidden, num_kv_heads * self.head_dim, bias)
        self.output = nn.Linear(num_heads * self.head_dim, hidden, bias)
        self.dropout = nn.Dropout(dropout)
        self.past: Past | None = None

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, length = x.shape[0], x.shape[1]
        # The number of heads is left open: a rank that holds some of them has narrower layers.
        query = self.query(x).view(batch, length, -1, self.head_dim)
        key = self.key(x).view(batch, length, -1, self.head_dim)
        value = self.value(x).view(batch, length, -1, self.head_dim)
        if self.rotary:
            positions = positions_of(x) if self.past is None else self.past.positions
            query, key = (rotate(x, positions, self.rotary_base) for x in (query, key))
        if self.past is not None:
            attended = self.past.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            return self.output(attended.transpose(1, 2).flatten(2))
        mask = None
        if documents is not None:  # (N, 1, T, T): keys of the query's own document, and with `causal` none after itself
            mask = documents[:, None, :, None] == documents[:, None, None, :]
            mask = mask.tril() if self.causal else mask
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=self.causal and mask is None,
            **({"enable_gqa": True} if self.grouped else {}),
        )
        return self.dropout(self.output(attended.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Two linear layers around GELU (in its tanh form), or three around SwiGLU, on each token: (N, T, C) to (N, T, C).

    SwiGLU is output(silu(gate(x)) * up(x)): Shazeer 2020, https://arxiv.org/abs/2002.05202.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        hidden: int,
        ff_dim: int | None = None,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ValueError(f"activation={activation!r} is unknown: choose 'gelu' or 'swiglu'")
        check_sizes(hidden=hidden, ff_dim=ff_dim)
        width = default_ff_dim(hidden, activation) if ff_dim is None else ff_dim
        self.up = nn.Linear(hidden, width, bias)
        self.gate: nn.Linear | None = nn.Linear(hidden, width, bias) if activation == "swiglu" else None
        self.output = nn.Linear(width, hidden, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        return self.dropout(self.output(inner))


def make_norm(hidden: int, kind: Norm = "layer", eps: float = NORM_EPS) -> nn.Module:
    """Layer norm, or "rms": Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. Raises ValueError."""
    if kind not in get_args(Norm):
        raise ValueError(f"norm={kind!r} is unknown: choose 'layer' or 'rms'")
    return nn.LayerNorm(hidden, eps) if kind == "layer" else nn.RMSNorm(hidden, eps)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward layers, each normalized before and added to its input: (N, T, C) to (N, T, C).

    Options and errors are those of `Attention`, `FeedForward` and `make_norm`. `mixture`, a MixtureOfExperts in the
    place of the feed-forward layers, may have a penalty (N,), and then the block returns that too.

    Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", https://arxiv.org/abs/2002.04745.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        ff_dim: int | None = None,
        *,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        norm_eps: float = NORM_EPS,
        bias: bool = True,
        dropout: float = 0.0,
        mixture: nn.Module | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.mixed, self.penalized = mixture is not None, getattr(mixture, "penalizes", False)
        self.norm1 = make_norm(hidden, norm, norm_eps)
        self.attention = Attention(hidden, num_heads, bias=bias, dropout=dropout, **attention)
        self.norm2 = make_norm(hidden, norm, norm_eps)
        self.feed_forward = FeedForward(hidden, ff_dim, activation, dropout, bias) if mixture is None else mixture

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x), documents)
        if not self.mixed:
            return x + self.feed_forward(self.norm2(x))
        y, penalty = self.feed_forward(self.norm2(x))
        return (x + y, penalty) if self.penalized else x + y


def through(blocks: Iterable[nn.Module], x: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
    """The output of the blocks for x, one after the other, and the sum of their penalties; None if none has any."""
    total = None
    for block in blocks:
        if not block.penalized:
            x = block(x, *others)
            continue
        x, penalty = block(x, *others)
        total = penalty if total is None else total + penalty
    return x, total


class TokenEmbedding(nn.Module):
    """Vectors of tokens (N, T), int64, to which those of their positions are added if they are `learned`: (N, T, C).

    Positions count from the start of a sequence, also where it holds several documents; `past` is as in `Attention`.

    Raises:
        ValueError: by `forward`, a sequence longer than `context`.
    """

    def __init__(self, vocabulary: int, context: int, hidden: int, dropout: float = 0.0, learned: bool = True) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions: nn.Embedding | None = nn.Embedding(context, hidden) if learned else None
        self.dropout = nn.Dropout(dropout)
        self.past: Past | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = within_context(tokens, self.context) if self.past is None else tokens
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(positions_of(tokens) if self.past is None else self.past.positions)
        return self.dropout(x)


def initialize_transformer(model: nn.Module, num_layers: int) -> None:
    """Draw weights as GPT-2 does, in place: normal with a standard deviation of 0.02; biases are 0.

    Layers that add to the residual stream, two in each of `num_layers` blocks, have 0.02 / sqrt(2 * num_layers).

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for module in model.modules():
        output = getattr(module, "output", None)  # of attention, feed-forward layers, and experts
        if output is not None:
            nn.init.normal_(getattr(output, "weight", output), std=INITIAL_STD / (2 * num_layers) ** 0.5)
