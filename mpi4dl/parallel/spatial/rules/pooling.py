"""Max, average and Lp pooling on tiles, and adaptive pooling, in 1, 2 and 3 dims."""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import Interval, Window, ceil_div
from mpi4dl.parallel.spatial.halo import HaloPlan
from mpi4dl.parallel.spatial.rules.reductions import (
    NOWHERE,
    first_of,
    mean,
    owned_along,
    reduced_layout,
    take,
    total,
    worst,
)
from mpi4dl.parallel.spatial.rules.windows import (
    Gradients,
    Mask,
    Sliding,
    WithHalo,
    axes_of,
    check_image,
    described,
    each,
    flat_index,
    operate,
    places_of,
    slide,
)
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, numbers_on, refusal, register, wrap

aten = torch.ops.aten
Size = int | Sequence[int]
# Poolings in 2 and in 3 dims, and their gradients: one dim is pooled as images of one row.
MAXIMA = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}
MEANS = {2: (aten.avg_pool2d, aten.avg_pool2d_backward), 3: (aten.avg_pool3d, aten.avg_pool3d_backward)}
SHORT = 1 << 12  # so many indices on a CPU are kept as 2 bytes each, where PyTorch keeps 8
WORTH = 1 << 15  # pixels looked at from which sums of shifted views are faster


class _Maxima(NamedTuple):
    """Max pooling to an output of `shape`: a function of `Windowed`. With `places` the indices of maxima are results.

    Along each dim `margins` pixels before the image are padding that the input has.
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool
    shape: list[int]
    margins: list[int]
    places: bool
    reads: Mask = (False, False, False)

    def forward(self, x: Tensor, weight: None, bias: None) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
        if 0 in self.shape:
            y, indices = x.new_zeros(self.shape), torch.zeros(self.shape, dtype=torch.int64, device=x.device)
            return (y, indices) if self.places else (y,), (indices,)
        size = x.shape[-len(self.kernel) :]
        y, indices = MAXIMA[len(size)][0](x, *self[:5])
        if any(self.margins):
            indices = _inside(y, indices, size, self.margins, self.dilation)
        if self.places:
            return (y, indices), (indices,)
        rows = (self.kernel[0] - 1) * self.dilation[0] + 1  # of which all pixels of a window are
        if indices.is_cpu and indices.numel() >= SHORT and rows * math.prod(size[1:]) <= 1 << 15:
            indices = torch.sub(indices, self._first(size), out=torch.empty_like(indices, dtype=torch.int16))
        return (y,), (indices,)

    def backward(self, gradient: Tensor, x: Tensor, kept: Sequence[Tensor], mask: Mask) -> Gradients:
        (indices,), size = kept, x.shape[-len(self.kernel) :]
        if gradient.numel() == 0:
            return x.zero_(), None, None
        if indices.dtype == torch.int16:
            indices = indices + self._first(size)
        return MAXIMA[len(size)][1](gradient, x, *self[:5], indices), None, None

    def _first(self, size: Sequence[int]) -> Tensor:
        """The index of the first pixel of each window, as if there were one in the padding."""
        numbers = zip(self.shape[-len(size) :], self.stride, self.padding, strict=True)
        starts = [torch.arange(-padding, n * stride - padding, stride) for n, stride, padding in numbers]
        return flat_index(torch.meshgrid(*starts, indexing="ij"), size)


class _Means(NamedTuple):
    """Average pooling over whole windows to an output of `shape`: a function of `Windowed`."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    ceil_mode: bool
    shape: list[int]
    reads: Mask = (False, False, False)

    def forward(self, x: Tensor, weight: None, bias: None) -> tuple[tuple[Tensor], tuple[()]]:
        if 0 in self.shape:
            return (x.new_zeros(self.shape),), ()
        area = math.prod(self.kernel)
        if self._by_shifts(x):
            return (sums_by_shifts(x, self.kernel, self.padding).div_(area),), ()
        return (MEANS[len(self.kernel)][0](x, *self[:4], True, area),), ()

    def backward(self, gradient: Tensor, x: Tensor, kept: Sequence[Tensor], mask: Mask) -> Gradients:
        area = math.prod(self.kernel)
        if gradient.numel() == 0:
            return x.zero_(), None, None
        if self._by_shifts(x):
            around = [k - 1 - padding for k, padding in zip(self.kernel, self.padding, strict=True)]
            return sums_by_shifts(gradient / area, self.kernel, around), None, None
        return MEANS[len(self.kernel)][1](gradient, x, *self[:4], True, area), None, None

    def _by_shifts(self, x: Tensor) -> bool:
        """Whether that is faster: PyTorch's kernels on CPUs pool contiguous images one output after the other."""
        return (
            x.is_cpu
            and x.dtype in (torch.float32, torch.float64)
            and set(self.stride) == {1}
            and max(self.kernel) > 1
            and math.prod(self.shape) * math.prod(self.kernel) >= WORTH
            and x.is_contiguous()
        )


