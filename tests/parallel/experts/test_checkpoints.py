"""Checkpoints of experts that ranks share: a run goes from plan to plan, and ends as the plain loop does."""

from pathlib import Path

import pytest

from tests.parallel.experts.test_training import ONE, PLANS, task_of
from tests.pool.ranks import Ranks
from tests.support.short_runs import check_going_on

CHAINS = [
    ("experts 2, ZeRO 1", "experts 4", "experts 2, stages 2", None, "experts 2, whole experts on tensor 2"),
    ("experts 2, data 2, ZeRO 3", "experts 2, tensor 2", "experts 2", "experts 2, context 2", "experts 4"),
]


@pytest.mark.parametrize("chain", [CHAINS[0], pytest.param(CHAINS[1], marks=pytest.mark.exhaustive)], ids=str)
def test_a_run_goes_from_plan_to_plan(ranks: Ranks, chain: tuple[str | None, ...], tmp_path: Path) -> None:
    plans = [ONE if name is None else PLANS[name] for name in chain]
    check_going_on(ranks, task_of("sigmoid"), tmp_path, *((plan, number) for number, plan in enumerate(plans, 1)))
