"""Operators that treat every pixel alike, in place and broadcast too, give on tiles what they give on the image."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.parallel.spatial.tensor import ALIASES, find_rule, function_name
from tests.parallel.spatial.comparing import ARRANGEMENTS, chosen, functions, modules, table_test
from tests.parallel.spatial.test_operator_samples import operators


def plane(x: Tensor) -> Tensor:
    """A plain tensor of the image's height and width, the same on every rank."""
    return torch.arange(float(x.shape[-2] * x.shape[-1])).view(x.shape[-2:]) / 7


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    y.mul_(3).sub_(x)
    y /= 2
    return y.relu_()


def write_channel(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 0.5
    y[:, 2] = x[:, 0]
    y[:, 3:] = x[:, :1] * 2
    return y


class Mixer(nn.Module):
    """Linear layers over the channels of (N, H, W, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.movedim(1, -1))


SPREAD = {
    "arithmetic": lambda x: (2 - x) / (1 + x * x) - x**2 + -x + (3.0 // (2 + x.detach().abs())),
    "comparisons": lambda x: ((x > 0) & ~(x >= 1)) | (x == 0.25) ^ (x != x),
    "mathematics": lambda x: x.exp().log1p().sqrt() + torch.sin(x).pow(2) + x.tanh().erf(),
    "clamp": lambda x: x.clamp(-0.5, 0.5) + torch.clamp(x, min=0) + x.clip(max=1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x) + x.where(x < 1, 2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "maximum": lambda x: torch.maximum(x, -x) + torch.minimum(x, x * x),
    "atan2": lambda x: torch.atan2(x, 1 + x),
    "in place": in_place,
    "F.relu in place": lambda x: F.relu(x * 1, inplace=True),
    "write a channel": write_channel,
    "a number": lambda x: x + torch.tensor(2.0),
    "per channel": lambda x: x * torch.arange(4.0).view(1, 4, 1, 1) + torch.arange(4.0)[:, None, None],
    "per sample": lambda x: x * torch.arange(1.0, 4.0).view(3, 1, 1, 1),
    "1x1": lambda x: x + torch.full((1, 1), 3.0),
    "a plane of the image's size": lambda x: x + plane(x),
    "a plane before": lambda x: plane(x) * x,
    "a row": lambda x: x + torch.arange(float(x.shape[-1])),
    "a column": lambda x: x * torch.arange(float(x.shape[-2])).unsqueeze(1),
    "the size of the whole": lambda x: x - torch.arange(float(x.numel())).view(x.shape) / 100,
    "the shape": lambda x: x * x.shape[2] + x.size(-1) / x.numel() * x.dim() + len(x),
    "means broadcast back": lambda x: x - x.mean((2, 3), keepdim=True) * x.mean(2, keepdim=True),
    "a mean before": lambda x: x.mean(2, keepdim=True) - x,
    "rows by columns": lambda x: x.mean(3, keepdim=True) * x.mean(2, keepdim=True),
    "fewer dims": lambda x: x[:, 0] + x.sum(1) * x[:, :1].mean(0),
    "cut differently": lambda x: F.conv2d(x, torch.ones(2, 4, 1, 1))[..., 2:] + F.avg_pool2d(x[:, :2], 1, 1)[..., :-2],
    "residual of valid convolution": lambda x: x[..., 1:-1, 1:-1] + F.conv2d(x, torch.ones(4, 1, 3, 3), groups=4),
    "branches of stride two": lambda x: F.max_pool2d(x, 3, 2, 1) + F.conv2d(x, torch.ones(4, 4, 1, 1), stride=2),
    "branches of another alignment": lambda x: F.avg_pool2d(x, 5, 2, 2) * x[..., ::2, ::2],
    "type promotion": lambda x: x.float() + x,
    "type promotion of integers": lambda x: (3 * x).int() / 2 + (x > 0),
    "int and bool": lambda x: (3 * x).to(torch.int64) * (x > 0),
    "to": lambda x: x.to(torch.float32).to(dtype=torch.float64),
    "to as": lambda x: x.half().type_as(x) + x.float().to(x),
    "a plain tensor to this": lambda x: torch.arange(4, device=x.device).view(1, 4, 1, 1).to(x) * x,
    "a plain tensor of its type": lambda x: torch.arange(3.0).view(3, 1, 1, 1).float().type_as(x) * x,
    "other names": lambda x: torch.multiply(x, x).subtract(2).divide(3).absolute().negative() + torch.clip(x, 0),
    "other names in place": lambda x: (x * 1).multiply_(2).subtract_(x).clip_(-1, 1),
    "other names of comparisons": lambda x: torch.greater(x, 0) | x.less_equal(-1) | x.not_equal(2),
    "other names of functions": lambda x: torch.special.expit(x) + torch.arctan2(x, 2 + x) + x.arcsinh(),
    "zeros_like": lambda x: torch.zeros_like(x) + torch.ones_like(x[:, :1]) + torch.full_like(x, 2.0),
    "clone and detach": lambda x: x.clone() + x.detach(),
    "dropout without training": lambda x: F.dropout(x, 0.5, training=False),
    "attention gate": lambda x: x * (x[:, :2] * x[:, 2:]).sum(1, keepdim=True).sigmoid(),
    "isfinite": lambda x: torch.isfinite(1 / x.relu()),
    "signs": lambda x: torch.sign(x) + torch.round(x) + torch.floor(x) % 2,
}
CASES = modules(
    lambda: nn.ReLU(),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(inplace=True), nn.Hardswish()),
    lambda: nn.GELU(),
    lambda: nn.GELU("tanh"),
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.ELU(),
    lambda: nn.SELU(),
    lambda: nn.CELU(),
    lambda: nn.ReLU6(),
    lambda: nn.Hardsigmoid(),
    lambda: nn.Hardtanh(),
    lambda: nn.Mish(),
    lambda: nn.Softplus(),
    lambda: nn.Softsign(),
    lambda: nn.Tanhshrink(),
    lambda: nn.LogSigmoid(),
    lambda: nn.Threshold(0.1, 20),
    lambda: nn.PReLU(),
    lambda: nn.PReLU(4),
    lambda: nn.Softmax2d(),
    lambda: nn.Identity(),
)
CASES |= functions(SPREAD)
CASES |= modules(
    lambda: Mixer(),
)

test_pointwise_operators_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


def _rules_differ(function: Any, alias: Any) -> bool:
    return function is not None and alias is not None and bool(find_rule(function)) and find_rule(alias) is None


def test_functions_have_rules_by_all_their_names() -> None:
    pairs = [
        (getattr(place, name + suffix, None), getattr(place, alias + suffix, None))
        for place in (torch, Tensor)
        for alias, name in ALIASES.items()
        for suffix in ("", "_")
    ]
    assert not [alias for function, alias in pairs if _rules_differ(function, alias)]


@pytest.mark.exhaustive
def test_names_of_functions_are_all_that_pytorch_has() -> None:
    pairs = [
        (getattr(op, kind), getattr(alias, kind))
        for op in operators().values()
        for alias in op.aliases
        for kind in ("op", "method_variant", "inplace_variant")
    ]
    assert not [function_name(alias) for function, alias in pairs if _rules_differ(function, alias)]
