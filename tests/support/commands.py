"""The training command on tiny folders of pictures, and what a refusal of it looks like."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from mpi4dl.options.config import Config, parse
from mpi4dl.options.tasks import with_task
from tests.pool.job import Finished, mpirun
from tests.pool.zygote import python

TRAIN = ("-m", "mpi4dl.train")
# What plain loops of tests do, whatever is usual for a task: an epoch of SGD at a constant rate.
PLAIN = ("--optimizer", "SGD", "--lr-schedule", "constant", "--epochs", "1", "--flip", "all")
TINY = ("--model", "small_resnet", "--image-size", "32", "--batch-size", "4", "--num-workers", "0", *PLAIN)
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


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [metrics["loss"] for metrics in read_metrics(folder)]
