"""Sources of images or volumes: "synthetic", an .npz file, or a folder: one per class, a table, or a mask of each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpi4dl._files import open_regular
from mpi4dl.datasets.arrays import ArrayDataset, Synthetic, is_cifar, load_cifar, load_npz
from mpi4dl.datasets.base import BadImage, DatasetError, task_of
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.listed import (
    LAYOUT,
    TRAINING,
    File,
    ListedFiles,
    class_folders,
    files_below,
    mask_as_text,
    of_another_kind,
    parts,
    subfolders,
    suffixes_of,
    visible,
)
from mpi4dl.datasets.masks import IGNORE_INDEX, Mask, mask_suffixes, open_stored, values_in
from mpi4dl.datasets.split import Named, Subset, split
from mpi4dl.datasets.table import TABLE, found_in, read_table


class ImageFolder(ListedFiles):
    """The images under `root/<class>/`, classes and files in alphabetical order, the same on every machine.

    `classes` fixes the classes and their order, for a validation folder that has to agree with the training one. With
    `volumes`, each file is one.

    Raises:
        DatasetError: no such folder, no classes or only one, a class without images, or a class not in `classes`.
    """

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None, volumes: bool = False) -> None:
        suffixes = suffixes_of(volumes)
        found = class_folders(root)
        if not found:
            own = any(visible(path.name) and path.name.lower().endswith(suffixes) for path in root.iterdir())
            loose = "; it has images of its own: move them into one sub-folder per class" if own else ""
            raise DatasetError(f"{root}: has no class folders{loose}; {LAYOUT}")
        if classes is None and len(found) < 2:
            hint = f": add {root / 'val'}, or give {root / found[0]}" if found[0].casefold() in TRAINING else ""
            raise DatasetError(f"{root}: has only one class folder, {found[0]!r}{hint}; a classifier needs two or more")
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DatasetError(
                f"{root}: has the class {unknown[0]!r}, but the training set has only {', '.join(self.classes)}: "
                "rename or remove it, or add training images of that class"
            )
        files: list[File] = []
        for name in found:
            images = sorted(files_below(root / name, suffixes))
            if not images:
                raise DatasetError(
                    f"{root / name}: this class has no images: add some, or remove the folder; "
                    f"files count as {'volumes' if volumes else 'images'} if they end in {' '.join(suffixes)}"
                )
            label = self.classes.index(name)
            files += [File(path.relative_to(root).as_posix(), size, label) for path, size in images]
        super().__init__(root, files, volumes)


# Images or volumes anywhere below a folder, whose labels are in a table beside them.


class LabelledFolder(ListedFiles):
    """The images that `root/labels.csv`, or another `table`, names, in its order; `classes` fixes those of a column.

    Attributes:
        task: what their labels are for: classify, multilabel, regress or survival.
        classes: names of classes, or of the columns of numbers; of survival "risk".

    Raises:
        DatasetError: no such table, one that is wrong, or an image that it names and that is not there.
    """

    def __init__(
        self,
        root: Path,
        table: Path | None = None,
        task: str | None = None,
        columns: Sequence[str] | None = None,
        volumes: bool = False,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        path = table or root / TABLE
        found = read_table(path, task, columns, classes)
        listed = {file.relative_to(root).as_posix(): size for file, size in files_below(root, suffixes_of(volumes))}
        rows = list(found_in(path, found.rows, sorted(listed)))
        self.task, self.classes = found.task, found.classes
        self._parts = tuple(row.part for row, _ in rows)
        spare = len(listed) - len(rows)
        told = "" if task else ", as the columns tell: `task` says otherwise"
        beside = ", ".join(found.identifiers)
        self.remarks = (
            f"labels of {path}: {', '.join(found.learnt[:10])}{' ...' * (len(found.learnt) > 10)} to {found.task}{told}"
            + (f"; {beside} beside {'them' if len(found.learnt) > 1 else 'it'} not learnt" if beside else "")
            + (f"; {spare} images below it are not in the table" if spare else ""),
        )
        super().__init__(root, [File(name, listed[name], row.label) for row, name in rows], volumes)

    def parts(self) -> tuple[Subset, Subset] | None:
        """The images to train on and to validate with, by the table's column `split`; None if it has none.

        Without images for validation, those for tests are.

        Raises:
            DatasetError: nothing to train on, or nothing to validate with.
        """
        if not any(self._parts):
            return None
        held_out = "val" if "val" in self._parts else "test"
        pair = [Subset(self, [i for i, part in enumerate(self._parts) if part == name]) for name in ("train", held_out)]
        if not all(len(subset) for subset in pair):
            found = ", ".join(sorted(set(self._parts)))
            raise DatasetError(
                f"{self.root}: the column 'split' has only {found}: it needs train, and val or test; or leave it out"
            )
        return pair[0], pair[1]

    def held_out(self) -> tuple[list[int], str]:
        """The numbers of the images for tests, or else of those for validation, or of all; and which these are."""
        for name in ("test", "val"):
            if name in self._parts:
                return [i for i, part in enumerate(self._parts) if part == name], f", those of its split {name}"
        return list(range(len(self))), ""


# Images or volumes in a folder `images`, and of each a mask of the same name in the folder `masks` beside it.

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
LAYOUT_OF_MASKS = FORMS["segment"].where
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
            raise DatasetError(f"{root}: has {', '.join(subfolders(root)) or 'no folders'}; {LAYOUT_OF_MASKS}")
        images = _by_name(root / IMAGES, suffixes_of(volumes))
        masks = _by_name(root / MASKS, mask_suffixes(volumes))
        if not images:
            raise DatasetError(f"{root / IMAGES}: has no {'volumes' if volumes else 'images'}; {LAYOUT_OF_MASKS}")
        missing = [found for name, found in images.items() if name not in masks]
        if missing:
            more = f", and {len(missing) - 1} others have none" if len(missing) > 1 else ""
            path, asked = root / IMAGES / missing[0].name, root / MASKS / Path(missing[0].name).with_suffix(".png")
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

    def label_as_text(self, index: int) -> str:
        """The mask of an image, by its name, size and checksum."""
        return mask_as_text(self.masks.name(index), self.masks, index)

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


SYNTHETIC, SYNTHETIC_CLASSES = "synthetic", 10


def open(
    source: str | Path,
    *,
    size: tuple[int, ...] = (1024, 1024),
    num_classes: int | None = None,
    num_train: int = 1000,
    num_val: int = 200,
    validation_fraction: float = 0.2,
    seed: int = 0,
    validating: Mapping[str, bool] | None = None,
    task: str | None = None,
    label_columns: Sequence[str] | None = None,
    ignore_index: int | None = IGNORE_INDEX,
    validates: bool = True,
) -> tuple[Named, Named]:
    """The training and the validation images of a source.

    - "synthetic": `num_train` and `num_val` images of `size` (height, width) in `num_classes` classes, or 10.
    - a folder with `train/<class>/` and `val/<class>/`, or other names of such parts: these.
    - a folder with `<class>/`: `validation_fraction` of the images is set aside, by a hash of `seed` and each path, but
      where `validating` says of a path, from the folder on, whether it was.
    - a folder with `labels.csv`, or another such table: the images that it names, with labels for a `task`, of all
      columns or of `label_columns`; split by its column `split`, or as above: see `read_table`.
    - a folder with `images/` and `masks/`, or with these below train and val: images with a mask each, whose pixels of
      `ignore_index` count for nothing: see `SegmentedFolder`.
    - CIFAR's folder of python batches: its training and its test images.
    - an .npz file with x_train, y_train, x_test, y_test: these; with x and y: split as above.

    With a `size` of three numbers all of these are volumes, and files of folders one volume each: .npy, .npz, stacks of
    TIFF pages, NIfTI. With one, synthetic images and .npz files are sequences.

    Where nothing `validates`, there may be no images for it.

    Raises:
        DatasetError: the source does not exist or does not hold what it should.
    """
    if source == SYNTHETIC:
        if num_train < 1 or num_val < 1:
            raise DatasetError(f"synthetic: num_train={num_train}, num_val={num_val}: needs at least 1 of each")
        images = Synthetic(num_train + num_val, size, num_classes or SYNTHETIC_CLASSES, seed)
        found: tuple[Named, ...]
        found = (Subset(images, range(num_train)), Subset(images, range(num_train, num_train + num_val)))
    else:
        path = Path(source).expanduser()
        found = _opened(source, path, size, num_classes, task, label_columns, ignore_index)
    if len(found) == 1:
        found = split(
            found[0],
            validation_fraction,
            seed,
            validating or {},
            otherwise=_otherwise(found[0]),
            validates=validates,
        )
    training, validation = found
    if task is not None and task_of(training) != task:
        raise DatasetError(f"{source}: has labels to {task_of(training)}, not to {task}; {FORMS[task].where}")
    mine, theirs = (getattr(part, "values", None) for part in (training, validation))
    if len(validation) and mine != theirs:
        raise DatasetError(f"{source}: of volumes to validate with, {of_another_kind(str(theirs), str(mine))}")
    return training, validation


def _otherwise(images: Named) -> str:
    """Remedies if images cannot be set aside by a hash."""
    if isinstance(images, LabelledFolder):
        return f"say which are for what in a column `split` of {TABLE}: train or val"
    return "name them x_test, y_test" if isinstance(images, ArrayDataset) else "make folders train and val"


def _opened(
    source: str | Path,
    path: Path,
    size: tuple[int, ...],
    num_classes: int | None,
    task: str | None,
    columns: Sequence[str] | None,
    ignore_index: int | None,
) -> tuple[Named, ...]:
    """The images to train on and to validate with, or all of them if the source does not say which."""
    if path.suffix == ".npz":
        training, test = load_npz(path, len(size))
        return (training, test) if test else (training,)
    if len(size) == 2 and is_cifar(path):
        return load_cifar(path)
    if not path.exists():
        raise DatasetError(f"{source}: no such file or folder; expected {SYNTHETIC!r}, a folder of images or an .npz")
    if len(size) == 1:
        raise DatasetError(f"{source}: folders hold images and volumes; sequences are synthetic, or in an .npz file")
    volumes = len(size) > 2
    if path.suffix.lower() == ".csv" or (path / TABLE).is_file():
        root, table = (path, None) if path.is_dir() else (path.parent, path)
        listed = LabelledFolder(root, table, task, columns, volumes)
        return listed.parts() or (listed,)
    if columns is not None:
        raise DatasetError(f"{source}: has no {TABLE}, of which {', '.join(columns)} could be columns")
    if is_segmented(path):
        return (SegmentedFolder(path, None, num_classes, ignore_index, volumes),)
    found = parts(path)
    if found is None:
        return (ImageFolder(path, volumes=volumes),)
    first, second = path / found.training, path / found.validation
    if is_segmented(first):
        masked = SegmentedFolder(first, None, num_classes, ignore_index, volumes)
        return masked, SegmentedFolder(second, masked.classes, num_classes, ignore_index, volumes)
    train = ImageFolder(first, volumes=volumes)
    return train, ImageFolder(second, train.classes, volumes)
