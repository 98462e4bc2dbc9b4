"""The folder of a run, and the checkpoint from which it resumes: the meaning of `resume`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import isfinite, nan, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mpi4dl._files import checksum
from mpi4dl._numbers import Damaged, typed
from mpi4dl._wording import counted
from mpi4dl.checkpoints import Checkpoints
from mpi4dl.checkpoints.checkpoints import refusing
from mpi4dl.checkpoints.json_values import Unreadable, unlike
from mpi4dl.checkpoints.manifest import MODEL, STATE, candidates_at
from mpi4dl.checkpoints.saved import Saved, newest_whole
from mpi4dl.checkpoints.storage import Reader
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Evaluation
from mpi4dl.options.config import default_options
from mpi4dl.options.declare import ConfigError, dump
from mpi4dl.options.sections.run import Run
from mpi4dl.parallel.plan import Plan
from mpi4dl.runs.folder import RunFolder, default_path

NUM_IMAGES = "the number of training images"
CODE = "the file of "  # before the name of an option with code of the user's
CONTENT = "the content of some samples of "  # before the name of an option
CLASS_WEIGHTS = "the numbers of `class_weights`"  # that are balanced
BALANCE = "balance"
TIMED = ("auto", "measured")  # cuts that may come out otherwise at the next start
# The purpose of the weights, and the images that they have never seen.
SAME_ALWAYS = (
    "task",
    "tokenizer",
    "model",
    "model_options",
    "optimizer",
    "scheduler",
    "lr_schedule",
    "warmup",
    "freeze",
    "lora",
    "unfreeze",
    "lr_of",
    "weight_decay_of",
    "seed",
    "val_fraction",
    "channels",
    "mean",
    "std",
    "label_columns",
    "covariates",
    "ignore_index",
    "folds",
    "fold",
    "split_file",
)
A_STEP = ("batch_size", "accumulate")  # whose product has to stay
SAME_WITHIN_AN_EPOCH = (*A_STEP, "sampling", NUM_IMAGES)
FROM_CHECKPOINT = ("lr", "optimizer_options", "scheduler_options")
OF_THIS_START = ("resume", "dry_run", "print_config")


class Origin(NamedTuple):
    """The run's folder; whether it holds this run already; and checkpoints to resume from, the best first."""

    folder: RunFolder
    in_place: bool
    candidates: Sequence[Path]
    is_named: bool = True


def find_origin(run: Run, model: str, now: datetime) -> Origin:
    """The origin of a run of this model by `resume` and `run_folder`. Raises ConfigError, OSError."""
    asked, named = run.resume, run.run_folder
    folder = Path(named or default_path(model, now))
    if asked == "none":
        return Origin(RunFolder(folder), False, (), named is not None)
    if asked == "auto":
        if named is None:
            raise ConfigError("`resume` auto continues the run in `run_folder`: add `run_folder`")
        in_place = (folder / "config.toml").is_file()
        return Origin(RunFolder(folder), in_place, candidates_at(folder) if in_place else ())
    path = Path(asked)
    if not path.is_dir():
        raise ConfigError(f"`resume` {asked}: no such folder; name a run, one of its checkpoints, or auto")
    candidates = candidates_at(path)
    if not candidates:
        raise ConfigError(f"`resume` {asked}: there is no checkpoint in this folder")
    return Origin(
        RunFolder(folder), folder.is_dir() and path.resolve() == folder.resolve(), candidates, named is not None
    )


def options_before(comm: Communicator, run: Run, plan: Plan | None = None) -> Mapping[str, str]:
    """The options of the checkpoint that `resume` names, by `plan` if it is given; empty if there is none. Collective.

    One that cannot be read says nothing here: what is wrong with it is found when it is loaded.
    """
    known: Mapping[str, str] = {}
    if comm.rank == 0 and run.resume != "none":
        with suppress(ConfigError, OSError):
            known = _options_of(find_origin(run, "", datetime.now()).candidates, plan) or {}
    return comm.broadcast_object(known)


def _options_of(checkpoints: Sequence[Path], plan: Plan | None = None) -> dict[str, str] | None:
    """The options of the first checkpoint that can be read; None if it is not by `plan`."""
    for checkpoint in checkpoints:
        with suppress(OSError, Damaged, Unreadable), Saved(checkpoint) as saved:
            found: dict[str, str] = typed(dict[str, str], saved.extra.get("options"), str(checkpoint))
            return found if plan is None or plan.is_told_by(saved.state.plan) else None
    return None


