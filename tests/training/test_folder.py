"""The folder of a run: what is in it, what it refuses to overwrite, that its logs hold what went wrong, a full disk."""

import json
import logging
import math
import platform
import re
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl.checkpoints import save_model
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.options.config import Config, ConfigError, parse, to_toml
from mpi4dl.parallel.plan import Plan
from mpi4dl.results.formats import Lines, as_line
from mpi4dl.results.names import METRICS
from mpi4dl.runs.folder import RunFolder, default_path, versions
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.brute_force import patient
from tests.support.commands import TINY, TRAIN

FULL = Path("/dev/full")  # a disk without room


def test_a_run_without_a_folder_is_named_after_its_model_and_the_time() -> None:
    assert default_path("resnet18", datetime(2026, 1, 31, 12, 0, 5)) == Path("runs/resnet18-20260131-120005")
    assert default_path("hub/net", datetime(2026, 1, 31)).parent == Path("runs")


def test_a_folder_is_made_with_its_parents_and_two_of_one_second_are_two(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "first").claim()
    assert folder.path.is_dir()
    folder.unlock()
    assert RunFolder(folder.path).claim().path == folder.path, "an empty folder is as good as none"
    folders = [RunFolder(tmp_path / "runs" / "resnet1.5") for _ in range(3)]
    for each in folders:
        each.claim(or_beside=True)
    assert [each.path.name for each in folders] == ["resnet1.5", "resnet1.5-2", "resnet1.5-3"]


HELD = "holds files already, and a run never overwrites another's; name another with `run_folder`, remove it, or "
WRONG_FOLDERS = {
    ".": f"{HELD}continue it with `resume` auto",
    "file": "cannot be created: File exists; name another with `run_folder`",
    "file/inside": "cannot be created: Not a directory; name another with `run_folder`",
}


@pytest.mark.parametrize("name", WRONG_FOLDERS)
def test_a_folder_that_holds_another_run_or_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        RunFolder(path).claim()
    assert str(caught.value) == f"the run folder {path} {WRONG_FOLDERS[name]}"
    assert RunFolder(path).path == path, "a run that is continued takes it as it is"


def test_the_recorded_config_repeats_the_run(tmp_path: Path) -> None:
    config = parse(["--tiles", "2x2", "--model-options", "depth=29"])
    RunFolder(tmp_path).write_config(to_toml(config))
    assert parse(["--config", str(tmp_path / "config.toml")]) == config != Config()


def test_versions_say_what_the_run_ran_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(tmp_path).write_versions("MPICH Version: 5.0.2\n", ["train.py", "--tiles", "2x2"])
    found = json.loads((tmp_path / "versions.json").read_text())
    expected = {
        "python": platform.python_version(),
        "mpi4dl": mpi4dl.__version__,
        "numpy": np.__version__,
        "mpi": "MPICH Version: 5.0.2",
        "host": platform.node(),
        "executable": sys.executable,
        "command": ["train.py", "--tiles", "2x2"],
    }
    assert {name: found[name] for name in expected} == expected
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    monkeypatch.setattr("mpi4dl.runs.folder.RECORDED_PACKAGES", ("no_such_package",))
    assert versions("", [])["no_such_package"] is None


def test_each_rank_logs_into_its_own_file_with_the_time(tmp_path: Path) -> None:
    folder, root = RunFolder(tmp_path / "made_on_another_node"), logging.getLogger("mpi4dl")
    before = (root.level, list(root.handlers))
    for rank in (0, 1):
        with folder.rank_log(rank) as logger:
            assert len(root.handlers) == len(before[1]) + 1
            logger.info("rank %d is here", rank)
            logging.getLogger("mpi4dl.comm").warning("slow")
            logger.debug("not of interest")
        assert (root.level, root.handlers) == before
        logger.error("after the block")
    lines = folder.log_path(1).read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line) for line in lines] == [
        "INFO mpi4dl: rank 1 is here",
        "WARNING mpi4dl.comm: slow",
    ]
    assert "rank 0 is here" in folder.log_path(0).read_text()


TRACEBACK = ("Traceback (most recent call last)", "in fail_here")


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (ValueError("no tile"), ("ERROR mpi4dl: ended by ValueError", *TRACEBACK)),
        (KeyboardInterrupt(), ("ERROR mpi4dl: ended by KeyboardInterrupt", *TRACEBACK)),
        (SystemExit(3), ("ended by sys.exit(3)",)),
        (SystemExit(0), ()),
        (SystemExit(None), ()),
    ],
    ids=repr,
)
def test_what_ended_the_rank_is_in_its_log_unless_all_is_well(
    tmp_path: Path, error: BaseException, logged: tuple[str, ...]
) -> None:
    def fail_here() -> None:
        raise error

    folder = RunFolder(tmp_path)
    with pytest.raises(type(error)), folder.rank_log(3):
        fail_here()
    text = folder.log_path(3).read_text()
    assert [words for words in logged if words not in text] == []
    assert bool(text) == bool(logged)


def append_metrics(folder: RunFolder, record: dict[str, object]) -> None:
    metrics = Lines(folder.path / METRICS)
    try:
        metrics.append(as_line(record))
    finally:
        metrics.close()


def test_metrics_are_on_disk_at_once_and_appended_to(tmp_path: Path) -> None:
    metrics = Lines(tmp_path / METRICS)
    metrics.append(as_line({"step": 1, "loss": 0.5}))
    assert (tmp_path / METRICS).read_text() == '{"step": 1, "loss": 0.5}\n'
    metrics.close()
    append_metrics(RunFolder(tmp_path), {"step": 2, "name": "ü\n"})
    assert json.loads((tmp_path / METRICS).read_text().splitlines()[1]) == {"step": 2, "name": "ü\n"}


def no_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


@patient
@given(st.dictionaries(st.text(), st.floats() | st.lists(st.floats(), max_size=2), max_size=4))
def test_metrics_are_valid_json_whatever_the_loss(record: dict[str, float | list[float]]) -> None:
    read = json.loads(as_line(record), parse_constant=no_constant)
    assert read.keys() == record.keys()
    for name, value in record.items():
        pairs = [(value, read[name])] if isinstance(value, float) else zip(value, read[name], strict=True)
        assert all(float(b) == a or (math.isnan(a) and b == "nan") for a, b in pairs)


# A full disk: one message that names the file.


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("config.toml", lambda folder: folder.write_config("x = 1\n")),
        ("versions-step-00000007.json", lambda folder: folder.write_versions("MPI", ["train"], 7)),
        (METRICS, lambda folder: append_metrics(folder, {"step": 1})),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str, write: Callable[[RunFolder], None]) -> None:
    appended = name == METRICS
    (tmp_path / (name if appended else f".{name}.new")).symlink_to(FULL)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / name}'"):
        write(RunFolder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name] * appended


def test_a_log_that_cannot_be_written_is_no_flood_of_messages_but_tells_of_lines_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.log_path(0).symlink_to(FULL)
    with folder.rank_log(0) as logger:
        logger.info("started")
    assert not logging.getLogger("mpi4dl").handlers
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(logging.getLogger("mpi4dl"), "propagate", False)
    with folder.rank_log(1) as logger:
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
