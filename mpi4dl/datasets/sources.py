"""Open whatever the user named as a source of images: "synthetic", a folder, or an .npz file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpi4dl.datasets.arrays import ArrayDataset, Synthetic, is_cifar, load_cifar, load_npz
from mpi4dl.datasets.base import DatasetError, task_of
from mpi4dl.datasets.folders import ImageFolder, LabelledFolder, SegmentedFolder, is_segmented
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.listed import of_another_kind, parts
from mpi4dl.datasets.masks import IGNORE_INDEX
from mpi4dl.datasets.split import Named, Subset, split
from mpi4dl.datasets.table import TABLE

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
      columns or of `label_columns`; split by its column `split`, or as above: see table.py.
    - a folder with `images/` and `masks/`, or with these below train and val: images with a mask each, whose pixels of
      `ignore_index` count for nothing: see segmented.py.
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
