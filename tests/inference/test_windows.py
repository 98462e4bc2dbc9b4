"""Masks have the size of their images: windows over large ones, joined without a seam, whatever brought them there."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl.comm import Communicator
from mpi4dl.geometry import Interval
from mpi4dl.inference.masks import StitchedMask, Target, bases_of, windows_along
from tests.inference.cases import CLASSES, SIZE, Shown, train_nothing
from tests.pool.ranks import Ranks


@pytest.mark.parametrize("frame", [1, 5, 24, 64, 128, 224])
def test_cores_are_all_pixels_once(frame: int) -> None:
    for size in {1, frame - 1 or 1, frame, frame + 1, 2 * frame, 5 * frame + 3, 1000}:
        intervals = windows_along(size, frame)
        pixels = [pixel for cut in intervals for pixel in range(*cut.core)]
        assert pixels == list(range(size))
        for cut in intervals:
            assert cut.start <= cut.core.start < cut.core.stop <= max(cut.start + frame, size)
            assert 0 <= cut.start <= max(0, size - frame)
        for before, after in pairwise(intervals):
            assert before.start + frame - after.start >= frame // 4
        target = Target((size,), (size,), (frame,), "resize")
        assert target.places()[0].tolist() == list(range(size))


@pytest.mark.parametrize(
    "names",
    [
        ["x.png", "x.bmp", "x.tif", "y.png"],
        ["x.png", "x.bmp", "x.png.tif", "x.bmp.tif"],
        ["a/x.png", "../a/x.png", "/a/x.png", "b/x.png"],
        ["X.png", "x.PNG", "x.tif", "x"],
        ["x.nii", "x.nii.gz", "x.npy", "x.png.png", "x.png/z.png"],
    ],
)
def test_no_two_masks_are_in_one_place(names: list[str]) -> None:
    found = bases_of(names, ".png")
    places = [f"{base}.png".casefold() for base in found]
    assert len(set(places)) == len(names)
    assert not {str(parent).casefold() for base in found for parent in base.parents} & set(places)
    stems = [Path(name).stem.casefold() for name in names]
    for name, base in zip(names, found, strict=True):
        if stems.count(Path(name).stem.casefold()) == 1:
            assert base.name == Path(name).stem
    turned = bases_of(names[::-1], ".png")
    assert turned[::-1] == found


def test_pyramids_of_pyramids_end_in_ome_once() -> None:
    names = ["a/x.ome.tif", "y.svs", "z.ome.tif", "z.tif", "1.2.3", ".ome.tif"]
    assert [*map(str, bases_of(names, ".ome.tif"))] == ["a/x", "y", "z.ome.tif", "z.tif", "1.2.3", ".ome"]
    assert bases_of(["x.ome.tif"], ".h5") == [Path("x.ome")]


class Near(nn.Module):
    """A class of each pixel by those up to 2 away, which a window's margin has."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 5, padding=2), nn.Conv2d(6, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def build(num_classes: int) -> nn.Module:
    return Near(num_classes)


def write(path: Path, size: tuple[int, int]) -> Tensor:
    """An image of noise on large spots, as a model sees it: (1, 3, H, W)."""
    drawn = torch.Generator().manual_seed(size[0] * size[1])
    spots = F.interpolate(torch.rand((1, 3, 6, 5), generator=drawn), size, mode="nearest")
    pixels = (spots * 200 + torch.rand((1, 3, *size), generator=drawn) * 55).to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(path)
    return (pixels / 255 - 0.5) / 0.25


