"""Writes one checkpoint in the background, on every rank its part; nothing here speaks MPI.

    every rank   pieces -> files in a temporary folder, flushed -> part-RANK.json, with checksums of what it wrote
    rank 0       waits for all parts -> state.json, manifest.json, flushed -> one rename -> removes the oldest

A job that is killed at any moment leaves the temporary folder, or the whole checkpoint.
"""

import json
import logging
import shutil
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi4dl.checkpoints import storage
from mpi4dl.checkpoints.manifest import MANIFEST, STATE, Written, checkpoints_in, manifest_bytes, name_of
from mpi4dl.checkpoints.storage import Range, StorageLayout
from mpi4dl.parallel.replicas.whole import Shard

POLL_SECONDS = 0.02
LAST_SECONDS = 60.0  # until a part that another rank has written is seen through a shared file system
TEMPORARY, REMOVED = ".writing-", ".removed-"


class Job(NamedTuple):
    """What this rank writes: its pieces of each file, `mine` of its own, and `state`, of which rank 0's counts."""

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
        storage.write_durably(self._part(self.rank), json.dumps(part).encode())

    def _not_cancelled(self) -> bool:
        return not self._cancelled.is_set()

    def _part(self, rank: int) -> Path:
        return self.temporary / f"part-{rank}.json"

    def _parts(self) -> list[Any] | None:
        """What all ranks wrote, when they have; None if it is not wanted any more."""
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
        storage.write_durably(self.temporary / STATE, state)
        for rank in range(self.size):
            self._part(rank).unlink()
        storage.write_durably(self.temporary / MANIFEST, manifest_bytes(files))
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
