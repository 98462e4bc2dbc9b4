"""Predictions of images without labels: a record of each, written as it comes, and its mask beside it."""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4dl._wording import counted
from mpi4dl.comm import Refusal
from mpi4dl.datasets.base import printable
from mpi4dl.datasets.split import Named, Subset
from mpi4dl.engine.evaluating import BatchOutputs
from mpi4dl.inference.answers import Record, answer, columns_of
from mpi4dl.inference.masks import FOLDER, ArrayMask, FailingLater, PngMask, band_height, path_of
from mpi4dl.inference.model import SeeingModel, Seen
from mpi4dl.inference.progress import ProgressOfImages
from mpi4dl.inference.records import Records
from mpi4dl.tasks.task import Segment

SAMPLED_BYTES, SAMPLES = 1 << 16, 16
SUFFIX = ".png"


def print_of_file(path: Path) -> str:
    """What differs where files do: their size, and a checksum of bytes from all over it."""
    size, found = path.stat().st_size, 0
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLED_BYTES) * number // (SAMPLES - 1))
            found = zlib.crc32(file.read(SAMPLED_BYTES), found)
    return f"{size}-{found:08x}"


class Predicting:
    """What a model says of images, in order, and in the files of the folder `out` if there is one. Collective.

    Images that have a record there already are not looked at again. `remarks` are for the reader.
    """

    def __init__(self, model: SeeingModel, images: Named, where: str, out: Path | None, speaks: bool = False) -> None:
        self.model, self.out, self.comm, self.speaks = model, out, model.comm, speaks
        task = model.task
        self.dense = isinstance(task, Segment)
        self.apart = isinstance(task, Segment) and task.binary and len(model.classes) > 1
        if self.dense and len(model.config.data.image_size) == 1:
            raise Refusal("masks of sequences are not written: predict by mpi4dl.Engine")
        if self.dense and out is None:
            raise Refusal("`out` is missing: it is the folder that masks are written to")
        self.records: Records | None = None
        self.bad: list[str] = []
        done: set[str] = set()
        if out is not None:
            about = {"images": str(Path(where).absolute()), "task": model.about.task}
            about["precision"] = model.config.training.precision
            columns = columns_of(model.about.task, model.classes, False, self.apart)
            with self.comm.together():
                if self.comm.rank == 0:
                    about["weights"] = print_of_file(model.weights)
                    self.records = Records(out, about, columns)
                    done = self.records.done
        done = self.comm.broadcast_object(done)
        names = [images.name(index) for index in range(len(images))]
        self.images = Subset(images, [index for index, name in enumerate(names) if name not in done])
        already = len(names) - len(self.images)
        self.remarks = [f"{counted(already, 'image')} done before"] if already else []

    def __iter__(self) -> Iterator[Record]:
        """The records of images that had none, alike on all ranks."""
        task, classes, kind = self.model.task, self.model.classes, self.model.about.task
        progress = ProgressOfImages(len(self.images), self.speaks and self.comm.rank == 0)
        with ExitStack() as closing:
            closing.callback(progress.close)
            if self.records is not None:
                closing.callback(self.records.close)
            for seen in self.model.see(self.images, self._mask if self.dense else task.predictions):
                found: dict[int, Record] = dict(self._bad(seen))
                outputs = seen.outputs
                if outputs is not None and outputs.dense:
                    found |= self._dense(seen, outputs)
                elif outputs is not None and outputs.whole is not None:
                    said = zip(seen.indices, outputs.whole, strict=True)
                    found |= {index: self._named(index, answer(kind, classes, values)) for index, values in said}
                ordered = [found[index] for index in sorted(found)]
                with self.comm.together((OSError,)):
                    self._write(ordered)
                ordered = self.comm.broadcast_object(ordered)
                progress.advance(len(ordered), len(seen.errors))
                yield from ordered

    def _write(self, records: Sequence[Record]) -> None:
        for record in records if self.records is not None else ():
            assert self.records is not None
            self.records.add(record)

    def _named(self, index: int, said: Record) -> Record:
        return {"image": self.images.name(index), **said}

    def _bad(self, seen: Seen) -> Iterator[tuple[int, Record]]:
        for index, error in seen.errors.items():
            self.bad.append(error)
            yield index, self._named(index, {"error": printable(error)})

    def _mask(self, outputs: Any) -> Tensor:
        """The number of a class for each pixel, or of each class whether it is there: of few bytes."""
        found: Tensor = self.model.task.measured(outputs, None)
        return found.to(torch.uint8 if len(self.model.classes) <= 256 else torch.int32)

    def _dense(self, seen: Seen, outputs: BatchOutputs) -> dict[int, Record]:
        """Write the dense outputs of a batch, a few rows at a time. On rank 0 the records. Collective."""
        axes = len(self.model.config.data.image_size)
        channels = not self.dense or (isinstance(self.model.task, Segment) and self.model.task.binary)
        extent = torch.zeros(1 + channels + axes, dtype=torch.int64)
        for piece in outputs.pieces:
            extent = extent.maximum(torch.tensor([cut.stop for cut in piece.where]))
        shape = tuple(self.comm.all_reduce(extent, "max").tolist())[1:]
        files: dict[int, _DenseFile] = {}
        with self.comm.together((OSError,)):
            postponed = FailingLater()
            for where, values in outputs.bands(band_height(math.prod(shape) // shape[-2])):
                number = where[0].start
                if number not in files:
                    opened = postponed.do(partial(self._file, seen.indices[number], shape, channels))
                    if opened is None:
                        continue
                    files[number] = opened
                postponed.do(partial(files[number].write, where[1:], values[0].numpy()))
                if where[-2].stop == shape[-2]:
                    postponed.do(files[number].close)
            if postponed.error is not None:
                for file in files.values():
                    file.drop()
            postponed.settle()
        return {seen.indices[n]: self._named(seen.indices[n], file.record()) for n, file in files.items()}

    def _file(self, index: int, shape: tuple[int, ...], channels: bool) -> "_DenseFile":
        assert self.out is not None
        return _DenseFile(self.out, self.images.name(index), shape, self.model.classes, channels, self.dense)


class _DenseFile:
    """What is written of one image: a mask, one for each class, or an array; and how many pixels each class has."""

    def __init__(
        self, out: Path, name: str, shape: tuple[int, ...], classes: tuple[str, ...], channels: bool, mask: bool
    ) -> None:
        self.out, self.classes, self.channels, self.mask = out, classes, channels, mask
        self.apart = channels and len(classes) > 1
        self.counts = np.zeros(len(classes), np.int64)
        picture = mask and len(shape) - channels == 2
        self.files: list[Any] = []
        for number in range(len(classes)) if mask and channels else (None,):
            suffix = SUFFIX if picture else ".npy"
            path = out / FOLDER / path_of(name, suffix, number if self.apart else None)
            if picture:
                self.files.append(PngMask(path, (shape[-2], shape[-1]), 2 if channels else len(classes)))
            else:
                small = np.uint8 if len(classes) <= 256 else np.int32
                self.files.append(ArrayMask(path, shape[1:] if mask and channels else shape, small if mask else "f4"))

    def write(self, where: tuple[slice, ...], values: Any) -> None:
        if not self.mask:
            self.files[0].write(where, values)
        elif self.channels:
            for number, file in enumerate(self.files):
                file.write(where[1:], values[number])
                self.counts[number] += int(values[number].sum())
        else:
            self.files[0].write(where, values)
            self.counts += np.bincount(values.reshape(-1), minlength=len(self.classes))

    def close(self) -> None:
        for file in self.files:
            file.close()

    def drop(self) -> None:
        for file in self.files:
            file.drop()

    def record(self) -> Record:
        paths = [file.path.relative_to(self.out).as_posix() for file in self.files]
        if not self.mask:
            return {"prediction": paths[0]}
        pixels = dict(zip(self.classes, self.counts.tolist(), strict=True))
        masks = {"masks": dict(zip(self.classes, paths, strict=True))} if self.apart else {"mask": paths[0]}
        return {**masks, "pixels": pixels}
