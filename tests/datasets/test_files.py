"""mpi4dl.datasets.files and .pillow: files of all kinds, intact and damaged."""

import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import tifffile

from mpi4dl.datasets import BadImage, files, open_image, reader_process
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image, whole

HEIGHT, WIDTH = 40, 50


def read_all(path):
    image = open_image(path)
    return image.read(*whole(*image.size))


NOISE, GREY, CLEAR = (noise_image(HEIGHT, WIDTH, channels) for channels in (3, 1, 4))
CLEAR[..., 3] = np.where(CLEAR[..., 3] > 128, 255, 0)
TWO = np.where(GREY > 128, np.uint8([200, 10, 30]), np.uint8([5, 100, 250]))
PICTURES = {
    "colour": (PIL.Image.fromarray(NOISE), NOISE),
    "grey": (PIL.Image.fromarray(GREY[..., 0]), GREY.repeat(3, axis=2)),
    "grey of 16 bits": (PIL.Image.fromarray(GREY[..., 0].astype(np.uint16) * 257), GREY.repeat(3, axis=2)),
    "palette": (PIL.Image.fromarray(TWO).quantize(4), TWO),
    "transparent, on white": (PIL.Image.fromarray(CLEAR), np.where(CLEAR[..., 3:] == 255, CLEAR[..., :3], 255)),
}


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("at_once", [1 << 20, 300])
def test_pictures_are_read_exactly(tmp_path, monkeypatch, kind, suffix, at_once):
    """Whole, and a box of them, converted at once or in strips; of palettes in TIFF, too."""
    monkeypatch.setattr(files, "_STRIP_PIXELS", at_once)
    picture, pixels = PICTURES[kind]
    picture.save(tmp_path / f"a.{suffix}")
    assert np.array_equal(read_all(tmp_path / f"a.{suffix}"), pixels)
    image = open_image(tmp_path / f"a.{suffix}")
    assert image.size == (HEIGHT, WIDTH)
    assert np.array_equal(image.read(Interval(3, 20), Interval(11, 50)), pixels[3:20, 11:50])
    assert [image.read(*box).shape for box in (whole(0, 9), whole(9, 0))] == [(0, 9, 3), (9, 0, 3)]


def test_the_content_decides_and_not_the_extension(tmp_path):
    pixels = noise_image(HEIGHT, WIDTH)
    PIL.Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", pixels, photometric="rgb")
    (tmp_path / "b.tif").rename(tmp_path / "b.jpg")
    for name in ("a.tif", "b.jpg"):
        assert np.array_equal(read_all(tmp_path / name), pixels)


def test_openslide_reads_scanners_formats(tmp_path):
    pixels = noise_image(300, 200)
    tifffile.imwrite(tmp_path / "a.svs", pixels, tile=(64, 64), photometric="rgb", compression="zlib")
    image = open_image(tmp_path / "a.svs")
    assert image.size == (300, 200)
    assert np.array_equal(image.read(Interval(50, 290), Interval(60, 200)), pixels[50:290, 60:200])
    assert image.read(Interval(50, 50), Interval(0, 9)).shape == (0, 9, 3)
    assert image.read(Interval(50, 59), Interval(7, 7)).shape == (9, 0, 3)


def test_openslide_reads_tall_boxes_in_strips(tmp_path, monkeypatch):
    monkeypatch.setattr("mpi4dl.datasets.reader_process.STRIP_ROWS", 37)
    pixels = noise_image(300, 200)
    tifffile.imwrite(tmp_path / "a.svs", pixels, tile=(64, 64), photometric="rgb", compression="zlib")
    assert np.array_equal(open_image(tmp_path / "a.svs").read(Interval(5, 299), Interval(0, 200)), pixels[5:299])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.png", b"", "is empty (0 bytes)"),
        ("a.tif", b"", "is empty (0 bytes)"),
        ("a.svs", b"", "is empty (0 bytes)"),
        ("a.png", b"a letter to my aunt", "the file is damaged, or its extension is wrong"),
        ("a.tif", b"II*\0\x08\0\0\0", "has no readable TIFF header, it is truncated or damaged"),
        ("a.ndpi", b"a letter to my aunt", "the file is damaged, or its extension is wrong"),
    ],
)
def test_files_that_are_no_images(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadImage, match=re.escape(reason)) as caught:
        read_all(tmp_path / name)
    assert caught.value.path == tmp_path / name
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert reason in caught.value.reason


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.svs"])
def test_a_file_that_is_gone(tmp_path, name):
    with pytest.raises(BadImage, match=r"cannot be read: No such file|can open"):
        open_image(tmp_path / name)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9])
