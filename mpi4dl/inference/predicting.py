"""Predictions of images without labels: a record of each, written as it comes, and its mask beside it."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpi4dl._files import write_durably
from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import counted
from mpi4dl.comm import Refusal
from mpi4dl.datasets.base import DatasetError, printable
from mpi4dl.datasets.listed import ListedFiles
from mpi4dl.datasets.split import Named, Subset
from mpi4dl.engine import BatchOutputs
from mpi4dl.inference.images import Coverage, seen_of
from mpi4dl.inference.masks import (
    FOLDER,
    ArrayMask,
    FailingLater,
    StitchedMask,
    Target,
    Windows,
    band_height,
    bases_of,
    path_of,
)
from mpi4dl.inference.model import Prediction, Predictor
from mpi4dl.inference.records import (
    NOT_NUMBERS,
    Record,
    Records,
    checksum,
    columns_of,
    files_of,
    identity_of,
    is_same_file,
    is_undefined,
)

PICTURE, ARRAY, CLASS_MAP = ".png", ".npy", ".ome.tif"
AT_ONCE = 256  # images whose sizes are read before the first of them is looked at


class Predicting:
    """The predictions of a model for images, in order, and in the files of the folder `out` if there is one.
    Collective.

    Images that have a record there already are not looked at again, if their files are the same, and their masks there.
    With `maps` a heat map of each slide is written beside them. `remarks` are for the reader.
    """

    def __init__(
        self,
        model: Predictor,
        images: Named,
        where: str,
        out: Path | None,
        speaks: bool = False,
        maps: bool = False,
        min_area: float = 0.0,
    ) -> None:
        plan = model.plan
        self.min_area = min_area
        maps = maps and not model.task.dense
        if maps and max(plan.replicas, plan.num_microbatches) > 1:
            raise Refusal(
                "`maps` are made by ranks that share each slide: leave out `data` and `microbatches`, or say --no-maps"
            )
        self.maps = maps
        self.model, self.out, self.comm, self.speaks = model, out, model.comm, speaks
        task = model.task
        self.dense, self.binary = task.dense, task.binary
        self.apart = self.binary and len(model.classes) > 1
        size = model.config.data.image_size
        if self.dense and len(size) == 1:
            raise Refusal("masks of sequences are not written: predict by mpi4dl.Engine")
        if self.dense and out is None:
            raise Refusal("`out` is missing: it is the folder that masks are written to")
        if self.dense and model.asked_fit == "crop":
            raise Refusal("`fit` crop is not for masks, which are of whole images: leave it out, or choose resize")
        self.coverage = Coverage(self.comm, model, images, whole=self.dense)
        self.of_slides = self.dense and model.config.slides.slides is not None
        self.suffix = ARRAY
        if self.of_slides:
            self.suffix = CLASS_MAP
        elif self.dense and len(size) == 2:
            self.suffix = PICTURE
        self.records: Records | None = None
        self.bad: list[str] = []
        self.remarks: list[str] = list(self.coverage.remarks)
        if self.dense:
            frame = "x".join(map(str, size))
            self.remarks.append(f"masks have the size of their images; larger ones are seen by windows of {frame}")
        names = [images.name(index) for index in range(len(images))]
        self._bases = dict(zip(names, bases_of(names, self.suffix), strict=True))
        self._paths: dict[str, Path] = {}
        if isinstance(images, ListedFiles):
            self._paths = {name: images.path(index) for index, name in enumerate(names)}
        done: set[str] = set()
        if out is not None:
            columns = columns_of(type(task), model.classes, False, self.apart, self.coverage.crops)
            with self.comm.together():
                if self.comm.rank == 0:
                    self.records = Records(out, self._about(where, images), columns, self._keeps)
                    self._record_slides(out, images)
                    done = self.records.done
                    if self.records.dropped:
                        told = counted(len(self.records.dropped), "line")
                        self.remarks.append(
                            f"{told} left out, of images that are gone or changed, or without their masks"
                        )
        done = self.comm.broadcast_object(done)
        self.images = Subset(images, [index for index, name in enumerate(names) if name not in done])
        self._begun: dict[str, Any] = {}
        if self.records is not None:
            wanted = (name for name in names if name not in done and name in self._paths)
            self._begun = {name: _state_of(self._paths[name]) for name in wanted}
        already = len(names) - len(self.images)
        self.remarks += [f"{counted(already, 'image')} done before"] if already else []

    def _about(self, where: str, images: Named) -> Record:
        """Common values of all lines, which must be the same in a file that is continued. On rank 0; raises OSError."""
        model = self.model
        files = [model.weights, *([model.average] if model.average is not None else [])]
        return {
            "images": str(Path(where).absolute()) if isinstance(images, ListedFiles) else type(images).__name__,
            "task": model.about.task,
            "precision": model.config.training.precision,
            "weights": " ".join(map(checksum, files)),
            "model": model.digest,
            "fit": model.fit,
        }

    def _record_slides(self, out: Path, images: Named) -> None:
        """Write where slides are, for the viewer. On rank 0; raises OSError."""
        from mpi4dl.datasets.slides.record import SLIDES, record_of

        record = record_of(images)
        if record is not None:
            write_durably(out / SLIDES, (json.dumps(record, indent=1) + "\n").encode())

    def _keeps(self, record: Record) -> bool:
        """Whether the line of an image still holds: its file and its masks are those that it is of."""
        name = record["image"]
        if name not in self._bases or (name in self._paths and not is_same_file(record.get("file"), self._paths[name])):
            return False
        assert self.out is not None
        written = files_of(record)
        if self.dense or written:
            expected = [path.relative_to(self.out).as_posix() for path in (*self._files(name), *self._beside(name))]
            return written == expected and all((self.out / each).is_file() for each in expected)
        return True

    def _files(self, name: str) -> list[Path]:
        """Where the masks of an image are written."""
        assert self.out is not None
        numbers = range(len(self.model.classes)) if self.apart else (None,)
        return [self.out / FOLDER / path_of(self._bases[name], self.suffix, number) for number in numbers]

    def _beside(self, name: str) -> list[Path]:
        """What is written of a slide besides its mask."""
        from mpi4dl.inference.class_maps import files_beside

        return files_beside(self._files(name)[0])[1:] if self.of_slides else []

    def _class_map(self, index: int, path: Path) -> Any:
        """The file of a slide's mask. Raises OSError, DatasetError."""
        from mpi4dl.inference.class_maps import ClassMap, MapOptions

        options = MapOptions(self.min_area, self.model.config.slides.annotation_origin == "bounds")
        slide: Any = self.images.image(index)
        return ClassMap(path, slide, self.model.classes, options)

    def __iter__(self) -> Iterator[Record]:
        """The records of images that had none, alike on all ranks."""
        progress = ProgressOfImages(len(self.images), self.speaks and self.comm.rank == 0)
        with ExitStack() as closing:
            closing.callback(progress.close)
            if self.records is not None:
                closing.callback(self.records.close)
            for found in self._masks() if self.dense else self._answers():
                with self.comm.together((OSError,)):
                    ordered = [self._written(found[index]) for index in sorted(found)]
                ordered = self.comm.broadcast_object(ordered)
                self.bad += [_problem(each) for each in ordered if "error" in each]
                progress.advance(len(ordered), sum("error" in each for each in ordered))
                yield from ordered

    def _written(self, record: Record) -> Record:
        """A record as it is added to the files: with what its image is known by. Raises OSError."""
        if self.records is None:
            return record
        name = record["image"]
        if "error" not in record and name in self._paths:
            record = self._of_file(record, self._paths[name])
        self.records.add(record)
        return record

    def _of_file(self, record: Record, path: Path) -> Record:
        begun = self._begun[record["image"]]
        try:
            now = identity_of(path)
        except OSError:
            now = {}
        if begun is None or (now.get("bytes"), now.get("mtime_ns")) != begun:
            return {"image": record["image"], "error": f"{path}: was changed while the model looked at it"}
        return {**record, "file": now}

    def _answers(self) -> Iterator[dict[int, Record]]:
        """The records of batches by the number of the image, on rank 0. Collective."""
        task, classes = self.model.task, self.model.classes
        for seen in self.model.predictions(self.images, task.predictions):
            found: dict[int, Record] = dict(self._bad(seen))
            outputs = seen.outputs
            if outputs is not None and outputs.dense:
                found |= self._dense(seen, outputs)
            elif outputs is not None and outputs.whole is not None:
                for position, (index, values) in enumerate(zip(seen.indices, outputs.whole, strict=True)):
                    said = {"error": NOT_NUMBERS} if is_undefined(values) else task.answer(classes, values)
                    found[index] = self._named(index, said)
                    if self.maps and "error" not in said:
                        found[index] = self._mapped(index, position, found[index])
            yield {index: self._with_share(index, record) for index, record in found.items()}

    def _mapped(self, index: int, position: int, record: Record) -> Record:
        """Write the heat map of a slide, on rank 0; the record names its files, or the error."""
        from mpi4dl.datasets.slides.features import Bag
        from mpi4dl.inference.maps import PatchMap, write_map

        attended, patch = self.model.attended, self.model.config.model.patches
        if self.out is None or patch is None or position >= len(attended):
            return record
        places, values, name = attended[position]
        slide: Any = self.images.image(index)
        try:
            found = PatchMap(places, values.numpy(), patch, name)
            if isinstance(slide, Bag):
                where = slide.places()
                if where is None:
                    return record
                slide, found = where[0], PatchMap(where[1], found.values, where[2], name)
            paths = write_map(self.out, self._bases[self.images.name(index)], slide, found)
        except (DatasetError, OSError) as error:
            return self._named(index, {"error": printable(str(error))})
        return {**record, "maps": [path.relative_to(self.out).as_posix() for path in paths]}

    def _with_share(self, index: int, record: Record) -> Record:
        if "error" in record or not self.coverage.crops:
            return record
        try:
            share = seen_of(self.images.image(index).size, self.model.config.data.image_size)
        except DatasetError as error:
            return self._named(index, {"error": printable(str(error))})
        if share < 1 and not self.model.may_crop:
            return self._named(index, {"error": self.coverage.refusal(self.images.name(index), share)})
        self.coverage.add(share)
        return {**record, "seen": share}

    def _named(self, index: int, said: Record) -> Record:
        return {"image": self.images.name(index), **said}

    def _bad(self, seen: Prediction) -> Iterator[tuple[int, Record]]:
        for index, error in seen.errors.items():
            yield index, self._named(index, {"error": printable(error)})

    def _masks(self) -> Iterator[dict[int, Record]]:
        """The same of masks, each made of the windows of its image. Collective."""
        for start in range(0, len(self.images), AT_ONCE):
            indices = range(start, min(start + AT_ONCE, len(self.images)))
            targets = self.comm.broadcast_object([*map(self._target, indices)] if self.comm.rank == 0 else None)
            windows = Windows(self.images, indices, targets)
            stitching: dict[int, StitchedMask] = {}
            errors: dict[int, str] = {}
            for seen in self.model.predictions(windows, self._mask):
                for index, error in seen.errors.items():
                    errors.setdefault(windows.place(index)[0], error)
                with self.comm.together((OSError,)):
                    postponed = FailingLater()
                    if seen.outputs is not None:
                        self._stitch(windows, seen, seen.outputs, stitching, errors, postponed)
                    if postponed.error is not None:
                        for mask in stitching.values():
                            mask.drop()
                    postponed.settle()
                    ended = [windows.place(index) for index in (*seen.indices, *seen.errors)]
                    found = {}
                    for position in sorted(position for position, _, last in ended if last):
                        found[indices[position]] = self._finished(
                            indices[position], stitching.pop(position, None), errors.get(position)
                        )
                yield found

    def _target(self, index: int) -> Target:
        """How an image is seen; one that cannot be opened is found to be damaged when it is read."""
        model = self.model
        frame = model.config.data.image_size
        try:
            source = tuple(self.images.image(index).size)
        except DatasetError:
            source = frame
        fit = model.fit
        largest = model.about.largest if model.asked_fit == "auto" else None
        return Target.of(source, frame, fit, largest)

    def _mask(self, outputs: Any) -> Tensor:
        """The number of a class for each pixel, or of each class whether it is there; -1 of what is not a number."""
        found: Tensor = self.model.task.measured(outputs, None)
        if found.is_floating_point():
            found = found.masked_fill(found.isnan(), -1)
        return found.clamp(min=-1).to(torch.int16 if len(self.model.classes) < 1 << 15 else torch.int32)

    def _stitch(
        self,
        windows: Windows,
        seen: Prediction,
        outputs: BatchOutputs,
        stitching: dict[int, StitchedMask],
        errors: dict[int, str],
        postponed: FailingLater,
    ) -> None:
        """Put the windows of a batch into the masks that they belong to, on rank 0, some rows at a time. Collective."""
        frame = self.model.config.data.image_size
        shape = self._shape(outputs, self.binary)
        if shape[self.binary :] != frame:
            sides = ("x".join(map(str, each)) for each in (shape[self.binary :], frame))
            raise Refusal("the model's outputs have {} pixels for images of {}: masks need one each".format(*sides))
        layers = len(self.model.classes) if self.binary else 0
        for where, values in outputs.bands(band_height(math.prod(shape) // shape[-2])):
            position, intervals, _ = windows.place(seen.indices[where[0].start])
            if position in errors:
                continue
            if position not in stitching:
                paths = self._files(windows.images.name(windows.indices[position]))
                target = windows.targets[position]
                make = partial(self._class_map, windows.indices[position]) if self.of_slides else None
                made = postponed.do(partial(StitchedMask, paths, target, self.model.classes, layers, make))
                if made is None:
                    continue
                stitching[position] = made
            part = where[1 + self.binary :]
            postponed.do(partial(stitching[position].add, intervals, part, values[0].numpy()))

    def _finished(self, index: int, mask: StitchedMask | None, error: str | None) -> Record:
        """The record of an image all of whose windows were seen. Raises OSError."""
        if error is not None or mask is None:
            if mask is not None:
                mask.drop()
            return self._named(index, {"error": printable(error or "was not seen")})
        name = self.images.name(index)
        try:
            mask.close()
        except DatasetError as problem:
            mask.drop()
            return self._named(index, {"error": printable(str(problem))})
        if mask.undefined:
            told = f"{NOT_NUMBERS} at {mask.undefined} of {math.prod(mask.target.source)} pixels"
            return self._named(index, {"error": told})
        assert self.out is not None
        paths = [path.relative_to(self.out).as_posix() for path in self._files(name)]
        classes = self.model.classes
        masks: Record = {"masks": dict(zip(classes, paths, strict=True))} if self.apart else {"mask": paths[0]}
        if self.of_slides:
            masks["beside"] = [path.relative_to(self.out).as_posix() for path in self._beside(name)]
        return self._named(index, {**masks, "pixels": dict(zip(classes, mask.counts.tolist(), strict=True))})

    def _shape(self, outputs: BatchOutputs, channels: bool) -> tuple[int, ...]:
        """That of the dense outputs of an image. Collective."""
        extent = torch.zeros(1 + channels + len(self.model.config.data.image_size), dtype=torch.int64)
        for piece in outputs.pieces:
            extent = extent.maximum(torch.tensor([cut.stop for cut in piece.where]))
        return tuple(self.comm.all_reduce(extent, "max").tolist())[1:]

    def _dense(self, seen: Prediction, outputs: BatchOutputs) -> dict[int, Record]:
        """Write dense numbers of a batch, arrays, a few rows at a time. On rank 0 the records. Collective."""
        if self.out is None:
            raise Refusal("`out` is missing: it is the folder that dense outputs are written to")
        shape = self._shape(outputs, True)
        files: dict[int, ArrayMask] = {}
        with self.comm.together((OSError,)):
            postponed = FailingLater()
            for where, values in outputs.bands(band_height(math.prod(shape) // shape[-2])):
                number = where[0].start
                if number not in files:
                    path = self._files(self.images.name(seen.indices[number]))[0]
                    opened = postponed.do(partial(ArrayMask, path, shape, "f4"))
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
        return {
            seen.indices[n]: self._named(seen.indices[n], {"prediction": file.path.relative_to(self.out).as_posix()})
            for n, file in files.items()
        }


def _problem(record: Record) -> str:
    name, error = record["image"], record["error"]
    return error if Path(name).name in error else f"{name}: {error}"


def _state_of(path: Path) -> tuple[int, int] | None:
    """The size of a file, and when it was written."""
    try:
        told = path.stat()
    except OSError:  # which opening it will say
        return None
    return told.st_size, told.st_mtime_ns
