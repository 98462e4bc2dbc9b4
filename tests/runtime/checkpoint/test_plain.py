"""Settings as JSON: what comes back is what went in, to the type."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.runtime.checkpoint.plain import decode, encode
from tests.brute_force import patient

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=7) | st.integers() | st.sampled_from(["tuple", "pairs", "float"]), inner)
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@patient
@given(NESTS)
def test_every_nest_comes_back(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_numbers_that_json_lacks_come_back() -> None:
    assert math.isnan(there_and_back(math.nan))
    rate = torch.tensor(0.1)
    found = there_and_back({"lr": rate, "betas": (0.9, -math.inf), "milestones": Counter({30: 1, 60: 2})})
    assert torch.equal(found["lr"], rate)
    assert found["lr"].dtype is rate.dtype
    assert found["betas"] == (0.9, -math.inf)
    assert isinstance(found["milestones"], Counter)
    assert found["milestones"] == {30: 1, 60: 2}


def test_what_has_no_such_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be kept in a checkpoint: only numbers, text, tensors and nests"):
        encode({"anneal": lambda x: x})


SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 2}),
    ("MultiStepLR", {"milestones": [2, 4]}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("CosineAnnealingLR", {"T_max": 9}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ("LinearLR", {}),
    ("PolynomialLR", {}),
    ("OneCycleLR", {"max_lr": 0.5, "total_steps": 20}),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 3}),
    ("ReduceLROnPlateau", {"patience": 1}),
]


@pytest.mark.parametrize(("name", "options"), SCHEDULERS, ids=[name for name, _ in SCHEDULERS])
def test_schedules_go_on_where_they_were(name: str, options: dict[str, Any]) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3, momentum=0.9)
        return optimizer, getattr(torch.optim.lr_scheduler, name)(optimizer, **options)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
        return found

    first, second = made(), made()
    rates(*first, steps=3)
    second[1].load_state_dict(there_and_back(first[1].state_dict()))
    settings = {key: value for key, value in first[0].param_groups[0].items() if key != "params"}
    second[0].param_groups[0].update(there_and_back(settings))
    second[0].step()
    assert rates(*second, steps=5) == rates(*first, steps=5)
