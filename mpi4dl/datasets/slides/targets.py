"""The targets of slides: slides of the same places, such as of another stain, that a model learns to make."""

from collections.abc import Sequence
from pathlib import Path

from mpi4dl.datasets.base import BadImage
from mpi4dl.datasets.files import WHOLE_SLIDES, StoredPicture, channel_names
from mpi4dl.datasets.samples import Sample, require_annotations
from mpi4dl.datasets.slides.masks import annotation_files
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
        require_annotations(table, rows, "target")
        self.files, self.places = annotation_files(table, root, rows, (OME, *WHOLE_SLIDES))

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
