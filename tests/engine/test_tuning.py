"""mpi4dl.engine.tuning: what patterns freeze, and which parameters share learning rates and weight decays."""

from typing import Any

import pytest
from torch import nn

from mpi4dl.comm import Communicator
from mpi4dl.engine.tuning import freeze, keep_in_evaluation, parameter_groups
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import on_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[0].weight  # tied

    def names_in(self, groups: list[dict[str, Any]]) -> list[set[str]]:
        name_of = {id(p): name for name, p in self.named_parameters()}
        return [{name_of[id(p)] for p in group["params"]} for group in groups]


ALL = {name for name, _ in Model().named_parameters()}
NORM = {"norm.weight", "norm.bias"}


def test_what_matches_is_frozen_and_nothing_else() -> None:
    model = Model()
    assert freeze(model, "first.*,norm.bias") == ["first.weight", "first.bias", "norm.bias"]
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"first.weight", "first.bias", "norm.bias"}
    with pytest.raises(ValueError, match="none"):
        freeze(model, "none.*")


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    model = Model()
    assert freeze(model, "head.weight") == ["body.0.weight"]
    assert not model.head.weight.requires_grad


def test_modules_that_match_stay_in_evaluation_with_what_is_in_them() -> None:
    model = Model()
    assert keep_in_evaluation(model, "body,norm") == ["norm", "body"]
    assert {name for name, module in model.named_modules() if not module.training} == {
        "norm",
        "body",
        "body.0",
        "body.1",
    }


def test_without_patterns_there_is_one_group_of_all() -> None:
    model = Model()
    groups = parameter_groups(model)
    assert [{**group, "params": None} for group in groups] == [{"params": None}]
    assert model.names_in(groups) == [ALL]
    assert len(groups[0]["params"]) == len(ALL)


def test_the_first_pattern_that_matches_counts() -> None:
    model = Model()
    groups = parameter_groups(model, {"norm.*": 0.1, "*.bias": 0.2}, {"*.bias": 0.0})
    assert [(group.get("lr"), group.get("weight_decay")) for group in groups] == [
        (None, None),
        (0.2, 0.0),
        (0.1, None),
        (0.1, 0.0),
    ]
    biases = {"first.bias", "body.0.bias", "head.bias"}
    assert model.names_in(groups) == [ALL - biases - NORM, biases, {"norm.weight"}, {"norm.bias"}]


@pytest.mark.parametrize("decays", [None, {"norm.*": 0.0}])
def test_rates_and_decays_need_not_be_both(decays: dict[str, float] | None) -> None:
    model = Model()
    rates = None if decays else {"norm.*": 0.5}
    plain, norms = parameter_groups(model, rates, decays)
    assert norms.keys() == {"params", "weight_decay" if decays else "lr"}
    assert model.names_in([plain, norms]) == [ALL - NORM, NORM]


def test_what_is_frozen_is_in_no_group_unless_it_is_trained_later() -> None:
    model = Model()
    freeze(model, "first.*")
    first = {"first.weight", "first.bias"}
    assert model.names_in(parameter_groups(model)) == [ALL - first]
    assert model.names_in(parameter_groups(model, later=["first.bias"])) == [ALL - {"first.weight"}]
    freeze(model, "*")
    with pytest.raises(ValueError, match="all parameters are frozen"):
        parameter_groups(model)


class Chain(nn.Sequential):
    """Its first and its last layer are tied."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))
        self[3].weight = self[0].weight


@on_ranks(2)
def test_what_is_tied_over_stages_of_one_rank_is_in_its_group_once(comm: Communicator) -> None:
    """How many parameters each group has on this rank, and how many of these are different ones."""
    held = split(Chain, Plan(((1,), (1,)), bidirectional=1), comm, balance=(2, 2), image=(2, 4))
    groups = [group["params"] for group in parameter_groups(held, {"*.bias": 0.1})]
    assert ([len(group) for group in groups], [len({id(p) for p in group}) for group in groups]) == ([3, 4], [3, 4])


@pytest.mark.parametrize("which", ["rates", "decays"])
def test_a_pattern_that_matches_nothing_is_an_error(which: str) -> None:
    with pytest.raises(ValueError, match="nobody"):
        parameter_groups(Model(), **{which: {"nobody.*": 0.1}})
