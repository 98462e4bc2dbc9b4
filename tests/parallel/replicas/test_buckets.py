"""Buckets hold every parameter once, ranks own every element once, and flat memory is seen as parameters are."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.parallel.replicas.buckets import (
    Bucket,
    BucketLayout,
    Shard,
    assemble,
    laid_out,
    plan_buckets,
    plan_cuts,
    seen_as,
    strides_of,
)
from tests.pool.ranks import Ranks


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("ab")), max_size=12), st.integers(1, 20))
def test_buckets_hold_every_parameter_once_without_gaps(parameters: list[tuple[int, str]], limit: int) -> None:
    lengths, kinds = [length for length, _ in parameters], [kind for _, kind in parameters]
    buckets = plan_buckets(lengths, list(kinds), limit)
    assert [i for bucket in buckets for i in bucket.members] == list(reversed(range(len(lengths))))
    for bucket in buckets:
        sizes = [lengths[i] for i in bucket.members]
        assert bucket.offsets == tuple(sum(sizes[:slot]) for slot in range(len(sizes)))
        assert bucket.length == sum(sizes)
        assert bucket.length <= limit or len(bucket.members) == 1 or sizes[1:] == [0] * (len(sizes) - 1)
        assert len({kinds[i] for i in bucket.members}) == 1
    for first, second in pairwise(buckets):
        fits = first.length + lengths[second.members[0]] <= limit
        assert not (fits and kinds[first.members[0]] == kinds[second.members[0]])


def test_even_cuts_split_parameters_and_whole_ones_do_not() -> None:
    buckets = (Bucket((2, 1), (0, 4), 10), Bucket((0,), (0,), 7))
    assert plan_cuts(buckets, 2) == ((0, 5, 10), (0, 3, 7))
    # of 4 and 6 elements the middles are 2 and 7; the rank with less has the one that is alone
    assert plan_cuts(buckets, 2, whole=True) == ((0, 4, 10), (0, 7, 7))


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_every_element_has_one_owner(lengths: list[int], limit: int, num_ranks: int, whole: bool) -> None:
    buckets = plan_buckets(lengths, [0] * len(lengths), limit)
    cuts = plan_cuts(buckets, num_ranks, whole)
    owned = []
    for rank in range(num_ranks):
        layout = BucketLayout(tuple(lengths), buckets, cuts, rank)
        for number, bucket in enumerate(buckets):
            for segment in layout.segments(number, layout.own(number)):
                assert not whole or (segment.start, segment.stop) == (0, lengths[segment.member])
                assert segment.offset - segment.start == bucket.offsets[bucket.members.index(segment.member)]
                owned += [(segment.member, element) for element in range(segment.start, segment.stop)]
    assert sorted(owned) == [(i, element) for i, length in enumerate(lengths) for element in range(length)]


IMAGES = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
VALUES = {
    "plain": IMAGES,
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "one channel": torch.arange(4.0).view(4, 1, 1, 1).to(memory_format=torch.channels_last),
    "a number": torch.tensor(2.0),
    "nothing": torch.empty(0, 3),
}
GAPS = {"every other": torch.arange(8.0).view(4, 2)[::2], "repeated": torch.ones(()).expand(2, 3)}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_memory_without_gaps_is_seen_as_it_is(value: Tensor) -> None:
    assert strides_of(value) == value.stride()
    flat = torch.arange(3.0 + value.numel())[3:]
    seen = seen_as(flat, value)
    assert (seen.shape, seen.stride(), seen.data_ptr()) == (value.shape, value.stride(), flat.data_ptr())
    assert seen.flatten().sort().values.tolist() == flat.tolist()
    copied = laid_out(value.reshape(-1), value)
    assert torch.equal(copied, value)
    assert copied.stride() == value.stride()


@pytest.mark.parametrize("value", GAPS.values(), ids=GAPS.keys())
def test_other_memory_is_seen_plainly(value: Tensor) -> None:
    assert strides_of(value) == value.contiguous().stride()
    assert torch.equal(laid_out(value.reshape(-1), value), value)


SHAPES = {
    "w": ((2, 3), torch.float32),
    "n": ((), torch.int64),
    "low": ((4,), torch.bfloat16),
    "none": ((2,), torch.bool),
}


def gather(comm: Communicator) -> dict[str, tuple[str, object]] | None:
    """Rank 0 has nothing of w, rank 1 its end, rank 2 its beginning; masters of `low` are in float32."""
    parts = [
        [Shard("low", 2, torch.tensor([2.0, 3.0]))],
        [Shard("w", 4, torch.tensor([4.0, 5.0])), Shard("low", 0, torch.tensor([0.0, 1.0]))],
        [Shard("w", 0, torch.arange(4.0).view(2, 2)), Shard("n", 0, torch.tensor(7))],
    ]
    found = assemble(comm, parts[comm.rank], SHAPES)
    return None if found is None else {name: (str(value.dtype), value.tolist()) for name, value in found.items()}


def test_parts_of_all_ranks_make_values_in_the_dtypes_that_were_asked_for(ranks: Ranks) -> None:
    first, *others = ranks(3).run(gather)
    assert others == [None, None]
    assert first == {
        "w": ("torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        "n": ("torch.int64", 7),
        "low": ("torch.bfloat16", [0.0, 1.0, 2.0, 3.0]),
    }
