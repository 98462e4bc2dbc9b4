"""Emulated clusters: the times of messages, collectives and whole steps are those of a network; values are the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from benchmarks import stages
from benchmarks.common import models
from benchmarks.common.emulated import (
    Clock,
    CollectiveCost,
    CostOf,
    MonotonicClock,
    Network,
    VirtualClock,
    collective_cost,
    emulated,
    emulated_machine,
    time_steps,
)
from mpi4dl.comm import Communicator, Mismatch, Pending
from mpi4dl.comm.allreduce import pick
from mpi4dl.parallel.costs.cost_model import SMALL_BYTES, Link, measure_link
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables.simulator import Costs, simulate
from tests.benchmarks.checks import options_of
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import SMALL, train

# All times are sums of powers of two, which floating-point numbers hold exactly.
BYTE_SECONDS, NUM_BYTES = 2.0**-10, 1024  # a second for a message
NODES = Network(Link(0.5, BYTE_SECONDS), Link(2.0, 4 * BYTE_SECONDS), ranks_per_node=2)
LATENCY = Network(Link(1.0, 0.0))


class Work:
    """The work of a rank, in seconds: no more than it says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def do(self, seconds: float) -> None:
        self.seconds += seconds


class Emulated(NamedTuple):
    """A communicator, what time it is there, and the work of this rank."""

    comm: Communicator
    clock: VirtualClock
    work: Work


@contextmanager
def virtual(comm: Communicator, network: Network, cost_of: CostOf = collective_cost) -> Iterator[Emulated]:
    work = Work()
    clock = VirtualClock(work)
    with emulated(comm, network, clock, cost_of) as world:
        yield Emulated(world, clock, work)


