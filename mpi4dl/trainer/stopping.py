"""A run that is told to stop finishes its step and saves: SIGTERM from a batch system, SIGUSR1 before its limit.

Ctrl-C does the same; a second one ends the run at once.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_SECONDS = 1.0  # one Ctrl-C may come twice: from the terminal, and from mpirun, which had it too


class Stopped(Exception):
    """A signal asks the run to stop: it saves, and ends well. All ranks raise it together."""


class StopSignals:
    """Remembers, as `caught`, the name of a signal that asks this process to stop, while in its context.

    Once there was one, all are ignored from the end of the context on: who has stopped as asked is about to leave, and
    must not be killed on the way by a sender who asks again. Ctrl-C stays ignored where it was, as in jobs that a shell
    runs in the background.

    Raises:
        KeyboardInterrupt: a second Ctrl-C, wherever the process is.
    """

    def __init__(self) -> None:
        self.caught: str | None = None
        self._interrupted = float("inf")  # when the first Ctrl-C came
        self._before: dict[signal.Signals, Any] = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._interrupted > SAME_SECONDS:
                raise KeyboardInterrupt
            self._interrupted = min(self._interrupted, now)

    def __enter__(self) -> "StopSignals":
        heard = SIGNALS if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else SIGNALS[:-1]
        self._before = {number: signal.signal(number, self._remember) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.caught else signal.SIG_DFL if before is None else before)
