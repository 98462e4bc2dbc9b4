"""mpi4dl.training.data: one rank lists the images for all, and a rank that sees others is found out."""

import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tifffile

from mpi4dl import datasets
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.options import sources
from mpi4dl.options.config import parse
from mpi4dl.options.sources import source_of
from mpi4dl.runs.samples import FILE, RunSamples
from mpi4dl.training.data import before, open_images, open_together
from tests.pool.ranks import Ranks
from tests.support.commands import words, write_images

HEADER = b"file,slide_id,case_id,label,split,fold,mpp,annotation,mask_print,bytes,crc32\n"
FLAGS = ("--image-size", "32", "--val-fraction", "0.3")


def listed(comm: Communicator, source: str, folders: list[Path]) -> object:
    """What this rank, which works in a folder of its own, has of the images; or what went wrong."""
    with chdir(folders[comm.rank]):
        try:
            pair = open_together(comm, source, validation_fraction=0.3)
            return [[(part.name(i), part.label(i)) for i in range(len(part))] for part in pair]
        except Refusal as refusal:
            return str(refusal)


def complaints(comm: Communicator, folders: list[Path], opens: str) -> dict[str, str]:
    """What is wrong for this rank with images, or labels, that all could be listed, by their names."""
    found = {}
    with chdir(folders[comm.rank]):
        for part in open_together(comm, "images", validation_fraction=0.3):
            for index in range(len(part)):
                try:
                    getattr(part, opens)(index)
                except DatasetError as error:
                    found[Path(part.name(index)).name] = str(error)
    return found


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders with the same images, one for each rank, as on nodes with disks of their own."""
    write_images(tmp_path / "0" / "images", count=10)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    return [tmp_path / "0", tmp_path / "1"]


def test_all_ranks_have_the_list_of_rank_0(ranks: Ranks, folders: list[Path]) -> None:
    PIL.Image.new("RGB", (9, 9)).save(folders[1] / "images" / "dark" / "more.png")
    shutil.copytree(folders[1] / "images" / "dark", folders[1] / "images" / "another class")
    first, second = ranks(2).run(listed, "images", folders)
    assert first == second
    assert len(first[0]) + len(first[1]) == 20
    first, second = ranks(2).run(listed, "synthetic", folders)  # which need no files
    assert first == second
    first, second = ranks(2).run(listed, "nowhere", folders)
    assert first == second == "nowhere: no such file or folder; expected 'synthetic', a folder of images or an .npz"


@pytest.mark.parametrize("harm", ["gone", "longer", "nothing"])
def test_a_rank_that_sees_other_files_is_named_with_the_file(ranks: Ranks, folders: list[Path], harm: str) -> None:
    for index in range(10):
        image = folders[1] / "images" / "light" / f"{index}.png"
        image.unlink() if harm == "gone" else image.write_bytes(image.read_bytes() + b"more")
    if harm == "nothing":
        shutil.rmtree(folders[1] / "images")
    found = ranks(2).run(listed, "images", folders)
    assert found[0] == found[1]
    assert "all ranks must see the same files, and they must stay as they are" in found[0]
    assert "rank 1: images/" in found[0]
    assert ("bytes on rank 1 (" if harm == "longer" else "is not there on rank 1 (") in found[0]


def test_other_pictures_of_the_same_size_are_found_when_they_are_opened(ranks: Ranks, folders: list[Path]) -> None:
    for folder, colour in zip(folders, (10, 20), strict=True):
        for path in [*folder.rglob("*.png")]:
            path.unlink()
            PIL.Image.new("RGB", (40, 40), (colour,) * 3).save(path.with_name(f"{path.parent.name}{path.stem}.bmp"))
    for rank, found in enumerate(ranks(2).run(complaints, folders, "image")):
        assert 0 < len(found) < 20
        assert all(f"has other content on rank {rank} (" in message for message in found.values())


def test_masks_are_known_again_as_images_are(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that sees another mask of the same size is told of with the file, and tables are those of rank 0."""
    roots = [tmp_path / str(rank) for rank in range(2)]
    for rank, root in enumerate(roots):
        for kind, mode, value in (("images", "RGB", 1), ("masks", "L", 1 - rank)):
            (root / "images" / kind).mkdir(parents=True)
            for index in range(10):
                PIL.Image.new(mode, (9, 9), value).save(root / "images" / kind / f"{index}.bmp")
    for rank, found in enumerate(ranks(2).run(complaints, roots, "label")):
        assert len(found) == 5  # each rank takes the prints of every second
        assert all(f"masks/{name}: has other content on rank {rank}" in said for name, said in found.items())
    for root, text in zip(roots, ("file,age\n1,5\n2,6\n3,7\n4,8\n", "file,age\n1,9\n"), strict=True):
        (root / "images" / "labels.csv").write_text(text)
        shutil.rmtree(root / "images" / "masks")
    first, second = ranks(2).run(listed, "images", roots)
    assert first == second
    assert sorted(label for part in first for _, label in part) == [(5.0,), (6.0,), (7.0,), (8.0,)]


