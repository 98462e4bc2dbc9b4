"""benchmarks.torchvision_models: the table has every model, the page is made of it, and some are compared anew."""

import json
from typing import Any

import pytest
import torch

from benchmarks.torchvision_models import EXACT, case_of, compared, facts_of, page, wanted, worst_difference
from mpi4dl.comm import Communicator
from mpi4dl.models import registry
from tests.benchmarks.checks import options_of
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT

RESULTS: dict[str, Any] = json.loads((ROOT / "docs/results/torchvision.json").read_text())
MODELS: dict[str, Any] = RESULTS["models"]
QUICK = ("squeezenet1_1", "shufflenet_v2_x0_5")
COMPARED = sorted(name for name, row in MODELS.items() if row.get("grid") == [2, 2])


def test_the_table_has_every_model_of_torchvision() -> None:
    missing = wanted(options_of("torchvision_models"), MODELS)
    assert not missing, f"measure them: python -m benchmarks run torchvision_models --only {','.join(missing)}"


def test_all_are_exact_or_refused_or_too_large() -> None:
    for name, row in MODELS.items():
        if row["outcome"] == "exact":
            assert row["difference"] <= EXACT, name
        elif row["outcome"] == "rules":
            assert row["parameters"] > options_of("torchvision_models").many
        elif row["outcome"] == "no rule":
            assert name == "mvit_v2_s"
        else:
            assert (row["outcome"], row["why"]) == ("refused", registry.refusal(name))
        assert "whole" not in row, f"{name} cannot be cut into stages"


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "docs/reference/torchvision.md").read_text() == page(RESULTS)


def test_the_page_says_what_differs_and_what_has_no_rule() -> None:
    row = {"parameters": 11689512, "image": [2, 3, 8, 9], "grid": [2, 2], "difference": 0.5, "units": 7}
    models = {
        "one": {**row, "outcome": "differs", "where": "gradient of fc.weight"},
        "two_a": {**row, "outcome": "exact", "difference": 2.1e-14},
        "two_b": {**row, "outcome": "exact", "difference": 1e-15, "parameters": 9e6, "units": 12},
        "two_c.backbone": {**row, "outcome": "exact", "difference": 1e-15},
        "three": {"outcome": "refused", "why": "model 'three' takes two images"},
        "six_a": {**row, "outcome": "exact", "difference": 2.1e-14},
        "six_b": {**row, "outcome": "no rule", "difference": float("inf")},
        "five": {**row, "outcome": "no rule", "difference": float("inf"), "missing": "sort has no rule"},
        "four": {**row, "outcome": "rules", "difference": float("inf"), "whole": "cannot split Four"},
    }
    lines = page({"models": models, "environment": {"torch": "2", "torchvision": "0"}}).split("\n")
    for line in (
        "| `one` | 1 | 11.7 | **differs** in gradient of fc.weight | 5e-01 | 7 |",
        "| `two` | 2 | 9.0 to 11.7 | exact | 2e-14 | 7 to 12 |",
        "| backbones of detection | 1 | 11.7 | exact | 1e-15 | 7 |",
        "| `six` | 2 | 11.7 | 1 exact, 1 **no rule** | 2e-14 | 7 |",
        "| `four` | 1 | 11.7 | rules known |  | 7 |",
        "- `five`. No rule for tiles: sort has no rule.",
        "- `three`. Refused: takes two images.",
        "- `four`. Not cut into stages: cannot split Four.",
    ):
        assert line in lines
    assert not any(line.startswith("| `three`") for line in lines)


def test_a_name_that_torchvision_has_not_is_refused() -> None:
    with pytest.raises(SystemExit, match="--only resnet19: torchvision has no such model"):
        wanted(options_of("torchvision_models", "--only resnet19,resnet18"), {})
    assert wanted(options_of("torchvision_models", "--only resnet34,resnet18"), MODELS) == ["resnet18", "resnet34"]


def test_the_largest_difference_is_found() -> None:
    plain = {"loss": torch.ones(()), "gradient of a": torch.tensor([4.0, 0.0]), "buffer b": torch.tensor([7])}
    assert worst_difference(plain, plain)[0] == 0.0
    other = {**plain, "gradient of a": torch.tensor([4.0, 1.0])}
    worst, where = worst_difference(other, plain)
    assert (worst, where) == (pytest.approx(1 / 4.004), "gradient of a")
    assert worst_difference({**plain, "loss": torch.tensor(float("nan"))}, plain) == (float("inf"), "loss")
    assert worst_difference({**plain, "buffer b": torch.ones(2)}, plain) == (float("inf"), "shape or dtype of buffer b")
    assert worst_difference({"loss": plain["loss"]}, plain)[0] == float("inf")


def test_what_is_known_without_values() -> None:
    facts = facts_of("mvit_v2_s")
    assert (facts["parameters"], facts["image"], "units" in facts) == (
        MODELS["mvit_v2_s"]["parameters"],
        case_of("mvit_v2_s")[0],
        True,
    )
    assert facts["missing"].startswith(
        "Tensor.__setitem__ in module blocks.0.attn (MultiscaleAttention) has no exact rule"
    )


def body(comm: Communicator, name: str) -> tuple[float, str]:
    return compared(comm, name, (2, 2))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.exhaustive]) for n in COMPARED]
)
@pytest.mark.sample(1)
def test_a_model_on_tiles_is_that_of_plain_pytorch(ranks: Ranks, name: str) -> None:
    worst, where = ranks(4, timeout=600).run(body, name)[0]
    assert worst <= EXACT, where
