"""Volumes and sequences: every file kind, boxes of them, views that join without a seam, and damaged files."""

import gzip
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import imagecodecs
import nibabel
import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl import datasets
from mpi4dl.datasets import Augmentation, BadImage, DatasetError, Loader, Variation, View, transform
from mpi4dl.datasets.arrays import Synthetic
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.kinds import VOLUMES
from mpi4dl.datasets.sources import open_files
from mpi4dl.datasets.volumes import open_volume
from mpi4dl.geometry import Box, GridShape, Interval, Tiling
from mpi4dl.training.data import unlike_values
from tests.datasets.boxes import cuts

SIZE = (5, 7, 6)
BOX = (Interval(1, 4), Interval(0, 5), Interval(2, 6))


def noise(*shape: int, dtype: Any = np.int16) -> npt.NDArray[Any]:
    values = np.random.default_rng(0).integers(-3000, 3000, shape)
    return (values / 3000).astype(dtype) if np.dtype(dtype).kind == "f" else values.astype(dtype)


def save_nifti(path: Path, values: npt.NDArray[Any]) -> None:
    nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0, *range(3, values.ndim)), np.eye(4)), path)


def save_deflated(path: Path, values: npt.NDArray[Any]) -> None:
    tifffile.imwrite(path, values, compression="zlib", photometric="minisblack")


SAVE: dict[str, tuple[str, Callable[[Path, npt.NDArray[Any]], Any]]] = {
    "npy": (".npy", np.save),
    "npy, fortran order": (".npy", lambda path, values: np.save(path, np.asfortranarray(values))),
    "npz": (".npz", lambda path, values: np.savez_compressed(path, volume=values)),
    "tiff": (".tif", lambda path, values: tifffile.imwrite(path, values, photometric="minisblack")),
    "tiff, big endian": (
        ".tif",
        lambda path, values: tifffile.imwrite(path, values, byteorder=">", photometric="minisblack"),
    ),
    "tiff, deflated": (".TIFF", save_deflated),
    "tiff of ImageJ": (".tif", lambda path, values: tifffile.imwrite(path, values, imagej=True)),
    "nifti": (".nii", save_nifti),
    "nifti, compressed": (".nii.gz", save_nifti),
}


@pytest.mark.parametrize(("suffix", "value"), [(".nii.gz", np.nan), (".npy", np.inf)])
def test_values_that_are_no_finite_numbers_are_errors_of_their_file(tmp_path: Path, suffix: str, value: float) -> None:
    values, path = noise(*SIZE, dtype=np.float32), tmp_path / f"lung{suffix}"
    values[0, 0, :2] = value
    (save_nifti if suffix == ".nii.gz" else np.save)(path, values)
    open_volume(path).read(*BOX)
    with pytest.raises(BadImage, match=rf"lung{suffix}: has 2 values of {value}, which is no finite number"):
        open_volume(path).read(*(Interval(0, n) for n in SIZE))


@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32"])
def test_a_box_of_each_kind_of_file(tmp_path: Path, kind: str, dtype: str) -> None:
    suffix, save = SAVE[kind]
    values, path = noise(*SIZE, dtype=dtype), tmp_path / f"volume{suffix}"
    save(path, values)
    volume = open_volume(path)
    assert volume.size == SIZE
    assert volume.channels == 1
    top = {"uint8": 1, "int16": 32767, "uint16": 65535, "float32": 1}[dtype] if suffix[:4] != ".nii" else 1
    for box in (BOX, tuple(Interval(0, n) for n in SIZE), (Interval(2, 2), *BOX[1:])):
        expected = values[tuple(slice(*interval) for interval in box)] / top
        found = volume.read(*box)
        assert found.dtype == (np.uint8 if dtype == "uint8" and suffix[:4] != ".nii" else np.float32)
        np.testing.assert_allclose(found[..., 0], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["npy", "tiff, deflated", "nifti"])
