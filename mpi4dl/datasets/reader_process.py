"""Child processes that read what may end a process, such as scanners' formats by OpenSlide: one costs one image.

Some C libraries end the whole process at some damaged files. So a child process, `child_program.py`, reads with one of
them. It answers one thread at a time, and waits for the next one: children take a moment to start.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpi4dl._wording import to_install
from mpi4dl.datasets.base import BadImage, DatasetError, Pixels
from mpi4dl.datasets.colour import in_strips, over_white
from mpi4dl.geometry import Interval

LEAVING_SECONDS = 5.0  # for a child in the middle of a tile that nobody wants any more

KEPT_BYTES = 1 << 24  # of the memory in which answers come

_PROGRAM = Path(__file__).with_name("child_program.py")


class _Child:
    """A process that answers one question after the other, by one library."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.memory = os.memfd_create(library)
        # -P: what lies beside the script is no package of its. A session of its own: signals are for the parent.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), library, str(self.memory)],
            pass_fds=[self.memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Which ends it with the thread, or the interpreter.
        self.end = weakref.finalize(self, _end, self.process, self.memory)
        assert self.process.stdout is not None
        missing = json.loads(self.process.stdout.readline() or '"it ended as it began"')
        if missing:
            raise DatasetError(f"{library} cannot be used here: {missing}")


_idle: dict[str, list[_Child]] = {}  # those that nobody asks at the moment, by their library


def ask(library: str, path: Path, wanted: Any = None) -> tuple[dict[str, Any], bytearray]:
    """The answer of a child about a file, and the bytes behind it; see `child_program.py`.

    The answer has "error" if there are none. Raises BadImage if the process died over it.
    """
    idle, child = _idle.setdefault(library, []), None
    while child is None or child.process.poll() is not None:  # a copy of this process has none that live
        try:
            child = idle.pop()  # in one step, as other threads do so too
        except IndexError:
            child = _Child(library)
    try:
        stdin: Any = child.process.stdin
        stdout: Any = child.process.stdout
        stdin.write(json.dumps([str(path.absolute()), wanted]).encode() + b"\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        content = bytearray(answer["bytes"])
        with open(child.memory, "rb", closefd=False) as file:  # which reads more than 2 GiB too
            file.seek(0)
            if file.readinto(content) != len(content):
                raise EOFError
        if len(content) > KEPT_BYTES:
            os.ftruncate(child.memory, 0)
    except BaseException as error:
        code = child.end()  # it may have half of an answer
        if not isinstance(error, OSError | ValueError | EOFError):
            raise
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        if code == -signal.SIGPROF:
            raise BadImage(path, f"is damaged: {library} reads it without end") from error
        raise BadImage(path, f"cannot be decoded: {library} ended its process {how}, it is damaged") from error
    idle.append(child)
    return answer, content


def _end(process: "subprocess.Popen[bytes]", memory: int) -> int:
    """Let a child go, which ends when nobody can ask it any more; its exit code."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    os.close(memory)
    try:
        return process.wait(LEAVING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# Read boxes of slide scanners' formats (SVS, NDPI, MRXS, ...) with OpenSlide, in processes that may die.

GENERIC = "generic-tiff"  # OpenSlide's name for TIFF of nobody's
# Where a box is not opaque there are four bytes for each pixel; strips keep what is alive beside the result small.
STRIP_ROWS = 1024
ALIGNED_PX = 512  # each side of the boxes that are read of levels which are no whole number of times smaller


def vendor_of(path: Path) -> str | None:
    """The scanner's format of a file as OpenSlide names it, such as aperio; None for other files, or without OpenSlide.

    Raises BadImage.
    """
    if not has_openslide():
        return None
    found = ask("openslide", path, "vendor")[0].get("vendor")
    return None if found == GENERIC else found


def has_openslide() -> bool:
    return find_spec("openslide") is not None


def needs_openslide(path: Path, what: str) -> DatasetError:
    """The error where a file is `what` only OpenSlide reads, and it is not installed."""
    remedy = to_install("openslide-python", "openslide-bin")
    return DatasetError(f"{path}: reading {what} needs openslide; run {remedy}")


def open_with_openslide(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a slide: `levels` (width, height) each, `downsamples`, `properties`; and its ICC profile.

    Raises BadImage, and DatasetError without OpenSlide.
    """
    if not has_openslide():
        raise needs_openslide(path, path.suffix)
    answer, profile = ask("openslide", path)
    if "error" in answer:
        reason = "the file is damaged, or its extension is wrong"
        if path.suffix.lower() == ".dcm":
            reason = "it reads DICOM in RGB of 8 bits, uncompressed or as JPEG or JPEG 2000"
        raise BadImage(path, f"is no slide that OpenSlide can open ({answer['error']}): {reason}")
    return answer, bytes(profile)


class OpenSlideLevel:
    """One level of a slide, as RGB bytes; what the scanner left out is white. `size` is (height, width).

    `read` raises BadImage where OpenSlide cannot decode a tile.
    """

    def __init__(self, path: Path, level: int, size: tuple[int, int], downsample: float) -> None:
        self.size = size
        self._path, self._level, self._downsample = path, level, downsample

    def read(self, *space: Interval) -> Pixels:
        rows, cols = space
        if self._downsample == int(self._downsample) or rows.empty or cols.empty:
            return in_strips(self._strip, rows, cols, STRIP_ROWS)
        # OpenSlide places boxes by pixels of level 0, and blends pixels of a level that lie between: always as here.
        sides = [Interval(0, side) for side in self.size]
        grid = [[each.intersect(side) for each in of.blocks(ALIGNED_PX)] for of, side in zip(space, sides, strict=True)]
        pixels = np.concatenate(
            [np.concatenate([self._strip(down, across) for across in grid[1]], 1) for down in grid[0]]
        )
        (top, *_), (left, *_) = grid
        return pixels[slice(*rows.shift(-top.start)), slice(*cols.shift(-left.start))]

    def _strip(self, rows: Interval, cols: Interval) -> Pixels:
        corner = round(cols.start * self._downsample), round(rows.start * self._downsample)
        answer, content = ask("openslide", self._path, (*corner, self._level, cols.length, rows.length))
        if "error" in answer:
            raise BadImage(self._path, f"cannot be decoded: {answer['error']}")
        found = np.frombuffer(content, np.uint8).reshape(rows.length, cols.length, -1)
        return found if found.shape[2] == len("RGB") else over_white(found[..., :3], found[..., 3])
