"""Which shapes of outputs and targets a task takes, and which it refuses."""

from typing import Any

import pytest
import torch

from mpi4dl.comm import Refusal
from mpi4dl.tasks.task import Classify, MultiLabel, Regress, Segment, Survive, Task

CLASSES, LABELS, OVERLAPPING = Classify(3), MultiLabel(3), Segment(3, loss="bce")
FORMS: list[tuple[Task, Any, Any, bool]] = [
    (CLASSES, (2, 3), (2,), True),
    (CLASSES, (2, 3), (2, 3), True),
    (CLASSES, (2, 3, 4, 4), (2,), False),
    (CLASSES, (2, 3), (2, 2), False),
    (CLASSES, (2, 3), (3,), False),
    (LABELS, (2, 3), (2, 3), True),
    (LABELS, (2, 3), (2,), False),
    (LABELS, (2, 3, 4), (2, 3, 4), False),
    (Regress(1), (2, 1), (2,), True),
    (Regress(1), (2,), (2,), True),
    (Regress(1), (2, 1, 4, 4), (2, 4, 4), True),
    (Regress(2), (2, 2), (2,), False),
    (Segment(3), (2, 3, 4, 5), (2, 4, 5), True),
    (Segment(3), (2, 3, 5), (2, 5), True),
    (Segment(3), (2, 3, 4, 5, 6), (2, 4, 5, 6), True),
    (Segment(3), (2, 3, 4, 5), (2, 5, 4), False),
    (Segment(3), (2, 3), (2,), False),
    (OVERLAPPING, (2, 3, 4, 5), (2, 3, 4, 5), True),
    (OVERLAPPING, (2, 3, 4, 5), (2, 4, 5), False),
    (Survive(1), (2,), (2, 2), True),
    (Survive(1), (2, 1), (2, 2), True),
    (Survive(1), (2, 2), (2, 2), False),
]


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "taken"), FORMS, ids=lambda each: getattr(each, "name", str(each))
)
def test_forms(task: Task, outputs: Any, targets: Any, taken: bool) -> None:
    made = torch.zeros(outputs), torch.zeros(targets)
    if taken:
        task.require(*made)
        return
    with pytest.raises(Refusal, match=task.name):
        task.require(*made)


@pytest.mark.parametrize("task", [CLASSES, LABELS, Regress(1), Segment(3), Survive(1)], ids=lambda task: task.name)
def test_what_is_no_tensor_is_refused(task: Task) -> None:
    with pytest.raises(Refusal, match=task.name):
        task.require(3.0, torch.zeros(2, 2))
