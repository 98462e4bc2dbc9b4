"""mpi4dl.training.input_pipeline: images that one rank cannot read are left out by all, or all stop; and they alone.

What one rank has to tell, all hear; and what comes next can be looked at before its turn.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.engine import Evaluation, StepResult
from mpi4dl.geometry import Box, Interval
from mpi4dl.parallel.inputs import Microbatch, Read
from mpi4dl.parallel.plan import Plan
from mpi4dl.training.input_pipeline import BadImages, ControlFlags, Reading
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import Task, assert_close, batch_of, build, engine_of, tiles_of

BATCH_SIZE = 4
ONE_MICROBATCH = (Microbatch(0, 0, (0, BATCH_SIZE)),)
TWO_MICROBATCHES = (Microbatch(0, 0, (0, 1, 2)), Microbatch(0, 1, (2, 3, 4)))
PIXELS = Interval(0, 2)
Errors = dict[int, str]


class Left(NamedTuple):
    """What is left of a batch on a rank: the images of each of its tiles, labels, samples, and the microbatches."""

    tiles: list[list[int]]
    labels: list[int]
    indices: tuple[int, ...]
    skipped: int
    microbatches: tuple[Microbatch, ...]


def agree(
    comm: Communicator,
    policy: str,
    held: list[tuple[tuple[int, int], ...]],
    errors: list[Errors],
    microbatches: tuple[Microbatch, ...] = ONE_MICROBATCH,
    problem: str | None = None,
) -> Left | str | None:
    """A body: what is left on this rank, whose tiles hold images from .. to .., and which finds errors, or a problem.

    The tile of image i is full of i, its label is 10 + i, and it is sample 20 + i of the dataset.
    """
    mine = [Interval(*each) for each in held[comm.rank]]
    tiles = [torch.arange(*each, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 3, 2, 2) for each in mine]
    indices = tuple(range(20, 20 + BATCH_SIZE))
    batch = Batch(tuple(tiles), torch.arange(BATCH_SIZE) + 10, indices, errors[comm.rank])
    reads = [Read(part, Box(each, PIXELS, PIXELS)) for part, each in zip(microbatches, mine, strict=True)]
    bad_images = BadImages(comm, policy)
    try:
        left = bad_images.agree(replace(batch, problem=problem if comm.rank else None), microbatches, reads)
    except Refusal as refusal:
        return str(refusal)
    if left is None:
        return None
    batch, microbatches = left
    assert batch.errors == {}
    assert all(tile.shape[1:] == (3, 2, 2) for tile in batch.tiles)
    seen = [tile[:, 0, 0, 0].int().tolist() for tile in batch.tiles]
    return Left(seen, batch.labels.tolist(), batch.indices, bad_images.skipped, microbatches)


def left(tiles: list[list[int]], images: list[int], *microbatches: Microbatch) -> Left:
    parts = microbatches or (Microbatch(0, 0, (0, len(images))),)
    return Left(tiles, [10 + i for i in images], tuple(20 + i for i in images), BATCH_SIZE - len(images), parts)


REPLICAS, TILES, ALONE = [((0, 2),), ((2, 4),)], [((0, 4),), ((0, 4),)], [((0, 4),)]
HALVES = [((1, 2), (3, 4))]  # of each of two microbatches, one rank has the second half
ALL_BAD = {i: f"{i}: damaged" for i in range(BATCH_SIZE)}
STOPS = "; `on_bad_image` skip leaves such images out"
CASES = {
    "without errors": ("error", REPLICAS, [{}, {}], [left([[0, 1]], [0, 1, 2, 3]), left([[2, 3]], [0, 1, 2, 3])]),
    "another replica's": ("skip", REPLICAS, [{1: "b"}, {}], [left([[0]], [0, 2, 3]), left([[2, 3]], [0, 2, 3])]),
    "another tile's": ("skip", TILES, [{3: "d"}, {0: "a", 3: "d"}], [left([[1, 2]], [1, 2])] * 2),
    "all of a replica": ("skip", REPLICAS, [{}, {2: "c", 3: "d"}], [left([[0, 1]], [0, 1]), left([[]], [0, 1])]),
    "all": ("skip", TILES, [ALL_BAD, ALL_BAD], [None, None]),
    "all stop with the first": ("error", TILES, [{}, {3: "d", 2: "c"}], [f"c{STOPS}"] * 2),
    "one rank alone stops": ("error", ALONE, [{0: "a"}], [f"a{STOPS}"]),
    "one rank alone": ("skip", ALONE, [{0: "a"}], [left([[1, 2, 3]], [1, 2, 3])]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_one_rank_cannot_read_all_leave_out_or_stop_at(ranks: Ranks, case: str) -> None:
    policy, held, errors, expected = CASES[case]
    assert ranks(len(held)).run(agree, policy, held, errors) == expected


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({1}, left([[], [3]], [0, 2, 3], Microbatch(0, 0, (0, 1, 1)), Microbatch(0, 1, (1, 2, 3)))),
        ({2, 3}, left([[1]], [0, 1], Microbatch(0, 0, (0, 1, 2)))),
        ({0, 1, 2}, left([[3]], [3], Microbatch(0, 1, (0, 0, 1)))),
    ],
    ids=str,
)
def test_microbatches_shrink_or_go_alone(ranks: Ranks, bad: set[int], expected: Left) -> None:
    errors = {i: f"{i}: damaged" for i in bad}
    assert ranks(1).run(agree, "skip", HALVES, [errors], TWO_MICROBATCHES) == [expected]


def test_what_one_rank_is_short_of_stops_all_by_any_policy(ranks: Ranks) -> None:
    problem = "tifffile is not here"
    assert ranks(2).run(agree, "skip", TILES, [{}, {}], ONE_MICROBATCH, problem) == [problem] * 2


@on_ranks(2)
def test_an_image_is_counted_and_logged_once(comm: Communicator) -> None:
    """The same damaged image in two epochs, and another one."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mpi4dl")
    logger.addHandler(handler)
    reads = [Read(ONE_MICROBATCH[0], Box(Interval(0, BATCH_SIZE), PIXELS, PIXELS))]
    try:
        bad_images = BadImages(comm, "skip")
        for errors in ({1: "b: damaged"}, {3: "b: damaged"}, {0: "a: damaged"}):
            batch = Batch((torch.zeros(4, 3, 2, 2),), torch.arange(4), (20, 21, 22, 23), errors)
            bad_images.agree(batch, ONE_MICROBATCH, reads)
    finally:
        logger.removeHandler(handler)
    assert (bad_images.skipped, logged) == (2, ["skipped: b: damaged", "skipped: a: damaged"])


