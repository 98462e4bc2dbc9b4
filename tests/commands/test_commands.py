"""The command `mpi4dl`: it lists all others, runs each as its module does, and helps those who know other tools."""

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path

import pytest

from mpi4dl._commands import command_names
from mpi4dl.embed import EmbedConfig
from mpi4dl.evaluate import EvaluateConfig
from mpi4dl.generate import GenerateConfig
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import SAME, help_text, options_of, parse_options, sections_of
from mpi4dl.plan import PlanConfig
from mpi4dl.predict import PredictConfig
from mpi4dl.serve import ServeConfig
from tests.pool.job import mpirun
from tests.pool.zygote import ROOT, python
from tests.support.commands import TINY, refusal

CONFIGS = [Config, PlanConfig, EvaluateConfig, PredictConfig, EmbedConfig, GenerateConfig, ServeConfig]
TWO_SCREENS = 90
COLUMNS = 100
HEAVY = {"torch", "torchvision", "numpy", "mpi4py", "PIL", "jinja2", "safetensors"}
# What every tool has, and what it is here.
WELL_KNOWN = {
    "--learning-rate 0.1": "--lr 0.1",
    "--weight_decay 0.05": "--optimizer-options weight_decay=0.05",
    "--momentum=0.9": "--optimizer-options momentum=0.9 with --optimizer SGD",
    "--pretrained": "--weights pretrained",
    "--num-epochs 3": "--epochs 3",
    "--output-dir here": "--run-folder here",
    "--arch resnet50": "--model resnet50",
    "--amp": "--precision bf16",
    "--fp16": "--precision fp16",
    "--workers 4": "--num-workers 4",
    "--img-size 64": "--image-size 64",
    "--data-dir pictures": "--images pictures",
    "--opt AdamW": "--optimizer AdamW",
    "--gpus 4": "mpirun -n 4",
    "--devices 4": "mpirun -n 4",
    "--nproc-per-node 4": "mpirun -n 4",
    "--num-nodes 2": "hosts",
    "--batch-size-per-gpu 8": "--batch-size N",
}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, cwd=ROOT)


