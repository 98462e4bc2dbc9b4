"""Cross-validation by patient: all folds trained one after the other, each in a run of its own.

runs/cv/folds.csv                    which slides are in which fold
runs/cv/fold_0, runs/cv/fold_1 ...   the run of each fold
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mpi4dl._wording import counted, some
from mpi4dl.checkpoints.manifest import MODEL
from mpi4dl.comm import Communicator
from mpi4dl.datasets.split import in_whole
from mpi4dl.options.config import OF_THE_TASK, Config, ConfigError, parse
from mpi4dl.options.declare import value_of, with_values, without_flags
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.sources import source_of, with_frame
from mpi4dl.options.tasks import with_task
from mpi4dl.results.formats import read_part
from mpi4dl.results.job import Settings, difference, settings_of
from mpi4dl.results.names import CONFIG, VERSIONS
from mpi4dl.results.runs import fold_folders
from mpi4dl.runs.assembly import prints_of
from mpi4dl.runs.folder import default_path
from mpi4dl.runs.samples import FILE as SAMPLES
from mpi4dl.runs.samples import RunSamples
from mpi4dl.training.data import Images
from mpi4dl.training.resuming import files_of
from mpi4dl.training.run import fit
from mpi4dl.training.setup import command_to_go_on, open_samples, set_up


def train_folds(comm: Communicator, config: Config, spell: Callable[[str], str], argv: Sequence[str]) -> Path | None:
    """Train all folds, those that are finished aside. The folder of their runs; None if not all of them are finished.

    Collective; raises Refusal on all ranks.
    """
    chosen, run = config.slides, config.run
    if chosen.folds is None or not source_of(config).has_files:
        comm.agree("`fold` all trains all folds of `slides`, or of `images` in files: say how many by `folds`")
    if run.resume not in ("none", "auto"):
        comm.agree(f"`resume` {run.resume}: `fold` all continues in `run_folder` by `resume` auto")
    asked = None if comm.rank else run.run_folder or str(default_path(config.model_name, datetime.now()))
    folder, num_folds = Path(comm.broadcast_object(asked)), chosen.folds or 0
    done: set[int] = set()
    if run.resume == "auto":
        config, done = comm.from_first(lambda: _as_trained(config, fold_folders(folder)))
    for fold in range(num_folds):
        path = folder / f"fold_{fold}"
        if fold in done:
            say(comm, f"fold {fold} of {num_folds} is finished: {path}")
            continue
        words = [*without_flags(Config, argv, ("fold",)), "--fold", str(fold)]
        setup = set_up(_of_fold(config, fold, path), comm, spell, words)
        say(comm, f"fold {fold} of {num_folds}: {path}")  # of no fold that is refused
        fit(setup)
        if run.dry_run:
            return None
        if not comm.broadcast_object((path / MODEL).is_file()):
            go_on = command_to_go_on(comm.size, argv, folder)
            say(comm, f"stopped in fold {fold} of {num_folds}; continue this fold and the others with: {go_on}")
            return None
    return folder


def _of_fold(config: Config, fold: int, path: Path) -> Config:
    covariates = tuple(each._replace(fit=()) for each in config.slides.covariates)  # each fold has its own
    return with_values(config, {"fold": fold, "run_folder": str(path), "covariates": covariates})


def _as_trained(config: Config, runs: Mapping[int, Path]) -> tuple[Config, set[int]]:
    """The configuration with what the runs of folds had for options that are left open; and the finished folds.

    Raises ConfigError where options, the user's files or slides are others than they were. DatasetError, OSError.
    """
    done = set()
    for fold, path in runs.items():
        there = _config_of(path)
        left_open = [name for name in OF_THE_TASK if value_of(config, name) == AUTO]
        config = with_values(config, {name: value_of(there, name) for name in left_open})
        framed = with_frame(_of_fold(config, fold, path))
        samples = open_samples(framed)
        assert isinstance(samples, Images)
        framed = with_task(framed, samples.training)
        require_alike(path, settings_of(_of_fold(there, fold, path)), settings_of(framed))
        if (path / MODEL).is_file():
            done.add(fold)
            if not (path / SAMPLES).is_file():
                raise ConfigError(
                    f"{path / SAMPLES} is missing, the samples of a finished fold: restore it, or remove {path} to "
                    "train the fold again"
                )
            kept, found = RunSamples.read(path / SAMPLES), RunSamples.of(samples.training, samples.validation)
            kept.require_unchanged(found)
            _refuse_new_samples(path, config, samples)
            then = {**read_part(path / VERSIONS, "files"), **_contents(kept)}
            now = {**files_of(prints_of(framed), framed.tuning.weights), **_contents(found)}
            require_alike(path, then, now)
    return config, done


def _contents(kept: RunSamples) -> dict[str, list[Any]]:
    """What is known of each sample of a run, and its label."""
    return {f"sample {each.file}": [*each] for each in kept.samples}


def _refuse_new_samples(path: Path, config: Config, samples: Images) -> None:
    """Raise ConfigError for samples that the table has got since its folds were made; a file of splits may leave some
    out.
    """
    whole, _ = in_whole(samples.training)
    rows = whole.rows if config.slides.split_file is None else ()
    new = [row.path for row in rows if not row.split and row.fold is None]
    if new:
        raise ConfigError(
            f"{path} was trained without {counted(len(new), 'sample')} that the table has now: {some(new, 3)}: remove "
            "these lines, or train in another `run_folder`"
        )


def require_alike(path: Path, then: Settings, now: Settings) -> None:
    """Raise ConfigError if the run of a fold was trained with other settings than those of others."""
    other = difference(then, now)
    if other:
        raise ConfigError(
            f"{path} was trained with {other}, and all folds need the same: change it back, or "
            "train in another `run_folder`"
        )


def _config_of(run: Path) -> Config:
    return parse(["--config", str(run / CONFIG)])


def say(comm: Communicator, line: str) -> None:
    if comm.rank == 0:
        print(line, flush=True)


def settings_of_fold(path: Path) -> Settings:
    """The options of the run of a fold, and the user's files; without the number of the fold."""
    return {**settings_of(_of_fold(_config_of(path), 0, path)), **read_part(path / VERSIONS, "files")}
