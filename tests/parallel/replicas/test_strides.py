"""Flat memory is seen in the order that a parameter has, and others see the right values there."""

import pytest
import torch
from torch import Tensor

from mpi4dl.parallel.replicas.buckets import laid_out, seen_as, strides_of

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