def choose(comm: Communicator, origin: Origin, checkpoints: Checkpoints | None) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, if there is any, and remarks on newer ones that are unusable. Collective.

    Raises Refusal on all ranks if there are checkpoints, but none is whole.
    """
    if checkpoints is not None:
        found, skipped = checkpoints.newest(), checkpoints.skipped
    else:
        with refusing():
            found, skipped = newest_whole(origin.candidates, comm)
    if found is None and skipped:
        raise Refusal(f"no checkpoint is whole: {'; '.join(skipped)}; start anew in another `run_folder`")
    return found, [f"skipped {one}" for one in skipped]


def record(
    origin: Origin, step: int, options: str, files: Mapping[str, str], comm: Communicator, argv: Sequence[str]
) -> None:
    """Write into the run's folder how the run was started, or went on from `step`, with which options and files.

    Collective.

    Raises Refusal on all ranks if the folder cannot be made, holds other files, or another job writes into it.
    """
    with comm.together():
        if comm.rank == 0:
            folder = origin.folder
            if not origin.in_place:
                folder.claim(or_beside=not origin.is_named)
            since = step if origin.in_place else 0
            folder.write_config(options, since)
            folder.write_versions(comm.mpi_library, ["python", "-m", "mpi4dl.train", *argv], since, files)
    origin.folder.path = comm.broadcast_object(origin.folder.path)


@dataclass
class Best:
    """The best value so far of what is monitored, at which step, and how many validations were no better since.

    `higher_is_better` says it of what is monitored. `patience` is how many of those end the run; None: none do.
    """

    monitor: str
    higher_is_better: bool
    patience: int | None
    value: float | None = None
    step: int = 0
    since: int = 0

    def see(self, evaluation: Evaluation, step: int) -> bool:
        """Whether this validation is the best so far; what is not a finite number is no better than anything.

        Raises ValueError if what is monitored was not measured, or is not one number.
        """
        value = self.of(evaluation)
        ahead = self.value is None or (value > self.value if self.higher_is_better else value < self.value)
        if isfinite(value) and ahead:
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def of(self, evaluation: Evaluation) -> float:
        measured: dict[str, Any] = {"loss": evaluation.loss, "accuracy": evaluation.accuracy, **evaluation.metrics}
        value = measured.get(self.monitor)
        if not isinstance(value, float):
            scalars = [f"val_{name}" for name, each in measured.items() if isinstance(each, float)]
            raise ValueError(f"`monitor` val_{self.monitor} is no number here: choose of {', '.join(scalars)}")
        return value

    @property
    def enough(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def undefined(self, evaluation: Evaluation) -> str | None:
        """The message about a validation that cannot be the best: the monitored value is not finite."""
        value = self.of(evaluation)
        if isfinite(value):
            return None
        return f"val_{self.monitor} is {value}: these weights are not kept as the best"

    def words(self) -> str:
        """Why the run ends."""
        shown, after = nan if self.value is None else self.value, counted(self.since, "validation")
        return f"val_{self.monitor} was best, {shown:.6g}, at step {self.step}; {after} since then no better"

    def go_on(self, before: "Best | None", lost: str | None = None) -> list[str]:
        """Take up from a checkpoint, if that monitored the same, in the same direction; returns a remark if the value
        was forgotten, as its weights are `lost`.
        """
        if before is None or (before.monitor, before.higher_is_better) != (self.monitor, self.higher_is_better):
            return []
        self.value, self.step, self.since = before.value, before.step, before.since
        if self.value is None or lost is None:
            return []
        self.value = None
        return [f"the best weights, of step {self.step}, are not in this run, so the next ones count as best: {lost}"]


def unreadable(weights: Path) -> str | None:
    """What is wrong with a file of weights, as far as its header and its length tell."""
    try:
        Reader(weights).close()
    except FileNotFoundError:
        return f"{weights} is not there"
    except (OSError, Damaged, Unreadable) as problem:
        return f"{weights} cannot be read: {problem}"
    return None


class Progress(NamedTuple):
    """The state of a run of the training command besides the engine's: see `TrainingRun.state`."""

    epoch: int
    batch: int
    losses: list[float]
    skipped: list[str]
    evaluation: Evaluation | None  # without its metrics
    scheduler: dict[str, Any] | None
    metrics_bytes: int
    options: Mapping[str, str]
    due: bool = False
    best: Best | None = None
    callbacks: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def at(cls, checkpoint: Path) -> "Progress":
        """That of a checkpoint, which was found whole. Raises Refusal, alike on all ranks, for one of another loop."""
        with Saved(checkpoint) as saved:
            extra = saved.extra
        if "options" not in extra:
            raise Refusal(f"{checkpoint} was not written by mpi4dl train: load it with mpi4dl.checkpoints.load")
        with refusing():
            found: Progress = typed(cls, extra, f"{checkpoint}: {STATE}: 'extra'")
        return found


