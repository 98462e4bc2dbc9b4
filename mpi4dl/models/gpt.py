"""GPT, a decoder-only transformer that predicts the next token."""

from typing import get_args

from torch import Tensor, nn

from mpi4dl.models.experts import Mixture
from mpi4dl.models.layers import Penalized
from mpi4dl.models.transformer import (
    NORM_EPS,
    ROTARY_BASE,
    Activation,
    Norm,
    Positions,
    TokenEmbedding,
    TransformerBlock,
    check_sizes,
    documents_of,
    initialize_transformer,
    make_norm,
    through,
)


class GPT(nn.Module):
    """Logits of the token after each token: (N, T), int64, to (N, T, vocabulary).

    The defaults have 10.8 million parameters, and are for bytes and an end-of-document token.

    Args:
        vocabulary: the number of different tokens.
        context: the largest T.
        num_layers: the number of blocks.
        num_heads: the number of attention heads; divides `hidden`.
        num_kv_heads: how many keys and values they share; divides `num_heads`. None: as many as heads.
        hidden: the number of features of a token between blocks.
        ff_dim: the width of feed-forward layers. None: 4 * hidden, or about 8/3 * hidden for "swiglu".
        positions: "learned" vectors for each of `context` positions, or "rotary" queries and keys.
        rotary_base: what the angles of "rotary" are powers of.
        head_dim: the number of features of a head. None: hidden / num_heads.
        activation: "gelu" or "swiglu".
        norm: "layer" or "rms"; `norm_eps` is added to its variance.
        bias: linear layers have a bias, but for `lm_head`.
        dropout: of embeddings, attention weights and what blocks add.
        tied: the weight of `lm_head` is that of the embedding.
        separator: the token that ends a document, if no token is to see others than its own. None: all see each other.
        mixture: which feed-forward layers are mixtures of experts, and how they are. None: none.

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    Raises:
        ValueError: an option is unknown, or numbers that do not divide each other.
    """

    def __init__(
        self,
        vocabulary: int = 257,
        context: int = 256,
        num_layers: int = 6,
        num_heads: int = 6,
        num_kv_heads: int | None = None,
        hidden: int = 384,
        ff_dim: int | None = None,
        positions: Positions = "learned",
        rotary_base: float = ROTARY_BASE,
        head_dim: int | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        norm_eps: float = NORM_EPS,
        bias: bool = True,
        dropout: float = 0.0,
        tied: bool = True,
        separator: int | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        super().__init__()
        check_sizes(vocabulary=vocabulary, context=context, num_layers=num_layers)
        if positions not in get_args(Positions):
            raise ValueError(f"positions={positions!r} is unknown: choose 'learned' or 'rotary'")
        rotary = positions == "rotary"
        self.embedding = TokenEmbedding(vocabulary, context, hidden, dropout, learned=not rotary)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                hidden,
                num_heads,
                ff_dim,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                causal=True,
                rotary=rotary,
                rotary_base=rotary_base,
                activation=activation,
                norm=norm,
                norm_eps=norm_eps,
                bias=bias,
                dropout=dropout,
                mixture=None if mixture is None else mixture.layer(number, hidden, ff_dim, activation, dropout),
            )
            for number in range(num_layers)
        )
        self.separator = separator
        self.norm = make_norm(hidden, norm, norm_eps)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.tokens.weight
        initialize_transformer(self, num_layers)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor | Penalized:
        """The logits. With document ids (N, T) no token sees another document than its own.

        In training the logits and a penalty (N,), if the routing of a mixture of experts adds one to the loss.

        Raises:
            ValueError: T > context.
        """
        if documents is None and self.separator is not None:
            documents = documents_of(tokens, self.separator)
        x, penalty = through(self.blocks, self.embedding(tokens), documents)
        logits = self.lm_head(self.norm(x))
        return Penalized(logits, penalty) if penalty is not None and self.training else logits
