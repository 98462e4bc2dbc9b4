"""The targets of slides: slides of the same places, such as of another stain, that a model learns to make."""

from collections.abc import Sequence
from pathlib import Path

from mpi4dl.datasets.base import BadImage, DatasetError
from mpi4dl.datasets.files import WHOLE_SLIDES, StoredPicture, channel_names
from mpi4dl.datasets.listed import File, ListedFiles, known_size, mask_as_text
from mpi4dl.datasets.samples import Sample
from mpi4dl.datasets.slides.masks import annotation_path
from mpi4dl.datasets.slides.slide import Corner, Resolution, Slide, open_slide, window

CHANNELS, OME = 3, ".ome.tif"


class SlideTargets:
    """The target of each row of a table, in its column of annotations; as slides they are read in colours of 8 bits.

    Raises:
        DatasetError: a slide without one, or one that is not there.
    """

    classes, values = channel_names(CHANNELS), "uint8"
    remarks = ()

    def __init__(self, table: Path, root: Path, rows: Sequence[Sample]) -> None:
        bare = next((row for row in rows if row.annotation is None), None)
        if bare is not None:
            raise DatasetError(f"{table}, line {bare.line}: {bare.name} has no target: name one, or leave the line out")
        paths = [annotation_path(table, root, row, (OME, *WHOLE_SLIDES)).absolute() for row in rows]
        self.files = ListedFiles(Path("/"), [File(str(path)[1:], known_size(path)) for path in paths])

    def label(self, index: int, slide: Slide) -> StoredPicture:
        """The target of a slide, at its resolution. One that does not say its microns per pixel has those of the slide.

        Raises BadImage, also for one that does not have the size of the slide, and OtherFile.
        """
        path = self.files.checked(index)
        if slide.mpp is None:
            found = open_slide(path).at(slide.downsample)
        else:
            found = open_slide(path, Resolution(mpp=slide.mpp, assumed_mpp=slide.mpp / slide.downsample))
        if found.size != slide.size:
            mine, others = (" x ".join(map(str, each)) for each in (found.size, slide.size))
            raise BadImage(
                path,
                f"is a target of {mine} pixels, but its slide {slide.file.path} has {others} at this resolution: "
                "register targets, so that both show the same places",
            )
        return StoredPicture(path, found, CHANNELS, self.values)

    def window(self, label: StoredPicture, corner: Corner, size: tuple[int, ...]) -> StoredPicture:
        return StoredPicture(label.path, window(label, corner, size), CHANNELS, self.values)

    def as_text(self, index: int, name: str) -> str:
        """The target of a slide, called `name` in the table."""
        return mask_as_text(name, self.files, index)
