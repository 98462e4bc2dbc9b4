"""Max, average and Lp pooling on tiles, and adaptive pooling, in 1, 2 and 3 dims; only indices are saved.

Large images on CPUs are pooled by shifted views, all else by PyTorch's kernels.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Exchange, once_differentiable
from mpi4dl.geometry import Interval, Window, ceil_div
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
    Sliding,
    axes_of,
    check_image,
    each,
    flat_index,
    hashable,
    places_of,
    slide,
)
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, numbers_on, register, wrap

# Pooling on CPUs by whole views, shifted against each other, one dim after the other.
#
#     image         a b c d e        windows of three, one after the other: PyTorch's own kernels (contiguous images)
#     shifted by 1  b c d e          all first pixels, all second ones and all third ones, as vectors: here
#     shifted by 2  c d e            max pooling of 64 x 64 px in 64 channels: 0.4 ms instead of 5.6
#
# Of equal pixels the first one of a window, in the order of rows, is its maximum, as in PyTorch: the last dim is pooled
# first, and each pass keeps its own earliest maximum. The backward pass needs a byte for each pass, the index within
# the window.

WORTH = 1 << 15  # pixels looked at from which this is faster
MOST_TAPS = 127  # what a byte can say


def shifts_pay(x: Tensor, shape: Sequence[int], windows: Sequence[Window]) -> bool:
    """Whether pooling x to this shape is faster here than by PyTorch's kernels."""
    kernels = [window.kernel for window in windows]
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and math.prod(shape) * math.prod(kernels) >= WORTH
        and max(kernels) <= MOST_TAPS
        and x.is_contiguous()
    )


def margins_for_shifts(
    size: Sequence[int], shape: Sequence[int], windows: Sequence[Window], before: Sequence[int]
) -> list[int]:
    """How an image of that size is padded, as `F.pad` takes it, so that as many windows fit exactly as `shape` says.

    `before` it come so many pixels along each dim; behind it what is missing, or is too much.
    """
    around = []
    for length, number, window, front in zip(size, shape, windows, before, strict=True):
        reached = (number - 1) * window.stride + window.extent
        around.append((front, reached - front - length))
    return [side for pair in reversed(around) for side in pair]


def maxima_by_shifts(x: Tensor, windows: Sequence[Window]) -> tuple[Tensor, list[Tensor]] | None:
    """The maxima of windows that fit x exactly, and what `of_maxima` needs; None if one is lowest of all, or NaN."""
    chosen = []
    for dim, window in _last_first(x, windows):
        views = _views(x, dim, window)
        if window.stride > 1 and dim == x.dim() - 1:
            views = [view.contiguous() for view in views]  # comparing what lies apart takes thirty times as long
        x, choice = views[0], torch.zeros((), dtype=torch.int8)
        for tap, view in enumerate(views[1:], 1):
            later = torch.gt(view, x, out=torch.empty(view.shape, dtype=view.dtype))
            x = torch.maximum(x, view)
            choice = torch.maximum(choice, later.to(torch.int8).mul_(tap))
        chosen.append(choice)
    # The first pixel of a window may be padding, and comparisons do not find NaN.
    return (x.contiguous(), chosen) if float(x.amin()) > float("-inf") else None


def gradient_of_maxima(gradient: Tensor, chosen: Sequence[Tensor], windows: Sequence[Window]) -> Tensor:
    """The gradient of an image, which the windows fit, from that of its maxima."""
    finite = bool(gradient.sum().isfinite())
    for (dim, window), choice in reversed(list(zip(_last_first(gradient, windows), chosen, strict=True))):
        spread = _lengthened(gradient, dim, window)
        for tap, view in enumerate(_views(spread, dim, window)):
            its = torch.eq(choice, tap, out=torch.empty_like(choice))  # bytes, since booleans take ten times as long
            if finite:
                view.addcmul_(gradient, its.to(gradient.dtype))
            else:
                view.add_(torch.where(its.bool(), gradient, 0.0))
        gradient = spread
    return gradient


def means_by_shifts(x: Tensor, windows: Sequence[Window], divisor: int) -> Tensor:
    """The sums of windows that fit x exactly, over `divisor`."""
    for dim, window in _last_first(x, windows):
        first, *others = _views(x, dim, window)
        x = first + others[0] if others else first
        for view in others[1:]:
            x += view
    return x / divisor


