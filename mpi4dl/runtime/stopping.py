"""A run that is told to stop finishes its step and saves: SIGTERM from a batch system, or SIGUSR1 before its limit."""

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers, as `caught`, the name of a signal that asks this process to stop, while in its context.

    Once there was one, both are ignored from the end of the context on: who has stopped as asked is about to leave, and
    must not be killed on the way by a sender who asks again.
    """

    def __init__(self) -> None:
        self.caught: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number).name

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.caught else signal.SIG_DFL if before is None else before)
