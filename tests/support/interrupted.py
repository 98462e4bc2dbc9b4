"""A short run of the training command, with what a run that was interrupted is compared with."""

from pathlib import Path

from tests.support.commands import read_metrics

RUN = (
    "--model small_resnet --model-options num_filters=4 --image-size 20 --batch-size 4 --num-samples 20 "
    "--val-fraction 0.4 --epochs 3 --num-workers 1 --log-interval 2 --optimizer AdamW --jitter 0.2 --random-crop "
    "--no-tensorboard --scheduler OneCycleLR --scheduler-options max_lr=0.01,total_steps=20"
).split()
PLAN = ("--tiles", "1x2")
NUM_STEPS = 15  # 5 in each of 3 epochs
WEIGHTS = "model.safetensors"


def flags_of(folder: Path, *more: str, plan: tuple[str, ...] = PLAN) -> list[str]:
    return [*RUN, *plan, "--run-folder", str(folder), *more]


def assert_the_same_run(folder: Path, expected: Path) -> None:
    """The weights to the last bit, and each report once."""
    assert (folder / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()
    wanted = ("phase", "step", "epoch", "loss", "accuracy")
    one, other = ([{name: m.get(name) for name in wanted} for m in read_metrics(run)] for run in (folder, expected))
    assert one == other
