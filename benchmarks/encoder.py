"""A transformer of images as a chain of layers: benchmarks that cut it or shard it layer by layer train this one."""

from torch import Tensor, nn

PATCH_PX = 16
HEADS = 8


class Patches(nn.Module):
    """Images (N, 3, H, W) to a token for each patch of 16 x 16 pixels: (N, H * W / 256, features)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, features, PATCH_PX, PATCH_PX)

    def forward(self, images_nchw: Tensor) -> Tensor:
        patches: Tensor = self.convolution(images_nchw)
        return patches.flatten(2).transpose(1, 2).contiguous()  # gloo sends nothing else


class Head(nn.Module):
    """Logits (N, classes) of the mean over the tokens."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(features, num_classes)

    def forward(self, tokens_nlc: Tensor) -> Tensor:
        logits: Tensor = self.logits(tokens_nlc.mean(1))
        return logits


def encoder(features: int, num_layers: int, num_classes: int) -> nn.Sequential:
    """Patches, `num_layers` encoder layers, and a head, without dropout."""
    layers = [
        nn.TransformerEncoderLayer(features, HEADS, 4 * features, dropout=0.0, batch_first=True)
        for _ in range(num_layers)
    ]
    return nn.Sequential(Patches(features), *layers, Head(features, num_classes))
