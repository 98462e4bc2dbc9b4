"""Images that cannot be read are left out of a batch, and they alone: the others train as a plain loop trains them."""

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.datasets import Batch
from mpi4dl.engine import Evaluation, StepResult
from mpi4dl.parallel.plan import Plan
from mpi4dl.training.input_pipeline import BadImages
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, assert_close, batch_of, build, engine_of, tiles_of

TASK = Task("resnet_v2", (19, 14), batch=8, model_options=(("depth", 20), ("num_filters", 4)))
ONE = (1, 1)
CASES = {
    "one microbatch": (Plan(((1, 2),)), {3}),
    "all of a microbatch": (Plan((ONE, ONE), microbatches=4), {2, 3, 7}),
    "the first and the last": (Plan((ONE, ONE), microbatches=4), {0, 1, 6, 7}),
    "all but one": (Plan((ONE, ONE), microbatches=4), {0, 1, 2, 3, 6, 7}),
    "all of one replica": (Plan((ONE, ONE), data=2, microbatches=2), {0, 1, 4}),
    "tiles and zero-bubble": (Plan(((1, 2), ONE), microbatches=4, schedule="zero-bubble"), {4, 5}),
    "interleaved": (Plan((ONE, ONE), microbatches=4, schedule="interleaved", chunks=2), {4, 5}),
    "both directions": (Plan((ONE, ONE), microbatches=2, bidirectional=1), {2, 3, 7}),
    "one direction": (Plan((ONE, ONE), microbatches=2, bidirectional=1), {0, 1, 2, 3}),
    "ZeRO": (Plan((ONE, ONE), data=2, microbatches=2, zero=2), {0, 1, 2, 3}),
    "ZeRO in both directions": (Plan((ONE, ONE), microbatches=2, bidirectional=1, zero=1), {4, 5, 6, 7}),
}


def left_out(
    comm: Communicator, plan: Plan, bad: set[int]
) -> tuple[StepResult, Evaluation, dict[str, torch.Tensor] | None]:
    """A step, and a validation, of a batch in which those that read these images find that they cannot."""
    engine = engine_of(comm, TASK, plan)
    bad_images = BadImages(comm, "skip")

    def batch(training: bool) -> tuple[Batch, tuple]:
        images, labels = batch_of(TASK, 0)
        reads = engine.reads(len(labels), TASK.size, training)
        mine = {position for read in reads for position in bad if position in range(*read.box.batch)}
        tiles = tuple(tiles_of(images, engine, training))
        found = Batch(tiles, labels, tuple(range(len(labels))), {position: f"{position}: bad" for position in mine})
        left = bad_images.agree(found, plan.divide(len(labels), training), reads)
        assert left is not None
        return left

    readable, microbatches = batch(training=False)
    evaluation = engine.evaluate([(readable.tiles, readable.labels, microbatches)], TASK.size)
    readable, microbatches = batch(training=True)
    result = engine.step(readable.tiles, readable.labels, TASK.size, microbatches)
    return result, evaluation, engine.gather_state()


def plainly(plan: Plan, bad: set[int]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss in validation and in training of the images that are left, and the values after a step on them."""
    model, optimizer = build(TASK)
    images, labels = batch_of(TASK, 0)
    keep = [position for position in range(len(labels)) if position not in bad]
    with torch.no_grad():
        validation = float(F.cross_entropy(model.eval()(images[keep]), labels[keep]))
    model.train()
    total = 0.0
    for microbatch in plan.divide(len(labels)):
        chosen = [position for position in keep if position in range(*microbatch.samples)]
        if chosen:
            loss = F.cross_entropy(model(images[chosen]), labels[chosen]) * len(chosen) / len(keep)
            loss.backward()
            total += float(loss.detach())
    optimizer.step()
    return validation, total, model.state_dict()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(4)
def test_only_the_bad_images_go(ranks: Ranks, name: str) -> None:
    plan, bad = CASES[name]
    validation, loss, state = plainly(plan, bad)
    found = ranks(plan.num_ranks).run(left_out, plan, bad)
    for result, evaluation, _ in found:
        assert result.loss == pytest.approx(loss, rel=1e-10)
        assert (evaluation.loss, evaluation.count) == (pytest.approx(validation, rel=1e-10), TASK.batch - len(bad))
    values = found[0][2]
    assert values is not None
    for key, value in state.items():
        assert_close(values[key], value, 1e-9, key)
