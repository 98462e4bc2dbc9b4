"""The folder of a run: what is in it, what it refuses to overwrite, and that its logs hold what went wrong."""

import json
import logging
import math
import platform
import re
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpi4dl
from mpi4dl.options.config import Config, ConfigError, parse, to_toml
from mpi4dl.results.formats import Lines, as_line
from mpi4dl.runs.folder import RunFolder, default_path, versions
from tests.support.brute_force import patient


def test_a_run_without_a_folder_is_named_after_its_model_and_the_time() -> None:
    assert default_path("resnet18", datetime(2026, 1, 31, 12, 0, 5)) == Path("runs/resnet18-20260131-120005")
    assert default_path("hub/net", datetime(2026, 1, 31)).parent == Path("runs")


def test_create_makes_the_folder_and_its_parents(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "first").claim()
    assert folder.path.is_dir()
    folder.unlock()
    assert RunFolder(folder.path).claim().path == folder.path, "an empty folder is as good as none"


def test_two_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        folder = RunFolder(tmp_path / "runs" / "resnet1.5")
        folder.claim(or_beside=True)
        names.append(folder.path.name)
    assert names == ["resnet1.5", "resnet1.5-2", "resnet1.5-3"]


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).claim()
    assert str(caught.value) == (
        f"the run folder {tmp_path} holds files already, and a run never overwrites another's; "
        "name another with `run_folder`, remove it, or continue it with `resume` auto"
    )
    assert RunFolder(tmp_path).path == tmp_path, "a run that is continued takes it as it is"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((file, "File exists"), (file / "inside", "Not a directory")):
        with pytest.raises(ConfigError) as caught:
            RunFolder(path).claim()
        message = f"the run folder {path} cannot be created: {reason}; name another with `run_folder`"
        assert str(caught.value) == message


def test_the_recorded_config_repeats_the_run(tmp_path: Path) -> None:
    config = parse(["--tiles", "2x2", "--model-options", "depth=29"])
    RunFolder(tmp_path).write_config(to_toml(config))
    assert parse(["--config", str(tmp_path / "config.toml")]) == config != Config()


def test_versions_say_what_the_run_ran_on(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_versions("MPICH Version: 5.0.2\n", ["train.py", "--tiles", "2x2"])
    found = json.loads((tmp_path / "versions.json").read_text())
    assert found["python"] == platform.python_version()
    assert found["mpi4dl"] == mpi4dl.__version__
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["numpy"] == np.__version__
    assert found["mpi"] == "MPICH Version: 5.0.2"
    assert found["host"] == platform.node()
    assert found["executable"] == sys.executable
    assert found["command"] == ["train.py", "--tiles", "2x2"]


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpi4dl.runs.folder.RECORDED_PACKAGES", ("no_such_package",))
    assert versions("", [])["no_such_package"] is None


def test_each_rank_logs_into_its_own_file_with_the_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "made_on_another_node")
    for rank in (0, 1):
        with folder.rank_log(rank) as logger:
            logger.info("rank %d is here", rank)
            logging.getLogger("mpi4dl.comm").warning("slow")
            logger.debug("not of interest")
        logger.error("after the block")
    lines = folder.log_path(1).read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", "", line) for line in lines] == [
        "INFO mpi4dl: rank 1 is here",
        "WARNING mpi4dl.comm: slow",
    ]
    assert "rank 0 is here" in folder.log_path(0).read_text()


@pytest.mark.parametrize("error", [ValueError("no tile"), KeyboardInterrupt()])
def test_the_traceback_of_what_ended_the_rank_is_in_its_log(tmp_path: Path, error: BaseException) -> None:
    def fail_here() -> None:
        raise error

    folder = RunFolder(tmp_path)
    with pytest.raises(type(error)), folder.rank_log(3):
        fail_here()
    text = folder.log_path(3).read_text()
    assert f"ERROR mpi4dl: ended by {type(error).__name__}" in text
    assert "Traceback (most recent call last)" in text
    assert "in fail_here" in text


@pytest.mark.parametrize(("code", "logged"), [(0, ""), (None, ""), (3, "ended by sys.exit(3)")])
def test_leaving_early_is_logged_unless_all_is_well(tmp_path: Path, code: int | None, logged: str) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(SystemExit), folder.rank_log(0):
        sys.exit(code)
    text = folder.log_path(0).read_text()
    assert logged in text
    assert bool(text) == bool(logged)


def test_a_log_that_is_closed_leaves_logging_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("mpi4dl")
    before = (logger.level, list(logger.handlers))
    with RunFolder(tmp_path).rank_log(0):
        assert len(logger.handlers) == len(before[1]) + 1
    assert (logger.level, logger.handlers) == before


def test_metrics_are_on_disk_at_once_and_appended_to(tmp_path: Path) -> None:
    metrics = Lines(tmp_path / "metrics.jsonl")
    metrics.append(as_line({"step": 1, "loss": 0.5}))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'
    metrics.close()
    metrics = Lines(tmp_path / "metrics.jsonl")
    metrics.append(as_line({"step": 2, "name": "ü\n"}))
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {"step": 2, "name": "ü\n"}


def no_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


@patient
@given(st.dictionaries(st.text(), st.floats() | st.lists(st.floats(), max_size=2), max_size=4))
def test_metrics_are_valid_json_whatever_the_loss(
    record: dict[str, float | list[float]],
) -> None:
    read = json.loads(as_line(record), parse_constant=no_constant)
    assert read.keys() == record.keys()
    for name, value in record.items():
        pairs = [(value, read[name])] if isinstance(value, float) else zip(value, read[name], strict=True)
        assert all(float(b) == a or (math.isnan(a) and b == "nan") for a, b in pairs)
