"""Checkpoints of parameters that ranks share: they go on under any other plan, and are the plain model's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from mpi4dl.parallel.plan import Plan
from tests.parallel.tensor.test_training import IN_STAGES, ONE
from tests.pool.ranks import Ranks
from tests.support.short_runs import check_going_on

BEGUN = Plan(((1,), (1,)), tensor=2, microbatches=2)
PLANS = {
    "one rank": ONE,
    "tensor 4": replace(ONE, tensor=4),
    "data 4, ZeRO 3": replace(ONE, data=4, zero=3),
    "tensor 2, sequence, context 2": Plan(((2,),), tensor=2, sequence=True),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_tensor_and_stages_go_on_by_any_plan(ranks: Ranks, tmp_path: Path, plan: Plan) -> None:
    check_going_on(ranks, IN_STAGES, tmp_path, (BEGUN, 1), (plan, 3))
