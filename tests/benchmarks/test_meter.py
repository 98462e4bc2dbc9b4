"""The meter of training steps: CPU time within waits is no work, and imports are no memory of a model."""

import time
from mmap import mmap

import pytest
import torch

from benchmarks.common.meter import ClockedWaits, Meter
from mpi4dl.comm import Communicator
from mpi4dl.comm.requests import Waits
from tests.pool.ranks import Ranks


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_waits_within_waits_count_once() -> None:
    inner = Waits()
    waits = ClockedWaits(inner)
    with waits:
        assert inner.since > 0
        with waits:
            spin(0.02)
        spin(0.02)
    assert inner.since == 0
    assert 0.04 <= waits.cpu_seconds < 0.06  # the inner one is not counted again


def test_work_is_what_is_left_without_waits() -> None:
    meter = Meter(torch.device("cpu"), None)
    kept: list[torch.Tensor] = []

    def step() -> None:  # in memory that nobody had before, whatever other tests left to the allocator
        kept.append(torch.frombuffer(mmap(-1, 20 << 20), dtype=torch.float32).fill_(1))
        spin(0.02)
        with meter.waits:
            spin(0.03)

    found = meter.measure(step, 2)
    assert found["cpu_seconds"] - found["work_seconds"] >= 0.06
    assert found["work_seconds"] >= 0.04
    assert 40 << 20 <= found["peak_bytes"] < 60 << 20
    assert found["peak_bytes_of_ranks"] == [found["peak_bytes"]]


def ranks_body(comm: Communicator) -> tuple[dict[str, float], float]:
    before = comm.node.waits
    meter = Meter(torch.device("cpu"), comm)
    try:
        found = meter.measure(lambda: spin(0.02 * (1 + comm.rank)) or comm.barrier(), 1)
        return found, meter.waits.cpu_seconds
    finally:
        comm.node.waits = before


def test_ranks_that_wait_are_idle(ranks: Ranks) -> None:
    (found, _), (same, _) = ranks(2).run(ranks_body)
    assert found == same
    assert 0.06 <= found["work_seconds"] <= found["cpu_seconds"]
    assert found["idle_seconds"] == pytest.approx(2 * found["seconds"] - found["work_seconds"])
