"""What is said of a run beforehand; of options that change nothing, that they do not."""

from types import SimpleNamespace

import pytest
import torch

from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.training.report import without_effect


def said(flags: str, device: str = "cpu") -> list[str]:
    """The flags that are said to have no effect."""
    config = parse(flags.split())
    engine = SimpleNamespace(plan=build_plan(config), device=torch.device(device))
    lines = without_effect(config.parallel, engine)
    assert all(" has no effect: " in line for line in lines)
    return [line.split(" has no effect: ")[0] for line in lines]


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("", []),
        ("--offload cpu", ["`offload` cpu"]),
        ("--offload disk", []),
        ("--zero 2 --stages 3", ["`zero` 2"]),
        ("--zero 2 --stages 3 --data 2", []),
        ("--balance 3,4 --stages 2 --zero 3", ["`zero` 3"]),
        ("--zero 3 --offload cpu --balance memory", ["`offload` cpu", "`zero` 3"]),
    ],
)
def test_options_that_change_nothing_are_named(flags: str, idle: list[str]) -> None:
    assert said(flags) == idle


def test_offloading_is_of_use_on_a_gpu() -> None:
    assert said("--offload cpu", "cuda") == []
