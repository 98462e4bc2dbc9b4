"""Losses over the pixels of tiles are those over the whole image."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import OF_TOKENS, SOME_ARRANGEMENTS, functions, table_test
from tests.pool.ranks import on_ranks


def classes(x: Tensor, ignored: bool = False) -> Tensor:
    """A class for each pixel, the same on every rank; with -100, or 1, some of them."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(4, (x.shape[0], *x.shape[2:]), generator=generator)
    if ignored:
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return labels


def target(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(6))


def some(x: Tensor) -> Tensor:
    """Which classes each pixel is of, behind it."""
    return target(x).round().movedim(1, -1)


SIGNS = torch.tensor([1, -1, 1])
LISTED = torch.tensor([[3, 0, -1, 1], [-1, 0, 1, 2], [1, 2, 3, 0]])
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=torch.float64)

WHOLE = {
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
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, classes(x), label_smoothing=0.1),
    "cross_entropy, smoothed, weights, ignored": lambda x: F.cross_entropy(
        x, classes(x, True), WEIGHT, label_smoothing=0.2
    ),
    "cross_entropy, smoothed, summed": lambda x: F.cross_entropy(
        x, classes(x, True), reduction="sum", label_smoothing=0.2
    ),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(x, target(x).softmax(1)),
    "cross_entropy, probabilities of tiles": lambda x: F.cross_entropy(x, x.detach().flip(1).softmax(1)),
    "cross_entropy, probabilities, weights, smoothed": lambda x: F.cross_entropy(
        x, target(x).softmax(1), WEIGHT, label_smoothing=0.3
    ),
    "cross_entropy of a plain input": lambda x: F.cross_entropy(target(x), x.argmax(1)) + 0 * x.sum(),
    "cross_entropy, targets cut otherwise": lambda x: F.cross_entropy(
        x, x.detach().roll(1, 2)[:, :, 1:].argmax(1).repeat(1, 2, 1)[:, : x.shape[2]]
    ),
    "cross_entropy, all ignored": lambda x: F.cross_entropy(x, classes(x) * 0 - 100, reduction="sum"),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(1), classes(x, True), WEIGHT),
    "nll_loss, summed": lambda x: F.nll_loss(x, classes(x), reduction="sum", ignore_index=2),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), target(x).softmax(1), reduction="batchmean"),
    "kl_div, logarithms": lambda x: F.kl_div(
        x.log_softmax(1), target(x).log_softmax(1), reduction="sum", log_target=True
    ),
    "mse_loss, weights": lambda x: F.mse_loss(x, target(x), weight=target(x) + 1),
    "bce, weights": lambda x: F.binary_cross_entropy(x.sigmoid(), target(x), WEIGHT.view(4, 1, 1)),
    "bce with logits, weights": lambda x: F.binary_cross_entropy_with_logits(
        x, target(x), target(x), pos_weight=WEIGHT.view(4, 1, 1)
    ),
    "bce with logits, weights of tiles": lambda x: F.binary_cross_entropy_with_logits(x, target(x), x.detach().abs()),
    "nn.BCEWithLogitsLoss, a weight": lambda x: torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))(
        x, target(x).round()
    ),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, target(x), full=True),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, target(x), target(x) + x.square()),
    "gaussian_nll_loss, a variance for a row": lambda x: F.gaussian_nll_loss(x, target(x), target(x)[..., :1]),
    "gaussian_nll_loss, fewer dims": lambda x: F.gaussian_nll_loss(x, target(x), target(x)[..., 0] + 1),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, target(x).round() * 2 - 1),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, target(x).round() * 2 - 1),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x.flip(1), target(x).round() * 2 - 1, 0.1),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x.movedim(1, -1), some(x), WEIGHT),
    "multilabel_soft_margin_loss of columns": lambda x: F.multilabel_soft_margin_loss(x, target(x).round()),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, target(x), x.flip(1), 0.5, swap=True),
    "triplet_margin_loss of channels, summed": lambda x: F.triplet_margin_loss(
        *(y.movedim(1, -1) for y in (x, 2 * x, target(x))), p=1, size_average=False
    ),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(
        x, target(x), 2 * x, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), margin=0.3
    ),
    "cosine_embedding_loss": lambda x: (
        F.cosine_embedding_loss(x[:, 0, 0], x[:, 1, 1], SIGNS, 0.1)
        + F.cosine_embedding_loss(x[:, 0, 0], target(x)[:, 0, 0], -SIGNS, reduction="sum")
    ),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x[..., 2, 2], torch.tensor([0, 3, 1]), 2, weight=WEIGHT),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x[..., 2, 2], LISTED),
    "l1_loss, older options": lambda x: F.l1_loss(x, target(x), size_average=False),
    "a plain input": lambda x: F.mse_loss(target(x), x),
    "dice": lambda x: 1 - 2 * (x.sigmoid() * target(x)).sum() / (x.sigmoid().sum() + target(x).sum()),
}
SPREAD = {
    "cross_entropy per pixel": lambda x: F.cross_entropy(x, classes(x, True), reduction="none"),
    "cross_entropy per pixel, weights": lambda x: F.cross_entropy(x, classes(x), WEIGHT, reduction="none"),
    "cross_entropy per pixel, smoothed": lambda x: F.cross_entropy(
        x, classes(x, True), reduction="none", label_smoothing=0.1
    ),
    "kl_div per pixel": lambda x: F.kl_div(x, target(x), reduction="none"),
    "triplet_margin_loss per line": lambda x: F.triplet_margin_loss(x, target(x), x.flip(1), reduction="none"),
    "mse_loss per pixel": lambda x: F.mse_loss(x, target(x), reduction="none"),
    "bce with logits per pixel": lambda x: F.binary_cross_entropy_with_logits(x, target(x), reduction="none"),
}
CASES = functions(WHOLE, spread=False) | functions(SPREAD)

