"""The curve of a run of `make gpt` beside plain PyTorch in one process: the same samples, weights and learning rates.

    make gpt
    python -m benchmarks run gpt runs/gpt-DATE-TIME

The plain loop uses mpi4dl only to read the samples and to draw the first weights. A step is a forward pass, a backward
pass, and a step of the optimizer. It takes as long as the run, or longer, and has all cores of the machine, as the run
had.
"""

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.charts import Lines, lines
from benchmarks.common.options import Option, Options
from benchmarks.common.report import publish
from benchmarks.common.results import Column, table

if TYPE_CHECKING:
    from mpi4dl.geometry import Box
    from mpi4dl.options.config import Config
    from mpi4dl.training.texts import Texts

NEEDS = "the folder of a run"
OPTIONS = (Option("folder", Path, None, "the folder of a run of the training command on text", {"metavar": "RUN"}),)
QUICK: dict[str, Any] = {}
COLUMNS = (Column("", "name"), Column("validation loss", "validation", 4), Column("bits per byte", "bits_per_byte", 4))


def plainly(config: "Config", texts: "Texts", num_steps: int) -> dict[str, Any]:
    """The loss of each step of a plain loop, its validation loss, and how long it trained."""
    import torch
    from torch.nn import functional as F

    from mpi4dl.options.models import build_model
    from mpi4dl.options.optimizers import build_optimizer, build_schedule
    from mpi4dl.options.sources import source_of

    source = source_of(config)
    model = build_model(config, source.number_of_classes(texts.training), 0)
    optimizer = build_optimizer(config, model.parameters())
    schedule = build_schedule(config, optimizer)
    training, validation = source.loaders(texts, lambda n: whole(n, config), lambda n: whole(n, config))
    schedule.begin(num_steps)
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


def whole(num_samples: int, config: "Config") -> "list[Box]":
    from mpi4dl.geometry import Box, Interval

    return [Box(Interval(0, num_samples), Interval(0, config.data.context))]


def run(options: Options) -> None:
    from mpi4dl.comm import world
    from mpi4dl.options import build
    from mpi4dl.options.config import parse
    from mpi4dl.options.sources import TextSource
    from mpi4dl.training.texts import open_texts

    config = parse(["--config", str(options.folder / "config.toml")])
    records = [json.loads(line) for line in (options.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["phase"] == "train"]
    (validation,) = [each for each in records if each["phase"] == "validation"]
    interval, last = config.run.log_interval, steps[-1]["step"]
    plain = plainly(config, open_texts(world(), TextSource(config)), last)
    means = [statistics.fmean(plain["losses"][max(0, each["step"] - interval) : each["step"]]) for each in steps]
    apart = max(abs(each["loss"] - mean) / mean for each, mean in zip(steps, means, strict=True))
    ours, theirs = build.build_plan(config).describe(), "plain PyTorch, one process"
    rows = [
        {"name": ours, "validation": validation["loss"], "bits_per_byte": validation["bits_per_byte"]},
        {"name": theirs} | {key: plain[key] for key in ("validation", "bits_per_byte", "seconds")},
    ]
    points = [{"name": theirs, "step": each["step"], "loss": mean} for each, mean in zip(steps, means, strict=True)]
    points += [{"name": ours, "step": each["step"], "loss": each["loss"]} for each in steps]
    label = f"loss, mean of {interval} steps"
    figure = lines([Lines(points, "step", "loss", lambda p: p["name"], "step", label, dots=False)], "", columns=1)
    tokens = last * config.data.batch_size * config.data.context
    title = f"{last} steps, {tokens:,} tokens; losses differ by {apart:.1e} at most"
    publish(options, title, table(rows, COLUMNS), figure, rows, largest_difference=apart, losses=plain["losses"])
