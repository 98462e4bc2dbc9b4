"""What is said of an image, by task: a record for JSON, and the same as a line of a table.

    classify      prediction, probabilities of all classes        regress    prediction, or several by name
    multilabel    predictions (0, 1) and probabilities by name    survival   risk, of which more is worse
    segment       the file of the mask, the pixels of each class; beside a true mask how alike both are

With labels there is `label`, or `labels` by name, or `time` and `event`. What cannot be read has an `error` instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

SINGULAR = {
    "labels": "label",
    "predictions": "prediction",
    "probabilities": "probability",
    "pixels": "pixels",
    "masks": "mask",
}
ALIKE = ("pixel_accuracy", "dice", "iou")
THRESHOLD = 0.5  # of the probability from which on a label counts as there
NOT_NUMBERS = "the model's outputs are not numbers (NaN)"

Record = dict[str, Any]


def columns_of(
    task: str, classes: Sequence[str], labelled: bool, apart: bool = False, crops: bool = False
) -> list[str]:
    """The columns of a table of records, such as "probability tumour"; `apart`: each class has a mask of its own.

    With `crops` there is `seen`, the share of an image's pixels that the model saw.
    """
    every: list[str] = []
    if task == "classify":
        every = ["label"] * labelled + ["prediction", *_named("probability", classes)]
    elif task == "multilabel":
        every = _named("label", classes) * labelled
        every += [*_named("prediction", classes), *_named("probability", classes)]
    elif task == "regress":
        several = len(classes) > 1
        every = (_named("label", classes) if several else ["label"]) * labelled
        every += _named("prediction", classes) if several else ["prediction"]
    elif task == "survival":
        every = ["time", "event"] * labelled + ["risk"]
    elif task == "segment":
        every = (
            list(ALIKE) if labelled else [*(_named("mask", classes) if apart else ["mask"]), *_named("pixels", classes)]
        )
    return ["image", *every, *(["seen"] if crops else []), "error"]


def _named(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {name}" for name in names]


def flat(record: Record) -> dict[str, Any]:
    """A record as a line of the table has it."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{SINGULAR.get(key, key)} {name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def is_undefined(outputs: Tensor) -> bool:
    """Whether some output of an image is not a number."""
    return bool(outputs.isnan().any())


def answer(task: str, classes: Sequence[str], outputs: Tensor, label: Any = None) -> Record:
    """What outputs of one image, those of `Task.predictions`, say; `label` is a tensor if there is one."""
    values = outputs.double().reshape(-1).tolist()
    true = None if label is None else label.reshape(-1).tolist()
    if task == "classify":
        best = max(range(len(values)), key=lambda number: (values[number], -number))
        said: Record = {} if true is None else {"label": classes[int(true[0])]}
        return {**said, "prediction": classes[best], "probabilities": dict(zip(classes, values, strict=True))}
    if task == "multilabel":
        said = {} if true is None else {"labels": {name: int(x) for name, x in zip(classes, true, strict=True)}}
        said["predictions"] = {name: int(value > THRESHOLD) for name, value in zip(classes, values, strict=True)}
        return {**said, "probabilities": dict(zip(classes, values, strict=True))}
    if task == "survival":
        said = {} if true is None else {"time": true[0], "event": int(true[1])}
        return {**said, "risk": values[0]}
    if len(values) > 1:
        said = {} if true is None else {"labels": dict(zip(classes, true, strict=True))}
        return {**said, "predictions": dict(zip(classes, values, strict=True))}
    return {**({} if true is None else {"label": true[0]}), "prediction": values[0]}
