"""Cross-validation by patient: all folds trained one after the other, and their metrics together.

    runs/cv/folds.csv                    which slides are in which fold
    runs/cv/fold_0, runs/cv/fold_1 ...   the run of each fold
    runs/cv/cross-validation-DATE.csv    metrics of each fold, their mean, standard deviation and interval
    runs/cv/evaluation-DATE.json, .csv   metrics of all predictions together, and a line for each slide with its fold

Each slide is predicted by the run that has not seen its patient. Validation chooses nothing there: the weights are
those of the last step. Where split files keep slides for tests in each fold, the best weights predict these.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from mpi4dl._signatures import signature_of
from mpi4dl._wording import aligned, counted, some
from mpi4dl.checkpoints.manifest import MODEL
from mpi4dl.comm import Communicator
from mpi4dl.datasets.slides.record import record_of
from mpi4dl.datasets.split import in_whole
from mpi4dl.inference.images import open_files_of_run
from mpi4dl.inference.model import Predictor
from mpi4dl.inference.options import Inference
from mpi4dl.inference.samples import UNDEFINED, Judging, Samples
from mpi4dl.inference.scoring import Scores, score, scores_of
from mpi4dl.options.config import OF_THE_TASK, Config, ConfigError, parse
from mpi4dl.options.declare import value_of, with_values, without_flags
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.sources import FOLDS, source_of, with_frame
from mpi4dl.options.tasks import with_task
from mpi4dl.results.evaluations import beside, file_of_evaluation, write_evaluation
from mpi4dl.results.formats import csv_lines, read_object
from mpi4dl.results.job import Settings, difference, settings_of
from mpi4dl.results.names import CONFIG, SUMMARY, VERSIONS
from mpi4dl.runs.assembly import prints_of
from mpi4dl.runs.folder import BEST, default_path
from mpi4dl.runs.samples import FILE as SAMPLES
from mpi4dl.runs.samples import RunSamples
from mpi4dl.tasks.curves import is_rule
from mpi4dl.training.data import Images
from mpi4dl.training.resuming import command_to_go_on, files_of
from mpi4dl.training.run import fit
from mpi4dl.training.setup import open_samples, set_up

_NAME = re.compile(r"fold_([0-9]{1,6})")


def fold_folders(folder: Path) -> dict[int, Path]:
    """The folders of the runs of folds in a folder, by their numbers; empty if it is itself a run."""
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    of = {int(name[1]): path for name, path in found if name and (path / CONFIG).is_file()}
    return dict(sorted(of.items()))


def train_folds(comm: Communicator, config: Config, spell: Callable[[str], str], argv: Sequence[str]) -> None:
    """Train all folds, those that are finished aside, and summarise them. Collective; raises Refusal on all ranks."""
    chosen, run = config.slides, config.run
    if chosen.folds is None or not source_of(config).has_files:
        comm.agree("`fold` all trains all folds of `slides`, or of `images` in files: say how many by `folds`")
    if run.resume not in ("none", "auto"):
        comm.agree(f"`resume` {run.resume}: `fold` all continues in `run_folder` by `resume` auto")
    asked = None if comm.rank else run.run_folder or str(default_path(config.model_name, datetime.now()))
    folder, num_folds = Path(comm.broadcast_object(asked)), chosen.folds or 0
    found: tuple[Config, set[int]] = config, set()
    if run.resume == "auto":
        with comm.together((ValueError, OSError)):
            if comm.rank == 0:
                found = _as_trained(config, fold_folders(folder))
        found = comm.broadcast_object(found)
    config, done = found
    for fold in range(num_folds):
        path = folder / f"fold_{fold}"
        if fold in done:
            _say(comm, f"fold {fold} of {num_folds} is finished: {path}")
            continue
        _say(comm, f"fold {fold} of {num_folds}: {path}")
        words = [*without_flags(Config, argv, ("fold",)), "--fold", str(fold)]
        fit(set_up(_of_fold(config, fold, path), comm, spell, words))
        if run.dry_run:
            return
        if not comm.broadcast_object((path / MODEL).is_file()):
            go_on = command_to_go_on(comm.size, argv, folder)
            _say(comm, f"stopped in fold {fold} of {num_folds}; continue this fold and the others with: {go_on}")
            return
    summarise(comm, folder, Inference(), Judging(), spell=spell)


def _of_fold(config: Config, fold: int, path: Path) -> Config:
    return with_values(config, {"fold": fold, "run_folder": str(path)})


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
        then, now = settings_of(there), settings_of(framed)
        if (path / MODEL).is_file():
            done.add(fold)
            then |= {**read_object(path / VERSIONS)["files"], **_contents(RunSamples.read(path / SAMPLES))}
            now |= {
                **files_of(prints_of(framed), framed.tuning.weights),
                **_contents(RunSamples.of(samples.training, samples.validation)),
            }
            now |= _new_samples(config, samples)
        _require_alike(path, then, now)
    return config, done


def _contents(kept: RunSamples) -> dict[str, list[Any]]:
    """What is known of each sample of a run, and its label."""
    return {f"sample {each.file}": [*each] for each in kept.samples}


def _new_samples(config: Config, samples: Images) -> dict[str, str]:
    """Samples that the table has got since its folds were made; a file of splits may leave some out."""
    whole, _ = in_whole(samples.training)
    rows = whole.rows if config.slides.split_file is None else ()
    return {f"sample {row.path}": "in no fold" for row in rows if not row.split and row.fold is None}


def _require_alike(path: Path, then: Settings, now: Settings) -> None:
    """Raise ConfigError if the run of a fold was trained with other settings than those of others."""
    other = difference(then, now)
    if other:
        raise ConfigError(
            f"{path} was trained with {other}, and all folds need the same: change it back, or "
            "train in another `run_folder`"
        )


def _config_of(run: Path) -> Config:
    return parse(["--config", str(run / CONFIG)])


def _say(comm: Communicator, line: str) -> None:
    if comm.rank == 0:
        print(line, flush=True)


class FoldScores(NamedTuple):
    """The scores of a fold."""

    fold: int
    scores: Scores


def summarise(
    comm: Communicator,
    folder: Path,
    chosen: Inference,
    judging: Judging,
    *,
    part: str | None = None,
    out: Path | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    spell: Callable[[str], str] = str,
) -> None:
    """Evaluate the runs of all folds in a folder; print and write their metrics together. Collective.

    Raises Refusal on all ranks.
    """
    if is_rule(judging.threshold):
        comm.agree(
            f"`threshold` {judging.threshold} chooses on validation samples, which folds are evaluated on: say a number"
        )
    looked = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            looked = _looked_at(folder, part)
    runs, asked, unfinished = comm.broadcast_object(looked)
    if len(runs) < 2:
        comm.agree(f"{folder}: {counted(len(runs), 'fold')} finished, but a summary needs two: train more folds")
    _say(comm, f"{counted(len(runs), 'fold')} of {folder}: their {asked} samples" + (
        f"; not finished: {some([*map(str, unfinished)])}" if unfinished else ""))  # fmt: skip
    found: list[FoldScores] = []
    places: dict[str, Any] | None = None
    for fold, path in runs.items():
        best = comm.broadcast_object(asked == "test" and (path / BEST).is_file())
        model = Predictor(path / BEST if best else path, chosen, comm)
        images, which = open_files_of_run(comm, model.config, model.about, path, asked)
        _say(comm, spell(f"fold {fold}: {model.weights} on {which}"))
        scores = score(model, images, resamples=0, level=level, speaks=True, judging=judging)
        found.append(FoldScores(fold, scores))
        places = _both(places, record_of(images))
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            for line in _written(folder, found, places, judging, out, resamples, level, asked, unfinished):
                print(spell(line), flush=True)


def _both(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is recorded of the slides of one table or folder, which two folds know of."""
    return second if first is None or second is None else {**second, "slides": first["slides"] | second["slides"]}


