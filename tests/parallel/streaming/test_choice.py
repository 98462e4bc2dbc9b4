"""Which tiles are chosen for a limit of memory: the fewest that fit, and refusals with what would do."""

from dataclasses import replace
from functools import partial

import pytest

from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.streaming.leading_part import EACH_NORM, StreamOptions
from mpi4dl.parallel.streaming.margins import CannotStream
from mpi4dl.parallel.streaming.memory_limit import (
    SegmentNeeds,
    Speeds,
    StreamConstraints,
    StreamNeeds,
    choose_tiles,
    tile_counts,
)

SIDES = (4096, 2048)
KEPT = 1000  # bytes between two segments


def needs_for(options: StreamOptions) -> StreamNeeds:
    """A tile has a byte a pixel; n segments keep n - 1 outputs, and each has an n-th of the statistics."""
    rows, cols = options.counts
    number = min(options.segments, 12)
    tile = SIDES[0] // rows * (SIDES[1] // cols)
    statistics, flops = 12 // number, (1 + rows * cols / 1e6) / number
    one = SegmentNeeds(0, 0, tile, 0, 0, statistics, statistics, flops)
    segments = (one, *(one._replace(input_bytes=KEPT),) * (number - 1))
    return StreamNeeds(segments, tuple((i, i + 1) for i in range(len(segments))), options, spread=False)


def bytes_of(needs: StreamNeeds) -> int:
    return needs.segments[0].tile_bytes + sum(segment.input_bytes for segment in needs.segments)


def test_parts_are_cut_finer_and_finer_into_squares() -> None:
    found = list(tile_counts(SIDES))
    assert found[:4] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert found == sorted(found)
    assert found[-1] == (64, 32)


@pytest.mark.parametrize("most", [SIDES[0] * SIDES[1], 3_000_000, 500_000, 40_000])
@pytest.mark.parametrize("segments", [1, 3])
def test_the_fewest_tiles_that_fit_are_chosen(most: int, segments: int) -> None:
    found = choose_tiles(SIDES, StreamConstraints(segments=segments), needs_for, bytes_of, most)
    fitting = [
        counts for counts in tile_counts(SIDES) if bytes_of(needs_for(StreamOptions(counts, segments=segments))) <= most
    ]
    assert found.options == StreamOptions(fitting[0], segments=segments)
    assert found.num_bytes <= most


def test_segments_are_as_many_as_make_least_work() -> None:
    assert choose_tiles(SIDES, StreamConstraints(), needs_for, bytes_of, 1_000_000).options.segments > 1
    few = 64 * 64 + KEPT  # bytes with which little can be kept between segments
    assert choose_tiles(SIDES, StreamConstraints(), needs_for, bytes_of, few).options.segments == 1
    assert choose_tiles(SIDES, StreamConstraints(norms="running"), needs_for, bytes_of, 1_000_000).options.segments == 1


@pytest.mark.parametrize(
    ("disk_byte_seconds", "cached", "most", "keep", "segments"),
    [
        (1e-12, 0, 60_000, "device", EACH_NORM),  # what fits into memory stays there
        (1e-12, 0, 6_000, "disk", EACH_NORM),
        (1.0, 0, 6_000, "device", 1),  # a slow disk takes longer than repetition
        (1.0, 2 * 11 * KEPT, 6_000, "disk", EACH_NORM),  # the system has room for the files
        (float("inf"), 0, 6_000, "device", 1),  # there is no room on the disk
    ],
)
def test_outputs_go_to_a_disk_where_that_takes_less_time_than_repetition(
    disk_byte_seconds: float, cached: int, most: int, keep: str, segments: int
) -> None:
    constraints = StreamConstraints(disk=Keep("disk"))
    speeds = Speeds(1.0, min(1e-12, disk_byte_seconds), disk_byte_seconds, cached)

    def in_memory(needs: StreamNeeds) -> int:
        return bytes_of(needs) - needs.kept_bytes * needs.options.uses_files

    found = choose_tiles(SIDES, constraints, needs_for, in_memory, most, partial(speeds.of_step, num_ranks=2))
    assert (found.options.keep.where, found.options.segments) == (keep, segments)
    own = replace(constraints, disk=None)  # the user said where
    chosen = choose_tiles(SIDES, own, needs_for, in_memory, most, partial(speeds.of_step, num_ranks=2))
    assert chosen.options.keep.where == "device"
    assert speeds.of_step(chosen.needs, 2) >= speeds.of_step(found.needs, 2)


def test_where_nothing_fits_the_least_is_said() -> None:
    with pytest.raises(
        CannotStream, match=r"no tiles keep a rank within 0.0 MiB: the least would be 0.0 MiB, with \d+x"
    ):
        choose_tiles(SIDES, StreamConstraints(), needs_for, bytes_of, 100)


def test_what_cannot_be_streamed_is_refused_as_ever() -> None:
    def cannot(options: StreamOptions) -> StreamNeeds:
        raise CannotStream("the whole model would be streamed")

    with pytest.raises(CannotStream, match="the whole model would be streamed"):
        choose_tiles(SIDES, StreamConstraints(), cannot, bytes_of, 1e9)
