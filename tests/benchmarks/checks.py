"""What tests of benchmarks share: options of a benchmark, contestants with answers, and pictures."""

from pathlib import Path
from typing import Any

import PIL.Image

from benchmarks.common.options import Options, parse
from benchmarks.common.turns import Contestant


def options_of(name: str, flags: str = "") -> Options:
    """The options of a benchmark with these flags."""
    return parse(name, flags.split())


def answered(name: str, ranks: int, **values: list[Any]) -> Contestant:
    """A contestant that has had a turn for each of these values."""
    turns = zip(*values.values(), strict=True)
    return Contestant(name, ranks, [], [dict(zip(values, each, strict=True)) for each in turns])


def assert_picture(path: str | Path) -> None:
    """There is a PNG of a size that can be read."""
    with PIL.Image.open(path) as image:
        assert image.format == "PNG"
        assert min(image.size) > 200
