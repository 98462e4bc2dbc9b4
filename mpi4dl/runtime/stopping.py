"""A run that is told to stop finishes its step and saves: SIGTERM from a batch system, or SIGUSR1 before its limit."""

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers, as `caught`, the name of a signal that asks this process to stop, while in its context."""

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
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
