"""mpi4dl.trainer.patience: a job may be as slow as it has shown to be, and first what nobody could know."""

from typing import Any

import pytest

from mpi4dl.trainer import patience
from mpi4dl.trainer.patience import TIMES, Patience


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

    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "Watchdog", Watchdog)
    return clock


def test_the_first_of_each_kind_of_work_has_several_times_the_limit(clock: Clock) -> None:
    patient = Patience(10.0)
    for work in ("step", "saving", "validation"):
        patient.begin(work)
        patient.feed()
    assert clock.limits == [10.0 * TIMES] * 7
    patient.begin("step")
    assert clock.limits[-1] == 10.0
    patient.stop()
    assert clock.limits[-1] == -1.0


def test_later_ones_have_the_limit_or_several_times_the_longest_pause_of_their_kind(clock: Clock) -> None:
    patient = Patience(10.0)

    def work(kind: str, *pauses: float) -> list[float]:
        clock.limits.clear()
        patient.begin(kind)
        for pause in pauses:
            clock.now += pause
            patient.feed()
        return list(clock.limits)

    work("step", 1.0, 50.0, 2.0)
    assert work("validation", 200.0) == [TIMES * 10.0] * 2
    assert work("step", 1.0, 60.0) == [TIMES * 50.0] * 3
    assert work("step") == [TIMES * 60.0]
    assert work("validation") == [TIMES * 200.0]
    assert work("step") == [TIMES * 60.0]


@pytest.mark.parametrize("pauses", [(), (5.0, 5000.0)])
def test_without_a_limit_there_is_none(clock: Clock, pauses: Any) -> None:
    patient = Patience(0.0)
    for _ in range(2):
        patient.begin("step")
        for pause in pauses:
            clock.now += pause
            patient.feed()
    assert set(clock.limits) == {0.0}
