"""mpi4dl.doctor: what a job runs on is said once, by rank 0, with measured numbers."""

import os
import platform
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mpi4dl
from mpi4dl.comm.shutdown import alone_of_several
from tests.pool.job import mpirun
from tests.pool.zygote import ROOT, python
from tests.support.commands import refusal

DOCTOR = ("-m", "mpi4dl.doctor")
WIRE_LINE = r" +(\d+) KiB +([\d.]+) us one way +([\d.]+) GB/s"


def test_two_ranks_are_described_and_their_wire_is_measured() -> None:
    job = mpirun(2, *DOCTOR)
    assert (job.code, job.stderr) == (0, "")
    versions, library, launcher, *lines = job.stdout.splitlines()
    assert versions == f"mpi4dl {mpi4dl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    assert re.fullmatch(r"MPI:( \S+)+", library)
    assert launcher.startswith("start jobs with ")
    for rank in (0, 1):
        pattern = (
            rf"rank {rank}: {re.escape(platform.node())}, local rank {rank}, \d+ cores? on the node, \d+ threads?, "
        )
        assert re.match(pattern, lines[rank])
    assert re.match(r"shared memory: /dev/shm has [\d,]+ MiB, [\d,]+ free", lines.pop(2))
    assert re.fullmatch(r"waiting ranks (yield, since .*|spin a moment, then yield), and then sleep", lines[2])
    assert re.fullmatch(r"GPU tensors go (staged|direct): .+", lines[3])
    assert lines[4].startswith("wire, rank 0 to rank 1, tensors on ")
    found = [re.fullmatch(WIRE_LINE, line) for line in lines[5:]]
    assert [match and match[1] for match in found] == ["4", "64", "1024", "16384"]
    for match in found:
        assert match is not None
        kibibytes, microseconds, gigabytes_per_second = (float(number) for number in match.groups())
        assert 0 < microseconds < 1e6
        assert abs(kibibytes * 1024 / microseconds / 1e3 - gigabytes_per_second) <= 0.01 + 0.05 * gigabytes_per_second


def test_one_rank_says_what_it_takes_to_measure_the_wire() -> None:
    done = subprocess.run([python(), *DOCTOR], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    *_, last = done.stdout.splitlines()
    assert last == "wire: start at least 2 ranks to measure it, as in: mpirun -n 2 python -m mpi4dl.doctor"


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ("doctor --gpu-wire smoke", "--gpu-wire is 'smoke', but must be one of"),
        ("doctor --name x", "there is no flag --name; leave it out: the machine is called as its file"),
        ("doctor --save /nowhere/machine.toml", "--save /nowhere/machine.toml: No such file or directory"),
        ("slides check", "slides check SLIDES"),
        ("slides chek", "did you mean check?"),
        ("slides", "name a command first: check, tissue, hits, compose"),
        ("slides check x --mpp -1", "--mpp is '-1', but must be a number greater than 0"),
    ],
)
def test_a_wrong_command_line_is_refused_once_for_all_ranks(words: str, about: str) -> None:
    name, *flags = words.split()
    job = mpirun(2, "-m", f"mpi4dl.{name}", *flags)
    assert about in refusal(job)
    assert not job.stdout


# What launchers say, whether standard input is a terminal, and the variable by which processes are found to be alone.
# MPI is MPICH's here, so that PMI_SIZE is its own launcher's.
LAUNCHERS = [
    ({}, False, None),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, False, "OMPI_COMM_WORLD_SIZE"),
    ({"PMI_SIZE": "4"}, False, "PMI_SIZE"),
    ({"PMIX_RANK": "1"}, False, "PMIX_RANK"),
    ({"PMIX_RANK": "0"}, False, None),  # of one or of several
    ({"SLURM_STEP_NUM_TASKS": "3"}, False, "SLURM_STEP_NUM_TASKS"),
    ({"SLURM_STEP_NUM_TASKS": "3"}, True, None),  # srun --pty bash
    ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, False, None),  # one step in a larger allocation
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False, None),  # a batch script
    ({"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}, False, None),  # mpirun in a job
]


@pytest.mark.parametrize(("variables", "terminal", "found"), LAUNCHERS)
def test_processes_that_do_not_see_each_other(
    variables: dict[str, str], terminal: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpi4py.MPI.get_vendor", lambda: ("MPICH", (4, 2, 1)))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))
    for name in (*os.environ, *variables):
        if name.startswith(("PMI", "OMPI_", "SLURM_")):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = alone_of_several()
    assert (said is None) == (found is None)
    assert found is None or f"env -u {found}" in str(said)


def test_a_plan_of_one_rank_does_not_train_alone_several_times(tmp_path: Path) -> None:
    """As under the mpirun of another MPI library: each process is rank 0 of 1."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "SLURM_"))}
    foreign = {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2"}
    command = [python(), "-m", "mpi4dl.train", "--image-size", "32", "--run-folder", str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment | foreign, check=False
    )
    assert done.returncode == 2
    assert "each of the 2 processes of this job is alone" in done.stderr
    assert "/mpirun" in done.stderr or "the mpirun of" in done.stderr
    assert not (tmp_path / "run").exists()
