"""Published encoders of tiles of slides: vision transformers of timm with the arguments and names of their weights.

    tiles (N, 3, 224, 224) -> tokens (N, 1 + registers + patches, width) -> features (N, F) -> a linear layer

uni        Chen et al. 2024, https://doi.org/10.1038/s41591-024-02857-3
uni2       its successor, UNI2-h
virchow    Vorontsov et al. 2024, https://doi.org/10.1038/s41591-024-03141-0
virchow2   Zimmermann et al. 2024, https://arxiv.org/abs/2408.00738
gigapath   Xu et al. 2024, the encoder of tiles, https://doi.org/10.1038/s41586-024-07441-w
hoptimus0  Saillard et al. 2024, H-optimus-0; hoptimus1 is its successor
conch      Lu et al. 2024, its encoder of images, https://doi.org/10.1038/s41591-024-02856-4

`registry.OWN_MODELS` has the page of each, and `options.presets` its mean, deviation, tile and resolution.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = ("class", "class+mean")


class ClassAndMean(nn.Module):
    """A linear layer of the class token beside the mean of the tokens of patches: (N, T, width) -> (N, classes)."""

    def __init__(self, num_prefix_tokens: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.linear = nn.Linear(2 * width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens are the class, the registers, and the patches, in this order."""
        return self.linear(torch.cat([tokens[:, 0], tokens[:, self.num_prefix_tokens :].mean(1)], dim=1))


class AttentionalPooler(nn.Module):
    """A learnt query attends to the tokens, as in CoCa (Yu et al. 2022): (N, T, width) -> (N, dim)."""

    def __init__(self, dim: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, dim))
        self.attn = nn.MultiheadAttention(dim, num_heads, kdim=width, vdim=width, batch_first=True)
        self.ln_q, self.ln_k = nn.LayerNorm(dim), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        keys, query = self.ln_k(tokens), self.ln_q(self.query).expand(len(tokens), 1, -1)
        return self.attn(query, keys, keys, need_weights=False)[0][:, 0]


class PooledTransformer(nn.Module):
    """A vision transformer whose tokens are pooled by attention, and normalized, for a linear layer."""

    def __init__(self, trunk: Any, dim: int, num_heads: int, num_classes: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.attn_pool_contrast = AttentionalPooler(dim, trunk.num_features, num_heads)
        self.ln_contrast, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, tiles: Tensor) -> Tensor:
        return self.head(self.ln_contrast(self.attn_pool_contrast(self.trunk.forward_features(tiles))))


def vision_transformer(
    num_classes: int = 1000,
    in_channels: int = 3,
    *,
    features: str = "class",
    img_size: int = 224,
    patch_size: int = 16,
    embed_dim: int = 1024,
    depth: int = 24,
    num_heads: int = 16,
    mlp_ratio: float = 4.0,
    mlp_layer: str = "Mlp",
    act_layer: str = "GELU",
    init_values: float | None = 1e-5,
    reg_tokens: int = 0,
    no_embed_class: bool = False,
    dynamic_img_size: bool = True,
    drop_path_rate: float = 0.0,
) -> nn.Module:
    """A VisionTransformer of timm, whose last layer sees the `features`: the class token, or the mean of patches too.

    `mlp_layer` is a class of timm.layers, `act_layer` one of torch.nn. The others are timm's arguments of these names.

    Raises:
        ValueError: there are no such features, or no such class.
    """
    if features not in FEATURES:
        raise ValueError(f"features={features} is not possible: choose {' or '.join(FEATURES)}")
    vision, layers = import_module("timm.models.vision_transformer"), import_module("timm.layers")
    model: Any = vision.VisionTransformer(
        num_classes=num_classes,
        in_chans=in_channels,
        global_pool="token" if features == "class" else "",
        img_size=img_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
        mlp_layer=_class_of(layers, "mlp_layer", mlp_layer),
        act_layer=_class_of(nn, "act_layer", act_layer),
        init_values=init_values,
        reg_tokens=reg_tokens,
        no_embed_class=no_embed_class,
        dynamic_img_size=dynamic_img_size,
        drop_path_rate=drop_path_rate,
    )
    if features != "class":
        model.head = ClassAndMean(model.num_prefix_tokens, embed_dim, num_classes)
    return model


def _class_of(module: Any, option: str, name: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found) or not name[0].isupper():
        raise ValueError(f"{option}={name} is not possible: {module.__name__} has no layer {name}")
    return found


_swiglu = partial(vision_transformer, mlp_layer="SwiGLUPacked", act_layer="SiLU")
_giant = partial(_swiglu, embed_dim=1536, num_heads=24, depth=40, patch_size=14, mlp_ratio=2.66667 * 2)
_huge = partial(_swiglu, embed_dim=1280, num_heads=16, depth=32, patch_size=14, mlp_ratio=5.3375, features="class+mean")
uni = vision_transformer
uni2 = partial(_giant, depth=24, reg_tokens=8, no_embed_class=True)
virchow = _huge
virchow2 = partial(_huge, reg_tokens=4)
gigapath = partial(_giant, patch_size=16, mlp_ratio=5.33334)
hoptimus0 = partial(_giant, reg_tokens=4, no_embed_class=True)
hoptimus1 = hoptimus0


def conch(
    num_classes: int = 1000,
    in_channels: int = 3,
    *,
    img_size: int = 448,
    embed_dim: int = 768,
    depth: int = 12,
    num_heads: int = 12,
    pool_dim: int = 512,
    pool_heads: int = 8,
    drop_path_rate: float = 0.0,
) -> nn.Module:
    """CONCH's encoder of images, without what writes captions. Features are those before its last projection."""
    trunk: Any = vision_transformer(
        0,
        in_channels,
        img_size=img_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        init_values=None,
        drop_path_rate=drop_path_rate,
    )
    return PooledTransformer(trunk, pool_dim, pool_heads, num_classes)
