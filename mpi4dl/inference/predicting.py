"""Predictions of images without labels: a record of each, written as it comes, and its mask beside it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mpi4dl._files import checksum, remove
from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import counted, some
from mpi4dl.comm import Refusal
from mpi4dl.datasets.base import DatasetError, printable
from mpi4dl.datasets.files import is_zarr
from mpi4dl.datasets.split import Named, Subset, in_whole
from mpi4dl.datasets.tiff import GDAL_NODATA, geo_tags
from mpi4dl.datasets.transform import FITTED
from mpi4dl.engine import BatchOutputs
from mpi4dl.inference.images import Coverage
from mpi4dl.inference.masks import (
    FOLDER,
    FailingLater,
    MappedFile,
    StitchedMask,
    Windows,
    array_file,
    band_height,
    bases_of,
    path_of,
    targets_of,
)
from mpi4dl.inference.model import Prediction, Predictor
from mpi4dl.inference.options import ToPredict
from mpi4dl.inference.pictures import (
    ZARR,
    PictureFile,
    picture_file,
    scale_of,
    suffix_of,
    tiff_header,
    write_zarr,
)
from mpi4dl.inference.records import NOT_NUMBERS, columns_of
from mpi4dl.results.formats import Record
from mpi4dl.results.job import FolderJob, ItemInput, settings_of
from mpi4dl.results.names import IMAGES, PREDICTIONS
from mpi4dl.results.slides import places_of
from mpi4dl.tasks.measuring import is_undefined

if TYPE_CHECKING:
    from mpi4dl.inference.cell_maps import CellMaps

PICTURE, ARRAY, CLASS_MAP = ".png", ".npy", ".ome.tif"
CELL_KINDS = ("activation", "gradient")  # of maps
AT_ONCE = 256  # images whose sizes are read before the first of them is looked at


def predictions_of(
    model: Predictor, images: Named, where: str, out: Path | None, options: Sequence[Any], speaks: bool = False
) -> "Predicting":
    """The predictions of a model for images by its task: see `Predicting`. Collective; raises Refusal on all ranks."""
    asked: ToPredict = next(each.predicting for each in options if hasattr(each, "predicting"))
    kind: type[Predicting]
    if model.task.makes_images:
        kind = _SlidePictures if model.trained.source.of_slides else _Pictures
    elif not model.task.dense:
        of_slides = (asked.slides or asked.features) is not None
        kind = _MappedAnswers if of_slides and out is not None else _Answers
    elif model.trained.source.of_slides:
        kind = _ClassMaps
    elif len(model.trained.size) == 1:
        raise Refusal("masks of sequences are not written: predict by mpi4dl.Engine")
    else:
        kind = _Masks
    return kind(model, images, where, out, asked, options, speaks)


class Predicting(ABC):
    """The predictions of a model for images, in order, and in the files of the folder `out` if there is one.
    Collective.

    Images that are done there already are not looked at again. `options` are the configs by which it is predicted.
    `remarks` are for the reader. Subclasses are for answers and for masks, of pictures and of slides.

    Raises:
        Refusal: `out` has predictions by other options, or what subclasses refuse. On all ranks.
    """

    suffix = ARRAY  # of the files of an image
    folder = FOLDER  # of these files, in `out`
    by_windows = False  # whether all of an image is seen
    maps = "none"  # the kind of heat maps that are written
    without_maps = ""  # what it is that none are for

    def __init__(
        self,
        model: Predictor,
        images: Named,
        where: str,
        out: Path | None,
        chosen: ToPredict,
        options: Sequence[Any],
        speaks: bool,
    ) -> None:
        self.chosen, self.model, self.out, self.comm, self.speaks = chosen, model, out, model.comm, speaks
        self.noun, self.images = model.assembly.source.noun, images
        if self.without_maps and chosen.maps not in ("none", "auto"):
            raise Refusal(f"`maps` {chosen.maps} is not for {self.without_maps}: leave it out")
        self.apart = model.task.binary and len(model.classes) > 1
        self.coverage = Coverage(self.comm, model, images, whole=self.by_windows)
        self.job: FolderJob | None = None
        self.bad: list[str] = []
        self.remarks: list[str] = [*self.coverage.remarks, *self._prepare()]
        names = [images.name(index) for index in range(len(images))]
        self._bases = dict(zip(names, bases_of(names, self.suffix), strict=True))
        self._wrote: dict[str, list[Path]] = {}  # files of images whose record is not yet added, on rank 0
        done: set[str] = set()
        if out is not None:
            columns = columns_of(type(model.task), model.classes, False, self.apart, self.coverage.crops)
            with self.comm.together():
                if self.comm.rank == 0:
                    settings = self._settings(where, images, options)
                    again = chosen.overwrite
                    how: dict[str, Any] = {"columns": columns, "more": places_of(images), "overwrite": again}
                    self.job = FolderJob(out, PREDICTIONS, settings, self._inputs(images), **how)
                    for left in (out / self.folder).rglob(".*.new"):
                        remove(left)
                    done = {*self.job.done}
                    if self.job.dropped and not again:
                        told = counted(len(self.job.dropped), "line")
                        self.remarks.append(
                            f"{told} left out, of {self.noun}s that are gone or changed, or without their files"
                        )
        done = self.comm.broadcast_object(done)
        self.images = Subset(images, [index for index, name in enumerate(names) if name not in done])
        already = len(names) - len(self.images)
        self.remarks += [f"{counted(already, self.noun)} done before"] if already else []

    def _prepare(self) -> list[str]:
        """Get ready; remarks on what will be made. Raises Refusal for what cannot be."""
        return []

    @abstractmethod
    def _records(self) -> Iterator[dict[int, Record]]:
        """The records of images that were looked at, by the number of the image, on rank 0. Collective."""

    def _settings(self, where: str, images: Any, options: Sequence[Any]) -> Record:
        """What decides all records. On rank 0; raises OSError."""
        model = self.model
        files = [model.weights, *([model.average] if model.average is not None else [])]
        found = settings_of(
            *options,
            weights=" ".join(f"{path.name} {checksum(path)}" for path in files),
            model=model.digest,
            transforms=model.own.get("transforms"),
            maps=self.maps,
        )
        named = {name: found[name] for name in ("slides", "features") if found[name] != "none"} or {"images": where}
        own = None if images.root is not None else type(images).__name__
        return found | {name: own or str(Path(at).absolute()) for name, at in named.items()}

    def _inputs(self, images: Any) -> dict[str, ItemInput | None]:
        """What each image is made of; nothing tells those apart that are no files."""
        if images.root is None:
            return dict.fromkeys(self._bases)
        numbers = range(len(images))
        told = ({**images.told(n), "as": str(self._bases[images.name(n)])} for n in numbers)
        return {images.name(n): ItemInput(images.path(n), each) for n, each in zip(numbers, told, strict=True)}

    def _files(self, name: str) -> list[Path]:
        """Where the masks of an image are written."""
        assert self.out is not None
        numbers = range(len(self.model.classes)) if self.apart else (None,)
        return [self.out / self.folder / path_of(self._bases[name], self.suffix, number) for number in numbers]

    def __iter__(self) -> Iterator[Record]:
        """The records of images that had none, alike on all ranks."""
        progress = ProgressOfImages(len(self.images), self.speaks and self.comm.rank == 0, self.noun)
        with ExitStack() as closing:
            closing.callback(progress.close)
            if self.job is not None:
                closing.callback(self.job.close)
            for found in self._records():
                with self.comm.together((OSError,)):
                    ordered = [self._written(found[index]) for index in sorted(found)]
                ordered = self.comm.broadcast_object(ordered)
                self.bad += [_problem(each) for each in ordered if "error" in each]
                progress.advance(len(ordered), sum("error" in each for each in ordered))
                yield from ordered

    def _written(self, record: Record) -> Record:
        """A record as it is added to the files. Raises OSError."""
        if self.job is None:
            return record
        return self.job.add(record, self._wrote.pop(record["image"], ()))

    def summary(self) -> tuple[str, ...]:
        """Remarks on what was made of the images."""
        return tuple(self.coverage.summary())

    def _form(self) -> str:
        """How files end that are made of images which are folders of Zarr, or TIFF files that say where on Earth they
        lie; empty for others. The first image tells.
        """
        found = ""
        with self.comm.together((OSError,)):
            if self.comm.rank == 0 and len(self.images):
                with suppress(DatasetError):
                    found = ".tif" if self._tags(0) else ""
                    path = self._path(0)
                    found = path.suffix.lower() if path is not None and is_zarr(path) else found
        return str(self.comm.broadcast_object(found))

    def _path(self, index: int) -> Path | None:
        whole, indices = in_whole(self.images)
        path: Callable[[int], Path] | None = getattr(whole, "path", None)
        return None if path is None else path(indices[index])

    def _tags(self, index: int, *others: int) -> list[Any]:
        """The tags of an image that say where it lies. Raises DatasetError, OSError."""
        path = self._path(index)
        return [] if path is None or path.is_dir() else geo_tags(path, *others)

    def _named(self, index: int, said: Record) -> Record:
        return {"image": self.images.name(index), **said}


class _Answers(Predicting):
    """Answers of whole images, such as a class or numbers. Dense ones are written as arrays."""

    cells: "CellMaps | None" = None

    def _records(self) -> Iterator[dict[int, Record]]:
        for seen in self.model.predictions(self.images, self.model.task.predictions, self.cells):
            found = {index: self._named(index, {"error": printable(error)}) for index, error in seen.errors.items()}
            outputs = seen.outputs
            if outputs is not None and outputs.dense:
                found |= self._dense(seen, outputs)
            elif outputs is not None:
                whole = () if outputs.whole is None else zip(seen.indices, outputs.whole, strict=True)
                with self.comm.together((OSError,)):
                    for position, (index, values) in enumerate(whole):
                        found[index] = self._answered(index, position, values)
            yield {index: self._with_share(index, record) for index, record in found.items()}

    def _answered(self, index: int, position: int, values: Tensor) -> Record:
        """The record of an image, which has this position in its batch, on rank 0. Raises OSError."""
        said = {"error": NOT_NUMBERS} if is_undefined(values) else self.model.task.answer(self.model.classes, values)
        return self._named(index, said)

    def _with_share(self, index: int, record: Record) -> Record:
        if "error" in record or not self.coverage.crops:
            return record
        try:
            return {**record, "seen": self.coverage.add(self.images, index)}
        except (DatasetError, Refusal) as error:
            return self._named(index, {"error": printable(str(error))})

    def _dense(self, seen: Prediction, outputs: BatchOutputs) -> dict[int, Record]:
        """Write dense numbers of a batch, arrays, a few rows at a time. On rank 0 the records. Collective."""
        if self.out is None:
            raise Refusal("`out` is missing: it is the folder that dense outputs are written to")
        shape = outputs.extent()
        files: dict[int, MappedFile] = {}
        scale = self._scale(seen, shape)
        with self.comm.together((OSError,)):
            postponed = FailingLater()
            for where, values in outputs.bands(band_height(math.prod(shape) // shape[-2])):
                number = where[0].start
                if number not in files:
                    opened = postponed.do(partial(self._opened, seen.indices[number], shape, scale))
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
        found = {}
        for n, file in files.items():
            index, path = seen.indices[n], file.path
            if file.undefined:
                found[index] = self._named(index, {"error": NOT_NUMBERS})
                continue
            self._wrote[self.images.name(index)] = [path]
            found[index] = self._named(index, {"prediction": path.relative_to(self.out).as_posix()})
        return found

    def _scale(self, seen: Prediction, shape: tuple[int, ...]) -> int:
        """How many times as large as their images outputs are. Collective; raises Refusal."""
        return 1

    def _opened(self, index: int, shape: tuple[int, ...], scale: int) -> MappedFile:
        """The file of dense numbers of an image, of which the model's outputs have this shape. Raises OSError."""
        return array_file(self._files(self.images.name(index))[0], shape, "f4")


