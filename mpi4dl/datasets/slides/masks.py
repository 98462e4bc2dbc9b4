"""The masks of slides by the annotations of a table: their classes, and the mask of each slide."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from mpi4dl._wording import Tell, counted, quietly, some
from mpi4dl.datasets.base import IGNORED, BadImage, DatasetError, Image, LastMade
from mpi4dl.datasets.listed import File, ListedFiles, known_size
from mpi4dl.datasets.masks import IGNORE_INDEX, Mask, open_stored, values_in
from mpi4dl.datasets.samples import Sample
from mpi4dl.datasets.slides.annotations import (
    IGNORED_CLASS,
    Annotations,
    PictureMask,
    Region,
    RegionMask,
    SlideMask,
    is_picture,
    read_annotations,
)
from mpi4dl.datasets.slides.slide import Corner, Slide, window
from mpi4dl.datasets.table import require_apart

BACKGROUND, ANNOTATED = "background", "annotated"
AUXILIARY = "*"  # ends the names of QuPath's classes that are none, such as Region*
MOST_CORNERS = 1 << 22  # of annotations that are kept in memory


@dataclass(frozen=True)
class MaskOptions:
    """How annotations become masks.

    `ignores_unannotated`: pixels without annotation count for nothing; else they are background. `in_bounds`:
    coordinates begin at the part of a slide that the scanner scanned, as in QuPath. Pictures of classes have
    `num_classes`, or as many as they show, and `ignore_index` in ignored pixels.
    """

    ignores_unannotated: bool = False
    in_bounds: bool = False
    num_classes: int | None = None
    ignore_index: int | None = IGNORE_INDEX


class SlideMasks:
    """The annotations of slides, all of them polygons or all pictures.

    Classes of polygons are background and the names of classes in order. Those of pictures are numbers. `classes` fixes
    them, and then no file is read here. `tell(doing, done, total)` hears of files that were read.

    Raises:
        DatasetError: a file that is missing or damaged, a class that is not in `classes`, or no class at all.
    """

    values: str | None = None  # the depth of targets: masks have none

    def __init__(
        self,
        table: Path,
        root: Path,
        rows: Sequence[Sample],
        options: MaskOptions,
        classes: tuple[str, ...] | None = None,
        tell: Tell = quietly,
    ) -> None:
        self.options = options
        self._table = table
        self.files, self.places = annotation_files(table, root, rows)
        if not self.places:
            raise DatasetError(f"{table}: names no annotation, but `task` segment needs one of each class")
        pictures = [is_picture(self.files.path(number)) for number in range(len(self.files))]
        if any(pictures) and not all(pictures):
            one, other = (self.files.path(pictures.index(kind)).name for kind in (False, True))
            raise DatasetError(
                f"{table}: annotations are polygons ({one}) and pictures ({other}): all of a table are of one kind"
            )
        self.are_pictures = all(pictures)
        self._kept = LastMade(MOST_CORNERS, attrgetter("num_corners"))
        self.remarks: tuple[str, ...] = ()
        self._nameless = False
        if classes is not None:
            self.classes = classes
            self._nameless = classes[1:] == (ANNOTATED,)
        else:
            self.classes = self._counted(tell) if self.are_pictures else self._named(tell)
        without = len(rows) - len(self.places)
        if without:
            said = "ignored" if options.ignores_unannotated else self.classes[0]
            self.remarks += (f"{counted(without, 'slide')} without annotation: {said} throughout",)

    def _annotations(self, number: int) -> Annotations:
        """The polygons of a file; those read last are kept. Raises BadImage, OtherFile."""

        def read() -> Annotations:
            found = read_annotations(self.files.checked(number))
            if not self._nameless:
                return found
            return Annotations(found.path, tuple(Region(each.name or ANNOTATED, each.rings) for each in found.regions))

        annotations: Annotations = self._kept(number, read)
        return annotations

    def _named(self, tell: Tell) -> tuple[str, ...]:
        """Background, and the classes of all polygons in order."""
        names: set[str] = set()
        nameless = total = 0
        for number in range(len(self.files)):
            found = self._annotations(number)
            names |= {*found.names}
            nameless += sum(not region.name for region in found.regions)
            total += len(found.regions)
            tell("reading annotations", number + 1, len(self.files))
        classes = sorted(name for name in names if not is_auxiliary(name) and name.casefold() != BACKGROUND)
        require_apart(classes, self._table)
        left_out = sorted(name for name in names if is_auxiliary(name) and name != IGNORED_CLASS)
        if left_out:
            self.remarks += (f"polygons of {some(left_out)} are left out, by QuPath's asterisk",)
        if not classes and nameless:
            self._nameless, classes = True, [ANNOTATED]
            self._kept = LastMade(MOST_CORNERS, attrgetter("num_corners"))
        elif nameless:
            self.remarks += (f"{nameless} of {total} polygons have no class and are left out",)
        if not classes:
            raise DatasetError(f"{self._table}: its annotations have no polygon of a class")
        return (BACKGROUND, *classes)

    def _counted(self, tell: Tell) -> tuple[str, ...]:
        """The numbers from 0 to the largest one that pictures have."""
        most = (self.options.num_classes or 0) - 1
        for number in range(len(self.files) if most < 0 else 0):
            values = values_in(self.files.checked(number)).tolist()
            most = max([most, *(value for value in values if value != self.options.ignore_index)])
            tell("reading annotations", number + 1, len(self.files))
        return tuple(map(str, range(max(2, most + 1))))

    def label(self, index: int, slide: Slide) -> SlideMask:
        """The mask of a slide at its resolution. Raises BadImage, OtherFile."""
        number = self.places.get(index)
        outside = IGNORED if self.options.ignores_unannotated else 0
        found: SlideMask
        if number is None:
            return RegionMask(Annotations(slide.file.path, ()), slide, {}, outside)
        if self.are_pictures:
            path = self.files.checked(number)
            picture = Mask(path, open_stored(path), len(self.classes), self.options.ignore_index)
            found = PictureMask(picture, slide)
        else:
            annotations = self._annotations(number)
            numbers = {name: number for number, name in enumerate(self.classes)}
            numbers |= {name: 0 for name in annotations.names if name.casefold() == BACKGROUND}
            numbers |= {IGNORED_CLASS: IGNORED}
            other = next((name for name in annotations.names if name not in numbers and not is_auxiliary(name)), None)
            if other is not None:
                known = some(self.classes[1:])
                raise BadImage(annotations.path, f"has the class {other!r}, but those of training are {known}")
            corner = slide.origin if self.options.in_bounds else (0, 0)
            found = RegionMask(annotations, slide, numbers, outside, corner)
        found.require_on_slide()
        return found

    def window(self, label: SlideMask, corner: Corner, size: tuple[int, ...]) -> Image:
        return window(label, corner, size, IGNORED)


def is_auxiliary(name: str) -> bool:
    """Whether a class is one of QuPath's that are none, such as Region*."""
    return name.endswith(AUXILIARY)


def annotation_files(
    table: Path, root: Path, rows: Sequence[Sample], endings: Sequence[str] = ()
) -> tuple[ListedFiles, dict[int, int]]:
    """The files of annotations, beside the table or in the folder of slides, and by the number of a row that of its
    file; a name may lack one of the `endings`. Raises DatasetError.
    """
    found: dict[int, Path] = {}
    for index, row in enumerate(rows):
        if row.annotation is not None:
            name = row.annotation.replace("\\", "/")
            ends = ("", *endings)
            places = [folder / f"{name}{end}" for folder in dict.fromkeys((table.parent, root)) for end in ends]
            path = next((each for each in places if each.is_file()), None)
            if path is None:
                raise DatasetError(f"{table}, line {row.line}: {places[0]} is not there: correct its name")
            found[index] = path.absolute()
    files = [File(str(path)[1:], known_size(path)) for path in found.values()]
    return ListedFiles(Path("/"), files), {index: number for number, index in enumerate(found)}
