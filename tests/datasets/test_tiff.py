"""mpi4dl.datasets.tiff: boxes of TIFF files equal the same box of the whole, and only their tiles are decoded."""

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import imagecodecs
import numpy as np
import PIL.Image
import PIL.TiffImagePlugin
import pytest
import tifffile

from mpi4dl.datasets import BadImage, open_image
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image, smooth_image, whole

HEIGHT, WIDTH = 150, 133
BOXES = [
    (Interval(0, HEIGHT), Interval(0, WIDTH)),
    (Interval(0, 1), Interval(0, 1)),
    (Interval(HEIGHT - 1, HEIGHT), Interval(WIDTH - 1, WIDTH)),
    (Interval(31, 97), Interval(30, 66)),
    (Interval(32, 96), Interval(32, 64)),
    (Interval(5, 5), Interval(0, 9)),
    (Interval(140, 150), Interval(120, 133)),
]
TILED = {"tile": (32, 32)}


def write(path, pixels, **options):
    tifffile.imwrite(path, pixels, **{"photometric": "rgb", **options})
    return path


def assert_boxes_equal(path, expected):
    image = open_image(path)
    assert image.size == expected.shape[:2]
    for rows, cols in BOXES:
        assert np.array_equal(image.read(rows, cols), expected[rows.start : rows.stop, cols.start : cols.stop])


@pytest.mark.parametrize(
    "options",
    [
        TILED,
        {**TILED, "compression": "zlib"},
        {**TILED, "compression": "zlib", "predictor": True},
        {**TILED, "compression": "lzw"},
        {**TILED, "compression": "zstd"},
        {**TILED, "compression": "jpeg2000"},
        {**TILED, "compression": "zlib", "bigtiff": True},
        {**TILED, "byteorder": ">"},
        {"tile": (16, 64), "compression": "zlib"},
        {"rowsperstrip": 17},
        {"rowsperstrip": 17, "compression": "zlib"},
        {},
    ],
    ids=str,
)
def test_lossless_files(tmp_path, options):
    pixels = noise_image(HEIGHT, WIDTH)
    path = write(tmp_path / "a.tif", pixels, **options)
    assert_boxes_equal(path, pixels)


def test_jpeg_tiles(tmp_path):
    pixels = smooth_image(HEIGHT, WIDTH)
    path = write(tmp_path / "a.tif", pixels, **TILED, compression="jpeg", compressionargs={"level": 95})
    assert_boxes_equal(path, tifffile.imread(path))
    assert np.abs(open_image(path).read(*whole(HEIGHT, WIDTH)).astype(int) - pixels).mean() < 2


def test_pages_of_channels_have_their_own_tables_of_jpeg(tmp_path):
    pixels, path = smooth_image(HEIGHT, WIDTH), tmp_path / "a.ome.tif"
    told = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" '
        f'DimensionOrder="XYCZT" Type="uint8" SizeX="{WIDTH}" SizeY="{HEIGHT}" SizeC="3" SizeZ="1" SizeT="1">'
        "<TiffData/></Pixels></Image></OME>"
    )
    with PIL.TiffImagePlugin.AppendingTiffWriter(str(path), True) as file:
        for channel, quality in enumerate((95, 30, 60)):
            page = PIL.Image.fromarray(pixels[..., channel])
            page.save(file, format="TIFF", compression="jpeg", quality=quality, tiffinfo={270: told})
            file.newFrame()
    assert_boxes_equal(path, np.moveaxis(tifffile.imread(path), 0, -1))


def test_a_picture_of_other_colours_behind_a_smaller_page_is_refused(tmp_path):
    pixels = noise_image(HEIGHT, WIDTH, 4)
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for page in (np.ascontiguousarray(pixels[::4, ::4]), pixels):
            file.write(page, photometric="separated", metadata=None)
    with pytest.raises(BadImage, match=r"a smaller page before that of the picture.*convert it to RGB"):
        open_image(tmp_path / "a.tif")


