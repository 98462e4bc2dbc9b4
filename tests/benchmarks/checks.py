"""What the tests of all benchmarks check alike: refused flags and pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest


def assert_refused(
    parse: Callable[[list[str]], Any], flags: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags end the command with exit code 2 and this message."""
    with pytest.raises(SystemExit) as stop:
        parse(list(flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def assert_picture(path: str | Path) -> None:
    """There is a PNG of a size that can be read."""
    with PIL.Image.open(path) as image:
        assert image.format == "PNG"
        assert min(image.size) > 200
