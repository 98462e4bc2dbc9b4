"""AmoebaNet-D has the published size and wiring, and takes images of any size."""

from collections import Counter

import pytest
import torch
from torch import nn

from mpi4dl.models.amoebanet import NORMAL_CELL, REDUCTION_CELL, Cell, FactorizedReduce, amoebanetd
from tests.models.counting import num_parameters, parameters_without_gradient


class Scale(nn.Module):
    """Stands in for an operation: multiplies by a number that tells which one it was."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def windows(operation: nn.Module) -> str:
    """Name an operation by the convolutions and poolings in it: 'conv 1x1, conv 3x3'."""
    found = []
    for module in operation.modules():
        if isinstance(module, nn.Conv2d):
            found.append("conv {}x{}".format(*module.kernel_size))
        elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            found.append(f"{'max' if isinstance(module, nn.MaxPool2d) else 'avg'} {module.kernel_size}")
    return ", ".join(found)


def marked_cell(table, factors):
    """Return a cell whose operations only multiply, and whose inputs are left as they are."""
    cell = Cell(table, previous_channels=4, current_channels=4, channels=4, stride=1, previous_is_larger=False)
    cell.match_current = nn.Identity()
    cell.operations = nn.ModuleList(Scale(factor) for factor in factors)
    return cell


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "millions", "decimals"),
    [(18, 208, 81.5, 1), (18, 416, 319.0, 1), (18, 544, 542.7, 1), (36, 544, 1060, -1), (72, 512, 1840, -1)],
)
def test_parameter_counts_are_those_of_gpipe(num_layers, num_filters, millions, decimals):
    with torch.device("meta"):
        model = amoebanetd(num_layers, num_filters, num_classes=1000)
    assert round(num_parameters(model) / 1e6, decimals) == millions
    assert len(model) == num_layers + 6


def test_the_normal_cell_has_the_published_operations():
    cell = Cell(NORMAL_CELL, previous_channels=8, current_channels=8, channels=8, stride=1, previous_is_larger=False)
    assert Counter(windows(operation) for operation in cell.operations) == {
        "": 2,
        "conv 1x1": 3,
        "conv 1x1, conv 1x7, conv 7x1, conv 1x1": 2,
        "max 3": 2,
        "avg 3": 1,
    }


def test_the_reduction_cell_has_the_published_operations():
    cell = Cell(REDUCTION_CELL, previous_channels=8, current_channels=8, channels=8, stride=2, previous_is_larger=False)
    assert Counter(windows(operation) for operation in cell.operations) == {
        "": 2,
        "conv 1x1": 1,
        "conv 1x1, conv 3x3, conv 1x1": 1,
        "conv 1x1, conv 1x7, conv 7x1, conv 1x1": 1,
        "max 2": 2,
        "max 3": 2,
        "avg 3": 1,
    }


def test_the_normal_cell_is_wired_as_published():
    a, b, c, d, e, f, g, h, i, j = factors = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    previous, current = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    first, output = marked_cell(NORMAL_CELL, factors)((previous, current))
    s2 = a * previous + b * previous
    s3 = c * previous + d * current
    s4 = e * current + f * current
    s5 = g * s2 + h * s2
    s6 = i * previous + j * s5
    assert first is current
    torch.testing.assert_close(output, torch.cat([current, s3, s4, s6], dim=1))


def test_the_reduction_cell_is_wired_as_published():
    table = REDUCTION_CELL
    cell = Cell(table, previous_channels=4, current_channels=4, channels=4, stride=2, previous_is_larger=False)
    cell.match_current = nn.Identity()
    a, b, c, d, e, f, g, h, i, j = factors = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    cell.operations = nn.ModuleList(Scale(factor) for factor in factors)
    previous, current = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    first, output = cell((previous, current))
    s2 = a * current + b * current
    s3 = c * s2 + d * previous
    s4 = e * s2 + f * s2
    s5 = g * s3 + h * previous
    s6 = i * s2 + j * s3
    assert first is current
    torch.testing.assert_close(output, torch.cat([s4, s5, s6], dim=1))


def test_factorized_reduce_sees_the_even_and_the_odd_pixels():
    reduce = FactorizedReduce(1, 2).eval()
    nn.init.ones_(reduce.straight.weight)
    nn.init.ones_(reduce.shifted.weight)
    x = torch.arange(1.0, 21.0).reshape(1, 1, 5, 4)
    even, odd = (reduce(x) * (1 + reduce.norm.eps) ** 0.5)[0]
    torch.testing.assert_close(even, torch.tensor([[1.0, 3.0], [9.0, 11.0], [17.0, 19.0]]))
    torch.testing.assert_close(odd, torch.tensor([[6.0, 8.0], [14.0, 16.0], [0.0, 0.0]]))


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (64, 64), (97, 131)])
def test_an_image_of_any_size_goes_through(size):
    model = amoebanetd(num_layers=3, num_filters=32, num_classes=5, in_channels=4).eval()
    pair = model[:-1](torch.randn(2, 4, *size))
    # A normal cell keeps the size: only the last reduction lies between the two.
    assert [tuple(x.shape[2:]) for x in pair] == [tuple(-(-n // 32) for n in size)] * 2
    assert model[-1](pair).shape == (2, 5)


def test_an_odd_image_reaches_every_parameter():
    model = amoebanetd(num_layers=3, num_filters=32, num_classes=5)
    model(torch.randn(2, 3, 97, 131)).square().sum().backward()
    assert not parameters_without_gradient(model)


def test_impossible_sizes_say_which_ones_are_possible():
    with pytest.raises(ValueError, match=r"num_layers=4 .* choose 3, 6, 9"):
        amoebanetd(num_layers=4)
    with pytest.raises(ValueError, match=r"num_filters=30 .* choose a multiple of 4 that is at least 8"):
        amoebanetd(num_filters=30)
