"""Pooling of plain images within `quick_pooling` is PyTorch's, with its gradients and theirs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import quick_pooling, shifts

LAYERS = {
    "max 3": nn.MaxPool2d(3, 1, 1),
    "max 3, every second": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "max 2": nn.MaxPool2d(2),
    "max (3, 2), dilated": nn.MaxPool2d((3, 2), (1, 2), (1, 0), dilation=2),
    "max of volumes": nn.MaxPool3d(3, 2, 1),
    "average 3": nn.AvgPool2d(3, 1, 1),
    "average 5": nn.AvgPool2d(5, 2),
    "average of volumes": nn.AvgPool3d(3, 1, 1),
}
OTHERS = {
    "average, windows of fewer pixels": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "average, padding not counted": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "average of another divisor": nn.AvgPool2d(3, divisor_override=5),
}


def image_for(layer: nn.Module) -> Tensor:
    size = (15, 13, 17) if "3d" in type(layer).__name__ else (67, 59)
    torch.manual_seed(0)
    return torch.randn(2, 16, *size, dtype=torch.float64).mul(3).round().requires_grad_()


@pytest.mark.parametrize("name", LAYERS)
def test_values_gradients_and_theirs(name: str) -> None:
    layer, image = LAYERS[name], image_for(LAYERS[name])
    found = []
    for quick in (False, True):
        with spatial.quick_pooling() if quick else torch.enable_grad():
            y = layer(image)
        assert (type(y.grad_fn).__name__ in ("_ChosenBackward", "_MeansBackward")) is quick
        y = y.relu_() if quick else y.relu()  # PyTorch lets what it pooled be overwritten
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).requires_grad_()
        (of_image,) = torch.autograd.grad((y * weights).sum(), image, create_graph=True)
        (of_weights,) = torch.autograd.grad((of_image**2).sum(), weights)
        found.append((y, of_image, of_weights))
    for plain, quicker in zip(*found, strict=True):
        assert torch.allclose(plain, quicker, rtol=1e-12, atol=1e-14)


def refuse(*args: Any) -> None:
    raise AssertionError("this is for PyTorch's own kernel")


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_to_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "means", refuse)
    image = image_for(OTHERS[name])
    with spatial.quick_pooling():
        assert torch.equal(OTHERS[name](image), OTHERS[name](image.detach()))
        assert F.max_pool2d(image, 3, return_indices=True)[1].dtype == torch.int64
        assert torch.equal(F.max_pool2d(image[0], 3), F.max_pool2d(image, 3)[0])
        with pytest.raises(RuntimeError, match="pad should be at most half"):
            F.max_pool2d(image, 3, 1, 2)
        spoilt = image.detach().clone()
        spoilt[0, 0, 0, 0] = float("nan")
        assert F.max_pool2d(spoilt, 3, 1, 1)[0, 0, 0, 0].isnan()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_elsewhere(reentrant: bool) -> None:
    image = image_for(LAYERS["max 3"])
    with spatial.quick_pooling():
        y = checkpoint(LAYERS["max 3"], image, use_reentrant=reentrant)
    (found,) = torch.autograd.grad(y.sum(), image) if not reentrant else (y.sum().backward(), image.grad)[1:]
    assert torch.equal(found, torch.autograd.grad(LAYERS["max 3"](image).sum(), image)[0])


def test_who_needs_it() -> None:
    assert quick_pooling.pools(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.MaxPool2d(2))))
    assert not quick_pooling.pools(nn.Sequential(nn.Linear(2, 2), nn.AdaptiveAvgPool2d(1)))
