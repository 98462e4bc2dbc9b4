"""Open whatever the user named as a source of images: "synthetic", a folder, or an .npz file."""

from collections.abc import Mapping
from pathlib import Path

from mpi4dl.datasets.arrays import load_npz
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.cifar import is_cifar, load_cifar
from mpi4dl.datasets.folder import ImageFolder
from mpi4dl.datasets.layout import parts
from mpi4dl.datasets.split import Named, Subset, split
from mpi4dl.datasets.synthetic import Synthetic

SYNTHETIC = "synthetic"


def open(
    source: str | Path,
    *,
    size: tuple[int, ...] = (1024, 1024),
    num_classes: int = 10,
    num_train: int = 1000,
    num_val: int = 200,
    validation_fraction: float = 0.2,
    seed: int = 0,
    validating: Mapping[str, bool] | None = None,
) -> tuple[Named, Named]:
    """The training and the validation images of a source.

    - "synthetic": `num_train` and `num_val` images of `size` (height, width) in `num_classes` classes.
    - a folder with `train/<class>/` and `val/<class>/`, or other names of such parts: these.
    - a folder with `<class>/`: `validation_fraction` of the images is set aside, by a hash of `seed` and each path, but
      where `validating` says of a path, from the folder on, whether it was.
    - CIFAR's folder of python batches: its training and its test images.
    - an .npz file with x_train, y_train, x_test, y_test: these; with x and y: split as above.

    With a `size` of three numbers all of these are volumes, and files of folders one volume each: .npy, .npz, stacks of
    TIFF pages, NIfTI. With one, synthetic images and .npz files are sequences.

    Raises:
        DatasetError: the source does not exist or does not hold what it should.
    """
    if source == SYNTHETIC:
        if num_train < 1 or num_val < 1:
            raise DatasetError(f"synthetic: num_train={num_train}, num_val={num_val}: needs at least 1 of each")
        images = Synthetic(num_train + num_val, size, num_classes, seed)
        return Subset(images, range(num_train)), Subset(images, range(num_train, num_train + num_val))
    path = Path(source).expanduser()
    if path.suffix == ".npz":
        training, test = load_npz(path, len(size))
        return (training, test) if test else split(training, validation_fraction, seed, validating or {})
    if len(size) == 2 and is_cifar(path):
        return load_cifar(path)
    if not path.exists():
        raise DatasetError(f"{source}: no such file or folder; expected {SYNTHETIC!r}, a folder of images or an .npz")
    found = parts(path)
    if len(size) == 1:
        raise DatasetError(f"{source}: folders hold images and volumes; sequences are synthetic, or in an .npz file")
    volumes = len(size) > 2
    if found is None:
        return split(ImageFolder(path, volumes=volumes), validation_fraction, seed, validating or {})
    train = ImageFolder(path / found.training, volumes=volumes)
    return train, ImageFolder(path / found.validation, train.classes, volumes)
