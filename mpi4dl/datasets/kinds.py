"""Kinds of files with samples: how they end, which files together are one sample, and how a table of them looks.

`volumes.VOLUME_SUFFIXES` has the formats of volumes: a new one is a file of its own and a line there.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4dl._wording import counted, some
from mpi4dl.datasets import series
from mpi4dl.datasets.base import DatasetError, printable
from mpi4dl.datasets.files import DICOM, SUFFIXES, WHOLE_SLIDES, ZARR_SUFFIXES
from mpi4dl.datasets.listed import files_below
from mpi4dl.datasets.volumes import VOLUME_SUFFIXES

# The files of each sample among those of a folder, its main file first.
Grouped = Callable[[Sequence[Path]], Sequence[Sequence[Path]]]


@dataclass(frozen=True)
class FileKind:
    """A kind of files.

    Attributes:
        noun: what messages call one, and `nouns` several.
        suffixes: how they end; not_read: how such files end that cannot be read, which a warning names.
        grouped: of the files of DICOM of a folder, those that together are one sample.
        stands_for: the endings of files that a table may name instead.
        layout: what a table looks like, for errors.
        missing: what to do about a file that is not there, for errors.
        folder_option: the option that names their folder.
        tells_patients: whether to say how patients were found where no column says it.
    """

    noun: str
    suffixes: tuple[str, ...]
    grouped: Grouped | None = None
    stands_for: tuple[str, ...] = ()
    layout: str = "expected a line such as file,class and below it one for each image, such as a/1.png,benign"
    missing: str = ""
    folder_option: str = "images"
    tells_patients: bool = False
    not_read: tuple[str, ...] = ()

    @property
    def nouns(self) -> str:
        return self.noun.replace("file", "files") if " " in self.noun else f"{self.noun}s"

    def below(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The samples below a folder, in order, and the sample that each other file is a part of.

        A sample of several files is their folder, or its main file, if other samples are in there.

        Raises DatasetError if there is no such folder.
        """
        if not folder.is_dir():
            what = f"is a file, not a folder of {self.nouns}" if folder.exists() else f"no such folder of {self.nouns}"
            raise DatasetError(f"{folder}: {what}: name one by `{self.folder_option}`")
        paths = [*files_below(folder, (*self.suffixes, *self.not_read))]
        others = [path for path in paths if not path.name.lower().endswith(self.suffixes)]
        if DICOM in self.suffixes:  # one without a known ending begins like DICOM
            others = [path for path in others if path.name.lower().endswith(self.not_read)]
        if others:
            names = sorted(path.relative_to(folder).as_posix() for path in others)
            told = f"{counted(len(names), 'file')} below {folder} left out: {some(names, 3)}"
            logging.getLogger(__name__).warning(
                "%s", printable(f"{told}: {self.nouns} end in {' '.join(self.suffixes)}")
            )
            paths = sorted({*paths} - {*others})
        found, parts_of = [], dict[str, str]()
        if self.grouped is not None:
            apart = tuple(each for each in self.suffixes if each != DICOM)
            folders: dict[Path, list[Path]] = {}
            for path in sorted(each for each in paths if not each.name.lower().endswith(apart)):
                folders.setdefault(path.parent, []).append(path)
            paths = [path for path in paths if path.name.lower().endswith(apart)]
            for parent, inside in folders.items():
                samples = self.grouped(inside)
                for files in samples:
                    path = parent if len(samples) == 1 and parent != folder else files[0]
                    found.append(path.relative_to(folder).as_posix())
                    parts_of.update((file.relative_to(folder).as_posix(), found[-1]) for file in files)
        found += [path.relative_to(folder).as_posix() for path in paths]
        return sorted(found), parts_of


_OTHER_PICTURES = (".gif", ".jp2", ".j2k", ".jfif", ".jpe", ".heic", ".heif", ".avif", ".jxl", ".tga", ".ppm", ".pgm")
_OTHER_SLIDES = (".czi", ".vsi", ".lif", ".isyntax", ".qptiff")
_OTHER_VOLUMES = (".mha", ".mhd", ".nrrd", ".nhdr", ".mgz", ".img")


def _slides_of_dicom(files: Sequence[Path]) -> Sequence[Sequence[Path]]:
    from mpi4dl.datasets.slides import dicom

    return dicom.grouped(files)


PICTURES = FileKind(
    "image", SUFFIXES, not_read=(*_OTHER_PICTURES, *_OTHER_SLIDES, *_OTHER_VOLUMES, DICOM, ".nii", ".nii.gz", ".npy")
)
VOLUMES = FileKind("volume", tuple(VOLUME_SUFFIXES), series.grouped, not_read=(*_OTHER_VOLUMES, ".h5", ".czi", ".lif"))
SLIDES = FileKind(
    "slide",
    WHOLE_SLIDES,
    _slides_of_dicom,
    layout="expected a line such as slide_id,case_id,label and below it one for each slide, such as s1,p1,tumour",
    missing=": correct its name, or name the folder of slides by `slides_folder`",
    folder_option="slides_folder",
    tells_patients=True,
    not_read=(*_OTHER_PICTURES, *_OTHER_SLIDES, *ZARR_SUFFIXES),
)
FEATURES = FileKind(
    "file of features",
    (".h5", ".hdf5", ".pt"),
    stands_for=WHOLE_SLIDES,
    layout=SLIDES.layout,
    missing=": embed the slide by mpi4dl embed, or leave the line out",
    folder_option="features",
    tells_patients=True,
    not_read=(".npy", ".npz", ".zarr", ".pkl"),
)