def test_two_pages_of_one_size_are_refused_however_they_are_stored(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for options in (TILED, {"rowsperstrip": 17}):
            file.write(noise_image(HEIGHT, WIDTH), photometric="rgb", metadata=None, **options)
    with pytest.raises(BadImage, match=f"has 2 pages of {WIDTH} x {HEIGHT} px: write each to a file of its own"):
        open_image(tmp_path / "a.tif")


NOISE, GREY, CLEAR = (noise_image(HEIGHT, WIDTH, channels) for channels in (3, 1, 4))
CLEAR[..., 3] = np.where(CLEAR[..., 3] > 128, 255, 0)
PLANES, GREYS, COLOURS = NOISE.transpose(2, 0, 1), GREY.repeat(3, axis=2), noise_image(256, 3, 1)[..., 0]
BLACK, WHITE = ({"photometric": name} for name in ("minisblack", "miniswhite"))
PALETTE = {"photometric": "palette", "colormap": COLOURS.T.astype(np.uint16) * 257}
PAGES = {**BLACK, "metadata": {"axes": "CYX"}}
BITS = np.where(GREYS > 127, 255, 0)
STORED = {
    "planes one after the other": (PLANES, {**TILED, "planarconfig": "separate"}, NOISE),
    "grey": (GREY[..., 0], {**TILED, **BLACK}, GREYS),
    "negative of grey": (255 - GREY[..., 0], {**TILED, **WHITE}, GREYS),
    "16 bits": (NOISE.astype(np.uint16) * 257, TILED, NOISE),
    "1 bit": (GREY[..., 0] > 127, BLACK, BITS),
    "1 bit, white is 0": (GREY[..., 0] <= 127, WHITE, BITS),
    "transparent, on white": (
        CLEAR, {**TILED, "extrasamples": ["unassalpha"]}, np.where(CLEAR[..., 3:] == 255, CLEAR[..., :3], 255)
    ),
    "another channel": (CLEAR, {**TILED, "extrasamples": ["unspecified"]}, CLEAR[..., :3]),
    "palette in tiles": (GREY[..., 0], {**TILED, **PALETTE}, COLOURS[GREY[..., 0]]),
    "palette in strips": (GREY[..., 0], {"rowsperstrip": 17, "compression": "lzw", **PALETTE}, COLOURS[GREY[..., 0]]),
    "channels as pages of OME": (PLANES, {**PAGES, "ome": True}, NOISE),
    "channels as tiled pages": (PLANES, {**PAGES, "ome": True, **TILED, "compression": "zlib"}, NOISE),
    "channels as pages of ImageJ": (PLANES, {**PAGES, "imagej": True}, NOISE),
}  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_whatever_is_stored_is_read_as_three_bytes(tmp_path, kind):
    samples, options, expected = STORED[kind]
    assert_boxes_equal(write(tmp_path / "a.tif", np.ascontiguousarray(samples), **options), expected)


def test_tiles_that_the_file_leaves_out_are_white(tmp_path):
    def tiles():
        for index in range(4):
            yield None if index == 2 else np.full((32, 32, 3), index, np.uint8)

    path = tmp_path / "a.tif"
    tifffile.imwrite(path, tiles(), shape=(64, 64, 3), dtype=np.uint8, photometric="rgb", compression="zlib", **TILED)
    corners = open_image(path).read(*whole(64, 64))[::32, ::32, 0]
    assert corners.tolist() == [[0, 1], [255, 3]]


def pyramid(path, pixels, bigtiff):
    with tifffile.TiffWriter(path, bigtiff=bigtiff) as file:
        for step in (1, 2, 4):
            level = pixels[::step, ::step]
            file.write(level, tile=(32, 32), photometric="rgb", compression="zlib", subfiletype=int(step > 1))
    return path


@pytest.mark.parametrize("bigtiff", [False, True])
def test_a_pyramid_is_read_at_full_resolution(tmp_path, bigtiff):
    pixels = noise_image(HEIGHT, WIDTH)
    assert_boxes_equal(pyramid(tmp_path / "a.tif", pixels, bigtiff), pixels)


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("kept", [0.001, 0.3, 0.7, 0.8, 0.94])
def test_a_truncated_pyramid_is_rejected_whichever_box_is_wanted(tmp_path, bigtiff, kept):
    path = pyramid(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), bigtiff)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(BadImage, match=r"a\.tif: (is truncated|has no readable TIFF header)"):
        open_image(path)


