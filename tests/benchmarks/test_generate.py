"""benchmarks.generate: who is admitted when, waits, and speeds beside one after another."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.common.arrivals import ALONE, CONTINUOUS, STATIC, WAYS, Clock, Door, Request, drawn, waits
from benchmarks.common.results import table
from benchmarks.generate import COLUMNS, contestants, draw, summarise
from mpi4dl.text.batcher import Event
from mpi4dl.text.options import Sampling
from tests.benchmarks.checks import assert_picture, options_of


def test_arrivals_are_random_and_lengths_are_the_same_at_every_rate() -> None:
    slow, fast, at_once = (drawn(2000, rate, 50, 64, 0) for rate in (2.0, 8.0, None))
    pauses = [later.arrival - sooner.arrival for sooner, later in pairwise(slow)]
    assert fmean(pauses) == pytest.approx(1 / 2, rel=0.1)
    assert fmean(pause > 1 / 2 for pause in pauses) == pytest.approx(0.368, abs=0.03)  # exp(-1): no memory
    assert fast[-1].arrival == pytest.approx(slow[-1].arrival / 4)
    assert {request.arrival for request in at_once} == {0.0}
    assert [r[1:] for r in slow] == [r[1:] for r in fast] == [r[1:] for r in at_once]
    assert all(4 <= len(r.prompt) <= 32 and 4 <= r.num_tokens <= 32 and max(r.prompt) < 50 for r in slow)
    assert drawn(3, 2.0, 50, 64, 1) != slow[:3]


class Steps:
    """A batcher of which a step takes a second, and gives each request that runs a token."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch, self.time, self.number = max_batch, 0.0, 0
        self.waiting: list[tuple[int, int, Callable[[Event], None]]] = []
        self.running: list[tuple[int, int, Callable[[Event], None]]] = []
        self.together: list[list[int]] = []
        self.stopping = False

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, on_event: Callable[[Event], None]) -> int:
        self.waiting.append((self.number, sampling.max_tokens, on_event))
        self.number += 1
        return self.number - 1

    def stop(self, drain: bool) -> None:
        self.stopping = drain

    def run(self) -> None:
        while self.running or self.waiting or not self.stopping:
            room = self.max_batch - len(self.running)
            self.running, self.waiting = self.running + self.waiting[:room], self.waiting[room:]
            self.time += 1
            self.together.append([number for number, _, _ in self.running])
            step, self.running = self.running, [(n, left - 1, hear) for n, left, hear in self.running if left > 1]
            for number, left, hear in step:
                hear(Event(number, 7, "", "length" if left == 1 else None, -1.0))


@pytest.mark.parametrize(
    ("way", "together"),
    [
        (ALONE, [[0], [0], [0], [1], [2], [2], [3]]),
        (STATIC, [[0, 1], [0], [0], [2], [2], [3]]),
        (CONTINUOUS, [[0, 1], [0, 2], [0, 2], [3]]),
    ],
)
def test_who_is_admitted_when(way: str, together: list[list[int]]) -> None:
    """Two places: a third request comes in the first second, a fourth when all others have long ended."""
    requests = [Request(at, (1,), n) for at, n in ((0.0, 3), (0.0, 1), (0.5, 2), (50.0, 1))]
    batcher: Any = Steps(1 if way == ALONE else 2)
    door = Door(batcher, way, requests, 2, Clock(lambda: batcher.time))
    door.let_in()
    batcher.run()
    assert batcher.together == together
    assert [len(came) for came in door.times] == [3, 1, 2, 1]
    assert door.times[3] == [51.0]  # the pause before it was skipped
    found = waits(requests, door.times)
    assert found.first[0] == 1
    assert found.between == [1.0] * 3
    assert found.whole[2] == door.times[2][1] - 0.5


def measured(way: str, rate: float | None, seconds: float) -> dict[str, Any]:
    wait = {"first": [0.1, 0.3], "between": [0.01] * 99 + [0.5], "whole": [1.0, 2.0]}
    return {"way": way, "rate": rate, "seconds": seconds, "wall": 9.0, "cpu": 2.0, "tokens": 100, "alike": 1.0} | wait


def test_speeds_are_beside_one_after_another_at_the_same_rate(tmp_path: Path) -> None:
    found = contestants(options_of("generate", "--ranks 1,2 --rates 4"))
    assert [(each.ranks, each.arguments[-1]) for each in found] == [(1, '"fp32"'), (2, '"fp32"')]
    seconds = {ALONE: 8.0, STATIC: 4.0, CONTINUOUS: 2.0}
    for each in found:
        results = [measured(way, rate, seconds[way] * (rate or 1)) for rate in (None, 4.0) for way in WAYS]
        each.answers += [{"results": results}, {"results": [one | {"seconds": 8.0} for one in results]}]
    rows = summarise(found)
    assert [(row["ranks"], row["rate"], row["way"]) for row in rows[2:4]] == [(1, None, CONTINUOUS), (1, 4.0, ALONE)]
    assert [row["times"] for row in rows[:3]] == [1.0, 1.5, 2.5]
    assert (rows[0]["between_p50"], rows[0]["between_p99"], rows[0]["cpu_milliseconds"]) == (10, 10, 20)
    assert table(rows, COLUMNS).splitlines()[3].split()[:5] == ["continuous", "1", "at", "once", "31"]
    draw(rows, "a title").savefig(tmp_path / "drawn.png")
    assert_picture(tmp_path / "drawn.png")
