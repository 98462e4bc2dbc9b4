"""A program that reads slides for `vendor.py`: lines with a path and a box come in, an answer and RGBA bytes go out.

It is run by its path and imports nothing of the package, so that it starts in a moment. It ends when its input does.
"""

import json
import os
import resource
import sys
from typing import Any


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # damaged files are no crashes to look into
    # Answers go to a copy of stdout: whatever else a library prints goes nowhere.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    problem = None
    try:
        import openslide
    except Exception as error:  # it is not there, or the C library below it is not
        problem = str(error)
    answers.write(json.dumps(problem).encode() + b"\n")
    answers.flush()

    path: str | None = None
    slide: Any = None
    for line in sys.stdin.buffer:
        wanted, box = json.loads(line)
        content = b""
        try:
            if wanted != path or box is None:
                path, slide = None, None
                slide = openslide.OpenSlide(wanted)
                path = wanted
            answer = {"size": slide.dimensions}
            if box is not None:
                left, top, width, height = box
                content = slide.read_region((left, top), 0, (width, height)).tobytes()
        except Exception as error:
            # An error of one tile is the slide's for ever after.
            path, slide = None, None
            answer, content = {"error": str(error) or type(error).__name__}, b""
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.write(content)
        answers.flush()


if __name__ == "__main__":
    main()
