"""Images or volumes in a folder `images`, and of each a mask of the same name in the folder `masks` beside it."""

from collections.abc import Sequence
from pathlib import Path

from mpi4dl.datasets.base import BadImage, DatasetError
from mpi4dl.datasets.files import open_regular
from mpi4dl.datasets.layout import subfolders
from mpi4dl.datasets.listed import File, ListedFiles, files_below, suffixes_of
from mpi4dl.datasets.masks import IGNORE_INDEX, Mask, mask_suffixes, open_stored, values_in

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
LAYOUT = f"expected {IMAGES}/NAME.png and {MASKS}/NAME.png, or such folders below train and val"
LOOKED_AT = 8
_BLACK_AND_WHITE = ({0, 255}, {255})


def is_segmented(root: Path) -> bool:
    """Whether a folder has images and their masks."""
    return (root / IMAGES).is_dir() and (root / MASKS).is_dir()


class SegmentedFolder(ListedFiles):
    """The images of `root/images` with the masks of `root/masks`: files of class indices, `ignore_index` left out.

    Classes have the names in `classes.txt`, a line for each, in `root` or the folder above it; else as many as
    `num_classes` says, or as masks have. `classes` fixes them, for a validation folder.

    Raises:
        DatasetError: no images, an image without a mask or with two, or black and white masks whose white is ignored.
    """

    task = "segment"

    def __init__(
        self,
        root: Path,
        classes: tuple[str, ...] | None = None,
        num_classes: int | None = None,
        ignore_index: int | None = IGNORE_INDEX,
        volumes: bool = False,
    ) -> None:
        if not is_segmented(root):
            raise DatasetError(f"{root}: has {', '.join(subfolders(root)) or 'no folders'}; {LAYOUT}")
        images = _by_name(root / IMAGES, suffixes_of(volumes))
        masks = _by_name(root / MASKS, mask_suffixes(volumes))
        if not images:
            raise DatasetError(f"{root / IMAGES}: has no {'volumes' if volumes else 'images'}; {LAYOUT}")
        lacking = [found for name, found in images.items() if name not in masks]
        if lacking:
            more = f", and {len(lacking) - 1} others have none" if len(lacking) > 1 else ""
            path, asked = root / IMAGES / lacking[0].name, root / MASKS / Path(lacking[0].name).with_suffix(".png")
            raise DatasetError(f"{path}: has no mask{more}: add {asked}, or a TIFF file of this name")
        self.masks = ListedFiles(root / MASKS, [masks[name] for name in images])
        self._ignored = ignore_index
        super().__init__(root / IMAGES, list(images.values()), volumes)
        named = next((path for path in (root / CLASSES, root.parent / CLASSES) if path.is_file()), None)
        self._refuse_white()
        if classes is None and named is not None:
            classes = _names(named)
        elif classes is None:
            classes = tuple(map(str, range(num_classes or self._count())))
        self.classes = classes
        spare = len(masks) - len(images)
        whence = "" if named is None else f", as {named} names them"
        self.remarks = (
            f"masks of {root / MASKS} have {len(classes)} classes{whence}"
            + ("" if ignore_index is None else f"; {ignore_index} is ignored")
            + (f"; {spare} masks have no image" if spare else ""),
        )

    def lists(self) -> tuple[ListedFiles, ...]:
        return self, self.masks

    def label(self, index: int) -> Mask:
        """The mask of image `index`, its header read and its pixels not. Raises BadImage and OtherFile."""
        path = self.masks.checked(index)
        return Mask(path, open_stored(path, self.volumes), len(self.classes), self._ignored)

    def _values(self, indices: Sequence[int]) -> set[int]:
        found: set[int] = set()
        for index in indices:
            try:
                found |= set(values_in(self.masks.path(index), self.volumes).tolist())
            except BadImage:  # which reading it to train will say
                continue
        return found

    def _count(self) -> int:
        """How many classes the masks have, all of which are read for that."""
        found = self._values(range(len(self)))
        if self._ignored is None and found in _BLACK_AND_WHITE:
            return 2
        most = max((value for value in found if value != self._ignored), default=0)
        return max(2, most + 1)

    def _refuse_white(self) -> None:
        count = min(LOOKED_AT, len(self))
        found = self._values([number * (len(self) - 1) // max(1, count - 1) for number in range(count)])
        if self._ignored == IGNORE_INDEX and found in _BLACK_AND_WHITE:
            raise DatasetError(
                f"{self.masks.root}: masks hold nothing but 0 and 255, and 255 is ignored: set `ignore_index` to none "
                "if white is class 1"
            )


def _by_name(folder: Path, suffixes: tuple[str, ...]) -> dict[str, File]:
    """The files below a folder by their path without the ending, in order. Raises DatasetError for two of one name."""
    found: dict[str, File] = {}
    for path, size in sorted(files_below(folder, suffixes)):
        name = path.relative_to(folder).as_posix()
        ending = max((suffix for suffix in suffixes if name.lower().endswith(suffix)), key=len)
        short = name[: -len(ending)]
        if short in found:
            raise DatasetError(f"{folder}: has {found[short].name} and {name}: one file of each name")
        found[short] = File(name, size)
    return found


def _names(path: Path) -> tuple[str, ...]:
    """The names of classes in a file, a line for each."""
    try:
        with open_regular(path) as file:
            found = file.read().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    lines = [line.strip() for line in found]
    while lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line or line in lines[: number - 1]:
            what = f"{line!r} again" if line else "nothing"
            raise DatasetError(f"{path}, line {number}: names {what}; expected the name of a class in each line")
    if len(lines) < 2:
        raise DatasetError(f"{path}: has {len(lines)} names; expected the name of a class in each line, of two or more")
    return tuple(lines)
