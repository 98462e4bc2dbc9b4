"""Hooks on gradients of spread tensors, and of copies, see the whole gradient, and change it as in plain PyTorch."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, arrange, compare_models, difference
from tests.pool.ranks import on_ranks

HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda g: g.clamp(-0.01, 0.01),
    "of size 1": lambda g: g / g.square().sum().sqrt(),
    "sign": torch.sign,
    "shifted": lambda g: g - g.mean(),
    "plain": lambda g: torch.linspace(-1, 1, g.numel()).view(g.shape),
    "watched": lambda g: None,
}
ALSO_EMPTY = Arrangement(2, 2, style="uneven")


class Hooked(nn.Module):
    """A hook on an activation with all axes of the image, on one with columns alone, and on features without any.

    One more on tokens, a class token before them and some of them once more behind them.
    """

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 3, 3, 2, 1), nn.Conv2d(3, 3, 3, 1, 1), nn.Linear(3, 3)
        self.hook, self.kept = hook, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.second(torch.tanh(h)) * h
        rows = y.mean(2)
        tokens = y.flatten(2).mT
        tokens = torch.cat([torch.ones(len(y), 1, 3) * rows.mean(), tokens, tokens[:, :2]], 1)
        features = rows.square().mean(2) + (tokens * tokens.sin()).mean(1)
        logits = self.last(features)
        outer = logits * features.sum(0)
        self.kept = [h, y, rows, tokens, features, outer]
        for value in self.kept:
            value.retain_grad()
            value.retain_grad()  # which changes nothing
            value.register_hook(self.hook)
        return outer.square()


@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS, ALSO_EMPTY], ids=str)
@pytest.mark.sample(4)
@on_ranks()
def test_what_a_hook_returns_counts_as_in_plain_pytorch(comm: Communicator, arrangement: Arrangement) -> None:
    for name in HOOKS:
        wrong = train(comm, name, arrangement)
        assert not wrong, (name, wrong)


def train(comm: Communicator, name: str, arrangement: Arrangement) -> list[str]:
    torch.set_default_dtype(torch.float64)
    image = torch.randn(3, 2, 11, 13)
    torch.manual_seed(1)
    ours, plain = Hooked(HOOKS[name]), Hooked(HOOKS[name])
    plain.load_state_dict(ours.state_dict())
    our_image, plain_image = image.clone().requires_grad_(), image.clone().requires_grad_()
    plain(plain_image).sum().backward()
    x = arrange(our_image, comm, arrangement)
    with spatial.whole_gradients(x.layout.grid):
        (spatial.gather(ours(x)).sum() / comm.size).backward()
    wrong = []
    wrong += difference("gradient of the image", comm.all_reduce(our_image.grad), plain_image.grad)
    wrong += compare_models(comm, ours, plain)
    for i, (a, b) in enumerate(zip(ours.kept, plain.kept, strict=True)):
        wrong += difference(f"retained {i}", spatial.gather(a.grad), b.grad)
    return wrong


@on_ranks(2)
def test_a_tile_that_asks_for_a_gradient_has_it(comm: Communicator) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 6)
    x = spatial.shard(image, spatial.Grid(comm, rows=2)).requires_grad_()
    assert x.grad is None
    (spatial.gather(x.square()).sum() / comm.size).backward()
    assert x.grad is not None
    torch.testing.assert_close(spatial.gather(x.grad), 2 * image)


@on_ranks(2)
def test_a_hook_returns_a_gradient_of_the_same_shape(comm: Communicator) -> None:
    x = arrange(torch.randn(1, 2, 8, 8, requires_grad=True), comm, Arrangement(1, 2))
    y = x * 2
    y.register_hook(lambda g: g.sum(1))
    with pytest.raises(ValueError, match="a hook got a gradient") as caught:
        spatial.gather(F.relu(y)).sum().backward()
    assert str(caught.value) == "a hook got a gradient of shape (1, 2, 8, 8), but returned one of (1, 8, 8)"


@on_ranks(2)
def test_a_hook_of_another_thread_is_plain(comm: Communicator) -> None:
    """Such as of a loop that trains something else meanwhile, on one rank."""
    seen, x = list[Tensor](), torch.ones(2, requires_grad=True)

    def other() -> None:
        y = x * 2
        y.register_hook(seen.append)
        y.sum().backward()

    with spatial.whole_gradients(spatial.Grid(comm, rows=2)):
        if comm.rank == 0:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert [value.tolist() for value in seen] == [[1.0, 1.0]][: 1 - comm.rank]
