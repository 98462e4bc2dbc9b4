"""The folder that records one run: options, versions, logs, numbers, and a snapshot of its plan and model.

    runs/resnet18-20260131-120000/
        config.toml      every option; `mpi4dl train --config` repeats the run
        samples.csv      the table of samples: which train, validate and test, with their labels and patients
        model.json       what the model is: all that evaluating and predicting with it need to know
        versions.json    the software, the machine, and the command line
        log-rank0.txt    what rank 0 logged, and the traceback of what ended it; one file per rank
        metrics.jsonl    one JSON object per line: every report of training and validation
        portrait.json    the plan's timeline, the model's modules, and what the memory of each rank is for
        checkpoints/     what the run needs to go on, at several steps
        model.safetensors    the weights, at the end

A run that resumes at step 1200 adds config-step-00001200.toml and versions-step-00001200.json.

Rank 0 creates it. The other ranks receive its path, and write only their logs.
"""

import logging
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from mpi4dl import __version__
from mpi4dl._files import LOCK, lock, write_durably
from mpi4dl._numbers import typed
from mpi4dl.options.declare import ConfigError
from mpi4dl.parallel.tables.schedules import Action
from mpi4dl.parallel.tables.simulator import Simulation, TimeSpan
from mpi4dl.results.formats import Record, write_object
from mpi4dl.results.names import METRICS

LOGGER_NAME = "mpi4dl"
BEST = "best.safetensors"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
RECORDED_PACKAGES = ("torch", "torchvision", "numpy", "mpi4py")


def better_weights(source: Path) -> list[str]:
    """A remark if a source of weights is the folder of a run, which means the newest ones, and it has the best ones."""
    best = source / BEST
    return [f"these are the newest weights; the best ones of this run are {best}"] if best.is_file() else []


def default_path(model: str, now: datetime) -> Path:
    """Where a run is recorded for which no folder was asked, such as runs/resnet18-20260131-120000."""
    return Path("runs") / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', model)}-{now:%Y%m%d-%H%M%S}"


def _made(path: Path) -> bool:
    """Whether the folder was not there before."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if path.is_dir():
            return False
        raise
    return True


class RunFolder:
    """The folder of one run; the constructor takes an existing one as it is, `claim` makes and locks it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._made = False  # by this object, not by its caller

    def claim(self, or_beside: bool = False) -> "RunFolder":
        """Make the folder and its parents, or take an empty one, and lock it.

        `or_beside`: where there is a folder of this name, make one with -2, -3 or a higher number behind it. Raises
        ConfigError if there is something in it already, or if it cannot be made, and ValueError as `lock` does.
        """
        try:
            asked, numbers = self.path, count(2)
            while not (made := _made(self.path)) and or_beside:
                self.path = asked.with_name(f"{asked.name}-{next(numbers)}")
            self._made = made
            self._must_be_empty()
            self.lock()
            self._must_be_empty()  # of two runs that begin at once, the other may have been faster
            return self
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} cannot be created: {error.strerror}; name another with `run_folder`"
            ) from None

    def _must_be_empty(self) -> None:
        if any(path.name != LOCK for path in self.path.iterdir()):
            raise ConfigError(
                f"the run folder {self.path} holds files already, and a run never overwrites another's; "
                "name another with `run_folder`, remove it, or continue it with `resume` auto"
            )

    def lock(self) -> None:
        """Keep other jobs from writing into the folder, up to `unlock` or the end of this process."""
        self._lock = lock(self.path)

    def discard(self) -> None:
        """Remove the files of a run that was refused before its first step, and the folder, if `claim` made it."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_config(self, toml: str, step: int = 0) -> None:
        """Record the options, as `to_toml` gives them, with which the run began, or went on from a step."""
        write_durably(self.path / f"config{_since(step)}.toml", toml.encode())

    def write_versions(
        self, mpi_library: str, command: Sequence[str], step: int = 0, files: Mapping[str, str] | None = None
    ) -> None:
        """Record what the run ran on; `mpi_library` is what MPI says of itself, `command` is `sys.argv`.

        `files`: checksums of files of the user's, such as code and weights.
        """
        found = {**versions(mpi_library, command), "files": dict(files or {})}
        write_object(self.path / f"versions{_since(step)}.json", found)

    @property
    def metrics_bytes(self) -> int:
        path = self.path / METRICS
        return path.stat().st_size if path.exists() else 0

    def cut_metrics(self, num_bytes: int) -> Iterator[str]:
        """Forget what was reported of steps that will be made again, after the first `num_bytes`. Yields a remark if
        less was there, or they end within a line.
        """
        path, found = self.path / METRICS, b""
        if self.metrics_bytes:
            with path.open("rb") as file:
                found = file.read(num_bytes)
        whole = found.rfind(b"\n") + 1
        if self.metrics_bytes > whole:
            os.truncate(path, whole)
        if whole < num_bytes:
            yield f"{path} lacks reports that it had at this step: {num_bytes - whole:,} of {num_bytes:,} bytes"

    def log_path(self, rank: int) -> Path:
        return self.path / f"log-rank{rank}.txt"

    @contextmanager
    def rank_log(self, rank: int) -> Iterator[logging.Logger]:
        """Write what this rank logs under "mpi4dl" to its file, and the traceback if the block ends by an exception."""
        self.path.mkdir(parents=True, exist_ok=True)  # A node may not share rank 0's file system.
        handler = _Log(self.log_path(rank), encoding="utf-8")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger = logging.getLogger(LOGGER_NAME)
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield logger
        except SystemExit as stop:
            if stop.code not in (None, 0):
                logger.error("ended by sys.exit(%r)", stop.code)
            raise
        except BaseException as error:
            logger.exception("ended by %s", type(error).__name__)
            raise
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
            with suppress(OSError):
                handler.close()


class _Log(logging.FileHandler):
    """Lines that cannot be written are lost: a full disk ends the run elsewhere, with one message."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _since(step: int) -> str:
    return f"-step-{step:08d}" if step else ""


