"""Records of predictions: what is written of an image, by task, and files that grow by a line and can be resumed.

predictions.json     what is predicted by which weights, from which images
predictions.jsonl    a JSON object in each line; its `file` tells the image from others that had its name
predictions.csv      the same as a table, without `file`
"""

import csv
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpi4dl._files import lock, naming, open_regular, read_regular, write_durably
from mpi4dl._numbers import as_cell
from mpi4dl._wording import quoted
from mpi4dl.datasets.listed import files_at
from mpi4dl.inference.maps import FOLDER as MAPS
from mpi4dl.inference.masks import FOLDER as MASKS
from mpi4dl.options.config import ConfigError
from mpi4dl.runs.folder import finite
from mpi4dl.tasks.task import Record, Task

# The record of an image, by `Task.answer`: as JSON, and as a row of a table.
#
#     classify      prediction, probabilities of all classes        regress    prediction, or several by name
#     multilabel    predictions (0, 1) and probabilities by name    survival   risk, of which more is worse
#     segment       the file of the mask, the pixels of each class; beside a true mask how alike both are; of slides
#                   `beside`, the picture and the polygons, in JSON alone
#
# With labels there is `label`, or `labels` by name, or `time` and `event`. Unreadable images have an `error` instead.

SINGULAR = {
    "labels": "label",
    "predictions": "prediction",
    "probabilities": "probability",
    "pixels": "pixels",
    "masks": "mask",
}
ALIKE = ("pixel_accuracy", "dice", "iou")
NOT_NUMBERS = "the model's outputs are not numbers (NaN)"


def columns_of(
    task: type[Task],
    classes: Sequence[str],
    labelled: bool,
    apart: bool = False,
    crops: bool = False,
    patients: bool = False,
) -> list[str]:
    """The columns of a table of records, such as "probability tumour"; `apart`: each class has a mask of its own.

    With `crops` there is `seen`, the share of an image's pixels that the model saw; with `patients` the patient.
    """
    if not task.dense:
        label = torch.zeros(task.label_size(len(classes))) if labelled else None
        every = [*flat(task.answer(classes, torch.zeros(len(classes)), label))]
    elif labelled:
        every = [*ALIKE]
    else:
        every = [*(_named("mask", classes) if apart else ["mask"]), *_named("pixels", classes)]
    return ["image", *(["patient"] if patients else []), *every, *(["seen"] if crops else []), "error"]


