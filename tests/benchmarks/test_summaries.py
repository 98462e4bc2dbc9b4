"""Summaries of benchmarks: medians of turns, ratios within a turn, and refusals of what is not alike."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    choices,
    moe,
    peers,
    stages,
    tensor_parallel,
)
from benchmarks.common.results import MIB, table
from benchmarks.common.turns import Contestant
from benchmarks.curves import draw, read
from benchmarks.stages import Case, measured, measured_costs, plans
from mpi4dl.models.gpt import GPT
from mpi4dl.options.config import parse as parse_config
from mpi4dl.options.config import to_toml
from mpi4dl.parallel.plan import Plan
from tests.benchmarks.checks import answered, options_of


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_experts_are_compared_with_tensor_parallelism_on_as_many_ranks() -> None:
    options = options_of("moe", "--ranks 2 --tokens 8")
    found = moe.contestants(options)
    names = [("experts", 1), ("tensor", 2), ("whole experts", 2), ("experts", 2)]
    assert [(each.name, each.ranks) for each in found] == names
    for each, seconds in zip(found, (1.0, 2.0, 3.0, 1.0), strict=True):
        answer = {"milliseconds": seconds, "cpu_milliseconds": 1.0, "bytes": 64.0, "formula": 64.0, "leaving": 4}
        each.answers += [answer | {"outputs": 7.0}, answer | {"outputs": 7.0}]
    rows = moe.summarise(options, found)
    assert [row["over_tensor"] for row in rows] == [1.0, 1.0, 1.5, 0.5]
    assert (rows[0]["name"], rows[1]["bytes"]) == ("one process", 8)
    found[2].answers[0]["outputs"] = 8.0
    with pytest.raises(SystemExit, match="whole experts on 2 ranks"):
        moe.summarise(options, found)


def of_tensors(**other: Any) -> list[Contestant]:
    bytes_of = tensor_parallel.formula_bytes(options_of("tensor_parallel", "--quick"), 2)
    known = {"losses": [2.0, 1.5], "counted_bytes": bytes_of, "mebibytes": 8.0, "cpu_seconds": 0.5}
    ours = [{"seconds": seconds, **known, **other} for seconds in (0.5, 1.0, 2.0)]
    theirs = [{"seconds": 2.0, **known, "counted_bytes": 0} for _ in range(3)]
    return [Contestant("ours", 2, [], ours), Contestant("torch, gloo", 2, [], theirs)]


def test_tensor_parallelism_is_compared_within_a_turn_if_it_is_alike() -> None:
    options = options_of("tensor_parallel", "--quick")
    ours, theirs = tensor_parallel.summarise(of_tensors(), options)
    assert (ours["over_gloo"], ours["over_gloo_min"], ours["over_gloo_max"]) == (0.5, 0.25, 1.0)
    assert ours["sent_bytes"] == ours["counted_bytes"]  # two ranks send 2 x 1 / 2 of it
    assert theirs["sent_bytes"] is None
    for other in ({"losses": [2.0, 1.6]}, {"counted_bytes": 7}):
        with pytest.raises(SystemExit, match="losses" if "losses" in other else "7 bytes"):
            tensor_parallel.summarise(of_tensors(**other), options)


def of_peers() -> list[Contestant]:
    found = []
    for name, speeds, cpu, work, mebibytes, loss in (
        ("plain PyTorch", [1, 2, 4], 2, 2, 100, 2.0),
        ("1f1b, gloo", [5, 2, 4], 2, 2, 80, 2.00001),
        ("1f1b, backend", [5, 2, 4], 2, 2, 80, 2.1),
        ("1f1b, engine", [4, 6, 4.8], 3, 1, 40, 2.0),
    ):
        times = {"cpu_seconds": [cpu] * 3, "work_seconds": [work] * 3, "idle_seconds": [0.5] * 3}
        memory = {"peak_bytes": [mebibytes * MIB] * 3, "peak_bytes_of_ranks": [[mebibytes * MIB]] * 3}
        found.append(answered(name, 2, images_per_second=speeds, **times, **memory, losses=[[2.5, loss]] * 3))
    return found


def test_peers_are_compared_with_the_same_over_gloo_unless_the_loss_is_another() -> None:
    options = options_of("peers", "--steps 1 --methods 1f1b")
    losses = {"8": [2.5, 2.0, 1.5]}
    rows = peers.summarise(options, "transformer", 2, losses, of_peers())
    assert [row["peer"] for row in rows] == [None, None, None, "1f1b, gloo"]
    assert rows[2]["wrong"] == "the loss of step 1 is 2.100000 instead of 2.000000"
    assert (rows[3]["over_peer_images_per_second"], rows[3]["over_plain_images_per_second"]) == (
        pytest.approx(1.2),
        3.0,
    )
    assert cells(table(rows, peers.COLUMNS))[4] == [
        *("1f1b,", "engine", "4.80", "(4.00-6.00)", "3.000", "1.000", "0.500", "40"),
        *("1.20", "(0.80-3.00)", "1.50", "0.50", "0.50"),
    ]
    chosen = peers.contests(options_of("peers", "--methods 1f1b --sides gloo,engine"))
    assert [str(contest) for contest in chosen] == ["plain PyTorch", "1f1b, gloo", "1f1b, engine"]


ONE = (1, 1)
# Two stages that take 1 s forward and 2 s backward, 1 s after each other: idle for 6 s of 12.
TWO_STAGES: list[list[Any]] = [
    [[["forward", 0, 0, 0], 0.0, 1.0], [["backward", 0, 0, 0], 4.0, 6.0]],
    [[["forward", 0, 1, 0], 1.0, 2.0], [["backward", 0, 1, 0], 2.0, 4.0]],
]


def of_stages() -> list[Contestant]:
    def stage(name: str, speeds: list[float], mebibytes: list[int], kept: list[int], rows: list[Any]) -> Contestant:
        sizes = [size * MIB for size in mebibytes]
        return answered(
            name,
            len(kept),
            images_per_second=speeds,
            cpu_seconds_per_image=[2 / speed for speed in speeds],
            work_seconds_per_image=[1 / speed for speed in speeds],
            peak_bytes=sizes,
            peak_bytes_of_ranks=[[size] * len(kept) for size in sizes],
            activation_bytes_of_ranks=[[count * MIB for count in kept]] * len(speeds),
            rows=[rows] * len(speeds),
        )

    plain = stage("plain", [1.0, 2.0, 4.0], [100, 200, 100], [8], [[]])
    return [plain, stage("LP", [1.0, 1.0, 6.0], [60, 100, 50], [5, 3], TWO_STAGES)]


def test_every_configuration_is_a_plan() -> None:
    names = "SP,LP,PP,SP+LP,SP+PP,GEMS+LP,GEMS+PP,SP+GEMS+PP"
    found = plans(options_of("stages", f"--configurations {names} --tiles 2x2"))
    assert found == {
        "SP": Plan(((2, 2),), (), 1, 4, "layer"),
        "LP": Plan((ONE, ONE), (), 1, 4, "layer"),
        "PP": Plan((ONE, ONE), (), 1, 4, "1f1b"),
        "SP+LP": Plan(((2, 2), ONE), (), 1, 4, "layer"),
        "SP+PP": Plan(((2, 2), ONE), (), 1, 4, "1f1b"),
        "GEMS+LP": Plan((ONE, ONE), (), 1, 2, "layer", 1),
        "GEMS+PP": Plan((ONE, ONE), (), 1, 2, "1f1b", 1),
        "SP+GEMS+PP": Plan(((2, 2), ONE), (), 1, 2, "1f1b", 1),
    }
    assert {plan.num_microbatches for plan in found.values()} == {4}
    flags = "--configurations LP,PP,GEMS+PP --schedules gpipe,interleaved --stages 4"
    several = plans(options_of("stages", flags))
    assert list(several) == ["LP", "PP gpipe", "PP interleaved", "GEMS+PP gpipe"]
    assert (several["PP interleaved"].num_stages, several["PP interleaved"].num_ranks) == (8, 4)


def test_costs_are_the_means_of_measured_spans() -> None:
    kept = {"activation_bytes_of_ranks": [1, 1]}
    timeline = measured({"rows": TWO_STAGES, **kept})
    longer = [[[action, 2 * start, 2 * end] for action, start, end in row] for row in TWO_STAGES]
    costs = measured_costs([timeline, measured({"rows": longer, **kept})], 2)
    assert (costs.forward_seconds, costs.backward_seconds) == ((1.5, 1.5), (3.0, 3.0))
    assert timeline.bubble == 0.5
    halves = [[[["forward", 0, 0, 0], 0, 1], [["input", 0, 0, 0], 1, 2], [["weight", 0, 0, 0], 2, 5]]]
    costs = measured_costs([measured({"rows": halves, "activation_bytes_of_ranks": [1]})], 1)
    assert (costs.forward_seconds, costs.backward_seconds, costs.weight_seconds) == ((1.0,), (4.0,), (3.0,))


def test_a_choice_is_right_if_it_is_the_fastest_or_nearly() -> None:
    def judged(measured: list[float]) -> list[str]:
        rows = [{"estimated_ms": ms, "measured_ms": other} for ms, other in zip([2.0, 1.0], measured, strict=True)]
        return [row["right"] for row in choices.judged(rows)]

    assert judged([9.0, 3.0]) == judged([3.0, 3.1]) == ["", "yes"]
    assert judged([3.0, 3.2]) == ["", "no"]


def test_stages_have_medians_over_rounds_and_bubbles() -> None:
    layer = {"LP": Plan((ONE, ONE), schedule="layer")}
    plain, layers = stages.summarise(Case("resnet_v2", 32), of_stages(), layer, "cpu")
    assert plain["measured_bubble"] is plain["simulated_bubble"] is None
    assert (layers["speed_ratio"], layers["memory_ratio"], layers["activation_bytes"]) == (1.0, 0.5, 5 * MIB)
    assert cells(table([plain, layers], stages.COLUMNS))[2] == [
        *("LP", "2", "1.00", "(1.00-6.00)", "1.00", "2.00", "60.0", "0.50", "5.0", "50.0", "50.0")
    ]
    deferred = {"LP": Plan((ONE, ONE), schedule="zero-bubble")}
    _, layers = stages.summarise(Case("resnet_v2", 32), of_stages(), deferred, "cuda")
    assert layers["measured_bubble"] is layers["simulated_bubble"] is layers["activation_bytes"] is None


def test_a_case_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compete(case: Case, *others: Any) -> list[Contestant]:
        if case.size_px == 64:
            raise SystemExit("LP ended: exit code 1")
        return of_stages()

    out = tmp_path / "out"
    monkeypatch.setattr(stages, "compete", compete)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    options = options_of("stages", f"--models resnet_v2 --sizes 32,64 --configurations LP --out {out}")
    with pytest.raises(SystemExit, match=r"^not measured:\nresnet_v2 64 px: LP ended: exit code 1$"):
        stages.run(options)
    saved = json.loads(Path(f"{out}.json").read_text())["results"]
    assert saved["problems"] == ["resnet_v2 64 px: LP ended: exit code 1"]
    assert [(row["name"], row["size_px"]) for row in saved["measurements"]] == [("plain", 32), ("LP", 32)]
    assert "(1.00-6.00)" in capsys.readouterr().out


def a_run(folder: Path, sizes: str) -> Path:
    text = folder / "words.txt"
    folder.mkdir()
    text.write_text("some words")
    config = parse_config(["--text", str(text), "--model", "gpt", "--model-options", sizes, "--context", "8"])
    (folder / "config.toml").write_text(to_toml(config))
    steps = [{"phase": "train", "step": step, "loss": 5.0 - step / 10} for step in range(1, 5)]
    lines = [*steps, {"phase": "validation", "step": 4, "loss": 4.0, "bits_per_byte": 2.5}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_of_experts_those_that_are_chosen_are_active(tmp_path: Path) -> None:
    sizes = "num_layers=2,hidden=16,num_heads=2"
    runs = {"dense": sizes, "mixed": f"{sizes},num_experts=8,top_k=2,expert_dim=32"}
    dense, mixed = (read(name, a_run(tmp_path / name, each)) for name, each in runs.items())
    assert dense["active"] == dense["parameters"] == sum(p.numel() for p in GPT(257, 8, 2, 2, hidden=16).parameters())
    assert mixed["active"] == mixed["parameters"] - 2 * (8 - 2) * 2 * 16 * 32
    assert (mixed["training"], mixed["validation"], mixed["num_steps"]) == (4.6, 4.0, 4)
    assert len(draw([dense, mixed]).axes) == 2