test_losses_equal_those_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS)


# Losses of tokens, as of language: rows (N * T, classes) of all of them, of which each rank has its own.


def rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, 4)


def words(x: Tensor, ignored: bool = True) -> Tensor:
    return classes(x, ignored).reshape(-1)


def with_token(x: Tensor) -> Tensor:
    """(N, classes, 1 + T): every rank has the first."""
    return torch.cat([torch.linspace(0, 1, 4, dtype=x.dtype).view(1, 4, 1).expand(x.shape[0], -1, -1), x.flatten(2)], 2)


def with_word(x: Tensor) -> Tensor:
    return torch.cat([torch.tensor([[1]] * x.shape[0]), words(x).view(x.shape[0], -1)], 1)


def of_tokens(x: Tensor) -> Tensor:
    return target(x).flatten(2)


WHOLE_TOKENS = {
    "cross_entropy": lambda x: F.cross_entropy(rows(x), words(x)),
    "cross_entropy, weights, smoothed": lambda x: F.cross_entropy(rows(x), words(x), WEIGHT, label_smoothing=0.2),
    "cross_entropy, summed": lambda x: F.cross_entropy(rows(x), words(x, False), reduction="sum"),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(rows(x), rows(target(x)).softmax(1), WEIGHT),
    "cross_entropy of what is spread": lambda x: F.cross_entropy(rows(x), rows(-x).argmax(1), WEIGHT),
    "cross_entropy of another order": lambda x: F.cross_entropy(
        rows(x), (-x).permute(0, 3, 2, 1).argmax(3).reshape(-1), WEIGHT
    ),
    "cross_entropy of a plain input": lambda x: F.cross_entropy(rows(target(x)), rows(x).argmax(1)) + 0 * x.sum(),
    "cross_entropy with a token": lambda x: F.cross_entropy(with_token(x), with_word(x), WEIGHT),
    "cross_entropy of tokens": lambda x: F.cross_entropy(x.flatten(2), words(x).view(3, -1), WEIGHT),
    "cross_entropy of all pixels": lambda x: F.cross_entropy(x.flatten(1), torch.tensor([1, 90, -100])),
    "cross_entropy of one image": lambda x: F.cross_entropy(x[0].flatten(), torch.tensor(90)),
    "cross_entropy, shares of pixels": lambda x: F.cross_entropy(x.flatten(1), x.detach().flatten(1).softmax(1)),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(rows(x), -1), words(x), WEIGHT),
    "by hand": lambda x: (rows(x).logsumexp(-1) - rows(x).gather(1, words(x, False)[:, None])[:, 0]).square().mean(),
    "multi_margin_loss": lambda x: F.multi_margin_loss(rows(x), words(x, False), weight=WEIGHT),
    "mse_loss with a token": lambda x: F.mse_loss(with_token(x), with_token(target(x))),
    "mse_loss, weights": lambda x: F.mse_loss(x.flatten(2), of_tokens(x), weight=of_tokens(x) + 1),
    "l1_loss of a token for all": lambda x: F.l1_loss(x.flatten(2), of_tokens(x)[:, :, 3:4].expand(3, 4, 96)),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(
        rows(x), rows(target(x)).round(), reduction="sum", pos_weight=WEIGHT
    ),
    "bce of what is spread": lambda x: F.binary_cross_entropy(rows(x).sigmoid(), rows(x.detach()).softmax(1)),
    "kl_div": lambda x: F.kl_div(F.log_softmax(rows(x), 1), rows(target(x)).softmax(1), reduction="batchmean"),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(rows(x), rows(target(x)), rows(target(x)) + 1),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(rows(x), rows(target(x)), WEIGHT),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(rows(x), rows(target(x)), rows(x).flip(1)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(
        rows(x), rows(target(x)), words(x, False) % 2 * 2 - 1, 0.1
    ),
}
SPREAD_TOKENS = {
    "cross_entropy per token": lambda x: F.cross_entropy(rows(x), words(x), WEIGHT, reduction="none"),
    "cross_entropy with a token, per token": lambda x: F.cross_entropy(
        with_token(x), with_word(x), reduction="none", label_smoothing=0.1
    ),
    "focal": lambda x: (
        (1 - F.softmax(rows(x), 1)) ** 2
        * F.binary_cross_entropy_with_logits(rows(x), rows(target(x)), reduction="none")
    ),
}
TOKENS = functions(WHOLE_TOKENS, sizes=[(12, 8)], spread=False) | functions(SPREAD_TOKENS, sizes=[(12, 8)])

