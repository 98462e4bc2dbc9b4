"""Signals that ask a run to stop: remembered while it trains, ignored once it has stopped, else left as they were."""

import os
import signal
from collections.abc import Iterator

import pytest

from mpi4dl.runtime.stopping import SIGNALS, StopSignals


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
