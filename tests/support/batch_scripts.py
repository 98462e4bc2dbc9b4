"""The batch scripts of examples/slurm, run without Slurm: programs in front of `PATH` stand for those of a cluster."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.pool.zygote import ROOT

SCRIPTS = ROOT / "examples" / "slurm"
RECORDS = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" '' >> "$RECORD"
"""
SRUN = (
    RECORDS
    + """for word; do case $word in --*) shift;; *) break;; esac; done
exec "$@"
"""
)


@dataclass(frozen=True)
class Batch:
    """A batch script, and what Slurm would tell it."""

    path: Path

    @property
    def directives(self) -> dict[str, str]:
        """The flags of its #SBATCH lines."""
        found = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", self.path.read_text(), re.MULTILINE)
        return dict(found)

    @property
    def ranks_per_node(self) -> int:
        return int(self.directives["ntasks-per-node"])

    @property
    def ranks(self) -> int:
        return int(self.directives["nodes"]) * self.ranks_per_node

    def start(self, folder: Path, srun: str, *flags: str, ranks: int | None = None) -> "subprocess.Popen[str]":
        """The script in a folder of its own, where `srun` is the text of that program; its calls go to `recorded`."""
        programs = folder / "env" / "bin"
        programs.mkdir(parents=True)
        for name, text in (("srun", srun), ("scontrol", RECORDS), ("mpi4dl", RECORDS)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        slurm = {"NTASKS": str(ranks or self.ranks), "CPUS_PER_TASK": "1", "JOB_ID": "17"}
        slurm |= {"ARRAY_TASK_ID": "3", "ARRAY_TASK_COUNT": "5"} if "array" in self.directives else {}
        known = {f"SLURM_{name}": value for name, value in slurm.items()}
        environment = os.environ | known | {"VENV": str(folder / "env"), "RECORD": str(folder / "record")}
        return subprocess.Popen(
            ["bash", str(self.path), *flags], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def commands(self, folder: Path, *flags: str, ranks: int | None = None) -> list[list[str]]:
        """The words of each `mpi4dl` command that the script starts on all ranks."""
        with self.start(folder, SRUN, *flags, ranks=ranks) as job:
            said = job.communicate(timeout=60)
        assert (job.returncode, said) == (0, ("", ""))
        return [words[1:] for words in recorded(folder) if words[0] == "mpi4dl"]


def recorded(folder: Path) -> list[list[str]]:
    """The words of each program that a script started there, its own name first."""
    return [call.split("\n") for call in (folder / "record").read_text().split("\n\n") if call]


def batches() -> list[Batch]:
    return [Batch(path) for path in sorted(SCRIPTS.glob("*.sbatch"))]


def recipes() -> dict[str, str]:
    """The shell commands of the container recipes, by section."""
    text = (ROOT / "examples" / "containers" / "mpi4dl.def").read_text()
    return {name: body for name, body in re.findall(r"^%(\w+)\n((?: {4}.*\n|\n)*)", text, re.MULTILINE)}
