"""A safetensors file that many ranks write together: its layout is known ahead, so each writes its own byte ranges.

    8 bytes: length of the header | header: JSON with every value's dtype, shape and bytes | values, one after the other
    rank 0 ----------------------------------------------------------> rank 2 -----> rank 0 -> rank 1 ------------->

A value may be written, and read, in pieces: elements of the flattened whole. The format is described at
https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from mpi4dl._files import open_regular
from mpi4dl._numbers import MOST, Damaged, typed
from mpi4dl.checkpoints.json_values import parse
from mpi4dl.parallel.replicas.buckets import Shard

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
RANGE_BYTES = 64 << 20  # of one checksum at most, so that ranks can share the work of verifying a large value
READ_BYTES = 4 << 20
METADATA = "__metadata__"
MOST_BYTES = max(dtype.itemsize for dtype in NAMES)


class Spec(NamedTuple):
    """The description of a value before it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The dtype, as safetensors calls it."""
        return NAMES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


class _Entry(NamedTuple):
    """The description of a value in a header."""

    dtype: Annotated[str, DTYPES.__contains__, f"one of {', '.join(DTYPES)}"]
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Range(NamedTuple):
    """Bytes of a file, half-open, and their checksum."""

    start: int
    stop: int
    crc32: int


@dataclass(frozen=True)
class StorageLayout:
    """Where the values of a file lie: `offsets` are where each begins, in bytes from the file's beginning."""

    specs: Mapping[str, Spec]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]
    header: bytes
    size: int

    @classmethod
    def of(cls, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> "StorageLayout":
        """The layout of these values. Wide dtypes come first, so that every value is aligned.

        Raises ValueError for a dtype that safetensors does not have.
        """
        for name, spec in specs.items():
            if spec.dtype not in NAMES:
                raise ValueError(f"{name} is {spec.dtype}, which safetensors cannot hold: only {', '.join(DTYPES)}")
        begin, offsets = 0, {}
        for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
            offsets[name] = begin
            begin += specs[name].nbytes
        entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
        for name, (shape, dtype) in specs.items():
            where = [offsets[name], offsets[name] + specs[name].nbytes]
            entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": where}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        header = len(text).to_bytes(LENGTH_BYTES, "little") + text
        absolute = {name: len(header) + offset for name, offset in offsets.items()}
        return cls(dict(specs), absolute, dict(metadata or {}), header, len(header) + begin)

    @classmethod
    def read(cls, file: BinaryIO, name: str) -> "StorageLayout":
        """The layout of an open file. Raises OSError, and Damaged unless its values fill it, one behind the other."""
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(os.pread(file.fileno(), LENGTH_BYTES, 0), "little")
        if not 0 < length <= size - LENGTH_BYTES:
            raise Damaged(f"{name}: this is no safetensors file, or it is cut")
        begin = LENGTH_BYTES + length
        text = b"".join(pread(file, LENGTH_BYTES, begin))
        where = f"{name}: its header"
        plain = typed(dict[str, Any], parse(text, where), where)
        metadata = typed(dict[str, str], plain.pop(METADATA, {}), METADATA)
        entries, at = typed(dict[str, _Entry], plain, where), 0
        specs = {key: Spec(entry.shape, DTYPES[entry.dtype]) for key, entry in entries.items()}
        for key, (_, shape, (first, last)) in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if math.prod(max(size, 1) for size in shape) > MOST // MOST_BYTES:
                raise Damaged(f"{where}: {key!r} is {[*shape]}, but must be the shape of a tensor that could be")
            spec = specs[key]
            if last - first != spec.nbytes:
                raise Damaged(f"{where}: {key!r} has bytes {first} to {last}, but {spec} has {spec.nbytes:,} of them")
            if first != at:
                raise Damaged(f"{where}: {key!r} begins at byte {first}, but the value before it ends at {at}")
            at = last
        if begin + at != size:
            raise Damaged(f"{name} has {size:,} bytes, but its header tells of {begin + at:,}")
        offsets = {key: begin + entry.data_offsets[0] for key, entry in entries.items()}
        return cls(specs, offsets, metadata, length.to_bytes(LENGTH_BYTES, "little") + text, size)

    def place(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The bytes of the elements from `start` up to `stop` of a flattened value."""
        width, offset = self.specs[name].dtype.itemsize, self.offsets[name]
        return offset + start * width, offset + stop * width


def write(
    path: Path,
    layout: StorageLayout,
    pieces: Iterable[Shard],
    *,
    header: bool,
    go_on: Callable[[], bool] = lambda: True,
) -> list[Range]:
    """Write this rank's pieces, and the header if that is its task, into a file that others write to as well; flush it.

    Returns what was written, neighbours in one range. `go_on` is asked between ranges; once it says no, no more is
    written. Raises OSError.
    """
    blocks = [(0, memoryview(layout.header))] if header else []
    for name, start, value, *_ in pieces:
        if value.numel():
            blocks.append((layout.place(name, start, start)[0], value.view(torch.uint8).numpy().data))
    blocks.sort(key=lambda block: block[0])
    found: list[Range] = []
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(file, layout.size)  # the same size by every rank, in any order
        for offset, whole in blocks:
            for begin in range(0, len(whole), RANGE_BYTES):
                if not go_on():
                    return found
                part = whole[begin : begin + RANGE_BYTES]
                write_all(file, part, offset + begin)
                _append(found, offset + begin, part)
        os.fsync(file)
    finally:
        os.close(file)
    return found


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of it: the system may take less than it is given."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _append(found: list[Range], start: int, part: memoryview) -> None:
    stop = start + len(part)
    last = found[-1] if found else Range(start, start, 0)
    if found and last.stop == start and stop - last.start <= RANGE_BYTES:
        found[-1] = Range(last.start, stop, zlib.crc32(part, last.crc32))
    else:
        found.append(Range(start, stop, zlib.crc32(part)))


def uncovered(ranges: Iterable[Range], size: int) -> str | None:
    """Which byte of a file was not written, or was twice; None if every one was written once."""
    at = 0
    for start, stop, _ in sorted(ranges):
        if start != at:
            return f"byte {min(start, at)} was {'not written' if start > at else 'written twice'}"
        at = stop
    return None if at == size else f"byte {at} of {size} was not written"


class Reader(AbstractContextManager["Reader"]):
    """Reads pieces of the values of a file."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_regular(path)
        try:
            self.layout = StorageLayout.read(self._file, path.name)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements from `start` up to `stop` of a flattened value: 1-D, on the host. Raises OSError, Damaged."""
        shape, dtype = self.layout.specs[name]
        begin, end = self.layout.place(name, start, math.prod(shape) if stop is None else stop)
        found = torch.empty(end - begin, dtype=torch.uint8)
        view, at = found.numpy().data, begin
        for part in pread(self._file, begin, end):
            view[at - begin : at - begin + len(part)] = part
            at += len(part)
        if at < end:
            raise Damaged(f"{self.path.name} is cut: it ends at byte {at}")
        return found.view(dtype)

    def whole(self, name: str) -> Tensor:
        return self.read(name).reshape(self.layout.specs[name].shape)


def pread(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """The bytes from `start` to `stop` of an open file, in blocks; fewer if it ends before."""
    while start < stop:
        part = os.pread(file.fileno(), min(READ_BYTES, stop - start), start)
        if not part:
            return
        yield part
        start += len(part)


def verify(path: Path, ranges: Iterable[Range]) -> None:
    """Raise Damaged at the first range that does not hold what was written to it, and OSError."""
    with open_regular(path) as file:
        for start, stop, expected in ranges:
            crc32 = 0
            for part in pread(file, start, stop):
                crc32 = zlib.crc32(part, crc32)
            if crc32 != expected:
                raise Damaged(f"{path.name}: bytes {start} to {stop} are not those that were written")


def flush_folder(path: Path) -> None:
    """Put the names in a folder on disk, so that a rename outlives a crash."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