@pytest.mark.parametrize("shape", [(*SIZE, 2), (3, *SIZE)])
def test_channels_before_or_behind_the_axes(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    suffix, save = SAVE[kind]
    values, path = noise(*shape), tmp_path / f"volume{suffix}"
    save(path, values if kind != "nifti" else np.moveaxis(values, shape.index(min(shape)), 3))
    expected = np.moveaxis(values, shape.index(min(shape)), -1)
    volume = open_volume(path)
    assert (volume.size, volume.channels) == (SIZE, min(shape))
    top = 1 if kind == "nifti" else 32767
    np.testing.assert_allclose(volume.read(*BOX), expected[tuple(slice(*i) for i in BOX)] / top, rtol=1e-6)


@pytest.mark.parametrize("options", [{"ome": True}, {"ome": True, "compression": "zlib"}, {"imagej": True}])
def test_channels_between_the_axes_where_the_file_names_them(tmp_path: Path, options: dict[str, Any]) -> None:
    values, path = noise(3, 4, 9, 8, dtype=np.uint16), tmp_path / "a.tif"
    tifffile.imwrite(path, values, photometric="minisblack", metadata={"axes": "ZCYX"}, **options)
    volume = open_volume(path)
    assert (volume.size, volume.channels) == ((3, 9, 8), 4)
    read = volume.read(Interval(1, 3), Interval(2, 9), Interval(0, 5))
    np.testing.assert_allclose(read, np.moveaxis(values, 1, -1)[1:3, 2:9, :5] / 65535, rtol=1e-6)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_values_of_nifti_do_not_depend_on_how_they_are_stored(tmp_path: Path, suffix: str) -> None:
    """Whatever type, slope and intercept a file has: what nibabel reads as equal arrives as equal, in its units."""
    values = np.random.default_rng(0).integers(-1000, 1500, SIZE)
    values[0, 0, :2] = (-1000, 1499)
    for number, dtype in enumerate(("int16", "int32", "float32", "float64")):
        nibabel.save(nibabel.Nifti1Image(values.T.astype(dtype), np.eye(4)), tmp_path / f"{number}{suffix}")
    image = nibabel.Nifti1Image((values.T + 1000).astype(np.int16), np.eye(4))
    image.header.set_slope_inter(1, -1000)
    image.to_filename(tmp_path / f"4{suffix}")
    raw = nibabel.load(tmp_path / f"4{suffix}")
    assert (raw.dataobj.slope, raw.dataobj.inter) == (1, -1000)
    for path in sorted(tmp_path.iterdir()):
        expected = nibabel.load(path).get_fdata().T
        found = open_volume(path).read(*(Interval(0, n) for n in SIZE))[..., 0]
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=path.name)
        np.testing.assert_allclose(found, values, rtol=1e-6, err_msg=path.name)
    small = np.arange(210).reshape(SIZE).astype(np.uint8)
    save_nifti(tmp_path / f"small{suffix}", small)
    assert np.array_equal(open_volume(tmp_path / f"small{suffix}").read(*(Interval(0, n) for n in SIZE))[..., 0], small)


@pytest.mark.parametrize(("first", "second"), [("npy", "nifti"), ("nifti", "tiff"), ("npy", "npy")])
def test_volumes_whose_values_are_of_other_kinds_are_refused(tmp_path: Path, first: str, second: str) -> None:
    dtypes = ("int16", "float32" if first == second else "int16")
    for label, kind, dtype in zip("ab", (first, second), dtypes, strict=True):
        (tmp_path / label).mkdir()
        SAVE[kind][1](tmp_path / label / f"{label}{SAVE[kind][0]}", noise(*SIZE, dtype=dtype))
    message = "values are read .*, but those of other volumes .*: write all of a set"
    with pytest.raises(DatasetError, match=f"b/b.*: {message}"):
        datasets.open(tmp_path, size=SIZE, validation_fraction=0.5)
    for part, name in (("train", "a"), ("val", "b")):
        for label in "xy":
            shutil.copytree(tmp_path / name, tmp_path / "parts" / part / label)
    with pytest.raises(DatasetError, match=f"parts/val/x/b.*: {message}"):
        datasets.open(tmp_path / "parts", size=SIZE)


