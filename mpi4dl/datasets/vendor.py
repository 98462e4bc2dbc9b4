"""Read boxes of slide scanners' formats (SVS, NDPI, MRXS, ...) with OpenSlide, in processes that may die.

libopenslide, and the C libraries below it, end the whole process at some damaged files. So each thread that reads has
a child process, `openslide_child.py`, do it: one that dies costs one image, and not the job.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpi4dl.datasets.base import BadImage, DatasetError, Pixels
from mpi4dl.datasets.colour import over_white
from mpi4dl.geometry import Interval

# OpenSlide hands out four bytes per pixel; strips keep what is alive beside the result small.
STRIP_ROWS = 1024
BYTES_PER_PIXEL = 4
LEAVING_SECONDS = 5.0  # for a child in the middle of a tile that nobody wants any more

_CHILD = Path(__file__).with_name("openslide_child.py")
_of_thread = threading.local()


class OpenSlideImage:
    """A slide at its full resolution, as RGB bytes; what the scanner left out is white.

    Raises:
        BadImage: OpenSlide does not recognise the file, or cannot decode a tile of it.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("openslide") is None:
            remedy = "run pip install openslide-python openslide-bin"
            raise DatasetError(f"{path}: reading {path.suffix} needs openslide: {remedy}")
        self._path = path
        answer, _ = _child().ask(path)
        if "error" in answer:
            reason = "the file is damaged, or its extension is wrong"
            raise BadImage(path, f"is no slide that OpenSlide can open ({answer['error']}): {reason}")
        self.width, self.height = answer["size"]

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        pixels = np.empty((rows.length, cols.length, 3), np.uint8)
        if pixels.size == 0:
            return pixels
        for top in range(rows.start, rows.stop, STRIP_ROWS):
            height = min(STRIP_ROWS, rows.stop - top)
            answer, content = _child().ask(self._path, (cols.start, top, cols.length, height))
            if "error" in answer:
                raise BadImage(self._path, f"cannot be decoded: {answer['error']}")
            samples = np.frombuffer(content, np.uint8).reshape(height, cols.length, BYTES_PER_PIXEL)
            pixels[top - rows.start : top - rows.start + height] = over_white(samples[..., :3], samples[..., 3])
        return pixels


class _Child:
    """A process that answers, one after the other, what the size of a slide is, and what is in a box of it."""

    def __init__(self) -> None:
        # -P: what lies beside the script is no package of its. A session of its own: signals are for the parent.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.end = weakref.finalize(self, _end, self.process)  # which ends it with the thread, or the interpreter
        assert self.process.stdout is not None
        missing = json.loads(self.process.stdout.readline() or '"it ended as it began"')
        if missing:
            raise DatasetError(f"openslide cannot be used here: {missing}")

    def ask(self, path: Path, box: tuple[int, int, int, int] | None = None) -> tuple[dict[str, Any], bytearray]:
        """The size of a slide, or the RGBA bytes of a box of it; "error" is in the answer if there are none.

        Raises:
            BadImage: the process died over it.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        content = bytearray(0 if box is None else box[2] * box[3] * BYTES_PER_PIXEL)
        try:
            stdin.write(json.dumps([str(path.absolute()), box]).encode() + b"\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline())
            view = memoryview(content)
            while len(view) and "error" not in answer:
                count = stdout.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise EOFError
                view = view[count:]
        except (OSError, ValueError, EOFError) as error:
            del _of_thread.child
            code = self.end()
            how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
            raise BadImage(path, f"cannot be decoded: OpenSlide ended its process {how}, it is damaged") from error
        return answer, content


def _child() -> _Child:
    if not hasattr(_of_thread, "child"):
        _of_thread.child = _Child()
    child: _Child = _of_thread.child
    return child


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Let a child go, which ends when nobody can ask it any more; its exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        return process.wait(LEAVING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
