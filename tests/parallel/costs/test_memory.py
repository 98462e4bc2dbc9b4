"""Bytes of units: what PyTorch keeps of them, on tiles too."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.common.meter import ActivationMeter
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.models import build
from mpi4dl.parallel.costs.meter import UnitCosts
from mpi4dl.parallel.costs.sites import Site, sites_of
from mpi4dl.parallel.costs.units import StageBytes, bytes_of_stages, count_bytes, count_units
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks

SIZE, BATCH_SIZE = (64, 64), 4
OPTIONS = {"resnet_v2": {"depth": 11}, "amoebanetd": {"num_layers": 3, "num_filters": 16}}
PLAN = Plan.of(stages=2, tiles=[(1, 2), (1, 1)], microbatches=2)


def cuttable_of(name: str) -> Cuttable:
    return Cuttable(outline(lambda: build(name, 10, **OPTIONS[name])))


@pytest.mark.parametrize("name", OPTIONS)
def test_on_one_rank_it_is_what_the_model_keeps(name: str) -> None:
    cuttable, image = cuttable_of(name), (2, 3, *SIZE)
    units = count_units(cuttable, Site.of(Plan.of(), 0, image))
    model = cuttable.model
    kept_anyway = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    expected = sum(count_bytes(cuttable, image)) - sum(t.nbytes for t in kept_anyway)
    assert sum(unit.kept_bytes for unit in units) == expected


def kept_by_training(comm: Communicator, name: str, counts: tuple[int, ...]) -> int:
    held = split(lambda: build(name, 10, **OPTIONS[name]), PLAN, comm, balance=counts, image=(2, 3, *SIZE))
    engine = Engine(held, PLAN, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    shapes = [[slab.length for slab in read.box] for read in engine.reads(BATCH_SIZE, SIZE)]
    tiles = [torch.rand(n, 3, *space) for n, *space in shapes]
    meter = ActivationMeter()
    with meter.counting():
        engine.step(tiles, torch.zeros(BATCH_SIZE, dtype=torch.int64), SIZE)
    return meter.peak_bytes


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.exhaustive
def test_on_tiles_it_is_what_ranks_keep(ranks: Ranks, name: str) -> None:
    cuttable = cuttable_of(name)
    counts = (3, len(cuttable) - 3)
    columns = [count_units(cuttable, Site.of(PLAN, stage, (2, 3, *SIZE))) for stage in (0, 1)]
    first, last = (sum(unit.kept_bytes for unit in part) for part in (columns[0][:3], columns[1][3:]))
    found = ranks(3).run(kept_by_training, name, counts)
    assert found == pytest.approx([2 * first, 2 * first, last], rel=0.05)  # two microbatches are under way there


def test_stages_keep_what_is_handed_to_them() -> None:
    """The second unit's 900 bytes come when the third's are let go of; what is handed on counts with its gradient."""
    units = (UnitCosts(9, 8, 6, 10, 5), UnitCosts(70, 4, 0, 10, 900), UnitCosts(400, 2, 2, 10, 3))
    first, last = bytes_of_stages((1, 2), (units, units))
    assert first == StageBytes(9, 10 + 2 * 8)
    assert last == StageBytes(470 + 6, 70 + 900 - 470 + 8)


def test_sums_over_features_are_counted_forward_and_backward() -> None:
    """A block has one behind attention and one behind its feed-forward, the embedding one; each has its adjoint."""
    sizes = {"vocabulary": 20, "context": 8, "num_layers": 2, "num_heads": 2, "hidden": 8}
    cuttable = Cuttable(outline(lambda: build("gpt", None, **sizes)))
    (site,) = sites_of(cuttable, Plan(((1,),), tensor=2), (3, 8))
    *units, _ = count_units(cuttable, site)
    assert [unit.summed_bytes / (3 * 8 * 8 * 4) for unit in units] == [2, 4, 4, 0]
    (alone,) = sites_of(cuttable, Plan(((1,),)), (3, 8))
    assert {unit.summed_bytes for unit in count_units(cuttable, alone)} == {0}
