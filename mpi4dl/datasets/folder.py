"""A folder of images or volumes, one sub-folder per class, listed once; sizes and formats may be mixed.

A list is made by one rank for all. Whoever opens a file sees to it that it is the one that was listed: on a rank that
sees another file system, a path may be another picture.
"""

import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpi4dl.datasets.base import BadImage, DatasetError, Image
from mpi4dl.datasets.files import SUFFIXES, open_image, open_regular
from mpi4dl.datasets.layout import LAYOUT, TRAINING, class_folders, visible
from mpi4dl.datasets.volumes import VOLUME_SUFFIXES, open_volume

PROBE_BYTES = 4096
UNKNOWN = -1


class File(NamedTuple):
    """A file of the list: its path from the folder on, with slashes, its size, or -1, and its class as an index."""

    name: str
    num_bytes: int
    label: int


class OtherFile(DatasetError):
    """What a path leads to is not what was listed."""


class ImageFolder:
    """The images under `root/<class>/`, classes and files in alphabetical order, the same on every machine.

    `classes` fixes the classes and their order, for a validation folder that has to agree with the training one. With
    `volumes`, each file is one. They have as many channels as the first that can be read.

    Raises:
        DatasetError: no such folder, no classes or only one, a class without images, or a class not in `classes`.
    """

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None, volumes: bool = False) -> None:
        self.volumes = volumes
        suffixes = tuple(VOLUME_SUFFIXES) if volumes else SUFFIXES
        found = class_folders(root)
        if not found:
            own = any(visible(path.name) and path.name.lower().endswith(suffixes) for path in root.iterdir())
            loose = "; it has images of its own: move them into one sub-folder per class" if own else ""
            raise DatasetError(f"{root}: has no class folders{loose}; {LAYOUT}")
        if classes is None and len(found) < 2:
            hint = f": add {root / 'val'}, or give {root / found[0]}" if found[0].casefold() in TRAINING else ""
            raise DatasetError(f"{root}: has only one class folder, {found[0]!r}{hint}; a classifier needs two or more")
        self.root = root
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DatasetError(
                f"{root}: has the class {unknown[0]!r}, but the training set has only {', '.join(self.classes)}: "
                "rename or remove it, or add training images of that class"
            )
        files: list[File] = []
        for name in found:
            images = sorted(_images(root / name, suffixes))
            if not images:
                raise DatasetError(
                    f"{root / name}: this class has no images: add some, or remove the folder; "
                    f"files count as {'volumes' if volumes else 'images'} if they end in {' '.join(suffixes)}"
                )
            label = self.classes.index(name)
            files += [File(path.relative_to(root).as_posix(), size, label) for path, size in images]
        self.files = tuple(files)
        self._prints: Sequence[int | None] = ()
        self._reader = "here"
        self.channels = self._channels() if volumes else 3

    def __len__(self) -> int:
        return len(self.files)

    def path(self, index: int) -> Path:
        return self.root / self.files[index].name

    def name(self, index: int) -> str:
        return self.files[index].name

    def label(self, index: int) -> int:
        return self.files[index].label

    def image(self, index: int) -> Image:
        """Image `index`, its header read and its pixels not.

        Raises:
            BadImage: the file cannot be opened.
            OtherFile: it is not the one that was listed.
        """
        self._check_size(index)
        if self._prints and self._prints[index] not in (None, self._print(index)):
            raise OtherFile(
                f"{self.path(index)}: has other content {self._reader} than elsewhere, though as many bytes: "
                f"{_SAME_FILES}"
            )
        if not self.volumes:
            return open_image(self.path(index))
        volume = open_volume(self.path(index))
        if volume.channels != self.channels:
            raise BadImage(self.path(index), f"has {volume.channels} channels where others have {self.channels}")
        return volume

    def _channels(self) -> int:
        """Those of the first volume that can be read."""
        for index in range(len(self)):
            try:
                return open_volume(self.path(index)).channels
            except BadImage:
                continue
        return 1

    def prints(self, part: slice, reader: str) -> list[int | None]:
        """A checksum of some bytes of each file of a part of the list; None of what cannot be read.

        `reader` says in messages who reads here, such as "on rank 3".

        Raises:
            OtherFile: a file of that part is not the one that was listed.
        """
        self._reader = reader
        indices = range(len(self))[part]
        for index in indices:
            self._check_size(index)
        return [self._print(index) for index in indices]

    def expect(self, prints: Sequence[int | None]) -> None:
        """From now on, accept only files with these checksums, one for each of the list."""
        self._prints = prints

    def _check_size(self, index: int) -> None:
        path, listed = self.path(index), self.files[index].num_bytes
        if listed == UNKNOWN:
            return
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise OtherFile(f"{path}: is not there {self._reader}, but was listed: {_SAME_FILES}") from error
        except OSError:
            return  # which opening it will say
        if stat.S_ISREG(found.st_mode) and found.st_size != listed:
            raise OtherFile(
                f"{path}: has {found.st_size} bytes {self._reader}, but had {listed} when it was listed: {_SAME_FILES}"
            )

    def _print(self, index: int) -> int | None:
        last = max(0, self.files[index].num_bytes - PROBE_BYTES)
        try:
            with open_regular(self.path(index)) as file:
                found = 0
                for offset in sorted({0, last // 2, last}):
                    found = zlib.crc32(os.pread(file.fileno(), PROBE_BYTES, offset), found)
                return found
        except OSError:
            return None


_SAME_FILES = "all ranks must see the same files, and they must stay as they are"


def _images(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, int]]:
    """The images below a folder, and their sizes in bytes."""
    for parent, folders, names in os.walk(folder):
        # A scanner's MRXS slide is one file beside a folder of its data; nothing in there ends like an image.
        folders[:] = [name for name in folders if visible(name)]
        for name in names:
            if visible(name) and name.lower().endswith(suffixes):
                path = Path(parent, name)
                try:
                    size = path.stat().st_size
                except OSError:  # a link to nowhere is an image that cannot be read
                    size = UNKNOWN
                yield path, size
