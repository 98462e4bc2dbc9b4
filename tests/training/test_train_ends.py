"""mpi4dl.train: however a run ends before its time, no rank is left waiting."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, StepResult
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, refused, wrapped, write_images
from tests.support.interrupted import program

# The first optimizer imports for seconds, for which watchdogs have no patience.
WARM = "import torch; torch.optim.SGD([torch.zeros(1)])"
FATES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", None),
    "raises": ("raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
    "stuck": ("time.sleep(1000)", None),
    # All ranks make of a ValueError what the user did wrong, and stop together: this one stops without the others.
    "value error": ("raise ValueError('an odd value')", "ValueError: an odd value"),
}


@pytest.mark.parametrize("fate", FATES)
def test_a_job_ends_whose_rank_1_meets_its_fate_at_the_third_step(tmp_path: Path, fate: str) -> None:
    action, error = FATES[fate]
    watched = program(WARM, f"if engine.num_steps == 2 and engine.comm.rank == 1:\n    {action}")
    flags = ["--tiles", "1x2", "--no-tensorboard", "--run-folder", str(tmp_path), "--log-interval", "1"]
    flags += ["--max-steps", "100", *(("--hang-timeout", "5") if fate == "stuck" else ())]
    job = mpirun(2, "-c", watched, *TINY, *flags)
    assert job.code != 0
    assert re.findall(r"^step (\d+) of \d+  epoch 1  loss", job.stdout, re.MULTILINE) == ["1", "2"]
    if error is not None:
        assert job.stderr.count(error.partition(": ")[2]) == 1
        log = (tmp_path / "log-rank1.txt").read_text()
        assert error in log
        assert "in watched" in log
    if fate == "raises":
        assert job.code in (1, signal.SIGKILL)  # the launcher reports whom it saw go first
        assert job.stderr.count("[rank 1 of 2] Traceback (most recent call last)") == 1
        assert job.stderr.count("Traceback") == 1
        assert "in watched" in job.stderr
    if fate == "stuck":
        late = r"came no further for [0-9.]+ s, and a job waits no longer than that \(the hang timeout\)"
        assert re.search(late, job.stderr)
        assert "in watched" in job.stderr or "in wait" in job.stderr


def slowly(comm: Communicator, *flags: str) -> int:
    """Train with steps that take half a second each."""
    steps = []

    def slow_step(step: Any, *arguments: Any) -> StepResult:
        steps.append(time.sleep(0.5))
        return step(*arguments)  # type: ignore[no-any-return]

    with wrapped(Engine, "step", slow_step):
        train(comm, [*TINY, *flags])
    return len(steps)


@pytest.mark.exhaustive
def test_a_run_may_take_longer_than_a_step_may(ranks: Ranks, tmp_path: Path) -> None:
    flags = ("--tiles", "1x2", "--hang-timeout", "3", "--max-steps", "8", "--eval-every", "none", "--no-tensorboard")
    ranks(2).run(train, [*TINY, "--tiles", "1x2", "--max-steps", "1", "--run-folder", str(tmp_path / "warm")])
    assert ranks(2).run(slowly, *flags, "--run-folder", str(tmp_path / "run")) == [8, 8]


def bereft(comm: Communicator, flags: list[str], gone: Path) -> str:
    """What a run says whose images disappear after its second step."""

    def second_is_the_last(step: Any, engine: Engine, *arguments: Any) -> StepResult:
        result: StepResult = step(engine, *arguments)
        if engine.num_steps == 2 and comm.rank == 0:
            gone.rename(gone.with_name("elsewhere"))
        return result

    with wrapped(Engine, "step", second_is_the_last):
        return refused(comm, train, flags)


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.sample(1)
def test_a_run_whose_images_disappear_ends_and_names_one(ranks: Ranks, tmp_path: Path, policy: str) -> None:
    images = write_images(tmp_path / "images")
    flags = [*TINY, "--tiles", "1x2", "--images", str(images), "--on-bad-image", policy, "--epochs", "5"]
    (said,) = set(ranks(2).run(bereft, [*flags, "--run-folder", str(tmp_path / "run"), "--no-tensorboard"], images))
    listed = r"\.png: is not there on rank \d \(.*\), but was listed: all ranks must see the same files, and .*"
    assert re.fullmatch(rf"{re.escape(str(images))}/\w+/\d{listed}", said), said