def test_volumes_whose_axes_run_to_other_sides_are_refused(tmp_path: Path) -> None:
    def save(name: str, affine: Any, dtype: Any = np.int16) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(np.zeros((6, 7, 5), dtype), affine), path)

    las = np.diag([-1, 1, 1, 1])
    for name, affine in {"a/0": None, "a/1": np.eye(4), "b/2": np.eye(4), "b/3": las}.items():
        save(f"{name}.nii", affine)
    with pytest.raises(DatasetError, match=r"b/3.nii: has axes LAS, but other volumes RAS: turn it"):
        datasets.open(tmp_path, size=SIZE, validation_fraction=0.5)
    for number, affine in enumerate((las, np.eye(4))):
        save(f"pairs/images/{number}.nii", las)
        save(f"pairs/masks/{number}.nii", affine, np.uint8)
    pairs = open_files(tmp_path / "pairs", VOLUMES)
    view = View(SIZE, "crop", mean=(0,), std=(1,))
    with pytest.raises(BadImage, match=r"masks/1.nii: has axes RAS, but its image LAS: turn it"):
        list(Loader(pairs, view, 1, lambda n: [Box(Interval(0, n), *(Interval(0, side) for side in SIZE))]).epoch(0))


SPACED = np.diag([0.5, 0.5, 3, 1.0])
MOVED, THICK, NEARLY = SPACED.copy(), SPACED.copy(), SPACED.copy()
MOVED[0, 3], THICK[2, 2], NEARLY[0, 3] = 50, 5, 0.25


@pytest.mark.parametrize(("affine", "farthest"), [(MOVED, "50"), (THICK, "8"), (NEARLY, None), (None, None)])
def test_masks_that_lie_elsewhere_than_their_volumes_are_refused(
    tmp_path: Path, affine: Any, farthest: str | None
) -> None:
    for folder, where in (("images", SPACED), ("masks", affine)):
        (tmp_path / folder).mkdir()
        nibabel.save(nibabel.Nifti1Image(np.zeros(SIZE[::-1], np.int16), where), tmp_path / folder / "a.nii.gz")
    pairs, view = open_files(tmp_path, VOLUMES), View(SIZE, "crop", mean=(0,), std=(1,))
    batches = Loader(pairs, view, 1, lambda n: [Box(Interval(0, n), *(Interval(0, side) for side in SIZE))]).epoch(0)
    if farthest is None:
        assert len(list(batches)) == 1
    else:
        with pytest.raises(BadImage, match=rf"masks/a.nii.gz: lies up to {farthest} mm from where its image does"):
            list(batches)


def test_a_volume_without_a_mask_says_which_is_missing(tmp_path: Path) -> None:
    for name in ("images/a.nii.gz", "masks/b.nii.gz"):
        (tmp_path / name).parent.mkdir()
        save_nifti(tmp_path / name, noise(*SIZE))
    with pytest.raises(DatasetError, match=r"images/a.nii.gz: has no mask: add .*masks/a\.npy, or a file .*\.nii\.gz"):
        open_files(tmp_path, VOLUMES)


def test_a_model_gets_values_of_the_kind_that_it_was_trained_on(tmp_path: Path) -> None:
    for name, (kind, dtype) in {"nifti": ("nifti", "int16"), "npy": ("npy", "int16")}.items():
        for label in "ab":
            (tmp_path / name / label).mkdir(parents=True)
            SAVE[kind][1](tmp_path / name / label / f"{label}{SAVE[kind][0]}", noise(*SIZE, dtype=dtype))
    nifti, npy = (datasets.open(tmp_path / n, size=SIZE, validation_fraction=0.5)[0] for n in ("nifti", "npy"))
    assert (nifti.values, npy.values) == ("as they are, axes RAS", "over 32767")
    assert unlike_values(npy, None) is unlike_values(nifti, "as they are") is None
    assert "axes RAS, but those of training were as they are, axes LAS" in str(
        unlike_values(nifti, "as they are, axes LAS")
    )
    assert "are read over 32767, but those of training were as they are" in str(unlike_values(npy, "as they are"))


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("kind", SAVE)
def test_a_file_cut_off_is_a_bad_image(tmp_path: Path, kind: str) -> None:
    suffix, save = SAVE[kind]
    path = tmp_path / f"volume{suffix}"
    save(path, noise(40, 30, 20))
    damaged(path)
    with pytest.raises(BadImage, match="volume"):
        open_volume(path).read(Interval(0, 40), Interval(0, 30), Interval(0, 20))


BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "empty": (".npy", lambda path: path.write_bytes(b""), ""),
    "objects": (".npy", lambda path: np.save(path, np.array([{}], object), allow_pickle=True), ""),
    "complex": (".npy", lambda path: np.save(path, np.zeros(SIZE, np.complex64)), "complex64"),
    "flat": (".npy", lambda path: np.save(path, np.zeros((4, 4))), "(4, 4): expected depth, rows and columns"),
    "no channels": (".npy", lambda path: np.save(path, np.zeros((9, 8, 7, 6))), "neither the first nor the last"),
    "nothing in it": (".npy", lambda path: np.save(path, np.zeros((0, 4, 4))), "(0, 4, 4)"),
    "two arrays": (".npz", lambda path: np.savez(path, a=1, b=2), "has 2 arrays, a, b: expected one"),
    "slice": (
        ".nii",
        lambda path: nibabel.save(nibabel.Nifti1Image(np.zeros((4, 5), "f4"), np.eye(4)), path),
        "(4, 5)",
    ),
    "times": (
        ".nii",
        lambda path: nibabel.save(nibabel.Nifti1Image(np.zeros((20, 24, 1, 30), "f4"), np.eye(4)), path),
        "has 30 values, such as times, in each place",
    ),
    "times of OME": (
        ".ome.tif",
        lambda path: tifffile.imwrite(path, np.zeros((3, 9, 8, 7), np.uint8), metadata={"axes": "TZYX"}),
        "has axes TZYX",
    ),
    "channels of one slice": (
        ".ome.tif",
        lambda path: tifffile.imwrite(path, np.zeros((5, 8, 7), np.uint8), metadata={"axes": "CYX"}),
        "has axes CYX",
    ),
    "a colour picture": (
        ".tif",
        lambda path: tifffile.imwrite(path, np.zeros((9, 8, 3), np.uint8), photometric="rgb"),
        "has axes YXS",
    ),
    "picture": (".png", lambda path: path.write_bytes(b"png"), "is no volume: those end in .npy"),
    "text": (".nii.gz", lambda path: path.write_bytes(gzip.compress(b"no header")), ""),
    "folder": (".npy", lambda path: path.mkdir(), ""),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_volume_is_a_bad_image(tmp_path: Path, name: str) -> None:
    suffix, make, message = BAD[name]
    path = tmp_path / f"volume{suffix}"
    make(path)
    with pytest.raises(BadImage) as raised:
        open_volume(path).read(*BOX)
    assert message in str(raised.value)


VARIED = Variation(crop=0.7, down=0.2, across=0.9, deep=0.4, flip_rows=True, flip_depth=True, contrast=1.2)


def test_a_page_whose_tile_is_a_far_larger_picture_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    for name, side in (("good.tif", 64), ("bomb.tif", 600)):
        picture = imagecodecs.jpeg2k_encode(np.full((side, side), 200, np.uint8), codecformat="J2K")
        how = {"shape": (3, 64, 64), "dtype": np.uint8, "tile": (64, 64), "photometric": "minisblack"}
        tifffile.imwrite(tmp_path / name, iter([picture] * 3), compression=34712, **how)
    whole = (Interval(0, 3), Interval(0, 64), Interval(0, 64))
    assert open_volume(tmp_path / "good.tif").read(*whole).shape[:3] == (3, 64, 64)
    with pytest.raises(BadImage, match="far larger than 64 x 64"):
        open_volume(tmp_path / "bomb.tif").read(*whole)


UNMEASURED: dict[str, tuple[int, Callable[..., bytes]]] = {
    "jpeg xr": (34934, partial(imagecodecs.jpegxr_encode, level=1.0)),
    "lerc": (34887, imagecodecs.lerc_encode),
    "jpeg xl": (50002, partial(imagecodecs.jpegxl_encode, lossless=True, effort=1)),
}


