"""The images of a run: listed by rank 0 for all, described to the reader, kept as a table in its folder."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpi4dl import datasets
from mpi4dl._files import Replacement, naming
from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import some
from mpi4dl.comm import Communicator
from mpi4dl.datasets.base import task_of
from mpi4dl.datasets.files import DEPTHS
from mpi4dl.datasets.labels import of_values
from mpi4dl.datasets.split import Named, Subset, fold_table, in_whole
from mpi4dl.datasets.transform import Fit
from mpi4dl.datasets.volumes import alike
from mpi4dl.options.declare import ConfigError
from mpi4dl.options.sections.run import Run
from mpi4dl.options.sources import FOLDS, DataSource, wholes
from mpi4dl.runs.description import Description, described_by
from mpi4dl.runs.samples import RunSamples
from mpi4dl.runs.stopping import HangTimeout

Pair = tuple[Named, Named]
Opened = TypeVar("Opened", bound=tuple[Named, ...])


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

    def bits_per_byte(self, loss: float) -> None:
        """Images are no text."""

    def record(self, comm: Communicator, folder: Path) -> None:
        """Keep the table in the folder of a run, and all folds beside it. Collective.

        Raises Refusal on all ranks if they cannot be written.
        """
        with comm.together((ValueError, OSError)):
            if comm.rank == 0:
                RunSamples.of(self.training, self.validation).write(folder)
                rows, folds = getattr(in_whole(self.training)[0], "rows", ()), folder.parent / FOLDS
                in_folds = any(row.fold is not None for row in rows)
                if folder.name.startswith("fold_") and in_folds and not folds.exists():
                    with naming(folds), Replacement(folds, shared=True) as temporary:  # jobs of several folds may begin
                        temporary.write_text(fold_table(rows), encoding="utf-8", newline="")


class Before(NamedTuple):
    """What the folder of a run says of its samples; what it decided about them, None if it does not say."""

    samples: RunSamples
    about: Description | None

    @property
    def fit(self) -> Fit | None:
        return None if self.about is None else self.about.fit


def folders_before(run: Run) -> tuple[Path, ...]:
    """Where the folder of the run that is resumed may be, which `resume` names, or a checkpoint in it."""
    resume, folder = run.resume, run.run_folder
    if resume == "none" or (resume == "auto" and folder is None):
        return ()
    asked = Path(folder or "") if resume == "auto" else Path(resume)
    return asked, asked.absolute().parent, asked.absolute().parent.parent


def before(run: Run) -> Before | None:
    """The samples of the run that is resumed; None if there is none. Raises ConfigError, OSError."""
    places = folders_before(run)
    samples = RunSamples.at(places[0]) if places else None
    return None if samples is None else Before(samples, next(filter(None, map(described_by, places)), None))


def open_images(comm: Communicator, source: DataSource, run: Run | None = None) -> Images:
    """The images of a source, split as in the run that is resumed, the same on all ranks. Collective.

    Raises Refusal on all ranks if there are none such, or if a rank sees other files than rank 0.
    """
    recorded = comm.from_first(lambda: None if run is None else before(run))
    known = None if recorded is None else recorded.samples.validating()

    open_pair = _each if source.is_own else shared
    training, validation = open_pair(comm, lambda: source.open(known))
    _in_order(training, known or {})
    for part in (training, validation):
        measure_stains(comm, part)

    def described() -> tuple[Any, ...]:
        fit, remarks, largest = _describe(source, training, validation, recorded)
        if run is not None:
            remarks += tuple(map(datasets.printable, RunSamples.of(training, validation).in_doubt()))
        return fit, remarks, largest

    return Images(training, validation, *comm.from_first(described))


def _in_order(part: Named, known: Mapping[str, bool]) -> None:
    """Put samples that the run had before into their order of then, and new ones behind: epochs draw their places."""
    if isinstance(part, Subset):
        places = {name: place for place, name in enumerate(known)}
        part.indices = sorted(part.indices, key=lambda index: places.get(part.whole.name(index), len(places)))


def open_alone(source: DataSource) -> Images:
    """The images of a source, for a process that is no rank of a job. Raises ValueError and OSError."""
    training, validation = source.open()
    return Images(training, validation, *_describe(source, training, validation, None))


def open_together(comm: Communicator, source: str | Path, **options: Any) -> Pair:
    """`mpi4dl.datasets.open` for all ranks of a job, which then have the same images. Collective; raises Refusal."""
    return shared(comm, lambda: datasets.open(source, **options))


def shared(comm: Communicator, opened: Callable[[], Opened]) -> Opened:
    """The parts of images, such as those that train and validate, that are `opened` on rank 0, on all. Collective.

    Files are listed once, and each rank takes the print of some, by which all know them again. Each rank reads data in
    memory, and all compare it.
    """
    kinds = (ValueError, OSError)
    first: list[Opened] = []
    with comm.together(kinds):
        first += [opened()] if comm.rank == 0 else []
    if comm.size == 1:
        return first[0]
    found = comm.broadcast_object(first if first and not _arrays(first[0]) else [])
    with comm.together(kinds):
        parts = (first or found or [opened()])[0]
    who = f"on rank {comm.rank} ({platform.node()})"
    digests = comm.broadcast_object([array.digest() for array in _arrays(parts)])
    with comm.together(kinds):
        if [array.digest() for array in _arrays(parts)] != digests:
            raise datasets.DatasetError(f"the images {who} are not those of rank 0: all ranks must see the same files")
    for folder in (files for whole in wholes(parts) for files in whole.lists()):
        with comm.together(kinds):
            mine = folder.prints(slice(comm.rank, None, comm.size), who)
        prints: list[int | None] = [None] * len(folder)
        for rank, theirs in enumerate(comm.all_gather_object(mine)):
            prints[rank :: comm.size] = theirs
        folder.expect(prints)
    return parts


def one_each(
    comm: Communicator,
    items: Sequence[int],
    find: Callable[[int], Any],
    patience: HangTimeout | None,
    noun: str = "slide",
    doing: str = "",
) -> Iterator[tuple[int, Any]]:
    """Each of these items with what `find` says of it on one rank, or with its BadImage. Collective.

    `patience` ends the job if a rank is silent for too long. Raises Refusal on all ranks for other errors of files.
    """
    with closing(ProgressOfImages(len(items), comm.rank == 0, noun, doing)) as progress:
        for first in range(0, len(items), comm.size):
            group, mine = items[first : first + comm.size], None
            with comm.together((datasets.DatasetError, OSError)):
                if comm.rank < len(group):
                    with nullcontext() if patience is None else patience.working(doing):
                        try:
                            mine = find(group[comm.rank])
                        except datasets.BadImage as error:
                            mine = error
            found = comm.all_gather_object(mine)[: len(group)]
            progress.advance(len(group), sum(isinstance(each, datasets.BadImage) for each in found))
            yield from zip(group, found, strict=True)


def measure_stains(
    comm: Communicator, images: Named, indices: Sequence[int] | None = None, patience: HangTimeout | None = None
) -> None:
    """Measure the stains of slides that are to be normalized, or of some of them, each on one rank. Collective.

    Slides that cannot be read are left out. Raises Refusal on all ranks if a package is missing.
    """
    whole, every = in_whole(images)
    if getattr(getattr(whole, "options", None), "stains", None) is None:
        return
    wanted = sorted({*(every if indices is None else indices)} - {*whole.stains})

    def measure(index: int) -> Any:
        whole.measure_stains(index)
        return whole.stains[index]

    found = one_each(comm, wanted, measure, patience, doing="measuring stains")
    whole.stains |= {index: each for index, each in found if not isinstance(each, datasets.BadImage)}


def measured(comm: Communicator, images: Named, patience: HangTimeout) -> dict[str, tuple[float, ...]]:
    """The mean and the standard deviation of each channel of all images, each measured on one rank; pixels without data
    count for nothing. Collective.

    Images that cannot be read are left out. Raises Refusal on all ranks for a channel that has one value or none.
    """
    from mpi4dl.datasets.statistics import merged, moments_of

    def of_image(index: int) -> Any:
        return moments_of(images.image(index), images.channels)

    every = one_each(comm, range(len(images)), of_image, patience, "image", "measuring channels")
    found = [each for _, each in every if not isinstance(each, datasets.BadImage)]
    comm.agree(None if found else "`mean` measured: no training image can be read")
    count, mean, squares = merged(found)
    flat = [str(number) for number, each in enumerate(squares, 1) if not each > 0]
    told = f"`std` measured: channel {some(flat)} has one value in all training images, or no data"
    comm.agree(f"{told}: choose others by `channels`, or give numbers" if flat else None)
    return {"mean": tuple(mean.tolist()), "std": tuple(((squares / count) ** 0.5).tolist())}


def _each(comm: Communicator, open_pair: Callable[[], Pair]) -> Pair:
    """The user's datasets, which each rank makes for itself, and which must look alike. Collective; raises Refusal."""
    pair: Pair | None = None
    with comm.together((ValueError, OSError)):
        pair = open_pair()
    assert pair is not None
    for dataset, what in zip(pair, ("training", "validation"), strict=True):
        found = {"samples": len(dataset), "channels": dataset.channels, "classes": dataset.classes}
        comm.agree(None, **{f"the number of {what} {name}": each for name, each in found.items()})
        comm.agree(None, **{f"the choice of {what} samples": hash(tuple(in_whole(dataset)[1]))})
        with comm.together((ValueError, OSError)):
            content = in_whole(dataset)[0].print()
        comm.agree(None, **{f"the content of some {what} samples": content})
    return pair


