"""Slides in DICOM: the pixels of a TIFF in every box, files that are one slide, and what is missing named."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from pydicom.uid import JPEG2000, JPEG2000Lossless, JPEGBaseline8Bit, RLELossless

from mpi4dl.datasets import BadImage, DatasetError
from mpi4dl.datasets.kinds import SLIDES
from mpi4dl.datasets.samples import read_samples
from mpi4dl.datasets.slides.dataset import SlideFolder, SlideOptions
from mpi4dl.datasets.slides.slide import Resolution, Slide, open_slide
from mpi4dl.geometry import Interval
from mpi4dl.inference.masks import bases_of
from mpi4dl.results.job import ItemInput, identity_of
from tests.datasets.boxes import smooth_image
from tests.datasets.slides.dicom import series

SIZE = (512, 384)


def levels() -> list[np.ndarray]:
    pixels = smooth_image(*SIZE)
    pixels[:130, :200] = 255
    return [pixels, np.ascontiguousarray(pixels[::2, ::2]), np.ascontiguousarray(pixels[::4, ::4])]


@pytest.fixture(scope="module")
def pyramid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TIFF of the same levels."""
    path = tmp_path_factory.mktemp("tiff") / "a.tif"
    with tifffile.TiffWriter(path) as file:
        for number, pixels in enumerate(levels()):
            told = {"tile": (64, 64), "photometric": "rgb", "resolutionunit": 3, "metadata": None}
            file.write(pixels, subfiletype=min(number, 1), resolution=(20_000 / 2**number,) * 2, **told)  # type: ignore[arg-type]
    return path


def box_of(slide: Slide) -> np.ndarray:
    rows, cols = slide.size
    return slide.read(Interval(rows // 5, rows - 3), Interval(7, cols - cols // 8))


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({}, 0),
        ({"parts": 3}, 0),
        ({"sparse": True, "parts": 2}, 0),
        ({"syntax": JPEG2000Lossless}, 0),
        ({"syntax": JPEG2000}, 8),
        ({"syntax": JPEGBaseline8Bit}, 60),
    ],
)
def test_boxes_are_those_of_a_tiff(pyramid: Path, tmp_path: Path, how: dict[str, Any], most: int) -> None:
    written = series(tmp_path / "a", levels(), **how)
    for resolution in (Resolution(), Resolution(mpp=0.83), Resolution(mpp=1.0), Resolution(mpp=3), Resolution(level=2)):
        expected = open_slide(pyramid, resolution)
        for path in (tmp_path / "a", written[-1]):
            slide = open_slide(path, resolution)
            assert (slide.size, slide.mpp, slide.level) == (expected.size, expected.mpp, expected.level)
            difference = np.abs(box_of(slide).astype(int) - box_of(expected))
            assert difference.max() <= most
            assert difference.mean() <= most / 20


def test_a_folder_of_its_own_names_a_slide(tmp_path: Path) -> None:
    mains = [series(tmp_path / name, levels()[:2])[0] for name in ("one/1.2.3", "two/1.2.4")]
    series(tmp_path / "both", levels()[:1], number=2)
    series(tmp_path / "both", levels()[:2], number=3)
    series(tmp_path / "one/1.2.3", levels()[:1], number=4, SOPClassUID="1.2.840.10008.5.1.4.1.1.2")  # of CT
    found = read_samples(tmp_path, SLIDES, label_columns=())
    assert [row.path for row in found.rows] == ["both/2_0_0.dcm", "both/3_0_0.dcm", "one/1.2.3", "two/1.2.4"]
    assert [row.name for row in found.rows] == ["2_0_0", "3_0_0", "1.2.3", "1.2.4"]
    assert [row.path for row in read_samples(mains[0].parent, SLIDES, label_columns=()).rows] == ["1_0_0.dcm"]
    # A table names the folder, with its path or without, or any file.
    table = tmp_path / "slides.csv"
    table.write_text("slide_id,label\none/1.2.3,a\n1.2.4,b\nboth/2_0_0,a\nboth/3_1_0.dcm,b\n")
    rows = read_samples(table, SLIDES).rows
    assert [row.path for row in rows] == ["one/1.2.3", "two/1.2.4", "both/2_0_0.dcm", "both/3_0_0.dcm"]
    # Names of what is written of them keep the last number of a UID.
    assert [path.name for path in bases_of([row.path for row in rows], ".png")] == ["1.2.3", "1.2.4", "2_0_0", "3_0_0"]


