"""The storage of values: files that safetensors reads, written in pieces, and whatever happens to one is noticed."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mpi4dl._files import Replacement, write_durably
from mpi4dl._numbers import Damaged
from mpi4dl.checkpoints import storage
from mpi4dl.checkpoints.storage import DTYPES, Range, Reader, Spec, StorageLayout, uncovered, verify, write
from mpi4dl.parallel.replicas.buckets import Shard
from tests.checkpoints.made import flip
from tests.support.brute_force import patient


def value_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def layout_of(values: dict[str, Tensor], **options: Any) -> StorageLayout:
    return StorageLayout.of({name: Spec(tuple(value.shape), value.dtype) for name, value in values.items()}, **options)


def pieces_of(values: dict[str, Tensor], parts: int = 1, part: int = 0) -> list[Shard]:
    """Every value cut into as many parts, of which these are number `part`."""
    found = []
    for name, value in values.items():
        start, stop = (value.numel() * i // parts for i in (part, part + 1))
        found.append(Shard(name, start, value.reshape(-1)[start:stop].clone()))
    return found


def save(path: Path, values: dict[str, Tensor], parts: int = 1, **options: Any) -> tuple[StorageLayout, list[Range]]:
    """Write a file by several writers, the last one first."""
    layout = layout_of(values, **options)
    ranges = []
    for part in reversed(range(parts)):
        ranges += write(path, layout, pieces_of(values, parts, part), header=part == 0)
    return layout, sorted(ranges)


MIXED = {
    "flag": value_of((3,), torch.bool),
    "weight": value_of((4, 3, 2), torch.float64, 1),
    "half": value_of((5,), torch.bfloat16, 2),
    "step": value_of((), torch.float32, 3),
    "none": value_of((0, 4), torch.float32),
}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("parts", [1, 3])
def test_safetensors_reads_what_several_writers_wrote(tmp_path: Path, parts: int) -> None:
    layout, ranges = save(tmp_path / "file", MIXED, parts, metadata={"tied": "weight"})
    assert_equal(load_file(tmp_path / "file"), MIXED)
    with safe_open(str(tmp_path / "file"), "pt") as opened:
        assert opened.metadata() == {"tied": "weight"}
    assert (tmp_path / "file").stat().st_size == layout.size
    assert uncovered(ranges, layout.size) is None
    verify(tmp_path / "file", ranges)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {"odd": value_of((3,), torch.uint8), "value": value_of((3, 5), dtype)}
    layout, _ = save(tmp_path / "file", values, parts=2)
    assert layout.offsets["value"] % dtype.itemsize == 0
    with Reader(tmp_path / "file") as reader:
        assert_equal({name: reader.whole(name) for name in values}, values)
    if dtype is not torch.complex64:  # older versions of safetensors do not know it
        assert_equal(load_file(tmp_path / "file"), values)


def test_what_safetensors_cannot_hold_is_named() -> None:
    with pytest.raises(ValueError, match=r"^phase is torch.complex128, which safetensors cannot hold: only F64, "):
        StorageLayout.of({"phase": Spec((2,), torch.complex128)})


def test_a_file_of_safetensors_is_read(tmp_path: Path) -> None:
    save_file(MIXED, str(tmp_path / "file"), metadata={"a": "b"})
    with Reader(tmp_path / "file") as reader:
        assert reader.layout.metadata == {"a": "b"}
        assert_equal({name: reader.whole(name) for name in MIXED}, MIXED)


@patient
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_any_piece_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], parts: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any") / "file"
    kinds = [torch.float32, torch.int64, torch.bool, torch.float16]
    values = {f"v{i}": value_of((n,), data.draw(st.sampled_from(kinds)), i) for i, n in enumerate(lengths)}
    layout, ranges = save(path, values, parts)
    assert uncovered(ranges, layout.size) is None
    name = data.draw(st.sampled_from(sorted(values)))
    start = data.draw(st.integers(0, len(values[name])))
    stop = data.draw(st.integers(start, len(values[name])))
    with Reader(path) as reader:
        assert torch.equal(reader.read(name, start, stop), values[name][start:stop])


def test_neighbours_share_a_checksum_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": value_of((6,), torch.uint8), "b": value_of((6,), torch.uint8, 1)}
    layout = layout_of(values)
    begin = len(layout.header)
    monkeypatch.setattr(storage, "RANGE_BYTES", 8)
    found = write(tmp_path / "file", layout, pieces_of(values), header=False)
    assert found == [
        Range(begin, begin + 6, zlib.crc32(bytes(values["a"].tolist()))),
        Range(begin + 6, begin + 12, zlib.crc32(bytes(values["b"].tolist()))),
    ]
    monkeypatch.setattr(storage, "RANGE_BYTES", 4)
    cut = write(tmp_path / "file", layout, pieces_of(values), header=False)
    assert [(r.start - begin, r.stop - begin) for r in cut] == [(0, 4), (4, 6), (6, 10), (10, 12)]
    verify(tmp_path / "file", cut)


def test_a_system_that_writes_byte_by_byte_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1], offset))
    save(tmp_path / "file", MIXED, parts=2)
    assert_equal(load_file(tmp_path / "file"), MIXED)


def test_writing_ends_where_it_is_not_wanted_any_more(tmp_path: Path) -> None:
    answers = iter([True, False])
    found = write(tmp_path / "file", layout_of(MIXED), pieces_of(MIXED), header=True, go_on=lambda: next(answers))
    assert [r.start for r in found] == [0]


@pytest.mark.parametrize(
    ("ranges", "complaint"),
    [
        ([(0, 4), (4, 9)], None),
        ([(4, 9), (0, 4)], None),
        ([(1, 9)], "byte 0 was not written"),
        ([(0, 4), (5, 9)], "byte 4 was not written"),
        ([(0, 4), (3, 9)], "byte 3 was written twice"),
        ([(0, 4)], "byte 4 of 9 was not written"),
        ([], "byte 0 of 9 was not written"),
    ],
)
def test_every_byte_must_be_written_once(ranges: list[tuple[int, int]], complaint: str | None) -> None:
    assert uncovered([Range(start, stop, 0) for start, stop in ranges], 9) == complaint


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    layout, ranges = save(tmp_path / "file", MIXED, parts=2)
    for position in (0, 20, layout.size - 1):
        flip(tmp_path / "file", position)
        with pytest.raises(Damaged, match=r"^file: bytes \d+ to \d+ are not those that were written$"):
            verify(tmp_path / "file", ranges)
        flip(tmp_path / "file", position)
    verify(tmp_path / "file", ranges)


CUTS: dict[str, Callable[[StorageLayout], int]] = {
    "file: this is no safetensors file, or it is cut": lambda layout: len(layout.header) - 1,
    r"file has [\d,]+ bytes, but its header tells of ": lambda layout: layout.offsets["weight"] + 8,
}


@pytest.mark.parametrize("complaint", CUTS)
def test_a_file_that_is_cut_is_damaged(tmp_path: Path, complaint: str) -> None:
    layout, _ = save(tmp_path / "file", MIXED)
    os.truncate(tmp_path / "file", CUTS[complaint](layout))
    with pytest.raises(Damaged, match=f"^{complaint}"), Reader(tmp_path / "file") as reader:
        reader.whole("weight")


def test_a_header_that_is_no_json_is_damaged(tmp_path: Path) -> None:
    save(tmp_path / "file", MIXED)
    flip(tmp_path / "file", 8)
    with pytest.raises(Damaged, match=r"^file: its header cannot be read: "):
        Reader(tmp_path / "file")


def test_a_small_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    write_durably(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, b"new and longer")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("shared", [False, True])
def test_names_as_long_as_file_systems_allow_are_written(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / ("ü" * 125 + "a.png")
    with Replacement(path, shared) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
