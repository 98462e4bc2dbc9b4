"""mpi4dl.train: a run that is told to stop saves, says how to go on, and then ends as if nothing had happened."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from signal import SIGTERM, SIGUSR1, Signals
from typing import Any

import pytest

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation, StepResult
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.interrupted import WEIGHTS, assert_the_same_run, flags_of

HEARS = """
import time
from mpi4dl import engine, train
from mpi4dl.runs.stopping import StopSignals

heard, remember, step = [], StopSignals._remember, engine.Engine.step

def remember_and_tell(self, number, frame):
    remember(self, number, frame)
    heard.append(number)

def seventh_waits(self, *arguments):
    deadline = time.monotonic() + 30
    while self.num_steps == 6 and not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    return step(self, *arguments)

StopSignals._remember, engine.Engine.step = remember_and_tell, seventh_waits
train.main()
"""


def signalled(comm: Communicator, flags: list[str]) -> int:
    """Train on ranks of which the last one gets a signal at its sixth step: after how many steps they stop."""
    steps: list[StepResult] = []
    step = Engine.step

    def sixth_is_signalled(engine: Engine, *arguments: Any) -> StepResult:
        if len(steps) == 5 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), SIGUSR1)
        steps.append(step(engine, *arguments))
        return steps[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", sixth_is_signalled)
        train(comm, flags)
    return len(steps)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    flags = flags_of(tmp_path / "run", "--save-every", "none")
    assert ranks(2).run(signalled, flags) == [6, 6]
    assert [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")] == ["step-00000006"]
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", uninterrupted)


DROPOUT = (
    "--model squeezenet1_1 --image-size 32 --batch-size 2 --num-samples 6 --val-fraction 0.7 "
    "--epochs 3 --no-tensorboard --stages 2"
).split()


def signalled_in_validation(comm: Communicator, flags: list[str]) -> list[int]:
    """Train on ranks of which the last one gets two signals in its second validation: the batches of each of them."""
    used: list[int] = []
    evaluate = Engine.evaluate

    def second_is_signalled(engine: Engine, batches: Iterable[Any], *how: Any) -> Evaluation:
        def counted() -> Iterator[Any]:
            for batch in batches:
                used[-1] += 1
                if len(used) == 2 and comm.rank == comm.size - 1:
                    os.kill(os.getpid(), SIGUSR1)
                    os.kill(os.getpid(), SIGTERM)
                yield batch

        used.append(0)
        return evaluate(engine, counted(), *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "evaluate", second_is_signalled)
        train(comm, flags)
    return used


@pytest.mark.parametrize("save_every", ["none", "epoch"])
@pytest.mark.sample(1)
def test_a_signal_in_validation_stops_at_its_next_batch(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, save_every: str
) -> None:
    flags = flags_of(tmp_path / "run", "--save-every", save_every)
    assert ranks(2).run(signalled_in_validation, flags) == [[2, 1]] * 2
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[0].name == "step-00000010"
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", uninterrupted)


def test_a_validation_that_was_given_up_draws_no_random_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """In stages, the masks of dropout depend on how many batches there were."""
    ranks(2).run(train, [*DROPOUT, "--run-folder", str(tmp_path / "whole")])
    flags = [*DROPOUT, "--run-folder", str(tmp_path / "run")]
    assert ranks(2).run(signalled_in_validation, flags) == [[2, 1]] * 2
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGUSR1, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_go_on(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, number: Signals
) -> None:
    job = mpirun(2, "-c", HEARS, *flags_of(tmp_path / "run"), sends=("step 6 ", number))
    assert (job.code, job.stderr) == (0, "")
    last = job.stdout.splitlines()[-1]
    said = re.fullmatch(
        rf"stopped by {number.name} at step ([67]) of 15; resume with: mpirun -n 2 python -m (.*)", last
    )
    assert said is not None, last
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[0].name == f"step-0000000{said[1]}"
    assert not (tmp_path / "run" / WEIGHTS).exists()
    ranks(2).run(train, shlex.split(said[2])[1:])
    assert_the_same_run(tmp_path / "run", uninterrupted)