def predicted(comm: Communicator, run: Path, images: str, out: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    model = mpi4dl.TrainedModel(run, comm=comm, model="tests.inference.test_windows:build", **options)
    return list(model.predict(images, out))


SIZES = ((61, 83), SIZE, (24, 130), (100, 32))


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(1, {}), (4, {"tiles": "2x2"}), (4, {"data": 4, "batch_size": 8})], ids=str
)
@pytest.mark.parametrize(
    "shown", [Shown("crop"), pytest.param(Shown("resize", SIZE), marks=pytest.mark.exhaustive)], ids=str
)
def test_masks_by_windows_are_those_of_the_whole_image(
    ranks: Ranks, tmp_path: Path, num_ranks: int, options: dict[str, Any], shown: Shown
) -> None:
    """Training saw pixels as they are, by crops, or because its images had its size."""
    model = train_nothing(
        tmp_path / "run", "segment", images=shown, model="tests.inference.test_windows:build", num_classes=3
    )
    seen = {f"{number}.png": write(tmp_path / "new" / f"{number}.png", size) for number, size in enumerate(SIZES)}
    found = ranks(num_ranks).run(predicted, tmp_path / "run", str(tmp_path / "new"), tmp_path / "out", options)
    assert all(each == found[0] for each in found)
    assert [record["image"] for record in found[0]] == [*seen]
    for record in found[0]:
        with torch.no_grad():
            outputs = model(seen[record["image"]])
        expected = outputs.argmax(1)[0].numpy()
        mask = np.asarray(PIL.Image.open(tmp_path / "out" / record["mask"]))
        assert mask.shape == expected.shape
        best = outputs.topk(2, 1).values[0]
        clear = (best[0] - best[1] > 1e-4).numpy()
        assert clear.mean() > 0.95
        assert np.array_equal(mask[clear], expected[clear])
        assert len(np.unique(expected)) > 1
        assert [*record["pixels"].values()] == np.bincount(mask.reshape(-1), minlength=3).tolist()


@pytest.mark.parametrize(
    ("shown", "source", "size"),
    [
        (Shown(), (50, 90), SIZE),  # of older runs nobody knows, so that images are shown whole
        (Shown("resize", (48, 64)), (40, 50), SIZE),  # as in training: whole
        (Shown("resize", (48, 64)), (96, 64), (48, 32)),  # twice as high as any: twice the frame
        (Shown("crop"), (10, 40), (24, 40)),  # padded where it is smaller
    ],
)
def test_large_images_are_resized_as_those_of_training(shown: Shown, source: Any, size: Any) -> None:
    found = Target.of(source, SIZE, shown.fit, shown.largest)
    assert found.size == size
    for places, pixels, seen in zip(found.places(), source, found.size, strict=True):
        assert len(places) == pixels
        assert (np.diff(places) >= 0).all()
        assert 0 <= places[0] <= places[-1] < seen


def test_overlapping_classes_have_masks_of_the_images_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": "bce", "model": "tests.inference.test_windows:build", "num_classes": 3}
    model = train_nothing(tmp_path / "run", "segment", images=Shown("crop"), **options)
    pixels = write(tmp_path / "new" / "a.png", (50, 77))
    (record,) = predicted(mpi4dl.comm.world(), tmp_path / "run", str(tmp_path / "new"), tmp_path / "out", {})
    with torch.no_grad():
        expected = (model(pixels)[0] > 0).numpy()
    for number, name in enumerate(CLASSES):
        mask = np.asarray(PIL.Image.open(tmp_path / "out" / record["masks"][name]))
        assert (mask != expected[number]).mean() < 0.01
        assert record["pixels"][name] == int((mask == 1).sum())


