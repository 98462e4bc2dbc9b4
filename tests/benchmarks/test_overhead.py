"""What a rule does beyond PyTorch's call is counted, and does not grow: Python's calls, operators, and new tensors."""

import pytest
import torch

from benchmarks import overhead
from mpi4dl.comm import Communicator
from mpi4dl.parallel.spatial.tensor import local_part
from tests.benchmarks.checks import options_of
from tests.pool.ranks import Ranks

# At most so many on a rank: calls, operators and tensors of a forward pass, and of a backward pass.
MOST = {
    "relu": (9, 0, 0, 0, 0, 0),
    "add": (10, 0, 0, 0, 0, 0),
    "cat": (39, 0, 0, 0, 0, 0),
    "conv 1x1": (18, 0, 0, 0, 0, 0),
    "conv 3x3": (63, 11, 3, 54, 16, 6),
    "conv 3x3 stride 2": (55, 6, 2, 44, 9, 4),
    "max pool 3x3": (66, 14, 6, 43, 10, 4),
    "average pool 3x3": (63, 11, 3, 44, 10, 4),
    "batch norm": (68, 20, 7, 29, 16, 10),
    "group norm": (58, 18, 10, 29, 15, 11),
    "bilinear x2": (114, 11, 3, 39, 11, 4),
    "global mean": (64, 6, 2, 24, 5, 1),
}


def counts_of(comm: Communicator) -> dict[str, tuple[int, ...]]:
    options = options_of("overhead")
    _, x, tile = overhead.tiles(options, comm)
    plain = tile.detach().requires_grad_()
    found = {}
    for name, operator in overhead.operators(options.channels).items():
        ours = overhead.Call(operator, x, tile, local_part)
        for _ in range(3):  # plans are made, and norms learn what to bring
            ours.backward(ours.forward())
        own = overhead.Call(operator, plain, plain, local_part).counts()
        turns = [ours.counts() for _ in range(3)]  # who waits long for another rank makes more calls
        more = {kind: min(turn[kind] for turn in turns) for kind in own}
        kinds = [f"{each}_{kind}" for each in overhead.PASSES for kind in overhead.COUNTS]
        found[name] = tuple(more[kind] - own[kind] for kind in kinds)
    return found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="calls of PyTorch's own Python count too, which made more")
def test_rules_do_no_more_than_they_did(ranks: Ranks) -> None:
    for found in ranks(2).run(counts_of):
        assert list(found) == list(MOST) == list(overhead.NAMES)
        worse = {name: counts for name, counts in found.items() if any(map(int.__gt__, counts, MOST[name]))}
        assert not worse, worse


def test_what_is_counted() -> None:
    def one_more(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = torch.zeros(3)
    with overhead.count_operators() as found:
        x.add_(1)
        one_more(x).view(3, 1)
    assert found == {"operators": 3, "tensors": 1}
    with overhead.count_calls() as called:
        one_more(x)
        one_more(x)
    assert called == {"calls": 2}
