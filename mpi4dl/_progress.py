"""Progress of commands: a line of the terminal that changes, a bar, or a line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from mpi4dl._wording import counted, in_words

QUIET_SECONDS = 10.0  # between two lines of a file or a pipe
TERMINAL_SECONDS = 0.5
CLEAR = "\r\x1b[K"

Tell = Callable[[str, int, int], None]  # what is done, and how much of how much, 0 of 0 where nobody can know


def quietly(doing: str, done: int = 0, total: int = 0) -> None:
    """Tell nobody."""


class ProgressLine:
    """Within `with ProgressLine() as progress:` a thread prints what `progress(doing, done, total)` said last.

    It prints to standard error, so that the output of the command stays as it is.
    """

    def __init__(self, stream: TextIO | None = None, seconds: float | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._seconds = (TERMINAL_SECONDS if self._terminal else QUIET_SECONDS) if seconds is None else seconds
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
        while not self._over.wait(self._seconds):
            line = f"mpi4dl: {self._doing}, {time.monotonic() - self._began:.0f} s"
            self._print(f"{CLEAR}{line}" if self._terminal else f"{line}\n")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(text)
            self._stream.flush()


# How far a command is: a bar on a terminal, else a line now and then, with the time that is left.

IMAGES_QUIET_SECONDS = 10.0


class ProgressOfImages:
    """Of `total` images; on rank 0, others say nothing."""

    def __init__(self, total: int, speaks: bool) -> None:
        self.total, self.done, self.bad, self._speaks = total, 0, 0, speaks
        self._began = self._said = time.monotonic()
        self._bar: Any = None
        if speaks and sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="image", file=sys.stderr, dynamic_ncols=True)

    def advance(self, done: int, bad: int) -> None:
        self.done, self.bad = self.done + done, self.bad + bad
        if self._bar is not None:
            self._bar.update(done)
        elif self._speaks and time.monotonic() - self._said >= IMAGES_QUIET_SECONDS:
            self._said = time.monotonic()
            print(self.line(self._said - self._began), flush=True)

    def line(self, seconds: float) -> str:
        rate = self.done / max(seconds, 1e-9)
        left = in_words((self.total - self.done) / rate) if self.done else "an unknown time"
        bad = f", {self.bad} of them bad" if self.bad else ""
        return f"{self.done} of {counted(self.total, 'image')}{bad}, {rate:.3g} images/s, {left} left"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
