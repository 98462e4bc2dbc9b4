"""What a run holds does not grow from epoch to epoch: counted, in tensors, cached plans and bytes in use."""

import ctypes
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.train import train
from mpi4dl.training.run import TrainingRun
from tests.pool.ranks import on_ranks
from tests.support.commands import wrapped
from tests.support.interrupted import flags_of

EPOCHS = 7
SETTLED = 3  # epochs after which everything was met once: plans of exchanges, buckets, the file of reports
NOISE_BYTES = 1 << 16  # of lines that are logged, and what libraries note


class Mallinfo(ctypes.Structure):
    """What glibc says of its memory."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def bytes_in_use() -> int:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize("plan", ["--tiles 1x2 --zero 3", "--tiles 1x2", "--stages 2 --microbatches 2"])
@pytest.mark.exhaustive
@on_ranks(2)
def test_nothing_piles_up(comm: Communicator, tmp_path: Path, plan: str) -> None:
    """After each epoch, once it was saved: live tensors, entries of caches of ours, and bytes in use."""
    more = ("--epochs", str(EPOCHS), "--num-workers", "0", "--scheduler-options", "max_lr=0.01,total_steps=40")
    flags = flags_of(tmp_path / "run", *more, plan=tuple(plan.split()))
    found = []

    def counting(save: Any, run: TrainingRun) -> None:
        save(run)
        run.checkpoints.wait()
        gc.collect()
        objects = gc.get_objects()
        caches = [one for one in objects if type(one) is functools._lru_cache_wrapper]
        entries = sum(one.cache_info().currsize for one in caches if one.__module__.startswith("mpi4dl"))
        found.append((sum(issubclass(type(one), torch.Tensor) for one in objects), entries, bytes_in_use()))

    with wrapped(TrainingRun, "save", counting):
        train(comm, flags)
    assert len(found) == EPOCHS
    tensors, entries, in_use = zip(*found[SETTLED:], strict=True)
    assert len(set(tensors)) == 1, found
    assert len(set(entries)) == 1, found
    assert in_use[-1] - in_use[0] < NOISE_BYTES, found
