"""The pool of ranks: results come back, failures show whose they are, a hang is ended and explained."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpi4dl.comm import Communicator
from tests.pool.ranks import Pool, Ranks, RanksFailed, Team


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of this file's own, since it is broken here again and again."""
    pool = Pool(2)
    yield pool
    pool.stop()


def place(comm: Communicator, factor: int) -> tuple[int, int, int, float]:
    total = comm.all_reduce(torch.tensor(float(comm.rank * factor)))
    return comm.rank, comm.size, os.getpid(), float(total)


def test_each_rank_returns_its_own_result_from_the_same_warm_processes(ranks: Ranks) -> None:
    first = [ranks(n).run(place, 10) for n in (1, 2, 3, 4)]
    for n, results in enumerate(first, start=1):
        assert [(rank, size) for rank, size, _, _ in results] == [(rank, n) for rank in range(n)]
        assert {total for *_, total in results} == {10.0 * sum(range(n))}
    assert [pid for _, _, pid, _ in ranks(4).run(place, 1)] == [pid for _, _, pid, _ in first[3]]
    assert os.getpid() not in {pid for _, _, pid, _ in first[3]}


def untidy(comm: Communicator) -> tuple[torch.dtype, float]:
    found = torch.get_default_dtype(), float(torch.rand(()))
    torch.set_default_dtype(torch.float64)
    return found


def test_every_body_finds_the_same_seed_and_default_dtype(ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = torch.float32, float(torch.rand((), dtype=torch.float32))
    assert ranks(2).run(untidy) == [expected] * 2
    assert ranks(2).run(untidy) == [expected] * 2


def fail_on(comm: Communicator, failing: tuple[int, ...], then_wait: bool) -> None:
    if comm.rank in failing:
        raise KeyError("the failing line")
    if then_wait:
        comm.recv(torch.zeros(1), failing[0])


def test_a_failure_of_all_ranks_is_shown_once_and_keeps_the_pool(pool: Pool) -> None:
    team = Team(pool, 2, 30.0)
    team.run(place, 1)
    starts = pool.starts
    with pytest.raises(RanksFailed, match="ranks 0, 1 of 2:") as caught:
        team.run(fail_on, (0, 1), False)
    assert str(caught.value).count("KeyError: 'the failing line'") == 1
    assert str(caught.value).count('raise KeyError("the failing line")') == 1
    assert "rank.py" not in str(caught.value)
    team.run(place, 1)
    assert pool.starts == starts


@pytest.mark.exhaustive
def test_a_failure_of_one_rank_does_not_wait_for_the_others_to_time_out(pool: Pool) -> None:
    team = Team(pool, 2, 30.0)
    team.run(place, 1)
    starts = pool.starts
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2:.*the failing line.*rank 0 of 2 did not return.*in recv"):
        team.run(fail_on, (1,), True)
    assert [size for _, size, *_ in team.run(place, 1)] == [2, 2]
    assert pool.starts == starts + 1


def alive(pid: int) -> bool:
    """Whether a process runs: one that was killed but not yet waited for has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


def hang(comm: Communicator) -> None:
    comm.recv(torch.zeros(1), 1 - comm.rank)


def test_a_hang_shows_the_stack_of_every_rank_and_restarts_the_pool(pool: Pool) -> None:
    team = Team(pool, 2, 30.0)
    team.run(place, 1)
    pids, starts = list(pool._pids.values()), pool.starts
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    with pytest.raises(RanksFailed, match=r"ranks 0, 1 of 2 did not return") as caught:
        Team(pool, 2, 1.0).run(hang)
    assert str(caught.value).count("in hang") == 2
    assert not any(alive(pid) for pid in pids)
    assert [size for _, size, *_ in team.run(place, 1)] == [2, 2]
    assert pool.starts == starts + 1


def die(comm: Communicator) -> None:
    print("last words", flush=True)
    os._exit(3)


@pytest.mark.exhaustive
def test_ranks_that_die_are_reported_with_what_they_printed(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)the process ended.*last words"):
        Team(pool, 2, 30.0).run(die)
    assert [size for _, size, *_ in Team(pool, 2, 30.0).run(place, 1)] == [2, 2]


@pytest.mark.exhaustive
def test_a_pool_of_which_a_rank_was_killed_between_two_bodies_starts_anew(pool: Pool) -> None:
    team = Team(pool, 2, 30.0)
    _, (*_, pid, _) = team.run(place, 1)
    os.kill(pid, signal.SIGKILL)
    assert pool._process is not None
    pool._process.wait(30.0)
    assert [size for _, size, *_ in team.run(place, 1)] == [2, 2]


def exits(comm: Communicator) -> None:
    sys.exit(3)


def warns(comm: Communicator) -> None:
    warnings.warn("deprecated", DeprecationWarning, stacklevel=1)


def asserts(comm: Communicator) -> None:
    found = torch.tensor([1.5, comm.size])
    assert found.sum() == 7


def leaves_a_message(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.isend(torch.zeros(1), 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (exits, "SystemExit: 3"),
        (asserts, r"found = tensor\(\[1.5"),
        (warns, "DeprecationWarning: deprecated"),
        (leaves_a_message, "was never received"),
    ],
)
def test_what_else_counts_as_a_failure(pool: Pool, body: object, message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        Team(pool, 2, 30.0).run(body)  # type: ignore[arg-type]


def split_often(comm: Communicator) -> None:
    for _ in range(100):
        comm.split(comm.rank % 2).split(0)
        comm.subset([comm.rank])


def test_communicators_that_a_body_splits_off_are_freed(ranks: Ranks) -> None:
    for _ in range(10):
        ranks(2).run(split_often)
