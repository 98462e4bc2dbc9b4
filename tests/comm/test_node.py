"""A rank's place on its machine: how it waits, how many threads it takes, which GPU it gets."""

import os
import time

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.comm.node import Node
from tests.pool.ranks import Ranks


def look_around(comm: Communicator) -> tuple[int, int, int, int, set[int]]:
    node = Node.of(comm.mpi)
    return node.local_rank, node.local_size, node.cores, node.threads, os.sched_getaffinity(0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_ranks_of_a_machine_share_its_cores(ranks: Ranks, num_ranks: int) -> None:
    places = ranks(num_ranks).run(look_around)
    cores = len(set().union(*(affinity for *_, affinity in places)))
    assert [(rank, size) for rank, size, *_ in places] == [(rank, num_ranks) for rank in range(num_ranks)]
    for _, _, seen, threads, affinity in places:
        assert seen == cores
        assert threads == max(1, min(len(affinity), cores // num_ranks))


@pytest.mark.parametrize(("local_size", "oversubscribed"), [(1, False), (2, False), (3, True)])
def test_more_ranks_than_cores_oversubscribe_a_machine(local_size: int, oversubscribed: bool) -> None:
    assert Node(0, local_size, cores=2, threads=1).oversubscribed is oversubscribed


def test_pytorch_takes_this_ranks_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    Node(1, 2, cores=6, threads=3).share_cores()
    assert asked == [3]


class FakeGpus:
    """What torch.cuda answers on a machine with `count` GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.current: torch.device | None = None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)

    def set_device(self, device: torch.device) -> None:
        self.current = device


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_ranks_take_gpus_in_turn_and_share_them_where_they_are_fewer(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gpus, chosen = FakeGpus(monkeypatch, 2), []
    for local_rank in range(5):
        chosen.append(Node(local_rank, 5, 8, 1).device(kind))
        assert gpus.current == chosen[-1]
    assert chosen == [torch.device("cuda", index) for index in (0, 1, 0, 1, 0)]


def test_the_cpu_is_used_where_it_is_asked_for_or_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(monkeypatch, 2)
    assert Node(1, 2, 8, 4).device("cpu") == torch.device("cpu")
    FakeGpus(monkeypatch, 0)
    assert Node(1, 2, 8, 4).device("auto") == torch.device("cpu")
    assert gpus.current is None


def test_asking_for_a_gpu_where_there_is_none_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"'cuda' was asked for, but PyTorch sees no GPU here: use --device cpu"):
        Node(0, 1, 8, 8).device("cuda")


def wait_for_a_late_rank(comm: Communicator, cores: int) -> tuple[float, float, float]:
    """Seconds of waiting, counted by a node of that many cores and by a clock, and the rank that was received."""
    comm.node = Node(comm.rank, comm.size, cores, 1)
    message = torch.zeros(3)
    comm.barrier()
    counted, begin = comm.node.wait_seconds, time.perf_counter()
    if comm.rank == 0:
        time.sleep(0.4)
        for other in range(1, comm.size):
            comm.send(message + other, other)
    else:
        comm.recv(message, 0)
    return comm.node.wait_seconds - counted, time.perf_counter() - begin, float(message[0])


@pytest.mark.parametrize("cores", [1, 64])
def test_waiting_is_counted_and_ends_when_the_message_is_there(ranks: Ranks, cores: int) -> None:
    """With more ranks than cores, and with enough of them."""
    late, *waiting = ranks(3).run(wait_for_a_late_rank, cores)
    assert late[0] < 0.3
    for rank, (counted, passed, received) in enumerate(waiting, start=1):
        assert received == rank
        assert 0.3 < counted <= passed


def count_sleeps(comm: Communicator, cores: int) -> int:
    naps: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr("mpi4dl.comm.node.time.sleep", naps.append)
        wait_for_a_late_rank(comm, cores)
    return len(naps)


def test_waiting_ranks_sleep_only_where_others_need_their_cores(ranks: Ranks) -> None:
    assert ranks(2).run(count_sleeps, 1)[1] > 0
    assert ranks(2).run(count_sleeps, 2)[1] == 0


def wait_for_nothing(comm: Communicator) -> float:
    comm.node = Node(0, 1, 1, 1)
    comm.node.wait([])
    return comm.node.wait_seconds


def test_waiting_for_nothing_returns_at_once(ranks: Ranks) -> None:
    assert ranks(1).run(wait_for_nothing)[0] < 0.1
