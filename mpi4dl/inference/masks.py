"""Predicted masks, written a few rows at a time; and windows over images larger than the model's input.

Pictures become PNG files whose pixels are the numbers of classes, shown in colours of a palette; of more than 256
classes grey ones of 16 bits; anything else arrays of NumPy.
"""

import struct
import threading
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from io import BufferedIOBase
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl._files import Replacement, map_new, naming
from mpi4dl._palette import of_classes
from mpi4dl._progress import ProgressLine
from mpi4dl._wording import quietly
from mpi4dl.datasets.base import BadImage, DatasetError, FunctionImage, Image, Values
from mpi4dl.datasets.listed import OtherFile
from mpi4dl.datasets.split import Named, in_whole
from mpi4dl.datasets.transform import FITTED, Fit, View
from mpi4dl.geometry import Interval

# Images larger than what a model sees, by windows that overlap: which ones, and each as an image of its own.
#
# image of source px  ->  resized as training images were, or as it is  ->  windows of `frame` px  ->  cores, joined
#
# A window decides its core alone: up to the middle of what it shares with its neighbours. Windows begin at multiples of
# 32 px where they are large enough, so that most models have their grids of features at the same places in all of them.

SHARED = 4  # neighbours share at least a fourth of a window's side
GRID = 32  # px


class WindowInterval(NamedTuple):
    """A window along an axis: where it begins, and the pixels that it decides."""

    start: int
    core: Interval


