"""Checkpoints of parameters that ranks share: they go on under any other plan, and are the plain model's own."""

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from mpi4dl.checkpoints import Checkpoints, save_model
from mpi4dl.comm import Communicator
from mpi4dl.parallel.plan import Plan
from tests.parallel.tensor.test_cut_parameters import HEADS, build
from tests.parallel.tensor.test_training import LENGTH, ONE, STEPS, batches, engine_of, plainly, step
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_close

SAVED = 2  # of 5 steps
BEGUN = Plan(((1,), (1,)), tensor=2, microbatches=2)
PLANS = {
    "one rank": ONE,
    "tensor 4": replace(ONE, tensor=4),
    "data 4, ZeRO 3": replace(ONE, data=4, zero=3),
    "tensor 2, sequence, context 2": Plan(((2,),), tensor=2, sequence=True),
}


def begin(comm: Communicator, folder: Path) -> None:
    engine = engine_of(comm, BEGUN, HEADS, tied=False)
    for batch in batches()[:SAVED]:
        step(engine, batch)
    with Checkpoints(folder, comm) as checkpoints:
        checkpoints.save(engine, {})


def end(comm: Communicator, plan: Plan, folder: Path, weights: Path) -> None:
    engine = engine_of(comm, plan, HEADS, tied=False)
    with Checkpoints(folder, comm) as checkpoints:
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(engine, found)
    for batch in batches()[engine.num_steps :]:
        step(engine, batch)
    assert engine.num_steps == STEPS
    save_model(engine, weights)


def test_tensor_and_stages_go_on_by_any_plan(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(begin, tmp_path)
    _, expected = plainly(HEADS, False, LENGTH)
    for number, plan in enumerate(PLANS.values()):
        weights = tmp_path / f"{number}.safetensors"
        ranks(plan.num_ranks).run(end, plan, tmp_path, weights)
        plain = build(HEADS, tied=False)
        plain.load_state_dict(load_file(weights))
        for (name, p), q in zip(plain.named_parameters(), expected.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), EXACT, name)
