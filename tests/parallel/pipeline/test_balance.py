"""The partition is the best there is, and costs are what the layers' formulas say."""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from mpi4dl.models import build
from mpi4dl.parallel.costs.meter import KnownValues, OperatorMeter
from mpi4dl.parallel.costs.units import count_bytes
from mpi4dl.parallel.cut import by_hand, partition, shared_out
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from tests.support.counting import count_flops


def slowest(costs: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return max(sum(row[low:high]) for row, (low, high) in zip(costs, pairwise(bounds), strict=True))


@given(st.data())
def test_no_other_partition_is_better(data: st.DataObject):
    units = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, units))
    row = st.lists(st.integers(0, 9), min_size=units, max_size=units)
    costs = data.draw(st.lists(row, min_size=stages, max_size=stages))
    counts = partition(costs)
    assert (len(counts), sum(counts), min(counts) >= 1) == (stages, units, True)
    cuts = combinations(range(1, units), stages - 1)
    everything = [[high - low for low, high in pairwise([0, *cut, units])] for cut in cuts]
    assert slowest(costs, counts) == min(slowest(costs, other) for other in everything)


@pytest.mark.parametrize(
    ("costs", "counts"),
    [
        ([[1, 1, 1, 1]] * 2, (2, 2)),
        (shared_out([1, 1, 1, 1, 1], [4, 1]), (4, 1)),
        ([[9, 1, 1, 1]] * 3, (1, 1, 2)),
        (shared_out([10, 10, 0], [10, 1]), (2, 1)),
        ([[0, 0, 0]] * 3, (1, 1, 1)),
        ([[3.5 / 4]], (1,)),
        ([[1, 9, 1, 1], [2, 2, 2, 2]], (1, 3)),  # a unit that gains nothing from tiles
    ],
)
def test_partitions(costs: list[list[float]], counts: tuple[int, ...]):
    assert partition(costs) == counts


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([[1, 2]] * 3, "3 stages cannot be made of 2 units: every stage needs .* choose between 1 and 2 stages"),
        ([], "0 stages cannot be made of 0 units"),
        ([[1, 2], [1, -2]], "the cost of unit 1 on stage 1 is -2, but must be finite and not negative"),
        ([[float("nan")]], "the cost of unit 0 on stage 0 is nan"),
    ],
)
def test_what_cannot_be_partitioned(costs: list[list[float]], message: str):
    with pytest.raises(ValueError, match=message):
        partition(costs)


def test_a_balance_by_hand_must_fit():
    cuttable = Cuttable(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert by_hand(cuttable, [1, 2], 2) == (1, 2)
    with pytest.raises(ValueError, match="balance 1,2 has 2 numbers, but there are 3 stages"):
        by_hand(cuttable, [1, 2], 3)
    with pytest.raises(ValueError, match="balance 3,4 puts 7 units into 2 stages, but Sequential has 3, and every"):
        by_hand(cuttable, [3, 4], 2)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 5 * 6, 7))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_of_convolutions_and_products(device: str):
    cuttable = Cuttable(layers().to(device))
    assert count_flops(cuttable, (2, 3, 5, 6)) == [2 * 2 * 4 * 5 * 6 * 3 * 9, 0, 0, 2 * 2 * 120 * 7]


