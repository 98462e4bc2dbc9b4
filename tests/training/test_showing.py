"""The images of a validation, and what they are taken for, reach rank 0 under any plan, and none is computed twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpi4dl._palette import WRONG
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.options.config import parse
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.runs.folder import RunFolder
from mpi4dl.tasks.task import Classify, MultiLabel, Regress, Segment, Task
from mpi4dl.training.report import Reporter
from mpi4dl.training.tensorboard import Showing, overlaid
from tests.pool.ranks import Ranks
from tests.support.short_runs import tiles_of
from tests.tasks.cases import SIZE, Dense, Small, images_of
from tests.training.test_report import read_events

TILES = Plan(((1, 2), (1, 2)), microbatches=2)
COUNT, CLASSES = 6, ("cat", "dog", "cow")


class Kept(Reporter):
    """A reporter that also keeps what it is given."""

    def images(self, name: str, images_N3HW: Tensor, step: int) -> None:
        self.shown = images_N3HW
        super().images(name, images_N3HW, step)

    def figure(self, name: str, image_HW3: Any, step: int) -> None:
        self.picture = image_HW3
        super().figure(name, image_HW3, step)


def masks() -> Tensor:
    return torch.arange(COUNT * SIZE[0] * SIZE[1]).view(COUNT, *SIZE) % 3


def watched(comm: Communicator, plan: Plan, task: Task, targets: Tensor, folder: Path) -> tuple[Any, Any, list[str]]:
    """What a validation of two batches shows: samples, the picture, and the words of what is shown."""
    dense = isinstance(task, Segment)

    def build() -> Any:
        return (Dense() if dense else Small()).double()

    held = split(build, plan, comm, seed=0, image=(4, 3, *SIZE))
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), lambda x, y: 0 * x.sum(), comm=comm)
    config = parse(["--image-size", "x".join(map(str, SIZE)), "--mean", "0.5", "--std", "0.25"])
    reporter = Kept(RunFolder(folder), 9, classes=CLASSES) if comm.rank == 0 else None
    showing = Showing(reporter, engine, config, task, CLASSES)
    images, said = images_of(COUNT), []
    words = task.words

    def heard(value: Tensor, classes: Sequence[str]) -> str:
        said.append(words(value, classes))
        return said[-1]

    def batches() -> Any:
        for part, labels in zip(images.split(4), targets.split(4), strict=True):
            tiles, microbatches = tiles_of(part, engine, training=False), engine.plan.divide(len(part), False)
            showing.watch(tiles, microbatches[0])
            yield tiles, labels, microbatches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(task), "words", staticmethod(heard))
        for _ in range(2):  # a validation begins anew
            said.clear()
            engine.evaluate(batches(), SIZE, {}, showing.measured)
            showing.validated()
    showing.samples(tiles_of(images[:4], engine, training=False), engine.plan.divide(4, False)[0])
    if reporter is None:
        return None, None, said
    reporter.close()
    return reporter.shown, reporter.picture, said


def plainly(dense: bool) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return (Dense() if dense else Small()).double()(images_of(COUNT))


@pytest.mark.parametrize("plan", [Plan(((1, 1),)), TILES], ids=str)
def test_masks_of_the_first_images_that_validate(ranks: Ranks, plan: Plan, tmp_path: Path) -> None:
    task, targets = Segment(3), masks()
    targets[0, 0] = task.ignore_index
    (samples, picture, _), *others = ranks(plan.num_ranks).run(watched, plan, task, targets, tmp_path)
    n = len(samples)
    assert n == (4 if plan.num_ranks == 1 else 2)
    assert all(other[:2] == (None, None) for other in others)
    assert torch.allclose(samples.double(), images_of(COUNT)[:n] * 0.25 + 0.5, atol=1e-5)
    true = targets[:n].where(targets[:n] >= 0, -1)
    assert (picture == overlaid(samples, true, plainly(True).argmax(1)[:n])).all()
    assert {"samples", "validation/images"} <= set(read_events(tmp_path).Tags()["images"])


def words_of(ranks: Ranks, task: Task, targets: Tensor, folder: Path) -> Sequence[str]:
    folder.mkdir()
    (_, picture, said), *_ = ranks(4).run(watched, TILES, task, targets, folder)
    true, predicted = said[:2], said[2:]
    assert (picture == WRONG).all(-1).any() == (true != predicted)
    return [*true, *predicted]


def test_words_of_labels_and_numbers(ranks: Ranks, tmp_path: Path) -> None:
    outputs = plainly(False)[:2]
    best = [CLASSES[int(i)] if int(i) < 3 else f"class {int(i)}" for i in outputs.argmax(1)]
    assert words_of(ranks, Classify(outputs.shape[1]), torch.tensor([1, 3, 0, 0, 2, 1]), tmp_path / "a") == [
        "dog",
        "class 3",
        *best,
    ]
    labels = torch.zeros(COUNT, outputs.shape[1])
    labels[0, :2] = 1
    likely = [", ".join(CLASSES[i] if i < 3 else f"label {i}" for i in row.nonzero()) or "none" for row in outputs > 0]
    assert words_of(ranks, MultiLabel(outputs.shape[1]), labels, tmp_path / "b") == ["cat, dog", "none", *likely]
    numbers = [", ".join(f"{float(x):.3g}" for x in row[:4]) for row in outputs]
    assert words_of(ranks, Regress(outputs.shape[1]), labels, tmp_path / "c")[2:] == numbers
