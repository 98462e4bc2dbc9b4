"""Settings as JSON: what comes back is what went in, to the type."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl._numbers import Damaged
from mpi4dl.checkpoints.json_values import DEEPEST, LARGEST, MOST_LEVELS, decode, encode, parse
from tests.support.brute_force import patient

LEAVES = st.none() | st.booleans() | st.integers(-LARGEST, LARGEST) | st.floats(allow_nan=False) | st.text(max_size=5)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(max_size=7) | st.integers(-LARGEST, LARGEST) | st.sampled_from(["tuple", "pairs", "float"]), inner
        )
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    return decode(parse(json.dumps(encode(value), allow_nan=False).encode(), "file"), "file")


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


@pytest.mark.parametrize(
    "value", [Counter({"a": 1}), {"tuple": [1]}, {"a": 1, "counter": 2}, {1: {"float": "nan"}}], ids=repr
)
def test_what_looks_like_another_form_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert (type(found), found) == (type(value), value)


def test_values_without_need_of_a_form_are_plain_json() -> None:
    plain = {"lr": 0.1, "betas": [0.9, 0.99], "name": None}
    assert encode(plain) == plain


def nested(levels: int, inner: Any) -> Any:
    return [nested(levels - 1, inner)] if levels else inner


def test_what_could_not_be_read_again_is_refused() -> None:
    pairs: dict[Any, Any] = {}
    for _ in range(DEEPEST - 2):
        pairs = {1: pairs}
    for deep in (nested(DEEPEST, 1), pairs, torch.zeros((1,) * 60)):
        assert repr(there_and_back(deep)) == repr(deep)
    with pytest.raises(ValueError, match=f"nested more than {DEEPEST} deep"):
        encode(nested(DEEPEST + 1, 1))
    with pytest.raises(ValueError, match="a number of 65 bits cannot be kept"):
        encode({"n": LARGEST + 1})


def test_a_file_may_be_nested_to_a_limit() -> None:
    text = lambda levels: b"[" * levels + b"1" + b"]" * levels  # noqa: E731
    parse(text(MOST_LEVELS), "file")
    with pytest.raises(Damaged, match=f"file cannot be read: it is nested more than {MOST_LEVELS} deep"):
        parse(text(MOST_LEVELS + 1), "file")


FORGED = [
    {"tuple": 3},
    {"float": "1e3"},
    {"float": 3},
    {"pairs": {"a": 1}},
    {"pairs": [[1]]},
    {"pairs": [[[], 1]]},
    {"counter": [["a", "b"]]},
    {"tensor": [1]},
    {"tensor": {"dtype": "nn", "values": 1}},
    {"tensor": {"dtype": "float32", "values": [[1], [1, 2]]}},
    {"tensor": {"dtype": "float32", "values": "1"}},
    {"tensor": {"dtype": "int8", "values": 1000}},
]


@pytest.mark.parametrize("plain", FORGED, ids=json.dumps)
def test_what_nobody_encoded_is_damaged(plain: Any) -> None:
    with pytest.raises(Damaged, match=r"^file: 'a'.* must be |^file: 'a'.* has no "):
        decode(parse(json.dumps({"a": plain}).encode(), "file"), "file")


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
