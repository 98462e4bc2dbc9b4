"""A folder of images or volumes, one sub-folder per class, listed once; sizes and formats may be mixed."""

from pathlib import Path

from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.layout import LAYOUT, TRAINING, class_folders, visible
from mpi4dl.datasets.listed import File, ListedFiles, files_below, suffixes_of


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
