"""mpi4dl.doctor: what a job runs on is said once, by rank 0, with measured numbers."""

import platform
import re
import subprocess
import sys

import torch

import mpi4dl
from tests.pool.job import mpirun
from tests.pool.zygote import ROOT, python

DOCTOR = ("-m", "mpi4dl.doctor")
WIRE_LINE = r" +(\d+) KiB +([\d.]+) us one way +([\d.]+) GB/s"


def test_two_ranks_are_described_and_their_wire_is_measured() -> None:
    job = mpirun(2, *DOCTOR)
    assert (job.code, job.stderr) == (0, "")
    versions, library, *lines = job.stdout.splitlines()
    assert versions == f"mpi4dl {mpi4dl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    assert re.fullmatch(r"MPI:( \S+)+", library)
    for rank in (0, 1):
        pattern = (
            rf"rank {rank}: {re.escape(platform.node())}, local rank {rank}, \d+ cores? on the node, \d+ threads?, "
        )
        assert re.match(pattern, lines[rank])
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


def test_a_wire_that_cannot_be_is_refused_without_starting_mpi() -> None:
    program = (
        "import sys; from mpi4dl.doctor import main\n"
        "try:\n    main(['--gpu-wire', 'smoke'])\nexcept SystemExit as stop:\n    print(stop.code)\n"
        "print(sorted({'mpi4py', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.stdout.splitlines() == ["2", "[]"]
    assert "invalid choice: 'smoke'" in done.stderr