class _Pictures(_Answers):
    """Pictures that the model makes, of the size of their images, or a multiple."""

    folder = IMAGES

    def _prepare(self) -> list[str]:
        self.suffix = self._form() or suffix_of(self.model.about.values, self.model.about.num_outputs)
        return []

    def _scale(self, seen: Prediction, shape: tuple[int, ...]) -> int:
        return scale_of(shape[1:], seen.sizes)

    def _opened(self, index: int, shape: tuple[int, ...], scale: int) -> MappedFile:
        height, width = shape[1:]
        depth, tags = self.model.about.values, []
        if self.model.trained.makes_pictures:
            source: Any = self.images.image(index)
            height, width = (scale * side for side in source.size)
            if scale == 1:  # others have pixels at other places
                tags = self._tags(index, *(GDAL_NODATA,) * (getattr(source, "values", None) == depth))
        path = self._files(self.images.name(index))[0]
        return picture_file(path, (height, width), shape[0], depth, tags)


class _SlidePictures(_Pictures):
    """Pictures that the model makes of slides, pyramids of the resolution at which it sees them."""

    suffix, without_maps = CLASS_MAP, "models that make images, whose pictures are their answers"

    def _prepare(self) -> list[str]:
        return []

    def _opened(self, index: int, shape: tuple[int, ...], scale: int) -> MappedFile:
        from mpi4dl.inference.class_maps import write_picture

        slide: Any = self.images.image(index)
        if scale > 1:
            raise Refusal(f"the model makes pictures {scale} times as large as slides: expected those of their size")
        path = self._files(self.images.name(index))[0]
        write = partial(write_picture, slide, self.model.classes)
        return PictureFile(path, (*slide.size, shape[0]), np.uint8, encode=write)


