"""benchmarks.stages: configurations become plans, spans become costs, and whole benchmarks on tiny models."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from benchmarks import stages
from benchmarks.sleeping import sleeping_model, slow_weights
from benchmarks.stages import measured, measured_costs, plans_that_fit, summarise
from benchmarks.stages_charts import as_table
from benchmarks.stages_options import Case, parse, plans, title
from benchmarks.turns import Contestant
from mpi4dl.parallel.plan import Plan
from tests.benchmarks.checks import assert_refused
from tests.pool.zygote import ROOT, python

MEBIBYTE = 2**20
ONE = (1, 1)
POSITIVE = {
    "ranks", "size_px", "images_per_second", "images_per_second_min", "images_per_second_max", "speed_ratio",
    "peak_bytes", "memory_ratio", "memory_over_least", "activation_bytes", "cpu_seconds_per_image",
    "work_seconds_per_image",
}  # fmt: skip
SECONDS = {"forward_seconds", "backward_seconds"}
BUBBLES = {"measured_bubble", "simulated_bubble"}
KEYS = POSITIVE | BUBBLES | {"model", "name", "plan", "peak_bytes_of_ranks"}
# Two stages that take 1 s forward and 2 s backward, 1 s after each other: idle for 6 s of 12.
TWO_STAGES: list[list[Any]] = [
    [[["forward", 0, 0, 0], 0.0, 1.0], [["backward", 0, 0, 0], 4.0, 6.0]],
    [[["forward", 0, 1, 0], 1.0, 2.0], [["backward", 0, 1, 0], 2.0, 4.0]],
]
TABLE = """\
32 px  ranks  images/s    (min-max)  ratio  CPU s  peak MiB  ratio  over least  activations  bubble %  simulated %
-----  -----  --------  -----------  -----  -----  --------  -----  ----------  -----------  --------  -----------
plain      1      2.00  (1.00-4.00)   1.00   1.00     100.0   1.00        1.00          8.0         -            -
LP         2      1.00  (1.00-6.00)   1.00   2.00      60.0   0.50        0.60          5.0      50.0         50.0"""


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [python(), "-m", "benchmarks.stages", "--quick", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def answers(speeds: list[float], mebibytes: list[int], kept: list[int], rows: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "images_per_second": speed,
            "cpu_seconds_per_image": 2 / speed,
            "work_seconds_per_image": 1 / speed,
            "peak_bytes": size * MEBIBYTE,
            "peak_bytes_of_ranks": [size * MEBIBYTE] * len(kept),
            "activation_bytes_of_ranks": [count * MEBIBYTE for count in kept],
            "rows": rows,
        }
        for speed, size in zip(speeds, mebibytes, strict=True)
    ]


def contestants() -> list[Contestant]:
    plain = answers([1.0, 2.0, 4.0], [100, 200, 100], [8], [[]])
    return [
        Contestant("plain", 1, [], plain),
        Contestant("LP", 2, [], answers([1.0, 1.0, 6.0], [60, 100, 50], [5, 3], TWO_STAGES)),
    ]


def test_every_configuration_is_a_plan() -> None:
    names = "SP,LP,PP,SP+LP,SP+PP,GEMS+LP,GEMS+PP,SP+GEMS+PP"
    assert plans(parse(["--configurations", names, "--tiles", "2x2"])) == {
        "SP": Plan(((2, 2),), (), 1, 4, "layer"),
        "LP": Plan((ONE, ONE), (), 1, 4, "layer"),
        "PP": Plan((ONE, ONE), (), 1, 4, "1f1b"),
        "SP+LP": Plan(((2, 2), ONE), (), 1, 4, "layer"),
        "SP+PP": Plan(((2, 2), ONE), (), 1, 4, "1f1b"),
        "GEMS+LP": Plan((ONE, ONE), (), 1, 2, "layer", 1),
        "GEMS+PP": Plan((ONE, ONE), (), 1, 2, "1f1b", 1),
        "SP+GEMS+PP": Plan(((2, 2), ONE), (), 1, 2, "1f1b", 1),
    }


def test_every_configuration_has_as_many_microbatches() -> None:
    assert {plan.num_microbatches for plan in plans(parse(["--microbatches", "8"])).values()} == {8}


def test_schedules_are_told_apart_and_gems_has_none_that_is_interleaved() -> None:
    flags = ["--configurations", "LP,PP,GEMS+PP", "--schedules", "gpipe,interleaved", "--stages", "4"]
    found = plans(parse(flags))
    assert list(found) == ["LP", "PP gpipe", "PP interleaved", "GEMS+PP gpipe"]
    assert (found["PP interleaved"].num_stages, found["PP interleaved"].num_ranks) == (8, 4)


def test_costs_are_the_means_of_measured_spans() -> None:
    timeline = measured(answers([1.0], [1], [1, 1], TWO_STAGES)[0])
    longer = [[[action, 2 * start, 2 * end] for action, start, end in row] for row in TWO_STAGES]
    costs = measured_costs([timeline, measured(answers([1.0], [1], [1, 1], longer)[0])], 2)
    assert (costs.forward_seconds, costs.backward_seconds) == ((1.5, 1.5), (3.0, 3.0))
    assert timeline.bubble == 0.5


def test_the_halves_of_a_backward_are_its_cost_together() -> None:
    rows = [[[["forward", 0, 0, 0], 0, 1], [["input", 0, 0, 0], 1, 2], [["weight", 0, 0, 0], 2, 5]]]
    costs = measured_costs([measured(answers([1.0], [1], [1], rows)[0])], 1)
    assert (costs.forward_seconds, costs.backward_seconds, costs.input_share) == ((1.0,), (4.0,), 0.25)


def test_medians_over_rounds_and_bubbles_of_stages() -> None:
    plain, layers = summarise(Case("resnet_v2", 32), contestants(), {"LP": Plan((ONE, ONE), schedule="layer")}, "cpu")
    assert (plain["images_per_second"], plain["speed_ratio"], plain["memory_ratio"]) == (2.0, 1.0, 1.0)
    assert plain["measured_bubble"] is plain["simulated_bubble"] is None
    assert (layers["images_per_second"], layers["speed_ratio"], layers["memory_ratio"]) == (1.0, 1.0, 0.5)
    assert (layers["measured_bubble"], layers["simulated_bubble"]) == (0.5, 0.5)
    assert layers["activation_bytes"] == 5 * MEBIBYTE
    assert as_table([plain, layers]) == TABLE


def test_what_was_not_measured_is_none() -> None:
    deferred = {"LP": Plan((ONE, ONE), schedule="zero-bubble")}
    _, layers = summarise(Case("resnet_v2", 32), contestants(), deferred, "cuda")
    assert layers["measured_bubble"] is layers["simulated_bubble"] is layers["activation_bytes"] is None


def test_the_title_says_what_was_trained_on_how_many_cores() -> None:
    assert title(parse(["--num-filters", "64"]), "amoebanetd", 3) == (
        "AmoebaNet-D (num_layers 3, num_filters 64), batch 8 in 4 microbatches, 2 stages, SP tiles 1x2, cpu, "
        "up to 3 ranks on 2 cores in all"
    )
    options = parse(["--num-filters", "64", "--depth", "11", "--cores", "1", "--configurations", "PP"])
    assert title(options, "resnet_v2", 2) == (
        "ResNet-v2 (depth 11, num_filters 64), batch 8 in 4 microbatches, 2 stages, cpu, up to 2 ranks on 1 core in all"
    )


def test_a_case_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compete(case: Case, *others: Any) -> list[Contestant]:
        if case.size_px == 64:
            raise SystemExit("LP ended: exit code 1")
        return contestants()

    out = tmp_path / "out"
    flags = ["--models", "resnet_v2", "--sizes", "32,64", "--configurations", "LP", "--out", str(out)]
    monkeypatch.setattr(stages, "compete", compete)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["stages", *flags])
    with pytest.raises(SystemExit, match=r"^not measured:\nresnet_v2 64 px: LP ended: exit code 1$"):
        stages.main()
    saved = json.loads(Path(f"{out}.json").read_text())["results"]
    assert saved["problems"] == ["resnet_v2 64 px: LP ended: exit code 1"]
    assert [(row["name"], row["size_px"]) for row in saved["measurements"]] == [("plain", 32), ("LP", 32)]
    assert TABLE in capsys.readouterr().out


def test_contestants_share_the_cores_of_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    assert [stages.share_cores(wanted) for wanted in (2, 8)] == [2, 3]
    assert kept == [[3, 4], [3, 4, 5]]


def test_a_layer_sleeps_forward_and_for_either_gradient() -> None:
    model = sleeping_model(num_layers=2, seconds=0.05, num_classes=2)
    slow_weights(model, 0.1)
    image = torch.zeros(1, 3, 4, 4)
    began = time.perf_counter()
    loss = model(image).sum()
    middle = time.perf_counter()
    loss.backward()
    assert middle - began > 0.1
    assert time.perf_counter() - middle > 0.3


@pytest.mark.exhaustive
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    out, timeline = tmp_path / "new" / "v1.5", tmp_path / "other" / "timeline.png"
    done = run("--models", "resnet_v2", "--out", str(out), "--timeline", str(timeline))
    assert done.returncode == 0, done.stderr
    results = json.loads(Path(f"{out}.json").read_text())["results"]
    assert results["problems"] == []
    assert results["settings"]["batch_size"] == 8
    assert results["cores"] == min(2, len(os.sched_getaffinity(0)))
    rows = results["measurements"]
    assert [(row["model"], row["name"], row["ranks"]) for row in rows] == [
        ("resnet_v2", "plain", 1),
        ("resnet_v2", "SP+GEMS+PP", 3),
    ]
    for row in rows:
        assert set(row) == (KEYS if row["name"] == "plain" else KEYS | SECONDS)
        numbers = [row[key] for key in POSITIVE]
        if row["name"] != "plain":
            numbers += [row[key] for key in BUBBLES] + [second for key in SECONDS for second in row[key]]
            assert all(row[key] < 1 for key in BUBBLES)
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert row["peak_bytes"] == max(row["peak_bytes_of_ranks"])
    assert as_table(rows) in done.stdout
    for path in (f"{out}_resnet_v2.png", timeline):
        with PIL.Image.open(path) as image:
            assert image.format == "PNG"
            assert min(image.size) > 200


@pytest.mark.exhaustive
def test_the_measured_bubble_of_stages_that_sleep_is_near_the_simulated_one(tmp_path: Path) -> None:
    out = tmp_path / "v1.5"
    done = run("--sleep", "--out", str(out))
    assert done.returncode == 0, done.stderr
    plain, *pipelines = json.loads(Path(f"{out}_sleep.json").read_text())["results"]["measurements"]
    assert [row["name"] for row in pipelines] == ["PP gpipe", "PP 1f1b"]
    for row in pipelines:
        assert row["measured_bubble"] == pytest.approx(row["simulated_bubble"], rel=0.25)
        assert row["simulated_bubble"] == pytest.approx(3 / (8 + 3), rel=0.15)
        assert row["images_per_second"] > plain["images_per_second"]
    with PIL.Image.open(f"{out}_sleep.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds is 0, but must be at least 1"),
        (["--configurations", "PP,DP"], "--configurations DP: choose of SP, LP, PP, SP+LP"),
        (["--microbatches", "3"], "--microbatches 3 cannot be halved for GEMS: use an even number"),
        (["--sizes", "big"], "--sizes big --tiles 1x2: write them as 128,256 and 1x2"),
        (["--tiles", "2by2"], "--sizes 128,256 --tiles 2by2: write them as 128,256 and 1x2"),
        (["--sleep", "--configurations", "SP+PP"], "stages that sleep have no tiles, omit SP"),
        (["--timeline", "t.txt"], "--timeline t.txt --configurations LP,PP"),
        (["--timeline", "t.png", "--configurations", "LP"], "it draws a .png of the first PP"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "2"], "LP: `microbatches` 4 cannot share a batch of 2: raise `batch_size` to 4"),
        (["--schedules", "2f2b"], "there is no schedule '2f2b': choose one of layer, gpipe, 1f1b"),
        (["--schedules", "interleaved"], "GEMS+PP --schedules interleaved: GEMS needs another than interleaved"),
    ],
)
def test_plans_that_cannot_be_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        plans_that_fit(parse(flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