def test_a_cut_off_page_directory_is_told_apart_from_missing_tiles(tmp_path):
    path = pyramid(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), bigtiff=True)
    with tifffile.TiffFile(path) as file:
        second, last = file.pages[1].offset, file.pages[2].offset
    content = path.read_bytes()
    path.write_bytes(content[: last + 20])
    with pytest.raises(BadImage, match="is truncated: the directory of a page lies beyond its"):
        open_image(path)
    path.write_bytes(content[: second // 2])
    with pytest.raises(BadImage, match=r"is truncated: \d+ of 25 tiles lie beyond its"):
        open_image(path)


def test_a_damaged_tile_is_named(tmp_path):
    path = write(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), **TILED, compression="zlib")
    with tifffile.TiffFile(path) as file:
        offset, num_bytes = file.pages[0].dataoffsets[7], file.pages[0].databytecounts[7]
    content = bytearray(path.read_bytes())
    content[offset : offset + num_bytes] = bytes(num_bytes)
    path.write_bytes(content)
    image = open_image(path)
    image.read(Interval(0, 32), Interval(0, WIDTH))
    with pytest.raises(BadImage, match=r"a\.tif: tile 7 cannot be decoded"):
        image.read(Interval(32, 64), Interval(64, 96))


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = write(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), **TILED)
    image = open_image(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadImage, match=r"is truncated: tile 0 has \d+ of 3072 bytes"):
        image.read(Interval(0, 1), Interval(0, 1))
    path.unlink()
    with pytest.raises(BadImage, match=r"cannot be read: No such file"):
        image.read(Interval(0, 1), Interval(0, 1))


def test_only_the_rows_of_a_box_are_read_of_what_is_not_compressed(tmp_path, monkeypatch):
    pixels = noise_image(HEIGHT, WIDTH)
    image = open_image(write(tmp_path / "a.tif", pixels, rowsperstrip=HEIGHT))
    read, read_bytes = os.pread, []
    monkeypatch.setattr("os.pread", lambda *args: read_bytes.append(args[1]) or read(*args))
    assert np.array_equal(image.read(Interval(31, 97), Interval(5, 9)), pixels[31:97, 5:9])
    assert sum(read_bytes) == 66 * WIDTH * 3


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_claims_far_more_pixels_than_its_tile_is_refused(tmp_path, progressive):
    for name, side in (("good.tif", 64), ("bomb.tif", 600)):
        stream = io.BytesIO()
        PIL.Image.fromarray(smooth_image(side, side)).save(stream, "JPEG", progressive=progressive)
        how = {"shape": (64, 64, 3), "dtype": np.uint8, "tile": (64, 64), "photometric": "ycbcr"}
        tifffile.imwrite(tmp_path / name, iter([stream.getvalue()]), compression="jpeg", **how)
    assert open_image(tmp_path / "good.tif").read(*whole(64, 64)).shape == (64, 64, 3)
    with pytest.raises(BadImage, match="far larger than 64 x 64"):
        open_image(tmp_path / "bomb.tif").read(*whole(64, 64))