@pytest.mark.parametrize("changed", ["y", "x", ""])
def test_arrays_are_compared(ranks: Ranks, folders: list[Path], changed: str) -> None:
    arrays = {"x": np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3), np.uint8), "y": np.arange(30) % 3}
    for folder in folders:
        np.savez(folder / "a.npz", **arrays)
        if changed:
            arrays[changed] = arrays[changed][::-1].copy()
    first, second = ranks(2).run(listed, "a.npz", folders)
    if changed:
        assert first == second
        assert "the images on rank 1 (" in first
    else:
        assert first == second != []


Described = tuple[str, tuple[str, ...]] | str


def described(comm: Communicator, argv: list[str], folder: Path | None = None) -> Described:
    """How images are shown, and what is said of them; they are kept in the folder of a run, if there is one."""
    try:
        images = open_images(comm, source_of(config := parse([*FLAGS, *argv])), config.run)
    except Refusal as refusal:
        return str(refusal)
    if folder is not None:
        images.record(comm, folder)
    return images.fit, images.remarks


def of(ranks: Ranks, source: object, *flags: str) -> Any:
    (found,) = ranks(1).run(described, words("--images", source, *flags))
    return found


@pytest.mark.parametrize(
    ("flags", "fit", "sentence"),
    [
        ("", "resize", "are resized to 32x32; `fit` crop would show windows of that size"),
        ("--random-crop", "resize", "are resized to 32x32 from random crops, validated whole; `fit` crop would"),
        ("--fit crop", "crop", "are cropped to 32x32 at random; validated on the centre"),
        ("--fit crop --image-size 41x46", "crop", "at random, white where they are smaller; validated on"),
    ],
)
def test_how_images_are_shown_is_said(ranks: Ranks, tmp_path: Path, flags: str, fit: str, sentence: str) -> None:
    found = of(ranks, write_images(tmp_path / "images", count=10), flags)
    assert found[0] == fit
    assert found[1][-1].startswith("images of 40x46 px (8 of ")
    assert sentence in found[1][-1]


