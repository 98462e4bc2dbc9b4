"""Nested values come back from tensors and a header as they were."""

import pickle
from collections import OrderedDict, deque
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mpi4dl.parallel.pipeline.program import Slot, TensorSpec, map_leaves, pack, unpack


class Boxes(NamedTuple):
    left: Tensor
    right: int


A = torch.zeros(2, 3, requires_grad=True)
B = torch.zeros(1, dtype=torch.int64)


def test_each_tensor_once_with_what_its_receiver_must_know():
    tensors, header = pack([A, (A, 3), {"b": [B, A]}, torch.Size([4, 5])])
    assert [id(t) for t in tensors] == [id(A), id(B)]
    assert header.template == (Slot(0), (Slot(0), 3), {"b": [Slot(1), Slot(0)]}, torch.Size([4, 5]))
    assert header.tensors == (TensorSpec((2, 3), torch.float32, True), TensorSpec((1,), torch.int64, False))


def test_nothing_wants_a_gradient_where_none_is_recorded():
    """PyTorch says of a view of a parameter that it requires one even there."""
    with torch.no_grad():
        assert pack([A.expand(2, 3)])[1].tensors == (TensorSpec((2, 3), torch.float32, False),)


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, B),
        [A, [B]],
        {"x": A},
        OrderedDict(y=A),
        deque([A, 1]),
        Boxes(A, 2),
        (),
        None,
        "text",
        torch.Size([1]),
        torch.float32,
        ...,
    ],
)
def test_values_come_back_as_they_were(value: object):
    tensors, header = pack([value])
    header = pickle.loads(pickle.dumps(header))
    (got,) = unpack(tensors, header)
    assert type(got) is type(value)
    assert got is value if isinstance(value, Tensor) else map_leaves(id, got) == map_leaves(id, value) or got == value
    assert pack([value])[1] == header


def test_a_device_becomes_that_of_the_receiver():
    tensors, header = pack([A, A.device])
    assert unpack([t.to("meta") for t in tensors], header)[1] == torch.device("meta")


def test_what_cannot_be_sent_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"value skip holds a object, which no stage can hand to the next: tensors, num"
    ):
        pack([A, [object()]], names=["x", "skip"])


def test_a_header_knows_its_number_of_tensors():
    with pytest.raises(ValueError, match="1 tensors do not fit a header of 2"):
        unpack([A], pack([A, B])[1])
