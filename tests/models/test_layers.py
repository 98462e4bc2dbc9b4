"""The shared initial values are those of He et al. (the head is tested with the models that have one)."""

import pytest
import torch
from torch import nn

from mpi4dl.models.layers import initialize_convolutions


def test_convolutions_keep_the_variance_of_gradients():
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.Linear(64, 2))
    linear = model[1].weight.clone()
    initialize_convolutions(model)
    assert model[0].weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)
    assert torch.equal(model[1].weight, linear)
