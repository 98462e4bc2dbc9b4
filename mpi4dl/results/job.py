"""The one way to go on: a job over many items does those that are not done, in a folder of one set of settings.

    predictions.json     {"version": 1, "settings": {"fit": "auto", "weights": "...", ...}, "slides": {...}}
    predictions.jsonl    {"image": "a.png", ..., "file": {"bytes": 9, "crc32": "..."}, "files": {"masks/a.png": 120}}
    predictions.csv      the same records as a table, of jobs that want one

Settings are all options but those declared with `changes_results=False`, and what else decides all results, such as a
checksum of the weights. An item is done if its record is no error, its input (`file`) is what it was, and all `files`
that it names are there with their bytes.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import lock, make_folder, open_regular, remove, size_of, write_durably
from mpi4dl._wording import quoted
from mpi4dl.datasets.files import is_zarr
from mpi4dl.datasets.listed import files_at
from mpi4dl.options.declare import ConfigError, options_of
from mpi4dl.results.formats import (
    DamagedResult,
    Lines,
    Record,
    as_line,
    below,
    finite,
    read_lines,
    read_part,
    reading,
    table,
    table_row,
    write_object,
)
from mpi4dl.results.names import JobKind

SAMPLED_BYTES, SAMPLES = 1 << 12, 16
MOST_READ = 256  # files of a folder, or up to twice as many
Settings = Mapping[str, Any]


def settings_of(*configs: Any, **more: Any) -> Record:
    """Every option of these configs that may change results, as JSON gives it back; `more` decides results besides, or
    says it better than the option of this name.
    """
    options = [(item, config) for config in configs for item in options_of(type(config)).values()]
    found = {item.name: item.kind.raw(item.of(config)) for item, config in options if item.changes_results}
    return json.loads(json.dumps(finite({**found, **more})))


def difference(before: Settings, now: Settings) -> str:
    """The settings that differ, two at most, as messages say them; empty if none does."""
    other = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    shown = (name if " " in name else f"`{name}`" for name in other)
    return " and ".join(
        f"{show} {quoted(before.get(name))}, not {quoted(now.get(name))}"
        for name, show in zip(other[:2], shown, strict=False)
    )


def identity_of(path: Path) -> Record:
    """The identity of a file besides its name: its size, its time of writing, and a checksum of bytes from all over it.

    Of a folder that is a slide or an image it is that of all its files, of which a share is read if there are many.
    Raises OSError.
    """
    num_bytes = written = found = 0
    files = _files_of(path)
    for index, each in enumerate(files):
        if index % max(1, len(files) // MOST_READ):
            told = each.stat()
            num_bytes, written = num_bytes + told.st_size, max(written, told.st_mtime_ns)
            continue
        with open_regular(each) as file:
            told = os.fstat(file.fileno())
            num_bytes, written = num_bytes + told.st_size, max(written, told.st_mtime_ns)
            places = range(SAMPLES) if told.st_size > SAMPLED_BYTES * SAMPLES else ()
            if not places:
                found = zlib.crc32(file.read(), found)
            for number in places:
                at = (told.st_size - SAMPLED_BYTES) * number // (SAMPLES - 1)
                found = zlib.crc32(os.pread(file.fileno(), SAMPLED_BYTES, at), found)
    return {"bytes": num_bytes, "mtime_ns": written, "crc32": f"{found:08x}"}


def _files_of(path: Path) -> list[Path]:
    """All files of an input, also the chunks of Zarr."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if is_zarr(path) else files_at(path)


class ItemInput(NamedTuple):
    """The input of an item: its file, or folder, and what decides the result besides, such as a column of a table."""

    path: Path | None
    told: Mapping[str, Any] = {}

    def identity(self) -> Record:
        """Raises OSError."""
        return {**({} if self.path is None else identity_of(self.path)), **self.told}

    def is_as_in(self, before: Any) -> bool:
        """Whether this is what a record was made of; a small file was compared whole, and so may have been copied."""
        try:
            now = self.identity()
        except OSError:  # which opening it will say
            return False
        times = {"mtime_ns"} if now.get("bytes", 0) <= SAMPLED_BYTES * SAMPLES else set()
        return all(before.get(key) == now.get(key) for key in {*before, *now} - times)

    def state(self) -> tuple[int, int] | None:
        """Its size and its time of writing, which are found at once; None if it cannot be read."""
        try:
            told = [each.stat() for each in ([] if self.path is None else _files_of(self.path))]
        except OSError:
            return None
        return sum(each.st_size for each in told), max((each.st_mtime_ns for each in told), default=0)


