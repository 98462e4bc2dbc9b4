"""The states of random number generators: each goes on with what it would have drawn."""

import json
import random

import numpy as np
import torch

from mpi4dl._numbers import typed
from mpi4dl.checkpoints.json_values import SavedRandomness


def draw() -> list[float]:
    """From all three; twice from the normal distribution, of which NumPy and Python draw two at a time."""
    found = [float(torch.rand(())), float(torch.randn(())), random.random(), random.gauss(0, 1)]
    return [*found, float(np.random.rand()), float(np.random.randn())]


def test_each_goes_on_with_what_it_would_have_drawn() -> None:
    torch.manual_seed(1)
    draw()
    state = json.loads(json.dumps(SavedRandomness.now()._asdict()))
    expected = draw(), draw()
    assert not set(expected[0]) & set(expected[1])
    typed(SavedRandomness, state, "state").states("state").put()
    assert (draw(), draw()) == expected