def test_truncated_pictures(tmp_path, suffix, kept):
    path = tmp_path / f"a.{suffix}"
    PIL.Image.fromarray(noise_image(200, 200)).save(path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(BadImage, match=r"a\.(png|jpg): (cannot be decoded|is not an image)"):
        read_all(path)


def test_a_truncated_slide(tmp_path):
    path = tmp_path / "a.svs"
    tifffile.imwrite(path, noise_image(300, 200), tile=(64, 64), photometric="rgb", compression="zlib")
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(BadImage, match=r"is no slide that OpenSlide can open .*: the file is damaged"):
        open_image(path)


def test_a_damaged_tile_of_a_slide_does_not_spoil_later_reads(tmp_path):
    path = tmp_path / "a.svs"
    pixels = noise_image(300, 200)
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", compression="zlib")
    with tifffile.TiffFile(path) as file:
        offset, num_bytes = file.pages[0].dataoffsets[-1], file.pages[0].databytecounts[-1]
    content = bytearray(path.read_bytes())
    content[offset : offset + num_bytes] = bytes(num_bytes)
    path.write_bytes(content)
    with pytest.raises(BadImage, match=r"a\.svs: cannot be decoded"):
        read_all(path)
    assert np.array_equal(open_image(path).read(Interval(0, 64), Interval(0, 64)), pixels[:64, :64])


def test_a_picture_above_pillows_limit_is_named_and_the_limit_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 500)
    PIL.Image.new("RGB", (40, 50)).save(tmp_path / "a.png")
    with pytest.raises(BadImage, match=r"is too large to be decoded whole .*: convert it to a tiled TIFF"):
        open_image(tmp_path / "a.png")
    assert PIL.Image.MAX_IMAGE_PIXELS == 500


