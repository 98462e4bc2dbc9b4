"""Rasters of several bands: values as other software stores them, chosen channels, no data, and files that differ."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from mpi4dl import datasets, models
from mpi4dl.datasets import BadImage, DatasetError, View
from mpi4dl.datasets.files import open_image, open_stored_picture
from mpi4dl.datasets.sources import open_files
from mpi4dl.datasets.statistics import merged, moments_of
from mpi4dl.geometry import Interval
from mpi4dl.options.build import TrainingSpec
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.sources import source_of
from mpi4dl.options.tasks import with_task

HEIGHT, WIDTH, NODATA = 41, 53, 42113
Raster = npt.NDArray[Any]


def raster(dtype: str, bands: int = 6, seed: int = 0) -> Raster:
    values = np.random.default_rng(seed).random((HEIGHT, WIDTH, bands))
    if dtype == "float32":
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    return (limits.min + values * (limits.max - limits.min)).astype(dtype)


def write(path: Path, values: Raster, planar: bool = False, no_data: str | None = None, **how: Any) -> Path:
    """A raster as GDAL writes it: `values` are (rows, columns, bands)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tags = [] if no_data is None else [(NODATA, "s", 0, no_data, True)]
    stored = np.ascontiguousarray(np.moveaxis(values, -1, 0)) if planar else values
    how = {"photometric": "minisblack", "planarconfig": "separate" if planar else "contig", "extratags": tags, **how}
    tifffile.imwrite(path, stored, **how)
    return path


def shares(values: Raster) -> Raster:
    """Values as the model sees them before normalization."""
    return values if values.dtype == np.float32 else (values / np.iinfo(values.dtype).max).astype(np.float32)


TILED: dict[str, Any] = {"tile": (16, 32)}
STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "strips": ("uint16", {"rowsperstrip": 7}),
    "tiles": ("int16", TILED),
    "planes in tiles": ("float32", {**TILED, "planar": True}),
    "planes in strips": ("uint8", {"planar": True, "rowsperstrip": 5}),
    "LZW and predictor 2": ("uint16", {**TILED, "compression": "lzw", "predictor": 2}),
    "deflate and predictor 3": ("float32", {**TILED, "compression": "zlib", "predictor": 3}),
    "planes of zstd and predictor 2": ("int16", {**TILED, "compression": "zstd", "predictor": 2, "planar": True}),
    "BigTIFF": ("uint16", {**TILED, "bigtiff": True}),
    "big endian": ("uint16", {**TILED, "byteorder": ">", "compression": "lzw", "predictor": 2, "planar": True}),
    "big endian strips": ("float32", {"byteorder": ">", "rowsperstrip": 9}),
}


@pytest.mark.parametrize("bands", [(), (4, 1), (2,)])
@pytest.mark.parametrize("kind", STORED)
def test_boxes_have_the_values_of_the_file(tmp_path: Path, kind: str, bands: tuple[int, ...]) -> None:
    dtype, how = STORED[kind]
    values = raster(dtype)
    found = open_stored_picture(write(tmp_path / "a.tif", values, **how), bands)
    chosen = values[..., [band - 1 for band in bands]] if bands else values
    assert (found.size, found.channels, found.values) == ((HEIGHT, WIDTH), chosen.shape[2], dtype)
    for rows, cols in ((Interval(0, HEIGHT), Interval(0, WIDTH)), (Interval(13, 36), Interval(30, 49))):
        read = found.read(rows, cols)
        box = chosen[rows.start : rows.stop, cols.start : cols.stop]
        assert np.array_equal(read, box if dtype == "uint8" else shares(box))


def test_channels_that_are_pages_of_ome(tmp_path: Path) -> None:
    values = raster("uint16", 5)
    path = tmp_path / "a.ome.tif"
    pages = np.ascontiguousarray(np.moveaxis(values, -1, 0))
    tifffile.imwrite(path, pages, ome=True, photometric="minisblack", metadata={"axes": "CYX"}, **TILED)
    read = open_stored_picture(path, (5, 3)).read(Interval(2, 30), Interval(0, WIDTH))
    assert np.array_equal(read, shares(values[2:30, :, [4, 2]]))


def test_infinite_values_are_errors_of_their_file(tmp_path: Path) -> None:
    values = raster("float32", 2)
    values[3, 5, 1] = -np.inf
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack", planarconfig="contig", **TILED)
    with pytest.raises(BadImage, match=r"a\.tif: has 1 value of -inf"):
        open_stored_picture(tmp_path / "a.tif").read(Interval(0, HEIGHT), Interval(0, WIDTH))


