"""mpi4dl.datasets.sources and .masks: masks lie on their images whatever is done to these, and say what is wrong."""

import re
import struct
import zlib

import imagecodecs
import numpy as np
import PIL.Image
import pytest
import tifffile
import torch

from mpi4dl import datasets
from mpi4dl.datasets import Augmentation, BadImage, DatasetError, Loader, View
from mpi4dl.datasets.masks import Mask, indices_of, open_stored, values_in
from mpi4dl.datasets.sources import open_files
from mpi4dl.geometry import Box, GridShape, Interval, Tiling

VALUES = np.array([0, 1, 2, 255], np.uint8)
FORMATS = ("grey.png", "palette.png", "tiles.tif", "strips.tif", "lzw16.tif")


def write_mask(path, mask):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith("palette"):
        picture = PIL.Image.fromarray(mask)
        picture.putpalette([255 - i // 3 for i in range(768)])  # colours that have nothing to do with the indices
        picture.save(path)
    elif path.suffix == ".png":
        PIL.Image.fromarray(mask).save(path)
    elif path.name.startswith("tiles"):
        tifffile.imwrite(path, mask, tile=(16, 16), compression="zlib")
    elif path.name.startswith("lzw16"):
        tifffile.imwrite(path, mask.astype(np.uint16), compression="lzw", rowsperstrip=7)
    else:
        tifffile.imwrite(path, mask, rowsperstrip=5)


@pytest.fixture
def root(tmp_path):
    """Images whose brightness is the number in their mask, in blocks of 4 px, of which none is at an odd place."""
    random = np.random.default_rng(0)
    for number, name in enumerate(FORMATS):
        mask = np.kron(VALUES[random.integers(0, 4, (8 + number, 10))], np.ones((4, 4), np.uint8))
        write_mask(tmp_path / "masks" / name, mask)
        (tmp_path / "images").mkdir(exist_ok=True)
        PIL.Image.fromarray(np.stack([mask] * 3, 2)).save(tmp_path / "images" / f"{name.partition('.')[0]}.png")
    (tmp_path / "classes.txt").write_text("background\ncell\nnucleus\n")
    return tmp_path


@pytest.mark.parametrize("view", [
    View((24, 28), "crop", Augmentation(flip_rows=True), mean=(0, 0, 0), std=(1, 1, 1)),
    View((64, 56), "crop", Augmentation(flip_rows=True), mean=(0, 0, 0), std=(1, 1, 1)),
    View((37, 41), "resize", Augmentation(flip_rows=True, crop=0.7), seed=3, mean=(0, 0, 0), std=(1, 1, 1)),
    View((37, 41), "resize", Augmentation(flip_rows=True, degrees=8.0), seed=3, mean=(0, 0, 0), std=(1, 1, 1)),
])  # fmt: skip
def test_masks_lie_on_their_images(root, view):
    """Where an image is of one brightness, far from edges, the mask says which; beyond the image it says -100."""
    folder = open_files(root)
    assert folder.classes == ("background", "cell", "nucleus")
    whole = Loader(folder, view, 5, lambda n: [Box(Interval(0, n), *(Interval(0, side) for side in view.size))])
    compared = 0
    for epoch in range(3):
        (batch,) = whole.epoch(epoch)
        assert batch.labels.dtype == torch.int64
        bright = (batch.tiles[0][:, 0] * 255).round().long()
        shown = torch.where(batch.labels == -100, 255, batch.labels)
        assert {*batch.labels.unique().tolist()} == {-100, 0, 1, 2}
        sure = (
            torch.isin(bright, torch.from_numpy(VALUES).long()) if view.fit == "resize" else torch.ones_like(bright) > 0
        )
        if view.fit == "resize":  # linear means at edges may be any number
            sure &= (torch.nn.functional.max_pool2d(bright[:, None].float(), 5, 1, 2)[:, 0] == bright) & (
                -torch.nn.functional.max_pool2d(-bright[:, None].float(), 5, 1, 2)[:, 0] == bright
            )
        assert torch.equal(bright[sure], shown[sure])
        compared += int(sure.sum())
    assert compared > 300


def test_every_rank_has_whole_masks_and_its_boxes(root):
    view, grid = View((20, 22), augmentation=Augmentation(flip_rows=True)), GridShape(1, 2, 2)
    whole = next(Loader(open_files(root), view, 5, lambda n: []).epoch(1)).labels
    for rank in range(4):
        boxes = lambda n, rank=rank: [Tiling.even(grid, (n, *view.size)).owned(rank)]  # noqa: E731
        (batch,) = Loader(open_files(root), view, 5, boxes, num_workers=2).epoch(1)
        assert torch.equal(batch.labels, whole)
        assert batch.tiles[0].shape[2:] == (10, 11)


def grey_png(path, mask, bits):
    """A PNG of grey of so many bits, which Pillow does not write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = mask.shape
    ones = (mask[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    lines = np.packbits(ones.reshape(height, width * bits).astype(np.uint8), axis=1)
    content = b"".join(b"\0" + line.tobytes() for line in lines)
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(content)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def palette(path, mask, bits):
    picture = PIL.Image.fromarray(mask)
    picture.putpalette([255 - i // 3 for i in range(768)])
    picture.save(path, bits=bits, transparency=1)


def with_alpha(path, mask, opacity):
    PIL.Image.merge("LA", [PIL.Image.fromarray(mask), PIL.Image.new("L", mask.shape[::-1], opacity)]).save(path)


FAX = "group4" if hasattr(imagecodecs, "CCITTFAX4") else None
MASKS = {
    "grey of 1 bit": (".png", 2, lambda path, mask: grey_png(path, mask, 1)),
    "grey of 2 bits": (".png", 4, lambda path, mask: grey_png(path, mask, 2)),
    "grey of 4 bits": (".png", 16, lambda path, mask: grey_png(path, mask, 4)),
    "grey of 8 bits": (".png", 255, lambda path, mask: PIL.Image.fromarray(mask).save(path)),
    "grey of 16 bits": (".png", 255, lambda path, mask: PIL.Image.fromarray(mask.astype(np.uint16) * 3).save(path)),
    "grey, opaque": (".png", 255, lambda path, mask: with_alpha(path, mask, 255)),
    "palette of 1 bit": (".png", 2, lambda path, mask: palette(path, mask, 1)),
    "palette of 2 bits": (".png", 4, lambda path, mask: palette(path, mask, 2)),
    "palette of 4 bits": (".png", 16, lambda path, mask: palette(path, mask, 4)),
    "palette of 8 bits": (".png", 255, lambda path, mask: palette(path, mask, 8)),
    "GIF": (".gif", 16, lambda path, mask: PIL.Image.fromarray(mask, "P").save(path)),
    "BMP": (".bmp", 255, lambda path, mask: PIL.Image.fromarray(mask).save(path)),
    "TIFF of 1 bit": (".tif", 2, lambda path, mask: PIL.Image.fromarray(mask > 0).save(path, compression=FAX)),
    "TIFF of 8 bits": (".tif", 255, lambda path, mask: tifffile.imwrite(path, mask)),
    "TIFF of 32 bits": (".tif", 255, lambda path, mask: tifffile.imwrite(path, mask.astype(np.int32))),
    "TIFF, white is 0": (".tif", 255, lambda path, mask: tifffile.imwrite(path, mask, photometric="miniswhite")),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_read_as_the_numbers_that_are_stored(tmp_path, kind):
    """Of grey of few bits too, which Pillow stretches, and whatever colours a palette has; from datasets as well."""
    suffix, count, save = MASKS[kind]
    mask = np.random.default_rng(0).integers(0, count, (9, 13)).astype(np.uint8)
    path = tmp_path / f"mask{suffix}"
    save(path, mask)
    expected = mask.astype(int) * (3 if "16 bits" in kind else 1)
    found = Mask(path, open_stored(path), 1000, None).read(Interval(0, 9), Interval(0, 13))
    assert np.array_equal(found, expected)
    assert values_in(path).tolist() == np.unique(expected).tolist()
    if suffix != ".tif":
        with PIL.Image.open(path) as picture:
            assert np.array_equal(indices_of(picture), expected)


def test_a_mask_with_transparent_pixels_is_refused(tmp_path):
    with_alpha(tmp_path / "mask.png", np.zeros((4, 5), np.uint8), 200)
    with pytest.raises(BadImage, match=r"is a picture in colours \(LA\)"):
        open_stored(tmp_path / "mask.png")


def harm(root, how):
    mask = root / "masks" / "grey.png"
    match how:
        case "size":
            PIL.Image.new("L", (9, 9)).save(mask)
        case "class":
            PIL.Image.new("L", (40, 32), 7).save(mask)
        case "colours":
            PIL.Image.new("RGB", (40, 32)).save(mask)
        case "jpeg":
            PIL.Image.new("L", (40, 32)).save(mask, "JPEG")
        case "cut off":
            mask.write_bytes(mask.read_bytes()[:50])
        case "empty":
            mask.write_bytes(b"")
        case "tiff of colours":
            mask.unlink()
            tifffile.imwrite(mask.with_suffix(".tif"), np.zeros((32, 40, 3), np.uint8), photometric="rgb")
        case "tiff of fractions":
            mask.unlink()
            tifffile.imwrite(mask.with_suffix(".tif"), np.full((32, 40), 0.5, np.float32))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("size", "is a mask of 9 x 9 pixels, but its image has 32 x 40: they must be equal"),
        ("class", "has a pixel of class 7, but there are 3 classes, from 0 on, and 255 is ignored"),
        ("colours", "is a picture in colours (RGB): a mask is grey or has a palette"),
        ("jpeg", "is a JPEG file: masks are PNG, TIFF, BMP or GIF, which keep the number of each pixel"),
        ("cut off", "cannot be decoded"),
        ("empty", "is empty (0 bytes)"),
        ("tiff of colours", "has 3 values of uint8 in each pixel: a mask has one"),
        ("tiff of fractions", "has 1 values of float32 in each pixel: a mask has one"),
    ],
)
def test_a_bad_mask_costs_its_image_and_no_more(root, how, message):
    harm(root, how)
    folder, view = open_files(root), View((16, 16))
    boxes = [Box(Interval(0, 5), Interval(0, 16), Interval(0, 16))]
    position = next(i for i in range(5) if folder.name(i).startswith("images/grey"))
    (batch,) = Loader(folder, view, 5, lambda n: boxes, on_bad_image="report").epoch(0)
    assert list(batch.errors) == [position]
    assert message in batch.errors[position]
    assert "masks/grey" in batch.errors[position]
    intact = [i for i in range(5) if i != position]
    assert all((batch.labels[i] >= 0).any() for i in intact)
    with pytest.raises(BadImage, match=re.escape(message)):
        list(Loader(folder, view, 5, lambda n: boxes).epoch(0))


def test_parts_and_classes(root, tmp_path):
    for part in ("train", "val"):
        (root / part).mkdir()
        for kind in ("images", "masks"):
            (root / part / kind).mkdir()
            for path in (root / kind).iterdir():
                (root / part / kind / path.name).write_bytes(path.read_bytes())
    for kind in ("images", "masks"):
        for path in (root / kind).iterdir():
            path.unlink()
        (root / kind).rmdir()
    training, validation = datasets.open(root)
    assert (len(training), len(validation)) == (5, 5)
    assert training.task == "segment"
    assert training.classes == validation.classes == ("background", "cell", "nucleus")
    (root / "val" / "classes.txt").write_text("background\nnucleus\ncell\n")
    with pytest.raises(DatasetError, match=r"names background, nucleus, cell, but .* names background, cell"):
        datasets.open(root)
    with pytest.raises(DatasetError, match=r"nucleus, cell, but the classes of training are background, cell, nucleus"):
        open_files(root / "val", classes=training.classes)
    (root / "val" / "classes.txt").unlink()
    (root / "classes.txt").unlink()
    assert datasets.open(root)[0].classes == ("0", "1", "2")
    assert datasets.open(root, num_classes=5)[0].classes == ("0", "1", "2", "3", "4")


def test_one_mask_of_several_images_is_a_warning(root):
    (root / "labels.csv").write_text("file,mask\n" + "".join(f"images/{n},masks/grey.png\n" for n in ("grey", "tiles")))
    assert (
        "warning: 1 annotation is named by several images: masks/grey.png" in open_files(root, task="segment").remarks
    )


def test_black_and_white_masks_are_asked_about(root):
    for path in (root / "masks").iterdir():
        path.unlink()
    for path in (root / "images").iterdir():
        with PIL.Image.open(path) as image:
            mask = np.zeros(image.size[::-1], np.uint8)
        mask[:9] = 255
        PIL.Image.fromarray(mask).save(root / "masks" / path.name)
    (root / "classes.txt").unlink()
    with pytest.raises(DatasetError, match="nothing but 0 and 255, and 255 is ignored: set `ignore_index` to none"):
        open_files(root)
    folder = open_files(root, ignore_index=None)
    assert folder.classes == ("0", "1")
    assert np.unique(folder.label(0).read(Interval(0, 20), Interval(0, 20))).tolist() == [0, 1]
    for path in (root / "masks").iterdir():
        with PIL.Image.open(path) as image:
            mask = np.asarray(image) // 2
        PIL.Image.fromarray(mask).save(path)
    with pytest.raises(DatasetError, match=r"masks hold 0, 127, .* write 0 to 1, or say `num_classes` 128"):
        open_files(root)
    assert len(open_files(root, num_classes=128).classes) == 128


def test_masks_may_have_one_ending_more(root):
    plain = [mask.read(*(Interval(0, side) for side in mask.size)) for mask in map(open_files(root).label, range(3))]
    for path in [*(root / "masks").iterdir()]:
        path.rename(path.with_name(f"{path.stem}_mask{path.suffix}"))
    found = open_files(root)
    for index, mask in enumerate(plain):
        assert np.array_equal(found.label(index).read(*(Interval(0, side) for side in mask.shape)), mask)
    others = [path.with_name(path.name.replace("_mask", "_all")) for path in (root / "masks").iterdir()]
    for path in others:
        path.write_bytes(path.with_name(path.name.replace("_all", "_mask")).read_bytes())
    with pytest.raises(DatasetError, match="masks: has 2 masks of each name, _all, _mask: keep one"):
        open_files(root)
    for path in others:
        path.unlink()
    (root / "masks" / "grey_mask.png").rename(root / "masks" / "grey.png")
    with pytest.raises(DatasetError, match="has no mask"):
        open_files(root)
    (root / "masks" / "grey.png").rename(root / "masks" / "grey.jpg")
    with pytest.raises(DatasetError, match=r"grey\.png instead of grey\.jpg, since JPEG changes numbers"):
        open_files(root)


@pytest.mark.parametrize(
    ("harmed", "message"),
    [
        ("masks/grey.png", "images/grey.png: has no mask: add"),
        ("more", "has tiles.png and tiles.tif: one file of each name"),
        ("classes.txt", "classes.txt, line 2: names nothing; expected the name of a class in each line"),
        ("twice", "classes.txt, line 3: names 'cell' again"),
    ],
)
def test_folders_that_cannot_be(root, harmed, message):
    if harmed == "more":
        PIL.Image.new("L", (4, 4)).save(root / "masks" / "tiles.png")
    elif harmed.endswith(".txt") or harmed == "twice":
        (root / "classes.txt").write_text("a\n\nb\n" if harmed != "twice" else "a\ncell\ncell")
    else:
        (root / harmed).unlink()
    with pytest.raises(DatasetError, match=re.escape(message)):
        open_files(root)
