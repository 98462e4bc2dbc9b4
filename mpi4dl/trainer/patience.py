"""How long a rank may go without a sign of life before the job counts as stuck: as long as this job has shown it needs.

    start, step, step, ..., saving, validation, step, ...     kinds of work; signs of life are that one begins, and in
                                                              it each action of a stage, or step of the start

`hang_timeout` is the limit of all of it. Nobody knows beforehand how long the first of a kind takes, of a huge image on
a slow machine: it has all of that time. From then on several times the longest pause of its kind is enough, but not
less than SETTLED_SECONDS.
"""

import time

from mpi4dl.comm.guard import Watchdog

TIMES = 6.0
SETTLED_SECONDS = 600.0


class Patience:
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

    def _note(self) -> None:
        now = time.monotonic()
        self._pause, self._since = max(self._pause, now - self._since), now

    def _watch(self) -> None:
        self._watchdog.seconds = self.limit
        self._watchdog.feed()

    def stop(self) -> None:
        self._watchdog.stop()
