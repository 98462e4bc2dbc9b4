"""Whole-slide images before and after training: `mpi4dl slides check slides.csv`, `tissue`, `compose` and `hits`.

`compose` writes synthetic slides. `hits` compares maps of predictions with annotations.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl._commands import one_message, runs, typed
from mpi4dl.comm import Refusal, failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._files import make_folder, write_durably
from mpi4dl._wording import aligned, counted
from mpi4dl.geometry import Interval
from mpi4dl.inference.options import LabelledColumns
from mpi4dl.options.command import Command, CommandLine, command, refuse_together
from mpi4dl.options.config import Slides
from mpi4dl.options.declare import ConfigError, asked_topic, like, nearest, option
from mpi4dl.options.kinds import COUNT, NAME, NAMES, POSITIVE, SEED, SHARE, choice, optional, some_numbers

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

DESCRIPTION = "Check slides, show their tissue, compose synthetic ones, or compare maps of them with annotations."
STRIP_PX = 1024  # rows of a slide that are read at once
EACH_MPP = some_numbers("numbers greater than 0, such as 0.5 or 0.25,0.5", POSITIVE)
Feed = Callable[[], None]


@dataclass(frozen=True)
class CheckedSlides:
    """The folder of the slides, the resolution of training, and the columns of their table."""

    slides_folder: str | None = like(Slides, "slides_folder")
    mpp: float | None = like(Slides, "mpp")
    magnification: float | None = like(Slides, "magnification")
    assume_mpp: float | None = like(Slides, "assume_mpp")
    slide_column: str | None = like(Slides, "slide_column")
    patient_column: str | None = like(Slides, "patient_column")
    annotation_column: str | None = like(Slides, "annotation_column")


@dataclass(frozen=True)
class CheckedLabels:
    """What is read beside slides."""

    task: str | None = option(
        None,
        "segment or image: the annotations or the targets that the table names are read through, too",
        optional(choice("segment", "image")),
    )


@dataclass(frozen=True)
class Outlining:
    """How tissue is found, and the folder of its outlines."""

    tissue: float | str = like(Slides, "tissue")
    leave_out: tuple[str, ...] = like(Slides, "leave_out")
    out: str = option("tissue", "the folder that is written", NAME, brief="the folder that is written")


@dataclass(frozen=True)
class Annotated:
    """The annotations, and which of them count."""

    slides: str | None = option(None, "the table with annotations; none: that of the predictions", optional(NAME))
    slides_folder: str | None = like(Slides, "slides_folder")
    assume_mpp: float | None = like(Slides, "assume_mpp")
    classes: tuple[str, ...] | None = option(
        None, "classes of annotations that count, such as tumour,metastasis; none: all", optional(NAMES)
    )


@dataclass(frozen=True)
class Composing:
    """The number of patients and slides, and what the slides are like."""

    patients: int = option(20, "number of patients; every second one has a tumour", COUNT)
    slides_each: int = option(1, "number of slides of each patient", COUNT)
    size: int = option(8192, "the longest side in pixels", COUNT)
    mpp: tuple[float, ...] = option((0.5,), "microns per pixel of the slides in turn", EACH_MPP)
    lesion_share: float = option(0.0004, "share of lesions in the area of a slide with a tumour", SHARE)
    seed: int = option(0, "the seed of the slides", SEED)


@dataclass(frozen=True)
class CheckConfig:
    reading: CheckedSlides = field(default_factory=CheckedSlides)
    labels: CheckedLabels = field(default_factory=CheckedLabels)


@dataclass(frozen=True)
class TissueConfig:
    reading: CheckedSlides = field(default_factory=CheckedSlides)
    outlining: Outlining = field(default_factory=Outlining)


@dataclass(frozen=True)
class HitsConfig:
    annotated: Annotated = field(default_factory=Annotated)
    columns: LabelledColumns = field(default_factory=LabelledColumns)


@dataclass(frozen=True)
class ComposeConfig:
    composing: Composing = field(default_factory=Composing)


SOURCE = "a table of slides, or a folder of them,"


@command(
    CheckConfig,
    "SLIDES [--FLAG VALUE ...]",
    "Read all slides of a table or folder through, and list what is wrong with them.",
    SOURCE,
    name="slides check",
)
def check(comm: "Communicator", asked: CommandLine[CheckConfig]) -> None:
    """Read all levels of every slide through, each on one rank, and print what is wrong. Collective."""
    from mpi4dl.datasets.base import DatasetError

    slides, wrong = _open(comm, asked.source, asked.config.reading, asked.config.labels.task), set[int]()

    def look(index: int, feed: Feed) -> str:
        wrong.add(index)
        try:
            slide = slides.image(index)
            wholes: list[Any] = [slide.at(level.downsample) for level in slide.file.levels]
            for whole in (*wholes, *([] if slides.pixels is None else [slides.label(index)])):
                rows, cols = whole.size
                for top in range(0, rows, STRIP_PX):
                    whole.read(Interval(top, min(top + STRIP_PX, rows)), Interval(0, cols))
                    feed()
        except DatasetError as error:
            return str(error)
        if slide.mpp is None:
            return f"{slide.file.path}: has no microns per pixel: use --assume-mpp"
        wrong.remove(index)
        return f"{slides.name(index)}: {slide.file.described()}"

    _each(comm, len(slides), look)
    problems = sum(map(len, comm.all_gather_object(wrong)))
    if problems:
        raise Refusal(f"{counted(problems, 'slide')} of {len(slides)} cannot be used")
    if comm.rank == 0:
        told = "no decoder found an error. JPEG has no checksums: a damaged tile that decodes is not found"
        print(f"{counted(len(slides), 'slide')} read through, {told}")


@command(
    TissueConfig,
    "SLIDES [--FLAG VALUE ...]",
    "Outline the tissue of each slide on its thumbnail (PNG), and for QuPath (GeoJSON).",
    SOURCE,
    name="slides tissue",
)
def tissue(comm: "Communicator", asked: CommandLine[TissueConfig]) -> None:
    """Write NAME.png and NAME.geojson of the tissue of each slide, and of what is left out of it. Collective."""
    from mpi4dl.datasets.base import DatasetError
    from mpi4dl.datasets.slides.artifacts import ARTIFACTS
    from mpi4dl.datasets.slides.tissue import find_tissue

    chosen = asked.config.outlining
    out, threshold = Path(chosen.out), None if isinstance(chosen.tissue, str) else chosen.tissue
    slides = _open(comm, asked.source, asked.config.reading)
    with comm.together((OSError,)):
        make_folder(out)

    def show(index: int, feed: Feed) -> str:
        name = Path(slides.name(index)).name
        try:
            slide = slides.image(index)
            found = find_tissue(slide, threshold, chosen.leave_out)
            write_durably(out / f"{name}.png", found.picture(slide))
            write_durably(out / f"{name}.geojson", found.geojson().encode())
        except DatasetError as error:
            return str(error)
        told = "".join(
            f", {ARTIFACTS[each].lower()} {100 * mask.mean():.1f} %" for each, mask in found.left_out.items()
        )
        return f"{name}: {100 * found.share:.1f} % tissue{told}"

    _each(comm, len(slides), show)


def _each(
    comm: "Communicator",
    count: int,
    work: Callable[[int, Feed], str],
    done: Callable[[int], object] = lambda index: None,
) -> None:
    """Share `count` slides over the ranks, and print what `work(index, feed)` returns.

    Rank 0 calls `done(index)` for each slide that is done. `feed()` is a sign of life, due every few minutes: a rank
    without one ends the job. Collective; an OSError of one rank ends the command on all.
    """
    from mpi4dl.runs.stopping import SETTLED_SECONDS, HangTimeout
    from mpi4dl.training.data import one_each

    patience = HangTimeout(SETTLED_SECONDS if comm.size > 1 else 0.0)
    patience.stop()  # until this rank has a slide
    for index, line in one_each(comm, range(count), lambda index: work(index, patience.feed), patience):
        with comm.together((OSError,)):
            if comm.rank == 0:
                done(index)
        if line and comm.rank == 0:
            print(line, flush=True)


@command(
    HitsConfig,
    "PREDICTED [--FLAG VALUE ...]",
    "Count the slides whose map is highest in an annotated region.",
    "the folder that mpi4dl predict wrote",
    name="slides hits",
)
def hits(comm: "Communicator", asked: CommandLine[HitsConfig]) -> None:
    """Print of each slide with a map and annotations where the map is highest, and whether it is annotated. Collective.

    The last line has the share of slides. `hits.csv` in the folder has a line for each. Raises Refusal if no slide has
    both.
    """
    from mpi4dl.datasets.base import DatasetError, printable
    from mpi4dl.options.sources import named_columns
    from mpi4dl.viewer.hits import Hit, csv_of, hit_of
    from mpi4dl.viewer.results import read_results

    chosen, columns = asked.config.annotated, asked.config.columns
    table, folder = (None if each is None else Path(each) for each in (chosen.slides, chosen.slides_folder))
    where = table, folder, chosen.assume_mpp, named_columns(columns), columns.label_columns
    results = comm.from_first(lambda: read_results(Path(asked.source), *where))
    slides = [each for each in results.slides if each.annotation is not None]
    for remark in results.remarks if comm.rank == 0 else ():
        print(asked.spell(remark))
    mine: list[Hit] = []
    there: set[str] = set()  # classes of regions that do not count

    def look(index: int, feed: Feed) -> str:
        try:
            hit = hit_of(slides[index], chosen.classes)
        except DatasetError as error:
            return str(error)
        if not isinstance(hit, Hit):
            there.update(hit)
            return f"{printable(slides[index].name)}: has no region of these classes"
        mine.append(hit)
        return str(hit)

    _each(comm, len(slides), look)
    found = sorted(hit for each in comm.all_gather_object(mine) for hit in each)
    others = sorted({name for each in comm.all_gather_object(there) for name in each})
    if not found and others:
        named = None if chosen.classes is None else f"--classes {','.join(chosen.classes)}: no region is of these"
        raise Refusal(
            f"{named or 'no region counts'}; annotations have regions of {', '.join(map(printable, others))}: name "
            "them by --classes"
        )
    if not found:
        raise Refusal(
            f"{asked.source}: no slide has a map and an annotation with polygons: name the table with a column "
            "annotation by --slides, and predict with --maps"
        )
    comm.from_first(lambda: write_durably(Path(asked.source) / "hits.csv", csv_of(found)))
    if comm.rank == 0:
        told = []
        for what, count in (
            ("its patch overlaps an annotation on", sum(each.overlaps for each in found)),
            ("the centre of the patch is in one on", sum(each.inside for each in found)),
        ):
            told.append(f"{what} {count} ({100 * count / len(found):.1f} %)")
        print(f"{counted(len(found), 'slide')} with a map and annotations; of the highest value, {', '.join(told)}")


def _open(comm: "Communicator", source: str, chosen: CheckedSlides, task: str | None = None) -> Any:
    """The slides that the options name, listed by rank 0 for all, without labels but for those of a task of pixels.
    Collective; raises Refusal.
    """
    from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
    from mpi4dl.datasets.slides.slide import Resolution
    from mpi4dl.options.sources import named_columns

    def listed() -> SlideFolder:
        slides = SlideOptions(Resolution(chosen.mpp, chosen.magnification, None, chosen.assume_mpp))
        folder = None if chosen.slides_folder is None else Path(chosen.slides_folder)
        labels: Any = {"label_columns": ()} if task is None else {"task": task}
        return SlideFolder(Path(source), slides, folder=folder, columns=named_columns(chosen), **labels)

    return comm.from_first(listed)


@command(
    ComposeConfig,
    "FOLDER [--FLAG VALUE ...]",
    "Write synthetic slides: stained tissue on glass, and lesions in those of every second patient.",
    "the folder that is written",
    name="slides compose",
)
def compose(comm: "Communicator", asked: CommandLine[ComposeConfig]) -> None:
    """Write synthetic slides: stained tissue on glass, and lesions in those of every second patient. Collective."""
    from mpi4dl.datasets.slides.compose import TABLE, Cohort
    from mpi4dl.results.job import FolderJob, ItemInput, settings_of
    from mpi4dl.results.names import COMPOSED

    folder, chosen = Path(asked.source), asked.config.composing
    job: FolderJob | None = None  # on rank 0
    todo: list[int] = []
    with comm.together((ValueError, OSError)):
        made = {name: getattr(chosen, name) for name in ("patients", "slides_each", "size", "lesion_share", "seed")}
        cohort = Cohort(mpps=chosen.mpp, **made)
        numbers = {cohort.name(number): number for number in range(len(cohort))}
        if comm.rank == 0:
            inputs = dict.fromkeys(numbers, ItemInput(None))
            there = [folder / name for name in (*numbers, TABLE)]
            job = FolderJob(folder, COMPOSED, settings_of(asked.config), inputs, writes=there)
            todo = [number for name, number in numbers.items() if name not in job.done]
    todo = comm.broadcast_object(todo)

    def write(index: int, feed: Feed) -> str:
        cohort.write(folder, todo[index], feed)
        return ""

    def done(index: int) -> None:
        if job is not None:
            job.add({"slide": cohort.name(todo[index])}, cohort.files(folder, todo[index]))

    try:
        _each(comm, len(todo), write, done)
    finally:
        if job is not None:
            job.close()
    with comm.together((OSError,)):
        if comm.rank == 0:
            write_durably(folder / TABLE, cohort.table().encode())
            print(f"{counted(len(cohort), 'slide')} in {folder}, listed in {folder / TABLE}")


COMMANDS: Mapping[str, Command[Any]] = {"check": check, "tissue": tissue, "hits": hits, "compose": compose}


def slides(comm: "Communicator", argv: Sequence[str]) -> None:
    """What a command line asks for, inside an MPI job. Collective."""
    COMMANDS[argv[0]](comm, argv[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names. `--help` lists all commands."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        COMMANDS[words[0]].main(words[1:])
    elif asked_topic(words) is not None:
        with one_message():
            lines = aligned([(name, each.description) for name, each in COMMANDS.items()])
            print(
                "\n".join(
                    [
                        f"usage: mpirun -n RANKS {typed('slides')} COMMAND [--FLAG VALUE ...]",
                        "",
                        DESCRIPTION,
                        "",
                        "commands:",
                        *(f"  {line}" for line in lines),
                        "",
                        "COMMAND --help shows its options",
                    ]
                )
            )
    else:
        failure.run(lambda: refuse_together(lambda: _refuse(words[:1]), str))


def _refuse(first: Sequence[str]) -> None:
    known = f"name a command first: {', '.join(COMMANDS)}"
    raise ConfigError(
        f"there is no command {first[0]}{nearest(first[0], COMMANDS) or f'; {known}'}" if first else known
    )


if __name__ == "__main__":
    main()
