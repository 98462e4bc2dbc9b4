"""The commands of a page run one after the other as printed, each page in a folder of its own, with its own data.

`QUICKLY` makes them short: few steps, small images and slides. What reads `runs/RUN` reads the run before.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image
import pytest

from tests.commands import write_images
from tests.pool.job import Finished, mpirun
from tests.pool.zygote import ROOT
from tests.test_readme import COMMANDS, Command, scripts

QUICKLY = {  # by command, and by what one of its words contains
    "train": {
        "": "--max-steps 2 --eval-every 2 --num-workers 0",
        "--text": "--val-fraction 0.01",
        "tissue": "--image-size 64",
        "slides/ ": "--image-size 64",
    },
    "slides": {"compose": "--patients 8 --slides-each 1 --size 1024"},
}


def pictures(path: str) -> Callable[[Path], None]:
    """A folder of images of two classes, to train on and to validate with."""

    def write(folder: Path) -> None:
        for part in ("train", "val"):
            write_images(folder / path / part, ("negative", "positive"))

    return write


def scans(folder: Path) -> None:
    for part in ("train", "val"):
        for number, name in enumerate("aabb"):
            (folder / "scans" / part / name).mkdir(parents=True, exist_ok=True)
            values = np.random.default_rng(number).random((96, 96, 64), np.float32)
            np.save(folder / "scans" / part / name / f"{number}.npy", values)


def trained(name: str, *flags: str) -> Callable[[Path], None]:
    """A run that the page calls the reader's own."""

    def train(folder: Path) -> None:
        common = ("--max-steps", "2", "--num-workers", "0", "--run-folder", f"runs/{name}")
        finished(mpirun(1, "-m", "mpi4dl.train", *common, *flags, folder=folder))

    return train


def of_images(*names: str) -> Sequence[Callable[[Path], None]]:
    flags = ("--images", "data/tissue", "--image-size", "64", "--batch-size", "4", "--model", "small_resnet")
    return [pictures("data/tissue"), *(trained(name, *flags) for name in names)]


def to_predict(folder: Path) -> None:
    write_images(folder / "test", ("negative", "positive"), 4)
    for name, ending in (("new", "png"), ("slides", "tif")):
        (folder / name).mkdir()
        for number in range(3):
            PIL.Image.fromarray(np.full((64, 64, 3), 60 * number, np.uint8)).save(folder / name / f"{number}.{ending}")


def prompts(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('"def "\n{"prompt": "import "}\n')


def own_script(folder: Path) -> None:
    (folder / "own.py").write_text(scripts()["own"][1])


GPT = ("--text", "stdlib", "--model", "gpt", "--model-options", "num_layers=2,hidden=64,num_heads=4", "--context", "64")
TISSUE, SLIDES = [pictures("data/tissue")], "docs/tutorials/slides.md"


class Page(NamedTuple):
    """A page's `data`, the page whose commands it continues, and names of commands that are not run."""

    data: Sequence[Callable[[Path], None]] = ()
    after: str = ""
    without: Sequence[str] = ()


PAGES = {
    "docs/tutorials/first-training.md": Page(TISSUE, without=["make"]),
    "docs/how-to/own-model-data-loss.md": Page([own_script]),
    "docs/how-to/resume.md": Page(TISSUE),
    "docs/how-to/watch-a-run.md": Page(of_images("first", "second")),
    "docs/how-to/predict.md": Page([*of_images("mine"), to_predict]),
    "docs/how-to/generate.md": Page([trained("mine", *GPT, "--batch-size", "8"), prompts]),
    "docs/tutorials/segmentation.md": Page(),
    "docs/tutorials/volumes.md": Page([scans]),
    "docs/tutorials/own-images.md": Page([pictures("slides"), *TISSUE]),
    SLIDES: Page(without=["view"]),
    "docs/how-to/map-whole-slides.md": Page(after=SLIDES),
    "docs/how-to/augment-slides.md": Page(after=SLIDES),
    "docs/how-to/segment-slides.md": Page(),
}
FIRST = ("docs/how-to/own-model-data-loss.md", "docs/how-to/resume.md")  # the others are of an exhaustive run


def finished(job: Finished) -> Finished:
    assert job.code == 0, job.stdout + job.stderr
    return job


def run(command: Command, folder: Path) -> None:
    words = list(command.words)
    if "runs/RUN" in words:
        newest = max((folder / "runs").iterdir(), key=os.path.getmtime)
        words[words.index("runs/RUN")] = f"runs/{newest.name}"
    for about, flags in QUICKLY.get(command.name, {}).items():
        if about in " ".join(words):
            words += flags.split()
    module = command.name if "." in command.name else f"mpi4dl.{command.name}"
    finished(mpirun(int(command.ranks or 1), "-m", module, *words, folder=folder))


def follow(page: str, folder: Path) -> None:
    about = PAGES[page]
    if about.after:
        follow(about.after, folder)
    for write in about.data:
        write(folder)
    for command in COMMANDS:
        if command.page == page and command.name not in about.without:
            run(command, folder)


@pytest.mark.parametrize(
    "page", [each if each in FIRST else pytest.param(each, marks=pytest.mark.exhaustive) for each in PAGES]
)
def test_the_commands_of_a_page_run_as_they_are_printed(page: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    follow(page, tmp_path)
    if page == "docs/how-to/generate.md":
        num_ranks, text = scripts()["text"]
        (tmp_path / "text.py").write_text(text)
        assert "finish_reason" in finished(mpirun(num_ranks, "text.py", folder=tmp_path)).stdout


@pytest.mark.exhaustive
def test_the_site_has_a_search_that_opens_from_the_disk(tmp_path: Path) -> None:
    mkdocs = pytest.importorskip("mkdocs.config")
    build = pytest.importorskip("mkdocs.commands.build")
    config = mkdocs.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), hooks=[])
    build.build(config)
    assert "microbatch" in (tmp_path / "search" / "search_index.js").read_text()  # a script: pages may load no JSON