# The others train as a plain loop trains them.

TASK = Task("resnet_v2", (19, 14), batch=8, model_options=(("depth", 20), ("num_filters", 4)))
ONE = (1, 1)
LEFT_OUT = {
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


def left_out(comm: Communicator, plan: Plan, bad: set[int]) -> tuple[StepResult, Evaluation, dict[str, Tensor] | None]:
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


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.sample(4)
def test_only_the_bad_images_go(ranks: Ranks, name: str) -> None:
    plan, bad = LEFT_OUT[name]
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
    found = ranks(plan.num_ranks).run(left_out, plan, bad)
    for result, evaluation, _ in found:
        assert result.loss == pytest.approx(total, rel=1e-10)
        assert (evaluation.loss, evaluation.count) == (pytest.approx(validation, rel=1e-10), len(keep))
    values = found[0][2]
    assert values is not None
    for key, value in model.state_dict().items():
        assert_close(values[key], value, 1e-9, key)


def heard(comm: Communicator) -> ControlFlags:
    return ControlFlags.of_all(comm, ControlFlags(comm.rank == 1, False, comm.rank != 1))


def test_what_is_so_on_any_rank_is_heard_by_all(ranks: Ranks) -> None:
    assert ranks(3).run(heard) == [ControlFlags(True, False, True)] * 3
    assert ControlFlags.heard([0.0, 2.0, 0.0]) == ControlFlags(False, True, False)


@on_ranks(1)
def test_what_comes_next_is_made_when_it_is_looked_at_and_stays_the_next(comm: Communicator) -> None:
    made: list[int] = []

    class Numbers(list[int]):
        def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
            for number in self:
                made.append(number)
                yield Batch((), torch.zeros(1), (number,), {0: "bad"} if number == 2 else {})

    flags = partial(ControlFlags, False, False)
    reading = Reading(comm, Numbers(range(4)), 0, 0, BadImages(comm, "skip"), lambda *_: ((), ()), flags)
    batches = iter(reading)
    assert made == []
    assert [batch.indices for batch, _ in islice(batches, 2)] == [(0,), (1,)]
    assert (made, reading.used) == ([0, 1], 2)
    assert reading.tell() == reading.tell() == flags(True)
    assert (made, reading.used) == ([0, 1, 2], 2)
    reading.hear(reading.tell())
    assert [batch.indices for batch, _ in batches] == [(3,)]
    assert (made, reading.used) == ([0, 1, 2, 3], 4)
    assert reading.tell() == flags(False)
