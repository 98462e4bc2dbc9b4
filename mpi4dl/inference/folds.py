"""Cross-validation by patient: the metrics of the runs of all folds together.

    runs/cv/fold_0, runs/cv/fold_1 ...   the run of each fold
    runs/cv/cross-validation-DATE.csv    metrics of each fold, their mean, standard deviation and interval
    runs/cv/evaluation-DATE.json, .csv   metrics of all predictions together, and a line for each slide with its fold

Each slide is predicted by the run that has not seen its patient. Validation chooses nothing there: the weights are
those of the last step. Where split files keep slides for tests in each fold, the best weights predict these.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from mpi4dl._wording import aligned, counted, some
from mpi4dl.checkpoints.manifest import MODEL
from mpi4dl.comm import Communicator
from mpi4dl.datasets.split import Named
from mpi4dl.inference.images import open_files_of_run
from mpi4dl.inference.model import Predictor
from mpi4dl.inference.options import Inference
from mpi4dl.inference.samples import Judging, Samples, shown
from mpi4dl.inference.scoring import Scores, score, scores_of
from mpi4dl.options.sources import FOLDS
from mpi4dl.results.evaluations import beside, file_of_evaluation, require_writable, write_evaluation
from mpi4dl.results.formats import csv_lines
from mpi4dl.results.names import SUMMARY
from mpi4dl.results.runs import fold_folders
from mpi4dl.results.slides import places_of
from mpi4dl.runs.folder import BEST
from mpi4dl.runs.samples import RunSamples
from mpi4dl.tasks.curves import is_rule
from mpi4dl.training.folds import require_alike, say, settings_of_fold


def summarise(
    comm: Communicator,
    folder: Path,
    chosen: Inference | None = None,
    judging: Judging | None = None,
    spell: Callable[[str], str] = str,
) -> None:
    """Evaluate the runs of all folds in a folder; print and write their metrics together. Collective.

    Raises Refusal on all ranks.
    """
    chosen, judging = chosen or Inference(), judging or Judging()
    if is_rule(judging.threshold):
        comm.agree(
            f"`threshold` {judging.threshold} chooses on validation samples, which folds are evaluated on: say a number"
        )
    out = None if judging.out is None else Path(judging.out)
    comm.from_first(lambda: require_writable(out or folder))
    runs, asked, unfinished = comm.from_first(lambda: _looked_at(folder, judging.part))
    if len(runs) < 2:
        comm.agree(f"{folder}: {counted(len(runs), 'fold')} finished, but a summary needs two: train more folds")
    say(comm, f"{counted(len(runs), 'fold')} of {folder}: their {asked} samples" + (
        f"; not finished: {some([*map(str, unfinished)])}" if unfinished else ""))  # fmt: skip
    found: dict[int, Scores] = {}
    seen: list[Named] = []
    for fold, path in runs.items():
        best = comm.broadcast_object(asked == "test" and (path / BEST).is_file())
        model = Predictor(path / BEST if best else path, chosen, comm)
        images, which = open_files_of_run(comm, model.trained, path, asked)
        say(comm, spell(f"fold {fold}: {model.weights} on {which}"))
        found[fold] = score(model, images, replace(judging, resamples=0), speaks=True)
        seen.append(images)
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            for line in _written(folder, found, places_of(*seen), judging, out, asked, unfinished):
                print(spell(line), flush=True)


def _looked_at(folder: Path, part: str | None) -> tuple[dict[int, Path], str, list[int]]:
    """The runs of folds that are finished, the part of slides that they predict, and the folds that are not.

    Raises ConfigError if they were trained with other options.
    """
    every = fold_folders(folder)
    runs = {fold: path for fold, path in every.items() if (path / MODEL).is_file()}
    settings = {path: settings_of_fold(path) for path in runs.values()}
    for path, then in settings.items():
        require_alike(path, then, settings[next(iter(settings))])
    if part is None:  # slides for tests that all folds share are seen by none, and so are no fold's own
        kept = [found.samples if (found := RunSamples.at(path)) else [] for path in runs.values()]
        own = not (folder / FOLDS).is_file() and all("test" in {each.split for each in samples} for samples in kept)
        part = "test" if own else "val"
    return runs, part, [fold for fold in every if fold not in runs]


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


def summaries(found: Mapping[int, Scores], level: float) -> dict[str, dict[str, Summary]]:
    """By level, slide or patient, and metric."""
    every = [*found.values()]
    levels: dict[str, list[Mapping[str, Any]]] = {every[0].what: [each.metrics for each in every]}
    if all(each.patients for each in every):
        levels["patient"] = [each.patients.metrics for each in every if each.patients]
    return {
        name: {
            metric: Summary.of([of_fold[metric].value for of_fold in metrics], level)
            for metric in metrics[0]
            if all(metric in of_fold for of_fold in metrics)
        }
        for name, metrics in levels.items()
    }


def summary_lines(found: Mapping[int, Scores], level: float) -> Iterator[str]:
    """The table of folds, for people."""
    for name, metrics in summaries(found, level).items():
        yield f"by {name}, mean over {counted(len(found), 'fold')}:"
        head = ("metric", *(f"fold {fold}" for fold in found), "mean", "sd", f"{100 * level:g} % from", "to")
        rows = (
            (metric, *(shown(value) for value in (*of.values, of.mean, of.deviation, of.low, of.high)))
            for metric, of in metrics.items()
        )
        yield from aligned([head, *rows], {"metric"})
        yield ""


def summary_table(found: Mapping[int, Scores], level: float) -> bytes:
    """The table of folds, as a CSV file; empty cells are undefined."""
    columns = ("level", "metric", *(f"fold {fold}" for fold in found), "mean", "standard deviation", "low", "high")
    rows = (
        (name, metric, *of.values, of.mean, of.deviation, of.low, of.high)
        for name, metrics in summaries(found, level).items()
        for metric, of in metrics.items()
    )
    return csv_lines(columns, *rows)


def _written(
    folder: Path,
    found: Mapping[int, Scores],
    places: Mapping[str, Any],
    judging: Judging,
    out: Path | None,
    part: str,
    unfinished: Sequence[int],
) -> Iterator[str]:
    """Write what there is of all folds, and say it. Raises OSError, Refusal."""
    file = file_of_evaluation(folder, out, datetime.now())
    table, files = beside(file, SUMMARY), {SUMMARY: summary_table(found, judging.level)}
    yield from summary_lines(found, judging.level)
    missing = [str(fold) for fold, scores in found.items() if not scores.levels]
    slides = [name for scores in found.values() for samples in scores.levels[:1] for name in samples.names]
    if missing or len({*slides}) < len(slides):
        why = f"no predictions of fold {some(missing)}" if missing else "a slide is in several folds"
        write_evaluation(file, None, files)
        yield f"predictions of all folds are not pooled: {why}"
        yield f"see {table}"
        return
    samples = Samples.joined([scores.levels[0] for scores in found.values()])
    first = next(iter(found.values()))
    kept: dict[str, Any] = {
        "records": [{**record, "fold": fold} for fold, scores in found.items() for record in scores.records],
        "bad": {name: why for scores in found.values() for name, why in scores.bad.items()},
        "crops": first.crops,
        "root": first.root,
        "count": sum(scores.count for scores in found.values()),
        "remarks": (),
    }
    pooled = scores_of(samples, judging, **kept)
    told: dict[str, Any] = {
        "source": str(folder),
        "part": part,
        "folds": [*found],
        "unfinished": unfinished,
        **places,
    }
    of_all = summaries(found, judging.level)
    told["cross_validation"] = {
        name: {metric: of._asdict() for metric, of in metrics.items()} for name, metrics in of_all.items()
    }
    remarks = pooled.write(file, told, files)
    yield "predictions of all folds together, each by the run that did not see its patient:"
    yield from pooled.table()
    yield from remarks
    yield f"{counted(len(found), 'fold')}: see {table}, {file.name} and {file.stem}.csv"
