"""A run that is refused before its first step leaves no folder, so that the corrected command can name it again."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tests.pool.job import mpirun
from tests.support.commands import refusal, train_command

FLAGS = "--image-size 32 --batch-size 4 --num-workers 0 --val-fraction 0.4 --max-steps 1 --no-tensorboard".split()
DENSE = ("--model", "unet", "--model-options", "num_filters=4")
OTHER = ("--model", "small_resnet")  # whose outputs are no masks


@pytest.fixture
def images(tmp_path: Path) -> tuple[str, ...]:
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for number in range(8):
            pixels = np.full((32, 32, 3), 30 * number, np.uint8) if kind == "images" else np.eye(32, dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(tmp_path / "data" / kind / f"{number}.png")
    return "--images", str(tmp_path / "data")


@pytest.mark.parametrize(("num_ranks", "made_before"), [(2, False), (1, True)])
def test_a_refused_run_leaves_no_folder(
    images: tuple[str, ...], num_ranks: int, made_before: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "one"
    if made_before:
        folder.mkdir(parents=True)
    flags = (*FLAGS, *images, "--tiles", f"1x{num_ranks}", "--run-folder", str(folder))
    assert "--model unet" in refusal(train_command(num_ranks, *flags, *OTHER))
    assert folder.exists() == made_before
    job = train_command(num_ranks, *flags, *DENSE)
    assert job.code == 0, job.stderr
    refused = refusal(train_command(num_ranks, *flags, *OTHER))
    assert "holds files already" in refused
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("command", [["-m", "mpi4dl.plan"], ["-m", "mpi4dl.train", "--dry-run"]])
def test_a_plan_of_outputs_that_are_no_masks_is_refused(images: tuple[str, ...], command: list[str]) -> None:
    job = mpirun(1, *command, *FLAGS[:-1], *images, *OTHER)
    assert (job.code, "--task segment" in job.stderr) == (2, True)
    assert mpirun(1, *command, *FLAGS[:-1], *images, *DENSE).code == 0


def test_a_loss_of_outputs_and_targets_takes_its_options(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from torch.nn.functional import cross_entropy\n\n"
        "def loss(outputs, targets, scale=1.0):\n    return cross_entropy(outputs, targets) * scale\n"
    )
    flags = [*FLAGS, *OTHER, "--num-samples", "16", "--loss", f"{own}:loss"]
    losses = []
    for scale in ("1.0", "3.0"):
        job = train_command(1, *flags, "--loss-options", f"scale={scale}", "--run-folder", str(tmp_path / scale))
        assert job.code == 0, job.stderr
        losses.append(float(job.stdout.split("step 1 of 1  epoch 1  loss ")[1].split()[0]))
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-3)
    assert "shift" in refusal(train_command(1, *flags, "--loss-options", "shift=1"))