def test_what_is_not_a_number_has_no_mask(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from mpi4dl.checkpoints.manifest import ABOUT, MODEL

    name = "tests.inference.test_windows:build"
    train_nothing(tmp_path / "run", "segment", images=Shown("crop"), model=name, num_classes=3)
    write(tmp_path / "new" / "a.png", (50, 77))
    state = load_file(tmp_path / "run" / MODEL)
    state["last.bias"][0] = torch.nan
    save_file(state, tmp_path / "run" / MODEL, {ABOUT: (tmp_path / "run" / "model.json").read_text()})
    (record,) = predicted(mpi4dl.comm.world(), tmp_path / "run", str(tmp_path / "new"), tmp_path / "out", {})
    assert "not numbers (NaN) at 3850 of 3850 pixels" in record["error"]
    assert not [*(tmp_path / "out" / "masks").iterdir()]


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize(
    ("source", "frame", "target"),
    [((70, 45), (24, 16), None), ((30, 20, 26), (12, 24, 16), None), ((9, 50), (24, 32), Shown("crop"))],
)
def test_windows_are_joined_and_brought_to_the_images_size(
    tmp_path: Path, layers: int, source: tuple[int, ...], frame: tuple[int, ...], target: Shown | None
) -> None:
    shown = target or Shown("resize", frame)
    largest = tuple(2 * side - 5 for side in frame) if target is None else None
    found = Target.of(source, frame, shown.fit, largest)
    whole = np.random.default_rng(0).integers(0, 2, (max(layers, 1), *found.size)).astype(np.int16)
    suffix = ".png" if len(source) == 2 else ".npy"
    paths = [tmp_path / f"{number}{suffix}" for number in range(max(layers, 1))]
    mask = StitchedMask(paths, found, ("a", "b"), layers)
    for number in range(found.num_windows):
        intervals = found.window(number)
        for top in range(0, frame[-2], 7):  # in bands of rows, as ranks hand them over
            where = [slice(0, side) for side in frame]
            where[-2] = slice(top, min(top + 7, frame[-2]))
            box = (
                slice(None),
                *(slice(c.start + w.start, c.start + w.stop) for c, w in zip(intervals, where, strict=True)),
            )
            mask.add(intervals, where, whole[box] if layers else whole[box][0])
    mask.close()
    expected = whole[(slice(None), *np.ix_(*found.places()))]
    for path, values in zip(paths, expected, strict=True):
        read = np.asarray(PIL.Image.open(path)) if suffix == ".png" else np.load(path)
        assert np.array_equal(read, values)
    ones = expected.reshape(len(expected), -1).sum(1).tolist()
    assert mask.counts.tolist() == (ones if layers else [expected.size - ones[0], ones[0]])


@pytest.mark.parametrize(("source", "frame"), [((150, 97), (40, 24)), ((20, 90), (32, 32)), ((33, 31), (33, 31))])
def test_windows_in_tissue_are_those_with_a_cell_of_it(source: tuple[int, int], frame: tuple[int, int]) -> None:
    """By all pixels of each window; what no window is looked at is of class 0, and each pixel counts once."""
    whole, cell, random = Target.of(source, frame, "crop", beyond=True), 8, np.random.default_rng(3)
    for number in range(whole.num_in_all):  # no window decides a pixel of the slide close to its own side
        intervals = whole.window(number)
        for cut, at, side, size in zip(intervals, whole.corner(intervals), frame, source, strict=True):
            decides = cut.core.shift(at - cut.start).intersect(Interval(0, size))
            assert decides.start - at >= side // 8
            assert at + side - decides.stop >= side // 8
    for share in (0.0, 0.02, 0.5):
        cells = random.random([-(-side // cell) for side in source]) < share
        tissue = cells.repeat(cell, 0).repeat(cell, 1)[: source[0], : source[1]]
        found = whole.in_tissue(cells, cell)
        expected = []
        for number in range(whole.num_in_all):
            row, col = whole.corner(whole.window(number))
            box = tissue[max(0, row) : row + frame[0], max(0, col) : col + frame[1]]
            expected += [number] if box.any() else []
        assert found.chosen == (tuple(expected) or (0,))
        file = np.zeros(source, np.uint8)
        opened: Any = SimpleNamespace(write=file.__setitem__, close=lambda: None)
        mask = StitchedMask([Path()], found, ("background", "tumour"), 0, lambda _, opened=opened: opened)
        ones, decided = np.ones(frame, np.int16), np.zeros(source, bool)
        for number in range(found.num_windows):
            intervals = found.window(number)
            mask.add(intervals, [slice(0, side) for side in frame], ones)
            row, col = (
                cut.core.shift(at - cut.start) for cut, at in zip(intervals, found.corner(intervals), strict=True)
            )
            decided[max(0, row.start) : row.stop, max(0, col.start) : col.stop] = True
        mask.close()
        assert np.array_equal(file, decided)
        assert mask.counts.tolist() == [(~decided).sum(), decided.sum()]
        assert found.num_windows + len([*found.not_chosen()]) == whole.num_in_all
