"""The commands of a page run one after the other as printed, each page in a folder of its own, with its own data.

`QUICKLY` makes them short: few steps, small images and slides. What reads `runs/RUN` reads the run before.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch

from mpi4dl.models import build
from tests.docs.test_readme import COMMANDS, OF_RUNS, Command, module_of, scripts
from tests.docs.test_readme import PAGES as TEXTS
from tests.pool.job import PATIENCE_SECONDS, Finished, mpirun, start
from tests.pool.zygote import ROOT, launcher, python
from tests.support.commands import write_images

QUICKLY = {  # by command, and by what one of its words contains: flags that come last count
    "train": {
        "": "--max-steps 2 --eval-every 2 --num-workers 0",
        "--text": "--val-fraction 0.01 --eval-every none",
        "gpt.toml": "--scheduler-options total_steps=600,max_lr=0.001 --tokenizer bytes --val-fraction 0.01",
        "gpt_moe.toml": "--tokenizer bytes --val-fraction 0.01",
        "bert": "--model-options num_layers=2,hidden=64,num_heads=2",
        "tissue": "--image-size 64",
        "slides/ ": "--image-size 64",
        "photos": "--image-size 64 --batch-size 4 --warmup 1",
        "data/gigapixel": "--image-size 1024 --patches-at-once 4",
        "vit_b_16": "--model vit --image-size 32 --batch-size 4",
        "mil": "--weights none --model small_resnet --patches 64 --mean 0.5 --std 0.5 --mpp 2 --patience 1",
    },
    "slides": {"compose": "--patients 8 --slides-each 1 --size 1024"},
    "embed": {"": "--patches 64"},
    "plan": {
        "resnet50": "--image-size 256 --model small_resnet",
        "amoebanetd": "--image-size 64 --model-options num_layers=3,num_filters=16",
        "65536": "--image-size 512",
        "--search": "--ranks 2",
        "--measure 3": "--measure 1 --measure-turns 1 --measure-steps 1",
        "--ranks-per-node": "--ranks-per-node 2",
        "--scaling": "--ranks 4 --batch-size 4",
        "stdlib": "--ranks 2",
        "--text": "--model-options num_layers=2,hidden=64,num_heads=4 --context 64",
    },
    "examples/gigapixel_slide.py": {"": "--size 1024"},
    "examples.decode_latents": {"": "--latent 8"},
    "benchmarks run halo": {"": "--sizes 64 --quick"},
    "benchmarks run published": {"": "--quick"},
    "serve": {"": "--port 0"},
    "view": {"": "--port 0"},
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


def composed(folder: Path) -> None:
    flags = ("--patients", "10", "--slides-each", "1", "--size", "1024")
    finished(mpirun(2, "-m", "mpi4dl.slides", "compose", "data/slides", *flags, folder=folder))


def embedded(folder: Path) -> None:
    """Features of an encoder that needs no package beside torchvision."""
    (folder / "encoder.py").write_text(ENCODER)
    flags = ("--slides", "data/slides/slides.csv", "--mpp", "1", "--patches", "64", "--model", "encoder.py:build")
    torch.save({"0.weight": torch.ones(4, 3, 8, 8), "0.bias": torch.zeros(4)}, folder / "encoder.pt")
    finished(mpirun(2, "-m", "mpi4dl.predict", "encoder.pt", "--features-out", "features", *flags, folder=folder))


ENCODER = """from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""
OF_SLIDES = ("--slides", "data/slides/slides.csv", "--val-fraction", "0.3", "--batch-size", "1")
ENCODED = ("--model", "small_resnet", "--model-options", "num_filters=8,pool=max,norm=none", "--patches", "64")


def other_table(folder: Path) -> None:
    """The slides that the page composes, under the columns of another hospital."""
    rows = [f"data/slides/slide_{number:03}.tif,{('normal', 'tumour')[number % 2]}" for number in range(8)]
    (folder / "other.csv").write_text("\n".join(["Scan,Diagnosis", *rows]) + "\n")


def cached_weights(folder: Path) -> None:
    """What torchvision keeps of its weights: here others, for it would download the real ones."""
    file = folder / "torch" / "hub" / "checkpoints" / "resnet50-11ad3fa6.pth"
    file.parent.mkdir(parents=True)
    torch.save(build("resnet50").state_dict(), file)


