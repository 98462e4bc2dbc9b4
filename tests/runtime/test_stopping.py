"""Signals that ask a run to stop: remembered while it trains, and left as they were afterwards."""

import os
import signal

import pytest

from mpi4dl.runtime.stopping import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_by_its_name(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        with StopSignals() as signals:
            assert signals.caught is None
            os.kill(os.getpid(), number)
            assert signals.caught == number.name
        assert heard == []
        os.kill(os.getpid(), number)
        assert heard == [number]
    finally:
        signal.signal(number, before)