@pytest.mark.parametrize("kind", UNMEASURED)
def test_pages_whose_size_nobody_knows_are_decoded_in_a_process_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    compression, encode = UNMEASURED[kind]
    volume = noise(3, 64, 64, dtype=np.uint8)
    bomb = encode(np.zeros((6000, 6000), np.float64 if kind == "lerc" else np.uint8))
    for name, pages in (("good.tif", map(encode, volume)), ("bomb.tif", iter([bomb] * 3))):
        how = {"shape": (3, 64, 64), "dtype": np.uint8, "tile": (64, 64), "photometric": "minisblack"}
        tifffile.imwrite(tmp_path / name, pages, compression=compression, **how)

    def here(*ignored: Any, **options: Any) -> None:
        raise AssertionError("decoded in this process")

    monkeypatch.setattr(tifffile.TiffPage, "asarray", here)
    monkeypatch.setattr(tifffile.TiffFrame, "asarray", here)
    part = (Interval(1, 3), Interval(5, 40), Interval(0, 64))
    assert np.array_equal(open_volume(tmp_path / "good.tif").stored(*part)[..., 0], volume[1:3, 5:40])
    with pytest.raises(BadImage, match=r"bomb\.tif"):
        open_volume(tmp_path / "bomb.tif").read(*part)


def test_a_volume_leads_to_no_other_file(tmp_path: Path) -> None:
    """Such as a pipe, at which a reader would wait for ever."""
    path, other = tmp_path / "a.ome.tif", f"urn:uuid:{'1' * 8}{'-1111' * 3}-{'1' * 12}"
    how: dict[str, Any] = {"photometric": "minisblack", "compression": "zlib", "metadata": {"axes": "ZYX"}}
    tifffile.imwrite(path, noise(3, 64, 64, dtype=np.uint8), ome=True, **how)
    with tifffile.TiffFile(path) as file:
        told = file.ome_metadata
    assert told is not None
    elsewhere = f'<TiffData FirstZ="1" IFD="0" PlaneCount="1"><UUID FileName="pipe.tif">{other}</UUID></TiffData>'
    tifffile.tiffcomment(path, told.replace("</Pixels>", f"{elsewhere}</Pixels>"))
    os.mkfifo(tmp_path / "pipe.tif")
    with pytest.raises(BadImage, match=r"a\.ome\.tif.* has pages in other files"):
        open_volume(path)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_boxes_of_a_volume_join_without_a_seam(data: st.DataObject) -> None:
    source = data.draw(st.tuples(*(st.integers(1, 14) for _ in range(3))))
    target = data.draw(st.tuples(*(st.integers(1, 12) for _ in range(3))))
    view = View(target, data.draw(st.sampled_from(["crop", "resize"])), mean=(0.1,), std=(0.5,))
    image = WholeImage(noise(*source, 1, dtype=data.draw(st.sampled_from(["int16", "uint8", "float32"]))))
    whole = view.tile(image, *(Interval(0, n) for n in target), variation=VARIED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "SLAB", data.draw(st.integers(1, 5)))
        for depth in data.draw(cuts(target[0])):
            for cols in data.draw(cuts(target[2])):
                tile = view.tile(image, depth, Interval(0, target[1]), cols, variation=VARIED)
                assert np.array_equal(tile, whole[:, slice(*depth), :, slice(*cols)])


@pytest.mark.parametrize("target", [(9, 9, 9), (20, 31, 4), (3, 5, 40)])
def test_volumes_are_resized_as_pillow_resizes_along_each_axis(target: tuple[int, ...]) -> None:
    values = noise(9, 14, 11, dtype="float32")
    expected = values
    for axis, n in enumerate(target):
        lines = np.moveaxis(expected, axis, 0)
        flat = PIL.Image.fromarray(np.ascontiguousarray(lines.reshape(len(lines), -1)))
        resized = np.asarray(flat.resize((flat.width, n), PIL.Image.Resampling.BILINEAR))
        expected = np.moveaxis(resized.reshape(n, *lines.shape[1:]), 0, axis)
    view = View(target, mean=(0.0,), std=(1.0,))
    found = view.tile(WholeImage(values[..., None]), *(Interval(0, n) for n in target))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["crop", "resize"])
