"""A full disk: every writer raises an OSError that names a file, and what is in the folder is whole."""

import errno
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.slides.compose import Cohort
from mpi4dl.datasets.slides.features import Embedded, write_features
from mpi4dl.datasets.slides.slide import Slide, open_slide
from mpi4dl.embed import embed
from mpi4dl.evaluate import evaluate
from mpi4dl.inference.class_maps import ClassMap, MapOptions
from mpi4dl.inference.maps import PatchMap, write_map
from mpi4dl.inference.masks import ArrayMask, PngMask
from mpi4dl.inference.records import Records
from mpi4dl.predict import predict
from mpi4dl.slides import _parser
from mpi4dl.train import train
from tests.faults import file_limit
from tests.pool.ranks import Ranks
from tests.test_train_features import bags, embedding, flags_of
from tests.tiny import tiny_resnet

FULL = Path("/dev/full")
SIDE = 700


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Slide:
    return open_slide(Cohort(2, 1, SIDE, lesion_share=0.009).write(tmp_path_factory.mktemp("slides"), 1))


def noise(*shape: int, most: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most, shape)


def class_map(folder: Path, slide: Slide) -> None:
    found = ClassMap(folder / "masks" / "s.ome.tif", slide, ("background", "a", "b"), MapOptions())
    try:
        drawn = np.kron(noise(3, 7, most=3), np.ones((100, 100))).astype(np.uint8)[:, : slide.size[1]]
        found.write((slice(0, 300), slice(0, drawn.shape[1])), drawn)
        found.close()
    except OSError:
        found.drop()
        raise


def heat_map(folder: Path, slide: Slide) -> None:
    places = np.indices((20, 20)).reshape(2, -1).T
    write_map(folder, Path("s"), slide, PatchMap(places, noise(400).astype(np.float32), 32, "tumour"))


def picture(folder: Path, slide: Slide) -> None:
    mask = PngMask(folder / "masks" / "s.png", (200, 300), 3)
    try:
        mask.write((slice(0, 200),), noise(200, 300, most=3))
        mask.close()
    except OSError:
        mask.drop()
        raise


def array(folder: Path, slide: Slide) -> None:
    mask = ArrayMask(folder / "masks" / "s.npy", (30, 40, 50), np.uint8)
    mask.write((slice(0, 30),), noise(30, 40, 50).astype(np.uint8))
    mask.close()


def features(folder: Path, slide: Slide) -> None:
    found = Embedded(noise(50, 300).astype(np.float32), noise(50, 2))
    write_features(folder / "features" / "s.h5", found, {"name": "s"}, {"model": "m"})


def records(folder: Path, slide: Slide) -> None:
    made = Records(folder, {"task": "classify"}, ["image", "prediction", "error"])
    try:
        made.add({"image": "s", "prediction": "x" * 30_000})
    finally:
        made.close()


WRITERS = (class_map, heat_map, picture, array, features, records)
LIMITS = (0, 1000, 40_000)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_an_error_that_names_a_file_and_leaves_nothing_half(
    tmp_path: Path, slide: Slide, write: Callable[[Path, Slide], None]
) -> None:
    write(tmp_path / "whole", slide)
    whole = contents(tmp_path / "whole")
    failed: list[OSError] = []
    for limit in LIMITS:
        folder = tmp_path / str(limit)
        try:
            with file_limit(limit):
                write(folder, slide)
        except OSError as error:
            failed.append(error)
        for name, content in contents(folder).items():
            if write is records:  # which grow by a line, and lose a half of one when they are read again
                assert whole[name].startswith(content)
            else:
                assert len(content) == len(whole[name]), f"{name}, limit {limit}"
    assert failed
    assert all(error.errno == errno.EFBIG and str(tmp_path) in str(error) for error in failed)


@pytest.mark.parametrize("kind", ["class map", "array"])
def test_maps_of_files_have_their_room_on_the_disk_before_they_are_written(
    tmp_path: Path, slide: Slide, kind: str
) -> None:
    """Else the process would end by SIGBUS where the disk has no more room."""
    file = (
        ClassMap(tmp_path / "s.ome.tif", slide, ("background", "a"), MapOptions())
        if kind == "class map"
        else ArrayMask(tmp_path / "s.npy", (100, 100, 100), "f4")
    )
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= path.stat().st_size >= min(slide.size) ** 2
    file.drop()


def test_nothing_else_maps_files_for_writing() -> None:
    package = Path(__file__).parents[2] / "mpi4dl"
    mapping = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"memmap\(|mmap\.mmap\(", line) and '"r"' not in line
    }
    assert mapping == {"_files.py", "parallel/disk.py"}


def refused(comm: Communicator, act: Callable[..., None], argv: list[str]) -> str:
    with pytest.raises(Refusal) as caught:
        act(comm, argv)
    return str(caught.value)


def tissue(comm: Communicator, argv: list[str]) -> None:
    options = _parser().parse_args(["tissue", *argv])
    options.act(comm, options)


@pytest.mark.parametrize(
    "full",
    [
        *("maps/.s2.png.new", "maps/.s2.ome.tif.new", ".predictions.csv.new", ".evaluation.csv.new", ".s0.h5.new"),
        ".s0.tif.png.new",
    ],
)
def test_commands_on_a_full_disk_end_all_ranks_by_its_name(ranks: Ranks, tmp_path: Path, full: str) -> None:
    """Not with exit code 0, and not as a slide that cannot be read."""
    out = tmp_path / "out"
    (out / full).parent.mkdir(parents=True)
    (out / full).symlink_to(FULL)
    if full.endswith(".h5.new") or full.startswith(".s0.tif"):
        cohort = tmp_path / "cohort"
        Cohort(1, 1, 600).write(cohort, 0).rename(cohort / "s0.tif")
        (cohort / "slides.csv").write_text("case_id,slide_id,label\np,s0.tif,a\n")
        torch.save(tiny_resnet(9).state_dict(), cohort / "weights.pt")
        act, argv = (embed, embedding(cohort, out)) if "h5" in full else (tissue, [str(cohort), "--out", str(out)])
    else:
        bags(tmp_path)
        ranks(1).run(train, flags_of(tmp_path, tmp_path / "run", "--max-steps 1"))
        act, argv = predict, [str(tmp_path / "run"), "--features", str(tmp_path / "features"), "--out", str(out)]
        if "evaluation" in full:
            table = ("--slides", str(tmp_path / "slides.csv"), "--resamples", "0")
            act, argv = evaluate, [*argv, *table]
    (said,) = set(ranks(2).run(refused, act, argv))
    assert "No space left on device" in said
    assert str(out / full).replace("/.s", "/s").replace("/.p", "/p").replace("/.e", "/e").removesuffix(".new") in said
    assert not [path for path in out.rglob("*.new")]