def _looked_at(folder: Path, part: str | None) -> tuple[dict[int, Path], str, list[int]]:
    """The runs of folds that are finished, the part of slides that they predict, and the folds that are not.

    Raises ConfigError if they were trained with other options.
    """
    every = fold_folders(folder)
    runs = {fold: path for fold, path in every.items() if (path / MODEL).is_file()}
    settings = {path: _of_run(path) for path in runs.values()}
    for path, then in settings.items():
        _require_alike(path, then, settings[next(iter(settings))])
    if part is None:  # slides for tests that all folds share are seen by none, and so are no fold's own
        own = not (folder / FOLDS).is_file() and all(_has_tests(path) for path in runs.values())
        part = "test" if own else "val"
    return runs, part, [fold for fold in every if fold not in runs]


def _of_run(path: Path) -> Settings:
    """The options of the run of a fold, and the user's files; without the number of the fold."""
    return {**settings_of(_of_fold(_config_of(path), 0, path)), **read_object(path / VERSIONS)["files"]}


def _has_tests(run: Path) -> bool:
    kept = RunSamples.at(run)
    return kept is not None and any(each.split == "test" for each in kept.samples)


class Summary(NamedTuple):
    """A metric over folds: values, mean, standard deviation, and the interval of the mean by Student's t, or NaN."""

    values: tuple[float, ...]
    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], level: float) -> "Summary":
        """Folds of which the metric is not defined are left out."""
        known = [value for value in values if not math.isnan(value)]
        if len(known) < 2:
            return cls(tuple(values), known[0] if known else math.nan, math.nan, math.nan, math.nan)
        from scipy.stats import t

        mean, deviation = fmean(known), stdev(known)
        half = float(t.ppf((1 + level) / 2, len(known) - 1)) * deviation / math.sqrt(len(known))
        return cls(tuple(values), mean, deviation, mean - half, mean + half)


