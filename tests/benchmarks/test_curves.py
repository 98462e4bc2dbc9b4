"""benchmarks.curves: active parameters, and a picture of two runs."""

import json
from pathlib import Path

import pytest

from benchmarks.curves import as_table, draw, parse, read
from mpi4dl.models.gpt import GPT
from mpi4dl.options.config import Config, to_toml
from mpi4dl.options.config import parse as parse_config
from tests.benchmarks.checks import assert_refused

SIZES = "num_layers=2,hidden=16,num_heads=2"
MIXED = f"{SIZES},num_experts=8,top_k=2,expert_dim=32"


def a_run(folder: Path, options: str) -> Path:
    text = folder / "words.txt"
    folder.mkdir()
    text.write_text("some words")
    config: Config = parse_config(["--text", str(text), "--model", "gpt", "--model-options", options, "--context", "8"])
    (folder / "config.toml").write_text(to_toml(config))
    steps = [{"phase": "train", "step": step, "loss": 5.0 - step / 10} for step in range(1, 5)]
    lines = [*steps, {"phase": "validation", "step": 4, "loss": 4.0, "bits_per_byte": 2.5}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_of_experts_those_that_are_chosen_are_active(tmp_path: Path) -> None:
    dense, mixed = (read(name, a_run(tmp_path / name, o)) for name, o in (("dense", SIZES), ("mixed", MIXED)))
    assert dense["active"] == dense["parameters"] == sum(p.numel() for p in GPT(257, 8, 2, 2, hidden=16).parameters())
    idle = 2 * (8 - 2) * 2 * 16 * 32
    assert mixed["active"] == mixed["parameters"] - idle
    assert f"mixed      {mixed['parameters']:,}" in as_table([dense, mixed])
    assert len(draw([dense, mixed]).axes) == 2


def test_runs_have_names_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, [str(tmp_path)], "name a run as NAME=FOLDER", capsys)
    assert_refused(parse, [f"one={tmp_path}"], "where the folder holds metrics.jsonl", capsys)
