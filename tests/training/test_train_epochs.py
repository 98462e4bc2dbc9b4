"""mpi4dl.train: what fails in a validation, or all ranks refuse together, costs nothing; a step has one round."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation, NotFinite, StepResult
from mpi4dl.train import train
from mpi4dl.training.input_pipeline import UnreadableImages
from tests.pool.ranks import Ranks
from tests.support.interrupted import assert_the_same_run, flags_of

STEPS_IN_AN_EPOCH = 5


def failing_validation(comm: Communicator, flags: list[str], kind: type[Exception]) -> None:
    """Train, where the second validation fails on all ranks, after its first batch."""
    num_calls, evaluate = 0, Engine.evaluate

    def second_fails(engine: Engine, batches: Iterable[Any], *how: Any) -> Evaluation:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 2:
            return evaluate(engine, batches, *how)
        evaluate(engine, [next(iter(batches))], *how)
        raise kind("no such image")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "evaluate", second_fails)
        with pytest.raises(kind, match="no such image"):
            train(comm, flags)


@pytest.mark.parametrize(
    ("kind", "save_every", "saved"),
    [(KeyError, "epoch", 10), (UnreadableImages, "epoch", 10), (UnreadableImages, "7", 10), (KeyError, "7", 7)],
)
@pytest.mark.sample(1)
def test_a_failure_in_validation_costs_no_step_that_was_to_be_saved(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, kind: type[Exception], save_every: str, saved: int
) -> None:
    flags = flags_of(tmp_path / "run", "--save-every", save_every)
    ranks(2).run(failing_validation, flags, kind)
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[0].name == f"step-{saved:08d}"
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", uninterrupted)


def refused_step(comm: Communicator, flags: list[str]) -> None:
    """Train, where the loss of the fourth step is not finite."""
    step = Engine.step

    def fourth_is_refused(engine: Engine, *arguments: Any) -> StepResult:
        if engine.num_steps == 3:
            raise NotFinite("the loss is not finite")
        return step(engine, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", fourth_is_refused)
        with pytest.raises(NotFinite):
            train(comm, flags)


def test_a_step_that_all_ranks_refuse_costs_nothing(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    flags = flags_of(tmp_path / "run")
    ranks(2).run(refused_step, flags)
    assert [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
    log = (tmp_path / "run" / "log-rank0.txt").read_text()
    assert f"saved at step 3 of 15; resume with: mpirun -n 2 python -m mpi4dl.train {flags[0]} " in log
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", uninterrupted)


ROUNDS = ("ireduce", "all_gather", "ibroadcast", "ibarrier", "all_gather_object", "broadcast_object")


def rounds_of_steps(comm: Communicator, flags: list[str]) -> list[int]:
    """How many rounds over all ranks there are from one step to the next."""
    found, rounds, step = [], [0], Engine.step

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Communicator, *arguments: Any, **options: Any) -> Any:
            rounds[0] += self is comm
            return function(self, *arguments, **options)

        return call

    def counting_step(engine: Engine, *arguments: Any) -> StepResult:
        found.append(rounds[0])
        return step(engine, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in ROUNDS:
            patch.setattr(Communicator, name, counted(getattr(Communicator, name)))
        patch.setattr(Engine, "step", counting_step)
        train(comm, flags)
    return [after - before for before, after in pairwise(found)]


@pytest.mark.parametrize("plan", ["--tiles 1x2", "--stages 2 --microbatches 2", "--data 2 --zero 2"])
@pytest.mark.sample(1)
def test_a_step_has_one_round_over_all_ranks(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    """Beside its exchanges and sums of gradients; an epoch begins with one more."""
    flags = flags_of(tmp_path, "--epochs", "2", "--eval-every", "none", plan=tuple(plan.split()))
    flags += ["--log-interval", "100", "--save-every", "none"]
    for rounds in ranks(2).run(rounds_of_steps, flags):
        within = [count for number, count in enumerate(rounds, 1) if number % STEPS_IN_AN_EPOCH]
        assert within == [1] * 2 * (STEPS_IN_AN_EPOCH - 1)
