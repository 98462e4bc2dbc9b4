"""ViT, a transformer that looks at an image as a sequence of patches, and classifies it."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from mpi4dl.models.experts import Mixture
from mpi4dl.models.layers import Penalized
from mpi4dl.models.transformer import INITIAL_STD, TransformerBlock, check_sizes, initialize_transformer, through

fx.wrap("of_size")  # torch.fx takes it as one call, so it may look at shapes


def of_size(images: Tensor, size: tuple[int, int]) -> Tensor:
    """These images (N, C, H, W). Raises ValueError unless (H, W) is `size`."""
    if tuple(images.shape[2:]) != size:
        sides = " x ".join(map(str, images.shape[2:]))
        raise ValueError(
            f"images of {sides} px do not fit a model with image_size={size}: resize them, or build it for that size"
        )
    return images


class PatchEmbedding(nn.Module):
    """Vectors of patches that do not overlap, row by row, with learned ones of their places added.

    Images (N, in_channels, H, W) to (N, H/patch * W/patch, hidden).

    Raises:
        ValueError: a side of `size` is not divisible by `patch`; by `forward`, images of another size.
    """

    def __init__(self, in_channels: int, size: tuple[int, int], patch: int, hidden: int) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, image_size=min(size), patch=patch, hidden=hidden)
        if size[0] % patch or size[1] % patch:
            raise ValueError(f"image_size={size} must be divisible by patch={patch}")
        self.size = size
        self.projection = nn.Conv2d(in_channels, hidden, patch, patch)
        self.positions = nn.Parameter(torch.empty(1, (size[0] // patch) * (size[1] // patch), hidden))
        nn.init.normal_(self.positions, std=INITIAL_STD)
        nn.init.normal_(self.projection.weight, std=(in_channels * patch**2) ** -0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(of_size(images, self.size)).flatten(2).transpose(1, 2) + self.positions


class ViT(nn.Module):
    """Logits of images: (N, in_channels, H, W) to (N, num_classes).

    The features of all patches are averaged; there is no class token, so that patches are all there is to divide (Beyer
    et al. 2022, "Better plain ViT baselines for ImageNet-1k", https://arxiv.org/abs/2205.01580). The defaults have
    2.7 million parameters.

    Args:
        num_classes: the number of logits.
        in_channels: C.
        image_size: (H, W) in px, or one number for both.
        patch: the side of a patch in px; divides H and W.
        num_layers: the number of blocks.
        hidden: the number of features of a patch between blocks.
        num_heads: the number of attention heads; divides `hidden`.
        ff_dim: the width of feed-forward layers. None: 4 * hidden.
        dropout: of embeddings, attention weights and what blocks add.
        mixture: which feed-forward layers are mixtures of experts, and how they are, as in V-MoE (Riquelme et al. 2021,
            https://arxiv.org/abs/2106.05974). None: none. In training, the routing penalty (N,) is returned beside the
            logits.

    Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929.

    Raises:
        ValueError: a number does not divide another one as it must, or is below 1.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int | Sequence[int] = 32,
        patch: int = 4,
        num_layers: int = 6,
        hidden: int = 192,
        num_heads: int = 3,
        ff_dim: int | None = None,
        dropout: float = 0.0,
        mixture: Mixture | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_layers=num_layers)
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.embedding = PatchEmbedding(in_channels, (height, width), patch, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                hidden,
                num_heads,
                ff_dim,
                dropout=dropout,
                mixture=None if mixture is None else mixture.layer(number, hidden, ff_dim, "gelu", dropout),
            )
            for number in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, num_classes)
        initialize_transformer(self, num_layers)

    def forward(self, images: Tensor) -> Tensor | Penalized:
        x, penalty = through(self.blocks, self.dropout(self.embedding(images)))
        logits = self.head(self.norm(x).mean(1))
        return Penalized(logits, penalty) if penalty is not None and self.training else logits
