"""mpi4dl.training.data: one rank lists the images for all, and a rank that sees others is found out."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import tifffile

from mpi4dl import datasets
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.options.config import parse
from mpi4dl.runs.samples import FILE, RunSamples
from mpi4dl.training import data as images_of_runs
from mpi4dl.training.data import before, open_images, open_together
from tests.pool.ranks import Ranks
from tests.support.commands import write_images

HEADER = b"file,slide_id,case_id,label,split,fold,mpp,annotation,mask_print,bytes,crc32\n"
FLAGS = ("--image-size", "32", "--val-fraction", "0.3")


def listed(comm: Communicator, source: str, folders: list[Path]) -> object:
    """What this rank, which works in a folder of its own, has of the images; or what went wrong."""
    before = Path.cwd()
    os.chdir(folders[comm.rank])
    try:
        pair = open_together(comm, source, validation_fraction=0.3)
        return [[(part.name(i), part.label(i)) for i in range(len(part))] for part in pair]
    except Refusal as refusal:
        return str(refusal)
    finally:
        os.chdir(before)


def opened(comm: Communicator, folders: list[Path]) -> object:
    """Which images this rank may not open, though all could be listed."""
    before = Path.cwd()
    os.chdir(folders[comm.rank])
    try:
        training, _ = open_together(comm, "images", validation_fraction=0.3)
        found = []
        for index in range(len(training)):
            try:
                training.image(index)
            except DatasetError as error:
                found.append(str(error))
        return found
    finally:
        os.chdir(before)


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
        for name in ("dark", "light"):
            for index in range(10):
                (folder / "images" / name / f"{index}.png").unlink()
                PIL.Image.new("RGB", (40, 40), (colour,) * 3).save(folder / "images" / name / f"{index}.bmp")
    found = ranks(2).run(opened, folders)
    for rank in range(2):
        assert 0 < len(found[rank]) < 20
        assert all(f"has other content on rank {rank} (" in message for message in found[rank])


def test_masks_are_known_again_as_images_are(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that sees another mask of the same size is told of with the file, and tables are those of rank 0."""
    for rank in range(2):
        for kind in ("images", "masks"):
            (tmp_path / str(rank) / "images" / kind).mkdir(parents=True)
            for index in range(10):
                mode = "RGB" if kind == "images" else "L"
                PIL.Image.new(mode, (9, 9), 1).save(tmp_path / str(rank) / "images" / kind / f"{index}.bmp")
    for index in range(10):
        PIL.Image.new("L", (9, 9), 0).save(tmp_path / "1" / "images" / "masks" / f"{index}.bmp")
    first, second = ranks(2).run(labelled, "images", [tmp_path / str(rank) for rank in range(2)])
    assert [len(each) for each in (first, second)] == [5, 5]  # each rank takes the prints of every second
    for rank, found in enumerate((first, second)):
        assert all(f"masks/{index}.bmp: has other content on rank {rank}" in said for index, said in found.items())
    for rank, text in enumerate(("file,age\n1,5\n2,6\n3,7\n4,8\n", "file,age\n1,9\n")):
        (tmp_path / str(rank) / "images" / "labels.csv").write_text(text)
        shutil.rmtree(tmp_path / str(rank) / "images" / "masks")
    first, second = ranks(2).run(listed, "images", [tmp_path / str(rank) for rank in range(2)])
    assert first == second
    assert sorted(label for part in first for _, label in part) == [(5.0,), (6.0,), (7.0,), (8.0,)]


def labelled(comm: Communicator, source: str, folders: list[Path]) -> dict[int, str]:
    """What is wrong with labels for this rank, which works in a folder of its own, by the number of the sample."""
    before = Path.cwd()
    os.chdir(folders[comm.rank])
    try:
        training, validation = open_together(comm, source, validation_fraction=0.3)
        found = {}
        for part in (training, validation):
            for index in range(len(part)):
                try:
                    part.label(index)
                except DatasetError as error:
                    found[int(Path(part.name(index)).stem)] = str(error)
        return found
    finally:
        os.chdir(before)


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


def test_synthetic_images_need_no_files(ranks: Ranks, folders: list[Path]) -> None:
    first, second = ranks(2).run(listed, "synthetic", folders)
    assert first == second


def test_of_a_source_that_is_not_there_rank_0_tells_all(ranks: Ranks, folders: list[Path]) -> None:
    first, second = ranks(2).run(listed, "nowhere", folders)
    assert first == second == "nowhere: no such file or folder; expected 'synthetic', a folder of images or an .npz"


