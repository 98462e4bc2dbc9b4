"""Which folders of a source of images are its classes, and which are its parts for training and for validation."""

from pathlib import Path
from typing import NamedTuple

from mpi4dl.datasets.base import DatasetError

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
    holds_classes = any(set(subfolders(root / name)) & set(names) for name in found)
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
        what = "is a file, not a folder of images" if root.exists() else "no such folder"
        raise DatasetError(f"{root}: {what}; {LAYOUT}")
    return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and visible(entry.name)))


def visible(name: str) -> bool:
    return not name.startswith(".")
