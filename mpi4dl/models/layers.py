"""What several models share: the classifier's head and the initial values of the convolutions."""

from typing import Literal, get_args

from torch import Tensor, nn

Pool = Literal["avg", "max"]


class ClassifierHead(nn.Module):
    """Global pooling and one linear layer: (batch, channels, H, W) to logits (batch, num_classes).

    Its size does not depend on H and W. Average pooling asks how much of the image shows something, maximum pooling
    whether any place does, which is what a lesion of a few pixels in a huge image needs.

    Raises:
        ValueError: `pool` is neither "avg" nor "max".
    """

    def __init__(self, channels: int, num_classes: int, pool: Pool = "avg") -> None:
        super().__init__()
        if pool not in get_args(Pool):
            raise ValueError(f"pool={pool!r} is unknown: choose 'avg' (global average) or 'max' (global maximum)")
        self.pool = pool
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean(dim=(2, 3)) if self.pool == "avg" else x.amax(dim=(2, 3))
        return self.linear(pooled)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}"


def initialize_convolutions(model: nn.Module) -> None:
    """Draw every convolution's weight from a normal distribution of variance 2 / fan-out, in place.

    He et al. 2015, "Delving Deep into Rectifiers", https://arxiv.org/abs/1502.01852.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
