"""Runs of the training command side by side: their losses by step, their validation loss, and their sizes.

    make moe
    mpirun -n 4 mpi4dl train --config examples/gpt_moe.toml --experts 1 --replicas 4 \\
        --model-options num_layers=2,hidden=32,num_heads=2,ff_dim=144 --run-folder runs/dense
    python -m benchmarks run curves "mixture of experts=runs/gpt-DATE-TIME" dense=runs/dense

Active parameters are those that a token meets: of experts as many as are chosen for it.
"""

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Option, Options
from benchmarks.common.report import NAME, publish
from benchmarks.common.results import Column, table

NEEDS = "the folders of runs"
COLUMNS = (
    NAME,
    Column("parameters", "parameters"),
    Column("active", "active"),
    Column("steps", "num_steps"),
    Column("last training loss", "training", 3),
    Column("validation loss", "validation", 3),
    Column("bits per byte", "bits_per_byte", 3),
)


def named(text: str) -> tuple[str, Path]:
    """A run's name and folder. Raises ArgumentTypeError."""
    name, _, folder = text.partition("=")
    if not name or not (Path(folder) / "metrics.jsonl").is_file():
        raise ArgumentTypeError(f"{text}: name a run as NAME=FOLDER, where the folder holds metrics.jsonl")
    return name, Path(folder)


OPTIONS = (
    Option(
        "runs", named, None, "folders of runs on text, with names to show", {"nargs": "+", "metavar": "NAME=FOLDER"}
    ),
)
QUICK: dict[str, Any] = {}


def read(name: str, folder: Path) -> dict[str, Any]:
    """The curve of a run, and the sizes of its model."""
    from mpi4dl.datasets.text.tokenizer import BPETokenizer, ByteTokenizer
    from mpi4dl.models.experts import Experts
    from mpi4dl.options.config import parse as parse_config
    from mpi4dl.options.models import build_model
    from mpi4dl.training.texts import TOKENIZER

    config = parse_config(["--config", str(folder / "config.toml")])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["phase"] == "train"]
    validations = [record for record in records if record["phase"] == "validation"]
    in_bytes = config.data.tokenizer == "bytes"
    tokenizer = ByteTokenizer() if in_bytes else BPETokenizer.load(folder / TOKENIZER)
    model = build_model(config, tokenizer.vocabulary, 0)
    whole = sum(p.numel() for p in model.parameters())
    idle = 0
    top_k = config.model.model_options.get("top_k", 2)
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        idle += sum(p.numel() for p in experts.parameters()) * (experts.num_experts - top_k) // experts.num_experts
    return {
        "name": name,
        "parameters": whole,
        "active": whole - idle,
        "num_steps": steps[-1]["step"],
        "training": steps[-1]["loss"],
        "steps": [step["step"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "validation": validations[-1]["loss"] if validations else None,
        "bits_per_byte": validations[-1].get("bits_per_byte") if validations else None,
    }


def run(options: Options) -> None:
    rows = [read(name, folder) for name, folder in options.runs]
    publish(options, "training runs", table(rows, COLUMNS), draw(rows), rows)


def draw(rows: list[dict[str, Any]]) -> Any:
    """Losses of all steps, and of the second half alone, where they are close to each other."""

    def label(row: Any) -> str:
        return f"{row['name']}: {row['active']:,} of {row['parameters']:,} parameters active"

    points = [
        row | {"step": at, "loss": loss} for row in rows for at, loss in zip(row["steps"], row["losses"], strict=True)
    ]
    halves = (points, [point for point in points if 2 * point["step"] > point["num_steps"]])
    return lines([Lines(half, "step", "loss", label, "step", "training loss, nats", dots=False) for half in halves], "")