def sums_by_shifts(x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Sums over windows at each place, along one dim after the other: of views that are shifted against each other.

    They are their own adjoint, but for how much padding there is.
    """
    if any(padding):
        x = F.pad(x, [side for side in reversed(padding) for _ in range(2)])
    for dim, taps in reversed(list(enumerate(kernel, x.dim() - len(kernel)))):
        first, *others = (x.narrow(dim, tap, x.shape[dim] - taps + 1) for tap in range(taps))
        x = first + others[0] if others else first
        for view in others[1:]:
            x += view
    return x


def _inside(y: Tensor, indices: Tensor, size: Sequence[int], margins: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Indices of pixels of the image: where all of a window is as low as padding is, PyTorch takes its first pixel."""
    if y.is_meta or (y.is_cpu and not bool((y == worst(y, True)).any())):
        return indices  # to ask a GPU would stop it
    return flat_index(
        [
            at + (margin - at).clamp(min=0).add(step - 1).div(step, rounding_mode="floor") * step
            for at, margin, step in zip(places_of(indices, size), margins, dilation, strict=True)
        ],
        size,
    )


def windows_of(
    count: int, ceil_mode: bool, kernel: Size, stride: Size | None, padding: Size, dilation: Size
) -> tuple[Window, ...]:
    kernels, paddings, dilations = each(kernel, count), each(padding, count), each(dilation, count)
    strides = kernels if stride is None or (not isinstance(stride, int) and not len(stride)) else each(stride, count)
    if not all(0 <= 2 * paddings[i] <= kernels[i] for i in range(count)):
        raise RuntimeError(f"pad should be from 0 to half of the effective kernel size: got {paddings} and {kernels}")
    return tuple(
        Window(kernels[i], strides[i], paddings[i], paddings[i], dilations[i], ceil_mode) for i in range(count)
    )


def _plan_maxima(x: SpatialTensor, places: bool, *options: Any) -> tuple[Sliding, WithHalo]:
    windows = _of_images(*options)
    sliding = slide(x, windows, worst(x, True))
    margins = [max(0, -rows.start) for rows in sliding.needed]
    padding, dilation = list(sliding.padding), [window.dilation for window in windows]
    shape = sliding.shape(sliding.halo_plan.begin(x))
    function = _Maxima(*_numbers(windows), padding, dilation, windows[0].ceil_mode, shape, margins, places)
    return sliding, WithHalo(sliding.halo_plan.exchange, function)


def _plan_means(
    x: SpatialTensor, count_include_pad: bool, *options: Any
) -> tuple[HaloPlan, WithHalo, list[list[int]], int]:
    windows = _of_images(*options)
    sliding = slide(x, windows)
    padding, shape = list(sliding.padding), sliding.shape(sliding.halo_plan.begin(x))
    function = _Means(*_numbers(windows), padding, windows[0].ceil_mode, shape)
    counts = _counts(x.shape, windows, sliding.made, count_include_pad)
    return sliding.halo_plan, WithHalo(sliding.halo_plan.exchange, function), counts, math.prod(function.kernel)


def _numbers(windows: Sequence[Window]) -> tuple[list[int], list[int]]:
    """Kernel and stride along each dim."""
    return [window.kernel for window in windows], [window.stride for window in windows]


def _max_pool(
    count: int,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maxima, of equal pixels the first; their indices, if they are asked for, are those of the whole image."""
    x = _as_image(check_image(input, f"torch.nn.functional.max_pool{count}d", count, True), count)
    local, options = x.local, (return_indices, count, ceil_mode, kernel_size, stride, padding, dilation)
    key = _plan_maxima, options, local.shape, local.dtype
    (halo_plan, _, needed, _), operator = x.layout.cached(key, lambda: _plan_maxima(x, *options))
    y, *indices = operate(x, local, halo_plan, operator)
    found = [halo_plan.result(x, y)]
    if return_indices:
        at = zip(places_of(indices[0], [rows.length for rows in needed]), needed, strict=True)
        in_image = flat_index([place + rows.start for place, rows in at], x.shape[-len(needed) :])
        found.append(wrap(in_image, halo_plan.output))
    found = [each.squeeze(-2) for each in found] if count == 1 else found
    return tuple(found) if return_indices else found[0]


def _as_image(x: SpatialTensor, count: int) -> SpatialTensor:
    """Sequences as images of one row."""
    return x if count > 1 else x.unsqueeze(-2)  # type: ignore[return-value]


def _of_images(count: int, ceil_mode: bool, *numbers: Any) -> tuple[Window, ...]:
    """The windows of `windows_of`; those of sequences as such images."""
    windows = windows_of(count, ceil_mode, *numbers)
    return windows if count > 1 else (Window(1, ceil_mode=ceil_mode), *windows)


def _with_indices(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule where indices are always returned, whatever the call says of it."""
    return lambda count, *args, **kwargs: rule(count, *args, **{**kwargs, "return_indices": True})


def _avg_pool(
    count: int,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window, put right where PyTorch counts other than a whole window's pixels, as at the edges."""
    x = _as_image(check_image(input, f"torch.nn.functional.avg_pool{count}d", count, True), count)
    local, options = x.local, (count_include_pad, count, ceil_mode, kernel_size, stride, padding, 1)
    key = _plan_means, options, local.shape
    halo_plan, operator, counts, area = x.layout.cached(key, lambda: _plan_means(x, *options))
    (y,) = operate(x, local, halo_plan, operator)
    if divisor_override == 0:
        raise RuntimeError("divisor must be not zero")
    if not y.is_floating_point() and (ceil_mode or not count_include_pad or divisor_override is not None):
        raise refusal(
            f"torch.nn.functional.avg_pool{count}d", "integers are divided by more or less than a window: pass floats"
        )
    if divisor_override is not None:
        return halo_plan.result(x, y * (area / divisor_override))
    if counts:
        shares = [numbers_on(y.device, tuple(numbers), y.dtype) for numbers in counts]
        divisor = reduce(lambda done, share: done.unsqueeze(-1) * share, shares)
        y = y * (area / divisor)
    pooled = halo_plan.result(x, y)
    return pooled.squeeze(-2) if count == 1 else pooled


def _counts(
    shape: Sequence[int], windows: Sequence[Window], made: Sequence[Interval], count_include_pad: bool
) -> list[list[int]]:
    """Along each dim, how many pixels of each window count, of those that this rank has; nothing if always all."""
    counts = []
    for size, window, rows in zip(shape[-len(windows) :], windows, made, strict=True):
        margin = window.before if count_include_pad else 0
        image = Interval(-margin, size + margin)
        counts.append([window.needs(Interval(row, row + 1), size).intersect(image).length for row in range(*rows)])
    odd = any(number != window.kernel for numbers, window in zip(counts, windows, strict=True) for number in numbers)
    return counts if odd else []


def _lp_windows(
    count: int, norm_type: float, kernel_size: Size, stride: Size | None = None, ceil_mode: bool = False
) -> tuple[Window, ...]:
    return windows_of(count, ceil_mode, kernel_size, stride, 0, 1)


for count in (1, 2, 3):
    for kind, rule in (
        ("max_pool{}d", _max_pool),
        ("max_pool{}d_with_indices", _with_indices(_max_pool)),
        ("avg_pool{}d", _avg_pool),
    ):
        register(*named(kind.format(count)))(partial(rule, count))
    lp_pool = getattr(F, f"lp_pool{count}d")
    register(lp_pool)(described(lp_pool, count, partial(_lp_windows, count), each_channel=True))

# Adaptive pooling: means and maxima over bins of pixels, which every rank then has in full. In 1, 2 and 3 dims.


def _means(count: int, input: SpatialTensor, output_size: Any) -> Tensor:
    """Means over bins; the result is small, and every rank has all of its pixels."""
    x = check_image(input, f"torch.nn.functional.adaptive_avg_pool{count}d", count, True)
    size, dims = _output_size(x, output_size, count), tuple(range(x.dim() - count, x.dim()))
    if set(size) == {1}:
        return mean(x, dims, True)
    mine = _mine(x, count)

    def add_up(part: Tensor, *_: Any, dtype: torch.dtype | None, **options: Any) -> Tensor:
        y = part.float() if x.itemsize < 4 else part  # sums are not of 16 bits, as in PyTorch
        for dim, bins, pixels, own in zip(dims, size, x.shape[-count:], mine, strict=True):
            y = torch.stack([_share(y, dim, _bin(i, pixels, bins), own) for i in range(bins)], dim)
        return y.to(dtype or x.dtype)

    return total(x, dims, True, add=add_up)


def _output_size(x: Tensor, asked: Any, count: int) -> tuple[int, ...]:
    sizes = (asked,) * count if isinstance(asked, int) or asked is None else tuple(asked)
    return tuple(n if size is None else size for n, size in zip(x.shape[-count:], sizes, strict=True))


def _mine(x: SpatialTensor, count: int) -> list[Interval]:
    """The owned interval along each of the last dims."""
    sizes = zip(axes_of(x, count), x.shape[-count:], strict=True)
    return [Interval(0, pixels) if axis is None else x.layout.owned[axis] for axis, pixels in sizes]


def _share(part: Tensor, dim: int, span: Interval, own: Interval) -> Tensor:
    """What the pixels of this rank, `own` of `dim`, add to the mean over a bin. Others may be infinite."""
    here = span.intersect(own).shift(-own.start)
    return part.narrow(dim, *((here.start, here.length) if not here.empty else (0, 0))).sum(dim) / span.length


def _maxima(count: int, input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Any:
    """Maxima over bins, of equal pixels the first in reading order as in PyTorch; indices are those of the whole."""
    x = check_image(input, f"torch.nn.functional.adaptive_max_pool{count}d", count, True)
    size, image = _output_size(x, output_size, count), x.shape[-count:]
    pool = getattr(F, f"adaptive_max_pool{count}d")
    pool(torch.empty(x.shape, dtype=x.dtype, device="meta"), size)  # raises what PyTorch raises
    dims = tuple(range(x.dim() - count, x.dim()))
    axes, layout = x.layout.axes_at(dims), reduced_layout(x.layout, dims, True)
    comm, part, mine = x.layout.grid.along(axes), owned_along(x, axes), _mine(x, count)
    with torch.no_grad():
        found = []
        for numbers in product(*map(range, size)):
            bins = [_bin(*of_axis).intersect(span) for *of_axis, span in zip(numbers, image, size, mine, strict=True)]
            found.append(_first_in(pool, part, bins, mine, image))
        shape = (*part.shape[:-count], *size)
        values, places = (torch.cat(list(each), -1).reshape(shape) for each in zip(*found, strict=True))
        # The last of what is no number is to come first.
        places = torch.where(values.isnan(), -1 - places, places)
        best, first = first_of(values, places, math.prod(image) + 1, comm)
        first = torch.where(first < 0, -1 - first, first)

    def hand_out(gradient: Tensor) -> Tensor:
        given = part.new_zeros(part.shape)
        if any(span.empty for span in mine):
            return given
        here = [at - span.start for at, span in zip(places_of(first, image), mine, strict=True)]
        inside = torch.ones_like(first, dtype=torch.bool)
        for at, span in zip(here, mine, strict=True):
            inside &= (at >= 0) & (at < span.length)
        index = flat_index(here, [span.length for span in mine]).where(inside, 0).flatten(-count)
        values = gradient.where(inside, 0).flatten(-count)
        return given.flatten(-count).scatter_add_(-1, index, values).view(given.shape)

    y = wrap(take(part, best, hand_out, comm), layout)
    return (y, wrap(first, layout)) if return_indices else y


def _bin(number: int, pixels: int, bins: int) -> Interval:
    """The pixels of one of so many bins, which may overlap."""
    return Interval(number * pixels // bins, ceil_div((number + 1) * pixels, bins))


def _first_in(
    pool: Any, part: Tensor, bins: Sequence[Interval], mine: Sequence[Interval], image: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The maximum over a box of this rank's part of an image, and its index there: of equal ones the first, but of
    those that are no numbers the last, as PyTorch has it.
    """
    count = len(bins)
    shape = (*part.shape[:-count], *(1,) * count)
    if any(span.empty for span in bins):
        places = part.new_full(shape, NOWHERE, dtype=torch.int64)
        return part.new_full(shape, worst(part, maximum=True)).flatten(-count), places.flatten(-count)
    block = part
    for dim, (span, own) in enumerate(zip(bins, mine, strict=True), -count):
        block = block.narrow(dim, span.start - own.start, span.length)
    values, places = pool(block, 1, True)
    at = [place + span.start for place, span in zip(places_of(places, block.shape[-count:]), bins, strict=True)]
    return values.flatten(-count), flat_index(at, image).flatten(-count)


for count in (1, 2, 3):
    register(*named(f"adaptive_avg_pool{count}d"))(partial(_means, count))
    register(getattr(F, f"adaptive_max_pool{count}d"))(partial(_maxima, count))
    register(getattr(F, f"adaptive_max_pool{count}d_with_indices"))(partial(_with_indices(_maxima), count))
register(torch.adaptive_max_pool1d)(partial(_with_indices(_maxima), 1))
