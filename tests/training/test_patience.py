"""mpi4dl.runs.stopping: a job may take as long as is said, and less once it has shown that it needs less."""

from typing import Any

import pytest

from mpi4dl.runs import stopping
from mpi4dl.runs.stopping import SETTLED_SECONDS, TIMES, HangTimeout


class Clock:
    """Time as the test has it, and the limits that the watchdog was given with each feeding."""

    def __init__(self) -> None:
        self.now, self.limits = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Watchdog:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds
            self.feed()

        def feed(self) -> None:
            clock.limits.append(self.seconds)

        def stop(self) -> None:
            clock.limits.append(-1.0)

    monkeypatch.setattr(stopping, "time", clock)
    monkeypatch.setattr(stopping, "Watchdog", Watchdog)
    return clock


@pytest.mark.parametrize("seconds", [18.0, 1800.0])
def test_no_work_has_more_than_the_limit_and_the_first_of_a_kind_has_all_of_it(clock: Clock, seconds: float) -> None:
    patient = HangTimeout(seconds)
    for work in ("step", "saving", "validation"):
        patient.begin(work)
        patient.feed()
    assert clock.limits == [seconds] * 7
    patient.begin("step")
    assert clock.limits[-1] == min(seconds, SETTLED_SECONDS)
    patient.stop()
    assert clock.limits[-1] == -1.0


def test_later_ones_have_several_times_the_longest_pause_of_their_kind(clock: Clock) -> None:
    patient = HangTimeout(3600.0)

    def work(kind: str, *pauses: float) -> list[float]:
        clock.limits.clear()
        patient.begin(kind)
        for pause in pauses:
            clock.now += pause
            patient.feed()
        return list(clock.limits)

    work("step", 1.0, 150.0, 2.0)
    assert work("validation", 2000.0) == [3600.0] * 2
    assert work("step", 1.0, 160.0) == [TIMES * 150.0] * 3
    assert work("step") == [TIMES * 160.0]
    assert work("validation") == [3600.0]
    assert work("step") == [TIMES * 160.0]


def test_a_rank_that_waits_for_others_is_not_watched(clock: Clock) -> None:
    """And its waiting counts for no kind of work."""
    patient = HangTimeout(3600.0)
    for _ in range(2):
        with patient.working("slide"):
            clock.now += 150.0
            patient.feed()
            clock.now += 10.0
        assert clock.limits[-1] == -1.0
        clock.now += 3000.0
    with patient.working("slide"):
        assert clock.limits[-1] == TIMES * 150.0


@pytest.mark.parametrize("pauses", [(), (5.0, 5000.0)])
def test_without_a_limit_there_is_none(clock: Clock, pauses: Any) -> None:
    patient = HangTimeout(0.0)
    for _ in range(2):
        patient.begin("step")
        for pause in pauses:
            clock.now += pause
            patient.feed()
    assert set(clock.limits) == {0.0}
