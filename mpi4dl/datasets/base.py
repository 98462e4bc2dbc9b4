"""The interface of datasets of labelled images, and the two errors of reading images.

An image has rows and columns, or a depth before them, and is a volume then, or columns alone, a sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mpi4dl._wording import counted, printable, to_install
from mpi4dl.geometry import Interval

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.uint8] | npt.NDArray[np.float32]


IGNORED = -100  # the default of `ignore_index` in PyTorch's losses


class DatasetError(ValueError):
    """A source of images or text cannot be used: the message says what was asked, what is expected, and what to do.

    Names of files and folders are in it as `printable` shows them.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class BadImage(DatasetError):
    """One image file cannot be decoded; the others may be fine.

    `path` is the file and `reason` says what is wrong with it.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


class blaming:
    """Whatever goes wrong in here becomes a `BadImage` of this file, but for what is no fault of its.

    Readers and codecs stumble over damaged bytes in every way that there is: OSError, SyntaxError, struct.error,
    ZeroDivisionError, MemoryError for a size that nothing has, RecursionError, and errors of their own.
    """

    def __init__(self, path: Path, what: str = "cannot be decoded") -> None:
        self._path, self._what = path, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, DatasetError):
            return
        if isinstance(error, MemoryError):
            raise BadImage(self._path, "needs more memory than there is: it is damaged, or too large") from error
        if isinstance(error, OSError) and error.strerror:
            raise BadImage(self._path, f"cannot be read: {error.strerror}") from error
        reason = str(error).strip().partition("\n")[0]
        raise BadImage(self._path, f"{self._what}: {reason or type(error).__name__}") from error


def package(name: str, what: str, *packages: str) -> Any:
    """A module that reads `what`, and is of these packages. Raises DatasetError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        module = name.partition(".")[0]
        raise DatasetError(f"{what} needs {module}; run {to_install(*packages or (module,))}") from error


class Image(Protocol):
    """One image, or a mask, of which any box can be read. It is made for one reading thread and dropped after use."""

    @property
    def size(self) -> tuple[int, ...]:
        """Of each axis of space, such as (height, width)."""

    def read(self, *space: Interval) -> npt.NDArray[Any]:
        """The pixels of a box inside the image, (rows, columns, channels): uint8, or float32 whose range is 0 to 1.

        Of a mask they are the classes of pixels, (rows, columns), int64; -100 is none.

        Raises:
            BadImage: the file cannot be decoded.
        """


Slices = tuple[slice, ...]


class Opened(NamedTuple):
    """A file of a volume whose header was read: its shape, what gives slices of all dims, and the type that it stores.

    `scaled`: values have units of their own, which they are read in, and so do not depend on the type.
    `channel`: which dim has channels, if the file says it.
    `affine`: the place of each voxel (x, y, z), in mm; None: unknown.
    `axes`: to which sides of a patient columns, rows and slices run, such as RAS: right, front, head; empty: unknown.
    """

    shape: Sequence[int]
    read_part: Callable[[Slices], npt.NDArray[Any]]
    dtype: Any
    scaled: bool = False
    axes: str = ""
    channel: int | None = None
    affine: npt.NDArray[np.float64] | None = None


class Dataset(Protocol):
    """Labelled images by index. Every rank has the same ones in the same order, and reads only its own boxes.

    A dataset of your own is any object that answers these, and its images the two questions of `Image`:

        from pathlib import Path
        import numpy as np

        class Scans:
            classes = ("healthy", "tumour")
            channels = 3

            def __init__(self, root):
                self.paths = sorted(Path(root).glob("*/*.npy"))

            def __len__(self):
                return len(self.paths)

            def label(self, index):
                return self.classes.index(self.paths[index].parent.name)

            def image(self, index):
                return Scan(np.load(self.paths[index], mmap_mode="r"))

        class Scan:
            def __init__(self, pixels):
                self.pixels, self.size = pixels, pixels.shape[:2]

            def read(self, rows, cols):
                return self.pixels[rows.start : rows.stop, cols.start : cols.stop]

    `--dataset my_code.py:Scans --dataset-options root=scans` trains on them. It may have more: `name(index)`, a name
    that does not depend on other samples, so that the split for validation is stable; `patient(index)`, a name of those
    whose samples stay together; `task` (classify, multilabel, regress, survival, segment), if labels do not show it.
    """

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def channels(self) -> int: ...

    def __len__(self) -> int: ...

    def label(self, index: int) -> Any:
        """The label of image `index`: its class, as an index into `classes`, without opening a file; or a number or
        several, as a sequence, array or tensor; or a mask, of two dims or more: (..., height, width) of the image as it
        is read, which is shown cropped, resized and flipped with it. A mask may also be an object with `size` and
        `read`, as an image, whose boxes are integers (rows, columns).

        Raises:
            BadImage: there is a file of it, and it cannot be opened.
        """

    def image(self, index: int) -> Image:
        """Image `index`, its header read and its pixels not.

        Raises:
            BadImage: the file cannot be opened.
        """