def summaries(found: Sequence[FoldScores], level: float) -> dict[str, dict[str, Summary]]:
    """By level, slide or patient, and metric."""
    levels: dict[str, list[Mapping[str, Any]]] = {found[0].scores.what: [each.scores.metrics for each in found]}
    if all(each.scores.patients for each in found):
        levels["patient"] = [each.scores.patients.metrics for each in found if each.scores.patients]
    return {
        name: {
            metric: Summary.of([of_fold[metric].value for of_fold in metrics], level)
            for metric in metrics[0]
            if all(metric in of_fold for of_fold in metrics)
        }
        for name, metrics in levels.items()
    }


def summary_lines(found: Sequence[FoldScores], level: float) -> Iterator[str]:
    """The table of folds, for people."""
    for name, metrics in summaries(found, level).items():
        yield f"by {name}, mean over {counted(len(found), 'fold')}:"
        head = ("metric", *(f"fold {each.fold}" for each in found), "mean", "sd", f"{100 * level:g} % from", "to")
        rows = (
            (metric, *(_shown(value) for value in (*of.values, of.mean, of.deviation, of.low, of.high)))
            for metric, of in metrics.items()
        )
        yield from aligned([head, *rows], {"metric"})
        yield ""


def _shown(value: float) -> str:
    return UNDEFINED if math.isnan(value) else f"{value:.4f}"


def summary_table(found: Sequence[FoldScores], level: float) -> bytes:
    """The table of folds, as a CSV file; empty cells are undefined."""
    columns = ("level", "metric", *(f"fold {each.fold}" for each in found), "mean", "standard deviation", "low", "high")
    rows = (
        (name, metric, *of.values, of.mean, of.deviation, of.low, of.high)
        for name, metrics in summaries(found, level).items()
        for metric, of in metrics.items()
    )
    return csv_lines(columns, *rows)


def _written(
    folder: Path,
    found: Sequence[FoldScores],
    places: Mapping[str, Any] | None,
    judging: Judging,
    out: Path | None,
    resamples: int,
    level: float,
    part: str,
    unfinished: Sequence[int],
) -> Iterator[str]:
    """Write what there is of all folds, and say it. Raises OSError, Refusal."""
    file = file_of_evaluation(folder, out, datetime.now())
    table, files = beside(file, SUMMARY), {SUMMARY: summary_table(found, level)}
    yield from summary_lines(found, level)
    missing = [str(each.fold) for each in found if not each.scores.levels]
    slides = [name for each in found for samples in each.scores.levels[:1] for name in samples.names]
    if missing or len({*slides}) < len(slides):
        why = f"no predictions of fold {some(missing)}" if missing else "a slide is in several folds"
        write_evaluation(file, None, files)
        yield f"predictions of all folds are not pooled: {why}"
        yield f"see {table}"
        return
    samples = Samples.joined([each.scores.levels[0] for each in found])
    first = found[0].scores
    kept: dict[str, Any] = {
        "records": [{**record, "fold": each.fold} for each in found for record in each.scores.records],
        "bad": {name: why for each in found for name, why in each.scores.bad.items()},
        "crops": first.crops,
        "root": first.root,
        "count": sum(each.scores.count for each in found),
        "remarks": (),
    }
    pooled = scores_of(samples, judging, resamples, level, **kept)
    told: dict[str, Any] = {
        "source": str(folder),
        "part": part,
        "folds": [each.fold for each in found],
        "unfinished": unfinished,
        **({} if places is None else {"slides": {**places, "signature": signature_of(places)}}),
    }
    of_all = summaries(found, level)
    told["cross_validation"] = {
        name: {metric: of._asdict() for metric, of in metrics.items()} for name, metrics in of_all.items()
    }
    remarks = pooled.write(file, told, level, files)
    yield "predictions of all folds together, each by the run that did not see its patient:"
    yield from pooled.table(level, resamples > 0)
    yield from remarks
    yield f"{counted(len(found), 'fold')}: see {table}, {file.name} and {file.stem}.csv"