def message(value: float = 0.0) -> torch.Tensor:
    return torch.full((NUM_BYTES // 4,), value)


def play_ping_pong(comm: Communicator) -> tuple[list[float], float]:
    with virtual(comm, NODES) as (world, clock, work):
        ball, laps = message(), []
        for end in (1, 2):  # on the same node, and on another
            if comm.rank == 0:
                work.do(3.0)
                world.send(ball, end)
                laps.append(clock.now())
                world.recv(ball, end)
                laps.append(clock.now())
            elif comm.rank == end:
                world.recv(ball, 0)
                work.do(2.0)
                world.send(ball, 0)
                laps.append(clock.now())
        return laps, clock.work_seconds()


def test_an_emulated_machine_and_its_network_are_alike() -> None:
    near, far = Link(1e-6, 1e-10), Link(5e-4, 8e-9)
    for distribution, nodes in {"block": [0, 0, 1, 1], "cyclic": [0, 1, 0, 1]}.items():
        network = Network.of(emulated_machine(2, 2, near, far, distribution))
        assert [network.node(rank) for rank in range(4)] == nodes
        assert network.link(0, 3) == pytest.approx(far)
    assert [link.name for link in emulated_machine(2, 1, near, far).links] == ["network"]
    assert [link.name for link in emulated_machine(1, 4, near, far).links] == ["node"]


def test_a_message_takes_the_latency_and_the_bytes_of_its_link(ranks: Ranks) -> None:
    there, back = 3 + 1 + 0.5, 2 + 1 + 0.5
    again = there + back + 3
    assert ranks(3).run(play_ping_pong) == [
        ([4.0, there + back, again + 4, again + 4 + 2 + 2 + 4 + 2], 6.0),
        ([there + 3], 2.0),
        ([again + 4 + 2 + 2 + 4], 2.0),
    ]


@on_ranks(3)
def test_messages_of_a_rank_follow_each_other_on_each_kind_of_link(comm: Communicator) -> None:
    with virtual(comm, NODES) as (world, clock, _):
        if comm.rank == 0:
            Pending.all(world.node, [world.isend(message(), to, 5) for to in (1, 1, 2)]).wait()
            assert clock.now() == 4.0
            return
        for expected in ([1.5, 2.5], [6.0])[comm.rank - 1]:
            world.recv(message(), 0, 5)
            assert clock.now() == expected


@on_ranks(2)
def test_a_receive_from_any_rank_has_the_time_of_the_message_that_it_got(comm: Communicator) -> None:
    """The first message is for the receive that names no source, though the other is waited for first."""
    with virtual(comm, NODES) as (world, clock, work):
        if comm.rank == 1:
            for seconds in (4.0, 2.0):
                work.do(seconds)
                world.send(message(seconds), 0, 7)
            return
        heard: list[int] = []
        values = message(), message()
        from_any, named = world.irecv(values[0], None, 7, heard.append), world.irecv(values[1], 1, 7)
        named.wait()
        second = clock.now()
        from_any.wait()
        assert second == clock.now() == 4 + 1 + 2 + 1 + 0.5
        assert (heard, float(values[0][0]), float(values[1][0])) == ([1], 4.0, 2.0)


@on_ranks(2)
def test_wrong_lengths_are_refused_as_without_a_network(comm: Communicator) -> None:
    """In the same words, by rank 1."""

    def complaints(world: Communicator) -> list[str]:
        found = []
        for source in (0, None):
            for length in (3, 5):
                if world.rank == 0:
                    world.send(torch.ones(length), 1)
                else:
                    with pytest.raises(Mismatch) as error:
                        world.irecv(torch.ones(4), source).wait()
                    found.append(str(error.value))
        return found

    with emulated(comm, NODES) as world:
        plain = complaints(comm)
        assert complaints(world) == plain
    assert len(plain) == 4 * comm.rank


def look_early(comm: Communicator, clock_of: Callable[[Work], Clock]) -> tuple[bool, float]:
    """Rank 0 sends at second 0; rank 1 looks before and after the message is due."""
    work = Work()
    clock = clock_of(work)
    with emulated(comm, NODES, clock) as world:
        if comm.rank == 0:
            sending = world.isend(message(), 1)
            early = sending.test()
            work.do(1.0)
            sending.wait()
            return early, clock.now()
        arriving = world.irecv(message(), 0)
        early = any([arriving.test() for _ in range(200)])
        work.do(1.5)
        while not arriving.test():
            pass
        return early, clock.now()


@pytest.mark.parametrize("clock_of", [VirtualClock, MonotonicClock])
def test_a_message_is_not_there_before_its_time(ranks: Ranks, clock_of: Callable[[Work], Clock]) -> None:
    assert ranks(2).run(look_early, clock_of) == [(False, 1.0), (False, 1.5)]


def reduce_together(comm: Communicator) -> list[object]:
    with virtual(comm, NODES) as (world, clock, work):
        nodes = world.nodes()
        pair = world.split_by_node()
        odd = world.subset([1, 3]) if comm.rank % 2 else None
        world.barrier()
        began = clock.now()
        laps = []
        work.do(float(comm.rank))
        tensors = message(1.0), message(2.0)
        pending = [world.iall_reduce(tensor) for tensor in tensors]
        for each in reversed(pending):
            each.wait()
            laps.append(clock.now() - began)
        work.do(float(comm.rank))
        pair.all_reduce(message())
        laps.append(clock.now() - began)
        if odd is not None:
            odd.broadcast(message())
            laps.append(clock.now() - began)
            odd.send(message(), 1) if odd.rank == 0 else odd.recv(message(), 0)
            laps.append(clock.now() - began)
        return [nodes, float(tensors[0][0]), float(tensors[1][0]), laps]


def test_a_collective_ends_when_its_last_rank_has_come_and_it_has_its_cost(ranks: Ranks) -> None:
    """Two of all ranks after each other, one within each node, one of two nodes, and a message between these."""
    latency, transfer = collective_cost("allreduce", 4, NUM_BYTES, Link(2.0, 4 * BYTE_SECONDS))
    assert (latency, transfer) == (4.0, 8.0)
    second = 3 + 2 * transfer + latency
    near = [second + 1 + 1.5, second + 3 + 1.5]
    far = near[1] + 2 + 4
    for rank, found in enumerate(ranks(4).run(reduce_together)):
        laps = [second, second, near[rank // 2], *([far, far + (4 if rank == 1 else 6)] if rank % 2 else [])]
        assert found == [[[0, 1], [2, 3]], 4.0, 8.0, laps]


def sum_beside_a_wait(comm: Communicator) -> float:
    """Rank 0 waits from 0 to 5, and works from then on. What is due in that wait comes to it in real time later."""
    with virtual(comm, LATENCY) as (world, clock, work):
        all_reduce = None if comm.rank == 2 else pick(world.subset([0, 1]), "direct")
        world.barrier()
        began = clock.now()
        if all_reduce is None:
            work.do(4.0)
            world.send(message(), 0)
            return clock.now() - began
        if comm.rank == 0:
            pending = all_reduce(message())
            world.recv(message(), 2)
            comm.send(torch.ones(1), 1)
            work.do(10.0)
        else:
            comm.recv(torch.ones(1), 0)
            pending = all_reduce(message())
        pending.wait()
        return clock.now() - began


def test_a_phase_starts_in_the_first_wait_after_it_is_due_in_whatever_order_things_really_happen(ranks: Ranks) -> None:
    assert ranks(3).run(sum_beside_a_wait) == [15.0, 2.0, 4.0]


def free(call: str, num_ranks: int, num_bytes: int, link: Link) -> CollectiveCost:
    return CollectiveCost(0.0, 0.0)


PIPELINES = {"1f1b": 1, "gpipe": 1, "zero-bubble": 1, "interleaved": 2}
LAYER_SECONDS, STAGE_LATENCY = 0.5, 0.125


@pytest.mark.parametrize("schedule", PIPELINES)
@on_ranks(4)
def test_a_pipeline_takes_the_time_that_is_simulated(comm: Communicator, schedule: str) -> None:
    """Steps of stages that sleep, whose sleep is their work, and that work."""
    options = options_of("stages", f"--sleep --stages 4 --schedules {schedule} --configurations PP")
    (plan,) = stages.plans(options).values()
    network = Network(Link(STAGE_LATENCY, 0.0))
    with virtual(comm, network, free) as (world, clock, work):
        asleep = mock.patch.object(models, "time", SimpleNamespace(sleep=work.do))
        with asleep, mock.patch.object(stages, "SLEEP_SECONDS", LAYER_SECONDS * plan.chunks):
            case = stages.Case(stages.SLEEP, stages.SLEEP_PX)
            trainer = stages.engine_trainer(options, case, torch.device("cpu"), plan, world)
            times = time_steps(world, clock, trainer.step, num_steps=2)
    assert times.seconds == max(rank.seconds for rank in times.medians)
    assert (plan.schedule, plan.num_stages, plan.num_microbatches) == (schedule, 4 * PIPELINES[schedule], 8)
    costs = Costs.equal(plan.num_stages, LAYER_SECONDS, 2 * LAYER_SECONDS, STAGE_LATENCY)
    expected = simulate(plan.table(), plan.placement, costs).makespan_seconds
    assert [step.seconds for step in times.of_ranks[comm.rank]] == [expected] * 2
    assert times.medians[comm.rank].work_seconds == 8 * 3 * LAYER_SECONDS * plan.chunks


@on_ranks(3)
def test_the_link_that_ranks_measure_is_that_of_the_network(comm: Communicator) -> None:
    expected = Link(2.0 + 4 * BYTE_SECONDS * SMALL_BYTES, 4 * BYTE_SECONDS)
    with virtual(comm, NODES) as (world, clock, _):
        assert measure_link(world, torch.device("cpu"), clock.now) == expected


@pytest.mark.parametrize("clock_of", [VirtualClock, MonotonicClock])
@on_ranks(4)
def test_training_learns_the_same_bits(comm: Communicator, clock_of: Callable[[], Clock]) -> None:
    """What is learnt without the network and with it."""
    plan = Plan(((1, 2), (1, 2)), microbatches=2)
    plain = train(comm, SMALL, plan)
    network = Network(Link(5e-6, 1e-10), Link(1e-4, 8e-9), ranks_per_node=2)
    with emulated(comm, network, clock_of()) as world:
        over_network = train(world, SMALL, plan)
    plain, over_network = [(outcome.steps, outcome.digests) for outcome in (plain, over_network)]
    assert len(plain[1]) > 4
    assert over_network == plain
