"""Features of the patches of slides, one file a slide: written by `mpi4dl embed`, TRIDENT or CLAM.

    NAME.h5    features   (N, D)    a row for each patch; float32, or another floating point type
               coords     (N, 2)    x and y of the upper left corner of each patch, in pixels of the full level 0
                                    attributes: patch_size, patch_size_level0, patch_level, level0_magnification,
                                    target_magnification, overlap, level0_width, level0_height, name
    NAME.pt    a tensor (N, D), as CLAM writes it

A leading axis of length 1 is dropped. Other datasets and missing attributes do no harm. The features of a slide are
read as an image of one row, whose pixels are the patches, and whose channels are the features.
"""

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mpi4dl._files import is_stored_zip, open_regular, write_durably
from mpi4dl.datasets.base import BadImage, DatasetError, WholeImage, blaming, package
from mpi4dl.datasets.files import WHOLE_SLIDES
from mpi4dl.datasets.kinds import FEATURES, SLIDES
from mpi4dl.datasets.listed import spread
from mpi4dl.datasets.reader_process import ask
from mpi4dl.datasets.samples import without_suffix
from mpi4dl.datasets.slides.annotations import FARTHEST
from mpi4dl.datasets.slides.dataset import Patches, SlideFolder, SlideOptions
from mpi4dl.datasets.slides.slide import MPP_AT_1X, Level, Slide, SlideFile, open_slide, plausible_mpp
from mpi4dl.geometry import Interval, ceil_div

DATASET, COORDS, SETTINGS = "features", "coords", "mpi4dl"  # datasets, and an attribute of the file
PICKLED = ".pt"
CHUNK_BYTES = 1 << 20  # of rows that HDF5 stores together
MOST_PACKED = 4096  # times: no compression makes features so much smaller
SMALL_BYTES = 1 << 26  # of datasets whose size is believed
MOST_ASPECT = 100.0
MOST_CELLS = 1 << 25  # of the grid that the patches of a slide lie in
ALIKE = 1.25  # times: microns per pixel of one magnification differ less, from scanner to scanner

Features = npt.NDArray[np.float32]
Coords = npt.NDArray[np.int64]


class Embedded(NamedTuple):
    """The features (N, D) of the patches of a slide, and x and y (N, 2) of their upper left corners at level 0."""

    features: Features
    coords: Coords


