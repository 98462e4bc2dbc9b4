"""The images of a run: listed by rank 0 for all, described to the reader, kept as lists in its folder."""

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl import datasets
from mpi4dl._files import Replacement, naming, read_regular, write_durably
from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import counted, some
from mpi4dl.comm import Communicator
from mpi4dl.datasets.arrays import ArrayDataset
from mpi4dl.datasets.base import task_of
from mpi4dl.datasets.listed import ListedFiles, parts
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.map_style import OwnDataset
from mpi4dl.datasets.sources import SYNTHETIC
from mpi4dl.datasets.split import Named, Subset
from mpi4dl.datasets.table import TABLE
from mpi4dl.datasets.transform import STRIDE_PX, Fit, as_fit
from mpi4dl.geometry import Box
from mpi4dl.options.config import Config, ConfigError, to_toml
from mpi4dl.options.data import FOLDS, build_augment, build_datasets, build_mixup, build_views, number_of_classes
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.tasks import with_task
from mpi4dl.runs.stopping import HangTimeout
from mpi4dl.tasks.task import TASKS

# Which images a run trains on and validates with, kept in its folder, so that going on moves none of them.
#
#     images.json     {"classes": [...], "fit": "resize", "training": {"cat/1.png": [3145, "cat", 2774910125], ...},
#                      "validation": {...}, "values": null}
#
# A name is the path from the folder of images on. Its size in bytes, what is to be learnt of it as text, and a checksum
# of some of its bytes follow; null where there is none. `values` says what values of volumes are read as.

FILE = "images.json"
MOST_NAMES = 3


class Sample(NamedTuple):
    """The size of an image in bytes, its label as text, and a checksum of some of its bytes."""

    num_bytes: int | None
    label: str | None = None
    checksum: int | None = None

    @classmethod
    def of(cls, num_bytes: Any, label: Any, checksum: Any = None) -> "Sample":
        size, found = (None if each is None else int(each) for each in (num_bytes, checksum))
        return cls(size, None if label is None else str(label), found)

    def differs(self, now: "Sample") -> bool:
        """Whether a file of the same size has other bytes, as far as both are known."""
        known = None not in (self.checksum, now.checksum)
        return known and now.num_bytes == self.num_bytes and now.checksum != self.checksum


Samples = Mapping[str, Sample]