@pytest.mark.parametrize(("dtype", "bands"), [("uint8", 3), ("uint8", 1), ("uint16", 5), ("float32", 2)])
def test_pixels_outside_the_mask_in_a_file(tmp_path: Path, dtype: str, bands: int) -> None:
    values, inside = raster(dtype, bands), np.ones((HEIGHT, WIDTH), bool)
    inside[:11, 7:] = False
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2):  # a level of a pyramid has a mask of its own
            level = np.ascontiguousarray(values[::step, ::step].squeeze())
            how: dict[str, Any] = {"planarconfig": "contig"} if bands > 1 else {}
            how["photometric"] = "rgb" if bands == 3 else "minisblack"
            file.write(level, subfiletype=step - 1, metadata=None, **how, **TILED)
            file.write(inside[::step, ::step], photometric=4, subfiletype=3 + step, metadata=None, **TILED)
    rows, cols = Interval(3, HEIGHT), Interval(2, WIDTH)
    shown, read = inside[3:, 2:], open_stored_picture(path).read(rows, cols)
    unit = read / np.float32(255 if read.dtype == np.uint8 else 1)
    expected = values / np.float32(255) if dtype == "uint8" else shares(values)
    assert np.array_equal(np.isnan(unit), np.broadcast_to(~shown[..., None], unit.shape))
    assert np.allclose(unit[shown], expected[3:, 2:][shown], rtol=1e-6)
    if dtype == "uint8":
        pixels = open_image(path).read(rows, cols)
        assert np.array_equal(pixels, np.broadcast_to(np.where(shown[..., None], values[3:, 2:], 255), pixels.shape))


@pytest.mark.parametrize(
    ("dtype", "tag", "none"),
    [
        ("uint8", "0", True),
        ("int16", "-9999", True),
        ("float32", "-3.4028234663852886e+38", True),
        ("float32", "-3.40282346639e+38", True),  # as older software rounds it
        ("float32", "-inf", True),
        ("float32", "nan", False),
        ("uint16", "-9999", False),
        ("uint16", "none", False),
    ],
)
def test_pixels_without_data(tmp_path: Path, dtype: str, tag: str, none: bool) -> None:
    values = raster(dtype)
    values[values == 0] = 1
    marked = np.zeros(values.shape, bool)
    marked[3:9, 5:, 2] = none
    values[marked] = np.array(float(tag)).astype(dtype) if none else 0
    image = open_stored_picture(write(tmp_path / "a.tif", values, no_data=tag, **TILED))
    read = image.read(Interval(0, HEIGHT), Interval(0, WIDTH))
    assert np.array_equal(np.isnan(read), marked)
    unit = read / np.float32(255 if read.dtype == np.uint8 else 1)
    expected = values / np.float32(255) if dtype == "uint8" else shares(values)
    assert np.allclose(unit[~marked], expected[~marked], rtol=1e-6)
    view = View((HEIGHT, WIDTH), "pad", mean=(0.25,) * 6, std=(0.5,) * 6)
    seen = np.moveaxis(view.tile(image, Interval(0, HEIGHT), Interval(0, WIDTH)), 0, -1)
    assert not seen[marked].any()
    assert np.allclose(seen[~marked], (unit[~marked] - 0.25) / 0.5)


@pytest.mark.parametrize("tag", [None, "7", "nan"])
def test_a_tile_that_one_band_leaves_out(tmp_path: Path, tag: str | None) -> None:
    """GDAL writes no tile of a band that is all 0, or without data, and those of other bands at its place."""
    values = raster("float32", 3)
    path = write(tmp_path / "a.tif", values, planar=True, no_data=tag, photometric="rgb", **TILED)
    with tifffile.TiffFile(path, mode="r+b") as file:
        (first, *_, last), tags = range(18), file.pages[0].tags
        counts = [0 if number in (first, last) else each for number, each in enumerate(tags[325].value)]
        tags[325].overwrite(counts)
    values[:16, :32, 0] = values[32:, 32:, 2] = 0 if tag is None else np.nan
    read = open_stored_picture(path).read(Interval(0, HEIGHT), Interval(0, WIDTH))
    assert np.array_equal(read, values, equal_nan=True)
    if tag is None:
        pixels = open_image(path).read(Interval(0, HEIGHT), Interval(0, WIDTH))
        assert np.array_equal(pixels, np.rint(255.0 * values))


def classes(root: Path, *rasters: tuple[Raster, dict[str, Any]], last: int = 12) -> Path:
    """Two classes of equal rasters; the given ones are the last of them."""
    for number in range(last):
        values, how = rasters[0] if number < last - 1 else rasters[-1]
        write(root / "ab"[number % 2] / f"{number:02}.tif", values, **how)
    return root