@dataclass(frozen=True)
class Bag:
    """The features of a slide as an image (1, N) of D channels, whose header is read and whose features are not.

    Attributes:
        coords: x and y of the patches in pixels of level 0; None if the file does not say them.
        side: the side of a patch in pixels of level 0; None without `coords`.
        settings: how `mpi4dl embed` made the features; empty if something else made them.
        attributes: those of `coords`.
        slide: the slide itself, if it is at hand.
    """

    path: Path
    size: tuple[int, int]
    channels: int
    coords: Coords | None = None
    side: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    slide: Path | None = None

    def read(self, *space: Interval) -> Features:
        """The features (rows, columns, D) of some patches. Raises BadImage."""
        rows, cols = space
        with np.errstate(over="ignore"):  # what is infinite is refused below
            if self.path.suffix.lower() == PICKLED:
                whole = _pickled(self.path)
                stored = (whole[0] if whole.ndim == 3 else whole)[slice(*cols)]
            else:
                stored = _array(self.path, DATASET, *cols)
            found = stored.astype(np.float32, copy=False)
        if not np.isfinite(found).all():
            patch = cols.start + int(np.flatnonzero(~np.isfinite(found).all(1))[0])
            raise BadImage(self.path, f"the features of patch {patch} are not finite numbers: embed the slide again")
        return found[None][: rows.length]

    @property
    def encoder(self) -> str | None:
        """How the features were made; None if the file does not say it.

        It is the encoder with a fingerprint of its weights, and the side and resolution of patches as they were asked
        for.
        """
        said = self.settings
        power, asked = _positive(said.get("magnification") or self._magnification), _positive(said.get("mpp"))
        if not said and power is None:
            return None
        by = f" by {said['model']} with weights {said['weights']}" if said else ""
        stains = said.get("stain_norm")
        normalized = f", stains by {stains}" if stains else ""
        side = _positive(said.get("patches") or self.attributes.get("patch_size"))
        patches = "" if side is None else f" of patches of {side:g} px"
        mpp = asked or (MPP_AT_1X / power if power else None)
        return f"features{by}{normalized}{patches}" + ("" if mpp is None else f" at {mpp:g} um per pixel")

    @property
    def _magnification(self) -> float | None:
        """That of patches, of a file that something else than `mpi4dl embed` wrote."""
        return None if self.settings else _positive(self.attributes.get("target_magnification"))

    @property
    def mpp(self) -> float | None:
        """Microns per pixel of patches; None if the file does not say them."""
        level0, power, side, side0 = (
            _positive(self.attributes.get(name))
            for name in ("level0_mpp", "level0_magnification", "patch_size", "patch_size_level0")
        )
        level0 = level0 or (MPP_AT_1X / power if power else None)
        if None not in (level0, side, side0):
            return level0 * side0 / side  # type: ignore[operator]
        return MPP_AT_1X / self._magnification if self._magnification else None

    def places(self, patches: Any, side: float) -> tuple[Slide, list[tuple[float, float]], float] | None:
        """Where the `patches` of a map lie: the slide at level 0, rows and columns in units of a side, and that side.

        Without the slide itself at hand, it is a white one. None if the file does not say where patches are. Raises
        BadImage, DatasetError.
        """
        if self.coords is None or self.side is None:
            return None
        slide = self._white(self.side) if self.slide is None else open_slide(self.slide).at(1.0)
        sides = self.side * np.asarray(slide.scale)
        rows, cols = (self.coords.max(0)[::-1] / sides + 1).tolist()
        if rows * cols > MOST_CELLS:
            raise BadImage(
                self.path,
                f"has patches of {self.side:g} px in a grid of {rows:.0f} x {cols:.0f}, which is too large for a map: "
                "its coords, or patch_size_level0, are damaged",
            )
        rows_cols = (self.coords[:, ::-1] - np.asarray(slide.origin)) / sides
        return slide, [(row, col) for row, col in rows_cols.tolist()], self.side

    def _white(self, side: float) -> Slide:
        assert self.coords is not None
        width, height = (
            max(1, int(_positive(self.attributes.get(f"level0_{name}")) or most + side))
            for name, most in zip(("width", "height"), self.coords.max(0), strict=True)
        )
        steps = [1 << number for number in range(max(width, height).bit_length())]
        sides = [(ceil_div(height, step), ceil_div(width, step), 3) for step in steps]
        white = [WholeImage(np.broadcast_to(np.uint8(255), each)) for each in sides]
        levels = map(Level, white, map(float, steps))
        mpp, power = (_positive(self.attributes.get(f"level0_{name}")) for name in ("mpp", "magnification"))
        found = plausible_mpp(mpp or (MPP_AT_1X / power if power else None))
        told: Any = self.attributes.get("level0_aspect")
        known = isinstance(told, list) and len(told) == 2 and all(map(_positive, told)) and max(told) <= MOST_ASPECT
        aspect = (float(told[0]), float(told[1])) if known else (1.0, 1.0)
        return Slide(SlideFile(self.path, tuple(levels), found, aspect=aspect))


def open_bag(path: Path) -> Bag:
    """The features in a file, its header read and the features not. Raises BadImage, and DatasetError without h5py."""
    if path.suffix.lower() == PICKLED:
        shape, kind = _pickled(path).shape, "f"
        return Bag(path, *_shape(path, shape, kind))
    facts, _ = _asked(path, None)
    found = _dataset(path, facts)
    size, channels = _shape(path, found["shape"], found["kind"])
    settings: Any = {}
    with suppress(ValueError, RecursionError):
        settings = json.loads(facts["settings"]) if isinstance(facts["settings"], str) else {}
    settings = settings if isinstance(settings, dict) and {"model", "weights"} <= settings.keys() else {}
    if COORDS not in facts["datasets"]:
        return Bag(path, size, channels, settings=settings)
    coords = _dataset(path, facts, COORDS)
    if tuple(coords["shape"]) not in ((size[1], 2), (1, size[1], 2)) or coords["kind"] not in "iuf":
        what = f"coords of shape {tuple(coords['shape'])} and kind {coords['kind']!r}"
        raise BadImage(path, f"has features of {size[1]} patches, but {what}: numbers (N, 2) fit")
    places = _array(path, COORDS)
    if not (np.abs(places) <= FARTHEST).all():
        raise BadImage(path, "has coords that are no pixels of level 0 of a slide: embed the slide again")
    places = places.astype(np.int64)
    attributes = coords["attributes"]
    side = _positive(attributes.get("patch_size_level0"))
    if side is None:  # the least usual step along rows and columns; CLAM begins a grid at each piece of tissue
        steps = [np.diff(places[np.lexsort((places[:, axis], places[:, 1 - axis]))], axis=0) for axis in (0, 1)]
        along = [each[(each[:, 1 - axis] == 0) & (each[:, axis] > 0), axis] for axis, each in enumerate(steps)]
        found_steps, counts = np.unique(np.concatenate(along), return_counts=True)
        side = float(found_steps[8 * counts >= counts.max()][0]) if len(counts) else 1.0
    return Bag(path, size, channels, places, side, settings, attributes)


