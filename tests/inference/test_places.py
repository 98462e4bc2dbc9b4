"""Where on Earth pixels lie is said by what a model makes of them, as their files say it."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tifffile

import mpi4dl
from mpi4dl.comm import Communicator
from mpi4dl.datasets.tiff import geo_tags
from tests.datasets.test_bands import raster, write
from tests.pool.ranks import Ranks
from tests.support.commands import read_rows, run_train

KEYS = (1, 1, 0, 3, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32632)
PLACED: list[Any] = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True),
    (33922, "d", 6, (0.0, 0.0, 0.0, 399960.0, 5300040.0, 0.0), True),
    (34735, "H", 16, KEYS, True),
    (34736, "d", 1, (6378137.0,), True),
    (34737, "s", 0, "WGS 84 / UTM zone 32N|", True),
    (42113, "s", 0, "-9999", True),
]
MODEL = "--model unet --model-options num_filters=2,depth=1 --image-size 32 --batch-size 2 --max-steps 1 --images"


def use(comm: Communicator, run: Path, images: Path, out: Path) -> None:
    """A body: predict."""
    assert all(
        "error" not in record for record in mpi4dl.TrainedModel(run, comm=comm, tiles="1x2").predict(images, out)
    )


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("task", ["segment", "image"])
def test_places_are_kept(ranks: Ranks, tmp_path: Path, task: str, placed: bool) -> None:
    first, second = ("images", "masks") if task == "segment" else ("inputs", "targets")
    (tmp_path / second).mkdir()
    for number in range(4):
        how = {"extratags": PLACED} if placed else {}
        path = write(tmp_path / first / f"{number}.tif", raster("int16", 5, number), **how)
        mask = np.random.default_rng(number).integers(0, 3, (41, 53), np.uint8)
        if task == "segment":
            PIL.Image.fromarray(mask).save(tmp_path / second / f"{number}.png")
        else:
            write(tmp_path / second / f"{number}.tif", raster("int16", 1, number)[..., 0], planarconfig=None)
    run = run_train(ranks, tmp_path / "run", MODEL, tmp_path, "--tiles 1x2")
    ranks(2).run(use, run, tmp_path / first, tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "predictions.csv")
    assert len(rows) == 4
    for row in rows:
        made = tmp_path / "out" / (row["mask"] if task == "segment" else row["prediction"])
        kept = (42113,) if task == "image" else ()
        assert (made.suffix == ".tif") == (placed or task == "image")
        assert geo_tags(made, 42113) == geo_tags(path, *kept)
        if made.suffix == ".tif":
            found = tifffile.imread(made)
            assert (found.shape, found.dtype) == ((41, 53), np.uint8 if task == "segment" else np.int16)
            counts = [int(row[column]) for column in row if column.startswith("pixels")]
            assert not counts or np.array_equal(np.bincount(found.reshape(-1), minlength=3), counts)
