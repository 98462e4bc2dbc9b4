"""Checkpoints of a training run: written by all ranks in parallel while training goes on, read under any plan.

    checkpoints = Checkpoints("runs/mine/checkpoints", comm)
    found = checkpoints.newest()
    position = checkpoints.load(engine, found) if found else {"epoch": 0}
    ...
    checkpoints.save(engine, {"epoch": 1})      # now and then
    checkpoints.close()

A checkpoint is what one process would have written, whatever plan its ranks had. A folder is for one run: checkpoints
from which this one did not go on by `load` are moved out of its way, and stay.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from mpi4dl._files import LOCK, POLL_SECONDS, lock, naming
from mpi4dl.checkpoints import storage
from mpi4dl.checkpoints.kept import Kept
from mpi4dl.checkpoints.manifest import CLASSES, MODEL, checkpoints_in, name_of, step_of
from mpi4dl.checkpoints.node import Damaged, Unreadable
from mpi4dl.checkpoints.saved import Saved, newest_whole, require_whole
from mpi4dl.checkpoints.state import capture, model_values, restore
from mpi4dl.checkpoints.writer import TEMPORARY, Writing, clean
from mpi4dl.comm import Communicator, Refusal

SIGHT_SECONDS = 10.0  # for what rank 0 made to be seen through a shared file system


class Checkpoints:
    """The checkpoints in one folder, of which the newest `keep` stay. Every method is collective but `failed`.

    `skipped` says what was wrong with those that `newest` passed over. Only one job at a time may use a folder. Before
    its first `save`, a run that did not `load` from this folder moves what it finds there into a folder earlier-...
    beside its own checkpoints, where nothing deletes it; one that did moves what is newer than what it loaded.

    Raises:
        Refusal: on all ranks: another job uses the folder, it cannot be made, or not all ranks see it.
    """

    def __init__(self, folder: str | Path, comm: Communicator, keep: int = 2) -> None:
        self.folder, self.comm, self.keep = Path(folder), comm, keep
        self.skipped: list[str] = []
        self._lock: int | None = None
        self._writing: Writing | None = None
        self._saved: int | None = None
        self._began_at = -1  # the step of the checkpoint of this folder from which the run goes on
        self._alone = False  # what was of other runs is out of the way
        with comm.together():
            if comm.rank == 0:
                self._prepare()
        with comm.together():
            self._see()

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.folder)
        clean(self.folder)

    def _see(self) -> None:
        deadline = time.monotonic() + SIGHT_SECONDS
        while not (self.folder / LOCK).exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self.folder}, which rank 0 made, is not there: all ranks write checkpoints, so the run "
                    "folder must be on a file system that they share"
                )
            time.sleep(POLL_SECONDS)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole. Those that are damaged, and newer, are put aside for good.

        Raises:
            Refusal: on all ranks: the newest that is not damaged cannot be read. Nothing is put aside then.
        """
        with refusing():
            found, self.skipped = newest_whole(checkpoints_in(self.folder), self.comm)
        with self.comm.together():
            for path in checkpoints_in(self.folder) if self.comm.rank == 0 and found else ():
                if path == found:
                    break
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
        return found

    def save(self, engine: Kept, extra: Mapping[str, Any]) -> None:
        """Keep the state of `engine`, and what is to be known beside it, while training goes on.

        `extra` is numbers, text, tensors and nests of them; that of rank 0 counts. Waits if the last one is still being
        written. A step that was saved already is not saved again.

        Raises:
            Refusal: on all ranks: the last checkpoint could not be written.
        """
        self.wait()
        if not self._alone:
            with self.comm.together():
                if self.comm.rank == 0:
                    self._put_aside()
            self._alone = True
        if engine.num_steps != self._saved:
            with self.comm.together((ValueError,)):
                job = capture(engine, extra)
            self._writing = Writing(self.folder, job, self.comm.rank, self.comm.size, self.keep)
            self._saved = engine.num_steps

    def _put_aside(self) -> None:
        others = [path for path in checkpoints_in(self.folder) if (step_of(path) or 0) > self._began_at]
        if not others:
            return
        aside = self.folder / f"earlier-{time.time_ns()}"
        aside.mkdir()
        for path in others:
            path.rename(aside / path.name)
        logging.getLogger(__name__).warning(
            "%s held checkpoints from which this run does not go on, the newest %s: they are in %s now",
            self.folder,
            others[0].name,
            aside.name,
        )

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the checkpoint under way cannot be written: then all ranks should `wait`."""
        return self._writing is not None and self._writing.error is not None

    def wait(self) -> None:
        """Return when no checkpoint is being written. Raises Refusal on all ranks if it could not be."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.written.wait()
        self._agree(writing)
        writing.finish()
        self._agree(writing)

    def _agree(self, writing: Writing) -> None:
        """Raise on all ranks if one of them could not write, or was kept from it."""
        error, name = writing.error, name_of(writing.job.step)
        try:
            with self.comm.together((Refusal,)):
                if isinstance(error, OSError):
                    raise Refusal(f"{name} cannot be written to {self.folder}: {error.strerror or error}") from error
                if isinstance(error, Exception):
                    raise error
                if error is not None:  # SystemExit, at which the main thread would end well
                    raise RuntimeError(f"{name} was not written to {self.folder}: {error!r}") from error
        except Refusal as refusal:
            self._saved = None
            writing.cancel()
            self.comm.barrier()
            if self.comm.rank == 0:
                writing.remove()
            self.comm.barrier()
            left = checkpoints_in(self.folder)
            stays = f"{left[0]} is the newest one" if left else "there is none yet"
            raise Refusal(f"{refusal}; {stays}, from which `resume` goes on once there is room") from error

    def load(self, engine: Kept, path: Path) -> dict[str, Any]:
        """Go on from one of these checkpoints; returns the `extra` it was saved with. Raises Refusal as `load` does."""
        extra = load(engine, path)
        if path.resolve().parent == self.folder.resolve():
            self._saved = self._began_at = engine.num_steps
            self._alone = False
        return extra

    def close(self) -> None:
        """Stop, on this rank, without waiting; call `wait` before it at a good end."""
        if self._writing is not None:
            self._writing.cancel()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        self.close()