def options_to_compare(options: Mapping[str, str], num_images: int, counts: Sequence[int] = ()) -> dict[str, str]:
    """The options of a run that its checkpoints store, as a TOML file has them.

    Of `balance` it is what it came to: `counts` units of each stage.
    """
    cut = {BALANCE: dump(",".join(map(str, counts)))} if counts else {}
    return {**options, **cut, NUM_IMAGES: str(num_images)}


def contents_of(training: Any, validation: Any) -> dict[str, str]:
    """The digest of samples that are no files of their own, by the option that names them."""
    found: dict[str, str] = {}
    wholes = [getattr(each, "whole", each) for each in (training, validation)]
    for whole, which in zip(wholes, ("", " that validate"), strict=True):
        text, arrays = getattr(whole, "stream", None), getattr(whole, "digest", None)
        if which and (text is not None or whole is wholes[0]):
            continue
        found |= {} if text is None else {f"{CODE}`text`": text.digest}
        found |= {} if arrays is None else {f"{CODE}`images`{which}": arrays()}
        found |= {f"{CONTENT}`dataset`{which}": str(whole.print())} if hasattr(whole, "print") else {}
    return found


def files_of(prints: Mapping[tuple[str, str], str | None], weights: str | None = None) -> dict[str, str]:
    """Checksums of the files with code of the user's, of which there are `prints`, by the option that names it; and of
    the file of weights that a run begins with. Raises OSError.
    """
    found: dict[str, str] = {}
    for (name, _), each in prints.items():
        key = f"{CODE}`{name}`"
        found[key] = f"{found[key]},{each}" if key in found else str(each)
    path = None if weights is None else Path(weights).expanduser()
    if path is not None and path.is_dir():
        path = path / MODEL
    return found if path is None or not path.is_file() else {**found, f"{CODE}`weights`": checksum(path)}


def compare(checkpoint: Path, there: Progress, options: Mapping[str, str]) -> list[str]:
    """A message about each option that differs from the checkpoint's.

    Raises Refusal, alike on all ranks, where the run could not go on as it was begun.
    """
    unknown = {name: "unknown" for name in options if name.startswith((CODE, CONTENT, CLASS_WEIGHTS))}
    before = {**default_options(), **unknown, **there.options}  # an option that it does not know has its default
    missing = next((name for name in options if name not in before), None)
    if missing is not None:
        raise Refusal(f"{checkpoint}: {STATE} does not say what {_shown(missing)} was")
    said, as_many = [], _samples_per_step(before) == _samples_per_step(options)
    for name in options:
        was, now = (each[name].strip('"') for each in (before, options))
        shown = _shown(name)
        if was == now or name in OF_THIS_START:
            continue
        if name in SAME_ALWAYS:
            raise Refusal(
                f"{checkpoint} was written with {shown} {was}, but this is {now}: keep the value of the checkpoint"
            )
        if name in SAME_WITHIN_AN_EPOCH and there.batch and not (name in A_STEP and as_many):
            raise Refusal(
                f"{checkpoint} was written with {shown} {was}, but this is {now}, which must not change within an epoch"
            )
        rule = f"is not used: the run continues with {was}"
        said.append(
            f"{shown} {now} {rule if name in FROM_CHECKPOINT else f'is new: the checkpoint was written with {was}'}"
        )
    return said


def _samples_per_step(options: Mapping[str, str]) -> int | float:
    """The samples of a step; NaN, equal to nothing, if the options do not say it."""
    numbers = [options.get(name, "") for name in A_STEP]
    return prod(map(int, numbers)) if all(map(str.isdecimal, numbers)) else nan


def _shown(name: str) -> str:
    return name if " " in name else f"`{name}`"


def require_fit(checkpoint: Path, there: Progress, scheduler: Any, num_batches: int) -> None:
    """Raise Refusal, alike on all ranks, unless the epoch and the schedule can continue from there."""
    problem = f"its epoch has {there.batch} batches behind it" if there.batch > num_batches else None
    if problem is None and scheduler is not None:
        problem = unlike(there.scheduler or {}, scheduler.state_dict())
    if problem is not None:
        raise Refusal(f"{checkpoint} does not fit: {problem}")