class FolderJob:
    """A folder to which a job adds records of items. On one rank; it is locked up to `close`.

    Args:
        folder: made if it is not there.
        settings: those of `settings_of`.
        inputs: of each item its input; None: nothing tells it from others, and it is never done before.
        more: what NAME.json says besides, for readers, such as where slides are.
        columns: those of a table of the same records; None: there is none.
        writes: files that items may have; in a folder that is no job's they are somebody else's.
        overwrite: begin anew, whatever there is of this kind.
        dry_run: write nothing, and lock nothing.

    Attributes:
        done: the records of finished items, by item.
        dropped: records that hold no longer: of items that are gone or changed, or without their files.

    Raises:
        ConfigError: the folder has results of other settings, or of something else. OSError, ValueError: it cannot be
            written, or another job does so.
    """

    def __init__(
        self,
        folder: Path,
        kind: JobKind,
        settings: Settings,
        inputs: Mapping[str, ItemInput | None],
        *,
        more: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        writes: Sequence[Path] = (),
        overwrite: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.folder, self.kind, self.settings, self.inputs, self.columns = folder, kind, settings, inputs, columns
        self._more = more or {}
        self._about, self._lines, self._table = (folder / f"{kind.name}.{end}" for end in ("json", "jsonl", "csv"))
        self._open: list[Lines] = []
        self._lock: int | None = None
        if not dry_run:
            make_folder(folder)
            self._lock = lock(folder, "out")
        try:
            records = self._records(writes, overwrite)
            with reading(self._lines):
                self.done = {r[kind.key]: r for r in records if not overwrite and self._holds(r)}
                self.dropped = [r for r in records if "error" not in r and self.done.get(r[kind.key]) is not r]
                of_done, of_dropped = (
                    {n for r in some for n in r["files"]} for some in (self.done.values(), self.dropped)
                )
            if not dry_run:
                self._begin(of_dropped - of_done, overwrite)
        except BaseException:
            self.close()
            raise

    def _records(self, writes: Sequence[Path], overwrite: bool) -> list[Record]:
        """The records that there are, which are of the same settings. Raises ConfigError, OSError."""
        remedy = self.kind.remedy
        if not self._about.exists():
            there = next((path for path in (self._lines, *writes) if path.exists()), None)
            if there is not None and not overwrite:
                raise ConfigError(f"{there} was written by something else: {remedy}")
            return []
        try:
            other = difference(read_part(self._about, "settings"), self.settings)
            records = read_lines(self._lines) if self._lines.exists() else []
            with reading(self._lines):
                for record in records:
                    _ = record[self.kind.key], "error" in record or (record["file"], record["files"].items())
        except DamagedResult as problem:
            if overwrite:
                return []
            raise DamagedResult(f"{problem}; or {remedy}") from None
        begun = bool(records) or any(path.exists() for path in writes)
        if other and begun and not overwrite:
            raise ConfigError(f"{self.folder} has results with {other}: {remedy}")
        return records

    def _holds(self, record: Record) -> bool:
        if "error" in record:
            return False
        files = {below(self.folder, name): num_bytes for name, num_bytes in record["files"].items()}
        if not all(path.exists() and size_of(path) == num_bytes for path, num_bytes in files.items()):
            return False
        name = record[self.kind.key]
        own = self.inputs.get(name)
        return self.kind.keeps_others if name not in self.inputs else own is not None and own.is_as_in(record["file"])

    def _begin(self, stale: Iterable[str], overwrite: bool) -> None:
        """Remove the files that no record names any longer, and write the records that hold. Raises OSError."""
        for name in stale:
            remove(below(self.folder, name))
        if overwrite:  # before the settings change, which records of others must never outlive
            self._lines.unlink(missing_ok=True)
        write_object(self._about, {"settings": self.settings, **self._more})
        write_durably(self._lines, b"".join(map(as_line, self.done.values())))
        self._open = [Lines(self._lines)]
        if self.columns is not None:
            write_durably(self._table, table(self.columns, [*self.done.values()]))
            self._open.append(Lines(self._table))
        self._begun = {n: i.state() for n, i in self.inputs.items() if i is not None and n not in self.done}

    def add(self, record: Record, files: Iterable[Path] = ()) -> Record:
        """Add the record of an item, for which these files were written; it is on disk when this returns it.

        An item whose input changed since this job began has an error instead. Raises OSError.
        """
        name = record[self.kind.key]
        own = self.inputs.get(name)
        if "error" not in record and own is not None and self._begun.get(name) != own.state():
            record = {self.kind.key: name, "error": f"{own.path}: was changed while the model looked at it"}
        elif "error" not in record:
            told = {path.relative_to(self.folder).as_posix(): size_of(path) for path in files}
            record = {**record, "file": {} if own is None else own.identity(), "files": told}
        for file, line in zip(self._open, (as_line(record), table_row(self.columns or (), record)), strict=False):
            file.append(line)
        return record

    def close(self) -> None:
        for file in self._open:
            file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
