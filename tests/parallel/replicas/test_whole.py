"""Values are put together on rank 0 from parts of all ranks, whichever has which."""

import torch

from mpi4dl.comm import Communicator
from mpi4dl.parallel.replicas.buckets import Shard, assemble
from tests.pool.ranks import Ranks

SHAPES = {
    "w": ((2, 3), torch.float32),
    "n": ((), torch.int64),
    "low": ((4,), torch.bfloat16),
    "none": ((2,), torch.bool),
}


def gather(comm: Communicator) -> dict[str, tuple[str, object]] | None:
    """Rank 0 has nothing of w, rank 1 its end, rank 2 its beginning; masters of `low` are in float32."""
    parts = [
        [Shard("low", 2, torch.tensor([2.0, 3.0]))],
        [Shard("w", 4, torch.tensor([4.0, 5.0])), Shard("low", 0, torch.tensor([0.0, 1.0]))],
        [Shard("w", 0, torch.arange(4.0).view(2, 2)), Shard("n", 0, torch.tensor(7))],
    ]
    found = assemble(comm, parts[comm.rank], SHAPES)
    return None if found is None else {name: (str(value.dtype), value.tolist()) for name, value in found.items()}


def test_parts_of_all_ranks_make_values_in_the_dtypes_that_were_asked_for(ranks: Ranks) -> None:
    first, *others = ranks(3).run(gather)
    assert others == [None, None]
    assert first == {
        "w": ("torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        "n": ("torch.int64", 7),
        "low": ("torch.bfloat16", [0.0, 1.0, 2.0, 3.0]),
    }