test_losses_of_tokens_equal_those_of_the_whole = pytest.mark.sample(3)(table_test(__name__, OF_TOKENS, "TOKENS"))


@on_ranks(2)
def test_losses_that_would_not_be_exact_are_refused(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(2, 4, 6, 8), spatial.Grid(comm, rows=2))
    messages = []
    for loss in (
        lambda: F.cross_entropy(x, torch.zeros(2, 6, 7, dtype=torch.int64)),
        lambda: F.binary_cross_entropy(x.sigmoid(), torch.zeros(2, 4, 6, 1)),
        lambda: F.mse_loss(x, torch.zeros(2, 4, 6, 8), reduction="median"),
        lambda: F.cross_entropy(x.permute(0, 2, 1, 3), torch.zeros(2, 6, 4, 8)),
        lambda: F.nll_loss(x.permute(0, 2, 1, 3), torch.zeros(2, 4, 8, dtype=torch.int64)),
    ):
        with pytest.raises((ValueError, spatial.NoRule)) as caught:
            loss()
        messages.append(str(caught.value))
    comm.agree(None, messages=messages)
    for message, what in zip(
        messages,
        ("a target of shape (2, 6, 8)", "target size", "median", "of classes that ranks share", "dim 1 is not the cl"),
        strict=True,
    ):
        assert what in message
