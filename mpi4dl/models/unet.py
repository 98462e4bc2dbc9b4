"""U-Net: an encoder and a decoder with long skips between them; a class for every pixel of an image of any size.

    image -> block ------------ skip -----------> cat -> block -> 1x1 convolution -> logits
               | max pool                          ^ transposed convolution, cropped
             block ------------ skip -----------> cat -> block
               | max pool                          ^ transposed convolution, cropped
             block ----------------------------------+

Pooling rounds an odd size up, so the transposed convolution, which doubles exactly, comes back one row or column too
large at most, and that is cropped. Thus any image of one pixel or more keeps its size, and pixels stay in place.
Bilinear interpolation to the skip's size would shift both against each other, by a fraction of a pixel that depends on
the image's size.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.models.layers import (
    CONVOLUTIONS,
    INSTANCE_NORMS,
    MAX_POOLS,
    NORMS,
    TRANSPOSED,
    check_dims,
    initialize_convolutions,
)

Norm = Literal["batch", "instance"]


class UNet(nn.Module):
    """U-Net: images (batch, in_channels, H, W) to logits (batch, num_classes, H, W).

    With `dims` 3 it is for volumes (batch, in_channels, D, H, W), with 1 for sequences. `depth` is the number of times
    that the encoder halves the image, `num_filters` the width at full size; every halving doubles it. Unlike the
    paper's, the convolutions are padded, and each has a norm: `norm` "batch", or "instance" with weights, whose
    statistics are of each image alone (Ulyanov et al. 2016, https://arxiv.org/abs/1607.08022).

    Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation",
    https://arxiv.org/abs/1505.04597.

    Raises:
        ValueError: `depth` or `num_filters` is less than 1, `dims` not 1, 2 or 3, or `norm` unknown.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 3,
        num_filters: int = 64,
        depth: int = 4,
        dims: int = 2,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        check_dims(dims)
        if depth < 1 or num_filters < 1:
            raise ValueError(f"depth={depth} and num_filters={num_filters} must both be at least 1 in a U-Net")
        if norm not in get_args(Norm):
            raise ValueError(f"norm={norm!r}: expected one of {', '.join(get_args(Norm))}")
        self.dims = dims
        widths = [num_filters * 2**level for level in range(depth + 1)]
        self.pool = MAX_POOLS[dims](2, ceil_mode=True)
        self.encoder = nn.ModuleList(
            _conv_block(above, width, dims, norm)
            for above, width in zip([in_channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = _conv_block(widths[-2], widths[-1], dims, norm)
        self.upsample = nn.ModuleList(
            TRANSPOSED[dims](2 * width, width, 2, stride=2) for width in reversed(widths[:-1])
        )
        self.decoder = nn.ModuleList(_conv_block(2 * width, width, dims, norm) for width in reversed(widths[:-1]))
        self.classifier = CONVOLUTIONS[dims](num_filters, num_classes, 1)
        initialize_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for upsample, block, skip in zip(self.upsample, self.decoder, reversed(skips), strict=True):
            x = upsample(x)
            free = [side for dim in range(self.dims + 1, 1, -1) for side in (0, skip.shape[dim] - x.shape[dim])]
            x = block(torch.cat([skip, F.pad(x, free)], dim=1))
        return self.classifier(x)


def _conv_block(in_channels: int, out_channels: int, dims: int, norm: Norm) -> nn.Sequential:
    def normalize() -> nn.Module:
        return NORMS[dims](out_channels) if norm == "batch" else INSTANCE_NORMS[dims](out_channels, affine=True)

    convolution = CONVOLUTIONS[dims]
    return nn.Sequential(
        convolution(in_channels, out_channels, 3, padding=1, bias=False),
        normalize(),
        nn.ReLU(),
        convolution(out_channels, out_channels, 3, padding=1, bias=False),
        normalize(),
        nn.ReLU(),
    )
