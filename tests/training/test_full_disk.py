"""A full disk, for which /dev/full stands here: the run ends with one message that names the file."""

import logging
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl.checkpoints import save_model
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from mpi4dl.results.formats import Lines, as_line
from mpi4dl.results.names import METRICS
from mpi4dl.runs.folder import LOGGER_NAME, RunFolder
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, TRAIN

FULL = Path("/dev/full")


def append_metrics(folder: RunFolder) -> None:
    metrics = Lines(folder.path / METRICS)
    try:
        metrics.append(as_line({"step": 1}))
    finally:
        metrics.close()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("config.toml", lambda folder: folder.write_config("x = 1\n")),
        ("versions-step-00000007.json", lambda folder: folder.write_versions("MPI", ["train"], 7)),
        (METRICS, append_metrics),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str, write: Callable[[RunFolder], None]) -> None:
    appended = name == METRICS
    (tmp_path / (name if appended else f".{name}.new")).symlink_to(FULL)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / name}'"):
        write(RunFolder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name] * appended


def test_a_log_that_cannot_be_written_is_no_flood_of_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.log_path(0).symlink_to(FULL)
    with folder.rank_log(0) as logger:
        logger.info("started")
    assert not logging.getLogger(LOGGER_NAME).handlers
    assert capsys.readouterr() == ("", "")


def test_a_log_still_tells_of_lines_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER_NAME), "propagate", False)
    with RunFolder(tmp_path).rank_log(0) as logger:
        logger.info("%d", "no number")
    assert "--- Logging error ---" in capsys.readouterr().err


def save_weights(comm: Communicator, path: Path) -> str:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(Refusal) as caught:
        save_model(Engine(model, Plan(data=2), optimizer, F.cross_entropy, comm=comm), path)
    return str(caught.value)


def test_weights_that_cannot_be_written_leave_nothing(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / ".model.safetensors.new").symlink_to(FULL)
    (said,) = set(ranks(2).run(save_weights, path))
    assert said.endswith(f": '{path}'")
    assert list(tmp_path.iterdir()) == []


def test_the_run_ends_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    for name in (METRICS, "log-rank0.txt", "log-rank1.txt"):
        (tmp_path / name).symlink_to(FULL)
    flags = ("--tiles", "1x2", "--log-interval", "1", "--run-folder", str(tmp_path), "--resume", "auto")
    job = mpirun(2, *TRAIN, *TINY, *flags, "--no-tensorboard")
    assert job.code in (2, SIGKILL)  # the launcher reports whom it saw go first
    assert job.stderr.startswith(f"mpi4dl: rank 0 cannot write: No space left on device: {tmp_path / METRICS}\n")
    assert job.stderr.count("cannot write") == 1
    assert "Traceback" not in job.stderr