class Whole:
    """A dataset that has all its samples, of which subsets are parts: the answers of one whose samples are no files."""

    root: Path | None = None  # the folder that names of samples begin in
    of_slides = False  # whether samples are slides, which results of them record
    in_memory = False  # whether each rank has all pixels, which ranks compare

    def lists(self) -> tuple[Any, ...]:
        """All lists of files that reading samples may open."""
        return ()

    def name(self, index: int) -> str:
        """A name that stays a sample's when others come or go; for want of another its number."""
        return str(index)


def task_of(dataset: Any) -> str:
    """The task of a dataset's labels: one class per image, unless it declares another."""
    return getattr(dataset, "task", "classify")


def drawn(dataset: Any, key: tuple[int, ...]) -> Any:
    """The dataset whose samples are as they are drawn by a key, such as (seed, epoch, repeat); most draw nothing."""
    return dataset.drawn(key) if hasattr(dataset, "drawn") else dataset


class LastMade:
    """What was made last by key, up to so `many` or so much `weight`; threads share it, other processes begin anew."""

    def __init__(self, many: float = inf, weight: Callable[[Any], int] | None = None) -> None:
        self._lock, self._many, self._weight, self._made = Lock(), many, weight, dict[Any, Any]()

    def __call__(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            made = self._made.pop(key, self)
        made = make() if made is self else made
        with self._lock:
            self._made[key] = made
            while len(self._made) > 1 and self._many < (
                sum(map(self._weight, self._made.values())) if self._weight else len(self._made)
            ):
                del self._made[next(iter(self._made))]
        return made

    def __reduce__(self) -> Any:
        return LastMade, (self._many, self._weight)


@dataclass(eq=False, slots=True)
class FunctionImage:
    """An image of this size, or a mask, whose boxes a function reads; `axes` and `affine` as of `Opened`.

    `gaps`: pixels that are not-a-number have no data.
    """

    size: tuple[int, ...]
    read: Callable[..., npt.NDArray[Any]]
    axes: str = ""
    affine: npt.NDArray[np.float64] | None = None
    gaps: bool = False


class WholeImage:
    """An image whose pixels are all in an array: (height, width, channels), or with other axes of space."""

    def __init__(self, pixels: npt.NDArray[Any]) -> None:
        self._pixels = pixels

    @property
    def size(self) -> tuple[int, ...]:
        return self._pixels.shape[:-1]

    def read(self, *space: Interval) -> Values:
        return unit_values(self._pixels[tuple(slice(*interval) for interval in space)])


def unit_values(values: npt.NDArray[Any], as_they_are: bool = False) -> Values:
    """Bytes as they are; else float32: integers over the largest of their type, and floating point as it is.

    With `as_they_are` integers, bytes too, become floating point of the same value.

    Raises:
        ValueError: values that are no real numbers.
    """
    if values.dtype == np.uint8 and not as_they_are:
        return values
    if values.dtype.kind not in "biuf":
        raise ValueError(f"holds values of type {values.dtype}: expected integers or floating point")
    scale = np.iinfo(values.dtype).max if values.dtype.kind in "iu" and not as_they_are else 1
    return (values / scale).astype(np.float32) if scale > 1 else values.astype(np.float32)


def finite(path: Path, values: Values, gaps: bool = False) -> Values:
    """The values of a file as they are. Raises BadImage if some are infinite, or, without `gaps`, not-a-number."""
    if values.dtype.kind == "f":
        wrong = np.isinf(values) if gaps else ~np.isfinite(values)
        if wrong.any():
            told = f"has {counted(int(wrong.sum()), 'value')} of {values[wrong][0]}, which is no finite number"
            raise BadImage(path, f"{told}: write another one there, such as by numpy.nan_to_num")
    return values
