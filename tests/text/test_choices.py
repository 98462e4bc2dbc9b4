"""Which token is chosen: by the formulas of temperature, top-k, top-p and repetition penalty, and by the seed alone."""

import math
import re
from typing import Any

import pytest
import torch

from mpi4dl.text.batcher import Chooser, penalized, probabilities
from mpi4dl.text.options import Sampling

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.5], dtype=torch.float64)


def by_hand(temperature: float, top_k: int, top_p: float) -> list[float]:
    """The probabilities, token by token."""
    exponentials = {i: math.exp(float(x) / temperature) for i, x in enumerate(LOGITS)}
    ranked = sorted(exponentials, key=lambda i: (-exponentials[i], i))[: top_k or len(LOGITS)]
    total, before, kept = sum(exponentials[i] for i in ranked), 0.0, []
    for i in ranked:
        if before < top_p:
            kept.append(i)
        before += exponentials[i] / total
    total = sum(exponentials[i] for i in kept)
    return [exponentials[i] / total if i in kept else 0.0 for i in range(len(LOGITS))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (2, 1.0), (0, 0.5), (0, 1e-9), (4, 0.8), (99, 1.0)])
def test_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    found = probabilities(LOGITS, temperature, top_k, top_p)
    assert found.tolist() == pytest.approx(by_hand(temperature, top_k, top_p), abs=1e-12)


def test_draws_have_the_probabilities() -> None:
    chooser = Chooser(Sampling(temperature=0.7, top_k=4, seed=5), [])
    drawn = torch.tensor([chooser.choose(LOGITS) for _ in range(4000)]).bincount(minlength=len(LOGITS)) / 4000
    assert drawn.tolist() == pytest.approx(by_hand(0.7, 4, 1.0), abs=0.03)


def test_cold_draws_of_large_logits_are_finite() -> None:
    assert Chooser(Sampling(temperature=1e-6, seed=0), []).choose(LOGITS * 1e4) == 1


def test_the_penalty_makes_what_occurred_less_probable() -> None:
    found = penalized(LOGITS, {1, 2}, 2.0)
    assert found.tolist() == [1.0, 1.5, -4.0, 2.5, 0.0, 2.5]
    chooser = Chooser(Sampling(temperature=0, repetition_penalty=2.0), [1])
    assert [chooser.choose(LOGITS) for _ in range(4)] == [3, 5, 1, 1]  # 2.5 once, then 2.5 / 2, then 3 / 2


def test_seeds() -> None:
    def drawn(seed: int | None) -> list[int]:
        chooser = Chooser(Sampling(seed=seed), [])
        return [chooser.choose(LOGITS) for _ in range(30)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is not possible: it must be a whole number of at least 1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": -0.1}, "a number of at least 0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "greater than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"stop": ("",)}, "stop=('',) is not possible"),
    ],
)
def test_what_cannot_be_asked(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Sampling(**values)
