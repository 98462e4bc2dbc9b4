"""Stop signals that end a run after its step; and how long a rank may be silent before the job counts as stuck.

Ctrl-C does the same; a second one ends the run at once.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mpi4dl.comm.failure import Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_SECONDS = 1.0  # one Ctrl-C may come twice: from the terminal, and from mpirun, which had it too


class Stopped(Exception):
    """A signal asks the run to stop: it saves, and ends well. All ranks raise it together."""


class StopSignals:
    """Remembers, as `caught`, the name of a signal that asks this process to stop, while in its context.

    After a signal, all are ignored from the end of the context on: a run that has stopped must not be killed on its way
    out by a repeated signal. Ctrl-C stays ignored where it was, as in jobs that a shell runs in the background.

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

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.caught else signal.SIG_DFL if before is None else before)


# How long a rank may go without a sign of life before the job counts as stuck: as long as this job has shown it needs.
#
#     start, step, step, ..., saving, validation, step, ...     kinds of work; signs of life are that one begins, and in
#                                                               it each action of a stage, or step of the start
#
# `hang_timeout` is the limit of all of it. Nobody knows beforehand how long the first of a kind takes, of a huge image
# on a slow machine: it has all of that time. From then on several times the longest pause of its kind is enough, but
# not less than SETTLED_SECONDS.

TIMES = 6.0
SETTLED_SECONDS = 600.0


class HangTimeout:
    """Feeds a watchdog whose limit is `seconds` (`hang_timeout`), or less where less is enough; 0: it never bites."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._longest: dict[str, float] = {}  # pause, of each kind of work that was done once
        self._work, self._pause, self._since = "start", 0.0, time.monotonic()
        self._watchdog = Watchdog(self.limit)

    @property
    def limit(self) -> float:
        """Seconds that the next sign of life may take; 0: any."""
        longest = self._longest.get(self._work, float("inf"))
        return min(self.seconds, max(SETTLED_SECONDS, TIMES * longest))

    def begin(self, work: str) -> None:
        """Work of some kind begins, and what was done before is done."""
        self._note()
        self._longest[self._work] = max(self._pause, self._longest.get(self._work, 0.0))
        self._work, self._pause = work, 0.0
        self._watch()

    def feed(self, doing: str = "") -> None:
        """A sign of life in the work under way, whatever it is doing."""
        self._note()
        self._watch()

    @contextmanager
    def working(self, work: str) -> Iterator[None]:
        """This rank works by itself in here, and gives signs of life. Outside it is not watched.

        A rank that waits for slower ones is silent for as long as these take: each has a watchdog of its own.
        """
        self._since = time.monotonic()
        self.begin(work)
        try:
            yield
            self._note()
        finally:
            self.stop()

    def _note(self) -> None:
        now = time.monotonic()
        self._pause, self._since = max(self._pause, now - self._since), now

    def _watch(self) -> None:
        self._watchdog.seconds = self.limit
        self._watchdog.feed()

    def stop(self) -> None:
        self._watchdog.stop()
