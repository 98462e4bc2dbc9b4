"""mpi4dl.train on volumes and sequences: every plan gives the numbers of plain PyTorch, and goes on on other tiles."""

from pathlib import Path

import numpy as np
import pytest
import tifffile

from mpi4dl import models
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, plain_losses, run_train, truncate, words

SIZE = (9, 12, 11)
COMMON = (
    "--batch-size 4 --num-workers 1 --epochs 1 --val-fraction 0.3 --log-interval 1 --lr 0.02 "
    "--optimizer SGD --lr-schedule constant --eval-every none --model-options depth=8,num_filters=4"
)
OF_VOLUMES = "--model resnet3d --image-size 9x12x11 --jitter 0.2 --random-crop --images"
OF_SEQUENCES = "--model resnet1d --num-samples 16 --image-size 61 --num-classes 2"


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 volumes of several sizes and formats, of which 6 validate."""
    root, random = tmp_path_factory.mktemp("volumes"), np.random.default_rng(0)
    for label in range(2):
        (root / "ab"[label]).mkdir()
        for i in range(9):
            size = [side + int(random.integers(-3, 4)) for side in SIZE]
            values, path = random.normal(9000 * label, 9000, size).astype(np.int16), root / "ab"[label] / str(i)
            if i % 2:
                np.save(path, values)
            else:
                tifffile.imwrite(f"{path}.tif", values, photometric="minisblack")
    return root


def plainly(flags: list[str], name: str = "resnet3d") -> list[float]:
    sizes = {"depth": 8, "num_filters": 4}
    return plain_losses(flags, lambda channels: models.build(name, 2, in_channels=channels, **sizes), fit="resize")


PLANS = ["--tiles 2x1x1", "--tiles 2x2", "--tiles 1x1x2 --data 2 --zero 3", "--tiles 2x1x1,1x1x1 --stages 2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sample(1)
def test_volumes_by_every_plan(ranks: Ranks, volumes: Path, tmp_path: Path, plan: str) -> None:
    flags = words(COMMON, OF_VOLUMES, volumes)
    run = run_train(ranks, tmp_path / "run", *flags, plan)
    assert losses_of(run) == pytest.approx(plainly(flags), rel=1e-4)


@pytest.mark.exhaustive
def test_a_run_on_volumes_goes_on_on_other_tiles(ranks: Ranks, volumes: Path, tmp_path: Path) -> None:
    flags, run = words(COMMON, OF_VOLUMES, volumes, "--resume auto"), tmp_path / "run"
    run_train(ranks, run, *flags, "--tiles 2x2x1 --max-steps 2 --save-every 2")
    run_train(ranks, run, *flags, "--tiles 1x1x2,1x1x1 --stages 2")
    assert losses_of(run) == pytest.approx(plainly([*flags, "--run-folder", str(run)]), rel=1e-4)


def test_sequences(ranks: Ranks, tmp_path: Path) -> None:
    flags = words(COMMON, OF_SEQUENCES, "--tiles")
    run = run_train(ranks, tmp_path / "run", *flags, 3)
    assert losses_of(run) == pytest.approx(plainly([*flags, "1"], "resnet1d"), rel=1e-4)


def test_volumes_that_cannot_be_read_are_left_out(ranks: Ranks, volumes: Path, tmp_path: Path) -> None:
    bad = truncate(volumes / "a" / "4.tif")
    run = run_train(ranks, tmp_path / "run", COMMON, OF_VOLUMES, volumes, "--tiles 1x2x1 --on-bad-image skip")
    assert losses_of(run)
    assert f"skipped: {bad}: " in (run / "log-rank0.txt").read_text()