def test_masks_of_volumes_are_shown_with_them(how: Any) -> None:
    values = np.arange(6 * 5 * 4).reshape(6, 5, 4)
    view = View((6, 5, 4) if how == "resize" else (3, 2, 2), how, mean=(0.0,), std=(1.0,))
    variation = Variation(down=0.8, across=0.1, deep=1.0, flip_cols=True, flip_depth=True)
    tile = view.tile(
        WholeImage(values.astype(np.float32)[..., None]), *(Interval(0, n) for n in view.size), variation=variation
    )
    np.testing.assert_allclose(tile[0], view.mask(values, variation), atol=1e-3)


@pytest.mark.parametrize("size", [(40,), (9, 20), (6, 9, 20)])
def test_synthetic_volumes_and_sequences(size: tuple[int, ...]) -> None:
    images = Synthetic(8, size, num_classes=4)
    whole = images.image(1).read(*(Interval(0, n) for n in size))
    assert whole.shape == (*size, 3)
    box = [Interval(n // 4, n // 2 + 1) for n in size]
    assert np.array_equal(images.image(1).read(*box), whole[tuple(slice(*i) for i in box)])
    assert not np.array_equal(images.image(0).read(*box), images.image(2).read(*box))


def test_a_folder_of_volumes_and_what_a_rank_reads_of_it(tmp_path: Path) -> None:
    for i, (label, kind) in enumerate([("a", "npy"), ("a", "tiff"), ("b", "npy, fortran order"), ("b", "npz")]):
        (tmp_path / label).mkdir(exist_ok=True)
        SAVE[kind][1](tmp_path / label / f"{i}{SAVE[kind][0]}", noise(*SIZE) + i)
    training, validation = datasets.open(tmp_path, size=SIZE, validation_fraction=0.3)
    assert len(training) + len(validation) == 4
    assert training.channels == 1
    view = View(SIZE, mean=(0.0,), std=(1.0,), augmentation=Augmentation(flip_depth=True))
    tiling = lambda n: Tiling.even(GridShape(1, 2, 1, 2), (n, *SIZE))  # noqa: E731
    parts = [
        next(iter(Loader(training, view, len(training), lambda n, rank=rank: [tiling(n).owned(rank)]).epoch(0)))
        for rank in range(4)
    ]
    whole = next(iter(Loader(training, view, len(training), lambda n: [Box(*map(Interval, *zip(*[(0, n), *((0, s) for s in SIZE)], strict=True)))]).epoch(0)))  # fmt: skip  # noqa: E501
    for rank, part in enumerate(parts):
        space = tiling(len(training)).owned(rank).space
        where = (slice(None), slice(None), *(slice(*interval) for interval in space))
        assert np.array_equal(part.tiles[0], whole.tiles[0][where])
    with pytest.raises(DatasetError, match=r"files count as images if they end in"):
        datasets.open(tmp_path, size=(5, 7))


def test_volumes_of_other_channels_are_bad_images(tmp_path: Path) -> None:
    for label, channels in (("a", 1), ("b", 2)):
        (tmp_path / label).mkdir()
        np.save(tmp_path / label / "x.npy", noise(*SIZE, channels))
        np.save(tmp_path / label / "y.npy", noise(*SIZE, channels))
    training, _ = datasets.open(tmp_path, size=SIZE, validation_fraction=0.5)
    assert training.channels == 1
    other = next(n for n in range(len(training)) if training.name(n).startswith("b"))
    with pytest.raises(BadImage, match="has 2 channels where others have 1"):
        training.image(other)


def test_arrays_of_volumes_and_sequences(tmp_path: Path) -> None:
    for size in ((30,), SIZE):
        np.savez(tmp_path / "x.npz", x=noise(6, *size), y=np.arange(6) % 2)
        training, _ = datasets.open(tmp_path / "x.npz", size=size)
        assert training.image(0).size == size
        assert training.image(0).read(*(Interval(0, n) for n in size)).dtype == np.float32
    with pytest.raises(DatasetError, match=r"expected \(count, length\)"):
        datasets.open(tmp_path / "x.npz", size=(30,))
