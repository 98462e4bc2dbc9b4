"""The batch scripts and container recipes: what they ask of Slurm and of mpi4dl exists, and a signal requeues a run."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.datasets.slides.compose import Cohort
from mpi4dl.embed import EmbedConfig
from mpi4dl.evaluate import EvaluateConfig
from mpi4dl.inference.options import Inference, placed
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import Config
from mpi4dl.options.declare import parse_options, with_values
from mpi4dl.training.trained import ModelOptions
from tests.pool.job import launcher
from tests.pool.zygote import ROOT
from tests.support.batch_scripts import RECORDS, SCRIPTS, Batch, batches, recipes, recorded

BATCHES = batches()
SBATCH = set(
    "job-name nodes ntasks-per-node gpus-per-node cpus-per-task mem time output array signal requeue open-mode".split()
)
CONFIGS: dict[str, Any] = {"train": Config, "embed": EmbedConfig, "evaluate": EvaluateConfig}
parametrized = pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.path.stem)


def test_all_scripts_are_found() -> None:
    assert [batch.path.stem for batch in BATCHES] == ["cpu", "embed", "evaluate", "folds", "gpu", "requeue"]


@parametrized
def test_slurm_reads_all_directives(batch: Batch) -> None:
    """Those below the first command are none to Slurm."""
    head, _, rest = batch.path.read_text().partition("\nset -euo pipefail\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "#SBATCH" not in rest
    assert len(re.findall("^#SBATCH", head, re.MULTILINE)) == len(batch.directives)
    assert set(batch.directives) <= SBATCH
    assert batch.directives.get("gpus-per-node", str(batch.ranks_per_node)) == str(batch.ranks_per_node)


@parametrized
@pytest.mark.parametrize("shell", ["bash -n", "shellcheck"])
def test_the_shell_finds_nothing_wrong(batch: Batch, shell: str) -> None:
    if which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([*shell.split(), str(batch.path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@parametrized
def test_its_commands_are_some_that_there_are(batch: Batch, tmp_path: Path) -> None:
    """Their flags have such values, and their plans as many ranks as Slurm starts, also if that number changes."""
    for ranks in (batch.ranks, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        commands = batch.commands(folder, "--threads", "2", ranks=ranks)
        assert commands[-1][-2:] == ["--threads", "2"]
        for name, *words in commands:
            if name == "doctor":
                continue
            source = name == "evaluate"  # the run comes first
            found = parse_options(CONFIGS[name], words[source:], "", "")
            if name == "train":
                assert build_plan(found).num_ranks == ranks
                assert found.run.resume == "auto"
                assert found.slides.slides == "slides.csv"
            elif source:
                chosen = Inference(found.inputs, found.placing)
                values, _ = placed(ModelOptions(), chosen, ranks)
                assert build_plan(with_values(Config(), values)).num_ranks == ranks
    if "array" in batch.directives:
        assert (found.slides.folds, found.slides.fold) == (5, 3)


# It ends as a run that saves does, on SIGUSR1 alone.
WAITS = (
    RECORDS
    + """trap 'echo stopping; exit $CODE' USR1
echo ready
while true; do sleep 0.05; done
"""
)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 0), (signal.SIGUSR1, 3), (None, 0)])
def test_a_signal_to_the_script_stops_the_run_and_requeues_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals | None, code: int
) -> None:
    monkeypatch.setenv("CODE", str(code))
    with Batch(SCRIPTS / "requeue.sbatch").start(tmp_path, RECORDS if sent is None else WAITS) as job:
        if sent is not None:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            job.send_signal(sent)
        said = job.communicate(timeout=60)
    assert (job.returncode, said) == (code, ("" if sent is None else "stopping\n", ""))
    requeued = [["scontrol", "requeue", "17"]] if sent is not None and code == 0 else []
    assert recorded(tmp_path)[1:] == requeued


OVER_RANKS = (
    RECORDS
    + """for word; do case $word in --*) shift;; *) break;; esac; done
exec "$LAUNCHER" -n "$SLURM_NTASKS" "$PYTHON" -m "$@"
"""
)
ENDLESS = (
    "--mpp 1 --patches 64 --model small_resnet --model-options num_filters=4 --weights none --epochs 100000 "
    "--log-interval 1 --num-workers 0 --no-tensorboard --patience none"
).split()


@pytest.mark.exhaustive
def test_a_requeued_job_continues_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slides = Cohort(6, 1, 700, (0.5,), (".tif",), 0.009)
    for number in range(len(slides)):
        slides.write(tmp_path / "slides", number)
    (tmp_path / "slides" / "slides.csv").write_text(slides.table())
    known = {"TABLE": tmp_path / "slides" / "slides.csv", "RUN": tmp_path / "run", "LAUNCHER": launcher()}
    for name, value in (known | {"PYTHON": sys.executable, "PYTHONPATH": ROOT}).items():
        monkeypatch.setenv(name, str(value))
    steps: list[int] = []
    for job_name in ("first", "again"):
        (tmp_path / job_name).mkdir()
        with Batch(SCRIPTS / "requeue.sbatch").start(tmp_path / job_name, OVER_RANKS, *ENDLESS, ranks=2) as job:
            assert job.stdout is not None
            began = next(filter(None, (re.search(r"step +(\d+).* loss", line) for line in job.stdout)), None)
            assert began is not None
            job.send_signal(signal.SIGUSR1)
            said = job.communicate(timeout=300)
        assert job.returncode == 0, said
        assert recorded(tmp_path / job_name)[1:] == [["scontrol", "requeue", "17"]]
        steps += [int(began[1]), int(checkpoints_in(tmp_path / "run" / "checkpoints")[0].name.split("-")[1])]
    first, saved, resumed, last = steps
    assert first <= saved < resumed <= last


def test_the_container_installs_what_this_package_has() -> None:
    """Both recipes ask for extras that exist, by files that exist; the shell can read the sections."""
    sections = recipes()
    assert set(sections) == {"files", "post", "environment", "runscript", "test"}
    extras = re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    for text in (sections["post"], (ROOT / "examples" / "containers" / "Dockerfile").read_text()):
        (constraints, wanted), *more = re.findall(r'pip install --no-cache-dir -c (\S+) "\.\[([\w,]+)\]"', text)
        assert not more
        assert (ROOT / constraints).is_file()
        assert set(wanted.split(",")) <= set(extras)
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["bash", "-n"], input=sections[name], text=True, timeout=60, check=True)