def test_without_a_command_all_are_listed_as_they_describe_themselves() -> None:
    names = command_names()
    assert {"train", "plan", "evaluate", "predict", "generate", "serve", "export", "report", "doctor"} <= {*names}
    done = run_python("-m", "mpi4dl")
    assert (done.returncode, done.stderr) == (0, "")
    for name in names:
        described = importlib.import_module(f"mpi4dl.{name}").DESCRIPTION
        assert re.search(rf"^  {name} +{re.escape(described)}$", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 120


def program(*words: str) -> str:
    """A program that is the command with these words, and prints what it imported before it ended."""
    return (
        "import sys\nfrom mpi4dl.__main__ import main\n"
        f"sys.argv = ['/somewhere/bin/mpi4dl', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    print('exit code', stop.code)\n"
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )


@pytest.mark.parametrize(
    ("words", "out", "error"),
    [
        ((), ["usage: mpi4dl COMMAND"], ""),
        (("plan", "--help", "all"), ["usage: mpi4dl plan [--timeline", "--tiles RxC", "--stages N", "exit code 0"], ""),
        (("trian",), ["exit code 2"], "mpi4dl: there is no command trian; did you mean train?\n"),
        (("train", "-h"), ["usage: mpirun -n RANKS mpi4dl train [--config", "--tiles RxC", "exit code 0"], ""),
        (("--lr", "1"), ["exit code 2"], "mpi4dl: name a command before --lr: doctor, embed,"),
        (("help", "plan"), ["usage: mpi4dl plan [--timeline", "exit code 0"], ""),
        (("export", "--help"), ["usage: mpi4dl export", "exit code 0"], ""),
        (("train", "--help"), ["usage: mpirun -n RANKS mpi4dl train [--config", "exit code 0"], ""),
        (("doctor", "--help"), ["usage: mpirun -n RANKS mpi4dl doctor", "exit code 0"], ""),
        (("report", "--help"), ["usage: mpi4dl report", "exit code 0"], ""),
        (("view", "--help"), ["usage: mpi4dl view", "exit code 0"], ""),
        (("view", "a", "--nonsense"), ["exit code 2"], "mpi4dl: there is no flag --nonsense; --help all"),
        (("view", "a", "--prt", "1"), ["exit code 2"], "mpi4dl: there is no flag --prt; did you mean --port?"),
        (("view", "--port", "0"), ["exit code 2"], "mpi4dl: name FOLDER: mpi4dl view FOLDER ["),
        (("report", "--out", "a"), ["exit code 2"], "mpi4dl: name RUN: mpi4dl report RUN ... ["),
        (("report", "--out", "a.html", "none"), ["exit code 2"], "mpi4dl: none"),
        (("export", "a", "b.pt", "c"), ["exit code 2"], "mpi4dl: the argument 'c' is one too many: mpi4dl export "),
        (("export", "a", "b"), ["exit code 2"], "mpi4dl: b must end in .pt or .safetensors\n"),
        (("sweep", "--ranks", "4"), ["exit code 2"], "mpi4dl: there is no command sweep any more; write mpi4dl plan "),
        (("plan", "--lrr", "3"), ["exit code 2"], "mpi4dl: there is no flag --lrr; did you mean --lr?"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
@pytest.mark.sample(8)
def test_a_command_is_known_before_heavy_imports(words: tuple[str, ...], out: list[str], error: str) -> None:
    done = run_python("-c", program(*words))
    assert all(part in done.stdout for part in out)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr.startswith(error)
    assert bool(done.stderr) == bool(error)


@pytest.mark.parametrize(
    "words", [["train", "--lrr", "3"], ["slides", "chek"], ["generate", "--prompt", "a"]], ids=" ".join
)
def test_a_job_refuses_a_wrong_command_line_before_torch_is_imported(words: list[str]) -> None:
    without = f"import sys; sys.modules['torch'] = None; sys.argv = {['bin/mpi4dl', *words]}\n"
    job = mpirun(2, "-c", f"{without}from mpi4dl.__main__ import main\nmain()")
    assert words[1] in refusal(job) or "name the folder of a run" in refusal(job)


def test_it_trains_as_the_module_does(tmp_path: Path) -> None:
    job = mpirun(
        2, "-m", "mpi4dl", "train", *TINY, "--tiles", "1x2", "--dry-run", "--run-folder", str(tmp_path / "run")
    )
    assert (job.code, job.stderr) == (0, "")
    assert "tiles(1x2)" in job.stdout
    assert refusal(mpirun(2, "-m", "mpi4dl", "train", "--lrr", "3")) == "there is no flag --lrr; did you mean --lr?"


def test_a_rank_that_fails_before_its_command_has_begun_ends_the_others() -> None:
    """As `python -m mpi4dl.train` does: the guard stands before the imports of the command."""
    broken = "import sys; sys.argv[1:] = ['train']; sys.modules['mpi4dl.options.command'] = None\n"
    broken += "sys.argv[0] = 'bin/mpi4dl'\nfrom mpi4dl.__main__ import main\nmain()"
    job = mpirun(1, "-m", "mpi4dl", "train", *TINY, ":", "-n", "1", python(), "-c", broken, timeout=300)
    assert job.code != 0
    assert "import of mpi4dl.options.command halted" in job.stderr


def test_a_console_command_is_declared_and_the_types_are_packaged() -> None:
    declared = (ROOT / "setup.cfg").read_text()
    assert "console_scripts =\n    mpi4dl = mpi4dl.__main__:main\n" in declared
    assert "mpi4dl = py.typed" in declared
    assert (ROOT / "mpi4dl" / "py.typed").is_file()


def test_an_installation_has_every_folder_of_the_package() -> None:
    """`packages = find:` takes folders with an __init__.py alone; an editable installation finds the others too."""
    folders = {path.parent for path in (ROOT / "mpi4dl").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = {ROOT / name.replace(".", "/") / files for name, files in setup["options.package_data"].items()}
    others = [path for path in (ROOT / "mpi4dl").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert others
    assert [path.name for path in others if not any(path.match(str(files)) for files in declared)] == []


def known_as(config: type) -> dict[str, tuple[str, str]]:
    """All names of other tools: the flag of ours where they are declared, and what to do instead."""
    found: dict[str, tuple[str, str]] = {}
    for item in options_of(config).values():
        for name, remedy in item.known_as.items():
            found[name] = item.flag, remedy
    return found


@pytest.mark.parametrize("config", CONFIGS)
def test_help_fits_two_screens(config: type) -> None:
    text = help_text(config, "", "mpi4dl COMMAND", "What it does.")
    lines = text.splitlines()
    assert len(lines) <= TWO_SCREENS
    assert max(map(len, lines)) <= COLUMNS
    options = options_of(config)
    common = [item for item in options.values() if item.brief]
    assert 5 <= len(common) <= 27
    assert all(f"  {item.flag}" in text or f"  {item.negation}" in text for item in common)
    for section, found in sections_of(config).items():
        assert found.__doc__, section
        assert not found.__doc__.startswith(f"{found.__name__}("), f"{found.__name__} says nothing of its options"
        group = help_text(config, section, "", "")
        assert all(f"  {item.flag}" in group for item in options.values() if item.section == section)
        assert not any(f"  {item.flag} " in group for item in options.values() if item.section != section)


@pytest.mark.parametrize("config", CONFIGS)
def test_names_of_other_tools_are_none_of_ours_and_lead_to_flags_that_there_are(config: type) -> None:
    options = options_of(config)
    flags = {flag for item in options.values() for flag in (item.flag, item.negation)} | {"--config"}
    names = [name for item in options.values() for name in item.known_as]
    assert config is PlanConfig or len(names) == len(set(names))
    for name, (flag, remedy) in known_as(config).items():
        assert f"--{name}" not in flags
        assert name == name.lower().replace("_", "-")
        said = refused(config, [f"--{name}", "7"])
        assert said.startswith(f"there is no flag --{name}; ")
        assert {word.rstrip(",:;") for word in said.partition(";")[2].split() if word.startswith("--")} <= flags
        assert remedy != SAME or said.endswith(f"use {flag} 7")


def refused(config: type, argv: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_options(config, argv, "", "")
    return str(caught.value)


def test_the_best_known_names_of_other_tools_lead_to_ours() -> None:
    for argv, ours in WELL_KNOWN.items():
        said = refused(Config, argv.split())
        assert ours in said, said
        pasted = re.fullmatch(r".*; use (--[\w-]+ \S+)", said)
        if pasted:
            parse_options(Config, pasted[1].split(), "", "")  # what is advised can be pasted
