"""Which checkpoints a folder holds, their manifests with checksums, and the writer that makes one in the background.

checkpoints/step-00001200/
    model.safetensors       all weights and buffers, under the model's own names
    optimizer.safetensors   what the optimizer knows of each parameter, such as exp_avg/layer1.0.weight
    state.json              all else: step, epoch, options of the optimizer, schedule, random states
    manifest.json           sizes and checksums of the others
"""

import json
import logging
import re
import shutil
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl._files import read_regular, write_durably
from mpi4dl._numbers import Damaged, typed
from mpi4dl.checkpoints import storage
from mpi4dl.checkpoints.json_values import Unreadable, parse
from mpi4dl.checkpoints.storage import Range, StorageLayout, uncovered
from mpi4dl.parallel.replicas.buckets import Shard

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


class _Manifest(NamedTuple):
    format: int
    crc32: Any = None
    files: Any = None


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
    """The content of manifest.json, with a checksum of its own."""
    return json.dumps({"format": FORMAT, "crc32": _crc32(files), "files": files}).encode()


def _crc32(files: Any) -> int:
    return zlib.crc32(json.dumps(files).encode())


def read_manifest(path: Path) -> dict[str, Written]:
    """The files of a checkpoint. Raises OSError, Unreadable for another format, and Damaged for what nobody wrote."""
    try:
        root = parse(read_regular(path / MANIFEST), MANIFEST)
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    version, crc32, files = typed(_Manifest, root, MANIFEST)
    if version != FORMAT:
        raise Unreadable(
            f"its format is {version}, but this version of mpi4dl reads {FORMAT}: use the version that wrote it"
        )
    if crc32 != _crc32(files):
        raise Damaged(f"{MANIFEST} is not as it was written")
    found: dict[str, Written] = typed(dict[str, Written], files, MANIFEST)
    for name in (*FILES, *found):
        if name not in found or name not in FILES:
            raise Damaged(f"{MANIFEST} {'names' if name in found else 'does not name'} {name!r}")
        gap = uncovered(found[name].ranges, found[name].size)
        if gap is not None:
            raise Damaged(f"{MANIFEST} has no checksum of all of {name}: {gap}")
    return found


# Writes one checkpoint in the background, on every rank its part; nothing here speaks MPI.
#
#     every rank   pieces -> files in a temporary folder, flushed -> part-RANK.json, with checksums of what it wrote
#     rank 0       waits for all parts -> state.json, manifest.json, flushed -> one rename -> removes the oldest
#
# A job that is killed at any moment leaves the temporary folder, or the whole checkpoint.

POLL_SECONDS = 0.02
LAST_SECONDS = 60.0  # until a part that another rank has written is seen through a shared file system
TEMPORARY, REMOVED = ".writing-", ".removed-"


class Job(NamedTuple):
    """The share of this rank: its pieces of each file, `mine` of its own, and `state`, of which rank 0's counts."""

    step: int
    files: Mapping[str, tuple[StorageLayout, Sequence[Shard]]]
    state: Mapping[str, Any]
    mine: Any


class Writing:
    """A checkpoint that is being written into `folder`, by threads of all ranks.

    `written` is set when this rank's part is on disk or cannot be; `error` says why it cannot. On rank 0 `finish`
    waits for the rest.
    """

    def __init__(self, folder: Path, job: Job, rank: int, size: int, keep: int) -> None:
        self.folder, self.job, self.rank, self.size, self.keep = folder, job, rank, size, keep
        self.temporary = folder / f"{TEMPORARY}{name_of(job.step)}"
        self.error: BaseException | None = None
        self.written = threading.Event()
        self._everyone_wrote = threading.Event()
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        # A daemon: a rank that fails meanwhile must be able to end.
        self._thread = threading.Thread(target=self._run, name=f"mpi4dl-{name_of(job.step)}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the end. For use when all ranks have written their parts without an error."""
        self._everyone_wrote.set()
        self._thread.join()

    def cancel(self) -> None:
        self._cancelled.set()
        self._thread.join()

    def remove(self) -> None:
        """Make room again, when no rank writes any more."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _run(self) -> None:
        try:
            self._write_part()
            self.written.set()
            if self.rank == 0:
                self._complete()
        except BaseException as error:  # SystemExit too, which would end this thread alone, in silence
            self.error = error
        finally:
            self.written.set()

    def _write_part(self) -> None:
        self.temporary.mkdir(exist_ok=True)
        found = {}
        for file, (layout, pieces) in self.job.files.items():
            go_on = self._not_cancelled
            found[file] = storage.write(self.temporary / file, layout, pieces, header=self.rank == 0, go_on=go_on)
        self.job = self.job._replace(files={file: (layout, ()) for file, (layout, _) in self.job.files.items()})
        part = {"ranges": found, "mine": self.job.mine}
        write_durably(self._part(self.rank), json.dumps(part).encode())

    def _not_cancelled(self) -> bool:
        return not self._cancelled.is_set()

    def _part(self, rank: int) -> Path:
        return self.temporary / f"part-{rank}.json"

    def _parts(self) -> list[Any] | None:
        """The parts of all ranks, once they are written; None if the job is cancelled."""
        deadline = None
        for rank in range(self.size):
            while not self._part(rank).exists():
                if self._cancelled.wait(POLL_SECONDS):
                    return None
                if self._everyone_wrote.is_set():
                    deadline = deadline or time.monotonic() + LAST_SECONDS
                    if time.monotonic() > deadline:
                        raise OSError(f"{self._part(rank)}, which rank {rank} has written, is not seen by rank 0")
        return [json.loads(self._part(rank).read_bytes()) for rank in range(self.size)]

    def _complete(self) -> None:
        parts = self._parts()
        if parts is None:
            return
        files = {}
        for file, (layout, _) in self.job.files.items():
            ranges = sorted(Range(*one) for part in parts for one in part["ranges"][file])
            gap = storage.uncovered(ranges, layout.size)
            if gap is not None:
                raise RuntimeError(f"{file}: {gap}")
            files[file] = Written(layout.size, ranges)
        state = json.dumps({**self.job.state, "ranks": [part["mine"] for part in parts]}).encode()
        files[STATE] = Written(len(state), [Range(0, len(state), zlib.crc32(state))])
        write_durably(self.temporary / STATE, state)
        for rank in range(self.size):
            self._part(rank).unlink()
        write_durably(self.temporary / MANIFEST, manifest_bytes(files))
        storage.flush_folder(self.temporary)
        if self._not_cancelled():
            self._publish(sum(written.size for written in files.values()))

    def _publish(self, num_bytes: int) -> None:
        final = self.temporary.rename(self.folder / name_of(self.job.step))
        storage.flush_folder(self.folder)
        seconds = time.monotonic() - self._began
        message = "checkpoint %s: %.1f MB in %.2f s"
        logging.getLogger(__name__).info(message, final.name, num_bytes / 1e6, seconds)
        others = [path for path in checkpoints_in(self.folder) if path != final]
        for old in others[self.keep - 1 :]:
            remove(old)


def remove(checkpoint: Path) -> None:
    """Take it out of the count at once, then delete it: nobody finds one half deleted."""
    hidden = checkpoint.with_name(f"{REMOVED}{checkpoint.name}")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clean(folder: Path) -> None:
    """Delete what killed runs left half written, or half deleted."""
    for path in folder.iterdir():
        if path.name.startswith((TEMPORARY, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
