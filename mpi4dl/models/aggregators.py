"""What is made of the features of all patches of an image: (n, F) -> (K,), in any order of the patches."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn


class PoolingAggregator(nn.Module):
    """Logits of what `pool` leaves of the features, such as their mean, or the largest of each."""

    def __init__(self, pool: Callable[..., Tensor], num_features: int, num_classes: int) -> None:
        super().__init__()
        self.pool, self.head = pool, nn.Linear(num_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """(n, F) -> (K,)."""
        return self.head(self.pool(features, dim=0))


class GatedAttention(nn.Module):
    """Logits of a weighted mean: a = softmax(w (tanh(V h) * sigmoid(U h))), z = sum of a h.

    Ilse et al., "Attention-based deep multiple instance learning", https://arxiv.org/abs/1802.04712, equation 9.
    """

    def __init__(self, num_features: int, num_classes: int, num_hidden: int = 128) -> None:
        super().__init__()
        self.values = nn.Linear(num_features, num_hidden)
        self.gates = nn.Linear(num_features, num_hidden)
        self.weights = nn.Linear(num_hidden, 1, bias=False)
        self.head = nn.Linear(num_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """(n, F) -> (K,)."""
        gated = torch.tanh(self.values(features)) * torch.sigmoid(self.gates(features))
        return self.head(torch.softmax(self.weights(gated), 0).T.mm(features)[0])


class TransformerAggregator(nn.Module):
    """Logits of a class token that attends to all patches, without positions: Vaswani et al. 2017, Dosovitskiy et al.
    2020.
    """

    def __init__(self, num_features: int, num_classes: int, width: int = 256, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(num_features, width)
        self.token = nn.Parameter(torch.zeros(1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """(n, F) -> (K,)."""
        tokens = torch.cat([self.token, self.project(features)])
        return self.head(self.layers(tokens[None])[0, 0])


AGGREGATORS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "mean": partial(PoolingAggregator, torch.mean),
        "max": partial(PoolingAggregator, torch.amax),
        "gated-attention": GatedAttention,
        "transformer": TransformerAggregator,
    }
)


def headless(model: nn.Module, num_classes: int) -> int:
    """Put the identity for the classifier at the end of a model, and return how many features it was given.

    Raises:
        ValueError: the model's last linear layer has another number of outputs, or there is none.
    """
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear or linear[-1][1].out_features != num_classes:
        raise ValueError("it does not end in a linear layer of its classes, so that it has no features to aggregate")
    name, last = linear[-1]
    home, _, own = name.rpartition(".")
    setattr(model.get_submodule(home), own, nn.Identity())
    return last.in_features
