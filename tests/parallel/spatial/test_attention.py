"""Attention where ranks share the batch equals attention on the whole batch, and is refused where they share tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, arrange
from tests.pool.ranks import Ranks

BATCH, TOKENS, FEATURES = 3, 6, 4  # of 3 images, ranks have 1 and 2
MASK = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill_(torch.ones(TOKENS, TOKENS).triu(1) > 0, -1e9)
sdpa = F.scaled_dot_product_attention


def sequence(image: Tensor) -> Tensor:
    """(N, FEATURES, 2, 3) -> (N, TOKENS, FEATURES)."""
    return image.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention over the pixels of an image; `options` are those of the call."""

    def __init__(self, options: dict[str, Any], **own: Any) -> None:
        super().__init__()
        self.options, self.attention = options, nn.MultiheadAttention(FEATURES, 2, **own)

    def forward(self, image: Tensor) -> Any:
        x = sequence(image)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        found, weights = self.attention(x, x * 2, x + 1, **self.options)
        return found if weights is None else (found, weights)


ALIKE: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "sdpa": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x) * 2),
    "sdpa, heads": lambda: lambda x: sdpa(*(sequence(x).unflatten(2, (2, 2)).transpose(1, 2) for _ in range(3))),
    "sdpa, mask": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x), attn_mask=MASK),
    "sdpa, causal": lambda: lambda x: sdpa(sequence(x), sequence(x), sequence(x), is_causal=True, scale=0.3),
    "mha": lambda: Attention({"need_weights": False}, batch_first=True),
    "mha, weights": lambda: Attention({}, batch_first=True),
    "mha, weights of heads": lambda: Attention({"average_attn_weights": False}),
    "mha, tokens first": lambda: Attention({"need_weights": False}),
    "mha, mask": lambda: Attention({"attn_mask": MASK, "need_weights": False}, batch_first=True),
    "mha, own dims": lambda: Attention({}, batch_first=True, kdim=FEATURES, vdim=FEATURES, add_bias_kv=True),
}


def compare(comm: Communicator, name: str, training: bool) -> None:
    """Outputs, and the gradients of the image and of all parameters."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    function = ALIKE[name]()
    parameters = []
    if isinstance(function, nn.Module):
        parameters = list(function.train(training).parameters())
    image = torch.randn(BATCH, FEATURES, 2, 3, requires_grad=True)

    def run(image: Tensor, share: int) -> list[Tensor]:
        found = function(image)
        outputs = [spatial.gather(x) for x in (found if isinstance(found, tuple) else (found,))]
        weights = [torch.arange(float(x.numel())).view(x.shape).cos() for x in outputs]
        loss = sum(((x * w).sum() for x, w in zip(outputs, weights, strict=True)), torch.zeros(()))
        gradients = torch.autograd.grad(loss / share, [source, *parameters])
        return [*outputs, *gradients]

    source = image
    expected = run(image, 1)
    tiles = arrange(image, comm, Arrangement(1, 1, batch=2))
    found = run(tiles, comm.size)
    num_outputs = len(expected) - 1 - len(parameters)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        whole = ours if i < num_outputs else comm.all_reduce(ours.clone())
        torch.testing.assert_close(whole, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ALIKE)
def test_attention_of_a_shared_batch_is_that_of_the_whole_one(ranks: Ranks, name: str, training: bool) -> None:
    ranks(2).run(compare, name, training)


SPREAD = "the tokens, which attend to each other, are spread over ranks"
MASKED = "a mask that differs from image to image"
DROPS = "choose a dropout of 0 within attention"
UNLIKE = "query, key and value are not spread over ranks alike"
TILES, SHARED = Arrangement(1, 2), Arrangement(1, 1, batch=2)
REFUSED: dict[str, tuple[Arrangement, Callable[[Tensor], Any], str]] = {
    "sdpa, tokens": (TILES, lambda x: sdpa(x, x, x), SPREAD),
    "sdpa, one image": (SHARED, lambda x: sdpa(x[:, :, 0, 0], x[:, :, 0, 0], x[:, :, 0, 0]), SPREAD),
    "sdpa, unlike": (SHARED, lambda x: sdpa(x, torch.zeros(BATCH, FEATURES, 2, 3), x), UNLIKE),
    "sdpa, masks": (SHARED, lambda x: sdpa(x, x, x, attn_mask=torch.zeros(BATCH, 1, 2, 2)), MASKED),
    "sdpa, spread mask": (SHARED, lambda x: sdpa(x, x, x, attn_mask=x[:, :1, :, :2]), MASKED),
    "sdpa, dropout": (SHARED, lambda x: sdpa(x, x, x, dropout_p=0.1), DROPS),
    "mha, one image": (
        SHARED,
        lambda x: nn.MultiheadAttention(BATCH, 1)(*(x[:, :, 0, 0].transpose(0, 1),) * 3),
        SPREAD,
    ),
    "mha, padding": (
        SHARED,
        Attention({"key_padding_mask": torch.zeros(BATCH, TOKENS, dtype=torch.bool)}, batch_first=True),
        MASKED,
    ),
    "mha, masks": (
        SHARED,
        Attention({"attn_mask": torch.zeros(2 * BATCH, TOKENS, TOKENS)}, batch_first=True),
        MASKED,
    ),
    "mha, dropout": (SHARED, Attention({}, batch_first=True, dropout=0.1), DROPS),
}


def refuse(comm: Communicator, name: str) -> str:
    arrangement, function, _ = REFUSED[name]
    tiles = arrange(torch.randn(BATCH, FEATURES, 2, 3), comm, arrangement)
    with pytest.raises(spatial.NoRule) as refused:
        function(tiles)
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_compute_apart_is_refused(ranks: Ranks, name: str) -> None:
    for said in ranks(2).run(refuse, name):
        assert REFUSED[name][2] in said
        assert "attention" in said.split(" has no exact rule")[0]