SCALED = {
    "12 bits": ((GREY.astype(int) * 4095 // 255).astype(np.uint16), {"bitspersample": 12}),
    "12 of 16 bits": ((GREY.astype(int) * 4095 // 255).astype(np.uint16), {"extratags": [(281, "H", 1, 4095, True)]}),
    "brightest pixel of 16 bits": (GREY.astype(np.uint16) * 257, {"extratags": [(281, "H", 1, 60000, True)]}),
    "32 bits": (GREY.astype(np.uint32) * 0x01010101, {}),
    "signed 16 bits": ((GREY.astype(np.int32) * 257 - 2**15).astype(np.int16), {}),
    "half": ((GREY / 255).astype(np.float16), {}),
    "float": ((GREY / 255).astype(np.float32), {}),
    "double": (GREY / 255, {}),
    "float with a range": ((GREY / 51).astype(np.float32), {"extratags": [(341, "f", 1, 5.0, True)]}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_samples_are_scaled_by_the_range_that_the_file_declares(tmp_path, kind):
    pixels, options = SCALED[kind]
    options = {"photometric": "minisblack", **options}
    try:
        tifffile.imwrite(tmp_path / "a.tif", pixels[..., 0], rowsperstrip=40, **options)
    except NotImplementedError as error:
        pytest.skip(f"imagecodecs: {error}")
    found = open_image(tmp_path / "a.tif").read(*whole(HEIGHT, WIDTH))
    assert np.abs(found.astype(int) - GREY).max() <= (kind.startswith("12"))


def test_significant_bits_of_ome(tmp_path):
    pixels = GREY[..., 0].astype(np.uint16) * 16
    metadata = {"axes": "YX", "SignificantBits": 12}
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, photometric="minisblack", ome=True, metadata=metadata)
    found = open_image(tmp_path / "a.ome.tif").read(*whole(HEIGHT, WIDTH))
    assert np.abs(found.astype(int) - GREY).max() <= 1
    with tifffile.TiffWriter(tmp_path / "b.ome.tif", ome=True) as file:
        file.write(noise_image(9, 8), photometric="rgb", metadata={"Name": "macro", "SignificantBits": 8})
        file.write(pixels, photometric="minisblack", metadata={**metadata, "Name": "slide"})
    assert np.array_equal(open_image(tmp_path / "b.ome.tif").read(*whole(HEIGHT, WIDTH)), found)


@pytest.mark.skipif(not hasattr(imagecodecs, "CCITTFAX4"), reason="this imagecodecs reads no faxes")
@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
def test_faxes(tmp_path, compression):
    image = PIL.Image.fromarray(smooth_image(HEIGHT, WIDTH)).convert("1")
    image.save(tmp_path / "a.tif", compression=compression)
    assert_boxes_equal(tmp_path / "a.tif", np.asarray(image.convert("RGB")))


def test_inks(tmp_path):
    image = PIL.Image.fromarray(noise_image(HEIGHT, WIDTH, 4), "CMYK")
    image.save(tmp_path / "a.tif")
    expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(open_image(tmp_path / "a.tif").read(*whole(HEIGHT, WIDTH)) - expected).max() <= 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"photometric": "palette", "colormap": np.full((3, 256), 255, np.uint16)}, "a palette of 8 bits where TIFF"),
        ({"photometric": "separated", "extratags": [(332, "H", 1, 2, True)]}, "inks other than cyan, magenta"),
        ({"photometric": "ycbcr"}, "YCbCr of fewer colours than pixels"),
        ({"photometric": "icclab"}, "not an image of a kind that Pillow knows"),
    ],
    ids=lambda each: each["photometric"] if isinstance(each, dict) else "",
)
def test_colours_that_would_be_wrong_are_refused(tmp_path, options, reason):
    channels = {"palette": 1, "separated": 4}.get(options["photometric"], 3)
    path = write(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH, channels).squeeze(), **options)
    if options["photometric"] == "ycbcr":
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages[0].tags["YCbCrSubSampling"].overwrite((2, 2))
    with pytest.raises(BadImage, match=reason):
        open_image(path).read(*whole(HEIGHT, WIDTH))


@pytest.mark.parametrize(
    ("axes", "shape", "reason"),
    [
        ("CYX", (2,), r"has 2 channels; expected 1 \(grey\) or 3 \(colour\)"),
        ("CYX", (4,), "has 4 channels; expected 1"),
        ("ZYX", (3,), r"is a stack of images \(axes ZYX, 3 x 150 x 133\): write each to a file of its own"),
        ("TCYX", (2, 3), r"is a stack of images \(axes TCYX, 2 x 3 x 150 x 133\)"),
    ],
)
def test_stacks_are_refused(tmp_path, axes, shape, reason):
    pixels = np.zeros((*shape, HEIGHT, WIDTH), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="minisblack", ome=True, metadata={"axes": axes})
    with pytest.raises(BadImage, match=reason):
        open_image(tmp_path / "a.tif")


