"""What a rule does beyond PyTorch's call is counted, and does not grow: Python's calls, operators, and new tensors."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import overhead
from mpi4dl.comm import Communicator
from mpi4dl.models import build
from mpi4dl.parallel.spatial.tensor import local_part
from tests.benchmarks.checks import options_of
from tests.pool.ranks import Pool

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
    "batch norm": (66, 21, 7, 27, 17, 10),
    "group norm": (57, 19, 10, 28, 16, 11),
    "bilinear x2": (114, 11, 3, 39, 11, 4),
    "global mean": (64, 6, 2, 24, 5, 1),
}
MORE_ONCE_FLAT = 20  # calls, in a process that has had tensors in which one dim is several axes
VIT = {"image_size": 32, "patch": 8, "num_layers": 2, "hidden": 32, "num_heads": 2}
STEPS = {
    "ResNet-18 on tiles": 12400,
    "ViT on tiles": 7250,
    "ViT's replicas": 4450,
}  # the most calls of a step on a rank


def counts_of(comm: Communicator, once_flat: bool) -> dict[str, tuple[int, ...]]:
    options = options_of("overhead")
    _, x, tile = overhead.tiles(options, comm)
    if once_flat:
        x.flatten(2)
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


def calls_of_step(comm: Communicator, name: str) -> int:
    """The calls of a step of a loop as users write it."""
    from mpi4dl import parallelize  # by which rules are asked more, even for other tensors

    model = build("resnet18", 4) if "ResNet" in name else build("vit", 4, **VIT)
    parallelize(model, **({"data": 2} if "replicas" in name else {"tiles": (1, 2)}), comm=comm)
    optimizer, images = torch.optim.SGD(model.parameters(), 0.01), torch.rand(2, 3, 32, 32)
    turns = []
    for _ in range(8):  # in the first ones plans are made, and ranks compare what they have
        with overhead.count_calls() as counted:
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        turns.append(counted["calls"])
    return min(turns)


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    """Ranks on which nothing else has run: some of it makes rules ask more for as long as a process lives."""
    pool = Pool(2)
    yield pool
    pool.stop(kill=True)


counts_of_newest = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="calls of PyTorch's own Python count too, which made more"
)


@counts_of_newest
@pytest.mark.parametrize("once_flat", [False, True])
def test_rules_do_no_more_than_they_did(fresh: Pool, once_flat: bool) -> None:
    for found in fresh.run(2, counts_of, (once_flat,)):
        assert list(found) == list(MOST) == list(overhead.NAMES)
        most = {name: (calls + MORE_ONCE_FLAT * once_flat, *others) for name, (calls, *others) in MOST.items()}
        worse = {name: counts for name, counts in found.items() if any(map(int.__gt__, counts, most[name]))}
        assert not worse, worse


@counts_of_newest
@pytest.mark.parametrize("name", STEPS)
def test_steps_make_no_more_calls_than_they_did(fresh: Pool, name: str) -> None:
    assert max(fresh.run(2, calls_of_step, (name,))) <= STEPS[name]


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