def own_pairs(folder: Path) -> None:
    """The pictures that the page's own scripts make, and its model."""
    pairs, model, halves, *_ = re.findall(r"^```python\n(.*?)^```$", TEXTS[PAIRS], re.MULTILINE | re.DOTALL)
    plain(pairs, folder)
    (folder / "upscale.py").write_text(model)
    plain(halves, folder)


def own_rasters(folder: Path) -> None:
    """The rasters that the page's own script makes."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXTS[BANDS], re.MULTILINE | re.DOTALL)
    plain(code, folder)


BANDS = "docs/how-to/multi-band-images.md"
PAIRS = "docs/how-to/images-out-of-images.md"
GPT = (
    "--text",
    "examples",
    "--model",
    "gpt",
    "--model-options",
    "num_layers=2,hidden=64,num_heads=4",
    "--context",
    "64",
)
ON_FEATURES = trained("frozen", *OF_SLIDES, "--features", "features")
ON_PATCHES = trained("patches", *OF_SLIDES, *ENCODED, "--mpp", "1")
TISSUE, SLIDES = [pictures("data/tissue")], "docs/tutorials/slides.md"


class Page(NamedTuple):
    """What the page's commands need, the page whose commands it continues, and why some commands are not run.

    The commands of `without` are named by how they begin. A page that needs another package is skipped without it.
    """

    data: Sequence[Callable[[Path], None]] = ()
    after: str = ""
    without: Mapping[str, str] = {}
    needs: str = "torch"


CLUSTER = "is of a batch script"
MINUTES = "takes minutes; tests/benchmarks has it"
WEIGHTS, SLIDES_OF_TWO = "needs weights of torchvision", "needs registered slides of two stains"
PAGES = {
    "README.md": Page([pictures("slides"), *TISSUE]),
    "docs/tutorials/first-training.md": Page(TISSUE),
    "docs/how-to/own-model-data-loss.md": Page([own_script]),
    "docs/how-to/resume.md": Page(TISSUE),
    "docs/how-to/watch-a-run.md": Page(of_images("first", "second")),
    "docs/how-to/predict.md": Page([*of_images("mine"), to_predict, composed, embedded, ON_FEATURES]),
    "docs/how-to/generate.md": Page([trained("mine", *GPT, "--batch-size", "8"), prompts]),
    "docs/tutorials/segmentation.md": Page(),
    "docs/tutorials/volumes.md": Page([scans]),
    "docs/tutorials/own-images.md": Page([pictures("slides"), *TISSUE]),
    "docs/tutorials/text.md": Page(),
    "docs/tutorials/fine-tuning.md": Page([pictures("photos"), cached_weights]),
    "docs/tutorials/gigapixel.md": Page(),
    SLIDES: Page([other_table]),
    "docs/how-to/map-whole-slides.md": Page(after=SLIDES),
    "docs/how-to/augment-slides.md": Page(after=SLIDES),
    "docs/how-to/segment-slides.md": Page(),
    PAIRS: Page(
        [own_pairs],
        without={
            "evaluate runs/stain --images pairs --tiles 1x2 --lpips": WEIGHTS,
            "train --task image --images pairs --model unet --model-options num_filters=12,depth=2,norm=instance "
            "--image-size 128 --tiles 1x2 --batch-size 4 --epochs 100 --optimizer Adam --lr 0.003 --loss": WEIGHTS,
            "train --task image --slides stains.csv": SLIDES_OF_TWO,
            "evaluate runs/ihc": SLIDES_OF_TWO,
            "predict runs/ihc": SLIDES_OF_TWO,
            "slides check stains.csv": SLIDES_OF_TWO,
        },
    ),
    BANDS: Page([own_rasters]),
    "docs/how-to/decode-latents.md": Page(needs="diffusers"),
    "docs/how-to/choose-a-plan.md": Page(
        without={"benchmarks run forecast": MINUTES, "benchmarks run choices": MINUTES}
    ),
    "docs/how-to/cross-validate.md": Page([composed], without={"train --folds": CLUSTER}),
    "docs/how-to/train-on-features.md": Page(
        [composed, embedded, ON_PATCHES], without={"embed --slides data/slides/slides.csv --mpp 0.5": "needs timm"}
    ),
    "docs/how-to/tune-an-encoder.md": Page(
        without={
            "train --slides slides.csv --model uni2": "needs timm, and weights with a licence",
            "plan --machine examples/machines/h100.toml": "needs timm; tests/estimate has what it counts",
            "plan --measure": "tests/estimate has what it measures",
        }
    ),
    "docs/how-to/profile.md": Page(),
    "docs/how-to/clusters.md": Page(without={"train --tiles 1x8": CLUSTER}),
    "docs/how-to/serve.md": Page([trained("gpt", *GPT, "--batch-size", "8")]),
    "docs/how-to/own-loop.md": Page(),
    "docs/reference/failures.md": Page(TISSUE),
    "docs/reference/python.md": Page([*of_images("mine"), to_predict]),
    "docs/explanation/replicas-and-zero.md": Page(),
    "docs/explanation/tensor-and-experts.md": Page(),
    "docs/performance.md": Page(),
}
NOT_RUN = {
    "docs/explanation/gpus.md": "needs GPUs",
    "docs/reference/options.md": "its commands are patterns",
    "docs/reference/torchvision.md": "trains all models of torchvision for hours; tests/benchmarks has it",
    "docs/scaling.md": MINUTES,
}
FIRST = ("docs/how-to/own-model-data-loss.md",)  # the others are of an exhaustive run
SERVERS = ("serve", "view")


def finished(job: Finished) -> Finished:
    assert job.code == 0, job.stdout + job.stderr
    return job


def of_the_makefile(command: Command) -> Command:
    """The training that `make TARGET` ends with; what it needs is the page's data."""
    makefile = (ROOT / "Makefile").read_text().replace("$(RANKS)", "4")
    found = re.search(rf"^{command.words[0]}:.*\n\t\S+ -n (\d+) \S+ -m mpi4dl.train (.*)$", makefile, re.MULTILINE)
    assert found is not None, command
    return Command(command.page, found[1], "train", shlex.split(found[2]))


