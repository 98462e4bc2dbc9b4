"""The README says what works: its scripts run as they are printed, and its commands are ones that there are."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mpi4dl.evaluate import EvaluateConfig
from mpi4dl.forecast.fitting import memory_of_command
from mpi4dl.inference.options import Inference, placed
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import Config
from mpi4dl.options.declare import parse_options
from mpi4dl.plan import PlanConfig
from mpi4dl.predict import PredictConfig
from tests.pool.job import mpirun
from tests.pool.zygote import ROOT

README = (ROOT / "README.md").read_text()
START = re.compile(r"# mpirun -n (\d+) python (\w+)\.py\n")
COMMAND = re.compile(r"^ {4}(?:mpirun -n (\d+) )?python -m mpi4dl\.(train|plan)((?:.*\\\n)*.*)$", re.MULTILINE)
AFTER = re.compile(r"^ {4}(?:mpirun -n (\d+) )?python -m mpi4dl\.(evaluate|predict)(.*)$", re.MULTILINE)


def scripts() -> dict[str, tuple[int, str]]:
    """The README's scripts by name: on how many ranks, and their text. A block without a name goes on with the last."""
    found: dict[str, tuple[int, str]] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        start = START.match(block)
        if start:
            name = start[2]
            found[name] = int(start[1]), block
        else:
            num_ranks, before = found[name]
            found[name] = num_ranks, before + block
    return found


def test_all_scripts_are_found() -> None:
    assert list(scripts()) == ["tiles", "own", "grid", "stages", "program"]
    assert all(text.count("\n") > 8 for _, text in scripts().values())


@pytest.mark.parametrize("name", scripts())
def test_a_script_runs_as_it_is_printed(name: str, tmp_path: Path) -> None:
    num_ranks, text = scripts()[name]
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    job = mpirun(num_ranks, str(script), folder=tmp_path)
    assert (job.code, job.stderr) == (0, ""), job.stdout + job.stderr
    assert job.stdout.count("StepResult(loss=") == (5 if name == "stages" else 0)
    assert job.stdout.count("layer4.1.conv2") == (1 if name == "grid" else 0)
    assert ("accuracy 100.0 %" in job.stdout) == (name == "own")


@pytest.mark.parametrize("name", ["tiles", "own"])
def test_the_examples_are_printed_as_they_are(name: str) -> None:
    example = (ROOT / "examples" / f"{name}.py").read_text().partition('"""\n\n')[2]
    assert scripts()[name][1].partition("\n")[2] == example


@pytest.mark.parametrize(
    ("num_ranks", "command", "flags"), COMMAND.findall(README), ids=lambda words: " ".join(words.split())[:40]
)
def test_a_command_is_one_that_there_is(num_ranks: str, command: str, flags: str) -> None:
    words = shlex.split(flags.replace("\\\n", " "), comments=True)
    found = parse_options(Config if command == "train" else PlanConfig, words, "", "")
    assert num_ranks in ("", str(build_plan(found).num_ranks))


@pytest.mark.parametrize(("num_ranks", "command", "flags"), AFTER.findall(README), ids=lambda words: words.strip()[:40])
def test_a_command_after_training_is_one_that_there_is(num_ranks: str, command: str, flags: str) -> None:
    config: Any = EvaluateConfig if command == "evaluate" else PredictConfig
    found = parse_options(config, shlex.split(flags)[1:], "", "")
    ranks = int(num_ranks or 1)
    assert build_plan(placed(Config(), Inference(found.inputs, found.placing), ranks)[0]).num_ranks == ranks


WORKSTATION = 16 << 30  # bytes, for all ranks of a command together
DOCUMENTS = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
SEARCHES = ("--search", "--ranks")  # they find what fits into a memory of their own
TRAINED = [
    flags
    for text in DOCUMENTS
    for ranks, command, flags in COMMAND.findall(text)
    if not any(word in flags for word in ("my_code", *SEARCHES))
]


@pytest.mark.parametrize("flags", TRAINED, ids=lambda flags: " ".join(flags.split())[:60])
@pytest.mark.sample(6)
def test_an_example_fits_a_workstation(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images that are colour pictures of two classes, or texts of bytes."""
    monkeypatch.chdir(ROOT)
    config = parse_options(PlanConfig, shlex.split(flags.replace("\\\n", " "), comments=True), "", "")
    shape = (2, 3) if config.data.text is None else (257, 0)
    assert memory_of_command(config, build_plan(config), *shape) <= WORKSTATION


def test_commands_are_found() -> None:
    assert len(COMMAND.findall(README)) >= 5
    assert len(TRAINED) >= 15
    assert len(AFTER.findall(README)) == 4


def test_the_files_that_it_names_are_there() -> None:
    named = set(re.findall(r"\]\(((?:docs|examples)/[^)#]+)\)", README))
    named |= set(re.findall(r"`((?:docs|tests|mpi4dl|examples)/[\w/.-]+)`", README))
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
