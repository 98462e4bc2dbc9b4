"""mpi4dl.training.input_pipeline: what one rank cannot read, all ranks leave out or stop at, together."""

import logging
from dataclasses import replace

import pytest
import torch

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.geometry import Box, Interval
from mpi4dl.parallel.inputs import Microbatch, Read
from mpi4dl.training.input_pipeline import BadImages
from tests.pool.ranks import Ranks

BATCH_SIZE = 4
WHOLE = Microbatch(0, 0, (0, BATCH_SIZE))
PIXELS = Interval(0, 2)


def reading(microbatch: Microbatch, held: Interval) -> Read:
    return Read(microbatch, Box(held, PIXELS, PIXELS))


def batch_of(held: Interval, errors: dict[int, str]) -> Batch:
    """The tile of image i is full of i, its label is 10 + i, and it is sample 20 + i of the dataset."""
    tile = torch.arange(held.start, held.stop, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    labels, indices = torch.arange(BATCH_SIZE) + 10, tuple(range(20, 20 + BATCH_SIZE))
    return Batch((tile,), labels, indices, errors)


def agree(
    comm: Communicator, policy: str, shares: list[tuple[int, int]], errors: list[dict[int, str]]
) -> tuple[list[float], list[int], tuple[int, ...], dict[int, str], int] | str | None:
    """What is left of the batch on this rank, which holds images from .. to .. and found these errors."""
    held = Interval(*shares[comm.rank])
    bad_images = BadImages(comm, policy)
    try:
        left = bad_images.agree(batch_of(held, errors[comm.rank]), [WHOLE], [reading(WHOLE, held)])
    except Refusal as refusal:
        return str(refusal)
    if left is None:
        return None
    batch, (microbatch,) = left
    assert microbatch.samples == Interval(0, len(batch.indices))
    (tile,) = batch.tiles
    assert tile.shape[1:] == (3, 2, 2)
    return tile[:, 0, 0, 0].tolist(), batch.labels.tolist(), batch.indices, batch.errors, bad_images.skipped


TWO_REPLICAS = [(0, 2), (2, 4)]
TWO_TILES = [(0, 4), (0, 4)]


def test_a_batch_without_errors_is_left_as_it_is(ranks: Ranks) -> None:
    found = ranks(2).run(agree, "error", TWO_REPLICAS, [{}, {}])
    every = ([10, 11, 12, 13], (20, 21, 22, 23), {}, 0)
    assert found == [([0.0, 1.0], *every), ([2.0, 3.0], *every)]


def test_replicas_leave_out_what_the_other_could_not_read(ranks: Ranks) -> None:
    found = ranks(2).run(agree, "skip", TWO_REPLICAS, [{1: "b: damaged"}, {}])
    left = ([10, 12, 13], (20, 22, 23), {}, 1)
    assert found == [([0.0], *left), ([2.0, 3.0], *left)]


def test_tiles_leave_out_an_image_that_one_of_them_could_not_read(ranks: Ranks) -> None:
    found = ranks(2).run(agree, "skip", TWO_TILES, [{3: "d: damaged"}, {0: "a: damaged", 3: "d: damaged"}])
    assert found == [([1.0, 2.0], [11, 12], (21, 22), {}, 2)] * 2


def test_a_replica_may_be_left_with_nothing(ranks: Ranks) -> None:
    found = ranks(2).run(agree, "skip", TWO_REPLICAS, [{}, {2: "c: damaged", 3: "d: damaged"}])
    left = ([10, 11], (20, 21), {}, 2)
    assert found == [([0.0, 1.0], *left), ([], *left)]


def test_of_a_batch_without_a_readable_image_nothing_is_left(ranks: Ranks) -> None:
    damaged = {i: f"{i}: damaged" for i in range(BATCH_SIZE)}
    assert ranks(2).run(agree, "skip", TWO_TILES, [damaged, damaged]) == [None, None]


def test_by_policy_error_all_ranks_stop_with_the_first_image(ranks: Ranks) -> None:
    found = ranks(2).run(agree, "error", TWO_TILES, [{}, {3: "d: damaged", 2: "c: damaged"}])
    assert found == ["c: damaged; `on_bad_image` skip leaves such images out"] * 2


def meet_again(comm: Communicator) -> tuple[int, list[str]]:
    """The same damaged image in two epochs, and another one."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mpi4dl")
    logger.addHandler(handler)
    try:
        bad_images = BadImages(comm, "skip")
        for errors in ({1: "b: damaged"}, {3: "b: damaged"}, {0: "a: damaged"}):
            bad_images.agree(batch_of(Interval(0, 4), errors), [WHOLE], [reading(WHOLE, Interval(0, 4))])
    finally:
        logger.removeHandler(handler)
    return bad_images.skipped, logged


def test_an_image_is_counted_and_logged_once(ranks: Ranks) -> None:
    assert ranks(2).run(meet_again) == [(2, ["skipped: b: damaged", "skipped: a: damaged"])] * 2


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_one_rank_alone_needs_no_others(ranks: Ranks, policy: str) -> None:
    (found,) = ranks(1).run(agree, policy, [(0, 4)], [{0: "a: damaged"}])
    expected = ([1.0, 2.0, 3.0], [11, 12, 13], (21, 22, 23), {}, 1)
    assert found == ("a: damaged; `on_bad_image` skip leaves such images out" if policy == "error" else expected)


def several(comm: Communicator, errors: dict[int, str]) -> object:
    """Two microbatches of two images, of which this rank has the second half of each."""
    microbatches = [Microbatch(0, 0, (0, 1, 2)), Microbatch(0, 1, (2, 3, 4))]
    held = [Interval(1, 2), Interval(3, 4)]
    tiles = tuple(torch.full((1, 3, 2, 2), float(part.start)) for part in held)
    batch = Batch(tiles, torch.arange(4), (20, 21, 22, 23), errors)
    reads = [reading(*one) for one in zip(microbatches, held, strict=True)]
    left = BadImages(comm, "skip").agree(batch, microbatches, reads)
    return None if left is None else ([tile[:, 0, 0, 0].tolist() for tile in left[0].tiles], left[1])


def test_microbatches_shrink_by_what_is_left_out(ranks: Ranks) -> None:
    (found,) = ranks(1).run(several, {1: "b: damaged"})
    assert found == ([[], [3.0]], (Microbatch(0, 0, (0, 1, 1)), Microbatch(0, 1, (1, 2, 3))))


def test_a_microbatch_of_which_nothing_is_left_goes_alone(ranks: Ranks) -> None:
    (found,) = ranks(1).run(several, {2: "c: damaged", 3: "d: damaged"})
    assert found == ([[1.0]], (Microbatch(0, 0, (0, 1, 2)),))
    (found,) = ranks(1).run(several, {0: "a: damaged", 1: "b: damaged", 2: "c: damaged"})
    assert found == ([[3.0]], (Microbatch(0, 1, (0, 0, 1)),))


def short_of_something(comm: Communicator) -> str:
    batch = replace(batch_of(Interval(0, 4), {}), problem="tifffile is not here" if comm.rank == 1 else None)
    try:
        BadImages(comm, "skip").agree(batch, [WHOLE], [reading(WHOLE, Interval(0, 4))])
    except Refusal as refusal:
        return str(refusal)
    return ""


def test_what_one_rank_is_short_of_stops_all_by_any_policy(ranks: Ranks) -> None:
    assert ranks(2).run(short_of_something) == ["tifffile is not here"] * 2
