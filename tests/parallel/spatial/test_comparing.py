"""The comparison itself notices what is wrong: a value, a gradient, a shape, a dtype, a result that is not spread."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, Case, compare, difference
from tests.pool.ranks import on_ranks


def on_tiles(wrong: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that is the identity on a whole image, and something else on tiles."""
    return lambda x: wrong(x * 1) if isinstance(x, spatial.SpatialTensor) else x * 1


class Forgetful(nn.Module):
    """A layer that, on tiles, forgets a part of its weight's gradient, and its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, spatial.SpatialTensor):
            return x * (0.5 * self.weight + 0.5 * self.weight.detach())
        self.steps += 1
        return x * self.weight


WRONG: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], list[str]]] = {
    "right": (lambda: on_tiles(lambda x: x), []),
    "values": (lambda: on_tiles(lambda x: x + 1e-8), ["result 0: off by 1.0e-08"]),
    "gradients": (lambda: on_tiles(lambda x: 2 * x - x.detach()), ["gradient of the image: off by"]),
    "shapes": (lambda: on_tiles(lambda x: x[:, :3]), ["shape (3, 3, 6, 7), but plain (3, 4, 6, 7)"]),
    "dtypes": (lambda: on_tiles(lambda x: x.float()), ["torch.float32, but plain"]),
    "spread": (lambda: on_tiles(spatial.gather), ["result 0 is not spread over ranks"]),
    "not a number": (lambda: on_tiles(lambda x: x / (x - x)), ["not finite at other places"]),
    "integers": (lambda: lambda x: on_tiles(lambda y: y + 0.6)(x).round().long(), ["504 elements differ, first"]),
    "parameters": (Forgetful, ["gradient of weight: off by", "buffer steps: off by"]),
}


@on_ranks(2)
def test_what_is_wrong_is_said(comm: Communicator) -> None:
    torch.set_default_dtype(torch.float64)
    shape = (3, 4, 6, 7)
    found = {
        name: "\n".join(compare(comm, Case(make, (shape,)), shape, Arrangement(2, 1)))
        for name, (make, _) in WRONG.items()
    }
    assert found["right"] == ""
    for name, (_, expected) in WRONG.items():
        assert all(text in found[name] for text in expected), (name, found[name])


@pytest.mark.parametrize("factor", [1 + 1e-12, 1 - 1e-12])
def test_rounding_is_not_a_difference(factor: float) -> None:
    x = torch.tensor([1.0, float("inf"), float("nan"), 0.0], dtype=torch.float64)
    assert difference("x", x * factor, x) == []
    x[1:] = torch.tensor([float("inf"), 2.0, 4.0])
    wrong = x + torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    said = "x: off by 5.0e-01 of 4.0e+00; 1 of 4 elements differ, first (3,): 4.5, but plain 4.0"
    assert difference("x", wrong, x) == [said]