def _shape(path: Path, shape: Sequence[int], kind: str) -> tuple[tuple[int, int], int]:
    """The size (1, N) and the number of features. Raises BadImage."""
    whole = tuple(shape)
    shape = whole[1:] if len(whole) == 3 and whole[0] == 1 else whole
    if len(shape) != 2 or kind != "f":
        raise BadImage(path, f"has features of shape {whole} and kind {kind!r}: expected floating point, (N, D)")
    if 0 in shape:
        raise BadImage(path, f"has no patches (features of shape {whole}): leave the slide out, or embed it again")
    return (1, int(shape[0])), int(shape[1])


def _asked(path: Path, wanted: Any) -> tuple[dict[str, Any], bytearray]:
    """What a child process reads of a file of HDF5: damaged ones can end a process. Raises BadImage, DatasetError."""
    package("h5py", f"{path}: reading features")
    with blaming(path):
        open_regular(path).close()
    answer, content = ask("h5py", path, wanted)
    if "error" in answer:
        reason = str(answer["error"]).partition("\n")[0]
        raise BadImage(path, f"cannot be read as HDF5 ({reason}): it is damaged, or no such file")
    return answer, content


def _array(path: Path, *wanted: Any) -> npt.NDArray[Any]:
    answer, content = _asked(path, wanted)
    return np.frombuffer(content, answer["dtype"]).reshape(answer["shape"])


def _dataset(path: Path, facts: Mapping[str, Any], name: str = DATASET) -> dict[str, Any]:
    """The facts of a dataset. Raises BadImage if it lies in another file, or the file cannot hold all of it."""
    found: dict[str, Any] | None = facts["datasets"].get(name)
    if found is None:
        has = ", ".join(facts["names"]) or "nothing"
        raise BadImage(path, f"has no dataset {name!r}, but {has}")
    if found["elsewhere"]:
        raise BadImage(path, f"has its {name} in another file: copy them into one file")
    claimed = max(prod(found["shape"]), prod(found["chunks"])) * found["itemsize"]
    if claimed > max(SMALL_BYTES, MOST_PACKED * found["stored"]):
        raise BadImage(
            path, f"claims {claimed >> 20} MiB of {name}, but holds {found['stored']} bytes of them: it is damaged"
        )
    return found


def _pickled(path: Path) -> npt.NDArray[np.float32]:
    """The tensor in a file of torch.save, without running what is in it. Raises BadImage."""
    with blaming(path, "cannot be read as a tensor that torch.save wrote"):
        try:
            archive = is_stored_zip(path)
        except ValueError as error:
            raise BadImage(path, str(error)) from error
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    found = found.get(DATASET) if isinstance(found, Mapping) else found
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        raise BadImage(path, f"holds a {type(found).__name__}: expected a tensor of floating point, (N, D)")
    if found.layout != torch.strided or found.is_meta:
        raise BadImage(path, f"holds a tensor of layout {found.layout} on {found.device}: expected a dense one")
    if found.numel() > max(1, found.untyped_storage().nbytes()):
        raise BadImage(path, f"claims {found.numel()} numbers, which it does not hold: it is damaged")
    return found.detach().float().numpy()


