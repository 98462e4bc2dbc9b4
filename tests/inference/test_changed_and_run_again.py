"""A job is run, one option or input is changed, and it is run again: its work is made anew, or the option is refused.

Every option of a job is in its table of cases, or in the list of those that do not matter to its results, with a
reason. A case that is made anew ends with the files that a new folder gets.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import tifffile
import torch
from safetensors.torch import load_file, save_file

from mpi4dl.checkpoints.manifest import AVERAGE, MODEL
from mpi4dl.checkpoints.weights import open_weights
from mpi4dl.comm import Refusal, world
from mpi4dl.embed import EmbedConfig, embed
from mpi4dl.evaluate import evaluate
from mpi4dl.options import parts
from mpi4dl.options.declare import options_of
from mpi4dl.predict import PredictConfig, predict
from mpi4dl.train import train
from tests.inference.cases import Shown, train_nothing, write_images
from tests.training.test_train_features import bags

h5py = pytest.importorskip("h5py")

MODEL_CODE = """
import torch
from torch import nn

class Plain(torch.optim.SGD):
    pass

class Net(nn.Module):
    def __init__(self, num_classes, width, pooled, gain):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.pooled, self.gain = pooled, gain
        self.last = nn.Linear(width, num_classes) if pooled else nn.Conv2d(width, num_classes, 1)

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(x.mean((2, 3)) if self.pooled else x) * self.gain * FACTOR

FACTOR = 1

def build(num_classes=2, width=4, gain=1):
    return Net(num_classes, width, True, gain)

def dense(num_classes=2, width=4, gain=1):
    return Net(num_classes, width, False, gain)

def lighter(image):
    return image * 0.5 + 0.5

def darker(image):
    return image * 0.5

def other(num_classes=2, width=4):
    return build(num_classes, width, -1)

def other_dense(num_classes=2, width=4):
    return dense(num_classes, width, -1)
