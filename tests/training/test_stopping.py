"""Signals that ask a run to stop: remembered while it trains, ignored once it has stopped, else left as they were."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from mpi4dl.runs.stopping import SIGNALS, StopSignals
from tests.pool.zygote import ROOT, python


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that came to the handlers from before."""
    heard: list[int] = []
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in SIGNALS}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_a_second_ctrl_c_ends_at_once_but_one_that_comes_twice_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.9, 101.1])
    monkeypatch.setattr("mpi4dl.runs.stopping.time.monotonic", lambda: next(times))
    before = signal.getsignal(signal.SIGINT)
    try:
        with StopSignals() as signals:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                assert signals.caught == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_jobs_in_the_background_are_not_stopped_by_ctrl_c_but_by_other_signals() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.caught is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.caught == "SIGTERM"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_before_training_leaves_no_traceback() -> None:
    program = "import os, signal; from mpi4dl.comm.failure import die_by_ctrl_c; die_by_ctrl_c()\n"
    program += "os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
