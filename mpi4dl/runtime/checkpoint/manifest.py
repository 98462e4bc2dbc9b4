"""Which checkpoints a folder holds, and whether they are whole: the manifest has a checksum of every byte.

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
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4dl.runtime.checkpoint.storage import Damaged, Range, Reader, verify

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # the folder of a run that holds them
FORMAT = 1


class Written(NamedTuple):
    """The size of a file, and checksums of ranges that cover it."""

    size: int
    ranges: Sequence[Range]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders that are named like checkpoints, newest first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def candidates_at(path: Path) -> list[Path]:
    """The checkpoints that `path` stands for, the newest first: itself, or those in it, or those of a run."""
    if (path / MANIFEST).exists() or re.fullmatch(r"step-\d{8,}", path.name):
        return [path]
    return checkpoints_in(path / CHECKPOINTS) or checkpoints_in(path)


def manifest_bytes(files: Mapping[str, Written]) -> bytes:
    """What manifest.json holds; it has a checksum of its own."""
    return json.dumps({"format": FORMAT, "crc32": _crc32(files), "files": files}).encode()


def _crc32(files: Any) -> int:
    return zlib.crc32(json.dumps(files).encode())


def read_manifest(path: Path) -> dict[str, Written]:
    """Raises Damaged if it is not there, or not as it was written."""
    try:
        found = json.loads((path / MANIFEST).read_bytes())
        if found["format"] != FORMAT:
            raise Damaged(f"its format is {found['format']}, but this version of mpi4dl reads {FORMAT}")
        if found["crc32"] != _crc32(found["files"]):
            raise Damaged(f"{MANIFEST} is not as it was written")
        files = found["files"].items()
        return {name: Written(size, [Range(*each) for each in ranges]) for name, (size, ranges) in files}
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None


def check(path: Path, part: int = 0, parts: int = 1) -> None:
    """Raise Damaged unless the checkpoint is whole: sizes, and part number `part` of the checksums out of `parts`."""
    try:
        manifest = read_manifest(path)
        for name in (MODEL, OPTIMIZER, STATE):
            if name not in manifest:
                raise Damaged(f"{MANIFEST} does not name {name}")
        for name, written in manifest.items():
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            size = (path / name).stat().st_size
            if size != written.size:
                raise Damaged(f"{name} has {size:,} bytes instead of {written.size:,}")
        for name, written in manifest.items():
            verify(path / name, written.ranges[part::parts])
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from None


class Saved:
    """A checkpoint that was found whole, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = json.loads((path / STATE).read_bytes())
        self.model = Reader(path / MODEL)
        self.optimizer = Reader(path / OPTIMIZER)

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()
        self.optimizer.close()


def newest_whole(candidates: Sequence[Path], comm: "Communicator | None" = None) -> tuple[Path | None, list[str]]:
    """The first of these checkpoints that is whole, and what is wrong with those before it. Collective over `comm`.

    Each rank of `comm` verifies a share of every checkpoint; `candidates` of rank 0 count.
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    skipped: list[str] = []
    for path in candidates if comm is None else comm.broadcast_object(list(candidates)):
        problem = None
        try:
            check(path, rank, size)
        except Damaged as damaged:
            problem = str(damaged)
        problems = [problem] if comm is None else comm.all_gather_object(problem)
        problem = next((text for text in problems if text is not None), None)
        if problem is None:
            return path, skipped
        skipped.append(f"{path}: {problem}")
    return None, skipped