def test_a_slide_of_other_files_than_were_listed_is_refused(tmp_path: Path) -> None:
    series(tmp_path / "a", levels()[:2])
    slides = SlideFolder(tmp_path, SlideOptions())
    assert slides.files[0].num_bytes == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    prints, known = slides.prints(slice(None), "here"), identity_of(slides.path(0))
    assert known["bytes"] == slides.files[0].num_bytes
    series(tmp_path / "a", [255 - levels()[0], levels()[1]])
    assert slides.prints(slice(None), "here") != prints
    assert identity_of(slides.path(0))["crc32"] != known["crc32"]
    series(tmp_path / "a", levels())
    with pytest.raises(DatasetError, match=r"bytes here, but had \d+ when it was listed"):
        slides.image(0)


def test_a_slide_that_a_file_names_is_all_files_of_its_series(tmp_path: Path) -> None:
    named, coarser = series(tmp_path, levels()[:2])
    other = series(tmp_path, levels()[1:2], number=2)[0]
    slide = ItemInput(named)
    known, state = slide.identity(), slide.state()
    other.write_bytes(other.read_bytes()[:-1] + b"\1")
    assert slide.is_as_in(known)
    coarser.write_bytes(coarser.read_bytes()[:-1] + b"\1")
    assert not slide.is_as_in(known)
    assert slide.state() != state


def test_a_slide_of_mrxs_is_all_files_of_its_folder(tmp_path: Path) -> None:
    slide, data = ItemInput(tmp_path / "a.mrxs"), tmp_path / "a" / "Data0000.dat"
    data.parent.mkdir()
    for path in (tmp_path / "a.mrxs", data):
        path.write_bytes(bytes(100))
    known = slide.identity()
    data.write_bytes(bytes(99) + b"\1")
    assert not slide.is_as_in(known)


def cut(paths: list[Path]) -> None:
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[: len(content) // 2])


def garbled(paths: list[Path]) -> None:
    paths[1].write_bytes(b"\0" * 400)


def fewer_frames(paths: list[Path]) -> None:
    series(paths[0].parent, levels()[:1], NumberOfFrames=20)


def more_frames(paths: list[Path]) -> None:
    series(paths[0].parent, levels()[:1], NumberOfFrames=96, NumberOfOpticalPaths=2)


def of_parts(paths: list[Path]) -> None:
    series(paths[0].parent, levels()[:1], parts=3)[1].unlink()


def another_kind(paths: list[Path]) -> None:
    shutil.rmtree(paths[0].parent)
    series(paths[0].parent, levels()[:1], SOPClassUID="1.2.840.10008.5.1.4.1.1.2")


def another_syntax(paths: list[Path]) -> None:
    series(paths[0].parent, levels()[:1], syntax=RLELossless)


def a_label(paths: list[Path]) -> None:
    shutil.rmtree(paths[0].parent)
    series(paths[0].parent, levels()[2:], ImageType=["ORIGINAL", "PRIMARY", "LABEL", "NONE"])


def no_spacing(paths: list[Path]) -> None:
    shutil.rmtree(paths[0].parent)
    series(paths[0].parent, levels()[:1], mpp=None)


def two(paths: list[Path]) -> None:
    series(paths[0].parent, levels()[:1], number=9)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"cannot be decoded"),
        (garbled, r"1_1_0\.dcm: is no DICOM file.*restore or remove it"),
        (fewer_frames, r"20 of 48 tiles of its level of 384 x 512 px: a file is missing.*copy all"),
        (more_frames, r"has 96 tiles in its level of 384 x 512 px, which has room for 48: write each of its optical"),
        (of_parts, r"lacks 1 file of 3 of its level of 384 x 512 px"),
        (another_kind, r"no whole-slide image"),
        (another_syntax, r"OpenSlide.*1\.2\.840\.10008\.1\.2\.5.*uncompressed or as JPEG"),
        (a_label, r"labels or overviews alone"),
        (no_spacing, r"does not say how many microns"),
        (two, r"has 2 slides: name one by a file of it, such as 1_0_0\.dcm, 9_0_0\.dcm"),
    ],
)
def test_damaged_and_incomplete_slides_are_named(tmp_path: Path, spoil: Any, message: str) -> None:
    spoil(series(tmp_path / "slide", levels()[:2]))
    with pytest.raises(BadImage, match=rf"slide.*{message}"):
        box_of(open_slide(tmp_path / "slide", Resolution(mpp=0.5)))


def test_without_pydicom_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series(tmp_path / "a", levels()[2:])
    monkeypatch.setitem(sys.modules, "pydicom", None)
    for read in (lambda: open_slide(tmp_path / "a"), lambda: read_samples(tmp_path, SLIDES, label_columns=())):
        with pytest.raises(DatasetError, match=r"needs pydicom; run .*install pydicom"):
            read()
