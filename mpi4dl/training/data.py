"""The images of a run: listed by rank 0 for all, described to the reader, kept as a table in its folder."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl import datasets
from mpi4dl._files import Replacement, naming
from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import counted, some
from mpi4dl.comm import Communicator
from mpi4dl.datasets.arrays import ArrayDataset
from mpi4dl.datasets.base import task_of
from mpi4dl.datasets.listed import ListedFiles, parts
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.map_style import OwnDataset
from mpi4dl.datasets.samples import TABLE
from mpi4dl.datasets.sources import SYNTHETIC
from mpi4dl.datasets.split import Named, in_whole
from mpi4dl.datasets.transform import STRIDE_PX, Fit, as_fit
from mpi4dl.geometry import Box
from mpi4dl.options.config import Config, ConfigError, to_toml
from mpi4dl.options.data import FOLDS, build_augment, build_datasets, build_mixup, build_views, number_of_classes
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.tasks import with_task
from mpi4dl.runs.description import Description, described_by
from mpi4dl.runs.samples import RunSamples
from mpi4dl.runs.stopping import HangTimeout
from mpi4dl.tasks.task import TASKS

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
        """Keep the table in the folder of a run, and all folds beside it. Collective.

        Raises Refusal on all ranks if they cannot be written.
        """
        with comm.together((ValueError, OSError)):
            if comm.rank == 0:
                RunSamples.of(self.training, self.validation).write(folder)
                whole, _ = in_whole(self.training)
                folds = folder.parent / FOLDS
                if folder.name.startswith("fold_") and getattr(whole, "has_folds", False) and not folds.exists():
                    with naming(folds), Replacement(folds, shared=True) as temporary:  # jobs of several folds may begin
                        temporary.write_text(whole.folds_as_text(), encoding="utf-8", newline="")


class Before(NamedTuple):
    """What the folder of a run says of its samples; what it decided about them, None if it does not say."""

    samples: RunSamples
    about: Description | None

    @property
    def fit(self) -> Fit | None:
        return None if self.about is None else self.about.fit


def before(config: Config) -> Before | None:
    """The samples of the run that a configuration resumes; None if there is none. Raises ConfigError, OSError."""
    resume, folder = config.run.resume, config.run.run_folder
    if resume == "none" or (resume == "auto" and folder is None):
        return None
    asked = Path(folder or "") if resume == "auto" else Path(resume)
    samples = RunSamples.at(asked)
    places = (asked, asked.absolute().parent, asked.absolute().parent.parent)
    return None if samples is None else Before(samples, next(filter(None, map(described_by, places)), None))


def open_images(comm: Communicator, config: Config) -> Images:
    """The images that a configuration names, the same on all ranks. Collective.

    Raises Refusal on all ranks if there are none such, or if a rank sees other files than rank 0.
    """
    recorded = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            recorded = before(config)
    known = None if recorded is None else recorded.samples.validating()

    def opened() -> Pair:
        return build_datasets(config, known)

    if config.data.dataset is not None:
        training, validation = _own(comm, opened)
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
    whole, every = in_whole(images)
    if getattr(getattr(whole, "options", None), "stains", None) is None:
        return
    wanted = sorted({*(every if indices is None else indices)} - {*whole.stains})
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
    whole, _ = in_whole(images)
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
        with comm.together((ValueError, OSError)):
            content = in_whole(dataset)[0].print()
        comm.agree(None, **{f"the content of some {what} samples": content})
    return pair


def _wholes(pair: Pair) -> list[Any]:
    """The datasets that the two are parts of, each once."""
    wholes = [in_whole(dataset)[0] for dataset in pair]
    return wholes[:1] if wholes[0] is wholes[1] else wholes


def _arrays(pair: Pair) -> list[ArrayDataset]:
    return [whole for whole in _wholes(pair) if isinstance(whole, ArrayDataset)]


def _folders(pair: Pair) -> list[ListedFiles]:
    return [files for whole in _wholes(pair) if isinstance(whole, ListedFiles) for files in whole.lists()]


def _describe(
    config: Config, training: Named, validation: Named, recorded: Before | None
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
        about, now = recorded.about, RunSamples.of(training, validation)
        unlike = None if about is None else unlike_values(training, about.values)
        if unlike is not None:
            raise ConfigError(unlike)
        recorded.samples.require_unchanged(now)
        if about is not None and about.classes != tuple(training.classes):
            remarks.append(f"the classes were {', '.join(about.classes)}, and are {', '.join(training.classes)}")
        remarks += recorded.samples.changes(now)
        own = [each for each in _wholes((training, validation)) if isinstance(each, OwnDataset)]
        remarks += [
            f"{each.kind} gives labels with its images alone: they are not compared with those that the run began "
            "with; a list `targets`, or a method label(index), tells them"
            for each in own
            if not each.tells_labels
        ]
    largest = tuple(max(sides) for sides in zip(*sizes, strict=True)) if sizes else None
    return fit, tuple(datasets.printable(remark) for remark in remarks), largest


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


def _fit(asked: str, sizes: Sequence[tuple[int, ...]], recorded: Before | None) -> Fit:
    """One way for all images of a run, whatever their format. Raises ConfigError where they are of both kinds."""
    if asked != "auto":
        return as_fit(asked)
    if recorded is not None and recorded.fit is not None:
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
