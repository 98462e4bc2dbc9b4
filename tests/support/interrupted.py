"""A short run of the training command, with what a run that was interrupted is compared with."""

from pathlib import Path
from textwrap import indent

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import read_metrics
from tests.support.tiny import TINY_RESNET

RUN = (
    f"--model {TINY_RESNET} --image-size 20 --batch-size 4 --num-samples 20 "
    "--val-fraction 0.4 --epochs 3 --num-workers 1 --log-interval 2 --optimizer AdamW --jitter 0.2 --random-crop "
    "--no-tensorboard --scheduler OneCycleLR --scheduler-options max_lr=0.01,total_steps=20"
).split()
PLAN = ("--tiles", "1x2")
NUM_STEPS = 15  # 5 in each of 3 epochs
WEIGHTS = "model.safetensors"
PROGRAM = """
import os, resource, shutil, signal, sys, threading, time
from pathlib import Path
from mpi4dl import engine, train

{before}
step = engine.Engine.step

def watched(engine, *arguments):
{at_step}
    return step(engine, *arguments)

engine.Engine.step = watched
train.main()
"""


def program(before: str, at_step: str) -> str:
    """A program that trains after some lines, and comes to others before each step of an `engine`."""
    return PROGRAM.format(before=before.strip(), at_step=indent(at_step.strip(), "    "))


def flags_of(folder: Path, *more: str, plan: tuple[str, ...] = PLAN) -> list[str]:
    return [*RUN, *plan, "--run-folder", str(folder), *more]


def saved_steps(folder: Path) -> list[int]:
    """The steps of which a run has checkpoints, the newest first."""
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(folder / "checkpoints")]


def assert_the_same_run(folder: Path, expected: Path) -> None:
    """The weights to the last bit, and each report once."""
    assert (folder / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()
    wanted = ("phase", "step", "epoch", "loss", "accuracy")
    one, other = ([{name: m.get(name) for name in wanted} for m in read_metrics(run)] for run in (folder, expected))
    assert one == other


def assert_goes_on(ranks: Ranks, folder: Path, expected: Path, *more: str) -> None:
    """The run goes on to its end, and is the expected one."""
    ranks(2).run(train, flags_of(folder, "--resume", "auto", *more))
    assert_the_same_run(folder, expected)
