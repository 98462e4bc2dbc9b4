"""The folder of a run, of predictions or of evaluations, as it is read: what its files say, and no more."""

import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from mpi4dl._files import read_regular
from mpi4dl.results.evaluations import SavedEvaluation, evaluations_in
from mpi4dl.results.formats import Record, flat, read_lines, read_object, reading
from mpi4dl.results.names import CONFIG, DESCRIPTION, LOG, MEASURES, METRICS, PORTRAIT, PREDICTIONS, VERSIONS

LOG_BYTES = 1 << 16  # that are read, from its end
LOG_LINE = re.compile(r"\S+ \S+ [A-Z]+ mpi4dl[\w.]*: (.*)")
ENDS = ("done: ", "stopped by ", "ended by ")
FOLD = re.compile(r"fold_([0-9]{1,6})")
NOT_FINITE = ("nan", "inf", "-inf")


def fold_folders(folder: Path) -> dict[int, Path]:
    """The folders of the runs of folds in a folder, by their numbers; empty if it is itself a run."""
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return {}
    found = ((FOLD.fullmatch(path.name), path) for path in folder.iterdir())
    of = {int(name[1]): path for name, path in found if name and (path / CONFIG).is_file()}
    return dict(sorted(of.items()))


def no_run(path: Path) -> str:
    """That a path is no run with weights, and which is to be named."""
    folds = fold_folders(path)
    remedy = f"the run of a fold, such as {next(iter(folds.values()))}" if folds else "the --run-folder of the training"
    return f"{path} is neither a run of mpi4dl train with weights nor a checkpoint of one: name {remedy}"


class FolderResults:
    """What a folder has: that of a run, or one that `mpi4dl predict` or `mpi4dl evaluate` wrote.

    Files are read at the first use. What a run has not written yet is empty. A damaged file raises DamagedResult, which
    names it. Lists of dicts are rows: `pandas.DataFrame(results.metrics)` has a column for each key.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def _object(self, name: str) -> Record:
        path = self.path / name
        return read_object(path) if path.exists() else {}

    def _tables(self, path: Path) -> Record:
        with reading(path):
            return tomllib.loads(read_regular(path).decode())

    @cached_property
    def config(self) -> Record:
        """The options with which a run began, by table, as its config.toml has them."""
        path = self.path / CONFIG
        return self._tables(path) if path.exists() else {}

    @cached_property
    def later_configs(self) -> dict[int, Record]:
        """Those with which it went on, by step."""
        found = sorted(self.path.glob("config-step-*.toml"))
        return {int(re.sub(r"\D", "", path.stem)): self._tables(path) for path in found}

    @cached_property
    def versions(self) -> Record:
        """The software, the machine and the command line."""
        return self._object(VERSIONS)

    @cached_property
    def model(self) -> Record:
        """The description of the model: options, task, classes."""
        return self._object(DESCRIPTION)

    @cached_property
    def higher_is_better(self) -> Mapping[str, bool | None]:
        """By metric, as the run declared it."""
        return self._object(MEASURES).get("higher_is_better", {})

    @cached_property
    def snapshot(self) -> Record:
        """The plan, the modules, the timeline and the memory."""
        return self._object(PORTRAIT)

    @cached_property
    def metrics(self) -> list[Record]:
        """A row for each report of training and validation: its phase, step and epoch, and its numbers."""
        path = self.path / METRICS
        lines = read_lines(path) if path.exists() else []
        with reading(path):
            return [
                {"phase": str(line["phase"]), "step": int(line["step"])}
                | {key: float(value) if value in NOT_FINITE else value for key, value in line.items() if key != "phase"}
                for line in lines
            ]

    @cached_property
    def log(self) -> list[str]:
        """The last lines of rank 0's log."""
        path = self.path / LOG
        return read_regular(path)[-LOG_BYTES:].decode(errors="replace").splitlines() if path.exists() else []

    @property
    def state(self) -> str:
        """How a run ended, as its log says."""
        told = [found[1] for line in self.log if (found := LOG_LINE.match(line))]
        if told and told[-1].startswith(ENDS):
            return told[-1]
        reached = f" after step {self.metrics[-1]['step']}" if self.metrics else " before its first report"
        return f"no end is recorded{reached}: it is still running, or was killed"

    def evaluated(self) -> list[SavedEvaluation]:
        """The evaluations in the folder, by name."""
        return evaluations_in(self.path)

    @property
    def evaluations(self) -> list[Record]:
        """A row for each evaluation, level such as patient, and metric, with its interval."""
        return [row for each in self.evaluated() for row in each.metrics()]

    def predicted(self) -> list[Path]:
        """The folders of predictions: this one, or those of a run."""
        lines = f"{PREDICTIONS.name}.jsonl"
        own = [self.path] if (self.path / lines).is_file() else []
        return own or sorted(path.parent for path in self.path.glob(f"{PREDICTIONS.name}-*/{lines}"))

    @property
    def predictions(self) -> list[Record]:
        """A row for each image that was predicted, with the name of its folder of predictions."""
        return [
            {"folder": folder.name, **flat({k: v for k, v in record.items() if k not in ("file", "files")})}
            for folder in self.predicted()
            for record in predictions_in(folder)
        ]


def predictions_in(folder: Path) -> list[Record]:
    """The records of a folder of predictions, an image each. Raises OSError, DamagedResult."""
    path = folder / f"{PREDICTIONS.name}.jsonl"
    records = {}
    for record in read_lines(path):
        with reading(path):
            records[str(record["image"])] = record
    return [*records.values()]