def described(comm: Communicator, *flags: str) -> tuple[str, tuple[str, ...]] | str:
    try:
        images = open_images(comm, parse([*FLAGS, *flags]))
    except Refusal as refusal:
        return str(refusal)
    return images.fit, images.remarks


@pytest.mark.parametrize(
    ("flags", "fit", "sentence"),
    [
        ((), "resize", "are resized to 32x32; `fit` crop would show windows of that size"),
        (("--random-crop",), "resize", "are resized to 32x32 from random crops, validated whole; `fit` crop would"),
        (("--fit", "crop"), "crop", "are cropped to 32x32 at random; validated on the centre"),
        (("--fit", "crop", "--image-size", "41x46"), "crop", "at random, white where they are smaller; validated on"),
    ],
    ids=str,
)
def test_how_images_are_shown_is_said(
    ranks: Ranks, tmp_path: Path, flags: tuple[str, ...], fit: str, sentence: str
) -> None:
    write_images(tmp_path / "images", count=10)
    (found,) = ranks(1).run(described, "--images", str(tmp_path / "images"), *flags)
    assert found[0] == fit
    assert found[1][-1].startswith("images of 40x46 px (8 of ")
    assert sentence in found[1][-1]


def described_with_small_slides(comm: Communicator, *flags: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images_of_runs, "SLIDE_PIXELS", 40 * 46 - 1)
        return described(comm, *flags)


