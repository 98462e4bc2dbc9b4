"""Images or volumes anywhere below a folder, whose labels are in a table beside them."""

from collections.abc import Sequence
from pathlib import Path

from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.listed import File, ListedFiles, files_below, suffixes_of
from mpi4dl.datasets.split import Subset
from mpi4dl.datasets.table import TABLE, found_in, read_table


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
