"""The commands in jobs and on the pool of ranks, on tiny folders of pictures; what they print, write and refuse."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Loader
from mpi4dl.geometry import Box, Interval
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import Config, parse
from mpi4dl.options.data import build_views
from mpi4dl.options.declare import with_values
from mpi4dl.options.sources import source_of, with_frame
from mpi4dl.options.tasks import with_task
from mpi4dl.train import train
from tests.pool.job import Finished, mpirun
from tests.pool.ranks import Ranks
from tests.pool.zygote import python
from tests.support.tiny import TINY_RESNET

TRAIN = ("-m", "mpi4dl.train")
# What plain loops of tests do, whatever is usual for a task: an epoch of SGD at a constant rate.
PLAIN = ("--optimizer", "SGD", "--lr-schedule", "constant", "--epochs", "1", "--flip", "all")
TINY = ("--model", TINY_RESNET, "--image-size", "32", "--batch-size", "4", "--num-workers", "0", *PLAIN)
REFUSAL = "mpi4dl: "
CLASS_COLOURS = (60, 190, 120)


def write_images(root: Path, classes: Sequence[str] = ("dark", "light"), count: int = 8, side_px: int = 40) -> Path:
    """A folder of noisy pictures, `count` of each class, which differ in brightness."""
    random = np.random.default_rng(0)
    for name, colour in zip(classes, CLASS_COLOURS, strict=False):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.normal(colour, 40, (side_px, side_px + 6, 3)).clip(0, 255).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def truncate(image: Path) -> Path:
    """Cut a file off in its middle, as a copy does when the disk is full."""
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    return image


def settled(flags: Sequence[str]) -> Config:
    """The configuration of a command line on images to classify, or on text, with the defaults of that task."""
    return with_task(parse(flags), None)


def words(*parts: object) -> list[str]:
    """The words of parts of a command line."""
    return [word for part in parts for word in str(part).split()]


def run_train(ranks: Ranks, folder: Path, *parts: object) -> Path:
    """Train by as many ranks as the plan of the flags has, in a folder, which is returned."""
    argv = words(*parts, "--run-folder", folder)
    ranks(build_plan(parse(argv)).num_ranks).run(train, argv)
    return folder


def said(comm: Communicator, act: Callable[..., Any], argv: Sequence[str]) -> str:
    """A body: what a command prints on this rank."""
    with redirect_stdout(StringIO()) as out:
        act(comm, argv)
    return out.getvalue()


def refused(comm: Communicator, act: Callable[..., Any], argv: Sequence[str]) -> str:
    """A body: the message with which a command stops this rank."""
    with pytest.raises(Refusal) as caught:
        act(comm, argv)
    return str(caught.value)


@contextmanager
def wrapped(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Calls of a method come to `around`, with the method itself as the first argument."""
    plain = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments, **options: around(plain, *arguments, **options))
        yield


def plain_losses(
    flags: Sequence[str],
    build: Callable[[int], nn.Module],
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    fit: Any = None,
    **measured: Any,
) -> list[float]:
    """Of a loop of plain PyTorch with SGD over whole samples; `measured` are numbers that a run takes of its images."""
    config = with_frame(parse(flags))
    training, _ = source_of(config).open()
    config = with_task(with_values(config, measured), training)
    view, _ = build_views(config, training.channels, fit or config.data.fit)  # type: ignore[arg-type]
    torch.manual_seed(config.training.seed)
    model = build(training.channels).train()
    whole = [Interval(0, side) for side in config.data.image_size]
    boxes = lambda count: [Box(Interval(0, count), *whole)]  # noqa: E731
    loader = Loader(training, view, config.data.batch_size, boxes, shuffle=True, drop_last=True)
    batches = (batch for epoch in range(config.training.epochs) for batch in loader.epoch(epoch))
    losses = (loss(model(batch.tiles[0]), batch.labels) for batch in batches)
    return plain_steps(torch.optim.SGD(model.parameters(), lr=config.optimizer.lr), losses)


def assert_plain(
    run: Path, flags: Sequence[str], build: Callable[[int], nn.Module], loss: Any, fit: Any = None, **measured: Any
) -> None:
    """A run in float64 has the losses and the weights of plain PyTorch."""
    model = None

    def kept(channels: int) -> nn.Module:
        nonlocal model
        model = build(channels)
        return model

    expected = plain_losses(flags, kept, loss, fit, **measured)
    assert losses_of(run) == pytest.approx(expected, rel=1e-9)
    assert model is not None
    torch.testing.assert_close(load_file(run / "model.safetensors"), dict(model.state_dict()), rtol=1e-9, atol=1e-11)


def plain_steps(optimizer: torch.optim.Optimizer, losses: Iterable[Tensor]) -> list[float]:
    """A plain loop makes a step with each loss, which is to be computed when it is asked for."""
    found = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def made_whole(model: nn.Module, x: Tensor, run: Path | None = None, by: Any = (0.5, 0.25)) -> Tensor:
    """What a model, with the last weights of a run, makes of a whole image of shares (channels, H, W).

    It is normalised `by` a mean and a deviation.
    """
    if run is not None:
        model.load_state_dict(load_file(max((run / "checkpoints").glob("*/model.safetensors"))))
    mean, std = by
    with torch.no_grad():
        made: Tensor = model.eval()(((x - mean) / std)[None])[0]
    return made


def train_command(num_ranks: int, *flags: str) -> Finished:
    return mpirun(num_ranks, *TRAIN, *flags)


def another(num_ranks: int, *flags: str) -> tuple[str, ...]:
    """More ranks in the same job, with flags of their own."""
    return (":", "-n", str(num_ranks), python(), *TRAIN, *flags)


def refusal(job: Finished) -> str:
    """The message of a job that was refused as it should be: said once, with exit code 2 and no traceback."""
    said = [line for line in job.stderr.splitlines() if line.strip()]
    assert job.code == 2, f"exit code {job.code}:\n{job.stdout}\n{job.stderr}"
    assert len(said) == 1, job.stderr
    assert said[0].startswith(REFUSAL)
    assert "Traceback" not in job.stdout + job.stderr
    assert REFUSAL not in job.stdout
    return said[0].removeprefix(REFUSAL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


def losses_of(folder: Path) -> list[float]:
    return [metrics["loss"] for metrics in read_metrics(folder)]
