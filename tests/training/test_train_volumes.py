"""mpi4dl.train on volumes and sequences: every plan gives the numbers of plain PyTorch, and goes on on other tiles."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.datasets import Loader
from mpi4dl.geometry import Tiling
from mpi4dl.options import build
from mpi4dl.options.config import parse
from mpi4dl.options.data import build_views
from mpi4dl.options.sources import source_of
from mpi4dl.parallel.plan import Plan
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import losses_of, settled, truncate

SIZE = (9, 12, 11)
COMMON = (
    "--batch-size 4 --num-workers 1 --epochs 2 --val-fraction 0.3 --log-interval 1 --lr 0.02 "
    "--optimizer SGD --lr-schedule constant --eval-every none"
)
OF_VOLUMES = "--model resnet3d --model-options depth=8,num_filters=4 --image-size 9x12x11 --jitter 0.2 --random-crop"
OF_SEQUENCES = "--model resnet1d --model-options depth=8,num_filters=4 --num-samples 16 --image-size 61"


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


def plain_losses(flags: list[str], size: tuple[int, ...]) -> list[float]:
    """A loop of plain PyTorch over whole volumes."""
    config = settled(flags)
    training, _ = source_of(config).open()
    view, _ = build_views(config, training.channels, "resize")
    torch.manual_seed(config.training.seed)
    model = models.build(config.model.model, 2, in_channels=training.channels, depth=8, num_filters=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    shape = Plan((tuple(1 for _ in size),)).shape(0)
    loader = Loader(
        training, view, 4, lambda n: [Tiling.even(shape, (n, *size)).owned(0)], shuffle=True, drop_last=True
    )
    losses = []
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.tiles[0]), batch.labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


PLANS = ["--tiles 2x1x1", "--tiles 2x2", "--tiles 1x1x2 --data 2 --zero 3", "--tiles 2x1x1,1x1x1 --stages 2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sample(1)
def test_volumes_by_every_plan(ranks: Ranks, volumes: Path, tmp_path: Path, plan: str) -> None:
    flags = [*COMMON.split(), *OF_VOLUMES.split(), "--images", str(volumes)]
    num_ranks = build.build_plan(parse([*flags, *plan.split()])).num_ranks
    ranks(num_ranks).run(train, [*flags, *plan.split(), "--run-folder", str(tmp_path / "run")])
    assert losses_of(tmp_path / "run") == pytest.approx(plain_losses(flags, SIZE), rel=1e-4)


@pytest.mark.exhaustive
def test_a_run_on_volumes_goes_on_on_other_tiles(ranks: Ranks, volumes: Path, tmp_path: Path) -> None:
    flags = [*COMMON.split(), *OF_VOLUMES.split(), "--images", str(volumes), "--run-folder", str(tmp_path / "run")]
    flags += ["--resume", "auto"]
    ranks(4).run(train, [*flags, "--tiles", "2x2x1", "--max-steps", "4", "--save-every", "2"])
    ranks(3).run(train, [*flags, "--tiles", "1x1x2,1x1x1", "--stages", "2"])
    assert losses_of(tmp_path / "run") == pytest.approx(plain_losses(flags, SIZE), rel=1e-4)


def test_sequences(ranks: Ranks, tmp_path: Path) -> None:
    flags = [*COMMON.split(), *OF_SEQUENCES.split(), "--num-classes", "2"]
    ranks(3).run(train, [*flags, "--tiles", "3", "--run-folder", str(tmp_path / "run")])
    assert losses_of(tmp_path / "run") == pytest.approx(plain_losses([*flags, "--tiles", "1"], (61,)), rel=1e-4)


def test_volumes_that_cannot_be_read_are_left_out(ranks: Ranks, volumes: Path, tmp_path: Path) -> None:
    bad = truncate(volumes / "a" / "4.tif")
    flags = [*COMMON.split(), *OF_VOLUMES.split(), "--images", str(volumes), "--run-folder", str(tmp_path / "run")]
    ranks(2).run(train, [*flags, "--tiles", "1x2x1", "--on-bad-image", "skip"])
    assert losses_of(tmp_path / "run")
    assert f"skipped: {bad}: " in (tmp_path / "run" / "log-rank0.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tiles 4", "--tiles 4 cuts along tokens, but what is trained on has the size 224x224"),
        ("--tiles 2x2x1 --image-size 64x64", "cuts along depth, rows, cols, but what is trained on has the size 64x64"),
        ("--tiles 2x1 --image-size 9x12x11 --model resnet18", "cannot take images of 3 x 9 x 12 x 11"),
    ],
)
def test_tiles_sizes_and_models_of_other_axes(ranks: Ranks, flags: str, message: str) -> None:
    found = ranks(build.build_plan(parse(flags.split())).num_ranks).run(refused, flags.split())
    assert all(message in said for said in found)


def refused(comm: object, flags: list[str]) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        train(comm, [*flags, "--num-samples", "8", "--run-folder", "none"])  # type: ignore[arg-type]
    return str(raised.value)
