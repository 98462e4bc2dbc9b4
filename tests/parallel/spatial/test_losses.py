"""Losses over the pixels of tiles are those over the whole image."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, check_table, functions
from tests.pool.ranks import Ranks


def classes(x: Tensor, ignored: bool = False) -> Tensor:
    """A class for each pixel, the same on every rank; with -100, or 1, some of them."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(4, (x.shape[0], *x.shape[2:]), generator=generator)
    if ignored:
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return labels


def target(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(6))


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=torch.float64)

CASES = {
    **functions(
        {
            "cross_entropy": lambda x: F.cross_entropy(x, classes(x)),
            "cross_entropy, summed": lambda x: F.cross_entropy(x, classes(x), reduction="sum"),
            "cross_entropy, ignored pixels": lambda x: F.cross_entropy(x, classes(x, True)),
            "cross_entropy, an ignored class": lambda x: F.cross_entropy(x, classes(x), ignore_index=1),
            "cross_entropy, weights": lambda x: F.cross_entropy(x, classes(x), WEIGHT),
            "cross_entropy, weights, ignored": lambda x: F.cross_entropy(x, classes(x, True), weight=WEIGHT),
            "nn.CrossEntropyLoss": lambda x: torch.nn.CrossEntropyLoss(WEIGHT, ignore_index=2)(x, classes(x)),
            "cross_entropy of argmax": lambda x: F.cross_entropy(x, (-x).argmax(1)),
            "mse_loss": lambda x: F.mse_loss(x, target(x)),
            "mse_loss of two images": lambda x: F.mse_loss(x, x.detach().roll(1, 1), reduction="sum"),
            "mse_loss, options by position": lambda x: F.mse_loss(x, target(x), None, None, "sum"),
            "nn.MSELoss": lambda x: torch.nn.MSELoss()(x, target(x)),
            "l1_loss": lambda x: F.l1_loss(x, target(x)),
            "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, target(x), beta=0.5),
            "huber_loss": lambda x: F.huber_loss(x, target(x), reduction="sum", delta=0.7),
            "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), target(x)),
            "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, target(x)),
            "nn.BCEWithLogitsLoss": lambda x: torch.nn.BCEWithLogitsLoss(reduction="sum")(x, target(x)),
            "dice": lambda x: 1 - 2 * (x.sigmoid() * target(x)).sum() / (x.sigmoid().sum() + target(x).sum()),
        },
        spread=False,
    ),
    **functions(
        {
            "cross_entropy per pixel": lambda x: F.cross_entropy(x, classes(x, True), reduction="none"),
            "cross_entropy per pixel, weights": lambda x: F.cross_entropy(x, classes(x), WEIGHT, reduction="none"),
            "mse_loss per pixel": lambda x: F.mse_loss(x, target(x), reduction="none"),
            "bce with logits per pixel": lambda x: F.binary_cross_entropy_with_logits(x, target(x), reduction="none"),
        }
    ),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_losses_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)


def refuse_losses(comm: Communicator) -> list[str]:
    x = spatial.shard(torch.randn(2, 4, 6, 8), spatial.Grid(comm, rows=2))
    labels = torch.zeros(2, 6, 8, dtype=torch.int64)
    messages = []
    for loss in (
        lambda: F.cross_entropy(x, labels, label_smoothing=0.1),
        lambda: F.cross_entropy(x, torch.rand(2, 4, 6, 8)),
        lambda: F.binary_cross_entropy_with_logits(x, torch.zeros(2, 4, 6, 8), torch.ones(8)),
        lambda: F.binary_cross_entropy_with_logits(x, torch.zeros(2, 4, 6, 8), pos_weight=torch.ones(8)),
        lambda: F.nll_loss(x, labels),
    ):
        with pytest.raises(spatial.NoRule) as caught:
            loss()
        messages.append(str(caught.value))
    return messages


def test_losses_that_would_not_be_exact_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2).run(refuse_losses)
    assert first == second
    for message, what in zip(
        first, ("label smoothing", "class probabilities", "weights", "weights", "nll_loss"), strict=True
    ):
        assert what in message
