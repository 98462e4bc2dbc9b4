"""How far a command is: a bar on a terminal, else a line now and then, with the time that is left."""

import sys
import time
from typing import Any

from tqdm import tqdm

from mpi4dl._wording import counted, in_words

QUIET_SECONDS = 10.0


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
        elif self._speaks and time.monotonic() - self._said >= QUIET_SECONDS:
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