@pytest.mark.parametrize(
    ("values", "how", "channels", "found"),
    [
        (raster("uint16"), {}, "auto", (6, "uint16")),
        (raster("uint16", 2), {}, "auto", (2, "uint16")),
        (raster("uint8", 4), {"photometric": "rgb", "extrasamples": ["unspecified"]}, "auto", (4, "uint8")),
        (raster("uint8", 4), {"photometric": "rgb", "extrasamples": ["unassalpha"]}, "auto", (3, None)),
        (raster("uint8", 4), {"photometric": "rgb", "extrasamples": ["unassalpha"]}, "all", (4, "uint8")),
        (raster("uint8", 4), {"photometric": "rgb", "extrasamples": ["unspecified"]}, "rgb", (3, None)),
        (raster("uint16", 3), {"photometric": "rgb"}, "auto", (3, None)),
        (raster("uint16", 3), {"photometric": "rgb"}, "all", (3, "uint16")),
        (raster("float32", 1)[..., 0], {"planarconfig": None}, "all", (1, "float32")),
        (raster("int16"), {}, (4, 3, 2), (3, "int16")),
    ],
)
def test_which_channels_are_taken(tmp_path: Path, values: Raster, how: Any, channels: Any, found: Any) -> None:
    files = open_files(classes(tmp_path, (values, how)), channels=channels)
    assert (files.channels, files.values) == found
    pixels = files.image(0).read(Interval(0, 9), Interval(0, 8))
    assert pixels.shape == (9, 8, found[0])
    assert any("channels of" in each or "channel of" in each for each in files.remarks) == (found[1] is not None)


@pytest.mark.parametrize(
    ("other", "how", "channels", "message"),
    [
        (raster("uint16", 5), {}, "auto", "11.tif: has 5 channels, but other images have 6: write all images alike"),
        (raster("int16"), {}, "all", "11.tif: has 16 bits with a sign, but other images have 16 bits"),
        (raster("uint16", 3), {"photometric": "rgb"}, "auto", "11.tif: has 3 channels, but other images have 6"),
        (raster("uint16", 5), {}, (6, 1), "11.tif: has 5 channels, and `channels` names number 6"),
        (raster("float32").astype("float64"), {}, "all", "11.tif: has 6 values of float64 in each pixel"),
    ],
)
def test_files_that_differ_are_named(tmp_path: Path, other: Raster, how: Any, channels: Any, message: str) -> None:
    root = classes(tmp_path, (raster("uint16"), {}), (other, how))
    with pytest.raises(DatasetError, match=message):
        open_files(root, channels=channels).image(11)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    files = open_files(classes(tmp_path, (raster("uint16"), {**TILED, "compression": "zlib"})))
    path = files.path(3)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(BadImage, match=f"{path.name}: is truncated"):
        open_stored_picture(path)


def test_moments_are_those_of_all_pixels_with_data(tmp_path: Path) -> None:
    rasters = [raster("int16", seed=seed) for seed in range(3)]
    rasters[1][5:20, :, 1] = -9999
    rasters[2][..., 4] = -9999
    images = [
        open_stored_picture(write(tmp_path / f"{n}.tif", each, no_data="-9999")) for n, each in enumerate(rasters)
    ]
    count, mean, squares = merged(moments_of(image, 6) for image in images)
    known = np.ma.masked_equal(np.concatenate(rasters), -9999) / 32767
    assert np.array_equal(count, known.count((0, 1)))
    assert np.allclose(mean, known.mean((0, 1)), rtol=0, atol=1e-7)
    assert np.allclose((squares / count) ** 0.5, known.std((0, 1)), rtol=1e-7)


@pytest.mark.parametrize(("name", "channels"), [("resnet18", 6), ("small_resnet", 6), ("vit", 2)])
def test_models_get_as_many_channels(name: str, channels: int) -> None:
    config = parse(["--model", name, "--image-size", "32"])
    spec = TrainingSpec(config, 4, channels)
    if name in models.names():
        first = next(each for each in spec.build().parameters() if each.dim() == 4)
        assert first.shape[1] == channels
    else:
        with pytest.raises(ConfigError, match="takes images of 3 channels, and these have 6"):
            spec.build()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--channels all", "`channels` is for files of pictures"),
        ("--channels 1,2 --images x --image-size 8x8x8", "`channels` is for files of pictures"),
        ("--channels all --slides x --image-size auto", "`channels` is for files of pictures"),
    ],
)
def test_channels_are_of_files_of_pictures(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source_of(parse(flags.split())).prepared()


def test_floating_point_may_have_any_mean(tmp_path: Path) -> None:
    root = classes(tmp_path, (raster("float32") * 3000, {}))
    config = parse(["--images", str(root), "--mean", "1500", "--std", "900"])
    assert with_task(config, datasets.open(root)[0]).data.mean == (1500.0,)