class _MappedAnswers(_Answers):
    """Answers of slides with the heat maps that were asked for.

    Raises Refusal for maps that the model or the plan cannot make; auto leaves them out with a remark.
    """

    num_unmapped = 0  # slides whose model has nothing to map

    def _prepare(self) -> list[str]:
        asked, plan, of_patches = self.chosen, self.model.plan, self.model.trained.patch is not None
        why, kind = self._no_maps(), asked.maps
        if kind == "none":
            return []
        if kind == "auto":
            if why and not of_patches:
                return [f"no maps: {why}"]
            kind = "attention" if of_patches else "activation"
        if (kind == "attention") != of_patches:
            other = "attention or auto" if of_patches else "activation or gradient"
            what = "patches" if of_patches else "whole slides"
            raise Refusal(f"`maps` {kind} is not for a model of {what}: choose {other}")
        if kind == "attention" and (asked.map_class or asked.map_layer):
            name = "map_class" if asked.map_class else "map_layer"
            raise Refusal(f"`{name}` is for models that see whole slides: leave it out for one of patches")
        if kind == "attention" and max(plan.replicas, plan.num_microbatches) > 1:
            raise Refusal("`maps` are made by ranks that share each slide: leave out `data`, or say --no-maps")
        self.maps = kind
        if kind in CELL_KINDS:
            if why:
                raise Refusal(f"`maps` {kind}: {why}, or choose none")
            self.cells = self._cell_maps()
        return []

    def _no_maps(self) -> str:
        """Why this plan makes no maps of whole slides, and what to change; empty if it does."""
        model, plan = self.model, self.model.plan
        if max(plan.replicas, plan.num_microbatches, plan.num_stages) > 1:
            return "ranks must share each slide by `tiles` alone: leave out `data` and `stages`"
        if FITTED[model.fit].windows or FITTED[model.fit].scales:
            return f"slides were fitted by {model.fit}, which changes their scale: train with `fit` pad"
        if len(model.trained.size) != 2:
            return "maps are of pictures: leave them out of volumes and sequences"
        return ""

    def _cell_maps(self) -> "CellMaps":
        """What maps the slides. Raises Refusal for a class or layer that the model does not have."""
        from mpi4dl.inference.cell_maps import CellMaps, CellOptions

        asked, model, number = self.chosen, self.model, None
        if asked.map_class is not None:
            if asked.map_class not in model.classes:
                raise Refusal(f"`map_class` {asked.map_class} is no class of the model: {some(model.classes)}")
            number = model.classes.index(asked.map_class)
        (part,) = model.runner.stages.parts.values()
        return CellMaps(part.module, part.grid, CellOptions(self.maps, number, asked.map_layer), asked.maps != "auto")

    def _answered(self, index: int, position: int, values: Tensor) -> Record:
        """Write the heat map of a slide, too; the record names its files, or the error."""
        from mpi4dl.inference.maps import PatchMap, map_of_cells, write_map

        record = super()._answered(index, position, values)
        if self.maps == "none" or "error" in record:
            return record
        attended, patch = self.model.attended, self.model.trained.patch
        cells = () if self.cells is None else self.cells.found
        self.num_unmapped += self.cells is not None and not cells
        if self.out is None or position >= max(len(cells), 0 if patch is None else len(attended)):
            return record
        slide: Any = self.images.image(index)
        try:
            if self.cells is not None:
                cell_values, side, number = cells[position]
                of = f" {self.model.classes[number]}" * (len(self.model.classes) > 1)
                found = map_of_cells(slide, cell_values.numpy(), side, f"{self.maps}{of}")
            else:
                assert patch is not None
                places, weights, name = attended[position]
                found = PatchMap(places, weights.numpy(), patch, name)
            where = slide.places(found.places, found.patch)
            if where is None:
                return record
            found = found._replace(places=where[1], patch=where[2])
            paths = write_map(self.out, self._bases[self.images.name(index)], where[0], found)
        except DatasetError as error:
            return self._named(index, {"error": printable(str(error))})
        self._wrote[record["image"]] = paths
        return {**record, "maps": [path.relative_to(self.out).as_posix() for path in paths]}

    def summary(self) -> tuple[str, ...]:
        problems = (self.cells.problem,) if self.num_unmapped and self.cells is not None else ()
        return (*super().summary(), *problems)