def _positive(value: Any) -> float | None:
    """A positive number of an attribute that a slide may have; None for what is none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and isfinite(value) and 0 < value <= FARTHEST else None


def write_features(path: Path, found: Embedded, attributes: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write a file of features, at once or not at all. Raises OSError, DatasetError."""
    h5py = package("h5py", f"{path}: writing features")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = max(1, min(len(found.features), CHUNK_BYTES // max(1, 4 * found.features.shape[1])))
    content = io.BytesIO()  # HDF5 that writes to a full disk itself ends the process, by a signal
    with h5py.File(content, "w") as file:
        file.attrs[SETTINGS] = json.dumps(settings, sort_keys=True)
        file.create_dataset(DATASET, data=found.features, chunks=(rows, found.features.shape[1]))
        coords = file.create_dataset(COORDS, data=found.coords)
        for name, value in attributes.items():
            if value is not None:
                coords.attrs[name] = value
    write_durably(path, content.getvalue())


class FeatureFolder(SlideFolder):
    """Features of slides by a table, or all of a folder: a dataset as `SlideFolder`, of bags instead of slides.

    `folder` has the files of features. `slides` is a folder of the slides themselves, for pictures.

    Attributes:
        channels: the number of features of a patch.
        values: how the features were made, if the files say it.
        slides_root: the folder of the slides themselves; None if they are not at hand.

    Raises:
        DatasetError: as `SlideFolder`, or no file can be read.
    """

    kind = FEATURES

    def __init__(
        self, source: Path, options: SlideOptions, *, folder: Path, slides: Path | None = None, **more: Any
    ) -> None:
        super().__init__(source, options, folder=None if source == folder else folder, **more)
        if self.pixels is not None:
            raise DatasetError(f"{source}: has annotations, and features have no pixels to segment: add a column label")
        self.slides_root, self._by_name = slides, dict[str, str]()
        if slides is not None:
            names, _ = SLIDES.below(slides)
            self._by_name = {without_suffix(Path(name).name, WHOLE_SLIDES): str(name) for name in names}
        problem: BadImage | None = None
        for index in range(len(self)):
            try:
                first = open_bag(self.path(index))
            except BadImage as error:
                problem = problem or error
                continue
            self.channels, self.values, self._first = first.channels, first.encoder, first
            self.remarks += (
                f"{first.channels} features of each patch" + (f": {first.encoder}" if first.encoder else ""),
            )
            break
        else:
            raise DatasetError(f"{folder}: no file of features can be read: {problem}")
        for index in spread(len(self)):
            with suppress(BadImage):  # which reading it will say
                bag = open_bag(self.path(index))
                if bag.mpp is None:
                    self.remarks += (
                        f"warning: {bag.path.name} does not say the resolution of its patches, by attributes of coords "
                        "such as level0_magnification: that all slides were read at one is not checked",
                    )
                    break

    def _opened(self, index: int) -> Any:
        found = open_bag(self.checked(index))
        if found.channels != self.channels:
            raise BadImage(
                found.path,
                f"has {found.channels} features of each patch, but other slides have {self.channels}: embed all slides "
                "by one model",
            )
        if None not in (self.values, found.encoder) and self.values != found.encoder:
            raise BadImage(found.path, f"has {found.encoder}, but {self._first.path.name} has {self.values}")
        mine, theirs = (_positive(bag.attributes.get("patch_size")) for bag in (found, self._first))
        if mine and theirs and mine != theirs:
            raise BadImage(
                found.path,
                f"has features of patches of {mine:g} px, but {self._first.path.name} of {theirs:g} px: embed all "
                "slides by patches of one size",
            )
        mine, theirs = found.mpp, self._first.mpp
        if mine and theirs and max(mine, theirs) > ALIKE * min(mine, theirs):
            raise BadImage(
                found.path,
                f"has features of patches at {mine:.3g} um per pixel, but {self._first.path.name} at {theirs:.3g}: "
                "embed all slides at one `mpp`",
            )
        root, slide = self.slides_root, self.slide_of(found.path.name)
        return Bag(**{**vars(found), "slide": None if root is None or slide is None else root / slide})

    def first_slide(self) -> tuple[str, ...]:
        return ()

    def told(self, index: int) -> dict[str, Any]:
        """What decides the map of a slide besides its features: the slide that the map is drawn over."""
        slide = self.slide_of(self.path(index).name)
        if self.slides_root is None or slide is None:
            return super().told(index)
        of_slide = (self.slides_root / slide).stat()
        return {**super().told(index), "slide": [of_slide.st_size, of_slide.st_mtime_ns]}

    def slide_of(self, name: str) -> str | None:
        """The slide of a file of features, from `slides_root` on; None if it is not at hand."""
        return self._by_name.get(without_suffix(Path(name).name, FEATURES.suffixes))

    def place_of(self, name: str) -> dict[str, str | None]:
        return {"file": self.slide_of(name)}

    def _all_patches(self, index: int, patch: int) -> Patches:
        count = self.image(index).size[1]
        return np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)
