"""Progress of commands: a line of the terminal that changes, a bar, or a line now and then."""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from mpi4dl._wording import counted, duration

QUIET_SECONDS = 10.0  # between two lines of a file or a pipe
FIRST_SECONDS = 4.0  # before the first of them
TERMINAL_SECONDS = 0.5
CLEAR = "\r\x1b[K"


class StartClock:
    """The seconds of what follows one another from the start of this process."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        if sys.platform == "linux":
            began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # in ticks since the boot
            self._last -= time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
        self._found: list[str] = []

    def end(self, name: str) -> None:
        """What went on since the end of the one before was this."""
        now = time.monotonic()
        self._found.append(f"{name} {now - self._last:.2f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._found)


class ProgressLine:
    """Within `with ProgressLine() as progress:` a thread prints what `progress(doing, done, total)` said last.

    It prints to standard error, so that the output of the command stays as it is, from `first` seconds on; None: soon.
    """

    def __init__(self, stream: TextIO | None = None, seconds: float | None = None, first: float | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._seconds = (TERMINAL_SECONDS if self._terminal else QUIET_SECONDS) if seconds is None else seconds
        self._first = min(FIRST_SECONDS, self._seconds) if first is None else first
        self._began = time.monotonic()
        self._doing = "starting"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        self._doing = f"{doing}: {done} of {total}" if total else doing

    def __enter__(self) -> "ProgressLine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._terminal:
            self._print(CLEAR)

    def _tell(self) -> None:
        seconds = self._first
        while not self._over.wait(seconds):
            seconds = self._seconds
            line = f"mpi4dl: {self._doing}, {time.monotonic() - self._began:.0f} s"
            self._print(f"{CLEAR}{line}" if self._terminal else f"{line}\n")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(text)
            self._stream.flush()


class ProgressBar:
    """A bar of so many steps on standard error, if that is a terminal; else `is_due` says when to print a line instead.

    `shown`: on this rank; others print nothing.
    """

    def __init__(
        self, total: int, unit: str, done: int = 0, shown: bool = True, seconds: float = QUIET_SECONDS
    ) -> None:
        self._shown, self._seconds, self._said = shown, seconds, time.monotonic()
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=done, unit=unit, file=sys.stderr, dynamic_ncols=True)

    def to(self, done: int) -> None:
        """So many steps are done."""
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    @property
    def is_due(self) -> bool:
        """Whether there is no bar, and nothing was printed for a while."""
        return self._shown and self.bar is None and time.monotonic() - self._said >= self._seconds

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._said = time.monotonic()
        if self.bar is None:
            print(line, flush=True)
        else:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class ProgressOfImages:
    """Of `total` images, or of another `unit`, with what is done with them; on rank 0, others say nothing."""

    def __init__(self, total: int, speaks: bool, unit: str = "image", doing: str = "", many: str | None = None) -> None:
        self.total, self.done, self.bad, self.unit, self.many = total, 0, 0, unit, many or f"{unit}s"
        self._doing = f"{doing}: " if doing else ""
        self._began = time.monotonic()
        self._bar = ProgressBar(total, unit, shown=speaks)
        self.close = self._bar.close

    def advance(self, done: int, bad: int) -> None:
        self.bad += bad
        self.to(self.done + done)

    def to(self, done: int) -> None:
        """So many are done."""
        self.done = done
        self._bar.to(done)
        if self._bar.is_due:
            self._bar.say(self.line(time.monotonic() - self._began))

    def line(self, seconds: float) -> str:
        rate = self.done / max(seconds, 1e-9)
        left = duration((self.total - self.done) / rate) if self.done else "an unknown time"
        bad = f", {self.bad} of them bad" if self.bad else ""
        count = f"{self._doing}{self.done} of {counted(self.total, self.unit, self.many)}"
        return f"{count}{bad}, {rate:.3g} {self.many}/s, {left} left"
