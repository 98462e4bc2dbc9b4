"""What a machine's ranks share: cores, GPUs, and a wait that sleeps where there are more ranks than cores."""

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.comm.node import Node
from tests.pool.ranks import Ranks


def describe(comm: Communicator) -> tuple[int, int, int, int]:
    node = Node.of(comm.mpi)
    return node.local_rank, node.local_size, node.cores, node.threads


def test_the_ranks_of_a_machine_know_their_place_and_share_its_cores(ranks: Ranks) -> None:
    cores = len(os.sched_getaffinity(0))
    for n in (1, 3, 4):
        assert ranks(n).run(describe) == [(rank, n, cores, max(1, cores // n)) for rank in range(n)]


def describe_bound(comm: Communicator) -> tuple[int, int, bool]:
    """Every rank bound to a core of its own, as a cluster's launcher does, or all to the first one."""
    allowed = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, {allowed[comm.rank % 2 % len(allowed)]})
        node = Node.of(comm.mpi)
        return node.cores, node.threads, node.oversubscribed
    finally:
        os.sched_setaffinity(0, set(allowed))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_ranks_bound_to_cores_use_those(ranks: Ranks) -> None:
    assert ranks(2).run(describe_bound) == [(2, 1, False)] * 2
    assert ranks(4).run(describe_bound) == [(2, 1, True)] * 4


@pytest.mark.parametrize(("size", "cores", "expected"), [(2, 4, False), (4, 4, False), (5, 4, True), (1, 1, False)])
def test_more_ranks_than_cores_is_oversubscribed(size: int, cores: int, expected: bool) -> None:
    assert Node(0, size, cores, 1).oversubscribed is expected


def test_threads_are_shared_out() -> None:
    before = torch.get_num_threads()
    try:
        Node(0, 2, 6, 3).share_cores()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def wait_for_a_late_rank(comm: Communicator, local_size: int) -> tuple[int, float]:
    """How often a rank slept, and the share of the time that was counted, while it waited for a late rank 0."""
    comm.barrier()
    comm.node = Node(0, local_size, 2, 1)
    sleep, sleeps = time.sleep, []

    def count(seconds: float) -> None:
        sleeps.append(seconds)
        sleep(seconds)

    if comm.rank == 0:
        sleep(0.5)
    time.sleep = count
    began = time.perf_counter()
    try:
        comm.all_reduce(torch.ones(1))
    finally:
        time.sleep = sleep
    return len(sleeps), comm.node.wait_seconds / (time.perf_counter() - began)


def test_a_wait_sleeps_where_there_are_more_ranks_than_cores(ranks: Ranks) -> None:
    _, (sleeps, counted) = ranks(2).run(wait_for_a_late_rank, 4)
    assert sleeps > 0
    assert 0.8 < counted <= 1.0


def test_a_wait_does_not_sleep_where_each_rank_has_a_core(ranks: Ranks) -> None:
    (first, _), (second, counted) = ranks(2).run(wait_for_a_late_rank, 2)
    assert first == second == 0
    assert 0.8 < counted <= 1.0


class Cuda:
    """Stands for torch.cuda on a machine with some GPUs."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.chosen: list[torch.device] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.count)
        monkeypatch.setattr(torch.cuda, "set_device", self.chosen.append)


@pytest.mark.parametrize(("count", "expected"), [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])])
def test_ranks_take_the_gpus_of_their_machine_in_turn(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: Sequence[int]
) -> None:
    cuda = Cuda(count)
    cuda.install(monkeypatch)
    devices = [Node(rank, 4, 8, 2).device(kind) for rank, kind in enumerate(("auto", "cuda", "auto", "cuda"))]
    assert devices == cuda.chosen == [torch.device("cuda", index) for index in expected]
    assert Node(0, 4, 8, 2).device("cpu") == torch.device("cpu")


def test_without_a_gpu_the_cpu_is_used_unless_a_gpu_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(0).install(monkeypatch)
    assert Node(0, 1, 2, 2).device() == torch.device("cpu")
    with pytest.raises(ValueError, match=r"'cuda' was asked for, but PyTorch sees no GPU here: use --device cpu"):
        Node(0, 1, 2, 2).device("cuda")


def test_waiting_for_nothing_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seconds: float) -> Any:
        raise AssertionError("slept")

    monkeypatch.setattr(time, "sleep", refuse)
    Node(0, 4, 2, 1).wait([])
