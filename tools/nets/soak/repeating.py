"""Training again and again in the same processes: memory, files, threads and communicators do not grow."""

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mpi4dl.comm import Communicator
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.interrupted import flags_of
from tools.nets.soak.resources import Resources, grown

WARM = 4  # trainings before memory is looked at
# MPICH has 2,048 communicators at once: a training that leaves one ends this long before the hour is over.
PLANS = ("--tiles 1x2", "--data 2 --zero 3", "--stages 2", "--stages 2 --bidirectional 1", "--data 2 --ema 0.9")


class Repeated(NamedTuple):
    before: Resources
    after: Resources
    count: int


def repeat(comm: Communicator, seconds: float, folder: Path) -> Repeated:
    """A body: so many trainings as there is time for."""
    end, count, before = time.monotonic() + seconds, 0, None
    while True:
        flags = ["--epochs", "1", *PLANS[count % len(PLANS)].split()]
        train(comm, [*flags_of(folder / str(count), plan=()), *flags])
        count += 1
        if count == WARM * len(PLANS):
            gc.collect()
            before = Resources.of(os.getpid())
        if comm.broadcast_object(time.monotonic() > end) and before is not None:
            break
    gc.collect()
    return Repeated(before, Resources.of(os.getpid()), count)


def soak(seconds: float) -> tuple[int, list[str]]:
    """How many trainings there were, and what was wrong."""
    ranks = Ranks()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found: list[Repeated] = ranks(2, seconds + 600).run(repeat, seconds, Path(folder))
    finally:
        ranks.stop()
    return found[0].count, grown([each.before for each in found], [each.after for each in found])