def line(command: Command, folder: Path) -> list[str]:
    """The arguments of Python, with the flags that make the command short. `RUN` is the newest run."""
    made = sorted((folder / "runs").glob("*/config.toml"), key=os.path.getmtime)
    words = list(command.words)
    for written, begin in (("RUN", ""), ("gpt-DATE-TIME", "gpt-")):
        runs = [path.parent.name for path in made if path.parent.name.startswith(begin)]
        words = [word.replace(f"runs/{written}", f"runs/{runs[-1]}") if runs else word for word in words]
    for about, flags in QUICKLY.get(command.name, {}).items():
        if about in " ".join(words):
            words += flags.split()
    script = command.name.endswith(".py")
    return [command.name, *words] if script else ["-m", *module_of(command).split(), *command.name.split()[1:], *words]


def start_command(command: Command, folder: Path) -> subprocess.Popen[str]:
    launched = [launcher(), "-n", command.ranks] if command.ranks else []
    return start([*launched, python() if launched else sys.executable, *line(command, folder)], folder)


def run(command: Command, folder: Path) -> None:
    job = start_command(command, folder)
    try:
        stdout, stderr = job.communicate(timeout=PATIENCE_SECONDS)
    finally:
        stop(job)
    assert job.returncode == 0, f"{command}\n{stdout}{stderr}"


def stop(job: subprocess.Popen[str]) -> None:
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
        job.communicate(timeout=PATIENCE_SECONDS)


