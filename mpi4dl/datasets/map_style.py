"""A dataset of the user's own as the loaders need it: its face looked at once, its samples named and checked.

One that answers `mpi4dl.datasets.Dataset` reads boxes; any other that PyTorch's DataLoader takes, with `__len__` and
`__getitem__`, gives whole samples, of which boxes are cut.
"""

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from mpi4dl.datasets.base import IGNORED, BadImage, DatasetError, Values, Whole, WholeImage, unit_values
from mpi4dl.datasets.colour import rgb_of_pillow
from mpi4dl.datasets.labels import FORMS
from mpi4dl.datasets.listed import text_of
from mpi4dl.datasets.masks import BLACK_AND_WHITE, IGNORE_INDEX, indices_of
from mpi4dl.datasets.randomness import DatasetRandomness
from mpi4dl.datasets.split import strata_of
from mpi4dl.geometry import Interval

# A dataset as PyTorch's DataLoader takes it, sample by sample: whole images, of which boxes are cut.

MOST_CHANNELS = 4
IMAGES, TARGETS = ("image", "img", "pixel_values"), ("label", "labels", "target", "mask")  # keys of a mapping
_KEPT = 4  # samples, of which the label was asked for and the image comes next


class MappedSamples:
    """`whole[index]` is (image, target), or a mapping with one of `IMAGES` and one of `TARGETS`, as MONAI,
    Albumentations and Hugging Face have it.

    Random parts of it are drawn by a key, alike on all ranks, in the main thread: see randomness.py.

    Images are of Pillow, or tensors (channels, rows, columns), or arrays with channels last; bytes, or floating point
    whose range is 0 to 1. A picture of Pillow as the target is a mask, whose 255 is ignored.

    Raises:
        DatasetError: a sample is something else.
    """

    def __init__(self, whole: Any) -> None:
        self._whole, self._kind = whole, type(whole).__name__
        self.randomness = DatasetRandomness(whole)
        self._key: tuple[int, ...] = ()
        self._of_key = lru_cache(_KEPT)(self._load)
        self.mask_values: set[int] = set()  # of pictures of Pillow, as far as samples were loaded
        self._labels: dict[int, Any] = {}
        self._targets: list[int] = []  # which tell the labels without the images, if there are any
        if hasattr(whole, "task"):
            self.task = whole.task
        self.channels: int = self._of_key(0, ())[0].shape[-1]
        targets = getattr(whole, "targets", None)
        given: Any = targets.tolist() if isinstance(targets, np.ndarray | torch.Tensor) else targets
        listed = isinstance(given, list) and len(given) == len(whole) and all(type(target) is int for target in given)
        # Samples may transform their targets, or stand in another order.
        if listed and not getattr(whole, "target_transform", None) and self._agree(given):
            self._targets = given
        self.knows_labels = bool(self._targets)
        named, count = getattr(whole, "classes", None), getattr(whole, "num_classes", 0)
        if named is None or (hasattr(named, "__len__") and not len(named)):
            named = tuple(map(str, range(count))) if isinstance(count, int) else ()
        self.classes: Any = named

    def __len__(self) -> int:
        return len(self._whole)

    def drawn(self, key: tuple[int, ...]) -> "MappedSamples":
        """The samples as they are drawn by a key."""
        other = copy.copy(self)
        other._key = key
        return other

    def forget(self) -> None:
        """Ask for samples anew."""
        self._of_key.cache_clear()

    def _agree(self, targets: list[int]) -> bool:
        """Whether some samples have these labels; one that cannot be read does not disagree."""
        agree = True
        for index in (0, len(targets) // 2, len(targets) - 1):
            with suppress(*_UNREADABLE):
                agree = agree and _is_class(self._of_key(index, ())[1], targets[index])
        return agree

    def label(self, index: int) -> Any:
        if self._targets:
            return self._targets[index]
        if index in self._labels:
            return self._labels[index]
        label = self._of_key(index, self._key)[1]
        if np.ndim(label) < 2 and not self.randomness.drawn:
            self._labels[index] = label
        return label

    def image(self, index: int) -> "_Sample":
        return _Sample(self._of_key(index, self._key)[0])

    def _load(self, index: int, key: tuple[int, ...]) -> tuple[npt.NDArray[Any], Any]:
        with self.randomness.seeded(*key, index):
            found = self._whole[index]
            named = found._asdict() if hasattr(found, "_asdict") else found
            if isinstance(named, Mapping):
                keys = [[key for key in names if key in named] for names in (IMAGES, TARGETS)]
                found = tuple(named[first] for (first,) in keys) if [*map(len, keys)] == [1, 1] else found
            if not isinstance(found, tuple | list) or len(found) != 2:
                what = f"{len(found)} things" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
                mapping = f"a mapping with one of {', '.join(IMAGES)} and one of {', '.join(TARGETS)}"
                raise DatasetError(
                    f"the dataset {self._kind} gives {what} as sample {index}: expected (image, target), or {mapping}"
                )
            pixels, target = self._pixels(found[0], index), self._target(found[1], index)
        if self._targets and not _is_class(target, self._targets[index]):
            raise DatasetError(
                f"the dataset {self._kind} has {self._targets[index]} in `targets` for sample {index}, but gives "
                f"{target!r} as its label: rename `targets`, or keep it as the samples are"
            )
        return pixels, target

    def _pixels(self, found: Any, index: int) -> npt.NDArray[Any]:
        if isinstance(found, PIL.Image.Image):
            return rgb_of_pillow(found)
        if isinstance(found, torch.Tensor):
            pixels = found.detach().cpu().numpy()
            pixels = pixels[..., None] if pixels.ndim == 2 else np.moveaxis(pixels, 0, -1)
        elif isinstance(found, np.ndarray):
            pixels = found[..., None] if found.ndim == 2 else found
            if pixels.shape[-1] > MOST_CHANNELS >= pixels.shape[0]:
                pixels = np.moveaxis(pixels, 0, -1)
        else:
            raise DatasetError(
                f"the dataset {self._kind} gives a {type(found).__name__} as image {index}: expected one of Pillow, a "
                "tensor (channels, rows, columns), or an array (rows, columns, channels)"
            )
        if not 3 <= pixels.ndim <= 4 or pixels.size == 0 or pixels.dtype.kind not in "biuf":
            raise DatasetError(
                f"the dataset {self._kind} gives an image {index} of {pixels.dtype} and shape {tuple(found.shape)}: "
                "expected numbers, as (channels, rows, columns) of a tensor, or with channels last of an array"
            )
        return pixels

    def _target(self, found: Any, index: int) -> Any:
        if isinstance(found, PIL.Image.Image):
            if found.mode not in ("1", "L", "P", "I", "I;16"):
                raise DatasetError(
                    f"the dataset {self._kind} gives a picture in colours ({found.mode}) as the target of sample "
                    f"{index}: a mask is grey or has a palette, of numbers of classes"
                )
            mask = indices_of(found).astype(np.int64)
            self.mask_values |= {*np.unique(mask).tolist()}
            return np.where(mask == IGNORE_INDEX, IGNORED, mask)
        if isinstance(found, Mapping | str) or found is None:
            raise DatasetError(
                f"the dataset {self._kind} gives a {type(found).__name__} as the target of sample {index}: expected a "
                "class from 0 on, numbers, or a mask"
            )
        return found.detach().cpu() if isinstance(found, torch.Tensor) else found


def _is_class(label: Any, number: int) -> bool:
    """Whether a label is this class."""
    found = torch.as_tensor(label)
    return found.numel() == 1 and not found.is_floating_point() and int(found) == number


class _Sample(WholeImage):
    """The image of a sample, which ranks compare by its `digest`."""

    @property
    def digest(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self._pixels).data)