def test_one_rule_for_all_formats_and_for_all_images_of_a_run(ranks: Ranks, tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", count=10)
    (found,) = ranks(1).run(described_with_small_slides, "--images", str(root))
    assert found[0] == "crop"
    for index in range(5):
        PIL.Image.new("RGB", (20, 10)).save(root / "dark" / f"{index}.png")
    assert ranks(1).run(described_with_small_slides, "--images", str(root)) == [
        "`fit` auto cannot choose for images of 10x20 to 40x46 px: say `fit` resize, or `fit` crop for windows of the "
        "image size"
    ]


def test_synthetic_images_and_classes_that_a_part_lacks_are_said(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks(1).run(described)
    assert "the images are synthetic, computed from a formula: `images` names a folder of your own" in found[1]
    root = write_images(tmp_path / "images" / "train", ("a", "b", "c"), count=2)
    shutil.copytree(root, root.parent / "val")
    shutil.rmtree(root.parent / "val" / "b")
    (found,) = ranks(1).run(described, "--images", str(root.parent))
    assert found[1][1] == "warning: validation shows no image of b, of which metrics then say nothing"


def test_classes_are_said_and_do_not_steer_the_terminal(ranks: Ranks, tmp_path: Path) -> None:
    write_images(tmp_path / "images", ("a\x1b[31m", "b"), count=10)
    (found,) = ranks(1).run(described, "--images", str(tmp_path / "images"))
    assert r"in 2 classes: a\x1b[31m (" in found[1][0]
    assert all(remark.isprintable() for remark in found[1])


def test_the_parts_that_are_read_are_said(ranks: Ranks, tmp_path: Path) -> None:
    for part in ("Train", "Test", "notes"):
        write_images(tmp_path / "images" / part, count=2)
    (found,) = ranks(1).run(described, "--images", str(tmp_path / "images"))
    root = tmp_path / "images"
    assert found[1][0] == "4 images to train on + 4 to validate with, in 2 classes: dark (2 + 2), light (2 + 2)"
    assert found[1][1] == f"trained on {root / 'Train'}, validated with {root / 'Test'}; notes beside them not read"


def test_a_run_that_goes_on_moves_no_image_and_says_what_changed(ranks: Ranks, tmp_path: Path) -> None:
    root, run = write_images(tmp_path / "images", count=10), tmp_path / "run"
    run.mkdir()
    flags = ("--images", str(root), "--run-folder", str(run), "--resume", "auto")
    assert ranks(1).run(recorded, str(run), *flags) == [()]
    first = RunSamples.read(run / FILE).validating()
    assert len(first) == 20
    gone = next(name for name, validates in first.items() if not validates)
    (root / gone).unlink()
    (root / "dark" / "new.png").write_bytes((root / "light" / "1.png").read_bytes())
    (said,) = ranks(1).run(recorded, str(run), *flags, "--val-fraction", "0.9", "--seed", "5")
    assert said == (f"of the samples, {gone} is gone since", "of the samples, dark/new.png is new")
    after = RunSamples.read(run / FILE).validating()
    assert {name: after[name] for name in first if name != gone}.items() <= first.items()
    larger = next(name for name, validates in after.items() if validates)
    (root / larger).write_bytes((root / larger).read_bytes() + b"more")
    (refused,) = ranks(1).run(described, *flags)
    assert f"1 sample with other content than when the run began: {larger}: put the files back" in refused


def recorded(comm: Communicator, folder: str, *flags: str) -> tuple[str, ...]:
    """What is said of a run whose lists are put into a folder, beside its images' number and size."""
    images = open_images(comm, parse([*FLAGS, *flags]))
    images.record(comm, Path(folder))
    return images.remarks[3:]


@pytest.mark.parametrize("content", [b"", b"{", b"file,split\na,train\n", HEADER + b"a,a,p\n", HEADER + b'"a'])
def test_a_damaged_table_is_refused(ranks: Ranks, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    flags = ("--run-folder", str(tmp_path), "--resume", "auto")
    (found,) = ranks(1).run(described, *flags)
    assert f"{tmp_path / FILE}: is not the table of a run's samples, it is damaged" in found


def test_the_table_of_a_run_is_found_from_its_checkpoints_and_read_as_it_was_written(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", count=4)
    lines = [f"dark/{n}.png,p{n},{n / 3!r},0.{n + 1},{n % 2}" for n in range(4)]
    (images / "labels.csv").write_text("file,patient,dose,mpp,fold\n" + "\n".join(lines))
    now = RunSamples.of(*datasets.open(images, validation_fraction=0.5))
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    now.write(tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "run" / "checkpoints" / "step-1"):
        found = before(parse(["--resume", str(path)]))
        assert found is not None
        assert found.samples.samples == now.samples
        assert found.about is None
    assert {each.label for each in now.samples} == {f"{n / 3!r} at 0.{n + 1} um per pixel" for n in range(4)}
    found.samples.require_unchanged(now)


def swap(one: Path, other: Path) -> None:
    mine, theirs = one.read_bytes(), other.read_bytes()
    assert len(mine) != len(theirs)
    one.write_bytes(theirs)
    other.write_bytes(mine)


def of_folders(root: Path, swapped: bool) -> list[str]:
    """Two pictures in the folders of each other's class."""
    write_images(root, count=10)
    if swapped:
        swap(root / "dark" / "3.png", root / "light" / "3.png")
    return ["--images", str(root)]


def of_alike(root: Path, swapped: bool) -> list[str]:
    """The same of pictures with as many bytes and one time, which stay where they are."""
    random = np.random.default_rng(3)
    for name, most in (("dark", 100), ("light", 250)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(10):
            pixels = random.integers(0, most, (20, 20, 3)).astype(np.uint8)
            PIL.Image.fromarray(pixels).save(root / name / f"{number}.bmp")
    if swapped:
        one, other = root / "dark" / "3.bmp", root / "light" / "7.bmp"
        contents = one.read_bytes(), other.read_bytes()
        other.write_bytes(contents[0])
        one.write_bytes(contents[1])
    for path in root.rglob("*.bmp"):
        os.utime(path, (1, 1))
    return ["--images", str(root)]


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


def of_own_dataset(root: Path, swapped: bool, kind: str = "Listed") -> list[str]:
    labels = [0, 1] * 10
    if swapped:
        labels[3], labels[4] = labels[4], labels[3]
    root.mkdir(exist_ok=True)
    (root / "own.py").write_text(OWN)
    (root / "labels.txt").write_text(" ".join(map(str, labels)))
    return ["--dataset", f"{root / 'own.py'}:{kind}"]


def of_table(
    root: Path, swapped: bool, labels: tuple[str, str] = ("dark", "light"), header: str = "label"
) -> list[str]:
    write_images(root / "images", count=10)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    rows = {name: labels["light" in name] for name in names}
    if swapped:
        rows["images/dark/3.png"], rows["images/light/4.png"] = labels[1], labels[0]
    lines = [f"image,{header}", *(f"{name},{label}" for name, label in rows.items())]
    (root / "labels.csv").write_text("\n".join(lines))
    return ["--images", str(root)]


def of_numbers(root: Path, swapped: bool) -> list[str]:
    return [*of_table(root, swapped, ("0.1,2", "0.30000000000000004,1"), "dose,spread"), "--task", "regress"]


def of_arrays(root: Path, swapped: bool) -> list[str]:
    labels = np.arange(20) % 2
    labels[[3, 4]] = labels[[4, 3]] if swapped else labels[[3, 4]]
    root.mkdir(exist_ok=True)
    np.savez(root / "all.npz", x=np.zeros((20, 8, 8, 3), np.uint8), y=labels)
    return ["--images", str(root / "all.npz")]


def of_masks(root: Path, swapped: bool) -> list[str]:
    random = np.random.default_rng(1)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number in range(10):
        values = random.integers(0, 2, (40, 40), np.uint8)
        PIL.Image.fromarray(values).save(root / "masks" / f"{number}.png", compress_level=number)
        PIL.Image.fromarray(values * 100).convert("RGB").save(root / "images" / f"{number}.png")
    if swapped:
        swap(root / "masks" / "0.png", root / "masks" / "9.png")
    return ["--images", str(root), "--task", "segment"]


def of_masks_alike(root: Path, swapped: bool) -> list[str]:
    """Masks with as many bytes."""
    flags = of_masks(root, False)
    for path in [*(root / "masks").iterdir()]:
        PIL.Image.open(path).save(path.with_suffix(".tif"))
        path.unlink()
    if swapped:
        one, other = (root / "masks" / f"{number}.tif" for number in (0, 9))
        contents = one.read_bytes(), other.read_bytes()
        assert len(contents[0]) == len(contents[1])
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
    return flags


def of_slides(root: Path, swapped: bool, column: str = "label", values: tuple[str, str] = ("a", "b")) -> list[str]:
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
    return ["--slides", str(root / "slides.csv")]


def of_resolutions(root: Path, swapped: bool) -> list[str]:
    return of_slides(root, swapped, "mpp", ("0.25", "0.5"))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (of_slides, ("s3.tif (b, now a)", "s4.tif (a, now b)")),
        (of_resolutions, ("s3.tif (b at 0.5", "now b at 0.25")),
        (of_alike, ("light/7.bmp (dark, now light)", "dark/3.bmp (light, now dark)")),
        (of_own_dataset, ("3 (light, now dark)", "4 (dark, now light)")),
        (of_folders, ("light/3.png (dark, now light)", "dark/3.png (light, now dark)")),
        (of_table, ("images/dark/3.png (dark, now light)", "images/light/4.png (light, now dark)")),
        (of_numbers, ("images/dark/3.png", "0.30000000000000004")),
        (of_arrays, ("3", "4")),
        (of_masks, ("0.png", "9.png")),
        (of_masks_alike, ("0.png", "9.png")),
    ],
)
def test_a_run_does_not_go_on_with_other_labels(
    ranks: Ranks, tmp_path: Path, source: Callable[[Path, bool], list[str]], names: tuple[str, str]
) -> None:
    root, run = tmp_path / "images", tmp_path / "run"
    run.mkdir()
    flags = [*source(root, False), "--run-folder", str(run), "--resume", "auto"]
    ranks(1).run(recorded, str(run), *flags)
    assert isinstance(ranks(1).run(described, *flags)[0], tuple)  # the same again goes on
    shutil.rmtree(root)
    source(root, True)
    (found,) = ranks(1).run(described, *flags)
    assert "2 samples with another label" in found
    assert all(name in found for name in names)


def test_a_run_does_not_go_on_with_other_pixels(ranks: Ranks, tmp_path: Path) -> None:
    """In as many bytes, and with the same times."""
    root, run = tmp_path / "images", tmp_path / "run"
    run.mkdir()
    flags = [*of_alike(root, False), "--run-folder", str(run), "--resume", "auto"]
    ranks(1).run(recorded, str(run), *flags)
    (root / "dark" / "3.bmp").write_bytes((root / "dark" / "3.bmp").read_bytes()[:-1] + b"x")
    os.utime(root / "dark" / "3.bmp", (1, 1))
    (said,) = ranks(1).run(described, *flags)
    assert "1 sample with other content than when the run began: dark/3.bmp: put the files back" in said


def test_labels_that_nobody_tells_are_said_not_to_be_compared(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    flags = [*of_own_dataset(tmp_path / "own", False, "Boxes"), "--run-folder", str(run), "--resume", "auto"]
    ranks(1).run(recorded, str(run), *flags)
    (said,) = ranks(1).run(recorded, str(run), *flags)
    assert any("Boxes gives labels with its images alone" in line for line in said)