def serve(command: Command, folder: Path) -> None:
    """Start a server, ask what the page asks, and stop it as the page says."""
    job = start_command(command, folder)
    try:
        assert job.stdout is not None
        address = next((found[0] for each in job.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", each))), "")
        assert address, job.communicate()
        for ask in requests(command.page, address):
            ask(folder)
        job.send_signal(signal.SIGTERM)
        _, stderr = job.communicate(timeout=PATIENCE_SECONDS)
    finally:
        stop(job)
    assert job.returncode == 0, stderr


CURL = re.compile(r"^ {4}curl ((?:.*\\\n)*.*)$", re.MULTILINE)


def requests(page: str, address: str) -> list[Callable[[Path], object]]:
    """Of curl and of Python, as the page prints them; the address alone if there are none."""
    text = TEXTS[page].replace("http://127.0.0.1:8000", address)
    curls = [shlex.split(each.replace("\\\n", "")) for each in CURL.findall(text)]
    codes = re.findall(r"^```python\n(from openai.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [partial(curl, words) for words in curls or [[address]]] + [partial(plain, code) for code in codes]


def curl(words: Sequence[str], _: Path) -> None:
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    headers = dict([flags["-H"].split(": ")]) if flags else {}
    request = urllib.request.Request(words[0], flags["-d"].encode() if flags else None, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        assert not flags or json.load(answer)["choices"][0]["text"]


def plain(code: str, folder: Path) -> Finished:
    (folder / "asks.py").write_text(code)
    return finished(mpirun(1, "asks.py", folder=folder))


def follow(page: str, folder: Path) -> None:
    about = PAGES[page]
    if about.after:
        follow(about.after, folder)
    for write in about.data:
        write(folder)
    for command in COMMANDS:
        if command.page == page and not any(named(command, begin) for begin in about.without):
            command = of_the_makefile(command) if command.name == "make" else command
            (serve if command.name in SERVERS else run)(command, folder)
    for name in sorted(OF_RUNS):
        num_ranks, text = scripts()[name]
        if f"python {name}.py\n" in TEXTS[page]:
            (folder / f"{name}.py").write_text(text)
            finished(mpirun(num_ranks, f"{name}.py", folder=folder))


def named(command: Command, begin: str) -> bool:
    return f"{command.name} {' '.join(command.words)}".startswith(begin)


@pytest.mark.parametrize(
    "page", [each if each in FIRST else pytest.param(each, marks=pytest.mark.exhaustive) for each in PAGES]
)
def test_the_commands_of_a_page_run_as_they_are_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(PAGES[page].needs) is None:
        pytest.skip(f"{PAGES[page].needs} is not installed")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    follow(page, tmp_path)


GUIDE = TEXTS["docs/how-to/migrate-from-mpi4dl.md"]
MIGRATED = re.findall(r"`mpirun -n (\d+) \$([AR])([^`]*)` \| ([\d.]+) \|", GUIDE)


def test_the_guide_has_losses() -> None:
    assert len(MIGRATED) > 15


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_ranks", "model", "flags", "loss"), MIGRATED)
def test_a_command_of_the_guide_for_mpi4dl_prints_the_loss_beside_it(
    num_ranks: str, model: str, flags: str, loss: str, tmp_path: Path
) -> None:
    common = re.search(rf'{model}="mpi4dl train (.*?)"', GUIDE, re.DOTALL)
    assert common is not None
    job = finished(mpirun(int(num_ranks), "-m", "mpi4dl.train", *shlex.split(common[1] + flags), folder=tmp_path))
    printed = re.findall(r"^step 2 of 2 .*? loss ([\d.]+) ", job.stdout, re.MULTILINE)
    assert [float(each) for each in printed] == pytest.approx([float(loss)], abs=0.0011), job.stdout  # float32 rounds


def test_each_page_with_commands_is_run_or_says_why_not() -> None:
    """A new page, a page without commands, and a reason for a command that has gone are noticed."""
    pages = {command.page for command in COMMANDS}
    assert pages <= PAGES.keys() | NOT_RUN.keys()
    assert not PAGES.keys() & NOT_RUN.keys()
    assert NOT_RUN.keys() <= pages
    for page, about in PAGES.items():
        mine = [command for command in COMMANDS if command.page == page]
        assert not mine or not all(any(named(each, begin) for begin in about.without) for each in mine), page
        assert mine or any(f"python {name}.py\n" in TEXTS[page] for name in OF_RUNS), page
        for begin in about.without:
            assert any(named(command, begin) for command in mine), (page, begin)
    printed = re.compile(r"^ {4}(?:mpirun|mpi4dl|python -m (?:mpi4dl|benchmarks|examples)) .*\b", re.MULTILINE)
    assert {page for page, text in TEXTS.items() if printed.search(text)} <= pages


@pytest.mark.exhaustive
def test_the_site_has_a_search_that_opens_from_the_disk(tmp_path: Path) -> None:
    mkdocs = pytest.importorskip("mkdocs.config")
    build = pytest.importorskip("mkdocs.commands.build")
    config = mkdocs.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), hooks=[])
    build.build(config)
    assert "microbatch" in (tmp_path / "search" / "search_index.js").read_text()  # a script: pages may load no JSON
