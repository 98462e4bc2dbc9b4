"""Whether a wide halo pays follows from numbers alone: what an exchange takes, and what is computed twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.parallel.costs.cost_model import Profiler, measured_speeds
from mpi4dl.parallel.costs.timing import Remembered
from mpi4dl.parallel.spatial.halo_choice import HaloChoice, Link, RankWork, Speeds, Step, Widened, choose
from tests.pool.ranks import Ranks

# Each block: 2 exchanges of 10 bytes, 1000 FLOPs. At its entry 1 exchange of 25 bytes, and 100 FLOPs more; for both
# together 1 exchange of 60 bytes, and 500 FLOPs more.
LAYERS = RankWork(2, 20, 1000.0)
ALONE = Widened(2, RankWork(1, 25, 1100.0))
BOTH = Widened(4, RankWork(1, 60, 2500.0))
ROW = Step(LAYERS, ALONE, None), Step(LAYERS, ALONE, BOTH)
NOT_WIDE = "it needs no halo"


def speeds(latency: float, byte: float = 0.0) -> Speeds:
    return Speeds(Link(latency, byte), flop_seconds=1.0, byte_seconds=0.0)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (speeds(49), HaloChoice(1, 0, LAYERS, LAYERS, "by layer takes less", 2.0)),
        (speeds(81), HaloChoice(1, 0, LAYERS, LAYERS, "one exchange saves less than 5%", 0.0)),
        (speeds(82), HaloChoice(1, 2, LAYERS, ALONE.work, "one exchange takes less", 64.0)),
        (speeds(82, 10.0), HaloChoice(1, 0, LAYERS, LAYERS, "by layer takes less", 36.0)),  # 5 bytes more, twice
        (speeds(223), HaloChoice(1, 2, LAYERS, ALONE.work, "one exchange takes less", 346.0)),
        (
            speeds(224),
            HaloChoice(2, 4, LAYERS + LAYERS, BOTH.work, "one exchange for 2 blocks takes less", 2 * 3 * 224 - 500.0),
        ),
        (None, HaloChoice(1, 2, LAYERS, ALONE.work, "as was asked for")),
    ],
)
def test_a_row_of_blocks(given: Speeds | None, chosen: HaloChoice) -> None:
    assert choose(ROW, given) == chosen


@pytest.mark.parametrize("given", [speeds(1e9), None])
def test_what_cannot_be_wide_is_by_layer(given: Speeds | None) -> None:
    refused = Step(LAYERS, None, None, NOT_WIDE)
    assert choose([refused, refused], given) == HaloChoice(1, 0, LAYERS, LAYERS, NOT_WIDE)


def test_nobody_asks_behind_the_end_of_a_run() -> None:
    def steps() -> Iterator[Step]:
        yield from ROW
        raise AssertionError

    assert choose(steps(), speeds(82)).num_blocks == 1


def test_what_is_said_of_a_choice() -> None:
    choice = choose(ROW, speeds(82))
    assert (choice.exchanges_saved, choice.computed_twice) == (1, pytest.approx(0.1))
    assert HaloChoice(1, 0, RankWork(), RankWork(), NOT_WIDE).computed_twice == 0


def found_speeds(comm: Communicator, folder: Path) -> tuple[Speeds, Speeds]:
    """What is measured on ranks, and what is known the next time."""
    clockwork = Profiler(Remembered(folder / str(comm.rank)))  # no other rank's, as on several machines
    return tuple(measured_speeds(comm, torch.device("cpu"), torch.float32, clockwork) for _ in range(2))


def test_all_ranks_decide_by_the_same_speeds(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2).run(found_speeds, tmp_path)
    assert len({*found[0], *found[1]}) == 1
    (known, _), _ = found
    assert min(*known.link, known.flop_seconds, known.byte_seconds, known.operator_seconds) > 0
