"""The names of the files of results, as reference/run-folder.md lists them."""

from typing import NamedTuple


class JobKind(NamedTuple):
    """A kind of job over many items: NAME.json has its settings, NAME.jsonl a record of each item, called by `key`.

    `keeps_others`: records of items that a later job is not asked for stay. `remedy` is what to do about a folder that
    has other results.
    """

    name: str
    key: str
    keeps_others: bool = False
    remedy: str = "choose another `out`, or say `overwrite`"


PREDICTIONS = JobKind("predictions", "image")
FEATURES = JobKind("features", "slide", keeps_others=True)
COMPOSED = JobKind("compose", "slide", remedy="name another folder")

# Of a run.
CONFIG, VERSIONS, METRICS, LOG = "config.toml", "versions.json", "metrics.jsonl", "log-rank0.txt"
DESCRIPTION, MEASURES, PORTRAIT = "model.json", "measures.json", "portrait.json"

# Of predictions: the folder of pictures that a model made.
IMAGES = "images"

# Of an evaluation: two files of one name, and others whose names begin otherwise.
EVALUATION, COMPARISON, SUMMARY, EXAMPLES = "evaluation", "comparison.csv", "cross-validation.csv", "examples.jpg"
BESIDE = ("curves.csv", "calibration.csv", "curves.png", "patients.csv", COMPARISON, SUMMARY, EXAMPLES)
