"""Whole-slide images before and after training: `mpi4dl slides check slides.csv`, `tissue`, `compose` and `hits`.

`compose` writes synthetic slides. `hits` compares maps of predictions with annotations.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl._commands import runs, typed
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl.options.command import run_parsed
from mpi4dl.options.declare import CommandParser

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

DESCRIPTION = "Check slides, show their tissue, compose synthetic ones, or compare maps of them with annotations."
STRIP_PX = 1024  # rows of a slide that are read at once

Feed = Callable[[], None]


def main(argv: Sequence[str] | None = None) -> None:
    run_parsed(_parser(), argv, lambda comm, options: options.act(comm, options))


def _parser() -> CommandParser:
    from mpi4dl.options.config import Config
    from mpi4dl.options.declare import options_of

    parser = CommandParser(prog=f"mpirun -n RANKS {typed('slides')}", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, act, what in (
        ("check", check, "read all slides of a table or folder through, and list what is wrong with them"),
        ("tissue", tissue, "outline the tissue of each slide on its thumbnail (PNG), and for QuPath (GeoJSON)"),
    ):
        each = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        each.set_defaults(act=act)
        each.add_argument("slides", metavar="SLIDES", help="a table of slides, or a folder of them")
        each.add_argument("--slides-folder", help="the folder of the slides; default: that of the table")
        each.add_argument("--mpp", type=float, help="microns per pixel at which training will read them")
        each.add_argument("--magnification", type=float, help="or the magnification")
        each.add_argument("--assume-mpp", type=float, help="microns per pixel of level 0 of slides that do not say it")
        for column in ("slide_column", "patient_column", "annotation_column"):
            options_of(Config)[column].add_to(each, options_of(Config)[column].help)
        if name == "tissue":
            each.add_argument("--tissue", default="otsu", help="a threshold of saturation from 0 to 1, or otsu")
            each.add_argument(
                "--leave-out", default="", help="pen marks (pen), regions out of focus (blur), or pen,blur"
            )
            each.add_argument("--out", default="tissue", help="the folder that is written (default: %(default)s)")
    about = "count the slides whose map is highest in an annotated region"
    each = commands.add_parser("hits", help=about, description=f"{about[0].upper()}{about[1:]}.")
    each.set_defaults(act=hits)
    each.add_argument("folder", metavar="PREDICTED", help="what mpi4dl predict wrote by --out")
    each.add_argument("--slides", metavar="TABLE", help="the table with annotations; default: that of the predictions")
    each.add_argument("--slides-folder", help="the folder of the slides; default: that of the table")
    each.add_argument("--assume-mpp", type=float, help="microns per pixel of level 0 of slides that do not say it")
    each.add_argument("--classes", help="classes of annotations that count, such as tumour,metastasis; default: all")
    each = commands.add_parser("compose", help="write synthetic slides with lesions", description=compose.__doc__)
    each.set_defaults(act=compose)
    each.add_argument("out", metavar="FOLDER", help="the folder that is written")
    each.add_argument("--patients", type=int, default=20, help="default: %(default)s; every second one has a tumour")
    each.add_argument("--slides-each", type=int, default=1, help="slides of each patient (default: %(default)s)")
    each.add_argument("--size", type=int, default=8192, help="the longest side in pixels (default: %(default)s)")
    each.add_argument("--mpp", default="0.5", help="microns per pixel of the slides in turn (default: %(default)s)")
    each.add_argument("--formats", default=".tif", help="of .tif,.ome.tif,.svs, in turn (default: %(default)s)")
    each.add_argument("--lesion-share", type=float, default=0.0004, help="of the area (default: %(default)s)")
    each.add_argument("--seed", type=int, default=0)
    each.add_argument("--dry-run", action="store_true", help="print what would be written, and stop")
    return parser


def check(comm: "Communicator", options: Any) -> None:
    """Read all levels of every slide through, each on one rank, and print what is wrong. Collective."""
    from mpi4dl._wording import counted
    from mpi4dl.comm import Refusal
    from mpi4dl.datasets.base import DatasetError
    from mpi4dl.geometry import Interval

    slides, wrong = _open(comm, options), set[int]()

    def look(index: int, feed: Feed) -> str:
        wrong.add(index)
        try:
            slide = slides.image(index)
            for level in slide.file.levels:
                whole = slide.at(level.downsample)
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
        raise Refusal(f"{counted(problems, 'slide')} of {len(slides)} cannot be used as they are")
    if comm.rank == 0:
        told = "no decoder found an error. JPEG has no checksums: a damaged tile that decodes is not found"
        print(f"{counted(len(slides), 'slide')} read through, {told}")


def tissue(comm: "Communicator", options: Any) -> None:
    """Write NAME.png and NAME.geojson of the tissue of each slide, and of what is left out of it. Collective."""
    from mpi4dl._files import write_durably
    from mpi4dl.datasets.base import DatasetError
    from mpi4dl.datasets.slides.artifacts import ARTIFACTS
    from mpi4dl.datasets.slides.tissue import find_tissue

    out = Path(options.out)
    slides = _open(comm, options)
    with comm.together((ValueError, OSError)):
        threshold = None if options.tissue == "otsu" else float(options.tissue)
        leave_out = [each.strip() for each in options.leave_out.split(",") if each.strip()]
        unknown = next((each for each in leave_out if each not in ARTIFACTS), None)
        if unknown is not None:
            raise ValueError(f"--leave-out {options.leave_out}: {unknown} is none of {', '.join(ARTIFACTS)}")
        out.mkdir(parents=True, exist_ok=True)

    def show(index: int, feed: Feed) -> str:
        name = Path(slides.name(index)).name
        try:
            slide = slides.image(index)
            found = find_tissue(slide, threshold, leave_out)
            write_durably(out / f"{name}.png", found.picture(slide))
            write_durably(out / f"{name}.geojson", found.geojson().encode())
        except DatasetError as error:
            return str(error)
        told = "".join(
            f", {ARTIFACTS[each].lower()} {100 * mask.mean():.1f} %" for each, mask in found.left_out.items()
        )
        return f"{name}: {100 * found.share:.1f} % tissue{told}"

    _each(comm, len(slides), show)


def _each(comm: "Communicator", count: int, work: Callable[[int, Feed], str]) -> int:
    """Share `count` slides over the ranks, print what `work(index, feed)` returns, and return how many lines that was.

    `feed()` is a sign of life, due every few minutes: a rank without one ends the job. Collective; an OSError of one
    rank ends the command on all.
    """
    from mpi4dl._progress import ProgressOfImages
    from mpi4dl.runs.stopping import SETTLED_SECONDS, HangTimeout

    patience = HangTimeout(SETTLED_SECONDS if comm.size > 1 else 0.0)
    patience.stop()  # until this rank has a slide
    progress, num_lines = ProgressOfImages(count, comm.rank == 0, "slide"), 0
    for first in range(0, count, comm.size):
        line = ""
        with comm.together((OSError,)):
            if first + comm.rank < count:
                with patience.working("slide"):
                    line = work(first + comm.rank, patience.feed)
        lines = [each for each in comm.all_gather_object(line) if each]
        for each in lines if comm.rank == 0 else ():
            print(each, flush=True)
        num_lines += len(lines)
        progress.advance(min(comm.size, count - first), 0)
    progress.close()
    return num_lines


def hits(comm: "Communicator", options: Any) -> None:
    """Print of each slide with a map and annotations where the map is highest, and whether it is annotated. Collective.

    The last line has the share of slides. `hits.csv` in the folder has a line for each. Raises Refusal if no slide has
    both.
    """
    from mpi4dl._files import write_durably
    from mpi4dl._wording import counted
    from mpi4dl.comm import Refusal
    from mpi4dl.datasets.base import DatasetError, printable
    from mpi4dl.viewer.hits import Hit, csv_of, hit_of
    from mpi4dl.viewer.results import read_results

    results = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            table, folder = (None if each is None else Path(each) for each in (options.slides, options.slides_folder))
            results = read_results(Path(options.folder), table, folder, options.assume_mpp)
    results = comm.broadcast_object(results)
    slides = [each for each in results.slides if each.annotation is not None]
    classes = None if options.classes is None else tuple(options.classes.split(","))
    for remark in results.remarks if comm.rank == 0 else ():
        print(remark)
    mine: list[Hit] = []
    there: set[str] = set()  # classes of regions that do not count

    def look(index: int, feed: Feed) -> str:
        try:
            hit = hit_of(slides[index], classes)
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
        asked = "no region counts" if options.classes is None else f"--classes {options.classes}: no region is of these"
        raise Refusal(
            f"{asked}; annotations have regions of {', '.join(map(printable, others))}: name them by --classes"
        )
    if not found:
        raise Refusal(
            f"{options.folder}: no slide has a map and an annotation with polygons: name the table with a column "
            "annotation by --slides, and predict with --maps"
        )
    with comm.together((OSError,)):
        if comm.rank == 0:
            write_durably(Path(options.folder) / "hits.csv", csv_of(found))
    if comm.rank == 0:
        told = []
        for what, count in (
            ("its patch overlaps an annotation on", sum(each.overlaps for each in found)),
            ("the centre of the patch is in one on", sum(each.inside for each in found)),
        ):
            told.append(f"{what} {count} ({100 * count / len(found):.1f} %)")
        print(f"{counted(len(found), 'slide')} with a map and annotations; of the highest value, {', '.join(told)}")


def _open(comm: "Communicator", options: Any) -> Any:
    """The slides that the options name, listed by rank 0 for all. Collective; raises Refusal."""
    from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
    from mpi4dl.datasets.slides.slide import Resolution
    from mpi4dl.options.config import Config
    from mpi4dl.options.data import named_columns
    from mpi4dl.options.declare import speaking, spelling

    found = None
    with comm.together((ValueError, OSError)), speaking(spelling(Config)):
        if comm.rank == 0:
            resolution = Resolution(options.mpp, options.magnification, None, options.assume_mpp)
            folder = None if options.slides_folder is None else Path(options.slides_folder)
            columns = named_columns(options)
            slides = SlideOptions(resolution)
            found = SlideFolder(Path(options.slides), slides, folder=folder, label_columns=(), columns=columns)
    return comm.broadcast_object(found)


def compose(comm: "Communicator", options: Any) -> None:
    """Write synthetic slides: stained tissue on glass, and lesions in those of every second patient. Collective."""
    from mpi4dl._files import write_durably
    from mpi4dl._wording import counted
    from mpi4dl.datasets.slides.compose import RECORD, TABLE, Cohort

    folder = Path(options.out)
    with comm.together((ValueError, OSError)):
        cohort = Cohort(
            options.patients,
            options.slides_each,
            options.size,
            tuple(map(float, options.mpp.split(","))),
            tuple(options.formats.split(",")),
            options.lesion_share,
            options.seed,
        )
        if not options.dry_run:
            folder.mkdir(parents=True, exist_ok=True)
            cohort.require_own(folder)
    if options.dry_run:
        for number in range(len(cohort)) if comm.rank == 0 else ():
            height, width = cohort.composition(number).size
            print(f"{folder / cohort.name(number)}: {width} x {height} px")
        return

    def write(index: int, feed: Feed) -> str:
        cohort.write(folder, index, feed)
        return ""

    with comm.together((OSError,)):
        if comm.rank == 0:  # before the slides: after an early end, only the same options continue
            write_durably(folder / RECORD, cohort.record().encode())
    _each(comm, len(cohort), write)
    with comm.together((OSError,)):
        if comm.rank == 0:
            write_durably(folder / TABLE, cohort.table().encode())
            print(f"{counted(len(cohort), 'slide')} in {folder}, listed in {folder / TABLE}")


if __name__ == "__main__":
    main()