def gradient_of_means(gradient: Tensor, windows: Sequence[Window], divisor: int) -> Tensor:
    """The gradient of an image, which the windows fit, from that of its means."""
    gradient = gradient / divisor
    for dim, window in reversed(_last_first(gradient, windows)):
        spread = _lengthened(gradient, dim, window)
        for view in _views(spread, dim, window):
            view += gradient
        gradient = spread
    return gradient


def with_margins(x: Tensor, around: Sequence[int], fill: float) -> Tensor:
    return F.pad(x, list(around), value=fill) if any(around) else x


def window_area(windows: Sequence[Window]) -> int:
    return math.prod(window.kernel for window in windows)


def _last_first(x: Tensor, windows: Sequence[Window]) -> list[tuple[int, Window]]:
    return list(enumerate(windows, x.dim() - len(windows)))[::-1]


def _views(x: Tensor, dim: int, window: Window) -> list[Tensor]:
    """All first pixels of windows along that dim, all second ones and so on."""
    unfolded = x.unfold(dim, window.extent, window.stride)
    return [unfolded.select(-1, tap) for tap in range(0, window.extent, window.dilation)]


def _lengthened(x: Tensor, dim: int, window: Window) -> Tensor:
    """Zeros of the shape of x, but along this dim as long as what so many windows reach."""
    shape = list(x.shape)
    shape[dim] = (shape[dim] - 1) * window.stride + window.extent
    return x.new_zeros(shape)


aten = torch.ops.aten
Size = int | Sequence[int]
# Poolings in 2 and in 3 dims, and their gradients: one dim is pooled as images of one row.
MAXIMA = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}
MEANS = {2: (aten.avg_pool2d, aten.avg_pool2d_backward), 3: (aten.avg_pool3d, aten.avg_pool3d_backward)}


@dataclass(frozen=True)
class _Pooling:
    """A pooling: the maximum or the mean of each window, and the place of its output, which is of this `shape`.

    `padding` is that of dims that are not cut, which the operator adds. With `places` the index of each maximum is
    asked for.
    """

    windows: Sequence[Window]
    maximum: bool
    places: bool
    sliding: Sliding
    padding: list[int]
    shape: list[int]

    @cached_property
    def options(self) -> tuple[Any, ...]:
        """The arguments of PyTorch's kernel, for max pooling, or for average pooling over whole windows."""
        kernel, stride, dilation = (
            [getattr(w, name) for w in self.windows] for name in ("kernel", "stride", "dilation")
        )
        ceil_mode = self.windows[0].ceil_mode
        if self.maximum:
            return kernel, stride, self.padding, dilation, ceil_mode
        return kernel, stride, self.padding, ceil_mode, True, window_area(self.windows)