def _named(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {name}" for name in names]


def flat(record: Record) -> dict[str, Any]:
    """A record as a line of the table has it."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{SINGULAR.get(key, key)} {name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def is_undefined(outputs: Tensor) -> bool:
    """Whether some output of an image is not a number."""
    return bool(outputs.isnan().any())


ABOUT, LINES, TABLE = "predictions.json", "predictions.jsonl", "predictions.csv"


SAMPLED_BYTES, SAMPLES = 1 << 12, 16


def identity_of(path: Path) -> Record:
    """The identity of a file besides its name: its size, its time of writing, and a checksum of bytes from all over it.

    Of a folder that is a slide it is that of all its files. Raises OSError.
    """
    num_bytes = written = found = 0
    for each in files_at(path):
        with open_regular(each) as file:
            told = os.fstat(file.fileno())
            num_bytes, written = num_bytes + told.st_size, max(written, told.st_mtime_ns)
            places = range(SAMPLES) if told.st_size > SAMPLED_BYTES * SAMPLES else ()
            if not places:
                found = zlib.crc32(file.read(), found)
            for number in places:
                at = (told.st_size - SAMPLED_BYTES) * number // (SAMPLES - 1)
                found = zlib.crc32(os.pread(file.fileno(), SAMPLED_BYTES, at), found)
    return {"bytes": num_bytes, "mtime_ns": written, "crc32": f"{found:08x}"}


def is_same(before: Any, now: Record) -> bool:
    """Whether two identities are of the same file; a small one was compared whole, so that it may have been copied."""
    if not isinstance(before, Mapping):
        return False
    times = ("mtime_ns",) if now.get("bytes", math.inf) <= SAMPLED_BYTES * SAMPLES else ()
    return all(before.get(key) == now.get(key) for key in {*before, *now} - {*times})


def maps_of(record: Record) -> list[str]:
    """The files of the heat map of a slide, from the folder of predictions on."""
    found = record.get("maps")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def files_of(record: Record) -> list[str]:
    """The masks that were written of an image, from the folder of predictions on."""
    masks = record.get("masks")
    beside = record.get("beside")
    found = [record.get("mask"), record.get("prediction"), *(masks.values() if isinstance(masks, dict) else ())]
    found += beside if isinstance(beside, list) else []
    return [each for each in found if isinstance(each, str) and each.startswith(f"{MASKS}/")]


class Records:
    """The records of a folder, to which lines are added; `done` names the images that have one.

    Lines that `keeps(record)` does not keep, those of images that could not be read, and one that was half written, are
    left out, and made anew. `dropped` are the first of these.

    Raises:
        ConfigError: the folder holds records of something else. OSError, ValueError: it cannot be written, or another
            job does so.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        columns: Sequence[str],
        keeps: Callable[[Record], bool] = lambda _: True,
    ) -> None:
        self.folder, self.columns = folder, list(columns)
        self._files: list[Any] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder, "out")
        try:
            self._require_same(about)
            kept: list[Record] = []
            self.dropped: list[Record] = []
            for record in self._kept():
                (kept if keeps(record) else self.dropped).append(record)
            self._remove_files({name for record in kept for name in (*files_of(record), *maps_of(record))})
            self.done = {record["image"] for record in kept}
            write_durably(folder / LINES, b"".join(map(_line, kept)))
            write_durably(folder / TABLE, self._row(None) + b"".join(map(self._row, kept)))
            self._files = [(folder / name).open("ab", buffering=0) for name in (LINES, TABLE)]
        except BaseException:
            self.close()
            raise

    def _require_same(self, about: Mapping[str, Any]) -> None:
        path, told = self.folder / ABOUT, json.loads(json.dumps(finite(about)))
        if path.exists():
            try:
                before = json.loads(read_regular(path))
            except (ValueError, RecursionError):
                before = {}
            before = before if isinstance(before, dict) else {}
            other = [name for name in {**told, **before} if before.get(name) != told.get(name)]
            if other:
                said = " and ".join(
                    f"{name} {quoted(before.get(name))}, not {quoted(told.get(name))}" for name in other[:2]
                )
                raise ConfigError(f"`out` {self.folder} holds predictions with {said}: name another folder by `out`")
        elif any((self.folder / name).exists() for name in (LINES, TABLE)):
            raise ConfigError(f"`out` {self.folder} holds {LINES} of something else: name another folder")
        write_durably(path, (json.dumps(told, indent=1) + "\n").encode())

    def _kept(self) -> list[Record]:
        path = self.folder / LINES
        found: dict[str, Record] = {}
        for line in read_regular(path).split(b"\n") if path.exists() else ():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # half of a line
                continue
            if isinstance(record, dict) and isinstance(record.get("image"), str) and "error" not in record:
                found[record["image"]] = record
        return list(found.values())

    def _remove_files(self, kept: Collection[str]) -> None:
        """Remove what was written of images that are there no more, or are others now, and what is half written."""
        for name in (name for record in self.dropped for name in (*files_of(record), *maps_of(record))):
            first, *inner = Path(name).parts
            if name not in kept and first in (MASKS, MAPS) and inner and ".." not in inner:
                (self.folder / name).unlink(missing_ok=True)
        for path in (self.folder / MASKS).rglob(".*.new"):
            path.unlink(missing_ok=True)

    def add(self, record: Record) -> None:
        """On disk when this returns. Raises OSError."""
        for file, data in zip(self._files, (_line(record), self._row(record)), strict=True):
            with naming(Path(file.name)):
                while data:
                    data = data[file.write(data) :]

    def _row(self, record: Record | None) -> bytes:
        return table_row(self.columns, record)

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _line(record: Record) -> bytes:
    return (json.dumps(finite(record), allow_nan=False) + "\n").encode()


def table_row(columns: Sequence[str], record: Record | None) -> bytes:
    """A line of the table, or its first line. Names of files that are no UTF-8 stay the bytes that they are."""
    text = io.StringIO()
    values = {} if record is None else flat(record)
    cells = columns if record is None else [as_cell(values.get(name, "")) for name in columns]
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="surrogateescape")
