"""Weighted sums of rows and columns are products with the matrices of their weights, and so are their gradients."""

import pytest
import torch
from torch import Tensor

from mpi4dl.parallel.spatial.rules import resampling
from mpi4dl.parallel.spatial.rules.resampling import Weighing, sums_of, transposed, weigh

Taps = list[list[tuple[int, float]]]
ROWS: Taps = [[(0, 0.5), (3, 2.0)], [(2, -1.0)], [], [(3, 0.25), (3, 0.5), (1, 1.0)]]
COLS: Taps = [[(4, 1.5)], [(0, 1.0), (1, 2.0)]]


def weighing_of(taps: Taps, num_rows: int) -> Weighing:
    like = torch.empty(0, dtype=torch.float64)
    return Weighing(sums_of(taps, True, like), sums_of(transposed(taps, num_rows), True, like))


def matrix(taps: Taps, num_rows: int) -> Tensor:
    found = torch.zeros(len(taps), num_rows, dtype=torch.float64)
    for i, of_sum in enumerate(taps):
        for row, weight in of_sum:
            found[i, row] += weight
    return found


@pytest.mark.parametrize("cached_bytes", [1, 1 << 20])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_sums_and_gradients_are_those_of_matrices(
    monkeypatch: pytest.MonkeyPatch, cached_bytes: int, memory_format: torch.memory_format
) -> None:
    monkeypatch.setattr(resampling, "CACHED_BYTES", cached_bytes)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    y = weigh(x, weighing_of(ROWS, 4), weighing_of(COLS, 5))
    expected = matrix(ROWS, 4) @ x @ matrix(COLS, 5).mT
    torch.testing.assert_close(y, expected)
    gradient = torch.randn_like(expected)
    ours, plain = (torch.autograd.grad(each, x, gradient)[0] for each in (y, expected))
    torch.testing.assert_close(ours, plain)


def test_what_no_sum_reads_does_not_matter() -> None:
    """Not even if it is infinite or not a number, as it would in a product with a matrix."""
    x = torch.tensor([[1.0, 2.0, torch.inf, torch.nan]]).view(1, 1, 4, 1)
    taps: Taps = [[(0, 0.5), (1, 0.5)], [(1, 1.0)]]
    like = torch.empty(0)
    y = weigh(x, Weighing(sums_of(taps, True, like), sums_of(transposed(taps, 4), True, like)), None)
    assert y.flatten().tolist() == [1.5, 2.0]


def test_16_bits_are_not_added_up_in_16_bits() -> None:
    x = torch.tensor([1.0] + [2.0**-8] * 8, dtype=torch.bfloat16).view(1, 1, 9, 1)
    taps: Taps = [[(row, 1.0) for row in range(9)]]
    like = torch.empty(0)
    y = weigh(x, Weighing(sums_of(taps, True, like), sums_of(transposed(taps, 9), True, like)), None)
    assert y.item() == 1.03125
    assert y.dtype == torch.bfloat16