def windows_along(size: int, frame: int, shared: int | None = None) -> list[WindowInterval]:
    """Windows of `frame` px that cover `size` px, the last one at the end; the cores are all pixels, each once.

    Neighbours share `shared` px, and the last two more; None: a fourth of them, on the grid.
    """
    if size <= frame:
        return [WindowInterval(0, Interval(0, size))]
    step = max(1, frame - (-(-frame // SHARED) if shared is None else shared))
    step = step if shared is not None else step // GRID * GRID or step
    starts = [*range(0, size - frame, step), size - frame]
    middles = [(start + following + frame) // 2 for start, following in pairwise(starts)]
    return [
        WindowInterval(start, Interval(a, b))
        for start, a, b in zip(starts, [0, *middles], [*middles, size], strict=True)
    ]


@dataclass(frozen=True)
class Target:
    """How an image of `source` px is seen by windows of `frame` px: brought to `size` px, by `fit`.

    Windows are counted row by row. `chosen` are the numbers of those that are looked at; None: all. Neighbours share
    `shared` px: see `windows_along`.
    """

    source: tuple[int, ...]
    size: tuple[int, ...]
    frame: tuple[int, ...]
    fit: Fit
    chosen: tuple[int, ...] | None = None
    shared: int | None = None

    @classmethod
    def of(
        cls,
        source: tuple[int, ...],
        frame: tuple[int, ...],
        fit: Fit,
        largest: tuple[int, ...] | None = None,
        beyond: bool = False,
    ) -> "Target":
        """Of an image of this size, for a model that was trained on images of up to `largest` px.

        With `fit` crop, training saw pixels as they are, and so do windows. With resize it saw whole images, resized to
        the frame: so are images up to `largest`, and larger ones are resized as much as `largest` was. If it is not
        known, all images are resized to the frame. With pad, images are padded to the frame.

        `beyond`: windows reach beyond an image that is cropped, so that they decide no pixel at their own sides, where
        convolutions see zeros.
        """

        def side(source: int, frame: int, largest: int) -> int:
            if FITTED[fit].windows:
                return max(frame, source + 2 * (frame // (2 * SHARED) * beyond))
            return max(frame, round(source * frame / largest)) if FITTED[fit].scales else frame

        return cls(source, tuple(map(side, source, frame, source if largest is None else largest)), frame, fit)

    @cached_property
    def intervals(self) -> list[list[WindowInterval]]:
        """The windows along each axis."""
        return [windows_along(size, frame, self.shared) for size, frame in zip(self.size, self.frame, strict=True)]

    @cached_property
    def _starts(self) -> list[int]:
        """Where the image begins in what windows see, along each axis."""
        sides = zip(self.source, self.size, strict=True)
        return [(size - source) // 2 if FITTED[self.fit].windows else 0 for source, size in sides]

    @property
    def num_in_all(self) -> int:
        return prod(map(len, self.intervals))

    @property
    def num_windows(self) -> int:
        return self.num_in_all if self.chosen is None else len(self.chosen)

    def window(self, number: int) -> tuple[WindowInterval, ...]:
        """The window of this number among those that are looked at."""
        return self._at(number if self.chosen is None else self.chosen[number])

    def not_chosen(self) -> Iterator[tuple[WindowInterval, ...]]:
        """The windows that are not looked at."""
        chosen = set(range(self.num_in_all) if self.chosen is None else self.chosen)
        return (self._at(number) for number in range(self.num_in_all) if number not in chosen)

    def _at(self, number: int) -> tuple[WindowInterval, ...]:
        places = np.unravel_index(number, [len(intervals) for intervals in self.intervals])
        return tuple(intervals[int(place)] for intervals, place in zip(self.intervals, places, strict=True))

    def corner(self, intervals: Sequence[WindowInterval]) -> tuple[int, ...]:
        """The upper left corner of a window by `fit` crop, in pixels of the image."""
        return tuple(cut.start - start for cut, start in zip(intervals, self._starts, strict=True))

    def in_tissue(self, cells: npt.NDArray[np.bool_], cell: int) -> "Target":
        """The same by the windows that show tissue, or the first if none does; by `fit` crop.

        `cells` (rows, columns) say of each `cell` x `cell` px of the image whether there is tissue.
        """
        sums = np.pad(cells.cumsum(0, dtype=np.int64).cumsum(1), ((1, 0), (1, 0)))
        ends = []
        for axis, (intervals, frame) in enumerate(zip(self.intervals, self.frame, strict=True)):
            starts = np.array([cut.start for cut in intervals]) - self._starts[axis]
            sides = np.stack([starts // cell, -(-(starts + frame) // cell)])
            ends.append(np.clip(sides, 0, cells.shape[axis]))
        (top, bottom), (left, right) = ends
        counts = sums[np.ix_(bottom, right)] - sums[np.ix_(top, right)]
        counts += sums[np.ix_(top, left)] - sums[np.ix_(bottom, left)]
        found = np.flatnonzero(counts)
        return replace(self, chosen=tuple(found.tolist()) or (0,))

    def places(self) -> list[npt.NDArray[np.int64]]:
        """For each pixel of the image along each axis, which pixel of what windows see shows it."""
        found, sides = [], zip(self.source, self.size, self._starts, strict=True)
        for source, size, start in sides:
            scale = size / source if FITTED[self.fit].scales else 1
            nearest = np.floor((np.arange(source) + 0.5) * scale).astype(np.int64)
            found.append(np.minimum(nearest + start, size - 1))
        return found


def targets_of(model: Any, images: Named, indices: Sequence[int]) -> list[Target]:
    """How a model sees these images, alike on all ranks; slides by windows that show tissue, if it skips glass.

    Ranks find tissue in their shares. An image that cannot be opened keeps its windows, and reading them says what is
    wrong. Collective. Raises Refusal on all ranks if a package is missing.
    """
    comm, frame, targets = model.comm, model.trained.size, []
    for index in indices if comm.rank == 0 else ():
        source = frame
        with suppress(DatasetError):
            source = tuple(images.image(index).size)
        targets.append(Target.of(source, frame, model.fit, model.largest, beyond=model.by_windows))
    found: dict[int, Target] = dict(enumerate(comm.broadcast_object(targets)))
    if model.skips_glass:
        from mpi4dl.datasets.slides.slide import CELL_PX

        whole, mine = in_whole(images)[0], {}
        with comm.together((DatasetError,)), ProgressLine() if comm.rank == 0 else nullcontext(quietly) as tell:
            for n in range(comm.rank, len(found), comm.size):
                tell("finding tissue", n, len(found))
                with suppress(BadImage, OtherFile):
                    slide = images.image(indices[n])
                    mine[n] = found[n].in_tissue(whole.tissue(slide).cells(slide), CELL_PX)
        for of_rank in comm.all_gather_object(mine):
            found |= of_rank
    return [*found.values()]


class Windows:
    """The windows of images as images of their own, in order; `targets` say how each image of `indices` is seen."""

    def __init__(self, images: Named, indices: Sequence[int], targets: Sequence[Target]) -> None:
        self.images, self.indices, self.targets = images, indices, targets
        self.classes, self.channels = images.classes, images.channels
        self._ends = [*accumulate(target.num_windows for target in targets)]
        self._opened = threading.local()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> tuple[int, tuple[WindowInterval, ...], bool]:
        """Of a window: the position of its image, what it covers, and whether it is the last one of that."""
        position = bisect_right(self._ends, index)
        target = self.targets[position]
        number = index - (self._ends[position] - target.num_windows)
        return position, target.window(number), number == target.num_windows - 1

    def name(self, index: int) -> str:
        return self.images.name(self.indices[self.place(index)[0]])

    def label(self, index: int) -> Any:
        return 0

    def image(self, index: int) -> Image:
        """A window. A thread that reads several of one image opens it once. Raises as `images.image`."""
        position, intervals, _ = self.place(index)
        if getattr(self._opened, "position", None) != position:
            self._opened.position = None
            self._opened.image = self.images.image(self.indices[position])
            self._opened.position = position
        whole: Image = self._opened.image
        target = self.targets[position]
        if target.num_in_all == 1:
            return whole
        view = View(target.size, target.fit)

        def read(*space: Interval) -> Values:
            return view.pixels(whole, *(part.shift(cut.start) for part, cut in zip(space, intervals, strict=True)))

        return FunctionImage(target.frame, read, gaps=getattr(whole, "gaps", False))


FOLDER = "masks"
BAND_BYTES = 1 << 24
_PALETTE, _RGB, _GREY = 3, 2, 0  # types of PNG


def band_height(width: int) -> int:
    """How many rows of so many values are written at once."""
    return max(1, BAND_BYTES // max(1, width))


def bases_of(names: Sequence[str], suffix: str) -> list[Path]:
    """Where the masks of these images are, from the folder of masks on, without `suffix`: no two in one place.

    It is the name without the image's own suffix where no other image has the same, or the whole name, or, where
    another image has that, the whole name and a hash. All names together decide, compared without regard to case.
    """
    levels = [0] * len(names)
    while True:
        found = [_base(name, levels[n], n, suffix) for n, name in enumerate(names)]
        keys = [str(base).casefold() for base in found]
        numbers = Counter(keys)
        folders = {str(parent).casefold() for base in found for parent in base.parents}
        clashing = [n for n, key in enumerate(keys) if numbers[key] > 1 or f"{key}{suffix}" in folders]
        if not clashing:
            return found
        groups: dict[str, list[int]] = {}
        for n in clashing:
            groups.setdefault(keys[n], []).append(n)
        for some in groups.values():
            least = min(levels[n] for n in some)
            others = [n for n in some if levels[n] > least]  # which leave the place to those with simpler names
            for n in others or some:
                levels[n] += 1


def _base(name: str, level: int, number: int, suffix: str) -> Path:
    parts = [part for part in Path(name).parts if part not in ("/", "..", "\\")]
    base = Path(*parts)
    if level == 0:
        if base.suffix[1:].isdigit():  # a UID, whose last number is part of it
            return base
        inner = "".join(Path(f"_{suffix}").suffixes[:-1])  # .ome of .ome.tif, which the other file ends in, too
        return base.with_name(base.stem.removesuffix(inner) or base.stem)
    if level == 1:
        return base
    told = sha256(name.encode(errors="surrogateescape")).hexdigest()[:8] if level == 2 else str(number)
    return base.with_name(f"{base.name}-{told}")


def path_of(base: Path, suffix: str, number: int | None = None) -> Path:
    """The file of a mask; of several of an image its number is in the name."""
    return base.with_name(f"{base.name}{'' if number is None else f'.{number}'}{suffix}")


class MappedFile:
    """A file of an array that is written anywhere, and that memory holds no copy of; it is there after `close`.

    `begin(file)` writes the head of the file, behind which the array is. Or `encode(path, array)` makes the file, and
    those `beside` it, of an array that is in another file until then. Raises OSError.
    """

    undefined = False  # outputs that are no numbers: there is no file then

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        begin: Callable[[BufferedIOBase], Any] | None = None,
        encode: Callable[[Path, Any], None] | None = None,
        beside: Sequence[Path] = (),
    ) -> None:
        self.path, self.beside, self._encode = path, beside, encode
        path.parent.mkdir(parents=True, exist_ok=True)
        self._new = Replacement(path if encode is None else path.with_name(f"{path.name}.rows"))
        try:
            with naming(path), self._new.temporary.open("w+b") as file:
                if begin is not None:
                    begin(file)
                self._array: Any = map_new(file, dtype, shape)
        except OSError:
            self._new.drop()
            raise

    def write(self, where: tuple[slice, ...], values: npt.NDArray[Any]) -> None:
        self._array[where] = values

    def close(self) -> None:
        """Write the file. Raises DatasetError too, if a package is missing, or a slide cannot be read."""
        try:
            if self._encode is not None and not self.undefined:
                self._encode(self.path, self._array)
            elif not self.undefined:
                self._array.flush()
                self._new.keep()
        finally:
            self.drop()

    def drop(self) -> None:
        self._array = None
        self._new.drop()


def write_png(path: Path, pixels: npt.NDArray[Any], palette: bytes = b"") -> None:
    """Write pixels (rows, columns), or (rows, columns, 3), of 8 or 16 bits, some rows at a time. Raises OSError."""
    (height, width), depth = pixels.shape[:2], 8 * pixels.itemsize
    kind = _PALETTE if palette else _GREY if pixels.ndim == 2 else _RGB
    with naming(path), Replacement(path) as temporary, temporary.open("wb") as file:

        def chunk(name: bytes, data: bytes) -> None:
            file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))

        file.write(b"\x89PNG\r\n\x1a\n")
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
        if palette:
            chunk(b"PLTE", palette)
        packer, step = zlib.compressobj(), band_height(pixels[0].size)
        for rows in (pixels[top : top + step] for top in range(0, height, step)):
            values = np.ascontiguousarray(rows, f">u{pixels.itemsize}").view(np.uint8).reshape(len(rows), -1)
            if data := packer.compress(np.insert(values, 0, 0, axis=1).tobytes()):  # each row as it is: filter 0
                chunk(b"IDAT", data)
        chunk(b"IDAT", packer.flush())
        chunk(b"IEND", b"")


def png_mask(path: Path, size: tuple[int, ...], num_classes: int) -> MappedFile:
    """A PNG file of numbers below `num_classes`."""
    if num_classes > 256:
        return MappedFile(path, size, np.uint16, encode=write_png)
    return MappedFile(path, size, np.uint8, encode=partial(write_png, palette=of_classes(max(2, num_classes))))


def array_file(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> MappedFile:
    """An .npy file of any number of axes."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    return MappedFile(path, shape, dtype, lambda file: np.lib.format.write_array_header_1_0(file, header))


class StitchedMask:
    """The mask of one image, of the image's own size, from windows that come in any order.

    Each is written where it stands. Where no window was looked at, pixels are of class 0, or of none.

    A class for each pixel, or (`layers`) whether each class is there, each in a file of its own. Values below 0 are
    pixels whose outputs are not numbers. `make(path)` opens another kind of file.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        target: Target,
        classes: Sequence[str],
        layers: int,
        make: Callable[[Path], MappedFile] | None = None,
    ) -> None:
        self.target, self.layers = target, layers
        self.places = target.places()
        self.counts = np.zeros(len(classes), np.int64)
        self.undefined = 0
        size, depth = target.source, 2 if layers else len(classes)
        if make is None and len(size) == 2:
            make = partial(png_mask, size=size, num_classes=depth)
        elif make is None:
            make = partial(array_file, shape=size, dtype=np.uint8 if depth <= 256 else np.int32)
        self.files = [*map(make, paths)]

    def add(self, intervals: Sequence[WindowInterval], where: Sequence[slice], values: npt.NDArray[Any]) -> None:
        """Some of a window: `values` (layers, *space), or (*space), which stand at `where` in it."""
        taken, places = [], []
        for cut, part, at in zip(intervals, where, self.places, strict=True):
            first = cut.start + part.start
            own = max(cut.core.start, first), min(cut.core.stop, cut.start + part.stop)
            if own[0] >= own[1]:
                return
            places.append(slice(*np.searchsorted(at, own).tolist()))
            taken.append(at[places[-1]] - first)
        step = band_height(prod(map(len, taken[1:])))
        for start in range(0, len(taken[0]), step):
            shown, top = np.ix_(taken[0][start : start + step], *taken[1:]), places[0].start + start
            for number, file in enumerate(self.files):
                found = (values[number] if self.layers else values)[shown]
                self._count(number, found)
                file.write((slice(top, top + len(found)), *places[1:]), found)

    def _count(self, number: int, found: npt.NDArray[Any]) -> None:
        undefined = found < 0
        if undefined.any():
            self.undefined += int(undefined.sum())
            found = found[~undefined]
        if self.layers:
            self.counts[number] += int(found.sum())
        else:
            self.counts += np.bincount(found.reshape(-1), minlength=len(self.counts))

    def close(self) -> None:
        """The files are there when this returns, unless some outputs were not numbers: then there are none."""
        if not self.layers:  # pixels without windows are not written, and are 0 in the file
            self.counts[0] += prod(self.target.source) - int(self.counts.sum()) - self.undefined
        for file in self.files:
            file.drop() if self.undefined else file.close()

    def drop(self) -> None:
        for file in self.files:
            file.drop()


class FailingLater:
    """Goes on without doing what failed once, for a rank that others wait for; `settle` then raises it."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def do(self, action: Callable[[], Any]) -> Any:
        if self.error is not None:
            return None
        try:
            return action()
        except OSError as error:
            self.error = error
            return None

    def settle(self) -> None:
        if self.error is not None:
            raise self.error
