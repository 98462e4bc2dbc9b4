"""benchmarks.generate: who is let in when, what waits come to, flags, and a whole benchmark of a few requests."""

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.arrivals import ALONE, CONTINUOUS, STATIC, WAYS, Clock, Door, Request, drawn, waits
from benchmarks.generate import as_table, contestants, draw, draw_precisions, parse, percentile, summarise
from benchmarks.generate import table_of_precisions as of_precisions
from mpi4dl.text.requests import Event, Sampling
from tests.benchmarks.checks import assert_picture, assert_refused
from tests.pool.zygote import ROOT, python


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
def test_who_is_let_in_when(way: str, together: list[list[int]]) -> None:
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


def test_percentiles() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.5)) == (50, 99, 3)


def measured(way: str, rate: float | None, seconds: float) -> dict[str, Any]:
    wait = {"first": [0.1, 0.3], "between": [0.01] * 99 + [0.5], "whole": [1.0, 2.0]}
    return {"way": way, "rate": rate, "seconds": seconds, "wall": 9.0, "cpu": 2.0, "tokens": 100, "alike": 1.0} | wait


def test_speeds_are_compared_with_one_after_another_at_the_same_rate(tmp_path: Path) -> None:
    flags = ["--ranks", "1,2", "--rates", "4"]
    found = contestants(parse(flags), flags)
    assert found[1].arguments[2:-2] == flags
    assert [(each.ranks, each.arguments[-1]) for each in found] == [(1, "fp32"), (2, "fp32")]
    seconds = {ALONE: 8.0, STATIC: 4.0, CONTINUOUS: 2.0}
    for each in found:
        results = [measured(way, rate, seconds[way] * (rate or 1)) for rate in (None, 4.0) for way in WAYS]
        each.answers += [{"results": results}, {"results": [one | {"seconds": 8.0} for one in results]}]
    rows = summarise(found)
    assert [(row["ranks"], row["rate"], row["way"]) for row in rows[2:4]] == [(1, None, CONTINUOUS), (1, 4.0, ALONE)]
    assert [row["times"] for row in rows[:3]] == [1.0, 1.5, 2.5]
    assert (rows[0]["between_p50"], rows[0]["between_p99"], rows[0]["cpu_milliseconds"]) == (10, 10, 20)
    assert "continuous             1  at once        31" in as_table(rows)
    draw(rows, "a title").savefig(tmp_path / "drawn.png")
    assert_picture(tmp_path / "drawn.png")


def test_precisions_have_their_own_table(tmp_path: Path) -> None:
    found = contestants(parse(["--precision", "fp32,int4"]), [])
    assert [(each.name, each.ranks, each.arguments[-1]) for each in found] == [("fp32", 1, "fp32"), ("int4", 1, "int4")]
    for each in found:
        results = [measured(ALONE, None, 4.0), measured(CONTINUOUS, None, 1.0)]
        each.answers += [{"results": results, "bytes": 3 << 19, "nats": 2.0, "bits_per_byte": 1.25}]
    rows = summarise(found)
    assert "fp32  1.5        2.0000       1.2500              25" in of_precisions(rows)
    draw_precisions(rows, "a title").savefig(tmp_path / "drawn.png")
    assert_picture(tmp_path / "drawn.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "4k"], "write them as 1,2,4"),
        (["--rates", "0"], "rates are above 0"),
        (["--ranks", "0"], "a job has 1 rank at least"),
        (["--batch", "0"], "--batch is 0, but must be at least 1"),
        (["--precision", "fp32,int2"], "int2 is none of fp32, bf16, int8, int4"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(parse, flags, message, capsys)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "num_rows"), [(["--ranks", "1,2", "--rates", "50"], 12), (["--precision", "fp32,int8"], 4)]
)
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path, flags: list[str], num_rows: int) -> None:
    """Tokens and their probabilities are the same by every way, to the bit: with two ranks to a sum too."""
    out = tmp_path / "generate"
    command = [python(), "-m", "benchmarks.generate", *flags, "--requests", "3", "--rounds", "1", "--clock", "cpu"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{out}.json").read_text())["results"]["contestants"]
    assert len(rows) == num_rows
    assert {row["alike"] for row in rows} == {1.0}
    assert_picture(f"{out}.png")
