"""The way of a steady convolution through the package: how many calls, and the files that the architecture lists."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F

import mpi4dl
from mpi4dl.comm import Communicator
from mpi4dl.geometry import GridShape
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import shard
from mpi4dl.parallel.spatial.tensor import guards
from tests.pool.ranks import Ranks

PACKAGE = Path(mpi4dl.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST_CALLS = {"forward": 60, "backward": 57}
TURNS = 12  # who waits for a slow rank looks several times


@contextmanager
def followed() -> Iterator[list[str]]:
    """The file of each function of the package that is called within, relative to the package."""
    files: list[str] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.append(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(called)
    try:
        yield files
    finally:
        sys.setprofile(None)


def ways(comm: Communicator) -> dict[str, list[str]]:
    """The files through which the forward and the backward pass of a 3x3 convolution go, once they are planned.

    Also where tests before have imported `own_loop`, whose guards are asked about every call from then on.
    """
    x = shard(torch.randn(1, 8, 32, 32), Grid.of(comm, GridShape(1, 1, 2)))
    weight, shortest = torch.randn(8, 8, 3, 3, requires_grad=True), dict[str, list[str]]()
    known, guards[:] = guards[:], []
    for turn in range(3 + TURNS):
        leaf = x.like(x.local.detach().clone().requires_grad_())
        with followed() as forward:
            y = F.conv2d(leaf, weight, None, 1, 1)
        part, gradient = y.local, torch.ones_like(y.local)  # type: ignore[attr-defined]
        with followed() as backward:
            part.backward(gradient)
        for name, files in (("forward", forward), ("backward", backward)):
            if turn >= 3 and (name not in shortest or len(files) < len(shortest[name])):
                shortest[name] = files
    guards[:] = known
    return shortest


def test_a_convolution_takes_the_way_that_the_page_lists(ranks: Ranks) -> None:
    section = re.search(r"^## One convolution, file by file\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    listed = re.findall(r"^\| `([\w/.]+)` \|", section[1], re.MULTILINE)
    found = min(ranks(2).run(ways), key=lambda each: sum(map(len, each.values())))
    for name, most in MOST_CALLS.items():
        assert len(found[name]) <= most, (name, len(found[name]), most)
    assert listed == list(dict.fromkeys(found["forward"] + found["backward"]))
