"""mpi4dl.datasets.series: a folder of DICOM slices is a volume, in the units and the order of its places."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pydicom
import pytest
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from mpi4dl import datasets
from mpi4dl.datasets import BadImage, DatasetError, open_volume
from mpi4dl.datasets.kinds import VOLUMES
from mpi4dl.datasets.sources import open_files
from mpi4dl.geometry import Interval
from mpi4dl.results.job import identity_of

SIZE = (5, 6, 7)


def write_series(folder: Path, values: npt.NDArray[Any], order: list[int] | None = None, **more: Any) -> None:
    """A file for each slice, numbered in another `order` than that of their places, as scanners do."""
    folder.mkdir(parents=True, exist_ok=True)
    uid = more.pop("uid", None) or generate_uid()
    for place, stored in enumerate(values):
        number = place if order is None else order[place]
        meta = FileMetaDataset()
        meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        found = FileDataset(folder / f"{number:03}.dcm", {}, file_meta=meta, preamble=b"\0" * 128)
        found.SOPClassUID, found.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        found.SeriesInstanceUID, found.InstanceNumber = uid, number
        found.Rows, found.Columns = stored.shape
        found.ImageOrientationPatient, found.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, 3 * place - 20]
        found.SamplesPerPixel, found.PhotometricInterpretation = 1, "MONOCHROME2"
        found.BitsAllocated = found.BitsStored = 16
        found.HighBit, found.PixelRepresentation = 15, 1
        found.RescaleSlope, found.RescaleIntercept = 2, -1024
        for name, value in more.items():
            setattr(found, name, value)
        found.PixelData = stored.astype(np.int16).tobytes()
        found.save_as(folder / f"{number:03}.dcm")


def noise(seed: int = 0) -> npt.NDArray[np.int16]:
    return np.random.default_rng(seed).integers(0, 2000, SIZE).astype(np.int16)


def test_values_of_a_table_are_those_of_the_table(tmp_path: Path) -> None:
    values, table = noise() % 50, Dataset()
    table.LUTDescriptor, table.LUTData = [50, 0, 16], [7 * number for number in range(50)]
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    write_series(tmp_path / "p1", values, RescaleSlope=None, RescaleIntercept=None, ModalityLUTSequence=[table])
    found = open_volume(tmp_path / "p1").read(*(Interval(0, side) for side in SIZE))
    assert np.array_equal(found[..., 0], np.float32(7) * values)


@pytest.mark.parametrize("name", ["1.2.840.{}", "IM{:05}", "slice{}.IMA"])
def test_files_of_dicom_need_no_ending(tmp_path: Path, name: str) -> None:
    values = noise()
    for patient in ("a", "b"):
        write_series(tmp_path / patient, values)
        for number, path in enumerate(sorted((tmp_path / patient).iterdir())):
            path.rename(path.with_name(name.format(number)))
    (tmp_path / "a" / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    for other in (".DS_Store", "README", "notes.1"):
        (tmp_path / "a" / other).write_text("no slice")
    assert VOLUMES.below(tmp_path)[0] == ["a", "b"]
    space = [Interval(0, side) for side in SIZE]
    for path in (tmp_path / "a", tmp_path / "b" / name.format(1)):
        assert np.array_equal(open_volume(path).read(*space)[..., 0], values * np.float32(2) - 1024)


def test_a_box_of_a_series_is_that_of_the_whole_in_its_units(tmp_path: Path) -> None:
    values = noise()
    write_series(tmp_path / "p1", values, [3, 0, 4, 1, 2])
    volume = open_volume(tmp_path / "p1")
    assert (volume.size, volume.channels, volume.values) == (SIZE, 1, "as they are, axes LPS")
    write_series(tmp_path / "p2", values[:1], ImageOrientationPatient=[0, 1, 0, 0, 0, -1])
    assert open_volume(tmp_path / "p2").values == "as they are, axes PIR"
    for box in ((Interval(1, 4), Interval(2, 6), Interval(0, 3)), (Interval(2, 2), Interval(0, 2), Interval(1, 3))):
        part = values[tuple(slice(*cut) for cut in box)] * 2.0 - 1024
        assert np.array_equal(volume.read(*box)[..., 0], part.astype(np.float32))


def test_series_are_samples_of_folders_and_tables_with_masks(tmp_path: Path) -> None:
    for n in range(4):
        write_series(tmp_path / "classes" / "ab"[n % 2] / f"p{n}", noise(n))
    training, validation = datasets.open(tmp_path / "classes", size=SIZE, validation_fraction=0.5)
    names = sorted(part.name(i) for part in (training, validation) for i in range(2))
    assert names == ["a/p0", "a/p2", "b/p1", "b/p3"]
    (tmp_path / "classes" / "labels.csv").write_text("file,dose\np0,1.5\np3,2.5\n")
    table = open_files(tmp_path / "classes", VOLUMES)
    assert [table.name(i) for i in range(2)] == ["a/p0", "b/p3"]
    assert table.image(1).size == SIZE
    for n in range(2):
        write_series(tmp_path / "masked" / "images" / f"p{n}", noise(n))
        (tmp_path / "masked" / "masks").mkdir(exist_ok=True)
        np.save(tmp_path / "masked" / "masks" / f"p{n}.npy", noise(n) % 3)
    masked = open_files(tmp_path / "masked", VOLUMES)
    assert np.array_equal(masked.label(1).read(*(Interval(0, n) for n in SIZE)), noise(1) % 3)


def test_two_series_of_a_folder_are_two_volumes(tmp_path: Path) -> None:
    write_series(tmp_path / "p", noise(1)[:2])
    write_series(tmp_path / "p", noise(2), [9, 8, 7, 6, 5])
    assert VOLUMES.below(tmp_path)[0] == ["p/000.dcm", "p/005.dcm"]
    assert open_volume(tmp_path / "p" / "005.dcm").size == SIZE
    with pytest.raises(BadImage, match="has 2 series of DICOM: expected one"):
        open_volume(tmp_path / "p")
    report = pydicom.dcmread(tmp_path / "p" / "000.dcm")
    report.SamplesPerPixel = 3
    for number, of in enumerate((pydicom.dcmread(tmp_path / "p" / "005.dcm").SeriesInstanceUID, generate_uid())):
        report.SeriesInstanceUID = of
        report.save_as(tmp_path / "p" / f"report{number}.dcm")
    volume = open_volume(tmp_path / "p" / "005.dcm")
    assert np.array_equal(volume.read(*(Interval(0, n) for n in SIZE))[..., 0], noise(2) * np.float32(2) - 1024)
    known = identity_of(tmp_path / "p" / "005.dcm")
    write_series(tmp_path / "p", noise(3)[:2], uid=generate_uid())
    assert identity_of(tmp_path / "p" / "005.dcm") == known
    slice_of = tmp_path / "p" / "007.dcm"
    slice_of.write_bytes(slice_of.read_bytes()[:-1] + b"1")
    assert identity_of(tmp_path / "p" / "005.dcm") != known
    slice_of.write_bytes(b"no DICOM")
    with pytest.raises(BadImage, match=r"007\.dcm: cannot be read as DICOM"):
        open_volume(tmp_path / "p" / "005.dcm")


def test_what_is_no_volume_is_a_bad_image_with_its_cause(tmp_path: Path) -> None:
    write_series(tmp_path / "gap", noise())
    (tmp_path / "gap" / "002.dcm").unlink()
    with pytest.raises(BadImage, match=r"003\.dcm is 6 mm behind 001\.dcm: a slice is missing"):
        open_volume(tmp_path / "gap")
    write_series(tmp_path / "cut", noise())
    path = tmp_path / "cut" / "003.dcm"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadImage, match=r"003\.dcm: cannot be decoded"):
        open_volume(tmp_path / "cut").read(*(Interval(0, n) for n in SIZE))
    path.write_bytes(b"no DICOM")
    with pytest.raises(BadImage, match=r"003\.dcm: cannot be read as DICOM"):
        open_volume(tmp_path / "cut")
    uid = generate_uid()
    write_series(tmp_path / "odd", noise(), uid=uid)
    odd = pydicom.dcmread(tmp_path / "odd" / "001.dcm")
    odd.ImageOrientationPatient = [0, 1, 0, 1, 0, 0]
    odd.save_as(tmp_path / "odd" / "001.dcm")
    with pytest.raises(BadImage, match="lies in another plane"):
        open_volume(tmp_path / "odd")
    write_series(tmp_path / "tilted", noise())
    for number, path in enumerate(sorted((tmp_path / "tilted").iterdir())):
        tilted = pydicom.dcmread(path)
        tilted.ImagePositionPatient = [0, number, 3 * number]
        tilted.save_as(path)
    with pytest.raises(BadImage, match=r"such as 001\.dcm behind 000\.dcm: a tilted gantry"):
        open_volume(tmp_path / "tilted")


def test_without_pydicom_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_series(tmp_path / "p1", noise())
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DatasetError, match=r"needs pydicom; run .*install pydicom"):
        VOLUMES.below(tmp_path)