FACE = ("__len__", "label", "image", "channels")
_LOOKED_AT = 3
LONGEST = 200  # characters of a label in an error
_LOOKED_PX = 64  # along each axis, at three places of an image that is read box by box
_LOOKS = 4  # at each sample
_UNREADABLE = (OSError, EOFError, SyntaxError, zlib.error)  # what decoders raise of damaged files


class OwnDataset(Whole):
    """A dataset of the user's; a sample without a name is called by its number.

    The task is the dataset's `task`, or follows from the form of a label. An integer is a class, integers of 0 and 1
    are multilabel, floating point is regression, and two dims or more are a mask. `asked` is the task by the option, or
    auto: labels must be for that, and floating point of 0 and 1 is asked about.

    Raises:
        DatasetError: it lacks a part of what `base.Dataset` names, has no samples, or gives something else for them.
    """

    def __init__(self, whole: Any, asked: str | None = None) -> None:
        self.kind = type(whole).__name__
        self.remarks: tuple[str, ...] = ()
        self._patient = self._patients_of(whole)
        if hasattr(whole, "__len__") and len(whole) < 1:
            raise DatasetError(f"the dataset {self.kind} has no samples")
        if not hasattr(whole, "image") and hasattr(whole, "__getitem__") and hasattr(whole, "__len__"):
            whole = MappedSamples(whole)
            self.remarks = (
                f"{self.kind} gives whole samples: each rank reads all of an image for its box of it, as it is, and "
                "flips, crops and normalises that; a dataset with image(index) reads boxes",
            )
        missing = [name for name in FACE if not hasattr(whole, name)]
        if missing:
            raise DatasetError(
                f"the dataset {self.kind} has no {', '.join(missing)}: it needs __len__, channels, label(index) and "
                "image(index), as mpi4dl.datasets.Dataset says, or __len__ and __getitem__(index) -> (image, target)"
            )
        if not isinstance(whole.channels, int) or whole.channels < 1:
            raise DatasetError(
                f"the dataset {self.kind} has {whole.channels!r} channels: it must be a number of at least 1"
            )
        self.whole = whole
        self._key: tuple[int, ...] = ()
        mapped = isinstance(whole, MappedSamples)
        self._randomness: DatasetRandomness = whole.randomness if mapped else DatasetRandomness(whole)
        self.channels: int = whole.channels
        self._shape: tuple[int, ...] | None = None
        first: dict[str, int] = {}
        for index in range(len(self)):
            other = first.setdefault(self.name(index), index)
            if other != index:
                raise DatasetError(
                    f"the dataset {self.kind} calls samples {other} and {index} {self.name(index)!r}: a name is of one "
                    "sample; patient(index) keeps several together"
                )
        self.task = self._task(asked)
        self.classes: tuple[str, ...] = self._classes()
        if len({self.print() for _ in range(_LOOKS)}) > 1:
            raise DatasetError(
                f"the dataset {self.kind} gives another image or label of one sample each time, so that ranks would "
                "have other ones: let it draw by the generators of Python, NumPy or PyTorch, which get the same state "
                "for a sample on all ranks, or leave random transforms to `flip`, `random_crop`, `jitter` and "
                "`transforms`"
            )
        if mapped and whole.mask_values in BLACK_AND_WHITE:
            raise DatasetError(
                f"masks of the dataset {self.kind} hold nothing but 0 and 255, and 255 is ignored: if white is class "
                "1, give an array of 0 and 1"
            )
        if self.draws:
            self.remarks += (
                f"{self.kind} draws random numbers ({', '.join(sorted(self._randomness.drawn))}): by the seed, the "
                "epoch and the sample, alike on all ranks; it is read in the main thread, and not ahead",
            )

    compared = True

    @property
    def draws(self) -> bool:
        """Whether it was seen to draw random numbers, which it may do in the main thread alone."""
        return bool(self._randomness.drawn)

    def drawn(self, key: tuple[int, ...]) -> "OwnDataset":
        """The samples as they are drawn by a key."""
        other = copy.copy(self)
        other._key = key
        if isinstance(self.whole, MappedSamples):
            other.whole = self.whole.drawn(key)
        return other

    def _seeded(self, index: int) -> AbstractContextManager[Any]:
        """The context of a call of the user's code for a sample; one that gives whole samples has its own."""
        mapped = isinstance(self.whole, MappedSamples)
        return nullcontext() if mapped else self._randomness.seeded(*self._key, index)

    def __len__(self) -> int:
        return len(self.whole)

    def name(self, index: int) -> str:
        return str(self.whole.name(index)) if hasattr(self.whole, "name") else super().name(index)

    @property
    def tells_patients(self) -> bool:
        """Whether it says whose samples belong together."""
        return self._patient is not None

    @property
    def patients(self) -> list[str]:
        """The patient of each sample; without any, its name."""
        return [str(self._patient(index)) if self._patient else self.name(index) for index in range(len(self))]

    def _patients_of(self, whole: Any) -> Callable[[int], Any] | None:
        """Gives the patient of each sample by a method `patient`, or by a list `patient` or `patients`."""
        one, several = getattr(whole, "patient", None), getattr(whole, "patients", None)
        if callable(one):
            given: Callable[[int], Any] = one
            return given
        for found in (one, several):
            if isinstance(found, Sequence | np.ndarray) and not isinstance(found, str) and len(found) == len(whole):
                return list(found).__getitem__
        if isinstance(whole, torch.utils.data.Subset):
            inner = self._patients_of(whole.dataset)
            return None if inner is None else lambda index: inner(whole.indices[index])
        if one is not None:
            raise DatasetError(f"the dataset {self.kind} has `patient` {one!r}: expected a function patient(index)")
        return None

    def _given(self, give: Callable[[int], Any], index: int) -> Any:
        """What the user's code gives for a sample, with its random numbers. Raises BadImage."""
        try:
            with self._seeded(index):
                return give(index)
        except _UNREADABLE as error:
            raise BadImage(f"{self.kind}[{self.name(index)}]", f"cannot be read: {error}") from error

    def label(self, index: int) -> Any:
        """The label of a sample, which has as many numbers as that of any other. Raises DatasetError."""
        found, form = self._label(index), FORMS[self.task]
        label = None if hasattr(found, "read") else self._numbers(found, index)
        if label is None or label.dim() > 1:
            return found
        columns = form.columns or ("",) * label.numel()
        problem = next(filter(None, map(form.wrong, columns, label.flatten().tolist())), None)
        if problem is not None:
            raise DatasetError(f"the dataset {self.kind} has {found!r} as the label of sample {index}, but {problem}")
        return int(label) if self.task == "classify" else found

    def _label(self, index: int) -> Any:
        found = self._given(self.whole.label, index)
        if hasattr(found, "read"):
            return found
        label = self._numbers(found, index)
        if label.dim() < 2:
            self._shape = label.shape if self._shape is None else self._shape
            if label.shape != self._shape:
                raise DatasetError(
                    f"the dataset {self.kind} has labels of {_sized(self._shape)} and, of sample {index}, of "
                    f"{_sized(label.shape)}: all must be alike"
                )
        return found

    @property
    def tells_labels(self) -> bool:
        """Whether labels are at hand without images, and are no masks."""
        return not self.draws and self.task != "segment" and bool(getattr(self.whole, "knows_labels", True))

    @property
    def strata(self) -> list[Any]:
        """What a split keeps the shares of, such as the class of each sample; alike where labels are not at hand."""
        if not self.tells_labels:
            return [0] * len(self)
        try:
            labels = [self._numbers(self.label(index), index).tolist() for index in range(len(self))]
        except BadImage:  # which reading it will say
            return [0] * len(self)
        if self.task == "regress":
            labels = [label if isinstance(label, list) else [label] for label in labels]
        return strata_of(self.task, self.patients, labels)

    def label_as_text(self, index: int) -> str | None:
        """What is to be learnt of a sample, if its label is at hand without its image; None if not, or of masks."""
        if not self.tells_labels:
            return None
        try:
            return text_of(self._numbers(self.label(index), index).tolist(), self.classes)
        except BadImage:  # which reading it will say
            return None

    def _numbers(self, found: Any, index: int) -> torch.Tensor:
        try:
            return torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError):
            raise DatasetError(
                f"the dataset {self.kind} gives {found!r} as the label of sample {index}: expected a class from 0 on, "
                "numbers, or a mask"
            ) from None

    def image(self, index: int) -> "_OwnImage":
        """The image of a sample, which is looked at as it is read. Raises DatasetError."""
        found = self._given(self.whole.image, index)
        return _OwnImage(found, f"{self.kind}[{self.name(index)}]", self.channels, partial(self._seeded, index))

    def _task(self, asked: str | None) -> str:
        declared = asked if asked in FORMS else getattr(self.whole, "task", None)
        if declared is not None and declared not in FORMS:
            raise DatasetError(
                f"the dataset {self.kind} is for {declared!r}: its task must be one of {', '.join(FORMS)}"
            )
        labels: list[torch.Tensor] = []
        for index in range(min(_LOOKED_AT, len(self))):
            with suppress(BadImage):
                found = self._label(index)
                if hasattr(found, "read"):
                    return declared or "segment"
                labels.append(self._numbers(found, index))
        one = labels[0] if labels else torch.zeros((), dtype=torch.int64)
        what = (
            f"the dataset {self.kind} has labels of {one.dtype} and shape {tuple(one.shape)}, such as {one.tolist()!r}"
        )
        if declared is not None:
            if not all(map(FORMS[declared].may_be, labels)):
                raise DatasetError(
                    f"{what[:LONGEST]}, which are none for `task` {declared}: classes are whole numbers from 0 on, "
                    "labels of several classes 0 or 1 for each"
                )
            return declared
        if asked is not None and one.is_floating_point() and all({*x.flatten().tolist()} <= {0, 1} for x in labels):
            raise DatasetError(
                f"{what[:LONGEST]}, which may be classes or amounts: say `task` multilabel or regress, or give classes "
                "as whole numbers"
            )
        return next(form.task for form in FORMS.values() if all(map(form.may_be, labels or [one])))

    def _classes(self) -> tuple[str, ...]:
        """The user's, or numbers where the labels say how many there are; () if nobody does."""
        named = getattr(self.whole, "classes", ())
        if named is None or isinstance(named, str | Mapping | Set) or not hasattr(named, "__iter__"):
            raise DatasetError(f"the dataset {self.kind} has classes {named!r}: expected their names, in a list")
        form, width = FORMS[self.task], self._shape[0] if self._shape else 1
        if form.classes:
            return form.classes
        names = tuple(map(str, named))
        return tuple(map(str, range(width))) if form.named_by_column and len(names) != width else names

    def print(self) -> int:
        """A checksum of some samples: of their labels, and of images; of those that are read box by box, some boxes."""
        found = 0
        if isinstance(self.whole, MappedSamples):
            self.whole.forget()
        self._randomness.look()
        for index in {0, len(self) // 2, len(self) - 1}:
            try:
                label, image = self.label(index), self.image(index)
                if not hasattr(label, "read"):
                    found = zlib.crc32(np.ascontiguousarray(self._numbers(label, index).cpu().numpy()).data, found)
                if image.digest >= 0:
                    found = zlib.crc32(str(image.digest).encode(), found)
                    continue
                for place in (0.0, 0.5, 1.0):
                    starts = [int(place * (n - min(n, _LOOKED_PX))) for n in image.size]
                    box = [Interval(a, a + min(n, _LOOKED_PX)) for a, n in zip(starts, image.size, strict=True)]
                    found = zlib.crc32(np.ascontiguousarray(image.read(*box)).data, found)
            except BadImage:
                continue
        return found


class _OwnImage:
    """An image of the user's, whose answers are looked at."""

    def __init__(self, found: Any, name: str, channels: int, seeded: Callable[[], AbstractContextManager[Any]]) -> None:
        self._found, self._name, self._channels, self._seeded = found, name, channels, seeded
        try:
            self.size = tuple(int(side) for side in found.size)
            found.read  # noqa: B018  # that there is one
        except (AttributeError, TypeError, ValueError):
            raise DatasetError(
                f"the image of {name} is a {type(found).__name__}: it needs size, such as (height, width), and "
                "read(rows, cols)"
            ) from None
        if not 1 <= len(self.size) <= 3 or min(self.size) < 1:
            raise DatasetError(f"the image of {name} has size {self.size}: expected pixels along 1 to 3 axes")

    @property
    def digest(self) -> int:
        """The checksum of a whole sample that ranks compare; -1 for an image that is read box by box."""
        return int(getattr(self._found, "digest", -1))

    def read(self, *space: Interval) -> Values:
        found, drawn = self._read(*space)
        if drawn:
            # Random draws must not depend on the box: a part of it is read again, from the same state.
            inner = [Interval(each.start + each.length // 4, each.stop - each.length // 4) for each in space]
            part = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, space, strict=True))
            if not np.array_equal(found[part], self._read(*inner)[0], equal_nan=True):
                raise DatasetError(
                    f"the image of {self._name} draws other random numbers ({', '.join(drawn)}) for a box than for a "
                    "part of it, so that ranks would have other ones: draw for the whole image, in image(index)"
                )
        return unit_values(found)

    def _read(self, *space: Interval) -> tuple[Any, list[str]]:
        """A box as the user gives it, and the generators that were drawn from."""
        try:
            with self._seeded() as drawn:
                found = np.asarray(self._found.read(*space))
        except _UNREADABLE as error:
            raise BadImage(self._name, f"cannot be read: {error}") from error
        wanted = (*(interval.length for interval in space), self._channels)
        if found.shape != wanted or found.dtype.kind not in "biuf":
            raise DatasetError(
                f"the image of {self._name} gives {found.dtype} values of shape {found.shape} for a box of "
                f"{' x '.join(map(str, wanted[:-1]))} pixels: expected numbers of shape {wanted}, channels last"
            )
        return found, drawn or []


def adapt(found: Any, asked: str | None = None) -> OwnDataset | tuple[OwnDataset, OwnDataset]:
    """A dataset, or a pair of them to train on and to validate with, for the `asked` task. Raises DatasetError."""
    if type(found) in (tuple, list):  # a dataset of one's own may well be a list of its samples
        if len(found) != 2:
            raise DatasetError(f"{len(found)} datasets: expected one, or a pair to train on and to validate with")
        training, validation = OwnDataset(found[0], asked), OwnDataset(found[1], asked)
        for name in ("channels", "task", "classes"):
            mine, theirs = getattr(training, name), getattr(validation, name)
            if mine != theirs:
                raise DatasetError(
                    f"the datasets {training.kind} and {validation.kind}, to train on and to validate with, have "
                    f"{name} {mine} and {theirs}: they must be alike"
                )
        return training, validation
    return OwnDataset(found, asked)


def _sized(shape: Sequence[int]) -> str:
    return f"{shape[0]} numbers" if shape else "one number"
