"""The curve of a run of `make gpt` beside plain PyTorch in one process: the same samples, weights and learning rates.

    make gpt
    python -m benchmarks.gpt runs/gpt-DATE-TIME

The plain loop has none of mpi4dl in it but what reads the samples and draws the first weights: a forward, a backward, a
step of the optimizer. It takes as long as the run, or longer, and has all cores of the machine, as the run had.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.report import publish, pyplot
from mpi4dl.comm import world
from mpi4dl.geometry import Box, Interval
from mpi4dl.options import build
from mpi4dl.options.config import Config, parse
from mpi4dl.options.models import build_model
from mpi4dl.options.optimizers import build_optimizer, build_schedule
from mpi4dl.training.data import Texts, open_texts


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpt", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="the folder of a run of the training command on text")
    parser.add_argument("--out", default="docs/results/gpt", help="where results go, as .json and .png")
    return parser.parse_args()


def plainly(config: Config, texts: Texts, num_steps: int) -> dict[str, Any]:
    """The loss of each step of a plain loop, its validation loss, and how long it trained."""
    model = build_model(config, texts.number_of_classes(config), 0)
    optimizer = build_optimizer(config, model.parameters())
    schedule = build_schedule(config, optimizer)
    training, validation = texts.loaders(config, lambda n: whole(n, config), lambda n: whole(n, config))
    losses: list[float] = []
    began, epoch = time.perf_counter(), 0
    while len(losses) < num_steps:
        for batch in training.epoch(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.tiles[0]).flatten(0, 1), batch.labels.flatten())
            loss.backward()
            if config.optimizer.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
            optimizer.step()
            schedule.after_step()
            losses.append(loss.item())
            if len(losses) == num_steps:
                break
        epoch += 1
    seconds = time.perf_counter() - began
    with torch.no_grad():
        found = [
            (F.cross_entropy(model.eval()(b.tiles[0]).flatten(0, 1), b.labels.flatten()).item(), len(b.labels))
            for b in validation.epoch(0)
        ]
    mean = sum(loss * n for loss, n in found) / sum(n for _, n in found)
    return {"losses": losses, "validation": mean, "bits_per_byte": texts.bits_per_byte(mean), "seconds": seconds}


def whole(num_samples: int, config: Config) -> list[Box]:
    return [Box(Interval(0, num_samples), Interval(0, config.data.context))]


def main() -> None:
    options = parse_flags()
    folder = Path(options.run)
    config = parse(["--config", str(folder / "config.toml")])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["phase"] == "train"]
    (validation,) = [each for each in records if each["phase"] == "validation"]
    interval, last = config.run.log_interval, steps[-1]["step"]
    plain = plainly(config, open_texts(world(), config), last)
    means = [statistics.fmean(plain["losses"][each["step"] - interval : each["step"]]) for each in steps]
    apart = [abs(each["loss"] - mean) / mean for each, mean in zip(steps, means, strict=True)]
    tokens = last * config.data.batch_size * config.data.context
    print(f"{last} steps, {tokens:,} tokens; losses differ by {max(apart):.1e} at most")
    print(f"validation: {validation['bits_per_byte']:.4f} bits per byte; plain PyTorch {plain['bits_per_byte']:.4f}")
    pyplot_ = pyplot()
    figure, axes = pyplot_.subplots(figsize=(7, 4))
    at = [each["step"] for each in steps]
    axes.plot(at, means, lw=5, color="0.8", label=f"plain PyTorch, one process, {torch.get_num_threads()} threads")
    axes.plot(at, [each["loss"] for each in steps], lw=1.2, label=str(build.build_plan(config).describe()))
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {interval} steps")
    axes.legend(frameon=False)
    results = {"validation": validation, "plain": plain, "largest_difference": max(apart), "tokens": tokens}
    publish(options, {"results": {**results, "steps": steps}}, figure)


if __name__ == "__main__":
    sys.exit(main())
