"""Reports: one plain line each, a progress bar only on a terminal, and the same numbers in every place."""

import io
import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpi4dl._palette import GOOD, WRONG
from mpi4dl._wording import duration
from mpi4dl.engine import Evaluation
from mpi4dl.runs.folder import RunFolder
from mpi4dl.training.report import Reporter, StepReport, ValidationReport, summary
from mpi4dl.training.tensorboard import captioned, confusion_picture

STEP = StepReport(
    step=120, epoch=3, loss=0.4312, images_per_second=12.34, data_wait=0.021, comm_wait=0.08,
    peak_memory_bytes=512 * 2**20,
)  # fmt: skip
LINE = "step 120  epoch 3  loss 0.4312  12.3 images/s  data wait 2.1 %  comm wait 8.0 %  peak memory 512 MiB"
STEP_LINE = LINE.replace("120", "120 of 200")
VALIDATION = ValidationReport(step=120, epoch=3, loss=0.25, accuracy=0.875)
VALIDATION_LINE = "step 120  epoch 3  validation loss 0.2500  accuracy 0.8750"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read_metrics(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_the_line_of_a_report() -> None:
    assert STEP.line() == LINE
    assert STEP.line(200, "2 min left") == STEP_LINE + "  2 min left"
    assert VALIDATION.line() == VALIDATION_LINE


def test_extreme_numbers_stay_readable() -> None:
    line = StepReport(1, 1, math.nan, 0.01234, 0.0, 1.0, 3 * 2**40).line()
    assert "loss nan" in line
    assert "0.0123 images/s" in line
    assert "comm wait 100.0 %" in line
    assert "peak memory 3145728 MiB" in line
    assert "loss 1.234e-05" in StepReport(1, 1, 1.2339e-5, 1.0, 0.0, 0.0, 0).line()


def test_without_a_terminal_reports_are_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(RunFolder(tmp_path), total_steps=200, tensorboard=False) as reporter:
        reporter.advance(120)
        reporter.step(STEP)
        reporter.validation(VALIDATION)
        captured = capsys.readouterr()
    assert captured.out == f"{STEP_LINE}\n{VALIDATION_LINE}\n"
    assert captured.err == ""


def test_on_a_terminal_a_progress_bar_stands_below_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Reporter(RunFolder(tmp_path), total_steps=200, first_step=100, tensorboard=False) as reporter:
        reporter.advance(110)
        reporter.advance(120)
        reporter.step(STEP)
    assert capsys.readouterr().out == f"{STEP_LINE}\n"
    assert "100/200" in terminal.getvalue()
    assert "120/200" in terminal.getvalue()


def test_lines_are_in_the_log_of_rank_0(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.rank_log(0), Reporter(folder, total_steps=200, tensorboard=False) as reporter:
        reporter.step(STEP)
        reporter.say("a remark")
    text = folder.log_path(0).read_text()
    assert f"INFO mpi4dl: {STEP_LINE}\n" in text
    assert "INFO mpi4dl: a remark\n" in text


def test_metrics_and_tensorboard_get_the_same_numbers(tmp_path: Path) -> None:
    diverged = StepReport(130, 3, math.nan, 1.0, 0.0, 0.0, 1)
    with Reporter(RunFolder(tmp_path), total_steps=200) as reporter:
        reporter.step(STEP)
        reporter.validation(VALIDATION)
        reporter.step(diverged)
    metrics = read_metrics(tmp_path)
    assert metrics == [
        {
            "phase": "train", "step": 120, "epoch": 3, "loss": 0.4312, "images_per_second": 12.34, "data_wait": 0.021,
            "comm_wait": 0.08, "peak_memory_bytes": 512 * 2**20,
        },
        {"phase": "validation", "step": 120, "epoch": 3, "loss": 0.25, "accuracy": 0.875},
        {
            "phase": "train", "step": 130, "epoch": 3, "loss": "nan", "images_per_second": 1.0, "data_wait": 0.0,
            "comm_wait": 0.0, "peak_memory_bytes": 1,
        },
    ]  # fmt: skip
    events = read_events(tmp_path)
    expected = {f"{record['phase']}/{name}" for record in metrics for name in record} - {"train/step", "train/phase"}
    assert set(events.Tags()["scalars"]) == expected - {"validation/step", "validation/phase"}
    for record in metrics[:2]:
        for name in record.keys() - {"phase", "step"}:
            first = events.Scalars(f"{record['phase']}/{name}")[0]
            assert first.step == 120
            assert first.value == pytest.approx(record[name])
    assert math.isnan(events.Scalars("train/loss")[1].value)


def test_sample_images_are_in_tensorboard(tmp_path: Path) -> None:
    with Reporter(RunFolder(tmp_path), total_steps=1) as reporter:
        reporter.images("train/samples", torch.rand(2, 3, 8, 12, dtype=torch.float64, requires_grad=True), step=7)
    (image,) = read_events(tmp_path).Images("train/samples")
    assert (image.step, image.height, image.width) == (7, 8, 2 * 12)


def test_without_tensorboard_there_are_no_event_files(tmp_path: Path) -> None:
    with Reporter(RunFolder(tmp_path), total_steps=1, tensorboard=False) as reporter:
        reporter.step(STEP)
        reporter.images("train/samples", torch.rand(1, 3, 4, 4), step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_reporter_leaves_no_handler_behind(tmp_path: Path) -> None:
    before = list(logging.getLogger("mpi4dl").handlers)
    Reporter(RunFolder(tmp_path), total_steps=1, tensorboard=False).close()
    assert logging.getLogger("mpi4dl").handlers == before


def test_a_line_says_how_long_the_steps_after_it_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those since the first one did, which does not count: 9 steps in 27 s, and 110 more."""
    clock = iter([0.0, 100.0, 100.0, 127.0, 127.0, 500.0])
    monkeypatch.setattr("mpi4dl.training.report.time.monotonic", lambda: next(clock))
    with Reporter(RunFolder(tmp_path), total_steps=120, tensorboard=False) as reporter:
        reporter.advance(1)
        reporter.step(replace(STEP, step=1))
        reporter.advance(10)
        reporter.step(replace(STEP, step=10))
        reporter.step(replace(STEP, step=120))
    first, later, last = capsys.readouterr().out.splitlines()
    assert [line.partition("MiB")[2] for line in (first, later, last)] == ["", "  6 min left", ""]
    assert later.startswith("step 10 of 120  epoch 3")
    of = {0.4: "0 s", 89: "89 s", 90: "2 min", 3540: "59 min", 3600: "1 h 0 min", 12000: "3 h 20 min"}
    of[190800] = "2 d 5 h"
    assert {seconds: duration(seconds) for seconds in of} == of


def test_learning_rates_texts_tables_and_pictures_are_in_tensorboard(tmp_path: Path) -> None:
    matrix = [[7, 3], [0, 0]]
    drawn = confusion_picture(matrix, ["cat", "<dog> $x$"])
    shown = captioned(torch.full((2, 1, 20, 30), 0.5), ["cat", "dog"], ["cat", "cat"])
    with Reporter(RunFolder(tmp_path), total_steps=9, classes=["cat", "<dog> $x$"]) as reporter:
        reporter.validation(ValidationReport(3, 1, 0.5, None, metrics={"confusion": matrix}))
        reporter.step(replace(STEP, learning_rate=(0.5, 0.25)))
        reporter.text("options", "[a]\nb = '<script>'", 3)
        reporter.rows("modules", ("name", "values"), [("a|b", 7)], 3)
        reporter.figure("confusion", drawn, 3)
        reporter.figure("none", None, 3)
    assert read_metrics(tmp_path)[1]["learning_rate/1"] == 0.25
    events = read_events(tmp_path)
    assert [events.Scalars(f"train/learning_rate/{i}")[0].value for i in (0, 1)] == [0.5, 0.25]
    texts = [events.Tensors(f"{name}/text_summary")[0] for name in ("options", "modules")]
    found = [text.tensor_proto.string_val[0].decode() for text in texts]
    assert found == ["    [a]\n    b = '<script>'", "| name | values |\n|---|---|\n| a\\|b | 7 |"]
    assert events.Tags()["images"] == ["validation/confusion", "confusion"]
    (image,), (same,) = (events.Images(name) for name in events.Tags()["images"])
    assert image.encoded_image_string == same.encoded_image_string
    assert (image.step, image.height, image.width) == (3, *drawn.shape[:2])
    assert tuple(drawn[-90, -90]) == tuple(round(255 + (c - 255) * 0.7) for c in GOOD)  # within the cell of 7 of 10
    assert [(shown == colour).all(-1).any() for colour in (WRONG, (128, 128, 128))] == [True, True]
    assert not (captioned(torch.ones(1, 3, 9, 9), ["a"], ["a"]) == WRONG).all(-1).any()
    assert confusion_picture([[1.0] * 99] * 99, []) is None


def test_a_step_that_takes_long_is_heard_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line, once a minute; on a terminal beside the bar, at every tile."""
    clock = iter([0.0, 1.0, 61.0, 61.0, 90.0])
    monkeypatch.setattr("mpi4dl.training.report.time.monotonic", lambda: next(clock))
    with Reporter(RunFolder(tmp_path), total_steps=2, tensorboard=False) as reporter:
        for tile in (1, 2, 3):
            reporter.working(f"step 1: forward, tile {tile} of 3")
    assert capsys.readouterr().out == "step 1: forward, tile 2 of 3\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Reporter(RunFolder(tmp_path), total_steps=2, tensorboard=False) as reporter:
        reporter.working("step 1: forward, tile 2 of 3")
        assert "step 1: forward, tile 2 of 3" in sys.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        (None, "3 steps in 2 s"),
        (Evaluation(0.5, 0.25, 4), "validation accuracy 0.2500, 3 steps in 2 s"),
        (Evaluation(0.5, None, 4, {"dice": 0.75, "iou": 0.5}), "validation dice 0.7500, 3 steps in 2 s"),
        (Evaluation(0.5, None, 4, {"iou": 0.5}), "validation loss 0.5000, 3 steps in 2 s"),
    ],
)
def test_the_last_line_of_a_run_has_its_result(evaluation: Evaluation | None, said: str) -> None:
    assert summary(evaluation, "dice", 3, 0, 2.0, 0) == said
    assert summary(evaluation, "dice", 3, 0, 2.0, 2) == f"{said}, 2 unreadable images skipped"
    assert summary(evaluation, "dice", 36, 33, 2.0, 0) == f"{said} after 33 of an earlier start"