def test_missing_packages_say_what_to_install(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", noise_image(64, 64), photometric="rgb")
    (tmp_path / "a.svs").write_bytes(b"a slide")
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    monkeypatch.setattr("mpi4dl.datasets.reader_process.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"reading TIFF needs tifffile; run .* -m pip install tifffile imagecodecs"):
        open_image(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"reading \.svs needs openslide; run .* openslide-python openslide-bin"):
        open_image(tmp_path / "a.svs")


def test_a_pipe_is_not_waited_for(tmp_path):
    for name in ("a.png", "a.tif", "a.svs"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(BadImage, match="cannot be read: it is no regular file, but a pipe, a device or a folder"):
            open_image(tmp_path / name)
    (tmp_path / "b.png").symlink_to("/dev/zero")
    with pytest.raises(BadImage, match="is no regular file"):
        open_image(tmp_path / "b.png")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ValueError("box can't exceed original image size"), "cannot be decoded: box can't exceed original image size"),
        (struct.error("unpack requires 4 bytes"), "cannot be decoded: unpack requires 4 bytes"),
        (ZeroDivisionError(), "cannot be decoded: ZeroDivisionError"),
        (RecursionError("too deep"), "cannot be decoded: too deep"),
        (MemoryError(), "needs more memory than there is: it is damaged, or too large"),
        (OSError(5, "Input/output error"), "cannot be read: Input/output error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_reader_stumbles_over_is_a_bad_image(tmp_path, monkeypatch, problem, reason):
    def stumble(*_):
        raise problem

    path = tmp_path / "a.png"
    PIL.Image.fromarray(noise_image(HEIGHT, WIDTH)).save(path)
    image = open_image(path)
    monkeypatch.setattr("PIL.Image.Image.crop", stumble)
    with pytest.raises(BadImage, match=re.escape(reason)):
        image.read(*whole(HEIGHT, WIDTH - 1))
    monkeypatch.setattr("PIL.Image.open", stumble)
    with pytest.raises(BadImage, match=re.escape(reason)):
        open_image(path)


def test_a_reader_that_gives_other_pixels_than_asked_for_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    PIL.Image.fromarray(noise_image(HEIGHT, WIDTH)).save(path)
    image = open_image(path)
    monkeypatch.setattr(files, "in_strips", lambda *_: np.zeros((1, 1, 3), np.uint8))
    with pytest.raises(BadImage, match=r"gives uint8 pixels of shape \(1, 1, 3\) for"):
        image.read(*whole(HEIGHT, WIDTH))


@pytest.mark.parametrize(
    ("ending", "compression", "library"), [("svs", "zlib", "openslide"), ("tif", "jpegxr", "tifffile")]
)
def test_a_file_that_ends_its_process_is_named_and_the_next_one_is_read(
    tmp_path, monkeypatch, ending, compression, library
):
    pixels = noise_image(300, 200)
    first, second = (tmp_path / f"{name}.{ending}" for name in "ab")
    for path in (first, second):
        tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", compression=compression)
    dying = tmp_path / "dying.py"
    line = "        path, wanted ="
    program = Path(reader_process.__file__).with_name("child_program.py").read_text()
    dying.write_text(program.replace(line, f"        if b'{first.name}' in line: os.abort()\n{line}"))
    monkeypatch.setattr(reader_process, "_PROGRAM", dying)
    monkeypatch.setattr(reader_process, "_idle", {})
    with pytest.raises(BadImage, match=rf"a\.{ending}: .*cannot be decoded: {library} ended its process by SIGABRT"):
        read_all(first)
    assert np.array_equal(read_all(second), tifffile.imread(second))


def test_threads_ask_the_same_child_one_after_the_other(tmp_path, monkeypatch):
    """Which opens a file that was replaced meanwhile anew; of a child that has died there is another one."""
    path, started, make = tmp_path / "a.svs", [], reader_process._Child
    monkeypatch.setattr(reader_process, "_Child", lambda library: started.append(make(library)) or started[-1])
    monkeypatch.setattr(reader_process, "_idle", {})

    def write(seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (100, 80, 3), np.uint8)
        tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", compression="zlib")
        return pixels

    write(0)
    image = open_image(path)
    for seed in range(3):
        pixels = write(seed)
        with ThreadPoolExecutor(1) as thread:
            assert np.array_equal(thread.submit(image.read, *whole(100, 80)).result(), pixels)
    assert len(started) == 1
    started[0].process.kill()
    os.waitid(os.P_PID, started[0].process.pid, os.WEXITED | os.WNOWAIT)
    with ThreadPoolExecutor(2) as threads:
        both = threads.map(lambda _: image.read(*whole(100, 80)), range(2))
        assert all(np.array_equal(found, pixels) for found in both)
    assert len(started) in (2, 3)


def test_copies_of_a_process_ask_children_of_their_own(tmp_path, monkeypatch):
    """As workers of a DataLoader are copies of a process that has looked at the files."""
    monkeypatch.setattr(reader_process, "_idle", {})
    images = []
    for seed in range(2):
        path, pixels = tmp_path / f"{seed}.tif", np.random.default_rng(seed).integers(0, 256, (90, 80, 3), np.uint8)
        tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", compression="jpegxr")
        images.append((open_image(path), tifffile.imread(path)))

    right = multiprocessing.Array("i", 5)

    def count_right(number):
        image, pixels = images[number % 2]
        right[number] = sum(np.array_equal(image.read(*whole(90, 80)), pixels) for _ in range(40))

    count_right(0)
    copies = [multiprocessing.get_context("fork").Process(target=count_right, args=(i,)) for i in range(1, 5)]
    for copy in copies:
        copy.start()
    count_right(0)
    for copy in copies:
        copy.join()
    assert list(right) == [40] * 5


def test_a_large_picture_is_decoded_once_and_not_copied(tmp_path, monkeypatch):
    side = 3000
    PIL.Image.new("RGB", (side, side), (1, 2, 3)).save(tmp_path / "a.png")
    decoded = []
    load = PIL.Image.open
    monkeypatch.setattr("PIL.Image.open", lambda path: decoded.append(path) or load(path))
    image = open_image(tmp_path / "a.png")
    tracemalloc.start()
    for top in range(0, side, 1000):
        image.read(Interval(top, top + 1000), Interval(0, side))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(decoded) == 1
    assert peak < 2 * 1000 * side * 3  # beside Pillow's own: the box and a strip


def test_nothing_is_said_of_what_pillow_warns_of(tmp_path):
    PIL.Image.fromarray(noise_image(HEIGHT, WIDTH)).save(tmp_path / "a.png")
    program = f"""if True:
        import pathlib
        import PIL.Image
        from mpi4dl.datasets import open_image
        from mpi4dl.geometry import Interval
        PIL.Image.MAX_IMAGE_PIXELS = {HEIGHT * WIDTH - 1}  # it refuses twice as many
        image = open_image(pathlib.Path({str(tmp_path / "a.png")!r}))
        print(image.read(*(Interval(0, side) for side in image.size)).shape)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert (done.stdout.strip(), done.stderr) == (str((HEIGHT, WIDTH, 3)), "")