class _Pool(torch.autograd.Function):
    """Fetch the halo and pool. Max pooling may also give the index of each maximum in the input with its halo."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: Exchange | None,
        pooling: _Pooling,
    ) -> tuple[Tensor, Tensor | None]:
        padded = x if exchange is None else exchange.bring(x)
        shape, maximum = pooling.shape, pooling.maximum
        ctx.exchange, ctx.pooling = exchange, pooling
        ctx.like = padded.new_empty(0), padded.shape
        ctx.count = len(pooling.windows)
        ctx.around = None
        if 0 in shape:
            return x.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=x.device) if maximum else None
        if not pooling.places and shifts_pay(padded, shape, pooling.windows):
            around = margins_for_shifts(
                padded.shape[-ctx.count :], shape[-ctx.count :], pooling.windows, pooling.padding
            )
            fitting = with_margins(padded, around, worst(x, True) if maximum else 0.0)
            if not maximum:
                ctx.around = around
                return means_by_shifts(fitting, pooling.windows, window_area(pooling.windows)), None
            found = maxima_by_shifts(fitting, pooling.windows)
            if found is not None:
                ctx.around = around
                ctx.save_for_backward(*found[1])
                return found[0], None
        options = pooling.options
        if not maximum:
            return MEANS[ctx.count][0](padded, *options), None
        y, indices = MAXIMA[ctx.count][0](padded, *options)
        indices = _inside(y, indices, padded.shape[-ctx.count :], pooling.sliding.needed, options[3])
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return y, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        exchange: Exchange | None = ctx.exchange
        pooling: _Pooling = ctx.pooling
        kind, shape = ctx.like
        if ctx.around is not None:
            if pooling.maximum:
                gradient = gradient_of_maxima(gradient, ctx.saved_tensors, pooling.windows)
            else:
                gradient = gradient_of_means(gradient, pooling.windows, window_area(pooling.windows))
            gradient = with_margins(gradient, [-side for side in ctx.around], 0.0)
        else:
            padded = kind.new_empty(shape)  # the backward passes of both read the shape of their input, not its values
            if gradient.numel() == 0:
                gradient = padded.zero_()
            elif pooling.maximum:
                (indices,) = ctx.saved_tensors
                gradient = MAXIMA[ctx.count][1](gradient, padded, *pooling.options, indices)
            else:
                gradient = MEANS[ctx.count][1](gradient, padded, *pooling.options)
        if exchange is not None:
            gradient = exchange.adjoint.bring(gradient)
        return gradient, None, None


def _inside(
    y: Tensor, indices: Tensor, size: Sequence[int], needed: Sequence[Interval], dilation: Sequence[int]
) -> Tensor:
    """Indices of pixels of the image: where all of a window is as low as padding is, PyTorch takes its first pixel."""
    margins = [max(0, -rows.start) for rows in needed]
    if not any(margins) or y.is_meta or (y.is_cpu and not bool((y == worst(y, True)).any())):
        return indices  # to ask a GPU would stop it
    return flat_index(
        [
            at + (margin - at).clamp(min=0).add(step - 1).div(step, rounding_mode="floor") * step
            for at, margin, step in zip(places_of(indices, size), margins, dilation, strict=True)
        ],
        size,
    )


@lru_cache(maxsize=1024)
def windows_of(
    count: int, ceil_mode: bool, kernel: Size, stride: Size | None, padding: Size, dilation: Size
) -> tuple[Window, ...]:
    kernels, paddings, dilations = each(kernel, count), each(padding, count), each(dilation, count)
    strides = kernels if stride is None or (not isinstance(stride, int) and not len(stride)) else each(stride, count)
    if any(2 * paddings[i] > kernels[i] for i in range(count)):
        raise RuntimeError(f"pad should be at most half of the effective kernel size, but got {paddings} and {kernels}")
    return tuple(
        Window(kernels[i], strides[i], paddings[i], paddings[i], dilations[i], ceil_mode) for i in range(count)
    )


def _pool(
    x: SpatialTensor, windows: tuple[Window, ...], maximum: bool, places: bool = False
) -> tuple[Tensor, Tensor, Sliding]:
    """The pooled part, the `places` of its maxima in the whole image if they are asked for, and what it reached."""
    local = x.local
    key = _pool, windows, maximum, places, local.shape, local.dtype
    pooling = x.layout.known(key, lambda: _plan(x, windows, maximum, places))
    sliding, reached = pooling.sliding, pooling.sliding.reached
    reached.ask(x)
    if reached.exchange is None:
        local = reached.crop(local)
    y, indices = _Pool.apply(local, reached.exchange, pooling)
    if places:
        found = places_of(indices, [rows.length for rows in sliding.needed])
        in_image = [at + rows.start for at, rows in zip(found, sliding.needed, strict=True)]
        indices = flat_index(in_image, x.shape[-len(windows) :])
    return y, indices, sliding


def _plan(x: SpatialTensor, windows: Sequence[Window], maximum: bool, places: bool) -> _Pooling:
    sliding = slide(x, windows, worst(x, True) if maximum else 0.0)
    padding = [window.before if itself else 0 for window, itself in zip(windows, sliding.own, strict=True)]
    return _Pooling(windows, maximum, places, sliding, padding, sliding.shape(sliding.reached.begin(x)))


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
    x = check_image(input, f"torch.nn.functional.max_pool{count}d", count, True)
    numbers = hashable(kernel_size), hashable(stride), hashable(padding), hashable(dilation)
    x, windows = _of_rows(x, windows_of(count, ceil_mode, *numbers))
    y, indices, (reached, *_) = _pool(x, windows, True, return_indices)
    found = [reached.result(x, y), *([wrap(indices, reached.output)] if return_indices else [])]
    found = [each.squeeze(-2) for each in found] if count == 1 else found
    return tuple(found) if return_indices else found[0]


def _of_rows(x: SpatialTensor, windows: tuple[Window, ...]) -> tuple[SpatialTensor, tuple[Window, ...]]:
    """Sequences as images of one row."""
    if len(windows) > 1:
        return x, windows
    row = x.unsqueeze(-2)
    assert isinstance(row, SpatialTensor)
    return row, (Window(1, ceil_mode=windows[0].ceil_mode), *windows)


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
    x = check_image(input, f"torch.nn.functional.avg_pool{count}d", count, True)
    x, windows = _of_rows(
        x, windows_of(count, ceil_mode, hashable(kernel_size), hashable(stride), hashable(padding), 1)
    )
    y, _, sliding = _pool(x, windows, maximum=False)
    reached = sliding.reached
    area = window_area(windows)
    if divisor_override == 0:
        raise RuntimeError("divisor must be not zero")
    if divisor_override is not None:
        return reached.result(x, y * (area / divisor_override))
    key = _counts, windows, count_include_pad, x.local.shape
    counts = x.layout.known(key, lambda: _counts(x.shape, windows, sliding.made, count_include_pad))
    if counts:
        shares = [numbers_on(y.device, tuple(numbers), y.dtype) for numbers in counts]
        divisor = reduce(lambda done, share: done.unsqueeze(-1) * share, shares)
        y = y * (area / divisor)
    pooled = reached.result(x, y)
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


def _lp_pool(
    count: int,
    input: Tensor,
    norm_type: float,
    kernel_size: Size,
    stride: Size | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """(sum of x^p)^(1/p) over each window, with the sign convention of PyTorch's own."""
    area = math.prod(each(kernel_size, count))
    mean = _avg_pool(count, input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(area).pow(1.0 / norm_type)


for count in (1, 2, 3):
    for kind, rule in (
        ("max_pool{}d", _max_pool),
        ("max_pool{}d_with_indices", _with_indices(_max_pool)),
        ("avg_pool{}d", _avg_pool),
        ("lp_pool{}d", _lp_pool),
    ):
        register(*named(kind.format(count)))(partial(rule, count))

# Adaptive pooling: means and maxima over bins of pixels, which every rank then has in full. In 1, 2 and 3 dims.


def _means(count: int, input: SpatialTensor, output_size: Any) -> Tensor:
    """Means over bins; the result is small, and every rank has all of its pixels."""
    x = check_image(input, f"torch.nn.functional.adaptive_avg_pool{count}d", count, True)
    size, dims = _output_size(x, output_size, count), tuple(range(x.dim() - count, x.dim()))
    if set(size) == {1}:
        return mean(x, dims, True)
    weights = _bins(x, size)

    def add_up(part: Tensor, *_: Any, dtype: torch.dtype | None, **options: Any) -> Tensor:
        with torch.autocast(x.device.type, enabled=False) if not x.is_meta else nullcontext():
            y = part.to(weights[0].dtype) @ weights[-1].mT
            for after, weight in enumerate(reversed(weights[:-1]), 1):  # so many dims come after this one
                rest = y.shape[-after:]
                y = (weight @ y.reshape(*y.shape[:-after], math.prod(rest))).view(
                    *y.shape[: -after - 1], len(weight), *rest
                )
        return y.to(dtype or x.dtype)

    return total(x, dims, True, add=add_up)


def _output_size(x: Tensor, asked: Any, count: int) -> tuple[int, ...]:
    sizes = (asked,) * count if isinstance(asked, int) or asked is None else tuple(asked)
    return tuple(n if size is None else size for n, size in zip(x.shape[-count:], sizes, strict=True))


def _mine(x: SpatialTensor, count: int) -> list[Interval]:
    """The owned interval along each of the last dims."""
    sizes = zip(axes_of(x, count), x.shape[-count:], strict=True)
    return [Interval(0, pixels) if axis is None else x.layout.owned[axis] for axis, pixels in sizes]


def _bins(x: SpatialTensor, size: Sequence[int]) -> list[Tensor]:
    """For each of the last dims, the weight (bins, owned) of each owned pixel in each bin's mean."""
    weights = []
    for pixels, count, mine in zip(x.shape[-len(size) :], size, _mine(x, len(size)), strict=True):
        dtype = torch.float32 if x.itemsize < 4 else x.dtype  # of sums: not 16 bits, as in PyTorch
        weight = torch.zeros(count, pixels, dtype=dtype, device=x.device)
        for i in range(count):
            start, stop = _bin(i, pixels, count)
            weight[i, start:stop] = 1 / (stop - start)
        weights.append(weight[:, slice(*mine)])
    return weights


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
