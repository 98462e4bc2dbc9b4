"""A full disk: every writer raises an OSError that names a file, and what is in the folder is whole."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import torch

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.slides.compose import Cohort
from mpi4dl.datasets.slides.features import Embedded, write_features
from mpi4dl.datasets.slides.slide import Slide, open_slide
from mpi4dl.embed import embed
from mpi4dl.evaluate import evaluate
from mpi4dl.inference.class_maps import class_map
from mpi4dl.inference.maps import PatchMap, write_map
from mpi4dl.inference.masks import array_file, png_mask
from mpi4dl.predict import predict
from mpi4dl.results.job import FolderJob, ItemInput
from mpi4dl.results.names import PREDICTIONS
from mpi4dl.slides import slides
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.faults import file_limit
from tests.support.tiny import tiny_resnet
from tests.training.test_train_features import bags, embedding, flags_of

FULL = Path("/dev/full")
SIDE = 700


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Slide:
    return open_slide(Cohort(2, 1, SIDE, lesion_share=0.009).write(tmp_path_factory.mktemp("slides"), 1))


def noise(*shape: int, most: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most, shape)


def classes(folder: Path, slide: Slide) -> None:
    found = class_map(folder / "masks" / "s.ome.tif", slide, ("background", "a", "b"))
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
    mask = png_mask(folder / "masks" / "s.png", (200, 300), 3)
    try:
        mask.write((slice(0, 200),), noise(200, 300, most=3))
        mask.close()
    except OSError:
        mask.drop()
        raise


def array(folder: Path, slide: Slide) -> None:
    mask = array_file(folder / "masks" / "s.npy", (30, 40, 50), np.uint8)
    mask.write((slice(0, 30),), noise(30, 40, 50).astype(np.uint8))
    mask.close()


def features(folder: Path, slide: Slide) -> None:
    found = Embedded(noise(50, 300).astype(np.float32), noise(50, 2))
    write_features(folder / "features" / "s.h5", found, {"name": "s"}, {"model": "m"})


def records(folder: Path, slide: Slide) -> None:
    made = FolderJob(
        folder, PREDICTIONS, {"task": "classify"}, {"s": ItemInput(None)}, columns=["image", "prediction", "error"]
    )
    try:
        made.add({"image": "s", "prediction": "x" * 30_000})
    finally:
        made.close()


def composed(folder: Path, slide: Slide) -> None:
    Cohort(2, 1, SIDE, lesion_share=0.009).write(folder, 1)


WRITERS = (classes, heat_map, picture, array, features, records, composed)
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
        class_map(tmp_path / "s.ome.tif", slide, ("background", "a"))
        if kind == "class map"
        else array_file(tmp_path / "s.npy", (100, 100, 100), "f4")
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


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on bags of features, in a folder with what it trained on."""
    folder = tmp_path_factory.mktemp("bags")
    bags(folder)
    ranks(1).run(train, flags_of(folder, folder / "run", "--max-steps 1"))
    return folder


def of_training(trained: Path, out: Path) -> list[str]:
    (out / "config.toml").touch()  # of a run that ended before its first step, or the folder would be another's
    return flags_of(trained, out, "--max-steps 1 --monitor val_loss --data 2 --resume auto")


def of_prediction(trained: Path, out: Path) -> list[str]:
    return [str(trained / "run"), "--features", str(trained / "features"), "--out", str(out)]


def of_evaluation(trained: Path, out: Path) -> list[str]:
    return [*of_prediction(trained, out), "--slides", str(trained / "slides.csv"), "--resamples", "0"]


def of_slide(trained: Path, out: Path) -> list[str]:
    """Those of an embedding."""
    cohort = out.parent / "cohort"
    Cohort(1, 1, 600).write(cohort, 0).rename(cohort / "s0.tif")
    (cohort / "slides.csv").write_text("case_id,slide_id,label\np,s0.tif,a\n")
    torch.save(tiny_resnet(9).state_dict(), cohort / "weights.pt")
    return embedding(cohort, out)


def of_tissue(trained: Path, out: Path) -> list[str]:
    of_slide(trained, out)
    return ["tissue", str(out.parent / "cohort"), "--out", str(out)]


