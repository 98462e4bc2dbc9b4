"""Small checkpoints made without an engine, by threads that stand for ranks; and sealed again after a forger's work."""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpi4dl.checkpoints.json_values import SavedRandomness, encode
from mpi4dl.checkpoints.manifest import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Job,
    Writing,
    Written,
    manifest_bytes,
    name_of,
)
from mpi4dl.checkpoints.saved import slots_of
from mpi4dl.checkpoints.storage import LENGTH_BYTES, Range, Spec, StorageLayout
from mpi4dl.parallel.replicas.buckets import Shard

NUM_RANKS = 3
WEIGHT = torch.arange(12, dtype=torch.float32)


def job(step: int, rank: int, num_ranks: int = NUM_RANKS, extra: Mapping[str, Any] | None = None) -> Job:
    """A weight of which every rank has a part, and a buffer of rank 1."""
    model = StorageLayout.of({"weight": Spec((3, 4), torch.float32), "count": Spec((), torch.int64)})
    optimizer = StorageLayout.of({"momentum/weight": Spec((3, 4), torch.float32)})
    start, stop = (12 * i // num_ranks for i in (rank, rank + 1))
    pieces = [Shard("weight", start, WEIGHT[start:stop] + step)]
    momentum = [Shard("momentum/weight", start, -WEIGHT[start:stop])]
    if rank == 1 % num_ranks:
        pieces.append(Shard("count", 0, torch.tensor([step])))
    state = {
        "step": step,
        "plan": "a plan",
        "seed": 0,
        "num_runs": step,
        "scaler": {"scale": 2.0, "finite_steps": 1},
        "optimizer": {"class": "SGD", "groups": [{"lr": 0.1, "betas": encode((0.9, 1))}], "slots": slots_of(optimizer)},
        "extra": encode({} if extra is None else extra),
    }
    mine = SavedRandomness.now()._asdict() | {"norms": []}
    return Job(step, {MODEL: (model, pieces), OPTIMIZER: (optimizer, momentum)}, state, mine)


def start(folder: Path, step: int, keep: int = 2, **options: Any) -> list[Writing]:
    return [Writing(folder, job(step, rank, **options), rank, NUM_RANKS, keep) for rank in range(NUM_RANKS)]


def write(folder: Path, step: int, keep: int = 2, **options: Any) -> Path:
    ranks = start(folder, step, keep, **options)
    for rank in ranks:
        assert rank.written.wait(600)
    for rank in ranks:
        rank.finish()
        assert rank.error is None
    return folder / name_of(step)


def seal(path: Path) -> None:
    """Give a checkpoint that was edited a manifest with the right sizes and checksums."""
    files = {name: (path / name).read_bytes() for name in FILES}
    written = {name: Written(len(data), [Range(0, len(data), zlib.crc32(data))]) for name, data in files.items()}
    (path / MANIFEST).write_bytes(manifest_bytes(written))


def header_of(path: Path) -> Any:
    """The header of a file of safetensors, as JSON."""
    data = path.read_bytes()
    return json.loads(data[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")])


def edit_header(path: Path, edit: Callable[[Any], bytes]) -> None:
    """Replace the header of a file of safetensors; the values stay where they are behind it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    text = edit(header_of(path))
    path.write_bytes(len(text).to_bytes(LENGTH_BYTES, "little") + text + data[LENGTH_BYTES + length :])


def flip(path: Path, place: int = -2) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def another_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
