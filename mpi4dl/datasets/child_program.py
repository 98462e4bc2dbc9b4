"""A program that reads for `reader_process.py`: lines with a path and a question come in, answers go out.

The bytes of an answer are in a file in memory, which both processes have: of a pipe they would wait for each other.

Some files are kept open. One that was replaced meanwhile is opened anew.
It is run by its path, with the name of what reads and that file's descriptor, and imports nothing of the package, so
that it starts in a moment. It ends when its input does.
"""

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

Answer = tuple[dict[str, Any], bytes]
Read = Callable[[Any], Answer]  # what is read of an open file
OPAQUE = b"\xff"


def slide(path: str) -> Read:
    """The vendor of a slide, its levels and properties with its ICC profile, or the bytes of a box of a level.

    A box is its left and upper side in pixels of level 0, its level, and its width and height in pixels of that. Its
    bytes are RGB where all of it is opaque, and RGBA elsewhere.
    """
    import openslide

    opened: Any = None

    def read(box: list[int] | str | None) -> Answer:
        nonlocal opened
        if isinstance(box, str):
            return {"vendor": openslide.OpenSlide.detect_format(path)}, b""
        opened = opened or openslide.OpenSlide(path)
        if box is None:
            answer = {"levels": opened.level_dimensions, "downsamples": opened.level_downsamples}
            profile = getattr(opened, "color_profile", None)
            return answer | {"properties": dict(opened.properties)}, profile.tobytes() if profile else b""
        left, top, level, width, height = box
        pixels = opened.read_region((left, top), level, (width, height))
        opaque = pixels.tobytes("raw", "A") == OPAQUE * (width * height)
        return {}, pixels.tobytes("raw", "RGB" if opaque else "RGBA")

    return read


MOST_OF_TILE = 64  # bytes of memory for each sample of a tile while it is decoded
SPARE_BYTES = 1 << 28


def tiff(path: str) -> Read:
    """The samples of one segment (a tile or a strip) of a page, or of all.

    The page is named by its place in the tree of pages: [2] is the third one, [2, 0] its first SubIFD.
    """
    import tifffile

    def read(wanted: tuple[list[int], int | None]) -> Answer:
        place, index = wanted
        with tifffile.TiffFile(path, _multifile=False) as file:
            pages: Any = file.pages
            for number in place:
                page = pages[number]
                pages = page.pages
            # Damaged tiles may ask for any number of bytes: this process gets so many more than it has.
            with open("/proc/self/status") as status:
                (held,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
            whole = 0 if index is not None else page.nbytes
            most = held + SPARE_BYTES + MOST_OF_TILE * math.prod(page.keyframe.chunks) + 2 * whole
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(
                resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
            )
            if index is None:
                samples = page.asarray(maxworkers=1)
            else:
                data = os.pread(file.filehandle.fileno(), page.databytecounts[index], page.dataoffsets[index])
                samples = page.decode(data, index, jpegtables=page.jpegtables)[0]
        return {"shape": samples.shape, "dtype": samples.dtype.str}, samples.tobytes()

    return read


def features(path: str) -> Read:
    """What a file of HDF5 has, all of its dataset `coords`, or some rows of `features`.

    Of each dataset: its shape, dtype, chunks and stored bytes, whether it lies in another file, and its attributes. A
    link is followed by looking at what is behind it, which may be a pipe that nobody writes to: links are named alone.
    """
    import h5py

    def plain(value: Any) -> Any:
        if hasattr(value, "size") and getattr(value, "shape", ()) != ():
            value = value.flat[0] if value.size == 1 else value.tolist()
        value = value.item() if hasattr(value, "item") else value
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        return value if isinstance(value, bool | int | float | str | list) else None

    def facts(file: Any, name: str) -> dict[str, Any] | None:
        link = file.get(name, getlink=True)
        found = file.get(name) if isinstance(link, h5py.HardLink) else None
        if not isinstance(found, h5py.Dataset):
            return None
        return {
            "shape": found.shape or (),
            "kind": found.dtype.kind,
            "itemsize": found.dtype.itemsize,
            "chunks": found.chunks or (),
            "stored": found.id.get_storage_size(),
            "elsewhere": bool(found.external or found.is_virtual),
            "attributes": {str(key): plain(value) for key, value in found.attrs.items()},
        }

    def read(wanted: list[Any] | None) -> Answer:
        with h5py.File(path, "r", locking=False) as file:
            if wanted is None:
                names = [name for name, _ in zip(file, range(5), strict=False)]
                answer = {name: facts(file, name) for name in ("features", "coords") if name in file.keys()}  # noqa: SIM118
                return {"names": names, "datasets": answer, "settings": plain(file.attrs.get("mpi4dl"))}, b""
            name, *rows = wanted
            dataset = file[name]
            part = slice(*rows) if rows else slice(None)
            found = dataset[0, part] if dataset.ndim == 3 else dataset[part]
            dtype = "f8" if name == "coords" else found.dtype.newbyteorder("<").str
            if found.dtype.kind == "f" and found.dtype.itemsize > 8:
                dtype = "f8"
            return {"shape": found.shape, "dtype": dtype}, found.astype(dtype).tobytes()

    return read


MOST_OPEN = 4  # files that are kept open

# Some damaged files are read without end: CPU seconds for a header, and for a part of the content.
HEADER_CPU_SECONDS, PART_CPU_SECONDS = 20, 300

OPENERS: dict[str, Callable[[str], Read]] = {"openslide": slide, "tifffile": tiff, "h5py": features}


def main(library: str, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # damaged files are no crashes to look into
    # Answers go to a copy of stdout: whatever else a library prints goes nowhere.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    problem = None
    try:
        __import__(library)
    except Exception as error:  # it is not there, or the C library below it is not
        problem = str(error)
    answers.write(json.dumps(problem).encode() + b"\n")
    answers.flush()

    opened: dict[tuple[Any, ...], Read] = {}  # by path and state of the file; the last one was read last
    for line in sys.stdin.buffer:
        path, wanted = json.loads(line)
        # At the end of which the process ends.
        signal.setitimer(signal.ITIMER_PROF, HEADER_CPU_SECONDS if wanted is None else PART_CPU_SECONDS)
        try:
            now = os.stat(path)
            state = (path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
            read = opened.pop(state, None)
            if read is None or wanted is None:
                read = None
                while len(opened) >= MOST_OPEN:
                    del opened[next(iter(opened))]
                read = OPENERS[library](path)
            answer, content = read(wanted)
            opened[state] = read
        except Exception as error:
            # An error of one tile is the slide's for ever after: it is opened anew.
            answer, content = {"error": str(error) or type(error).__name__}, b""
        with open(memory, "wb", closefd=False) as file:
            file.seek(0)
            file.write(content)
        answers.write(json.dumps(answer | {"bytes": len(content)}).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