def of_compose(trained: Path, out: Path) -> list[str]:
    return ["compose", str(out), *"--patients 2 --slides-each 1 --size 700 --lesion-share 0.009".split()]


JOBS: dict[str, tuple[Callable[..., None], Callable[[Path, Path], list[str]]]] = {
    "train": (train, of_training),
    "predict": (predict, of_prediction),
    "evaluate": (evaluate, of_evaluation),
    "embed": (embed, of_slide),
    "tissue": (slides, of_tissue),
    "compose": (slides, of_compose),
}
# Every file that a job writes as a whole. Lines that jobs append are those of `records`, and of metrics.jsonl.
PLACES = {
    "train": (
        *("config.toml", "versions.json", "samples.csv", "model.json", "measures.json"),
        *("best.safetensors", "model.safetensors"),
    ),
    "predict": (*("maps/s2.png", "maps/s2.ome.tif", "maps/s2.geojson", "predictions.csv", "predictions.json"),),
    "evaluate": (
        *("evaluation.csv", "evaluation.json", "calibration.csv", "curves.csv", "curves.png", "patients.csv"),
    ),
    "embed": ("features.json", "s0.h5"),
    "tissue": ("s0.tif.png", "s0.tif.geojson"),
    "compose": ("compose.json", "slide_000.tif", "slide_001.tif", "annotations/slide_001.geojson", "slides.csv"),
}
NO_PLACES = (
    r"\.lock",
    r"log-rank\d+\.txt",
    r"portrait\.json",
    r"metrics\.jsonl",
    r"(predictions|features|compose)\.jsonl",
    "checkpoints/.*",
)


@pytest.mark.parametrize("job", PLACES)
def test_the_places_are_all_files_that_jobs_write(ranks: Ranks, trained: Path, tmp_path: Path, job: str) -> None:
    (tmp_path / "out").mkdir()
    act, options = JOBS[job]
    ranks(2).run(act, options(trained, tmp_path / "out"))
    found = {re.sub(r"s[0-9](?=\.(png|ome|geojson))", "s2", name) for name in contents(tmp_path / "out")}
    assert {name for name in found if not any(re.fullmatch(each, name) for each in NO_PLACES)} == {*PLACES[job]}


@pytest.mark.parametrize(("job", "place"), [(job, place) for job, places in PLACES.items() for place in places])
@pytest.mark.sample(12)
def test_commands_on_a_full_disk_end_all_ranks_by_its_name(
    ranks: Ranks, trained: Path, tmp_path: Path, job: str, place: str
) -> None:
    """Not with exit code 0, and not as a slide that cannot be read."""
    out = tmp_path / "out"
    path = out / place
    path.parent.mkdir(parents=True)
    path.with_name(f".{path.name}.new").symlink_to(FULL)
    act, options = JOBS[job]
    (said,) = set(ranks(2).run(refused, act, options(trained, out)))
    # The length of weights is set first, and /dev/full has none.
    assert ("Invalid argument" if place.endswith(".safetensors") else "No space left on device") in said
    assert str(path) in said
    assert place == "config.toml" or not path.exists()
    assert not [path for path in out.rglob("*.new")]


def evaluated_nothing(comm: Communicator, argv: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpi4dl.inference.scoring.score", None)
        return refused(comm, evaluate, argv)


def test_an_evaluation_that_cannot_be_written_is_refused_before_it(ranks: Ranks, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    for said in ranks(2).run(evaluated_nothing, of_evaluation(trained, tmp_path / "taken" / "out")):
        assert "taken is a file" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["train", "predict", "evaluate", "embed"])
def test_a_job_on_a_full_disk_says_it_once_and_fails(trained: Path, tmp_path: Path, job: str) -> None:
    out = tmp_path / "out"
    path = out / PLACES[job][0]
    path.parent.mkdir(parents=True)
    path.with_name(f".{path.name}.new").symlink_to(FULL)
    ended = mpirun(2, "-m", f"mpi4dl.{job}", *JOBS[job][1](trained, out))
    assert ended.code in (2, SIGKILL)  # the launcher reports whom it saw go first
    assert ended.stderr.count("No space left on device") == 1
    assert str(path) in ended.stderr
    assert "Traceback" not in ended.stderr
