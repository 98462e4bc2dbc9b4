"""What a machine's ranks share: cores, GPUs, and a wait that sleeps where there are more ranks than cores."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.comm.node import ALARM_SECONDS, SHORTEST_NAP_SECONDS, Node, nap_seconds, quota
from mpi4dl.comm.requests import Calls, Condition
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


@pytest.mark.parametrize(
    ("variable", "asked", "threads"), [("", None, 3), ("2", None, 2), ("2,1", 5, 5), ("many", None, 3), ("0", None, 3)]
)
def test_threads_are_shared_out_unless_the_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch, variable: str, asked: int | None, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before, node = torch.get_num_threads(), Node(0, 2, 6, 3)
    try:
        node.share_cores(asked)
        assert torch.get_num_threads() == threads
        assert node.chose_threads is (threads == 3)
    finally:
        torch.set_num_threads(before)


def wait_for_a_late_rank(comm: Communicator, local_size: int) -> tuple[float, float]:
    """The CPU seconds per second that a rank spent, and the share of the time that was counted, waiting for rank 0."""
    comm.barrier()
    comm.node = Node(0, local_size, 2, 1)
    if comm.rank == 0:
        time.sleep(1.0)
    began, used = time.perf_counter(), time.thread_time()
    comm.all_reduce(torch.ones(1))
    seconds = time.perf_counter() - began
    return (time.thread_time() - used) / seconds, comm.node.wait_seconds / seconds


@pytest.mark.parametrize("local_size", [2, 4])
def test_a_long_wait_leaves_its_core_to_others(ranks: Ranks, local_size: int) -> None:
    """Also where every rank has a core: another program, or a second job, may need it."""
    _, (used, counted) = ranks(2).run(wait_for_a_late_rank, local_size)
    assert used < 0.3
    assert 0.8 < counted <= 1.0


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_a_wait_of_ten_seconds_takes_few_looks_and_ends_soon_after_the_message(oversubscribed: bool) -> None:
    waited, looks = 1e-3, 0
    while waited < 10.0:
        nap = nap_seconds(waited, oversubscribed)
        assert nap <= ALARM_SECONDS
        assert nap < max(SHORTEST_NAP_SECONDS, min(0.051 * waited, max(5e-3, 0.0051 * waited))) * 1.001
        waited, looks = waited + nap, looks + 1
    assert looks < 2000  # of some 40 us each


GROUPS = {
    "nothing": ({}, ["0::/"], float("inf")),
    "version 2": ({"cpu.max": "150000 100000"}, ["0::/"], 1.5),
    "no limit": ({"cpu.max": "max 100000"}, ["0::/"], float("inf")),
    "a group above": ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, ["0::/a/b"], 3.0),
    "the path of a host": ({"cpu.max": "50000 100000"}, ["0::/kubepods/pod7"], 0.5),
    "version 1": (
        {"cpu,cpuacct/job/cpu.cfs_quota_us": "400000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
        ["4:memory:/job", "3:cpu,cpuacct:/job"],
        4.0,
    ),
    "version 1, no limit": (
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "cpu.max": ""},
        ["3:cpu:/", "0::/"],
        float("inf"),
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_quota_of_a_container_is_known(tmp_path: Path, name: str) -> None:
    files, lines, expected = GROUPS[name]
    for file, text in files.items():
        path = tmp_path / "sys" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "proc").write_text("\n".join(lines) + "\n")
    assert quota(tmp_path / "proc", tmp_path / "sys") == expected


def test_cores_are_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr("mpi4dl.comm.node.quota", lambda: 1.7)
    node = Node.of(MPI.COMM_SELF)
    assert (node.cores, node.threads) == (1, 1)


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
    with pytest.raises(ValueError, match=r"'cuda' was asked for, but PyTorch sees no GPU here: use `device` cpu"):
        Node(0, 1, 2, 2).device("cuda")


def test_waiting_for_nothing_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seconds: float) -> Any:
        raise AssertionError("slept")

    monkeypatch.setattr(time, "sleep", refuse)
    Node(0, 4, 2, 1).wait(Calls([]))


def test_an_alarm_ends_a_wait() -> None:
    def alarm(seconds: float) -> None:
        raise TimeoutError(f"{seconds > 0}")

    for local_size in (1, 4):
        node = Node(0, local_size, 2, 1)
        with pytest.raises(TimeoutError, match="True"):
            node.wait(Condition(lambda: False), alarm)
        assert not node.waits.since