"""


def draw_slide(path: Path, seed: int, side: int = 128, mpp: float | None = 0.5) -> Path:
    """A slide of pink tissue on glass; those of one size have as many bytes."""
    drawn = np.random.default_rng(seed)
    pixels = np.full((side, side + 32, 3), 245, np.uint8)
    tissue = pixels[: side - 32, : side - 32]
    tissue[:] = np.array([200, 90, 150]) + drawn.integers(-40, 40, (1, 1, 3)) + drawn.integers(-15, 15, tissue.shape)
    about: Any = {} if mpp is None else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, pixels, photometric="rgb", **about)
    return path


def draw_slides(folder: Path, seed: int) -> None:
    for number in range(5):
        draw_slide(folder / f"s{number}.tif", seed + number, 128 if number else 224, None if number == 2 else 0.5)


def table(rows: Mapping[str, str], header: str = "slide,label") -> str:
    return "\n".join([header, *(f"{name},{rest}" for name, rest in rows.items())]) + "\n"


def write_bags(folder: Path) -> None:
    """Features of twelve slides, in two layouts, and their table."""
    bags(folder)
    drawn, rows = np.random.default_rng(5), (folder / "slides.csv").read_text().splitlines()
    for number in range(6, 12):
        with h5py.File(folder / "features" / f"s{number}.h5", "w") as file:
            file["features"] = drawn.normal(size=(4, 6)).astype(np.float32)
        rows.append(f"p{number},s{number},{'ab'[number % 2]}")
    (folder / "slides.csv").write_text("\n".join([*rows, ""]))


PATCHES = "--patches 32 --tissue 0.1"
SHORT = "--max-steps 1 --batch-size 1 --val-fraction 0.34 --no-tensorboard --lr-schedule constant --num-workers 0"


def prepare(work: Path) -> None:
    """Slides, features, images, code and trained models, before anything is changed."""
    draw_slides(work / "slides", 0)
    draw_slides(work / "others", 50)
    rows = {f"s{number}": f"s{number + 1},p{number},{'ab'[number % 2]}" for number in range(4)}
    (work / "slides.csv").write_text(table(rows, "slide,again,patient,label"))
    shutil.copy(work / "slides.csv", work / "others")
    (work / "one.csv").write_text("slide\ns1\n")
    (work / "net.py").write_text(MODEL_CODE)
    write_bags(work / "bags")
    shutil.copytree(work / "bags" / "features", work / "bags" / "others")
    for path in (work / "bags" / "others").glob("*.h5"):
        scale_features(path)
    shutil.copy(work / "bags" / "slides.csv", work / "bags" / "swapped.csv")
    edit(work / "bags" / "swapped.csv", "s0,a", "s0,b")
    write_images(work / "images", 3, ".bmp")
    shutil.copytree(work / "images", work / "moved")
    draw_slide(work / "stains.tif", 90)
    sys.path.insert(0, str(work))
    parts.load("model", f"{work / 'net.py'}:build")
    torch.manual_seed(3)
    save_file(dict(parts.load("model", f"{work / 'net.py'}:build")(2).state_dict()), work / "encoder.safetensors")
    shutil.copy(work / "encoder.safetensors", work / "other.safetensors")
    scale_weights(work / "other.safetensors")
    dense = train_nothing(
        work / "masks",
        "segment",
        images=Shown("crop"),
        model=f"{work / 'net.py'}:dense",
        transforms=f"{work / 'net.py'}:lighter",
    )
    averaged = {name: value.clone() + 0.1 for name, value in dense.state_dict().items()}
    save_file(averaged, work / "masks" / AVERAGE, open_weights(str(work / "masks" / MODEL)).metadata)
    how: Any = {"model": f"{work / 'net.py'}:dense", "slides": str(work / "slides.csv"), "fit": "crop", "tissue": 0.1}
    train_nothing(work / "areas", "segment", images=Shown("crop"), **{**how, "image_size": (32, 32)})
    slides = f"--slides {work / 'slides.csv'} --slides-folder {work / 'slides'} --model {work / 'net.py'}"
    train_all = {
        "patches": f"{slides}:build {PATCHES} --aggregator gated-attention",
        "whole": f"{slides}:build --tissue 0.1",
        "bags-run": f"--slides {work / 'bags' / 'slides.csv'} --features {work / 'bags' / 'features'}",
    }
    for name, flags in train_all.items():
        train(world(), [*flags.split(), *SHORT.split(), "--run-folder", str(work / name)])


class Job(NamedTuple):
    """A command, its base flags, and the options that it has; {work} is the folder with all inputs."""

    command: Any
    flags: str

    def run(self, work: Path, out: str, more: str = "") -> dict[str, Any]:
        """The results in the folder `out`."""
        forget_code()
        argv = f"{self.flags} {more}".replace("{work}", str(work)).split()
        self.command(world(), [*argv, "--out", str(work / out)])
        return results(work / out)


def forget_code() -> None:
    """As a new process: own code is loaded from its file."""
    parts._from_file.cache_clear()
    sys.modules.pop("net", None)


def results(out: Path) -> dict[str, Any]:
    """The content of all files of a folder, by name, but for times, by which files are known again."""
    return {str(path.relative_to(out)): content(path) for path in sorted(out.rglob("*")) if path.is_file()}


def content(path: Path) -> Any:
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            about = {name: str(value) for name, value in file["coords"].attrs.items()}
            return file["features"][:].tobytes(), file["coords"][:].tolist(), about
    if path.suffix in (".png", ".bmp"):
        return np.asarray(PIL.Image.open(path)).tobytes()
    if path.suffix == ".tif":
        return tifffile.imread(path).tobytes()
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(({**line, "file": None} for line in lines), key=str)
    if path.name == "features.json":  # of a folder that may have slides of other tables
        return json.loads(path.read_text())
    if path.name == "predictions.json":
        told = json.loads(path.read_text())
        return told | {"slides": {**told.get("slides", {}), "signature": None}}
    if path.name == "predictions.csv":
        return sorted(path.read_text().splitlines())
    return path.read_bytes()


NO_MAPS = "--num-workers 0 --no-maps"
OF_BAGS = "{work}/bags-run --slides {work}/bags/slides.csv --features {work}/bags/features"
JOBS = {
    "embed": Job(
        embed,
        "--slides {work}/slides.csv --slides-folder {work}/slides --model {work}/net.py:build --patches 32 "
        "--weights {work}/encoder.safetensors --tissue 0.1 --num-workers 0",
    ),
    "masks": Job(predict, "{work}/masks --images {work}/images --num-workers 0"),
    "slides": Job(predict, f"{{work}}/patches --slides {{work}}/slides.csv --slides-folder {{work}}/slides {NO_MAPS}"),
    "areas": Job(predict, "{work}/areas --slides {work}/one.csv --slides-folder {work}/slides --num-workers 0"),
    "maps": Job(predict, "{work}/whole --slides {work}/one.csv --slides-folder {work}/slides --num-workers 0"),
    "bags": Job(predict, f"{OF_BAGS} {NO_MAPS}"),
    "scores": Job(evaluate, f"{OF_BAGS} --num-workers 0 --resamples 20"),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed") / "work"


@pytest.fixture(scope="module")
def pristine(work: Path) -> Path:
    """All inputs, and what each job made of them; cases have a copy of it in the folder `work`."""
    work.mkdir()
    prepare(work)
    return Path(shutil.copytree(work, work.with_name("pristine")))


def replace(path: Path, by: Path) -> None:
    """Other pixels in as many bytes, with the same times."""
    then, other = path.stat(), by.read_bytes()
    assert then.st_size == len(other)
    assert path.read_bytes() != other
    path.write_bytes(other)
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def turn_round(path: Path) -> None:
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows[::-1], ""]))


def scale_weights(path: Path) -> None:
    """Other numbers in a file of weights, which says the same of them."""
    about = open_weights(str(path)).metadata
    values = {name: value * 1.5 for name, value in load_file(path).items()}
    save_file(values, path, about)


def scale_features(path: Path) -> None:
    then = path.stat()
    with h5py.File(path, "r+") as file:
        file["features"][...] = file["features"][:] * 3
    assert path.stat().st_size == then.st_size
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))


def add_bag(folder: Path) -> None:
    shutil.copy(folder / "features" / "s4.h5", folder / "features" / "s4b.h5")
    edit(folder / "slides.csv", "p4,s4,a\n", "p4,s4,a\nq,s4b,b\n")


Change = str | Callable[[Path], Any]


class Case(NamedTuple):
    """What is changed: an option by flags, or an input by a function of the folder `work`.

    `refused` is the word of the message that names it; None: the work is made anew.
    """

    job: str
    what: str
    change: Change
    refused: str | None = None
    matters: bool = True


OPTIONS_CHANGED = [
    Case("embed", "slides", "--slides {work}/others/slides.csv --slides-folder {work}/others"),
    Case("embed", "slides_folder", "--slides-folder {work}/others"),
    Case("embed", "slide_column", "--slide-column again"),
    *(
        Case("embed", name, f"--{name.replace('_', '-')} {value}", name)
        for name, value in {
            "mpp": "1",
            "magnification": "10",
            "level": "0",
            "assume_mpp": "0.25",
            "tissue": "0.2",
            "leave_out": "pen",
            "min_tissue": "0.9",
            "model": "{work}/net.py:other",
            "model_options": "gain=2",
            "weights": "{work}/other.safetensors",
            "patches": "64",
            "mean": "0.4",
            "std": "0.3",
            "precision": "bf16",
            "stain_norm": "reinhard",
        }.items()
    ),
    Case("embed", "stain_reference", "--stain-norm reinhard --stain-reference {work}/stains.tif", "stain_norm"),
    Case("masks", "images", "--images {work}/moved", "images"),
    Case("masks", "fit", "--fit resize", "fit"),
    Case("masks", "precision", "--precision bf16", "precision"),
    Case("masks", "transforms", "--transforms {work}/net.py:darker", "transforms"),
    Case("masks", "precision", "--precision int8", "precision"),
    Case("masks", "model", "--model {work}/net.py:other_dense", "model"),
    Case("slides", "slides", "--slides {work}/others/slides.csv", "slides"),
    Case("slides", "slides_folder", "--slides-folder {work}/others"),
    Case("slides", "slide_column", "--slide-column again"),
    Case("areas", "min_area", "--min-area 5", "min_area"),
    Case("maps", "maps", "--no-maps", "maps"),
    Case("maps", "maps", "--maps gradient", "maps"),
    Case("maps", "map_class", "--map-class a", "map_class"),
    Case("maps", "map_layer", "--map-layer first", "map_layer"),
    Case("bags", "features", "--features {work}/bags/others", "features"),
    Case("scores", "features", "--features {work}/bags/others"),
    Case("scores", "slides", "--slides {work}/bags/swapped.csv"),
    Case("scores", "resamples", "--resamples 0"),
    Case("scores", "level", "--level 0.5"),
    Case("scores", "patients", "--patients max"),
    Case("scores", "threshold", "--threshold 0.4"),
    Case("scores", "positive", "--positive a"),
    Case("scores", "precision", "--precision bf16"),
]
INPUTS_CHANGED = [
    Case("embed", "pixels", lambda work: replace(work / "slides" / "s1.tif", work / "others" / "s1.tif")),
    Case("embed", "pixels of a large slide", lambda work: replace(work / "slides/s0.tif", work / "others/s0.tif")),
    Case("embed", "a slide more", lambda work: edit(work / "slides.csv", "s3,s4,p3,b\n", "s3,s4,p3,b\ns4,s4,p4,a\n")),
    Case("embed", "microns", lambda work: (work / "slides.csv").write_text("slide,mpp\ns0,\ns1,\ns2,0.25\ns3,\n")),
    Case("embed", "order", lambda work: turn_round(work / "slides.csv"), matters=False),
    Case("embed", "weights", lambda work: scale_weights(work / "encoder.safetensors"), "weights"),
    Case("embed", "code", lambda work: edit(work / "net.py", "FACTOR = 1", "FACTOR = 2"), "model"),
    Case("masks", "pixels", lambda work: replace(work / "images" / "0.bmp", work / "images" / "2.bmp")),
    Case("masks", "an image more", lambda work: shutil.copy(work / "images/0.bmp", work / "images/9.bmp")),
    Case("masks", "an image less", lambda work: (work / "images" / "0.bmp").unlink()),
    Case("masks", "weights", lambda work: scale_weights(work / "masks" / AVERAGE), "weights"),
    Case("masks", "code", lambda work: edit(work / "net.py", "FACTOR = 1", "FACTOR = 2"), "model"),
    Case("masks", "a mask less", lambda work: (work / "out-masks" / "masks" / "0.png").unlink(), matters=False),
    Case("slides", "pixels", lambda work: replace(work / "slides" / "s0.tif", work / "others" / "s0.tif")),
    Case("slides", "microns", lambda work: (work / "slides.csv").write_text("slide,mpp\ns0,\ns1,\ns2,0.25\ns3,\n")),
    Case("slides", "a slide less", lambda work: (work / "slides.csv").write_text("slide\ns0\ns1\ns2\n")),
    Case("slides", "order", lambda work: turn_round(work / "slides.csv"), matters=False),
    Case("maps", "a map less", lambda work: (work / "out-maps" / "maps" / "s1.png").unlink(), matters=False),
    Case("bags", "features", lambda work: scale_features(work / "bags" / "features" / "s0.h5")),
    Case("bags", "a slide less", lambda work: edit(work / "bags" / "slides.csv", "p2,s2,a\n", "")),
    Case("scores", "features", lambda work: scale_features(work / "bags" / "features" / "s0.h5")),
    Case("scores", "labels", lambda work: edit(work / "bags" / "slides.csv", "p2,s2,a", "p2,s2,b")),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", [*OPTIONS_CHANGED, *INPUTS_CHANGED], ids=lambda case: f"{case.job}-{case.what}")
def test_what_changed_is_made_anew_or_refused(work: Path, pristine: Path, case: Case) -> None:
    job, out = JOBS[case.job], f"out-{case.job}"
    if not (pristine / out).exists():
        put_back(pristine, work)
        job.run(work, out)
        shutil.copytree(work / out, pristine / out)
    put_back(pristine, work)
    before = results(work / out)
    flags = case.change if isinstance(case.change, str) else ""
    if not isinstance(case.change, str):
        case.change(work)
    if case.refused is not None:
        with pytest.raises(Refusal, match=case.refused.replace("patches", "patch_size").replace("_", "[_-]")):
            job.run(work, out, flags)
        assert results(work / out) == before
        return
    found, anew = job.run(work, out, flags), job.run(work, "anew", flags)
    assert (anew != before) == case.matters
    if case.job == "embed":  # whose folder may have slides of other tables
        found = {name: found[name] for name in anew if name != "features.jsonl"}
        anew.pop("features.jsonl")
    assert found.keys() == anew.keys()
    assert [name for name in anew if found[name] != anew[name]] == []


# Options that decide results, and which the cases leave out.
NOT_OF = {
    "predict": {"patient_column", "annotation_column"},  # of labels, which are not read
    "embed": set[str](),
}


@pytest.mark.parametrize(("command", "config"), [(embed, EmbedConfig), (predict, PredictConfig)])
def test_every_option_that_may_change_results_is_changed_here(command: Any, config: type) -> None:
    tested = {case.what for case in OPTIONS_CHANGED if JOBS[case.job].command is command}
    counting = {name for name, item in options_of(config).items() if item.changes_results}
    assert tested | NOT_OF[command.act.__name__] >= counting


@pytest.mark.parametrize("job", ["embed", "masks"])
def test_a_folder_of_other_settings_is_made_anew_if_the_user_says_so(work: Path, pristine: Path, job: str) -> None:
    put_back(pristine, work)
    other = "--precision bf16"
    JOBS[job].run(work, "out")
    found = JOBS[job].run(work, "out", f"{other} --overwrite")
    assert found == JOBS[job].run(work, "anew", other)
    with pytest.raises(Refusal, match="precision"):
        JOBS[job].run(work, "out")


@pytest.mark.parametrize("first", ["--patients max --threshold 0.3"])
def test_an_evaluation_leaves_no_files_of_another(work: Path, pristine: Path, first: str) -> None:
    put_back(pristine, work)
    before, anew = JOBS["scores"].run(work, "out", first), JOBS["scores"].run(work, "anew")
    assert before != anew
    assert JOBS["scores"].run(work, "out") == anew


FOLDS = (
    "--slides {work}/bags/slides.csv --features {work}/bags/features --weights {work}/bags-run/model.safetensors "
    "--optimizer {work}/net.py:Plain --folds 2 --max-steps 1 --batch-size 2 --no-tensorboard --lr-schedule constant "
    "--num-workers 0 --fold all --resume auto --run-folder {work}/out-folds"
)
FOLDS_CHANGED: dict[str, tuple[Change, str | None]] = {
    "nothing": ("", None),
    "lr": ("--lr 0.5", "lr"),
    "seed": ("--seed 4", "seed"),
    "aggregator": ("--aggregator mean", "aggregator"),
    "features by another option": ("--features {work}/bags/others", "features"),
    "labels": (lambda work: edit(work / "bags" / "slides.csv", "p2,s2,a", "p2,s2,b"), "another label .*s2.h5"),
    "a slide less": (
        lambda work: edit(work / "bags" / "slides.csv", "p4,s4,a\n", ""),
        "s4 is no file of features in the table",
    ),
    "a slide more": (lambda work: add_bag(work / "bags"), "the table has now: s4b.h5"),
    "features": (lambda work: scale_features(work / "bags" / "features" / "s0.h5"), "other content .*s0.h5"),
    "weights": (lambda work: scale_weights(work / "bags-run" / MODEL), "the file of .*weights"),
    "code": (lambda work: edit(work / "net.py", "FACTOR = 1", "FACTOR = 2"), "the file of .*optimizer"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", FOLDS_CHANGED)
def test_folds_of_different_trainings_are_not_averaged(work: Path, pristine: Path, what: str) -> None:
    def run(flags: str) -> None:
        forget_code()
        train(world(), f"{FOLDS} {flags}".replace("{work}", str(work)).split())

    change, refused = FOLDS_CHANGED[what]
    put_back(pristine, work)
    if not (work / "out-folds").exists():
        run("")
        shutil.copytree(work / "out-folds", pristine / "out-folds")
    before = {path: path.stat().st_mtime_ns for path in (work / "out-folds").glob("fold_*/*.safetensors")}
    assert len(before) == 2
    if not isinstance(change, str):
        change(work)
    if refused is None:
        run("")
    else:
        with pytest.raises(Refusal, match=refused):
            run(change if isinstance(change, str) else "")
        assert len([*(work / "out-folds").glob("cross-validation*")]) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_code_of_the_user_that_changed_is_said_when_a_run_goes_on(
    work: Path, pristine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_back(pristine, work)
    (work / "out").mkdir()
    flags = FOLDS.replace(" --fold all", " --fold 0 --epochs 2").replace("out-folds", "out/fold_0")
    for steps in ("1", "2"):
        forget_code()
        train(world(), f"{flags} --max-steps {steps}".replace("{work}", str(work)).split())
        assert ("the file of --optimizer" in capsys.readouterr().out) == (steps == "2")
        edit(work / "net.py", "FACTOR = 1", "FACTOR = 1 ")


def write_arrays(path: Path, brightness: float) -> None:
    images = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3)) * brightness
    np.savez(path, x=images.astype(np.uint8), y=np.arange(8) % 2)


def write_text(path: Path, word: str) -> None:
    path.mkdir(exist_ok=True)
    for name in "abcdefgh":
        (path / f"{name}.txt").write_text(f"{word} is read " * 50)


@pytest.mark.parametrize(
    ("file", "write", "flags"),
    [
        ("arrays.npz", write_arrays, "--images {} --image-size 16 --model small_resnet --mean 0.5 --std 0.5"),
        ("corpus", write_text, "--text {} --tokenizer bytes --context 16 --model gpt"),
    ],
    ids=["arrays", "text"],
)
def test_samples_that_changed_are_said_when_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, write: Callable[..., None], flags: str
) -> None:
    """Files of pixels and texts of equal sizes; unchanged ones say nothing."""
    words = f"{flags.format(tmp_path / file)} --batch-size 2 --val-fraction 0.3 --lr-schedule constant".split()
    words += ["--num-workers", "0", "--resume", "auto"]
    words += ["--run-folder", str(tmp_path / "run"), "--model-options"]
    words += ["num_filters=4" if "images" in flags else "num_layers=1,hidden=16,num_heads=2"]
    for steps, value in enumerate(((0.5, "alpha"), (0.5, "alpha"), (0.4, "gamma")), 1):
        write(tmp_path / file, value["text" in flags])
        train(world(), [*words, "--max-steps", str(steps)])
        assert ("the file of --" in capsys.readouterr().out) == (steps == 3)


def put_back(pristine: Path, work: Path) -> None:
    shutil.rmtree(work)
    shutil.copytree(pristine, work)
