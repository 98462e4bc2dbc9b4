"""BERT, a transformer encoder that predicts masked tokens from both sides."""

from torch import Tensor, nn

from mpi4dl.models.transformer import (
    TokenEmbedding,
    TransformerBlock,
    check_sizes,
    documents_of,
    initialize_transformer,
)


class BERT(nn.Module):
    """Logits of what each token was before some were masked: (N, T), int64, to (N, T, vocabulary).

    As BERT, but blocks are normalized before rather than after, which Shoeybi et al. need to train large ones, and
    there are no segments and no sentence pairs. The weight of the decoder is that of the embedding. The defaults have
    11 million parameters, and are for bytes, an end-of-document token and a mask token.

    Args:
        vocabulary: the number of different tokens, that of the mask included.
        context: the largest T.
        num_layers: the number of blocks.
        num_heads: the number of attention heads; divides `hidden`.
        hidden: the number of features of a token between blocks.
        ff_dim: the width of feed-forward layers. None: 4 * hidden.
        dropout: of embeddings, attention weights and what blocks add.
        separator: the token that ends a document, if no token is to see others than its own. None: all see each other.

    Devlin et al. 2018, "BERT", https://arxiv.org/abs/1810.04805; Shoeybi et al. 2019, "Megatron-LM", section 5.3,
    https://arxiv.org/abs/1909.08053.

    Raises:
        ValueError: `hidden` is not divisible by `num_heads`, or a size is below 1.
    """

    def __init__(
        self,
        vocabulary: int = 258,
        context: int = 256,
        num_layers: int = 6,
        num_heads: int = 6,
        hidden: int = 384,
        ff_dim: int | None = None,
        dropout: float = 0.0,
        separator: int | None = None,
    ) -> None:
        super().__init__()
        check_sizes(vocabulary=vocabulary, context=context, num_layers=num_layers)
        self.embedding = TokenEmbedding(vocabulary, context, hidden, dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(hidden, num_heads, ff_dim, dropout=dropout) for _ in range(num_layers)
        )
        self.separator = separator
        self.norm = nn.LayerNorm(hidden)
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(approximate="tanh"), nn.LayerNorm(hidden))
        self.decoder = nn.Linear(hidden, vocabulary)
        self.decoder.weight = self.embedding.tokens.weight
        initialize_transformer(self, num_layers)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """The logits. With document ids (N, T) no token sees another document than its own.

        Raises:
            ValueError: T > context.
        """
        if documents is None and self.separator is not None:
            documents = documents_of(tokens, self.separator)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, documents)
        return self.decoder(self.transform(self.norm(x)))
