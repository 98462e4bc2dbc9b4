"""Messages and collectives on a machine of several levels: times worked out by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl.comm.packing import Piece
from mpi4dl.comm.traffic import Round, Traffic
from mpi4dl.geometry import GridShape
from mpi4dl.parallel.costs.machine import CollectiveCost, ExchangeCost, LinkLevel, Machine, Ranks
from mpi4dl.parallel.costs.stage_traffic import StageTraffic, WaitSeconds, neighbours
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import SpatialTensor
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator, dry_run_grid
from mpi4dl.parallel.spatial.sharding import even_layout

# Two nodes of four ranks. Within a node 1 s and 100 bytes/s; between them 10 s, and 10 bytes/s for two ranks together.
NODE = LinkLevel("node", 1.0, 100.0, ranks=4)
NETWORK = LinkLevel("network", 10.0, 10.0, shared_by=2)
MACHINE = Machine("two nodes", 2, 4, (NODE, NETWORK), message_seconds=0.0)


def ranks(*numbers: int) -> Ranks:
    return np.array(numbers)


def test_messages_take_the_first_link_that_joins_both_ends() -> None:
    assert MACHINE.levels(ranks(0, 0, 3, 7), ranks(3, 4, 4, 5)).tolist() == [0, 1, 1, 0]


def test_of_messages_at_the_same_time_the_fullest_port_decides() -> None:
    inside = ExchangeCost(MACHINE, [(ranks(0, 1), ranks(1, 2))])
    assert inside.seconds([200.0]) == 1.0 + 2.0
    across = ExchangeCost(MACHINE, [(ranks(2, 3), ranks(4, 5)), (ranks(0), ranks(1))])
    assert across.seconds([50.0, 100.0]) == 10.0 + 2 * 50 / 10  # ranks 2 and 3 share a port
    assert across.seconds([50.0, 10000.0]) == 1.0 + 100.0
    assert across.seconds([50.0, 0.0], times=3) == 3 * 10.0 + 10.0  # the bytes are those of all three
    one_port = ExchangeCost(MACHINE, [(ranks(0, 2), ranks(4, 5))])
    assert one_port.seconds([50.0]) == 10.0 + 2 * 50 / 10  # they share the port of the receivers
    assert ExchangeCost(MACHINE, [(ranks(1), ranks(1))]).seconds([50.0]) == 0.0


def test_of_many_messages_no_port_is_taken_for_another() -> None:
    """26 neighbours, as in volumes: two ports that differ in the first of them alone."""
    many = Machine("many", 8, 4, (LinkLevel("node", 0.0, 1.0, ranks=4), LinkLevel("network", 0.0, 1.0, shared_by=4)))
    second = (np.arange(4, 8), np.arange(16, 20))
    both = (np.arange(8), np.arange(8, 16))
    load = ExchangeCost(many, [second, *[both] * 25])
    assert load.seconds([1000.0, *[1.0] * 25]) == pytest.approx(4 * 1025 + 26 * many.message_seconds)


def test_who_shares_experts_sends_to_all_others() -> None:
    """On two nodes, of which each has a port for two ranks, from the view of rank 4 of eight."""
    stage = StageTraffic(MACHINE, Plan.of(data=1, experts=8), 0)
    parts = tuple(((offset,), 1) for offset in range(-4, 4) if offset)
    found = stage.waits((Round("exchange", None, 1, parts),))
    assert found.experts == pytest.approx(10.0 + 2 * 4 * 1 / 10)  # each of two ranks to all four of the other node


def test_each_message_is_handed_over() -> None:
    slow = Machine("slow", 1, 4, (LinkLevel("node", 1.0, 100.0),), message_seconds=0.25)
    assert ExchangeCost(slow, [(ranks(1), ranks(0)), (ranks(1), ranks(2))]).seconds([0.0, 0.0], 2) == 2 * (1.0 + 0.5)


def test_two_ranks_hand_over_one_message_each() -> None:
    slow = Machine("slow", 1, 4, (LinkLevel("node", 1.0, 100.0),), message_seconds=0.25)
    there_and_back = [(ranks(0, 2), ranks(1, 3)), (ranks(1, 3), ranks(0, 2))]
    assert ExchangeCost(slow, there_and_back).seconds([0.0, 0.0]) == 1.0 + 0.25


def test_replicas_with_batches_of_their_own_share_ports() -> None:
    port = Machine("port", 1, 8, (LinkLevel("node", 1.0, 10.0, shared_by=4),), message_seconds=0.0)
    right, summed = Round("exchange", (0, 1, 2), 1, (((0, 0, 1), 100),)), Round("reduce", (0, 1, 2), 1, (((), 100),))
    for data, sharing in ((1, 1), (2, 2), (4, 2)):
        plan = Plan.of(stages=2, tiles=[(1, 2), (1, 1)], data=data, microbatches=1, local_batches=data > 1)
        if data < 4:
            first, last = (StageTraffic(port, plan, stage) for stage in (0, 1))
            assert first.waits((right,)).halos == pytest.approx(1.0 + sharing * 10.0)
            assert first.handing_seconds(last, 100) >= 1.0 + 20.0
    alone, local = (Plan.of(tiles=[(1, 2)], data=data, local_batches=data > 1) for data in (1, 2))
    once, twice = (StageTraffic(port, plan, 0).waits((summed,)).statistics for plan in (alone, local))
    assert once < twice < 2 * once + 1e-9


def test_collectives_go_level_by_level() -> None:
    everyone = CollectiveCost(MACHINE, np.arange(8)[None])
    # A reduce-scatter: of 80 bytes 3 / 4 within a node; of the quarter that is left, a half to the other node, by two.
    half = 2 * 1.0 + 60 / 100 + 10.0 + 2 * 10 / 10
    doubling = 2 * (1.0 + 80 / 100) + 10.0 + 2 * 80 / 10
    assert everyone.all_reduce_seconds(80) == pytest.approx(min(2 * half, doubling))
    assert everyone.all_reduce_seconds(80000) == pytest.approx(2 * (2.0 + 600.0 + 10.0 + 2000.0))
    assert everyone.all_gather_seconds(10) == pytest.approx(2 * 1.0 + 3 * 10 / 100 + 10.0 + 4 * 10 * 2 / 10)
    assert everyone.reduce_scatter_seconds(80) == pytest.approx(10.0 + 4 * 10 * 2 / 10)
    assert everyone.all_reduce_seconds(80, "direct") == pytest.approx(2 * everyone.reduce_scatter_seconds(80))
    # Around a ring a part of 10 bytes makes 14 steps, of which at most 4 cross the network.
    ring = 4 * (10.0 + 10 / 10) + 10 * (1.0 + 10 / 100)
    assert everyone.all_reduce_seconds(80, "ring") == pytest.approx(ring)
    # A part of 1000 bytes holds the network for 100 s: all 14 follow each other there.
    assert everyone.all_reduce_seconds(8000, "ring") >= 14 * 1000 / 10
    two_level = 2 * (1.0 + 60 / 100 + 10.0 + 2 * 10 / 10)
    assert everyone.all_reduce_seconds(80, "two-level") == pytest.approx(two_level)
    slower = Machine("slower", 2, 4, (NODE, NETWORK), message_seconds=0.0, collectives={"ring": 1.5})
    assert CollectiveCost(slower, np.arange(8)[None]).all_reduce_seconds(80, "ring") == pytest.approx(1.5 * ring)
    assert CollectiveCost(MACHINE, np.arange(8)[:, None]).all_reduce_seconds(80) == 0.0


def test_ranks_are_dealt_out_over_nodes() -> None:
    cyclic = Machine("cyclic", 2, 4, (NODE, NETWORK), message_seconds=0.0, distribution="cyclic")
    assert cyclic.slots(range(8), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert cyclic.slots(range(4), 4).tolist() == [0, 1, 2, 3]  # a job of one node
    assert MACHINE.slots(range(8), 8).tolist() == list(range(8))
    halos = (Round("exchange", (0, 1, 2), 1, (((0, 0, 1), 10),)),)
    near, far = (StageTraffic(each, Plan.of(tiles=[(1, 8)]), 0).waits(halos).halos for each in (MACHINE, cyclic))
    assert far > near
    with pytest.raises(ValueError, match="block, cyclic"):
        Machine("odd", 2, 4, (NODE, NETWORK), distribution="plane")


def test_groups_within_nodes_do_not_reach_the_network() -> None:
    assert CollectiveCost(MACHINE, np.arange(8).reshape(2, 4)).all_gather_seconds(10) == pytest.approx(2.0 + 30 / 100)
    across = CollectiveCost(MACHINE, np.arange(8).reshape(2, 4).T)  # four pairs, of which two share a port
    assert across.all_gather_seconds(10) == pytest.approx(10.0 + 2 * 10 / 10)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ((), "no [[links]]"),
        ((LinkLevel("node", 1.0, 1.0, ranks=3), NETWORK), "whole number of groups"),
        ((LinkLevel("node", 1.0, 0.0),), "a rate above 0"),
        ((LinkLevel("node", 1.0, 1.0, ranks=4),), "the last one all ranks"),
        ((NODE, LinkLevel("network", 1.0, 1.0, shared_by=3)), "shared_by = 3"),
        ((LinkLevel("node", 1.0, 1.0, ranks=4, shared_by=8), NETWORK), "no more ranks"),
    ],
)
def test_machines_that_cannot_be_are_refused(links: tuple[LinkLevel, ...], said: str) -> None:
    with pytest.raises(ValueError, match="machine odd") as refused:
        Machine("odd", 2, 4, links)
    assert said in str(refused.value)


def test_neighbours_are_those_within_the_grid() -> None:
    here, there = neighbours((2, 3), (1, -1))
    assert (here.tolist(), there.tolist()) == ([1, 2], [3, 4])


def test_what_one_rank_records_is_priced_for_all() -> None:
    """2x4 tiles, a row on each node: to the right within a node, downwards across the network."""
    stage = StageTraffic(MACHINE, Plan.of(tiles=[(2, 4)]), 0)
    right = Round("exchange", (0, 1, 2), 2, (((0, 0, 1), 200),))
    assert stage.waits((right,)) == WaitSeconds(halos=2 * 1.0 + 2.0)
    down = Round("exchange", (0, 1, 2), 1, (((0, 1, 0), 100),))
    assert stage.waits((down,)) == WaitSeconds(halos=10.0 + 2 * 100 / 10)
    summed = Round("reduce", (0, 1, 2), 3, (((), 24),))
    found = stage.waits((summed, right))
    assert found.halos == 4.0
    assert found.statistics == pytest.approx(3 * CollectiveCost(MACHINE, np.arange(8)[None]).all_reduce_seconds(8))


def moments_of(tiles: tuple[int, int], num_channels: int) -> tuple[DryRunCommunicator, Traffic]:
    """What a rank of so many tiles counts, and records, in the forward pass of a norm."""
    grid = dry_run_grid(GridShape(1, *tiles), 5)
    layout = even_layout(grid, (2, num_channels, 2 * tiles[0], 2 * tiles[1]))
    x = SpatialTensor(torch.empty(2, num_channels, 2, 2, device="meta"), layout)
    assert nn.BatchNorm2d(num_channels, device="meta")(x).local.is_meta  # a norm that waits is computed at this look
    return grid.comm, grid.comm.recorder.take()


def test_many_ranks_gather_moments_in_blocks() -> None:
    """Of 96 ranks 8 blocks of 12, merged in float64; of 64 all at once. Rounds of few ranks are priced for many too."""
    machine = Machine("many", 12, 8, (LinkLevel("node", 1.0, 100.0, ranks=8), NETWORK), message_seconds=0.0)
    comm, traffic = moments_of((8, 12), 10)
    assert traffic == moments_of((3, 3), 10)[1] == (Round("gather", (0, 1, 2), 1, (((), 120),)),)
    assert (comm.counts["rounds"], comm.counts["gathered_bytes"]) == (2, 120 + 240)
    assert comm.counts["latencies"] == 11 + 7
    blocks = np.arange(96).reshape(8, 12)
    expected = CollectiveCost(machine, blocks).all_gather_seconds(120)
    expected += CollectiveCost(machine, blocks.T).all_gather_seconds(240)
    found = StageTraffic(machine, Plan.of(tiles=[(8, 12)]), 0).waits(traffic)
    assert found == WaitSeconds(statistics=pytest.approx(expected))
    everyone = CollectiveCost(machine, np.arange(96)[None]).all_gather_seconds(120)
    assert found.statistics < everyone / 2
    few = StageTraffic(machine, Plan.of(tiles=[(8, 8)]), 0).waits(moments_of((8, 8), 10)[1])
    at_once = CollectiveCost(machine, np.arange(64)[None]).all_gather_seconds(120)
    assert few == WaitSeconds(statistics=pytest.approx(at_once))


@pytest.mark.parametrize("tiles", [(1, 67), (5, 26), (32, 64)])
def test_blocks_of_any_number_of_ranks_are_priced(tiles: tuple[int, int]) -> None:
    machine = Machine.of_link(1e-6, 1e9, tiles[0] * tiles[1])
    stage = StageTraffic(machine, Plan.of(tiles=[tiles]), 0)
    found = stage.waits(moments_of(tiles, 256)[1]).statistics
    assert 0 < found < CollectiveCost(machine, np.arange(machine.num_ranks)[None]).all_gather_seconds(3 * 256 * 4)


def test_who_shares_features_or_experts_is_told_apart() -> None:
    stage = StageTraffic(MACHINE, Plan.of(tensor=2, data=2, experts=2), 0)
    assert stage.ranks.tolist() == list(range(8))
    found = stage.waits((Round("reduce", (3,), 1, (((), 0),)), Round("exchange", None, 1, (((1,), 0),))))
    assert found == WaitSeconds(features=1.0, experts=1.0)
    assert stage.collective(None).size == 2


def test_a_dry_run_records_its_rounds() -> None:
    grid = dry_run_grid(GridShape(2, 3, 3), 4)
    strip = torch.zeros(5, device="meta")
    for _ in range(2):
        grid.comm.iexchange([Piece(1, strip), Piece(3, strip)], [])
    grid.along((0,)).all_reduce(torch.zeros(3))
    assert set(grid.comm.recorder.take()) == {
        Round("exchange", (0, 1, 2), 2, (((0, -1, 0), 40), ((0, 0, -1), 40))),
        Round("reduce", (0,), 1, (((), 12),)),
    }
    assert grid.comm.recorder.take() == ()