class _Masks(Predicting):
    """Masks of images, made of the windows of each."""

    suffix, by_windows = PICTURE, True
    size_of_masks = "masks have the size of their images"

    def _prepare(self) -> list[str]:
        if self.out is None:
            raise Refusal("`out` is missing: it is the folder that masks are written to")
        if self.model.asked_to_crop:
            raise Refusal("`fit` crop is not for masks, which are of whole images: leave it out, or choose resize")
        self.num_windows = [0, 0]  # that show tissue, and in all
        self.suffix = self.suffix if len(self.model.trained.size) == 2 else ARRAY
        found = self._form()
        self.form = found if self.suffix == PICTURE or found == ZARR else ""
        self.suffix = self.form or self.suffix
        frame = "x".join(map(str, self.model.trained.size))
        return [f"{self.size_of_masks}; larger {self.noun}s are seen by windows of {frame}"]

    def _opener(self, index: int) -> Callable[[Path], MappedFile] | None:
        """What opens the file of an image's mask; None: that of pictures and volumes."""
        if not self.form:
            return None
        depth = "uint8" if len(self.model.classes) <= 256 else "uint16"
        size, tags = self.images.image(index).size, self._tags(index)
        if self.form == ZARR:
            space = "zyx"[-len(size) :]
            return lambda path: MappedFile(path, size, depth, encode=partial(write_zarr, space=space))
        return lambda path: MappedFile(path, size, depth, tiff_header(path, size, depth, tags))

    def _records(self) -> Iterator[dict[int, Record]]:
        for start in range(0, len(self.images), AT_ONCE):
            indices = range(start, min(start + AT_ONCE, len(self.images)))
            targets = targets_of(self.model, self.images, indices)
            self.num_windows[0] += sum(target.num_windows for target in targets)
            self.num_windows[1] += sum(target.num_in_all for target in targets)
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
                    ended = [windows.place(index) for index in (*seen.indices, *seen.errors)]
                    found = {}
                    try:
                        postponed.settle()
                        for position in sorted(position for position, _, last in ended if last):
                            found[indices[position]] = self._finished(
                                indices[position], stitching.get(position), errors.get(position)
                            )
                            stitching.pop(position, None)
                    except OSError:
                        for mask in stitching.values():
                            mask.drop()
                        raise
                yield found

    def summary(self) -> tuple[str, ...]:
        seen, of = self.num_windows
        if not (of and self.model.skips_glass):
            return ()
        told = f"{seen:,} of {counted(of, 'window')} of slides show tissue"
        return (f"{told}; pixels of others are of class {printable(self.model.classes[0])}",)

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
        frame, binary = self.model.trained.size, self.model.task.binary
        shape = outputs.extent()
        if shape[binary:] != frame:
            sides = ("x".join(map(str, each)) for each in (shape[binary:], frame))
            raise Refusal("the model's outputs have {} pixels for images of {}: masks need one each".format(*sides))
        layers = len(self.model.classes) if binary else 0
        for where, values in outputs.bands(band_height(math.prod(shape) // shape[-2])):
            position, intervals, _ = windows.place(seen.indices[where[0].start])
            if position in errors:
                continue
            if position not in stitching:
                paths = self._files(windows.images.name(windows.indices[position]))
                target, opener = windows.targets[position], self._opener(windows.indices[position])
                made = postponed.do(partial(StitchedMask, paths, target, self.model.classes, layers, opener))
                if made is None:
                    continue
                stitching[position] = made
            part = where[1 + binary :]
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
        files, beside = [file.path for file in mask.files], mask.files[0].beside
        self._wrote[name] = [*files, *beside]
        paths = [path.relative_to(self.out).as_posix() for path in files]
        classes = self.model.classes
        masks: Record = {"masks": dict(zip(classes, paths, strict=True))} if self.apart else {"mask": paths[0]}
        if beside:
            masks["beside"] = [path.relative_to(self.out).as_posix() for path in beside]
        return self._named(index, {**masks, "pixels": dict(zip(classes, mask.counts.tolist(), strict=True))})


class _ClassMaps(_Masks):
    """Class maps of slides, each with a picture and polygons beside it."""

    suffix, without_maps = CLASS_MAP, "segmentation, whose class maps are its maps"
    size_of_masks = "class maps have the resolution of the model"

    def _opener(self, index: int) -> Callable[[Path], MappedFile]:
        from mpi4dl.inference.class_maps import class_map

        images: Any = self.images
        how = {"min_area": self.chosen.min_area, "in_bounds": self.model.trained.in_bounds}
        return lambda path: class_map(path, images.image(index), self.model.classes, **how)


def _problem(record: Record) -> str:
    name, error = record["image"], record["error"]
    return error if Path(name).name in error else f"{name}: {error}"
