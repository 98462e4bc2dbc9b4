"""mpi4dl.runs.stopping: signals that ask a run to stop, and how long a rank may come no further."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mpi4dl.runs import stopping
from mpi4dl.runs.stopping import SETTLED_SECONDS, SIGNALS, TIMES, HangTimeout, StopSignals
from tests.pool.zygote import ROOT, python


@contextmanager
def handled(handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """Signals come to a handler from before the run."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that came to the handlers from before."""
    heard: list[int] = []
    with handled(lambda number, _: heard.append(number)):
        yield heard


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_by_its_name_and_those_that_follow_do_nothing(
    heard: list[int], number: signal.Signals
) -> None:
    with StopSignals() as signals:
        assert signals.caught is None
        os.kill(os.getpid(), number)
        assert signals.caught == number.name
    for again in SIGNALS:
        os.kill(os.getpid(), again)
    assert heard == []


def test_without_a_signal_all_is_left_as_it_was(heard: list[int]) -> None:
    with StopSignals():
        pass
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert heard == [*SIGNALS]


def test_a_second_ctrl_c_ends_at_once_but_one_that_comes_twice_does_not(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 100.9, 101.1])
    monkeypatch.setattr("mpi4dl.runs.stopping.time.monotonic", lambda: next(times))
    with StopSignals() as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.caught == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_jobs_in_the_background_are_not_stopped_by_ctrl_c_but_by_other_signals() -> None:
    with handled(signal.SIG_IGN), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.caught is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.caught == "SIGTERM"


def test_ctrl_c_before_training_leaves_no_traceback() -> None:
    program = "import os, signal; from mpi4dl.comm.failure import die_by_ctrl_c; die_by_ctrl_c()\n"
    program += "os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


class Clock:
    """Time as the test has it, and the limits that the watchdog was given with each feeding, -1 at its end."""

    def __init__(self) -> None:
        self.now, self.limits = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def work(self, patient: HangTimeout, kind: str, *pauses: float) -> list[float]:
        """A rank works, and comes further after each pause: the limits that it has meanwhile."""
        self.limits.clear()
        patient.begin(kind)
        for pause in pauses:
            self.now += pause
            patient.feed()
        return list(self.limits)


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
    assert clock.limits == [seconds]
    assert [clock.work(patient, kind, 0.0) for kind in ("step", "saving", "validation")] == [[seconds] * 2] * 3
    assert clock.work(patient, "step") == [min(seconds, SETTLED_SECONDS)]
    patient.stop()
    assert clock.limits[-1] == -1.0


def test_later_ones_have_several_times_the_longest_pause_of_their_kind(clock: Clock) -> None:
    patient = HangTimeout(3600.0)
    clock.work(patient, "step", 1.0, 150.0, 2.0)
    assert clock.work(patient, "validation", 2000.0) == [3600.0] * 2
    assert clock.work(patient, "step", 1.0, 160.0) == [TIMES * 150.0] * 3
    assert clock.work(patient, "step") == [TIMES * 160.0]
    assert clock.work(patient, "validation") == [3600.0]
    assert clock.work(patient, "step") == [TIMES * 160.0]


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
def test_without_a_limit_there_is_none(clock: Clock, pauses: tuple[float, ...]) -> None:
    patient = HangTimeout(0.0)
    for _ in range(2):
        assert set(clock.work(patient, "step", *pauses)) == {0.0}
