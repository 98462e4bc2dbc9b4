"""mpi4dl.train: however a run ends before its time, no rank is left waiting."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine, StepResult
from mpi4dl.train import train
from tests.pool.job import Finished, mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, write_images

FAILING_STEP = """
import os, signal, time
import torch
from mpi4dl import engine, train

torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports for seconds, for which watchdogs have no patience
step = engine.Engine.step

def third_is_fatal(self, *arguments):
    if self.num_steps == 2 and self.comm.rank == 1:
        {action}
    return step(self, *arguments)

engine.Engine.step = third_is_fatal
train.main()
"""


def failing(action: str, folder: Path, *flags: str) -> Finished:
    """A run of 2 ranks, of which one meets its fate at the third step."""
    plan = (
        "--tiles",
        "1x2",
        "--no-tensorboard",
        "--run-folder",
        str(folder),
        "--log-interval",
        "1",
        "--max-steps",
        "100",
    )
    return mpirun(2, "-c", FAILING_STEP.format(action=action), *TINY, *plan, *flags)


def steps_said(job: Finished) -> list[str]:
    return re.findall(r"^step (\d+) of \d+  epoch 1  loss", job.stdout, re.MULTILINE)


def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    job = failing("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert job.code != 0
    assert steps_said(job) == ["1", "2"]


def test_a_rank_that_raises_ends_the_job_and_says_why_once(tmp_path: Path) -> None:
    job = failing("raise RuntimeError('no such luck')", tmp_path)
    assert job.code in (1, signal.SIGKILL)  # the launcher reports whom it saw go first
    assert steps_said(job) == ["1", "2"]
    assert job.stderr.count("[rank 1 of 2] Traceback (most recent call last)") == 1
    assert job.stderr.count("RuntimeError: no such luck") == 1
    assert job.stderr.count("Traceback") == 1
    assert "in third_is_fatal" in job.stderr
    assert "RuntimeError: no such luck" in (tmp_path / "log-rank1.txt").read_text()


@pytest.mark.sample(1)
def test_a_value_error_of_one_rank_alone_ends_the_job_too(tmp_path: Path) -> None:
    """All ranks make of a ValueError what the user did wrong, and stop together: this one stops without the others."""
    job = failing("raise ValueError('an odd value')", tmp_path)
    assert job.code != 0
    assert job.stderr.count("an odd value") == 1
    log = (tmp_path / "log-rank1.txt").read_text()
    assert "ValueError: an odd value" in log
    assert "in third_is_fatal" in log


def test_a_run_that_is_stuck_ends_and_shows_where(tmp_path: Path) -> None:
    job = failing("time.sleep(1000)", tmp_path, "--hang-timeout", "5")
    assert job.code != 0
    assert steps_said(job) == ["1", "2"]
    assert re.search(
        r"came no further for [0-9.]+ s, and a job waits no longer than that \(the hang timeout\)", job.stderr
    )
    assert "in third_is_fatal" in job.stderr or "in wait" in job.stderr


def slowly(comm: Communicator, *flags: str) -> int:
    """Train with steps that take half a second each."""
    steps = []
    step = Engine.step

    def slow_step(engine: Engine, *arguments: Any) -> StepResult:
        steps.append(time.sleep(0.5))
        return step(engine, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", slow_step)
        train(comm, [*TINY, *flags])
    return len(steps)


@pytest.mark.exhaustive
def test_a_run_may_take_longer_than_a_step_may(ranks: Ranks, tmp_path: Path) -> None:
    flags = ("--tiles", "1x2", "--hang-timeout", "3", "--max-steps", "8", "--eval-every", "none")
    flags += ("--no-tensorboard",)
    ranks(2).run(train, [*TINY, "--tiles", "1x2", "--max-steps", "1", "--run-folder", str(tmp_path / "warm")])
    assert ranks(2).run(slowly, *flags, "--run-folder", str(tmp_path / "run")) == [8, 8]


def refused(comm: Communicator, flags: list[str], gone: Path) -> str:
    """What a run says whose images disappear after its second step."""
    step = Engine.step

    def second_is_the_last(engine: Engine, *arguments: Any) -> StepResult:
        result = step(engine, *arguments)
        if engine.num_steps == 2 and comm.rank == 0:
            gone.rename(gone.with_name("elsewhere"))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", second_is_the_last)
        with pytest.raises(Refusal) as caught:
            train(comm, flags)
    return str(caught.value)


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.sample(1)
def test_a_run_whose_images_disappear_ends_and_names_one(ranks: Ranks, tmp_path: Path, policy: str) -> None:
    images = write_images(tmp_path / "images")
    flags = [*TINY, "--tiles", "1x2", "--images", str(images), "--on-bad-image", policy, "--epochs", "5"]
    (said,) = set(ranks(2).run(refused, [*flags, "--run-folder", str(tmp_path / "run"), "--no-tensorboard"], images))
    listed = r"\.png: is not there on rank \d \(.*\), but was listed: all ranks must see the same files, and .*"
    assert re.fullmatch(rf"{re.escape(str(images))}/\w+/\d{listed}", said), said
