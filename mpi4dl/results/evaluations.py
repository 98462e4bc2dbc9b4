"""The files of an evaluation, and evaluations as they are read.

evaluation.json     metrics with their intervals, confusion matrices, and what was evaluated by which weights
evaluation.csv      a line for each image: label, prediction, probabilities, or how alike masks are
patients.csv ...    more files beside these, with the same ending, such as patients-20260131-120000.csv
"""

import itertools
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mpi4dl._files import Replacement, make_folder, naming, write_durably
from mpi4dl.results.formats import TEXTS, Record, read_object, read_table, reading, write_object
from mpi4dl.results.names import BESIDE, EVALUATION


def file_of_evaluation(folder: Path, out: Path | None, now: datetime) -> Path:
    """The first file of a new evaluation: in the folder that was asked for, or with the date in that of the run, by a
    name that no other job takes.
    """
    if out is not None:
        return out / f"{EVALUATION}.json"
    dated = f"{EVALUATION}-{now:%Y%m%d-%H%M%S}"
    stems = itertools.chain([dated], (f"{dated}-{number}" for number in itertools.count(2)))
    return next(path for path in (folder / f"{stem}.json" for stem in stems) if _claimed(path))


def _claimed(path: Path) -> bool:
    """Whether nobody else has written, or is about to write, an evaluation of this name. Raises OSError."""
    new = Replacement(path)
    try:
        new.temporary.touch(exist_ok=False)
    except FileExistsError:
        return False
    if path.exists() or path.with_suffix(".csv").exists():
        new.drop()
        return False
    return True


def require_writable(folder: Path) -> None:
    """See that an evaluation can be written into a folder, before it takes hours. Raises OSError."""
    make_folder(folder)
    with naming(folder), TemporaryFile(dir=folder):
        pass


def beside(evaluation: Path, name: str) -> Path:
    """The file that belongs to an evaluation, such as curves-DATE.csv to evaluation-DATE.json."""
    first, dot, ending = name.partition(".")
    return evaluation.with_name(evaluation.stem.replace(EVALUATION, first, 1) + dot + ending)


def write_evaluation(path: Path, told: Mapping[str, Any] | None, files: Mapping[str, bytes]) -> None:
    """Write an evaluation: `told` into `path`, last, and files by their names. None of one before is left there.

    Raises OSError.
    """
    make_folder(path.parent)
    try:
        for name in (f"{EVALUATION}.json", f"{EVALUATION}.csv", *BESIDE):
            if name not in files:
                beside(path, name).unlink(missing_ok=True)
        for name, content in files.items():
            write_durably(beside(path, name), content)
        if told is not None:
            write_object(path, told)
    finally:
        Replacement(path).drop()


class SavedEvaluation:
    """An evaluation in a folder. Files are read at the first use; raises OSError and DamagedResult."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem

    @cached_property
    def told(self) -> Record:
        """All of its first file."""
        return read_object(self.path)

    @cached_property
    def records(self) -> list[Record]:
        """A row for each image or slide."""
        texts = (*TEXTS, "label", "prediction") if self.told["task"] == "classify" else TEXTS
        return read_table(self.path.with_suffix(".csv"), texts)

    def metrics(self) -> Iterator[Record]:
        """A row for each level, such as patient, and metric: its value and the ends of its interval."""
        with reading(self.path):
            levels = {self.told["what"]: self.told, "patient": self.told.get("patients")}
            for level, of in levels.items():
                for name, values in of["metrics"].items() if of else ():
                    numbers = {key: float(values[key]) for key in ("value", "low", "high", "level")}
                    confidence = numbers.pop("level")
                    yield {"evaluation": self.name, "by": level, "metric": name, **numbers, "confidence": confidence}


def evaluations_in(folder: Path) -> list[SavedEvaluation]:
    """Those in a folder, and in folders of it that are named so, by name."""
    found = [*folder.glob(f"{EVALUATION}*.json"), *folder.glob(f"{EVALUATION}*/{EVALUATION}*.json")]
    return [SavedEvaluation(path) for path in sorted(found)]
