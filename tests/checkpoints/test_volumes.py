"""Checkpoints of training on volumes: what was saved from boxes of one shape goes on by boxes of another, or stages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.parallel.plan import Plan
from tests.checkpoints.test_checkpoints import SAVED, resumed, step, written
from tests.parallel.test_axes import VOLUMES
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, assert_close, plain

LONGER = replace(VOLUMES, num_steps=SAVED + 3)
BY_DEPTH = Plan(((2, 1, 1),))
BY_STAGES = Plan(((1, 1, 2), (2, 1, 1)), zero=1)
OTHERS = [Plan(((1, 2, 1),)), Plan(((1, 2, 1), (1, 1, 1))), Plan(((2, 1, 1),), data=2, zero=3), Plan(((2, 2),))]


def go_on(comm: Communicator, plan: Plan, folder: Path) -> tuple[list[float], Mapping[str, Tensor]]:
    """The losses of all further steps, and the state after them."""
    engine = resumed(comm, LONGER, plan, folder)
    losses = [step(engine, LONGER) for _ in range(SAVED, LONGER.num_steps)]
    return losses, engine.gather_state() or {}


@pytest.mark.parametrize("source", [BY_DEPTH, BY_STAGES], ids=lambda plan: plan.describe())
@pytest.mark.sample(1)
def test_other_boxes_go_on_as_plain_pytorch(ranks: Ranks, tmp_path: Path, source: Plan) -> None:
    ranks(source.num_ranks).run(written, LONGER, source, tmp_path)
    expected = plain(LONGER)
    for plan in OTHERS:
        losses, state = ranks(plan.num_ranks).run(go_on, plan, tmp_path)[0]
        assert losses == pytest.approx([result.loss for result in expected.steps[SAVED:]], rel=EXACT)
        assert list(state) == list(expected.state)
        for name, value in expected.state.items():
            assert_close(state[name], value, EXACT, f"{name} by {plan.describe()}")
