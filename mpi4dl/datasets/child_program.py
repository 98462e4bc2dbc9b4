"""A program that reads for `reader_process.py`: lines with a path and a question come in, answers and bytes go out.

It is run by its path, with the name of what reads, and imports nothing of the package, so that it starts in a moment.
It ends when its input does.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

Answer = tuple[dict[str, Any], bytes]
Read = Callable[[Any], Answer]  # what is read of an open file


def slide(path: str) -> Read:
    """The levels and properties of a slide with its ICC profile, or the RGBA bytes of a box of a level.

    A box is its left and upper side in pixels of level 0, its level, and its width and height in pixels of that.
    """
    import openslide

    opened = openslide.OpenSlide(path)

    def read(box: list[int] | None) -> Answer:
        if box is None:
            answer = {"levels": opened.level_dimensions, "downsamples": opened.level_downsamples}
            profile = getattr(opened, "color_profile", None)
            return answer | {"properties": dict(opened.properties)}, profile.tobytes() if profile else b""
        left, top, level, width, height = box
        return {}, opened.read_region((left, top), level, (width, height)).tobytes()

    return read


def tiff(path: str) -> Read:
    """The samples of one segment (a tile or a strip) of a page."""
    import tifffile

    def read(wanted: list[int]) -> Answer:
        number, index = wanted
        with tifffile.TiffFile(path, _multifile=False) as file:
            pages: Any = file.pages
            first, page = pages[0], pages[number]
            data = os.pread(file.filehandle.fileno(), page.databytecounts[index], page.dataoffsets[index])
            samples = first.decode(data, index, jpegtables=first.jpegtables)[0]
        return {"shape": samples.shape, "dtype": samples.dtype.str}, samples.tobytes()

    return read


MOST_OPEN = 4  # files that are kept open

OPENERS: dict[str, Callable[[str], Read]] = {"openslide": slide, "tifffile": tiff}


def main(library: str) -> None:
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

    opened: dict[str, Read] = {}  # the last one is the one that was read last
    for line in sys.stdin.buffer:
        path, wanted = json.loads(line)
        try:
            read = opened.pop(path, None)
            if read is None or wanted is None:
                read = None
                while len(opened) >= MOST_OPEN:
                    del opened[next(iter(opened))]
                read = OPENERS[library](path)
            answer, content = read(wanted)
            opened[path] = read
        except Exception as error:
            # An error of one tile is the slide's for ever after: it is opened anew.
            answer, content = {"error": str(error) or type(error).__name__}, b""
        answers.write(json.dumps(answer | {"bytes": len(content)}).encode() + b"\n")
        answers.write(content)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
