"""A folder of images, one sub-folder per class; sizes and formats may be mixed."""

import os
from pathlib import Path

from mpi4dl.datasets.base import DatasetError, Image
from mpi4dl.datasets.files import SUFFIXES, open_image

LAYOUT = "expected <folder>/<class>/*.png, or <folder>/train/<class>/*.png and <folder>/val/<class>/*.png"


class ImageFolder:
    """The images under `root/<class>/`, classes and files in alphabetical order, the same on every machine.

    `classes` fixes the classes and their order, for a validation folder that has to agree with the training one.

    Raises:
        DatasetError: no such folder, no classes or only one, a class without images, or a class not in `classes`.
    """

    channels = 3

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None) -> None:
        found = class_folders(root)
        if not found:
            loose = "; it has images of its own: move them into one sub-folder per class" if _images(root) else ""
            raise DatasetError(f"{root}: has no class folders{loose}; {LAYOUT}")
        if classes is None and len(found) < 2:
            hint = f": add {root / 'val'}, or give {root / 'train'}" if found == ("train",) else ""
            raise DatasetError(f"{root}: has only one class folder, {found[0]!r}{hint}; a classifier needs two or more")
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DatasetError(
                f"{root}: has the class {unknown[0]!r}, but the training set has only {', '.join(self.classes)}: "
                "rename or remove it, or add training images of that class"
            )
        self._files: list[tuple[Path, int]] = []
        for name in found:
            files = _images(root / name, recursive=True)
            if not files:
                raise DatasetError(
                    f"{root / name}: this class has no images: add some, or remove the folder; "
                    f"files count as images if they end in {' '.join(SUFFIXES)}"
                )
            self._files += [(file, self.classes.index(name)) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def path(self, index: int) -> Path:
        return self._files[index][0]

    def label(self, index: int) -> int:
        return self._files[index][1]

    def image(self, index: int) -> Image:
        return open_image(self.path(index))


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the sub-folders of `root`, in order.

    Raises:
        DatasetError: `root` is no folder.
    """
    if not root.is_dir():
        what = "is a file, not a folder of images" if root.exists() else "no such folder"
        raise DatasetError(f"{root}: {what}; {LAYOUT}")
    return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and _visible(entry.name)))


def _images(folder: Path, recursive: bool = False) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        # A scanner's MRXS slide is one file beside a folder of its data; nothing in there ends like an image.
        folders[:] = sorted(name for name in folders if recursive and _visible(name))
        files += [Path(parent, name) for name in names if _visible(name) and name.lower().endswith(SUFFIXES)]
    return sorted(files)


def _visible(name: str) -> bool:
    return not name.startswith(".")