def test_flops_of_attention_forward_and_backward_are_those_that_pytorch_counts():
    layer = nn.MultiheadAttention(8, 2, batch_first=True, device="meta")
    x = torch.empty(2, 10, 8, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        layer(x, x, x, need_weights=False)[0].sum().backward()
    with OperatorMeter() as found:
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert found.flops == expected.get_total_flops() > 0


@pytest.mark.parametrize("bias", [True, False])
def test_views_touch_no_bytes(bias: bool):
    """Without a bias PyTorch multiplies matrices, and hands on an `_unsafe_view` of the product."""
    layer, x = nn.Linear(4, 6, bias=bias, device="meta"), torch.empty(2, 3, 4, device="meta")
    with OperatorMeter() as found:
        layer(x).transpose(0, 1)
    assert (found.operators, found.touched_bytes) == (1, 0)
    with found:
        torch.zeros(5, device="meta").add_(1)
    assert (found.operators, found.touched_bytes) == (3, 4 * 5 * 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_of_parameters_and_saved_activations(device: str):
    cuttable = Cuttable(layers().to(device))
    image, activation = 2 * 3 * 5 * 6, 2 * 4 * 5 * 6
    # The convolution saves the image, ReLU its result, which the linear layer saves again.
    expected = [image + 4 * 3 * 9 + 4, activation, 0, 120 * 7 + 7]
    assert count_bytes(cuttable, (2, 3, 5, 6)) == [4 * n for n in expected]


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    assert count_bytes(Cuttable(model), (1, 3)) == [4 * (9 + 3), 4 * 3, 0]


class Positions(nn.Module):
    """Looks at values that follow from sizes, as the masks of language models do."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        seen = torch.zeros_like(places, dtype=torch.bool)
        seen[:, 1:] = places.diff(dim=1) == 1
        if not seen[:, 1:].all() or bool(seen[0, 0]):
            raise AssertionError("places are not those of the whole")
        return x[:, seen[0].nonzero()[0, 0] :]  # type: ignore[no-any-return]


class Router(nn.Module):
    """Looks at values that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = x.sum(-1) > float(x.mean())
        return torch.where(first.unsqueeze(-1), *(expert(x) for expert in self.experts))


def test_units_that_look_at_values_are_counted():
    cuttable = Cuttable(nn.Sequential(Positions(), nn.Linear(4, 4, bias=False), Router(), nn.Linear(4, 4)).to("meta"))
    x = (2, 6, 4)
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        assert count_flops(cuttable, x) == [0, 2 * 10 * 16, 2 * 2 * 10 * 16, 2 * 10 * 16]
        kept = count_bytes(cuttable, x)
        assert torch.equal(torch.get_rng_state(), state)
    assert kept[1] == 4 * (2 * 5 * 4 + 16)
    assert kept[3] == 4 * (2 * 5 * 4 + 16 + 4)
    assert kept[2] >= 4 * 2 * 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(5, device="meta"),
        lambda: torch.full((2, 3), 4.0, device="meta").T.contiguous()[1:],
        lambda: torch.empty(3, device="meta", dtype=torch.int64).fill_(2).cumsum(0),
        lambda: torch.ones(4, 4, device="meta").tril().bool().logical_not(),
        lambda: torch.arange(3, device="meta").flip(0).sort().indices,
        lambda: torch.arange(6, device="meta").view(2, 3)[:, torch.arange(3, device="meta") > 0].add_(1),
    ],
)
def test_meta_tensors_made_of_numbers_have_values(make: Callable[[], Tensor]):
    expected = eval_on_cpu(make)
    with KnownValues() as known:
        found = known.value(make())
    assert found is not None
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def eval_on_cpu(make: Callable[[], Tensor]) -> Tensor:
    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "meta":
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    with OnCpu():
        return make()


def test_what_follows_from_inputs_or_chance_has_no_values():
    x = torch.empty(3, device="meta")
    with KnownValues() as known:
        written = torch.zeros(3, device="meta")
        assert known.value(written) is not None
        written.add_(x)
        assert [known.value(y) for y in (x, x + 1, torch.rand(3, device="meta"), written)] == [None] * 4


OPTIONS = {"amoebanetd": {"num_layers": 3, "num_filters": 16}, "vit_b_16": {"image_size": 32}}


@pytest.mark.parametrize("name", ["amoebanetd", "unet", "densenet121", "fcn_resnet50", "vit_b_16"])
@pytest.mark.sample(2)
def test_every_unit_of_a_model_has_a_cost(name: str):
    cuttable = Cuttable(outline(lambda: build(name, **OPTIONS.get(name, {}))))
    image = (2, 3, 32, 32) if name == "vit_b_16" else (2, 3, 33, 47)
    flops, kept = count_flops(cuttable, image), count_bytes(cuttable, image)
    assert len(flops) == len(kept) == len(cuttable)
    parameters = sum(p.nbytes for p in cuttable.model.parameters())
    assert sum(kept) > parameters
    assert sum(flops) > 0
