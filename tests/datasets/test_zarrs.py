"""Folders of Zarr as images: plain arrays and OME-Zarr of both versions of the format, by boxes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi4dl.datasets.base import BadImage, DatasetError
from mpi4dl.datasets.files import open_image, open_stored_picture
from mpi4dl.datasets.kinds import PICTURES, VOLUMES
from mpi4dl.datasets.listed import class_folders
from mpi4dl.datasets.masks import open_stored
from mpi4dl.datasets.volumes import open_volume
from mpi4dl.geometry import Interval

VALUES = np.random.default_rng(0).integers(0, 60000, (5, 40, 30)).astype(np.uint16)  # channels, rows, columns


@pytest.fixture
def zarr() -> Any:
    return pytest.importorskip("zarr")


def write(zarr: Any, path: Path, values: Any, chunks: tuple[int, ...], version: int = 3, **options: Any) -> Path:
    array = zarr.create_array(
        store=str(path), shape=values.shape, chunks=chunks, dtype=values.dtype, zarr_format=version, **options
    )
    array[:] = values
    return path


def write_ome(zarr: Any, path: Path, values: Any, axes: str, version: int = 3, finest: int = 0) -> Path:
    """An image of two levels, with the metadata of OME-Zarr 0.4 or 0.5, which names the `finest` first or second."""
    group = zarr.open_group(store=str(path), mode="w", zarr_format=version)
    for number, level in enumerate((values, values[..., ::2, ::2])):
        array = group.create_array(str(number), shape=level.shape, chunks=level.shape, dtype=level.dtype)
        array[:] = level
    levels = [{"path": str(finest)}, {"path": str(1 - finest)}]
    about = {"multiscales": [{"axes": [{"name": name} for name in axes], "datasets": levels}]}
    group.attrs.update(about if version == 2 else {"ome": {"version": "0.5", **about}})
    return path


KINDS: dict[str, Callable[[Any, Path, int], Path]] = {
    "channels first": lambda zarr, path, version: write(zarr, path, VALUES, (2, 16, 16), version),
    "channels last": lambda zarr, path, version: write(
        zarr, path, np.moveaxis(VALUES, 0, -1).astype(">u2"), (16, 16, 5), version
    ),
    "OME": lambda zarr, path, version: write_ome(zarr, path, VALUES[None, :, None], "tczyx", version),
    "OME, finest last": lambda zarr, path, version: write_ome(zarr, path, VALUES, "cyx", version, finest=1),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_have_the_values_that_are_stored(zarr: Any, kind: str, version: int, tmp_path: Path) -> None:
    path = KINDS[kind](zarr, tmp_path / "a.ome.zarr", version)
    whole = np.moveaxis(VALUES, 0, -1) / np.float32(65535)
    found = open_stored_picture(path)
    assert (found.size, found.channels, found.values) == ((40, 30), 5, "uint16")
    assert np.allclose(found.read(Interval(3, 21), Interval(10, 30)), whole[3:21, 10:30])
    some = open_stored_picture(path, (4, 2)).read(Interval(0, 40), Interval(0, 30))
    assert np.allclose(some, whole[..., [3, 1]])
    with pytest.raises(BadImage, match="5 channels"):
        open_image(path)


@pytest.mark.parametrize(("axes", "channels"), [("", 1), ("zyx", 1), ("tczyx", 3), ("xyzc", 3), ("czyx", 3)], ids=str)
def test_boxes_of_volumes(zarr: Any, axes: str, channels: int, tmp_path: Path) -> None:
    values = VALUES[:channels, :12].reshape(channels, 6, 2, 30).repeat(4, 2) // 3  # channels, depth, rows, columns
    stored = values[0] if channels == 1 else values.transpose(["czyx".index(each) for each in axes if each != "t"])
    path = tmp_path / "a" / "v.ome.zarr"
    if "t" in axes:
        write_ome(zarr, path, stored[None], axes)
    else:
        write(zarr, path, stored.astype(">u2"), (2,) * stored.ndim, dimension_names=[*axes] or None)
    found = open_volume(path)
    assert (found.size, found.channels, found.values) == ((6, 8, 30), channels, "over 65535")
    box = found.read(Interval(1, 5), Interval(0, 3), Interval(7, 30))
    assert np.allclose(box, np.moveaxis(values, 0, -1)[1:5, :3, 7:30] / np.float32(65535))
    assert VOLUMES.below(tmp_path)[0] == ["a/v.ome.zarr"]
    if channels == 1:
        assert np.array_equal(open_stored(path, True).read(*(Interval(0, n) for n in found.size)), values[0])


def test_names_of_axes_count_more_than_shapes(zarr: Any, tmp_path: Path) -> None:
    path = write(zarr, tmp_path / "a.zarr", VALUES, (5, 8, 8), dimension_names=("y", "x", "band"))
    assert (open_stored_picture(path).size, open_stored_picture(path).channels) == ((5, 40), 30)


def test_masks_and_colours(zarr: Any, tmp_path: Path) -> None:
    mask = write(zarr, tmp_path / "mask.zarr", np.arange(12).reshape(3, 4), (2, 2))
    assert np.array_equal(open_stored(mask).read(Interval(1, 3), Interval(0, 4)), np.arange(4, 12).reshape(2, 4))
    colours = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    found = open_image(write(zarr, tmp_path / "rgb.zarr", colours, (2, 2, 3)))
    assert np.array_equal(found.read(Interval(0, 4), Interval(1, 5)), colours[:, 1:])
    with pytest.raises(BadImage, match="a mask has one number"):
        open_stored(tmp_path / "rgb.zarr")


def test_nothing_within_a_folder_of_zarr_is_an_image(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "x.ome.zarr" / "0"
    inner.mkdir(parents=True)
    (inner / "0.png").touch()
    (tmp_path / "b.zarr").mkdir()
    assert PICTURES.below(tmp_path)[0] == ["a/x.ome.zarr", "b.zarr"]
    assert class_folders(tmp_path) == ("a",)


def plate(zarr: Any, path: Path) -> None:
    zarr.open_group(store=str(path), mode="w").attrs.update(plate={})


UNCLEAR: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "nothing": (lambda zarr, path: path.mkdir(), "no readable metadata"),
    "a cube": (lambda zarr, path: write(zarr, path, np.zeros((8, 8, 8), np.uint8), (8, 8, 8)), "without names"),
    "integers": (lambda zarr, path: write(zarr, path, np.zeros((8, 8), np.uint32), (8, 8)), "values of uint32"),
    "a group": (lambda zarr, path: zarr.open_group(store=str(path), mode="w"), "group with 0 images"),
    "a plate": (plate, "several images"),
    "a stack": (lambda zarr, path: write_ome(zarr, path, VALUES, "zyx"), "stack of images"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_unclear_is_refused(zarr: Any, name: str, tmp_path: Path) -> None:
    make, message = UNCLEAR[name]
    make(zarr, tmp_path / "a.zarr")
    with pytest.raises(BadImage, match=message):
        open_stored_picture(tmp_path / "a.zarr")


def test_a_chunk_that_cannot_be_decoded_is_an_error_of_its_image(zarr: Any, tmp_path: Path) -> None:
    path = write(zarr, tmp_path / "a.zarr", VALUES, (5, 40, 30))
    (path / "c" / "0" / "0" / "0").write_bytes(b"damaged")
    with pytest.raises(BadImage, match=r"a\.zarr"):
        open_stored_picture(path).read(Interval(0, 4), Interval(0, 4))


def test_without_zarr_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(DatasetError, match=r"pip install 'mpi4dl\[zarr\]'"):
        open_stored_picture(tmp_path / "a.zarr")
