"""Parts of several models: operators of 1, 2 or 3 dims, the classifier's head, the initial values of convolutions."""

from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

Pool = Literal["avg", "max"]

# By the number of dims of what they are for: sequences, images, volumes.
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


def check_dims(dims: int) -> None:
    """Raise ValueError for what are not the dims of sequences, images or volumes."""
    if dims not in CONVOLUTIONS:
        raise ValueError(f"dims={dims} is not possible: choose 1 for sequences, 2 for images, 3 for volumes")


class ClassifierHead(nn.Module):
    """Global pooling and one linear layer: (batch, channels, H, W) to logits (batch, num_classes).

    Its size does not depend on H and W; of volumes and sequences, `dims` says how many there are. Average pooling asks
    how much of the image shows something, maximum pooling whether any place does, which is what a lesion of a few
    pixels in a huge image needs.

    Raises:
        ValueError: `pool` is neither "avg" nor "max".
    """

    def __init__(self, channels: int, num_classes: int, pool: Pool = "avg", dims: int = 2) -> None:
        super().__init__()
        if pool not in get_args(Pool):
            raise ValueError(f"pool={pool!r} is unknown: choose 'avg' (global average) or 'max' (global maximum)")
        self.pool, self.space = pool, tuple(range(2, 2 + dims))
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean(dim=self.space) if self.pool == "avg" else x.amax(dim=self.space)
        return self.linear(pooled)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}"


def initialize_convolutions(model: nn.Module) -> None:
    """Draw every convolution's weight from a normal distribution of variance 2 / fan-out, in place.

    He et al. 2015, "Delving Deep into Rectifiers", https://arxiv.org/abs/1502.01852.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Penalized(NamedTuple):
    """The result of a model in training if routing adds to the loss: its outputs, and a penalty (N,) of each sample."""

    outputs: Any
    penalty: Tensor
