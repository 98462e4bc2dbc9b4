"""Which checkpoints a folder holds, and their manifests, which have a checksum of every byte.

checkpoints/step-00001200/
    model.safetensors       all weights and buffers, under the model's own names
    optimizer.safetensors   what the optimizer knows of each parameter, such as exp_avg/layer1.0.weight
    state.json              all else: step, epoch, options of the optimizer, schedule, random states
    manifest.json           sizes and checksums of the others
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import read_regular
from mpi4dl.checkpoints.node import Damaged, Machine, Unreadable, parse
from mpi4dl.checkpoints.storage import Range, uncovered

MODEL = "model.safetensors"
AVERAGE = "ema.safetensors"  # the average of a run's weights
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # the folder of a run that holds them
ABOUT = "mpi4dl"  # another one: what the weights are of
CLASSES = "classes"  # a key of the metadata of a run's weights
FILES = (MODEL, OPTIMIZER, STATE)
FORMAT = 2


class Written(NamedTuple):
    """The size of a file, and checksums of ranges that cover it."""

    size: int
    ranges: Sequence[Range]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name tells of; None if it is not named like a checkpoint."""
    found = re.fullmatch(r"step-(\d{8,})", path.name, re.ASCII)
    return None if found is None else int(found[1])


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders that are named like checkpoints, newest first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    found = {path: step for path in folder.iterdir() if (step := step_of(path)) is not None}
    return sorted(found, key=found.__getitem__, reverse=True)


def candidates_at(path: Path) -> list[Path]:
    """The checkpoints that `path` stands for, the newest first: itself, or those in it, or those of a run."""
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return [path]
    return checkpoints_in(path / CHECKPOINTS) or checkpoints_in(path)


def manifest_bytes(files: Mapping[str, Written]) -> bytes:
    """What manifest.json holds; it has a checksum of its own."""
    return json.dumps({"format": FORMAT, "crc32": _crc32(files), "files": files}).encode()


def _crc32(files: Any) -> int:
    return zlib.crc32(json.dumps(files).encode())


def read_manifest(path: Path) -> dict[str, Written]:
    """The files of a checkpoint. Raises OSError, Unreadable for another format, and Damaged for what nobody wrote."""
    try:
        root = parse(read_regular(path / MANIFEST), MANIFEST)
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    version, files = root.at("format").integer(), root.at("files")
    if version != FORMAT:
        raise Unreadable(
            f"its format is {version}, but this version of mpi4dl reads {FORMAT}: go on with the one that wrote it"
        )
    if root.at("crc32").integer() != _crc32(files.plain):
        raise Damaged(f"{MANIFEST} is not as it was written")
    entries = files.entries()
    for name in (*FILES, *entries):
        if name not in entries or name not in FILES:
            raise Damaged(f"{MANIFEST} {'names' if name in entries else 'does not name'} {name!r}")
    return {name: _written(name, entry) for name, entry in entries.items()}


def _written(name: str, entry: Machine) -> Written:
    size, ranges = entry.items(2)
    found = Written(size.integer(), [Range(*(n.integer() for n in each.items(3))) for each in ranges.items()])
    gap = uncovered(found.ranges, found.size)
    if gap is not None:
        raise Damaged(f"{MANIFEST} has no checksum of all of {name}: {gap}")
    return found
