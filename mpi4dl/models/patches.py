"""Slides as bags of patches: an encoder for each patch, and the aggregators of their features.

    images (N, C, H, W) -> patches (P, C, p, p) -> encoder -> features (P, F) -> a bag for each image -> logits (N, K)

This is plain PyTorch: all patches of a batch are one batch of the encoder, which `mpi4dl.parallel.streaming.patches`
runs a few at a time. Trained end to end, it is what Campanella et al. do ("Beyond multiple instance learning",
https://arxiv.org/abs/2403.04865).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

COLOUR = 0.07  # pixels of tissue differ by so much, of a range of 1, between their channels; glass and paper are grey


class PatchModel(nn.Module):
    """Logits of images out of their patches of `patch` x `patch` px, which do not overlap.

    `encoder` takes (P, C, patch, patch) and returns (P, F), or (P, F, 1, 1); `aggregator` takes a bag (n, F), and
    returns what there is to say of its image. The rest at the right and at the bottom is dropped. Of each image only
    patches are taken of whose pixels a share of at least `min_tissue` is of tissue, as `tissue` finds it; or the one
    that has the most. `colour` is in units of what the model is given. `norm`, such as a batch norm over all patches
    (P, F), comes between the encoder and the aggregator. With `num_covariates` the aggregator takes so many numbers of
    each image beside its bag: see `beside`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        aggregator: nn.Module,
        patch: int,
        min_tissue: float = 0.0,
        colour: float = COLOUR,
        norm: nn.Module | None = None,
        num_covariates: int = 0,
    ) -> None:
        super().__init__()
        if patch < 1 or not 0 <= min_tissue <= 1:
            raise ValueError(
                f"patch={patch}, min_tissue={min_tissue}: needs at least one pixel, and a share between 0 and 1"
            )
        self.encoder, self.norm, self.aggregator = encoder, norm, aggregator
        self.patch, self.min_tissue, self.colour = patch, min_tissue, colour
        self.num_covariates = num_covariates

    def forward(self, images: Tensor, covariates: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, K), with covariates (N, number). Raises ValueError for images smaller than a patch."""
        num_images, each = len(images), patches_in(images.shape[2:], self.patch)
        patches = cut(images, self.patch)
        counts = [each] * num_images
        if self.min_tissue > 0:
            shares = tissue(patches, self.colour)
            kept = [chosen(some, self.min_tissue) for some in shares.split(each)]
            patches = patches[torch.cat([found + each * i for i, found in enumerate(kept)])]
            counts = [len(found) for found in kept]
        return self.aggregate(self.encoder(patches), counts, covariates)

    def aggregate(self, features: Tensor, counts: Sequence[int], covariates: Tensor | None = None) -> Tensor:
        """The aggregator's output for the features of all patches, with the number of patches of each image.

        Without `covariates` they are zeros: the mean of numbers, and no class.
        """
        return torch.stack([self.aggregator(*each) for each in self._bags(features, counts, covariates)])

    def _bags(self, features: Tensor, counts: Sequence[int], covariates: Tensor | None) -> list[tuple[Tensor, ...]]:
        """The features of each image's patches, (n, F), and its covariates, if there are any."""
        flat = features.flatten(1)
        bags = (flat if self.norm is None else self.norm(flat)).split(list(counts))
        if not self.num_covariates:
            return [(bag,) for bag in bags]
        found = flat.new_zeros(len(bags), self.num_covariates) if covariates is None else covariates.to(flat)
        return [*zip(bags, found, strict=True)]

    def patch_values(
        self, features: Tensor, counts: Sequence[int], covariates: Tensor | None = None
    ) -> tuple[str, list[Tensor]] | None:
        """What each patch counts in its image, (n,) for each image, and what that is: its attention, or contribution.

        None of an aggregator that has neither.
        """
        bags = self._bags(features, counts, covariates)
        for name in ("attention", "contribution"):
            values = getattr(self.aggregator, name, None)
            if values is not None:
                return name, [values(*bag) for bag in bags]
        return None