def versions(mpi_library: str, command: Sequence[str]) -> dict[str, Any]:
    """The software of a run, without importing any of it; a package that is not installed has no version."""
    found: dict[str, Any] = {"python": platform.python_version(), "mpi4dl": __version__}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {
        "mpi": mpi_library.strip(),
        "host": platform.node(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "command": list(command),
    }


SECONDS = Annotated[float, math.isfinite, "a number of seconds"]
SPAN = tuple[Literal["forward", "backward", "input", "weight"], Literal[0, 1], int, int, SECONDS, SECONDS]


@dataclass(frozen=True)
class RunSnapshot:
    """The plan, model and memory of a run for reports: `portrait.json` in its folder.

    {"title": ..., "plan": ..., "num_steps": ..., "source": where the seconds are from,
     "timeline": [[[kind, direction, stage, microbatch, start, end], ...] of each rank of a replica],
     "modules": [[name, values, of them trained], ...],
     "memory": [{purpose: bytes} of each rank, as measured after the first steps]}

    `timeline` is None of a plan of one stage, in which no rank waits for another stage.
    """

    title: str
    plan: str
    num_steps: int
    modules: tuple[tuple[str, int, int], ...]
    memory: tuple[Mapping[str, int], ...]
    source: str = ""
    timeline: Simulation | None = None

    def content(self) -> Record:
        """As the file has it."""
        found = dict(vars(self))
        if self.timeline is not None:
            found["timeline"] = [[[*span.action, *span[1:]] for span in row] for row in self.timeline.rows]
        return found

    @classmethod
    def of(cls, told: Record) -> "RunSnapshot":
        """Of what `content` gave. Raises ValueError or KeyError for anything else."""
        rows = typed(list[list[SPAN]] | None, told["timeline"], "its timeline")
        spans = tuple(tuple(TimeSpan(Action(*each[:4]), *each[4:]) for each in row) for row in rows or ())
        found: RunSnapshot = typed(cls, {**told, "timeline": None}, "its object")
        return found if rows is None else replace(found, timeline=Simulation(spans, (0,) * len(rows)))