def _arrays(parts: Sequence[Named]) -> list[Any]:
    return [whole for whole in wholes(parts) if whole.in_memory]


def _describe(
    source: DataSource, training: Named, validation: Named, recorded: Before | None
) -> tuple[Fit, tuple[str, ...], tuple[int, ...] | None]:
    """How images become those of the image size, remarks, also on what changed since, and the largest size."""
    fit, remarks, largest = source.describe(training, validation, None if recorded is None else recorded.fit)
    if recorded is not None:
        about, now = recorded.about, RunSamples.of(training, validation)
        unlike = None if about is None else unlike_values(training, about.values)
        if unlike is not None:
            raise ConfigError(unlike)
        recorded.samples.require_unchanged(now)
        if about is not None and about.classes != tuple(training.classes):
            raise ConfigError(
                f"the classes were {some(about.classes)} when the run began, and are {some(training.classes)}, so that "
                "outputs would mean others: put them back, or train in another `run_folder`"
            )
        remarks += recorded.samples.changes(now)
        remarks += source.not_compared((training, validation))
    return fit, tuple(datasets.printable(remark) for remark in remarks), largest


def unlike_values(images: Any, trained_on: str | None) -> str | None:
    """The difference of values of volumes from the training's, recorded as `trained_on`, in one sentence."""
    values = getattr(images, "values", None)
    if values is not None and trained_on is not None and not alike(values, trained_on):
        if values in DEPTHS:
            what = "targets" if of_values(task_of(images)) else "images"
            return f"{what} have {DEPTHS[values]}, but training had {DEPTHS.get(trained_on or '', trained_on)}"
        if str(values).startswith("features"):
            return f"the slides have {values}, but training had {trained_on}: embed the slides by that model"
        return (
            f"values of the volumes are read {values}, but those of training were {trained_on}: write them in the "
            "format and type of training"
        )
    return None
