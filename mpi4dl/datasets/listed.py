"""Files of images or volumes that one rank lists for all, and which folders are classes, training or validation.

On a rank that sees another file system, a path may be another picture.
"""

import os
import stat
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import open_regular
from mpi4dl.datasets.base import BadImage, DatasetError, Image, Whole
from mpi4dl.datasets.files import (
    DICOM,
    ZARR_SUFFIXES,
    Channels,
    StoredPicture,
    is_dicom,
    is_zarr,
    open_image,
    open_stored_picture,
)
from mpi4dl.datasets.series import files_of
from mpi4dl.datasets.tiff import Unsupported, has_bands
from mpi4dl.datasets.volumes import VolumeFile, open_volume

# Which folders of a source of images are its classes, and which are its parts for training and for validation.

LAYOUT = "expected <folder>/<class>/*.png, or <folder>/train/<class>/*.png and <folder>/val/<class>/*.png"

TRAINING = frozenset(("train", "training", "trainset", "trn"))
VALIDATION = frozenset(("val", "valid", "validate", "validation", "valset", "dev", "eval"))
TEST = frozenset(("test", "testing", "testset", "tst"))
PARTS = TRAINING | VALIDATION | TEST


class Parts(NamedTuple):
    """The names of the folders to train on and to validate with, and of those beside them that are not read."""

    training: str
    validation: str
    unused: tuple[str, ...]