class ImageLists(NamedTuple):
    """The samples of both parts of a run by name, their classes, and how they fill the image size."""

    classes: tuple[str, ...]
    fit: Fit
    training: Samples
    validation: Samples
    values: str | None = None

    @classmethod
    def of(cls, training: Named, validation: Named, fit: Fit) -> "ImageLists":
        values = getattr(training, "values", None)
        return cls(training.classes, fit, _listed(training), _listed(validation), values)

    @classmethod
    def before(cls, config: Config) -> "ImageLists | None":
        """The lists of the run that a configuration resumes; None if there is none. Raises ConfigError."""
        resume, folder = config.run.resume, config.run.run_folder
        if resume == "none" or (resume == "auto" and folder is None):
            return None
        asked = Path(folder or "") if resume == "auto" else Path(resume)
        # A run's folder, or that of checkpoints in it, or one of these.
        for path in (asked, asked.absolute().parent, asked.absolute().parent.parent):
            if (path / FILE).is_file():
                return cls.read(path / FILE)
        return None

    @classmethod
    def read(cls, path: Path) -> "ImageLists":
        """Raises ConfigError for what is no such file."""
        try:
            found = json.loads(read_regular(path))
            parts = [
                {str(name): Sample.of(*sample) for name, sample in found[part].items()}
                for part in ("training", "validation")
            ]
            fit = as_fit(found["fit"])
            return cls(tuple(map(str, found["classes"])), fit, parts[0], parts[1], found.get("values"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(
                f"{path}: is not the list of a run's images, it is damaged ({type(error).__name__}): restore it, or "
                "remove it to split the images anew"
            ) from error

    def write(self, folder: Path) -> None:
        """Put them into the folder of a run, in place of older ones, at once or not at all. Raises OSError."""
        with naming(folder / FILE):
            write_durably(folder / FILE, json.dumps(self._asdict(), indent=1).encode())

    @property
    def samples(self) -> Samples:
        """All samples by name; those of two sets that call samples alike are called by their part, too."""
        if self.training.keys().isdisjoint(self.validation):
            return {**self.training, **self.validation}
        parts = {"training": self.training, "validation": self.validation}
        return {f"{part} {name}": sample for part, found in parts.items() for name, sample in found.items()}

    def validating(self) -> dict[str, bool]:
        """Of each image whether it validates."""
        return dict.fromkeys(self.training, False) | dict.fromkeys(self.validation, True)

    def changes(self, now: "ImageLists") -> Iterator[str]:
        """The message about images that came, went or changed since these lists were made."""
        if now.classes != self.classes:
            yield f"the classes were {', '.join(self.classes)}, and are {', '.join(now.classes)}"
        before, after = self.samples, now.samples
        old, new = self.validating(), now.validating()
        for names, what in (
            ([name for name in before if name not in after], "is gone since"),
            ([name for name in after if name not in before], "is new"),
            (
                [name for name in after if name in before and after[name].num_bytes != before[name].num_bytes],
                "has another size",
            ),
            ([name for name in after if name in before and before[name].differs(after[name])], "has other content"),
            ([name for name in new if name in old and new[name] > old[name]], "was trained on, and now validates"),
            ([name for name in new if name in old and new[name] < old[name]], "validated, and is now trained on"),
        ):
            if names:
                more = f" and {counted(len(names) - MOST_NAMES, 'other')}" if len(names) > MOST_NAMES else ""
                yield f"of the images, {', '.join(names[:MOST_NAMES])}{more} {what}"

    def require_same_labels(self, now: "ImageLists") -> None:
        """Raise ConfigError if a sample has another label than when these lists were made.

        In folders of classes the label is a part of the name. A file that is in another folder now is known by its
        size and its checksum, if no other file has both.
        """
        before, after = self.samples, now.samples
        pairs = [(name, name) for name in before if name in after]
        there, here = _by_file(before), _by_file(after)
        pairs += [(name, here[key]) for key, name in there.items() if here.get(key, name) != name]
        changed = [
            f"{new} ({before[old].label}, now {after[new].label})"
            for old, new in pairs
            if before[old].label != after[new].label
        ]
        if changed:
            raise ConfigError(
                f"{counted(len(changed), 'sample')} with another label than when the run began: "
                f"{some(changed, MOST_NAMES)}: put the labels back, or train with the new ones in another `run_folder`"
            )


def _by_file(samples: Samples) -> dict[tuple[int, int], str]:
    """The names of the samples by size and checksum, of those that share them with no other."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, sample in samples.items():
        if sample.num_bytes is not None and sample.checksum is not None:
            found.setdefault((sample.num_bytes, sample.checksum), []).append(name)
    return {key: names[0] for key, names in found.items() if len(names) == 1}


def _listed(dataset: Named) -> Samples:
    whole: Any = dataset.whole if isinstance(dataset, Subset) else dataset
    indices = dataset.indices if isinstance(dataset, Subset) else range(len(dataset))
    files, label = getattr(whole, "files", None), getattr(whole, "label_as_text", lambda _: None)
    return {
        whole.name(index): Sample(None, label(index))
        if files is None
        else Sample(files[index].num_bytes, label(index), whole.fingerprint(index))
        for index in indices
    }


SPLIT = "split.csv"  # of a run on slides: the part that each is for, as `split_file` takes it


def write_split(training: Named, folder: Path) -> None:
    """Keep which slides are for what in the folder of a run, and all folds beside it. Raises OSError."""
    whole: Any = training.whole if isinstance(training, Subset) else training
    if not hasattr(whole, "split_as_text"):
        return
    with naming(folder / SPLIT):
        write_durably(folder / SPLIT, whole.split_as_text().encode())
    folds = folder.parent / FOLDS
    if folder.name.startswith("fold_") and whole.has_folds and not folds.exists():
        with naming(folds), Replacement(folds, shared=True) as temporary:  # jobs of several folds may begin at once
            temporary.write_text(whole.folds_as_text(), encoding="utf-8", newline="")


LOOKED_AT = 8
# Slides rather than pictures begin here, as for Pillow: 8192 x 8192 px.
SLIDE_PIXELS = 1 << 26

Pair = tuple[Named, Named]
BoxesOf = Callable[[int], Sequence[Box]]


class Images(NamedTuple):
    """The images of training and validation, their transform to the image size, and remarks on them."""

    training: Named
    validation: Named
    fit: Fit
    remarks: tuple[str, ...]
    largest: tuple[int, ...] | None = None  # along each axis, of the images looked at

    @property
    def classes(self) -> tuple[str, ...]:
        return self.training.classes

    @property
    def channels(self) -> int:
        return self.training.channels

    def number_of_classes(self, config: Config) -> int:
        """The number of classes by the option, or else by the data. Raises ConfigError if that is too few."""
        return number_of_classes(config, self.classes)

    def bits_per_byte(self, loss: float) -> None:
        """Images are no text."""

    def loaders(self, config: Config, training: BoxesOf, validation: BoxesOf) -> tuple[Loader, Loader]:
        """The loaders of a rank's boxes of both; they report unreadable images. Raises ValueError as Loader."""
        views, data = build_views(config, self.training.channels, self.fit), config.data
        varied = replace(views[0], augment=build_augment(config, self.training.channels, task_of(self.training)))
        common: dict[str, Any] = {"seed": config.training.seed, "num_workers": data.num_workers}
        common |= {"on_bad_image": "report", "lazy": config.streams_images}
        ordered: dict[str, Any] = {"shuffle": True, "drop_last": True, "sampling": data.sampling}
        ordered["mixup"] = build_mixup(config, task_of(self.training), self.number_of_classes(config))
        return (
            Loader(self.training, varied, config.samples_per_step, training, **ordered, **common),
            Loader(self.validation, views[1], data.batch_size, validation, **common),
        )

    def record(self, comm: Communicator, folder: Path) -> None:
        """Keep the lists in the folder of a run. Collective. Raises Refusal on all ranks if they cannot be written."""
        with comm.together((ValueError, OSError)):
            if comm.rank == 0:
                ImageLists.of(self.training, self.validation, self.fit).write(folder)
                write_split(self.training, folder)


def open_images(comm: Communicator, config: Config) -> Images:
    """The images that a configuration names, the same on all ranks. Collective.

    Raises Refusal on all ranks if there are none such, or if a rank sees other files than rank 0.
    """
    recorded = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            recorded = ImageLists.before(config)
    known = None if recorded is None else recorded.validating()

    def opened() -> Pair:
        pair = build_datasets(config, known)
        if recorded is not None:
            read_as_trained(pair, recorded.values)
        return pair

    if config.data.dataset is not None:
        training, validation = _own(comm, lambda: build_datasets(config, known))
    else:
        training, validation = shared(comm, opened)
    for part in (training, validation):
        measure_stains(comm, part)
    described = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            described = _describe(config, training, validation, recorded)
    return Images(training, validation, *comm.broadcast_object(described))


def open_alone(config: Config) -> Images:
    """The images that a configuration names, for a process that is no rank of a job. Raises ValueError and OSError."""
    training, validation = build_datasets(config)
    return Images(training, validation, *_describe(config, training, validation, None))


def to_print(config: Config) -> str:
    """All options as a TOML file, with the defaults of the task, if it is known or the images tell it."""
    try:
        training = None if config.data.text is not None or config.data.task != AUTO else build_datasets(config)[0]
    except (ValueError, OSError) as problem:
        reason = datasets.printable(str(problem)).partition("\n")[0]
        return f"# auto: what suits the task of the images, which cannot be opened: {reason}\n{to_toml(config)}"
    return to_toml(with_task(config, training))


def open_together(comm: Communicator, source: str | Path, **options: Any) -> Pair:
    """`mpi4dl.datasets.open` for all ranks of a job, which then have the same images. Collective; raises Refusal."""
    return shared(comm, lambda: datasets.open(source, **options))


def shared(comm: Communicator, open_pair: Callable[[], Pair]) -> Pair:
    """The training and validation images that `open_pair` finds on rank 0, on all ranks. Collective.

    Files are listed once, and each rank takes the print of some, by which all know them again. Each rank reads data in
    memory, and all compare it.
    """
    kinds = (datasets.DatasetError, OSError)
    pair: Pair | None = None
    with comm.together(kinds):
        if comm.rank == 0:
            pair = open_pair()
    if comm.size == 1:
        assert pair is not None
        return pair
    found = comm.broadcast_object(None if pair is None or _arrays(pair) else pair)
    with comm.together(kinds):
        pair = pair or found or open_pair()
    assert pair is not None
    who = f"on rank {comm.rank} ({platform.node()})"
    digests = comm.broadcast_object([array.digest() for array in _arrays(pair)])
    with comm.together(kinds):
        if [array.digest() for array in _arrays(pair)] != digests:
            raise datasets.DatasetError(f"the images {who} are not those of rank 0: all ranks must see the same files")
    for folder in _folders(pair):
        with comm.together(kinds):
            mine = folder.prints(slice(comm.rank, None, comm.size), who)
        prints: list[int | None] = [None] * len(folder)
        for rank, theirs in enumerate(comm.all_gather_object(mine)):
            prints[rank :: comm.size] = theirs
        folder.expect(prints)
    return pair


def measure_stains(
    comm: Communicator, images: Named, indices: Sequence[int] | None = None, patience: HangTimeout | None = None
) -> None:
    """Measure the stains of slides that are to be normalized, or of some of them, each on one rank. Collective.

    Slides that cannot be read are left out. `patience` ends the job if a rank is silent for too long. Raises Refusal
    on all ranks if a package is missing.
    """
    whole: Any = images.whole if isinstance(images, Subset) else images
    if getattr(getattr(whole, "options", None), "stains", None) is None:
        return
    if indices is None:
        indices = images.indices if isinstance(images, Subset) else range(len(images))
    wanted = sorted({*indices} - {*whole.stains})
    progress = ProgressOfImages(len(wanted), comm.rank == 0, "slide", "measuring stains")
    for first in range(0, len(wanted), comm.size):
        group = wanted[first : first + comm.size]
        with comm.together((datasets.DatasetError, OSError)):
            if comm.rank < len(group):
                watched = nullcontext() if patience is None else patience.working("stains")
                with watched, suppress(datasets.BadImage):  # which reading it will say
                    whole.measure_stains(group[comm.rank])
        for theirs in comm.all_gather_object({index: whole.stains[index] for index in group if index in whole.stains}):
            whole.stains.update(theirs)
        progress.advance(len(group), sum(index not in whole.stains for index in group))
    progress.close()


def unstained(images: Named) -> list[str]:
    """A remark on slides that keep their colours, if there are any."""
    whole: Any = images.whole if isinstance(images, Subset) else images
    found = whole.unstained() if hasattr(whole, "unstained") else None
    return [] if found is None else [found]


def _own(comm: Communicator, open_pair: Callable[[], Pair]) -> Pair:
    """The user's datasets, which each rank makes for itself, and which must look alike. Collective; raises Refusal."""
    pair: Pair | None = None
    with comm.together((ValueError, OSError)):
        pair = open_pair()
    assert pair is not None
    for dataset, what in zip(pair, ("training", "validation"), strict=True):
        found = {"samples": len(dataset), "channels": dataset.channels, "classes": dataset.classes}
        comm.agree(None, **{f"the number of {what} {name}": each for name, each in found.items()})
        whole: Any = dataset.whole if isinstance(dataset, Subset) else dataset
        with comm.together((ValueError, OSError)):
            content = whole.print()
        comm.agree(None, **{f"the content of some {what} samples": content})
    return pair


def _wholes(pair: Pair) -> list[Any]:
    """The datasets that the two are parts of, each once."""
    wholes = [dataset.whole if isinstance(dataset, Subset) else dataset for dataset in pair]
    return wholes[:1] if wholes[0] is wholes[1] else wholes


def _arrays(pair: Pair) -> list[ArrayDataset]:
    return [whole for whole in _wholes(pair) if isinstance(whole, ArrayDataset)]


def _folders(pair: Pair) -> list[ListedFiles]:
    return [files for whole in _wholes(pair) if isinstance(whole, ListedFiles) for files in whole.lists()]


def _describe(
    config: Config, training: Named, validation: Named, recorded: ImageLists | None
) -> tuple[Fit, tuple[str, ...], tuple[int, ...] | None]:
    size = config.data.image_size
    if config.streams_images and TASKS[task_of(training)].dense and prod(size) > SLIDE_PIXELS:
        raise ConfigError(
            f"`image_size` {'x'.join(map(str, size))} with masks: every rank has whole masks of a batch, 8 bytes a "
            "pixel, and `stream` and `patches` are for more pixels than that: at most 8192x8192"
        )
    sizes = list(_sizes(training))
    fit = _fit(config.data.fit, sizes, recorded)
    if fit == "own" and TASKS[task_of(training)].dense:
        raise ConfigError("`fit` own is not for masks: choose `fit` pad, or crop for windows of slides")
    remarks = [_classes(config.sample_noun, training, validation)]
    if config.data.dataset is None and config.slides.slides is None and config.data.images == SYNTHETIC:
        remarks.append("the images are synthetic, computed from a formula: `images` names a folder of your own")
    remarks += _missing_classes(config.sample_noun, training, validation)
    if config.data.dataset is None and config.slides.slides is None:
        remarks += _folders_read(config.data.images)
    remarks += [remark for whole in _wholes((training, validation)) for remark in getattr(whole, "remarks", ())]
    method, reference = config.slides.stain_norm, config.slides.stain_reference
    if method != "none":
        to = "the built-in reference" if reference is None else f"`stain_reference` {reference}"
        remarks.append(f"stains are normalized to {to} by {method}")
    remarks += unstained(training)
    remarks.append(_shown(config, fit, sizes, len(training)))
    if recorded is not None:
        unlike = unlike_values(training, recorded.values)
        if unlike is not None:
            raise ConfigError(unlike)
        now = ImageLists.of(training, validation, fit)
        recorded.require_same_labels(now)
        remarks += recorded.changes(now)
        own = [each for each in _wholes((training, validation)) if isinstance(each, OwnDataset)]
        remarks += [
            f"{each.kind} gives labels with its images alone: they are not compared with those that the run began "
            "with; a list `targets`, or a method label(index), tells them"
            for each in own
            if not each.tells_labels
        ]
    largest = tuple(max(sides) for sides in zip(*sizes, strict=True)) if sizes else None
    return fit, tuple(datasets.printable(remark) for remark in remarks), largest


def read_as_trained(pair: Pair, values: str | None) -> None:
    """Read volumes as a run did that recorded `values`: see `ListedFiles`. Raises DatasetError."""
    for whole in _wholes(pair):
        if isinstance(whole, ListedFiles):
            whole.read_as_trained(values)


def unlike_values(images: Any, trained_on: str | None) -> str | None:
    """The difference of values of volumes from the training's, recorded as `trained_on`, in one sentence."""
    values = getattr(images, "values", None)
    if None not in (values, trained_on) and values != trained_on:
        if str(values).startswith("features"):
            return f"the slides have {values}, but training had {trained_on}: embed the slides by that model"
        return (
            f"values of the volumes are read {values}, but those of training were {trained_on}: write them in the "
            "format and type of training"
        )
    return None


def _sizes(dataset: Named) -> Iterator[tuple[int, ...]]:
    """The sizes of some images, from the first to the last; of those that can be read."""
    count = min(LOOKED_AT, len(dataset))
    for number in range(count):
        try:
            image = dataset.image(number * (len(dataset) - 1) // max(1, count - 1))
        except datasets.BadImage:
            continue
        yield image.size


def _fit(asked: str, sizes: Sequence[tuple[int, ...]], recorded: ImageLists | None) -> Fit:
    """One way for all images of a run, whatever their format. Raises ConfigError where they are of both kinds."""
    if asked != "auto":
        return as_fit(asked)
    if recorded is not None:
        return recorded.fit
    slides = [len(size) == 2 and prod(size) > SLIDE_PIXELS for size in sizes]
    if any(slides) and not all(slides):
        raise ConfigError(
            f"`fit` auto cannot choose for images of {_range(sizes)} px: say `fit` resize, or `fit` crop for windows "
            "of the image size"
        )
    return "crop" if any(slides) else "resize"


def _classes(noun: str, training: Named, validation: Named) -> str:
    """How many images (`noun`) there are, and what is to be learnt of them, where labels are at hand."""
    said = f"{counted(len(training), noun)} to train on + {len(validation)} to validate with"
    task, classes, whole = task_of(training), training.classes, _wholes((training, validation))[0]
    if not classes or isinstance(whole, OwnDataset):
        named = f": {counted(len(classes), 'class', 'classes')}, {some(list(classes))}" if classes else ""
        return f"{said}, to {task}{named}" if classes or task != "classify" else said
    return f"{said}, {TASKS[task].described(training, validation)}"


def _missing_classes(noun: str, training: Named, validation: Named) -> list[str]:
    """A warning of classes that only one of both parts has, where labels are at hand."""
    task, classes, whole = TASKS[task_of(training)], training.classes, _wholes((training, validation))[0]
    if not classes or isinstance(whole, OwnDataset) or not len(validation):
        return []
    trained, validated = task.label_counts(training), task.label_counts(validation)
    if trained is None or validated is None:
        return []
    said = []
    for mine, others, what in (
        (validated, trained, f"validation shows no {noun} of {{}}, of which metrics then say nothing"),
        (trained, validated, f"no {noun} to train on shows {{}}, which is then not learnt"),
    ):
        names = [name for name, a, b in zip(classes, mine, others, strict=True) if not a and b]
        if names:
            said.append("warning: " + what.format(some(names)))
    return said


def _folders_read(source: str) -> list[str]:
    path = Path(source).expanduser()
    folders = path.is_dir() and not any((path / name).exists() for name in ("batches.meta", TABLE))
    found = parts(path) if folders else None
    if found is None:
        return []
    unused = f"; {', '.join(found.unused)} beside them not read" if found.unused else ""
    return [f"trained on {path / found.training}, validated with {path / found.validation}{unused}"]


def _shown(config: Config, fit: Fit, sizes: Sequence[tuple[int, ...]], count: int) -> str:
    """How images are brought to the image size, in words."""
    size = config.data.image_size
    frame = "x".join(map(str, size))
    if config.slides.features is not None:
        counts = [count for _, count in sizes]
        return f"slides of {min(counts, default=0)} to {max(counts, default=0)} patches, {size[1]} at most"
    what = f"{config.sample_noun}s of {_range(sizes)} px" if sizes else f"{config.sample_noun}s"
    if count > LOOKED_AT:
        what += f" ({len(sizes)} of {count} looked at)"
    if sizes and set(sizes) == {size} and not (fit == "resize" and config.data.random_crop):
        return f"{what} are shown as they are"
    if fit == "resize":
        crops = " from random crops, validated whole" if config.data.random_crop else ""
        return f"{what} are resized to {frame}{crops}; `fit` crop would show windows of that size"
    if config.slides.slides is not None and config.model.patches is not None and config.slides.features is None:
        return f"{what} are cut into patches"
    if fit == "own":
        return f"{what} keep their own sizes, padded with white to multiples of {STRIDE_PX} px"
    if fit == "pad":
        return f"{what} are padded with white to {frame}"
    smaller = any(a < b for each in sizes for a, b in zip(each, size, strict=True))
    padded = f", {'white' if len(size) == 2 else '0'} where they are smaller" if smaller else ""
    return f"{what} are cropped to {frame} at random{padded}; validated on the centre"


def _range(sizes: Sequence[tuple[int, ...]]) -> str:
    least, most = min(sizes, key=prod), max(sizes, key=prod)
    return "x".join(map(str, least)) + ("" if least == most else " to " + "x".join(map(str, most)))