def test_a_stack_of_plain_pages_is_refused(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((3, 40, 50), np.uint8), photometric="minisblack", metadata=None)
    with pytest.raises(BadImage, match=r"is a stack of images \(axes IYX, 3 x 40 x 50\)"):
        open_image(tmp_path / "a.tif")


def test_a_tile_too_large_to_be_decoded_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mpi4dl.datasets.tiff.MOST_PIXELS_AT_ONCE", 1000)
    path = write(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), **TILED)
    with pytest.raises(BadImage, match="stores 32 x 32 pixels that must be decoded at once, which is too many"):
        open_image(path)


READING = """
import resource, sys
from pathlib import Path
from mpi4dl.datasets import BadImage, open_image
from mpi4dl.geometry import Interval

small, large = map(Path, sys.argv[1:])
open_image(small).read(Interval(0, 64), Interval(0, 64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    open_image(large).read(Interval(0, 64), Interval(0, 64))
except BadImage as error:
    print(error)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
"""
PICTURES = {
    "jpeg": (7, imagecodecs.jpeg_encode),
    "jpeg 2000": (34712, partial(imagecodecs.jpeg2k_encode, codecformat="J2K")),
    "png": (34933, imagecodecs.png_encode),
    "webp": (50001, imagecodecs.webp_encode),
    "jpeg xl": (50002, partial(imagecodecs.jpegxl_encode, lossless=True, effort=1)),
}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.sample(1)
def test_a_tile_that_is_a_far_larger_picture_is_refused_before_it_takes_memory(tmp_path, kind):
    compression, encode = PICTURES[kind]
    for name, side in (("small.tif", 64), ("large.tif", 4000)):
        picture = encode(np.full((side, side, 3), 200, np.uint8))
        tifffile.imwrite(
            tmp_path / name, iter([picture]), shape=(64, 64, 3), dtype=np.uint8, tile=(64, 64), photometric="rgb",
            compression=compression,
        )  # fmt: skip
    files = (str(tmp_path / "small.tif"), str(tmp_path / "large.tif"))
    done = subprocess.run([sys.executable, "-c", READING, *files], capture_output=True, text=True, check=True)
    assert "large.tif" in done.stdout
    assert "tile 0" in done.stdout


def test_of_a_file_whose_tiles_are_all_missing_nothing_is_shown(tmp_path):
    path = write(tmp_path / "a.tif", noise_image(64, 64), **TILED)
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags["TileOffsets"].overwrite([0] * 4)
    with pytest.raises(BadImage, match="has no pixels: it is damaged"):
        open_image(path)


@pytest.mark.parametrize(
    ("rows", "cols", "tiles"),
    [
        (Interval(0, 32), Interval(0, 32), 1),
        (Interval(31, 33), Interval(0, 32), 2),
        (Interval(40, 41), Interval(0, WIDTH), 5),
        (Interval(33, 95), Interval(33, 95), 4),
        (Interval(9, 9), Interval(0, 9), 0),
    ],
)
def test_only_the_tiles_that_a_box_touches_are_read(tmp_path, monkeypatch, rows, cols, tiles):
    path = write(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), **TILED, compression="zlib")
    image = open_image(path)
    offsets = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: offsets.append(offset) or pread(file, count, offset))
    image.read(rows, cols)
    assert len(offsets) == len(set(offsets)) == tiles


def test_no_file_stays_open(tmp_path):
    path = write(tmp_path / "a.tif", noise_image(HEIGHT, WIDTH), **TILED)
    image = open_image(path)
    image.read(*whole(HEIGHT, WIDTH))
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(path) not in opened


def test_threads_read_one_image_at_the_same_time(tmp_path):
    pixels = noise_image(HEIGHT, WIDTH)
    image = open_image(write(tmp_path / "a.tif", pixels, **TILED, compression="zlib"))

    def is_right(box):
        rows, cols = box
        return np.array_equal(image.read(rows, cols), pixels[rows.start : rows.stop, cols.start : cols.stop])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, BOXES * 40))