def parts(root: Path) -> Parts | None:
    """The parts of a folder of images, by the names that people give them; None if its folders are classes.

    Without a folder for validation, one for tests is that.

    Raises:
        DatasetError: no folder, or one that has several such parts, or only some, so that nobody can say which it is.
    """
    names = subfolders(root)
    training, validation, test = ([n for n in names if n.casefold() in kind] for kind in (TRAINING, VALIDATION, TEST))
    held_out = validation or test
    if training and held_out:
        for found in (training, held_out):
            if len(found) > 1:
                raise DatasetError(
                    f"{root}: has {' and '.join(found)}, which may be the same part of the images: leave one of them"
                )
        chosen = (training[0], held_out[0])
        return Parts(*chosen, tuple(name for name in names if name not in chosen))
    found = [*training, *validation, *test]
    inside = {name: subfolders(root / name) for name in found}
    holds_classes = any({*own} & {*names} or (name in training and len(own) > 1) for name, own in inside.items())
    if holds_classes or len(training) > 1 or (len(names) > 1 and len(found) == len(names)):
        raise DatasetError(
            f"{root}: has {', '.join(found)}, which are no classes, and together no parts to train on and to validate "
            f"with: {LAYOUT}"
        )
    return None


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the folders of a part, or of a source that has none: its classes, in order.

    Raises:
        DatasetError: `root` is no folder, or has the parts inside each class.
    """
    found = subfolders(root)
    for name in found:
        inside = [n for n in subfolders(root / name) if n.casefold() in PARTS]
        if any(n.casefold() in TRAINING for n in inside) and len(inside) > 1:
            raise DatasetError(f"{root / name}: has {' and '.join(inside)} inside a class; {LAYOUT}")
    return found


def subfolders(root: Path) -> tuple[str, ...]:
    """The names of the folders in `root` that are not hidden, in order.

    Raises:
        DatasetError: `root` is no folder.
    """
    if not root.is_dir():
        what = "no such folder"
        if root.exists():
            what = "is a file, not a folder of images, nor a table, which ends in .csv (in Excel, save it as CSV UTF-8)"
        raise DatasetError(f"{root}: {what}; {LAYOUT}")
    found = (entry.name for entry in root.iterdir() if entry.is_dir() and not is_zarr(entry))
    return tuple(sorted(filter(visible, found)))


def visible(name: str) -> bool:
    return not name.startswith(".")


PROBE_BYTES = 4096
UNKNOWN = -1
LOOKED_AT = 8  # files, from the first to the last
MRXS = ".mrxs"  # a file beside a folder of its name, which has the pixels
METADATA_OF_ZARR = ("zarr.json", ".zarray", ".zattrs", ".zgroup")
_SAME_FILES = "all ranks must see the same files, and they must stay as they are"


class File(NamedTuple):
    """A file of the list: its path from the folder on, with slashes, its size, or -1, and what is to be learnt."""

    name: str
    num_bytes: int
    label: Any = None


class OtherFile(DatasetError):
    """The file at a path is not the listed one."""


class ListedFiles(Whole):
    """Files below `root`; with `volumes`, each is one. They have as many channels as the first that can be read.

    Attributes:
        values: what values of volumes are read as, or the depth of pictures as they are stored, which all have alike;
            None of pictures in colours.
        bands: which channels of pictures are read as they are stored, all if empty; None of pictures in colours.

    Raises:
        DatasetError: values are of several kinds.
    """

    root: Path
    remarks: tuple[str, ...] = ()
    noun = "image"

    def __init__(self, root: Path, files: Sequence[File], volumes: bool = False, channels: Channels = "rgb") -> None:
        self.root, self.files, self.volumes = root, tuple(files), volumes
        self._prints: dict[int, int | None] = {}
        self._expects, self._reader = False, "here"
        self.bands: tuple[int, ...] | None = channels if isinstance(channels, tuple) else ()
        if channels == "rgb" or (channels == "auto" and (volumes or not self._have_bands())):
            self.bands = None
        self._in_colours = self.bands is None and not volumes
        self.channels, self._depth = (3, None) if self._in_colours else self._look()
        self.values = self._depth

    def __len__(self) -> int:
        return len(self.files)

    def lists(self) -> "tuple[ListedFiles, ...]":
        """All files that reading samples may open."""
        return (self,)

    def path(self, index: int) -> Path:
        return self.root / self.files[index].name

    def name(self, index: int) -> str:
        return self.files[index].name

    def label(self, index: int) -> Any:
        return self.files[index].label

    def told(self, index: int) -> dict[str, Any]:
        """What decides the pixels of an image besides its file and the options, such as a column of a table."""
        return {}

    def image(self, index: int) -> Image:
        """Image `index`, its header read and its pixels not.

        Raises:
            BadImage: the file cannot be opened.
            OtherFile: it is not the one that was listed.
        """
        path = self.checked(index)
        if self._in_colours:
            return open_image(path)
        found = self._open(path)
        found.require(self.channels, self._depth, self.noun)
        return found

    def _open(self, path: Path) -> "VolumeFile | StoredPicture":
        return open_volume(path) if self.volumes else open_stored_picture(path, self.bands or ())

    def _have_bands(self) -> bool:
        """Whether the first TIFF file or folder of Zarr that can be read has other channels than colours have."""
        for index in dict.fromkeys([*spread(len(self)), *range(len(self))]):
            with suppress(BadImage, Unsupported):
                path = self.path(index)
                if is_zarr(path):
                    return open_stored_picture(path).channels not in (1, 3)
                if path.name.lower().endswith((".tif", ".tiff")):
                    return has_bands(path)
        return False

    def _look(self) -> tuple[int, str | None]:
        """The channels of the first file that can be read, and what its values are; some others are looked at."""
        looked: list[VolumeFile | StoredPicture] = []
        values: str | None = None  # of the volume that says most, also its axes
        for index in dict.fromkeys([*spread(len(self)), *range(len(self))]):
            try:
                looked.append(self._open(self.path(index)))
            except BadImage:
                continue
            channels = looked[-1 if self.volumes else 0].channels
            looked[-1].require(channels, values, self.noun)
            values = max(values or "", looked[-1].values, key=len)
            if len(looked) >= LOOKED_AT:
                break
        return (looked[0].channels, values) if looked else (1, None)

    def checked(self, index: int) -> Path:
        """Where file `index` is. Raises OtherFile if it is not the one that was listed."""
        path = self._check_size(index)
        if self._expects and self._prints[index] not in (None, self._print(index)):
            raise OtherFile(
                f"{path}: has other content {self._reader} than elsewhere, though as many bytes: {_SAME_FILES}"
            )
        return path

    def prints(self, part: slice, reader: str) -> list[int | None]:
        """A checksum of some bytes of each file of a part of the list; None of what cannot be read.

        `reader` says in messages who reads here, such as "on rank 3".

        Raises:
            OtherFile: a file of that part is not the one that was listed.
        """
        self._reader = reader
        indices = range(len(self.files))[part]
        for index in indices:
            self._check_size(index)
        return [self._print(index) for index in indices]

    def fingerprint(self, index: int) -> int | None:
        """The checksum of some bytes of a file, as all ranks know it or as it is here; None of what cannot be read."""
        if index not in self._prints:
            self._prints[index] = self._print(index)
        return self._prints[index]

    def expect(self, prints: Sequence[int | None]) -> None:
        """From now on, accept only files with these checksums, one for each of the list."""
        self._prints, self._expects = dict(enumerate(prints)), bool(prints)

    def _check_size(self, index: int) -> Path:
        path, listed = self.path(index), self.files[index].num_bytes
        if listed == UNKNOWN:
            return path
        try:
            found = num_bytes_of(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise OtherFile(f"{path}: is not there {self._reader}, but was listed: {_SAME_FILES}") from error
        except OSError:
            return path  # which opening it will say
        if found not in (listed, UNKNOWN):
            raise OtherFile(
                f"{path}: has {found} bytes {self._reader}, but had {listed} when it was listed: {_SAME_FILES}"
            )
        return path

    def _print(self, index: int) -> int | None:
        found = 0
        try:
            for path in files_at(self.path(index)):
                with open_regular(path) as file:
                    last = max(0, os.fstat(file.fileno()).st_size - PROBE_BYTES)
                    for offset in sorted({0, last // 2, last}):
                        found = zlib.crc32(os.pread(file.fileno(), PROBE_BYTES, offset), found)
        except OSError:
            return None
        return found


def spread(length: int) -> list[int]:
    """Some of so many files to look at, by number, from the first to the last."""
    count = min(LOOKED_AT, length)
    return [number * (length - 1) // max(1, count - 1) for number in range(count)]


def text_of(label: Any, classes: Sequence[str]) -> str | None:
    """A label as text without loss: the name of its class, or its numbers."""
    if label is None:
        return None
    if isinstance(label, int):
        return classes[label] if label < len(classes) else str(label)
    return repr(label) if isinstance(label, float) else ", ".join(map(repr, label))


def with_details(label: str | None, mpp: Any, weight: Any) -> str | None:
    """A label as text, with microns per pixel and the weight in the loss, which may be None."""
    found = label if mpp is None else f"{label} at {mpp} um per pixel"
    return found if weight is None else f"{found} with weight {weight}"


def mask_as_text(name: str, masks: ListedFiles, index: int) -> str:
    """The file of a mask as text, with its size and a checksum of some of its bytes."""
    return f"{name} of {masks.files[index].num_bytes} bytes, checksum {masks.fingerprint(index) or 0:08x}"


def files_at(path: Path) -> list[Path]:
    """The files of an image: one, all of a slide or series of DICOM, those of MRXS, or the metadata of Zarr.

    Raises OSError.
    """
    if path.name.lower().endswith(MRXS) and path.with_suffix("").is_dir():
        return [path, *sorted(each for each in path.with_suffix("").iterdir() if each.is_file())]
    if not path.is_dir():
        with suppress(DatasetError):  # which opening it will say
            return files_of(path) if is_dicom(path) else [path]
        return [path]
    if is_zarr(path):
        places = (folder / name for folder in (path, path / "0") for name in METADATA_OF_ZARR)
        return [each for each in places if each.is_file()]
    return sorted(each for each in path.iterdir() if visible(each.name) and is_dicom(each))


def num_bytes_of(path: Path) -> int:
    """The size of an image in bytes; UNKNOWN of what is no file. Raises OSError."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        return sum(each.stat().st_size for each in files_at(path))
    return found.st_size if stat.S_ISREG(found.st_mode) else UNKNOWN


def known_size(path: Path) -> int:
    """The same; UNKNOWN also of what is not there, such as a link to nowhere: opening it will say so."""
    try:
        return num_bytes_of(path)
    except OSError:
        return UNKNOWN


def files_below(folder: Path, suffixes: tuple[str, ...], without: Collection[str] = ()) -> Iterator[Path]:
    """The files below a folder that end so, or begin like DICOM; `without` what is in folders of these names."""
    for parent, folders, names in os.walk(folder):
        # A scanner's MRXS slide is one file beside a folder of its data; nothing in there ends like an image.
        folders[:] = [name for name in folders if visible(name) and name not in without]
        zarrs = [name for name in folders if name.lower().endswith(ZARR_SUFFIXES)]
        folders[:] = [name for name in folders if name not in zarrs]
        of_zarr = [name for name in zarrs if name.lower().endswith(suffixes)]
        paths = (Path(parent, name) for name in names if visible(name))
        named = (p for p in paths if p.name.lower().endswith(suffixes) or (DICOM in suffixes and is_dicom(p)))
        yield from (*(Path(parent, name) for name in of_zarr), *named)
