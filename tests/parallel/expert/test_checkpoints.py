"""Checkpoints of experts that ranks share: a run goes from plan to plan, and ends as the plain loop does."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from mpi4dl.checkpoints import Checkpoints, save_model
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import token_loss
from tests.parallel.expert.test_training import (
    BATCH,
    LENGTH,
    ONE,
    PLANS,
    STEPS,
    batches,
    build,
    optimizer_of,
    train_plain,
)
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_close

NAME = "sigmoid"
CHAINS = [
    ("experts 2, ZeRO 1", "experts 4", "experts 2, stages 2", None, "experts 2, whole experts on tensor 2"),
    ("experts 2, data 2, ZeRO 3", "experts 2, tensor 2", "experts 2", "experts 2, context 2", "experts 4"),
]


def engine_of(comm: Communicator, plan: Plan) -> Engine:
    if plan.num_stages == 1:
        held = LocalStages.whole(build(NAME), plan, comm)
    else:
        atoms = Cuttable(build(NAME)).names
        counts = (atoms.index("blocks.1"), len(atoms) - atoms.index("blocks.1"))
        held = split(lambda: build(NAME), plan, comm, balance=counts, image=(BATCH, LENGTH))
    return Engine(held, plan, optimizer_of(held.parameters()), token_loss, comm=comm)


def one_step(comm: Communicator, plan: Plan, folder: Path) -> None:
    engine = engine_of(comm, plan)
    with Checkpoints(folder, comm) as checkpoints:
        found = checkpoints.newest()
        if found is not None:
            checkpoints.load(engine, found)
        batch = batches()[engine.num_steps]
        boxes = [each.box for each in engine.reads(BATCH, (LENGTH,))]
        tiles = [batch[:, :-1][slice(*box.batch), slice(*box.space[0])] for box in boxes]
        engine.step(tiles, batch[:, 1:], (LENGTH,))
        checkpoints.save(engine, {})
    if engine.num_steps == STEPS:
        save_model(engine, folder / "model.safetensors")


@pytest.mark.parametrize("chain", [CHAINS[0], pytest.param(CHAINS[1], marks=pytest.mark.exhaustive)], ids=str)
def test_a_run_goes_from_plan_to_plan(ranks: Ranks, chain: tuple[str | None, ...], tmp_path: Path) -> None:
    assert len(chain) == STEPS
    for name in chain:
        plan = ONE if name is None else PLANS[name]
        ranks(plan.num_ranks).run(one_step, plan, tmp_path)
    expected, plain = build(NAME), build(NAME)
    train_plain(expected, token_loss, 1)
    state = load_file(tmp_path / "model.safetensors")
    plain.load_state_dict(state | {"lm_head.weight": state["embedding.tokens.weight"]})
    for (name, p), q in zip(plain.named_parameters(), expected.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), EXACT, name)
