"""Geometry against brute force: every formula is compared with an enumeration, or with the shapes PyTorch computes."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mpi4dl.geometry import (
    AxisMap,
    AxisPlan,
    Box,
    GridShape,
    Interval,
    Split,
    Tiling,
    TransposedWindow,
    Window,
    cut_alike,
    even_cuts,
    plan_axis,
)
from mpi4dl.parallel.spatial.rules.resampling import Resampling, general_kernel
from tests.support.brute_force import (
    inside,
    intervals,
    patient,
    quick,
    resampling_scale,
    resamplings,
    rows_read,
    sizes,
    slab,
    splits,
    thorough,
    transposed_windows,
    window_taps,
    windows,
)


@patient
@given(intervals, intervals)
def test_intervals_behave_as_the_sets_they_stand_for(a: Interval, b: Interval) -> None:
    here, there = set(range(*a)), set(range(*b))
    assert a.length == len(here)
    assert a.empty == (not here)
    assert set(range(*a.intersect(b))) == here & there
    assert a.intersect(b).length == len(here & there)
    assert a.covers(b) == (there <= here)
    assert set(range(*a.shift(3))) == {i + 3 for i in here}


@patient
@given(st.tuples(*[intervals] * 3), st.tuples(*[intervals] * 3))
def test_boxes_behave_as_the_pixels_they_stand_for(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> None:
    first, second = Box(*a), Box(*b)
    common = first.intersect(second)
    lengths = [len(set(range(*i)) & set(range(*j))) for i, j in zip(a, b, strict=True)]
    assert common.shape == tuple(lengths)
    assert common.empty == (0 in lengths)
    assert first.covers(second) == (second.empty or lengths == [j.length for j in b])


@patient
@given(st.integers(0, 200), st.integers(1, 12))
def test_even_cuts_differ_by_at_most_one(size: int, parts: int) -> None:
    cuts = even_cuts(size, parts)
    lengths = [b - a for a, b in pairwise(cuts)]
    assert cuts[0] == 0
    assert cuts[-1] == size
    assert len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 0


@patient
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_grid_numbers_ranks_with_columns_fastest(batch: int, rows: int, cols: int) -> None:
    grid = GridShape(batch, rows, cols)
    in_order = [(b, r, c) for b in range(batch) for r in range(rows) for c in range(cols)]
    assert grid.size == len(in_order)
    assert [grid.coordinates(rank) for rank in range(grid.size)] == in_order


@patient
@given(st.data(), sizes, st.integers(0, 30))
def test_a_wide_split_holds_its_own_rows_and_up_to_the_halo_on_both_sides(
    data: st.DataObject, size: int, halo: int
) -> None:
    split = data.draw(splits(size)).narrow()
    assert not split.wide
    wide = split.widen(halo)
    for part in range(split.parts):
        owned = set(range(*split.owned(part)))
        reach = {row + by for row in range(split.cuts[part], split.cuts[part + 1]) for by in range(-halo, halo + 1)}
        assert wide.owned(part) == split.owned(part)
        assert owned <= set(range(*wide.held[part])) <= set(range(size))
        if owned:
            assert set(range(*wide.held[part])) == reach & set(range(size))
    assert wide.narrow() == split
    assert wide.wide == any(wide.held[i] != split.held[i] for i in range(split.parts))


@quick
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_owned_boxes_of_a_tiling_partition_the_tensor(
    batch: int, rows: int, cols: int, samples: int, height: int, width: int
) -> None:
    tiling = Tiling.even(GridShape(batch, rows, cols), (samples, height, width))
    assert tiling.grid == GridShape(batch, rows, cols)
    assert tiling.size == (samples, height, width)
    assert tiling.whole == Box(Interval(0, samples), Interval(0, height), Interval(0, width))
    owners = dict.fromkeys(((b, y, x) for b in range(samples) for y in range(height) for x in range(width)), 0)
    for rank in range(tiling.grid.size):
        box = tiling.owned(rank)
        assert tiling.held(rank) == box
        for pixel in ((b, y, x) for b in range(*box.batch) for y in range(*box.rows) for x in range(*box.cols)):
            owners[pixel] += 1
    assert set(owners.values()) <= {1}


def test_a_tiling_holds_what_the_split_of_each_axis_holds() -> None:
    tiling = Tiling.even(GridShape(1, 2, 2), (3, 10, 8)).replace(1, Split.at([0, 4, 10]).widen(1))
    assert tiling.owned(3) == Box(Interval(0, 3), Interval(4, 10), Interval(4, 8))
    assert tiling.held(3) == Box(Interval(0, 3), Interval(3, 10), Interval(4, 8))
    assert tiling.held(0) == Box(Interval(0, 3), Interval(0, 5), Interval(0, 4))
    assert tiling.all_owned == tuple(tiling.owned(rank) for rank in range(4))
    assert tiling.all_held == tuple(tiling.held(rank) for rank in range(4))


@pytest.mark.parametrize("axis", range(3))
def test_dropping_an_axis_leaves_every_rank_along_it_one_copy(axis: int) -> None:
    tiling = Tiling.even(GridShape(2, 3, 2), (5, 97, 64))
    dropped = tiling.drop(axis)
    assert dropped.grid == tiling.grid
    for rank in range(tiling.grid.size):
        assert dropped.owned(rank)[axis].length == 1
        assert all(dropped.owned(rank)[other] == tiling.owned(rank)[other] for other in range(3) if other != axis)


@thorough
@given(windows(), sizes)
def test_output_size_is_that_of_conv2d(window: Window, size: int) -> None:
    """Asymmetric padding and cropping are F.pad before the convolution; what PyTorch refuses has no output row."""
    assume(size + window.before + window.after >= 1)
    assume(size + min(window.before, 0) + min(window.after, 0) >= 0)
    window = Window(window.kernel, window.stride, window.before, window.after, window.dilation)
    image = F.pad(torch.empty(1, 1, size, 1, device="meta"), (0, 0, window.before, window.after))
    weight = torch.empty(1, 1, window.kernel, 1, device="meta")
    try:
        output = F.conv2d(image, weight, stride=(window.stride, 1), dilation=(window.dilation, 1))
    except RuntimeError:
        assert window.output_size(size) < 1
    else:
        assert window.output_size(size) == output.shape[2]


@thorough
@given(windows(), sizes, st.sampled_from(["max", "average"]))
@example(Window(2, stride=3, before=1, after=1, ceil_mode=True), 5, "max")
def test_output_size_is_that_of_pooling(window: Window, size: int, kind: str) -> None:
    dilation = window.dilation if kind == "max" else 1
    padding = min(max(window.before, 0), window.kernel // 2)
    window = Window(window.kernel, window.stride, padding, padding, dilation, window.ceil_mode)
    assume(size + 2 * padding >= window.extent)
    image = torch.empty(1, 1, size, 1, device="meta")
    kernel, stride, pad = (window.kernel, 1), (window.stride, 1), (padding, 0)
    if kind == "max":
        output = F.max_pool2d(image, kernel, stride, pad, (dilation, 1), window.ceil_mode)
    else:
        output = F.avg_pool2d(image, kernel, stride, pad, window.ceil_mode)
    assert window.output_size(size) == output.shape[2]


@thorough
@given(windows(), sizes, st.integers(0, 60), st.integers(1, 20))
def test_a_window_needs_exactly_the_rows_from_its_first_tap_to_its_last(
    window: Window, size: int, start: int, length: int
) -> None:
    output = Interval(start, start + length)
    taps = {tap for row in range(*output) for tap in window_taps(window, row)}
    assert window.needs(output, size) == Interval(min(taps), max(taps) + 1)


@thorough
@given(transposed_windows(), sizes)
def test_output_size_is_that_of_conv_transpose2d(window: TransposedWindow, size: int) -> None:
    assume(window.output_size(size) >= 1)
    output = F.conv_transpose2d(
        torch.empty(1, 1, size, 1, device="meta"),
        torch.empty(1, 1, window.kernel, 1, device="meta"),
        stride=(window.stride, 1),
        padding=(window.padding, 0),
        output_padding=(window.output_padding, 0),
        dilation=(window.dilation, 1),
    )
    assert window.output_size(size) == output.shape[2]


@thorough
@given(transposed_windows(), st.integers(1, 60), st.integers(0, 80), st.integers(1, 20))
def test_a_transposed_window_needs_every_row_that_adds_to_its_output(
    window: TransposedWindow, size: int, start: int, length: int
) -> None:
    output = Interval(start, start + length)
    read = rows_read(window, output, size)
    needed = window.needs(output, size)
    assert inside(read, needed)
    assert needed.empty or (needed.start >= 0 and needed.stop <= size)
    assert set(range(*needed)) == slab(window, output, size)


@thorough
@given(transposed_windows(), st.integers(0, 80), st.integers(0, 20))
def test_a_transposed_window_adds_to_its_taps(window: TransposedWindow, start: int, length: int) -> None:
    sources, taps = range(start, start + length), range(0, window.extent, window.dilation)
    rows = [i * window.stride - window.padding + tap for i in sources for tap in taps]
    found = window.adds_to(Interval(start, start + length))
    assert found.empty if not rows else found == Interval(min(rows), max(rows) + 1)


@quick
@given(st.data(), sizes, st.integers(0, 299), st.integers(1, 20))
def test_a_resampling_needs_every_row_that_it_reads(data: st.DataObject, size: int, start: int, length: int) -> None:
    resampling = data.draw(resamplings(size))
    assume(start < resampling.output)
    output = Interval(start, min(start + length, resampling.output))
    read = slab(resampling, output, size)
    assert resampling.needs(output, size) == Interval(min(read), max(read) + 1)


def resampled(resampling: Resampling, column: torch.Tensor) -> torch.Tensor:
    """Apply the taps to one column of pixels."""
    values = column.tolist()
    rows = (resampling.taps(row) for row in range(resampling.output))
    return torch.tensor([sum(weight * values[i] for i, weight in taps) for taps in rows], dtype=column.dtype)


def random_column(size: int) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


@thorough
@given(sizes, st.integers(1, 300), st.sampled_from(["linear", "cubic"]), st.booleans())
def test_smooth_taps_are_those_of_interpolate(size: int, output: int, mode: str, aligned: bool) -> None:
    column = random_column(size)
    expected = F.interpolate(column[None, None, :, None], size=(output, 1), mode=f"bi{mode}", align_corners=aligned)
    resampling = Resampling(size, output, mode, aligned, resampling_scale(size, output, aligned))
    torch.testing.assert_close(resampled(resampling, column), expected.flatten(), rtol=0, atol=1e-12)


@thorough
@given(
    sizes,
    st.integers(1, 300),
    st.sampled_from(["nearest", "nearest-exact"]),
    st.sampled_from(["quick", "float32", "float64"]),
    st.sampled_from([None, 1.004, 2.004]),
)
@example(4, 218, "nearest-exact", "float32", None)
@example(96, 88, "nearest", "float32", None)
@example(96, 88, "nearest", "float64", None)
@example(64, 49, "nearest-exact", "quick", None)
@example(64, 49, "nearest-exact", "float64", None)
@example(180, 0, "nearest", "quick", 1.004)
@example(180, 0, "nearest", "float32", 2.004)
def test_nearest_taps_are_those_of_interpolate(
    size: int, output: int, mode: str, kernel: str, factor: float | None
) -> None:
    """Rows and gradients, to the last bit. Images of few channels, or of many pixels, are what the quick kernel is not
    for; its gradients are those of all kernels.
    """
    dtype = torch.float64 if kernel == "float64" else torch.float32
    layout = torch.channels_last if kernel == "quick" else torch.contiguous_format
    image = random_column(size).to(dtype)[None, None, :, None].expand(1, 4, size, 200)
    image = image.contiguous(memory_format=layout).requires_grad_()
    given = {"size": (output, 200)} if factor is None else {"scale_factor": (factor, 1.0)}
    expected = F.interpolate(image, mode=mode, **given)  # type: ignore[arg-type]
    output, scale = expected.shape[2], size / output if factor is None else 1 / factor
    kernel = general_kernel() if kernel == "float32" else kernel
    resampling = Resampling(size, output, mode, scale=scale, kernel=kernel)  # type: ignore[arg-type]
    torch.testing.assert_close(resampled(resampling, image[0, 0, :, 0]), expected[0, 0, :, 0], rtol=0, atol=0)
    gradient = torch.arange(output, dtype=dtype)
    (received,) = torch.autograd.grad(expected, image, gradient[:, None].expand_as(expected))
    rows = torch.tensor([resampling.backward.taps(row)[0][0] for row in range(output)])
    assert torch.equal(received[0, 0, :, 0], torch.zeros(size, dtype=dtype).index_add(0, rows, gradient))


@thorough
@given(
    st.integers(4, 55),
    st.sampled_from([0.5, 0.7, 0.9, 1.01, 1.1, 4 / 3, 1.5, 2.0, 2.3]),
    st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]),
)
@example(9, 1.1, "linear")
@example(9, 1.1, "nearest")
def test_taps_follow_a_scale_factor_that_the_caller_gave(size: int, factor: float, mode: str) -> None:
    """`nearest` and `linear` copy where the size stays the same, whatever the factor."""
    column = random_column(size)
    torch_mode = mode if mode.startswith("nearest") else f"bi{mode}"
    expected = F.interpolate(column[None, None, :, None], scale_factor=(factor, 1.0), mode=torch_mode)
    resampling = Resampling(size, expected.shape[2], mode, scale=1 / factor)
    torch.testing.assert_close(resampled(resampling, column), expected.flatten(), rtol=0, atol=1e-12)


# Plans of whole axes: whose rows are whose, who reads which, and when nobody has to send any.


def check_plan(mapping: AxisMap, split: Split) -> AxisPlan:
    """Hold every promise of `plan_axis` against enumerated rows."""
    size, output_size = split.size, mapping.output_size(split.size)
    plan = plan_axis(mapping, split)
    output = plan.output
    assert list(output.cuts) == sorted(output.cuts)
    assert (output.cuts[0], output.cuts[-1]) == (0, output_size)
    assert [row for part in range(split.parts) for row in range(*output.owned(part))] == list(range(output_size))
    assert len(plan.needed) == output.parts == split.parts

    short = [not inside(slab(mapping, output.owned(i), size), split.held[i]) for i in range(split.parts)]
    assert plan.exchange == any(short)
    for part in range(split.parts):
        computed = output.held[part]
        assert computed.covers(output.owned(part))
        assert inside(slab(mapping, computed, size), plan.needed[part])
        if computed.empty:
            assert plan.needed[part].empty
        if plan.exchange:
            assert computed == output.owned(part)
            continue
        assert Interval(0, output_size).covers(computed)
        assert inside(slab(mapping, computed, size), split.held[part])
        if computed.empty:
            continue
        longer = [computed.grow(1, 0)] * (computed.start > 0) + [computed.grow(0, 1)] * (computed.stop < output_size)
        assert not any(inside(slab(mapping, rows, size), split.held[part]) for rows in longer)
    return plan


@thorough
@given(st.data(), windows(), sizes)
def test_a_plan_of_a_window_holds_its_promises(data: st.DataObject, window: Window, size: int) -> None:
    assume(window.output_size(size) >= 1)
    check_plan(window, data.draw(splits(size)))


@quick
@given(st.data(), transposed_windows(), st.integers(1, 60))
def test_a_plan_of_a_transposed_window_holds_its_promises(
    data: st.DataObject, window: TransposedWindow, size: int
) -> None:
    assume(window.output_size(size) >= 1)
    check_plan(window, data.draw(splits(size)))


@quick
@given(st.data(), sizes)
def test_a_plan_of_a_resampling_holds_its_promises(data: st.DataObject, size: int) -> None:
    check_plan(data.draw(resamplings(size)), data.draw(splits(size)))


def test_a_3x3_convolution_exchanges_one_row_with_each_neighbour() -> None:
    plan = plan_axis(Window(3, before=1, after=1), Split.at([0, 4, 8, 10]))
    assert plan == AxisPlan(
        Split.at([0, 4, 8, 10]), needed=(Interval(-1, 5), Interval(3, 9), Interval(7, 11)), exchange=True
    )


def test_tilings_are_alike_if_each_axis_is() -> None:
    grid = GridShape(1, 2, 2)
    even, other = Tiling.even(grid, (2, 8, 8)), Tiling.even(grid, (2, 8, 6))
    assert cut_alike(even, Tiling.even(grid, (2, 8, 8)))
    assert not cut_alike(even, other)