@contextmanager
def refusing() -> Iterator[None]:
    """What all ranks alike find wrong with a checkpoint becomes a Refusal."""
    try:
        yield
    except (Damaged, Unreadable) as problem:
        raise Refusal(str(problem)) from problem


def load(engine: Kept, path: Path) -> dict[str, Any]:
    """Go on from the checkpoint in `path`; returns the `extra` it was saved with. Collective.

    Raises:
        Refusal: on all ranks, with the engine as it was, if the checkpoint is damaged, cannot be read, or is of
            another model or optimizer.
    """
    with refusing():
        require_whole(path, engine.comm)
    with engine.comm.together():
        saved = Saved(path)
    with saved:
        return restore(engine, saved)


def save_model(engine: Kept, path: Path, classes: Sequence[str] = (), about: Mapping[str, str] | None = None) -> None:
    """Write the weights alone, as a safetensors file that names what is tied in its metadata. Collective.

    `classes`, the names of what the outputs stand for, are there as JSON, and so is what else there is to say `about`
    the model.

    Raises Refusal on all ranks if it cannot be written; then nothing is there, or the old file is.
    """
    layout, pieces = model_values(engine)
    told = {CLASSES: json.dumps(list(classes))} if classes else {}
    layout = storage.StorageLayout.of(layout.specs, {**layout.metadata, **told, **(about or {})})
    temporary, comm = path.with_name(f"{TEMPORARY}{MODEL}"), engine.comm
    try:
        with comm.together((OSError,)), naming(path):
            storage.write(temporary, layout, pieces, header=comm.rank == 0)
    except Refusal:
        if comm.rank == 0:
            temporary.unlink(missing_ok=True)
        raise
    with comm.together((OSError,)):
        if comm.rank == 0:
            temporary.rename(path)
            storage.flush_folder(path.parent)
