"""Mixup: training on weighted means of two images and of their labels, alike on all ranks.

Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018: x = s a + (1 - s) b, with s ~ Beta(alpha, alpha) for
a batch, and b the images of the batch in another order. The mean is taken pixel by pixel, so whoever reads a box of
an image reads the same box of its partner, wherever else that lies.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from mpi4dl.datasets.augment import MIXUP_STREAM
from mpi4dl.datasets.base import DatasetError

TASKS = ("classify", "multilabel", "regress")


class Blend(NamedTuple):
    """Each sample of a batch counts `share`, and the one at its place in `partners`, a position, the rest."""

    share: float
    partners: tuple[int, ...]


@dataclass(frozen=True)
class Mixup:
    """Mixes by shares from Beta(`alpha`, `alpha`); labels that are a class become shares of `num_classes` classes.

    Raises:
        DatasetError: an alpha that is not above 0.
    """

    alpha: float
    num_classes: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise DatasetError(f"mixup={self.alpha}: the parameter of the Beta distribution must be above 0")

    def draw(self, epoch: int, indices: tuple[int, ...]) -> Blend:
        """How the batch of these samples is mixed: the same on every rank, and whenever the batch is read."""
        random = np.random.default_rng((MIXUP_STREAM, self.seed, epoch, *indices))
        share = float(random.beta(self.alpha, self.alpha))
        return Blend(share, tuple(random.permutation(len(indices)).tolist()))

    def labels(self, labels: torch.Tensor, blend: Blend) -> torch.Tensor:
        """What is to be learnt of the mixed batch: floating point, (N, classes) where labels were classes."""
        if labels.dim() == 1 and not labels.is_floating_point():
            labels = F.one_hot(labels, self.num_classes)
        whole = labels.to(torch.get_default_dtype())
        return blend.share * whole + (1.0 - blend.share) * whole[list(blend.partners)]
