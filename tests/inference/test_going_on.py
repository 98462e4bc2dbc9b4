"""Predictions that stop go on and lose nothing; lines are of files, weights and options as they are now."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn

import mpi4dl
from mpi4dl.comm import Refusal
from tests.inference.cases import SIZE, train_nothing

BUILD = "tests.inference.test_going_on:build"
STOP_AFTER = "MPI4DL_TEST_STOP_AFTER"  # so many batches, in the process that has it
SUFFIXES = (".png", ".bmp", ".tif", ".tiff")


class Stopping(nn.Module):
    """A class of each pixel by its colour; its process gets a SIGTERM in the middle, if it is to."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.last, self.calls = nn.Conv2d(3, num_classes, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == int(os.environ.get(STOP_AFTER, 0)):
            os.kill(os.getpid(), signal.SIGTERM)
        return self.last(x)


def build(num_classes: int) -> nn.Module:
    return Stopping(num_classes)


def write(folder: Path, count: int) -> dict[str, Path]:
    """Images of mixed formats with equal stems, in two folders."""
    found = {}
    for number in range(count):
        name = f"{'more/' * (number % 8 > 3)}{number // 8}{SUFFIXES[number % 4]}"
        found[name] = draw(folder / name, number)
    return found


def draw(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(seed)
    ground = np.repeat(drawn.integers(0, 200, (4, 1, 3)), SIZE[0] // 4, 0)
    pixels = ground + drawn.integers(0, 56, (*SIZE, 3))
    PIL.Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in (out / "predictions.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["image"] not in found
        found[record["image"]] = record
    return found


def check(model: nn.Module, images: dict[str, Path], out: Path) -> None:
    """There is one line of each image, and a mask of its own, which is that of plain PyTorch."""
    lines = lines_of(out)
    assert lines.keys() == images.keys()
    assert len({line["mask"] for line in lines.values()}) == len(images)
    assert {path for path in (out / "masks").rglob("*") if path.is_file()} == {
        out / line["mask"] for line in lines.values()
    }
    for name, path in images.items():
        pixels = torch.from_numpy(np.asarray(PIL.Image.open(path)).copy()).permute(2, 0, 1)[None]
        with torch.no_grad():
            expected = model((pixels / 255 - 0.5) / 0.25).argmax(1)[0]
        assert np.array_equal(np.asarray(PIL.Image.open(out / lines[name]["mask"])), expected), name


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_a_stop_in_the_middle_loses_nothing(tmp_path: Path, count: int) -> None:
    model = train_nothing(tmp_path / "run", "segment", model=BUILD)
    images, out = write(tmp_path / "new", count), tmp_path / "out"
    argv = [str(tmp_path / "run"), "--images", str(tmp_path / "new"), "--out", str(out), "--num-workers", "1"]
    stopped = {**os.environ, STOP_AFTER: str(count // 6 + 1)}
    job = subprocess.run([sys.executable, "-m", "mpi4dl.predict", *argv], env=stopped, capture_output=True)
    assert job.returncode != 0, job.stderr
    before = lines_of(out)
    assert 0 < len(before) < count
    times = {name: (out / record["mask"]).stat().st_mtime_ns for name, record in before.items()}
    mpi4dl_predict(argv)
    check(model, images, out)
    after = lines_of(out)
    for name, at in times.items():  # what was done is not done again
        assert after[name] == before[name]
        assert (out / after[name]["mask"]).stat().st_mtime_ns == at


def mpi4dl_predict(argv: list[str]) -> None:
    from mpi4dl.comm import world
    from mpi4dl.predict import predict

    predict(world(), argv)


def replace(images: dict[str, Path], out: Path) -> None:
    """Another picture of the same size in bytes, and with the same times."""
    path = images["0.bmp"]
    before = path.stat()
    draw(path, 77)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def delete(images: dict[str, Path], out: Path) -> None:
    images.pop("0.png").unlink()


def add(images: dict[str, Path], out: Path) -> None:
    images["0.png.png"] = draw(images["0.png"].with_name("0.png.png"), 78)
    images["unlike.png"] = draw(images["0.png"].with_name("unlike.png"), 79)


def lose_a_mask(images: dict[str, Path], out: Path) -> None:
    (out / lines_of(out)["0.tif"]["mask"]).unlink()


def half_a_line(images: dict[str, Path], out: Path) -> None:
    lines = out / "predictions.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])


def copied(images: dict[str, Path], out: Path) -> None:
    """The same bytes, at another time: nothing is done again, though that cannot be seen here."""
    for path in images.values():
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)


@pytest.mark.parametrize("change", [replace, delete, add, lose_a_mask, half_a_line, copied])
def test_lines_are_of_the_files_that_there_are(tmp_path: Path, change: Callable[[dict[str, Path], Path], None]) -> None:
    model = train_nothing(tmp_path / "run", "segment", model=BUILD)
    images, out = write(tmp_path / "new", 8), tmp_path / "out"
    for _ in range(2):
        list(mpi4dl.TrainedModel(tmp_path / "run").predict(tmp_path / "new", out))
        check(model, images, out)
        change(images, out)
        change = half_a_line
    left = list(mpi4dl.TrainedModel(tmp_path / "run").predict(tmp_path / "new", out))
    assert len(left) == 1
    check(model, images, out)


@pytest.mark.parametrize("what", ["weights", "model", "images", "fit"])
def test_lines_of_another_model_are_not_added_to(tmp_path: Path, what: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train_nothing(run, "segment", model=BUILD)
    write(tmp_path / "new", 2)
    shutil.copytree(tmp_path / "new", tmp_path / "others")
    list(mpi4dl.TrainedModel(run).predict(tmp_path / "new", tmp_path / "out"))
    shutil.copytree(run, other)
    if what == "weights":
        with (other / "model.safetensors").open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"x")
    if what == "model":
        from safetensors.torch import load_file, save_file

        about = json.loads((other / "model.json").read_text())
        about["options"]["mean"] = "0.3"
        save_file(load_file(run / "model.safetensors"), other / "model.safetensors", {"mpi4dl": json.dumps(about)})
    images = tmp_path / ("others" if what == "images" else "new")
    fit = "crop" if what == "fit" else "auto"
    with pytest.raises(Refusal, match="fit.* crop is not for masks" if what == "fit" else f"results with .*`{what}`"):
        list(mpi4dl.TrainedModel(other, fit=fit, trust_code=True).predict(images, tmp_path / "out"))
