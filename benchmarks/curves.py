"""Runs of the training command side by side: their losses by step, what they reached in validation, and their sizes.

    make moe
    mpirun -n 4 mpi4dl train --config examples/gpt_moe.toml --experts 1 --data 4 \\
        --model-options num_layers=2,hidden=32,num_heads=2,ff_dim=144 --run-folder runs/dense
    python -m benchmarks.curves "mixture of experts=runs/gpt-DATE-TIME" dense=runs/dense

Active parameters are those that a token meets: of experts as many as are chosen for it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import publish, pyplot, table


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="folders of runs on text, with names to show")
    parser.add_argument("--out", type=Path, default=Path("results/curves"), help="where to write .json and .png")
    options = parser.parse_args(argv)
    for run in options.runs:
        name, _, folder = run.partition("=")
        if not name or not (Path(folder) / "metrics.jsonl").is_file():
            parser.error(f"{run}: name a run as NAME=FOLDER, where the folder holds metrics.jsonl")
    return options


def read(name: str, folder: Path) -> dict[str, Any]:
    """The curve of a run, and the sizes of its model."""
    from mpi4dl.datasets.text import BPETokenizer, ByteTokenizer
    from mpi4dl.models.experts import Experts
    from mpi4dl.options.config import parse as parse_config
    from mpi4dl.options.models import build_model
    from mpi4dl.training.data import TOKENIZER

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
        "steps": [step["step"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "validation": validations[-1]["loss"] if validations else None,
        "bits_per_byte": validations[-1].get("bits_per_byte") if validations else None,
    }


def as_table(runs: list[dict[str, Any]]) -> str:
    head = ["", "parameters", "active", "steps", "last training loss", "validation loss", "bits per byte"]
    rows = [
        [
            run["name"],
            f"{run['parameters']:,}",
            f"{run['active']:,}",
            str(run["steps"][-1]),
            f"{run['losses'][-1]:.3f}",
            *("-" if run[key] is None else f"{run[key]:.3f}" for key in ("validation", "bits_per_byte")),
        ]
        for run in runs
    ]
    return table([head, *rows])


def draw(runs: list[dict[str, Any]]) -> Any:
    """Losses of all steps, and of the second half alone, where they are close to each other."""
    figure, plots = pyplot().subplots(1, 2, figsize=(9.5, 3.8))
    for run in runs:
        label = f"{run['name']}: {run['active']:,} of {run['parameters']:,} parameters active"
        half = len(run["steps"]) // 2
        for plot, start in zip(plots, (0, half), strict=True):
            plot.plot(run["steps"][start:], run["losses"][start:], lw=1.4, label=label)
    for plot in plots:
        plot.set_xlabel("step")
        plot.set_ylabel("training loss, nats")
    plots[0].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    options = parse(sys.argv[1:])
    runs = [read(run.partition("=")[0], Path(run.partition("=")[2])) for run in options.runs]
    print(as_table(runs))
    publish(options, {"runs": runs}, draw(runs))


if __name__ == "__main__":
    main()
