"""Show what `make slides` and `make tune` found: the best validation AUC, and how often a map is highest in a lesion.

    python -m examples.slides_results slides
    python -m examples.slides_results tune

Seconds are those of training, without start and validation; memory is that of the rank that used most. The exit code is
1 if a run misses its goals, or if 512 px were enough to see the lesions.
"""

import csv
import json
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

AUC, HITS = 0.9, 0.8


class Form(NamedTuple):
    """A run and the folder of its predictions. `finds`: whether it shall reach the goals; None: neither is asked.

    `points`: whether the highest patches shall lie in lesions, too.
    """

    name: str
    run: str
    predicted: str | None
    finds: bool | None
    points: bool = True


FORMS = {
    "slides": (
        Form("whole slides, streamed", "slides", "slides", finds=True),
        Form("patches, gated attention, end to end", "slides_patches", "patches", finds=True),
        Form("the same on frozen features", "slides_features", "features", finds=None),
        Form("whole slides of 512 px", "slides_512", None, finds=False),
    ),
    "tune": (
        Form("frozen features", "tune_frozen", "tune_frozen", finds=True),
        Form("adapters of rank 8 (LoRA)", "tune_lora", "tune_lora", finds=True, points=False),
        Form("all weights", "tune_all", "tune_all", finds=True, points=False),
    ),
}


def main(demonstration: str) -> None:
    failed = []
    print(f"{'':36}  epochs  seconds    MiB  best validation AUC  highest in the lesion, of validation")
    for form in FORMS[demonstration]:
        epochs, auc = aucs_of(Path("runs") / form.run)
        seconds, mebibytes = costs_of(Path("runs") / form.run)
        hits, held = [], []
        if form.predicted is not None:
            found = hits_of(Path("predicted") / form.predicted)
            hits, held = [*found.values()], [found[slide] for slide in validating(Path("runs") / form.run) & {*found}]
        counted = f"{sum(hits)} of {len(hits)} slides, {sum(held)} of {len(held)}" if hits else ""
        print(f"{form.name:36}  {epochs:6}  {seconds:7.0f}  {mebibytes:5.0f}  {auc:19.3f}  {counted}")
        if form.finds is True and auc < AUC:
            failed.append(f"{form.name}: an AUC of {AUC} was expected")
        if form.finds is True and form.points and (not hits or sum(hits) < HITS * len(hits)):
            failed.append(f"{form.name}: {HITS:.0%} of the lesions were expected")
        if form.finds is False and auc >= AUC:
            failed.append(f"{form.name}: an AUC of {AUC} was not expected, since the lesions cannot be seen")
    for line in failed:
        print(line, file=sys.stderr)
    sys.exit(bool(failed))


def aucs_of(run: Path) -> tuple[int, float]:
    """The number of epochs of a run, and its best validation AUC."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line["auc"] for line in lines if line["phase"] == "validation"]
    return len(found), max(found)


def costs_of(run: Path) -> tuple[float, float]:
    """The seconds that a run trained for, and the MiB of the rank that used most memory."""
    batch_size = tomllib.loads((run / "config.toml").read_text())["data"]["batch_size"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["phase"] == "train"]
    steps = pairwise((0, *(line["step"] for line in trained)))
    rates = [line["images_per_second"] for line in trained]
    seconds = sum((end - begin) * batch_size / rate for (begin, end), rate in zip(steps, rates, strict=True))
    return seconds, max(line["peak_memory_bytes"] for line in trained) / 2**20


def hits_of(predicted: Path) -> dict[str, bool]:
    """Of each annotated slide, whether its map is highest in an annotated region."""
    with (predicted / "hits.csv").open(newline="") as file:
        return {row["slide"]: row["annotated"] == "1" for row in csv.DictReader(file)}


def validating(run: Path) -> set[str]:
    """The slides that a run was not trained on."""
    with (run / "samples.csv").open(newline="") as file:
        return {row["slide_id"] for row in csv.DictReader(file) if row["split"] == "val"}


if __name__ == "__main__":
    main(*sys.argv[1:])
