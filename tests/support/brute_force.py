"""Geometry by enumeration: what the formulas of mpi4dl.geometry must agree with, and random cases to try them on."""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mpi4dl.geometry import AxisMap, Interval, Split, TransposedWindow, Window, even_cuts
from mpi4dl.parallel.spatial.rules.resampling import Resampling

# A busy machine is slow, and that is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
quick = settings(patient, max_examples=150)
thorough = settings(patient, max_examples=120)

sizes = st.integers(1, 200)
intervals = st.builds(Interval, st.integers(-20, 20), st.integers(-20, 20))


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Any window: padded, cropped, or neither; its padding may even be wider than the window itself."""
    return Window(
        kernel=draw(st.integers(1, 9)),
        stride=draw(st.integers(1, 6)),
        before=draw(st.integers(-6, 12)),
        after=draw(st.integers(-6, 12)),
        dilation=draw(st.integers(1, 4)),
        ceil_mode=draw(st.booleans()),
    )


@st.composite
def transposed_windows(draw: st.DrawFn) -> TransposedWindow:
    stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return TransposedWindow(
        kernel=draw(st.integers(1, 7)),
        stride=stride,
        padding=draw(st.integers(0, 6)),
        output_padding=draw(st.integers(0, max(stride, dilation) - 1)),
        dilation=dilation,
    )


@st.composite
def splits(draw: st.DrawFn, size: int) -> Split:
    """Cuts anywhere (some parts may be empty), and what each part holds beyond them."""
    parts = draw(st.integers(1, 8))
    if draw(st.booleans()):
        split = Split.at(even_cuts(size, parts))
    else:
        inner = draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))
        split = Split.at([0, *sorted(inner), size])
    return split.widen(draw(st.sampled_from([0, 0, 1, 2, 5, 11, 40])))


@st.composite
def resamplings(draw: st.DrawFn, size: int) -> Resampling:
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]))
    output = draw(st.integers(1, 300))
    aligned = mode in ("linear", "cubic") and draw(st.booleans())
    scale = resampling_scale(size, output, aligned) * draw(st.sampled_from([1.0, 1.0, 0.999]))
    return Resampling(size, output, mode, aligned, scale)


def resampling_scale(size: int, output: int, aligned: bool) -> float:
    if not aligned:
        return size / output
    return (size - 1) / (output - 1) if output > 1 else 0.0


def window_taps(window: Window, row: int) -> list[int]:
    """The rows that an output row reads, those in the padding included."""
    return [row * window.stride - window.before + window.dilation * k for k in range(window.kernel)]


def transposed_sources(window: TransposedWindow, row: int, size: int) -> set[int]:
    """The input rows that add to an output row."""
    return {
        i
        for i in range(size)
        for k in range(window.kernel)
        if i * window.stride - window.padding + window.dilation * k == row
    }


def rows_read(mapping: AxisMap, output: Interval, size: int) -> set[int]:
    """The rows inside the image that these output rows read, one output row and one tap at a time."""
    read: set[int] = set()
    for row in range(*output):
        if isinstance(mapping, Window):
            read.update(window_taps(mapping, row))
        elif isinstance(mapping, TransposedWindow):
            read.update(transposed_sources(mapping, row, size))
        elif isinstance(mapping, Resampling):
            kernels = ("quick", "float32", "float64")  # any may be that which PyTorch takes
            read.update(tap for kernel in kernels for tap, _ in replace(mapping, kernel=kernel).taps(row))
    return {row for row in read if 0 <= row < size}


def slab(mapping: AxisMap, output: Interval, size: int) -> set[int]:
    """The contiguous block of image rows that an operator must be given to compute these output rows.

    It reaches from the first tap to the last, so it holds the rows that a dilated or a strided window skips too. In
    the same way, a dilated transposed window counts as touching the output rows between its taps. A resampling whose
    weights repeat is given whole periods from their first row on.
    """
    if output.empty:
        return set()
    if isinstance(mapping, Window):
        taps = window_taps(mapping, output.start) + window_taps(mapping, output.stop - 1)
        return set(range(max(0, min(taps)), min(size, max(taps) + 1)))
    read = rows_read(mapping, output, size)
    if isinstance(mapping, TransposedWindow):
        spans = {i: i * mapping.stride - mapping.padding for i in range(size)}
        read = {i for i, first in spans.items() if first < output.stop and output.start < first + mapping.extent}
    if isinstance(mapping, Resampling) and mapping.period and read:
        read.add(min(read) // mapping.period[0] * mapping.period[0])
    return set(range(min(read), max(read) + 1)) if read else set()


def inside(rows: set[int], interval: Interval) -> bool:
    return all(interval.start <= row < interval.stop for row in rows)