def described_with_small_slides(comm: Communicator, root: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SLIDE_PIXELS", 40 * 46 - 1)
        return described(comm, ["--images", str(root)])


def test_one_rule_for_all_formats_and_for_all_images_of_a_run(ranks: Ranks, tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", count=10)
    (found,) = ranks(1).run(described_with_small_slides, root)
    assert found[0] == "crop"
    for index in range(5):
        PIL.Image.new("RGB", (20, 10)).save(root / "dark" / f"{index}.png")
    assert ranks(1).run(described_with_small_slides, root) == [
        "`fit` auto cannot choose for images of 10x20 to 40x46 px: say `fit` resize, or `fit` crop for windows of the "
        "image size"
    ]


def test_what_images_there_are_is_said(ranks: Ranks, tmp_path: Path) -> None:
    """Synthetic ones; the parts that are read, and classes that one lacks; and names do not steer the terminal."""
    _, remarks = of(ranks, "synthetic")
    assert "the images are synthetic, computed from a formula: `images` names a folder of your own" in remarks
    root = write_images(tmp_path / "lacking" / "train", ("a", "b", "c"), count=2)
    shutil.copytree(root, root.parent / "val")
    shutil.rmtree(root.parent / "val" / "b")
    _, remarks = of(ranks, root.parent)
    assert "warning: validation shows no image of b, of which metrics then say nothing" in remarks
    _, remarks = of(ranks, write_images(tmp_path / "steering", ("a\x1b[31m", "b"), count=10))
    assert r"in 2 classes: a\x1b[31m (" in remarks[0]
    assert all(remark.isprintable() for remark in remarks)
    root = tmp_path / "parts"
    for part in ("Train", "Test", "notes"):
        write_images(root / part, count=2)
    _, remarks = of(ranks, root)
    assert remarks[0] == "4 images to train on + 4 to validate with, in 2 classes: dark (2 + 2), light (2 + 2)"
    assert remarks[1] == f"trained on {root / 'Train'}, validated with {root / 'Test'}; notes beside them not read"


# Runs that go on with the images that they began with.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def going_on(run: Path) -> str:
    return f"--run-folder {run} --resume auto"


def test_a_run_that_goes_on_moves_no_image_and_says_what_changed(ranks: Ranks, tmp_path: Path, run: Path) -> None:
    root = write_images(tmp_path / "images", count=10)
    argv = words("--images", root, going_on(run))
    (found,) = ranks(1).run(described, argv, run)
    assert len(found[1]) == 3
    first = RunSamples.read(run / FILE).validating()
    assert len(first) == 20
    gone = next(name for name, validates in first.items() if not validates)
    (root / gone).unlink()
    (root / "dark" / "new.png").write_bytes((root / "light" / "1.png").read_bytes())
    (found,) = ranks(1).run(described, [*argv, "--val-fraction", "0.9", "--seed", "5"], run)
    assert found[1][3:5] == (f"of the samples, {gone} is gone since", "of the samples, dark/new.png is new")
    assert found[1][5:] == (
        "warning: 1 file is in two parts, under two names: light/1.png (train) and dark/new.png (val)",
        "warning: 1 file is of two labels, under two names: light/1.png (light) and dark/new.png (dark)",
    )
    after = RunSamples.read(run / FILE).validating()
    assert {name: after[name] for name in first if name != gone}.items() <= first.items()
    larger = next(name for name, validates in after.items() if validates)
    (root / larger).write_bytes((root / larger).read_bytes() + b"more")
    (refused,) = ranks(1).run(described, argv)
    assert f"1 sample with other content than when the run began: {larger}: put the files back" in refused


@pytest.mark.parametrize("content", [b"", b"{", b"file,split\na,train\n", HEADER + b"a,a,p\n", HEADER + b'"a'])
def test_a_damaged_table_is_refused(ranks: Ranks, run: Path, content: bytes) -> None:
    (run / FILE).write_bytes(content)
    found = of(ranks, "synthetic", going_on(run))
    assert f"{run / FILE}: is not the table of a run's samples, it is damaged" in found


def test_the_table_of_a_run_is_found_from_its_checkpoints_and_read_as_it_was_written(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", count=4)
    lines = [f"dark/{n}.png,p{n},{n / 3!r},0.{n + 1},{n % 2}" for n in range(4)]
    (images / "labels.csv").write_text("file,patient,dose,mpp,fold\n" + "\n".join(lines))
    now = RunSamples.of(*datasets.open(images, validation_fraction=0.5))
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    now.write(tmp_path / "run")
    for path in ("run", "run/checkpoints", "run/checkpoints/step-1"):
        found = before(parse(["--resume", str(tmp_path / path)]).run)
        assert found is not None
        assert found.samples.samples == now.samples
        assert found.about is None
    assert {each.label for each in now.samples} == {f"{n / 3!r} at 0.{n + 1} um per pixel" for n in range(4)}
    found.samples.require_unchanged(now)


# Sources of images, of which two samples have each other's labels if they are `swapped`: flags that name them.


def exchange(one: Path, other: Path, alike: bool = False) -> None:
    """Each file gets the content of the other one, which has as many bytes if they are alike."""
    mine, theirs = one.read_bytes(), other.read_bytes()
    assert (len(mine) == len(theirs)) == alike
    one.write_bytes(theirs)
    other.write_bytes(mine)


def swap(one: Path, other: Path) -> None:
    mine, theirs = one.read_bytes(), other.read_bytes()
    assert len(mine) != len(theirs)
    one.write_bytes(theirs)
    other.write_bytes(mine)


def of_folders(root: Path, swapped: bool) -> str:
    """Two pictures in the folders of each other's class."""
    write_images(root, count=10)
    if swapped:
        exchange(root / "dark" / "3.png", root / "light" / "3.png")
    return f"--images {root}"


def of_alike(root: Path, swapped: bool) -> str:
    """The same of pictures with as many bytes and one time, which stay where they are."""
    random = np.random.default_rng(3)
    for name, most in (("dark", 100), ("light", 250)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(10):
            pixels = random.integers(0, most, (20, 20, 3)).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(root / name / f"{number}.bmp")
    if swapped:
        exchange(root / "dark" / "3.bmp", root / "light" / "7.bmp", alike=True)
    for path in root.rglob("*.bmp"):
        os.utime(path, (1, 1))
    return f"--images {root}"


OWN = """
from pathlib import Path

import torch

class Boxes:
    def __init__(self):
        self.labels = [*map(int, Path(__file__).with_name("labels.txt").read_text().split())]

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((3, 20, 20), index / 20), self.labels[index]

class Listed(Boxes):
    classes = ("dark", "light")

    @property
    def targets(self):
        return self.labels
"""


def of_own_dataset(root: Path, swapped: bool, kind: str = "Listed") -> str:
    labels = [0, 1] * 10
    if swapped:
        labels[3], labels[4] = labels[4], labels[3]
    root.mkdir(exist_ok=True)
    (root / "own.py").write_text(OWN)
    (root / "labels.txt").write_text(" ".join(map(str, labels)))
    return f"--dataset {root / 'own.py'}:{kind}"


def of_table(root: Path, swapped: bool, labels: tuple[str, str] = ("dark", "light"), header: str = "label") -> str:
    write_images(root / "images", count=10)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    rows = {name: labels["light" in name] for name in names}
    if swapped:
        rows["images/dark/3.png"], rows["images/light/4.png"] = labels[1], labels[0]
    lines = [f"image,{header}", *(f"{name},{label}" for name, label in rows.items())]
    (root / "labels.csv").write_text("\n".join(lines))
    return f"--images {root}"


def of_numbers(root: Path, swapped: bool) -> str:
    return of_table(root, swapped, ("0.1,2", "0.30000000000000004,1"), "dose,spread") + " --task regress"


def of_arrays(root: Path, swapped: bool) -> str:
    labels = np.arange(20) % 2
    labels[[3, 4]] = labels[[4, 3]] if swapped else labels[[3, 4]]
    root.mkdir(exist_ok=True)
    np.savez(root / "all.npz", x=np.zeros((20, 8, 8, 3), np.uint8), y=labels)
    return f"--images {root / 'all.npz'}"


def of_masks(root: Path, swapped: bool, suffix: str = ".png") -> str:
    """Masks whose files have as many bytes, as TIFF, or not."""
    random = np.random.default_rng(1)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number in range(10):
        values = random.integers(0, 2, (40, 40), np.uint8)
        options = {"compress_level": number} if suffix == ".png" else {}
        PIL.Image.fromarray(values).save(root / "masks" / f"{number}{suffix}", **options)
        PIL.Image.fromarray(values * 100).convert("RGB").save(root / "images" / f"{number}.png")
    if swapped:
        exchange(root / "masks" / f"0{suffix}", root / "masks" / f"9{suffix}", alike=suffix == ".tif")
    return f"--images {root} --task segment"


def of_slides(root: Path, swapped: bool, column: str = "label", values: tuple[str, str] = ("a", "b")) -> str:
    """Slides that have other labels, or other values in another column."""
    root.mkdir(exist_ok=True)
    rows = {f"s{number}": [values[number % 2], "ab"[number % 2]] for number in range(10)}
    if swapped:
        rows["s3"][0], rows["s4"][0] = rows["s4"][0], rows["s3"][0]
    for name in rows:
        tifffile.imwrite(root / f"{name}.tif", np.full((64, 64, 3), 200, np.uint8))
    lines = [f"slide,{column},label", *(f"{name},{value},{label}" for name, (value, label) in rows.items())]
    if column == "label":
        lines = [line.rpartition(",")[0] for line in lines]
    (root / "slides.csv").write_text("\n".join(lines))
    return f"--slides {root / 'slides.csv'}"


def of_weights(root: Path, swapped: bool) -> str:
    return of_slides(root, swapped, "counts", ("0.5", "2")).replace("--slides", "--weight-column counts --slides")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (of_slides, ("s3.tif (b, now a)", "s4.tif (a, now b)")),
        (of_weights, ("s3.tif (b with weight 2.0, now b with weight 0.5)",)),
        (partial(of_slides, column="mpp", values=("0.25", "0.5")), ("s3.tif (b at 0.5", "now b at 0.25")),
        (of_alike, ("light/7.bmp (dark, now light)", "dark/3.bmp (light, now dark)")),
        (of_own_dataset, ("3 (light, now dark)", "4 (dark, now light)")),
        (of_folders, ("light/3.png (dark, now light)", "dark/3.png (light, now dark)")),
        (of_table, ("images/dark/3.png (dark, now light)", "images/light/4.png (light, now dark)")),
        (of_numbers, ("images/dark/3.png", "0.30000000000000004")),
        (of_arrays, ("3", "4")),
        (of_masks, ("0.png", "9.png")),
        (partial(of_masks, suffix=".tif"), ("0.png", "9.png")),
    ],
)
def test_a_run_does_not_go_on_with_other_labels(
    ranks: Ranks, tmp_path: Path, run: Path, source: Callable[[Path, bool], str], names: tuple[str, str]
) -> None:
    root = tmp_path / "images"
    argv = words(source(root, False), going_on(run))
    ranks(1).run(described, argv, run)
    assert isinstance(ranks(1).run(described, argv)[0], tuple)  # the same again goes on
    shutil.rmtree(root)
    source(root, True)
    (found,) = ranks(1).run(described, argv)
    assert "2 samples with another label" in found
    assert all(name in found for name in names)


def test_a_run_does_not_go_on_with_other_pixels(ranks: Ranks, tmp_path: Path, run: Path) -> None:
    """In as many bytes, and with the same times."""
    argv, changed = words(of_alike(tmp_path / "images", False), going_on(run)), tmp_path / "images" / "dark" / "3.bmp"
    ranks(1).run(described, argv, run)
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    os.utime(changed, (1, 1))
    (said,) = ranks(1).run(described, argv)
    assert "1 sample with other content than when the run began: dark/3.bmp: put the files back" in said


def test_labels_that_nobody_tells_are_said_not_to_be_compared(ranks: Ranks, tmp_path: Path, run: Path) -> None:
    argv = words(of_own_dataset(tmp_path / "own", False, "Boxes"), going_on(run))
    ranks(1).run(described, argv, run)
    (said,) = ranks(1).run(described, argv, run)
    assert any("Boxes gives labels with its images alone" in line for line in said[1][3:])
