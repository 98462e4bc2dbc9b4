"""mpi4dl.train: wherever a rank leaves, and however, the whole job ends, with one message and no code of success.

The time-out is an hour: what ends a job here is what saw the rank leave.
"""

import itertools
import signal
from pathlib import Path

import pytest

from tests.commands import TINY
from tests.pool.job import mpirun

LEAVING = """
import ctypes, os, signal, sys, threading
from mpi4dl import train
from {module} import {owner}

plain, calls = {owner}.{method}, []

def fatal(*arguments, **options):
    calls.append(1)
    if len(calls) == {call} and {rank} == train.guard.met().rank:
        {way}
    return plain(*arguments, **options)

{owner}.{method} = fatal
train.main()
"""

PHASES = {
    "lists": ("mpi4dl.trainer", "trainer", "open_images", 1),
    "builds": ("mpi4dl.trainer", "trainer", "hold_model", 1),
    "reads": ("mpi4dl.datasets.loader", "Loader", "epoch", 1),
    "steps": ("mpi4dl.engine", "Engine", "step", 2),
    "updates": ("torch.optim", "SGD", "step", 4),
    "saves": ("mpi4dl.checkpoints", "Checkpoints", "save", 1),
    "validates": ("mpi4dl.engine", "Engine", "evaluate", 1),
    "ends": ("mpi4dl.trainer.folder", "RunFolder", "unlock", 1),
}
WAYS = {
    "raises": "raise RuntimeError('no such luck')",
    "raises what is no Exception": "raise GeneratorExit('no such luck')",
    "exits": "sys.exit(3)",
    "exits well": "sys.exit(0)",
    "exits at once": "os._exit(3)",
    "exits at once well": "os._exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "ctypes.string_at(0)",
    "aborts": "os.abort()",
    "fails in a thread": "threading.Thread(target=lambda: 1 / 0).start(); threading.Event().wait()",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("phase", "way", "rank"), [*itertools.product(PHASES, WAYS, (0, 1))])
def test_no_rank_waits_for_one_that_left(phase: str, way: str, rank: int, tmp_path: Path) -> None:
    module, owner, method, call = PHASES[phase]
    program = LEAVING.format(module=module, owner=owner, method=method, call=call, rank=rank, way=WAYS[way])
    flags = ("--tiles", "1x2", "--num-samples", "16", "--epochs", "2", "--no-tensorboard")
    flags += ("--run-folder", str(tmp_path / "run"), "--hang-timeout", "3600")
    job = mpirun(2, "-c", program, *TINY, *flags)
    if phase == "ends" and "well" in way:
        return  # it had nothing left to do
    assert job.code != 0, job.stdout + job.stderr
    assert "Traceback" not in job.stdout
    assert job.stderr.count("Traceback") <= 1, job.stderr
    if way in ("raises", "raises what is no Exception", "fails in a thread"):
        assert f"[rank {rank} of 2] Traceback" in job.stderr, job.stderr
        assert job.stderr.count("no such luck" if "raises" in way else "ZeroDivisionError") == 1, job.stderr
    elif way in ("is killed", "crashes", "aborts"):
        signals = {"is killed": signal.SIGKILL, "crashes": signal.SIGSEGV, "aborts": signal.SIGABRT}
        assert job.code in (signals[way], 128 + signals[way], signal.SIGKILL, signal.SIGTERM, 1), job.stderr