def patches_in(size: Sequence[int], patch: int) -> int:
    """How many patches an image of this size (H, W) has. Raises ValueError if there is none."""
    if len(size) != 2 or min(size) < patch:
        sides = " x ".join(map(str, size))
        raise ValueError(f"images of {sides} px have no patches of {patch} x {patch} px: choose smaller ones")
    return (size[0] // patch) * (size[1] // patch)


def cut(images: Tensor, patch: int) -> Tensor:
    """Images (N, C, H, W) as patches (N * rows * columns, C, patch, patch), row by row."""
    rows, cols = (side // patch for side in images.shape[2:])
    inner = images[:, :, : rows * patch, : cols * patch].unflatten(3, (cols, patch)).unflatten(2, (rows, patch))
    return inner.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def tissue(patches: Tensor, colour: float) -> Tensor:
    """Of each patch (P, C, h, w) the share of pixels whose channels differ by at least `colour`: (P,), float64."""
    return (patches.amax(1) - patches.amin(1) >= colour).flatten(1).double().mean(1)


def chosen(shares: Tensor, min_tissue: float) -> Tensor:
    """The numbers of an image's patches that are looked at, by their `tissue`; the first best one, if none is."""
    found = (shares >= min_tissue).nonzero().flatten()
    return found if len(found) else shares.argmax()[None]


# Aggregators of the features of all patches of an image: (n, F) -> (K,), in any order of the patches; with the numbers
# of the image that stand beside its embedding, (number,), if the head is for some.


def beside(embedding: Tensor, covariates: Tensor | None) -> Tensor:
    """The input of a head: embeddings (..., F) and, behind them, covariates (..., number)."""
    return embedding if covariates is None else torch.cat([embedding, covariates], -1)


class PoolingAggregator(nn.Module):
    """Logits of what `pool` leaves of the features, such as their mean, or the largest of each."""

    def __init__(
        self, pool: Callable[..., Tensor], num_features: int, num_classes: int, num_covariates: int = 0
    ) -> None:
        super().__init__()
        self.pool, self.head = pool, nn.Linear(num_features + num_covariates, num_classes)

    def forward(self, features: Tensor, covariates: Tensor | None = None) -> Tensor:
        """(n, F) -> (K,)."""
        return self.head(beside(self.pool(features, dim=0), covariates))

    def contribution(self, features: Tensor, covariates: Tensor | None = None) -> Tensor:
        """What each patch adds to the logit, (n, F) -> (n,); with the bias, and covariates, they sum to it.

        A feature's part belongs to the patches that it is of: to all alike where `pool` is the mean, to that with the
        largest value where it is the maximum. Of two classes it is how far the second one's logit is above the first
        one's; of others, that of the image's.
        """
        with torch.enable_grad():
            bag = features.detach().requires_grad_()
            logits = self(bag, covariates)
            logit = logits[1] - logits[0] if len(logits) == 2 else logits[logits.argmax()]
            (gradient,) = torch.autograd.grad(logit, bag)
        return (features * gradient).sum(1)


class GatedAttention(nn.Module):
    """Logits of a weighted mean: a = softmax(w (tanh(V h) * sigmoid(U h))), z = sum of a h.

    Ilse et al., "Attention-based deep multiple instance learning", https://arxiv.org/abs/1802.04712, equation 9. It
    begins as the mean, w = 0: random weights look away from the few patches that matter as often as at them, and then
    these get no gradients.
    """

    def __init__(self, num_features: int, num_classes: int, num_hidden: int = 128, num_covariates: int = 0) -> None:
        super().__init__()
        self.values = nn.Linear(num_features, num_hidden)
        self.gates = nn.Linear(num_features, num_hidden)
        self.weights = nn.Linear(num_hidden, 1, bias=False)
        nn.init.zeros_(self.weights.weight)
        self.head = nn.Linear(num_features + num_covariates, num_classes)

    def forward(self, features: Tensor, covariates: Tensor | None = None) -> Tensor:
        """(n, F) -> (K,)."""
        return self.head(beside(self.attention(features)[None].mm(features)[0], covariates))

    def attention(self, features: Tensor, covariates: Tensor | None = None) -> Tensor:
        """The weight of each patch, (n, F) -> (n,); they sum to 1."""
        gated = torch.tanh(self.values(features)) * torch.sigmoid(self.gates(features))
        return torch.softmax(self.weights(gated), 0)[:, 0]


class TransformerAggregator(nn.Module):
    """Logits of a class token that attends to all patches, without positions: Vaswani et al. 2017, Dosovitskiy et al.
    2020.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        width: int = 256,
        depth: int = 2,
        heads: int = 4,
        num_covariates: int = 0,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(num_features, width)
        self.token = nn.Parameter(torch.zeros(1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width + num_covariates, num_classes)

    def forward(self, features: Tensor, covariates: Tensor | None = None) -> Tensor:
        """(n, F) -> (K,)."""
        tokens = torch.cat([self.token, self.project(features)])
        return self.head(beside(self.layers(tokens[None])[0, 0], covariates))


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
