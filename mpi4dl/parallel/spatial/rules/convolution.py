"""Convolution on tiles, transposed or not, in 1, 2 and 3 dims; overlapped with its halo; with cut channels.

The backward pass needs only the activation itself, which its producer keeps alive anyway, and the strips that came from
the neighbours. The input with its halo lives only while a convolution runs, if at all.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from mpi4dl.comm import exchange
from mpi4dl.comm.exchange import Cut, Dims, Exchange, ExchangePlan, Like, at, once_differentiable
from mpi4dl.geometry import Box, Interval, Split, TransposedWindow, Window
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import HaloPlan, gather_axes
from mpi4dl.parallel.spatial.redistribution import as_image
from mpi4dl.parallel.spatial.rules.windows import axes_of, cast, check_image, each, hashable, slide
from mpi4dl.parallel.spatial.sums import shared, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, local_part, refusal, register, wrap

# How a convolution takes its halo: joined to the tile, in a copy of both, or apart from it.
#
#     joined   [ strip | tile | strip ]  -> convolution      any convolution; the copy lives only while it runs
#
#     apart    [  0    | tile |   0   ]  -> convolution      PyTorch pads itself; meanwhile the strips travel
#              [ strip |  0  ]           -> convolution   +  a convolution is linear in its input, so what each strip
#                        [  0  | strip ] -> convolution   +  makes of a tile of zeros is added at the border
#
# Apart, the gradients of the strips are computed first, and travel while that of the tile is. It saves a copy of the
# tile in forward and two in backward, and costs a small convolution for each strip, which reads the weights again.

# The cost of the convolution of a strip, in bytes of the tile that could be copied meanwhile, measured on CPUs:
# whatever its size; for each byte of the weights; and one for each byte of the strip and pixel of the kernel.
PER_STRIP, PER_WEIGHT = 2 << 20, 8
HALVES = (torch.float16, torch.bfloat16)

Gradients = tuple[Tensor, Tensor, Tensor]
Mask = tuple[bool, bool, bool]


class ConvolutionOptions(NamedTuple):
    """The arguments of `aten::convolution` that are not tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Joined(NamedTuple):
    """The convolution of a new tensor, the tile with its halo. Without an exchange, of the tile as it is.

    `x` is what this rank holds, strips are what came for it.
    """

    exchange: Exchange | None
    options: ConvolutionOptions

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, of this shape, and the strips."""
        strips: list[Tensor] = []
        if self.exchange is not None:
            incoming = self.exchange.start(x)
            strips, x = incoming.strips, self.exchange.assemble(x, incoming)
        if 0 in shape or not x.numel():
            y = x.new_zeros(shape)
            return y if bias is None else y + bias.view(-1, *(1,) * (y.dim() - 2)), strips
        return torch.convolution(x, weight, bias, *self.options), strips

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """A wait for the gradient of x, whose strips travel from here on."""
        exchange = self.exchange
        padded = x if exchange is None else exchange.memory(Like.of(x))  # its values do not matter
        whole = gradients(gradient, padded, weight, self.options, (True, False, False))[0]
        if exchange is None:
            return lambda: whole
        back = exchange.adjoint.start(whole)
        return lambda: exchange.adjoint.assemble(whole, back)

    def of_parameters(
        self, gradient: Tensor, x: Tensor, strips: list[Tensor], weight: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias, those of them that the mask asks for."""
        return gradients(gradient, self._padded(x, strips), weight, self.options, mask)[1:]

    def in_one_call(
        self, gradient: Tensor, x: Tensor, strips: list[Tensor], weight: Tensor, mask: Mask
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, those of them that the mask asks for: strips leave after all of them."""
        whole, *rest = gradients(gradient, self._padded(x, strips), weight, self.options, mask)
        return (whole if self.exchange is None or not mask[0] else self.exchange.adjoint.bring(whole)), *rest

    def _padded(self, x: Tensor, strips: list[Tensor]) -> Tensor:
        return x if self.exchange is None else self.exchange.again(x, strips)


class Border(NamedTuple):
    """The contribution of a strip to the output: its place, its part of the kernel, and its padding."""

    where: Cut
    taps: Cut
    around: list[int]

    def extended(self, strip: Tensor) -> Tensor:
        return F.pad(strip, self.around) if any(self.around) else strip

    def trimmed(self, gradient: Tensor) -> Tensor:
        """The adjoint of `extended`."""
        return F.pad(gradient, [-each for each in self.around]) if any(self.around) else gradient


class Apart(NamedTuple):
    """The convolution of the tile in PyTorch's own padding, and that of each strip, added at the border.

    `of_strips` are the options of the latter: `Border.extended` has done their padding.
    """

    exchange: Exchange
    options: ConvolutionOptions
    of_strips: ConvolutionOptions
    borders: tuple[Border, ...]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        incoming = self.exchange.start(x)
        y = torch.convolution(x, weight, bias, *self.options)
        incoming.pending.wait()
        for strip, border in zip(incoming.strips, self.borders, strict=True):
            kernel = at(weight, border.taps)
            at(y, border.where).add_(torch.convolution(border.extended(strip), kernel, None, *self.of_strips))
        return y, incoming.strips

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        like, adjoint = Like.of(x), self.exchange.adjoint
        mask = (True, False, False)
        slabs = []
        for strip, border in zip(self.exchange.strips(like), self.borders, strict=True):
            kernel, extended = at(weight, border.taps), border.extended(strip)  # its values do not matter
            part = gradients(at(gradient, border.where), extended, kernel, self.of_strips, mask)[0]
            slabs.append(border.trimmed(part))
        back = adjoint.start_with(slabs, like)
        of_tile = gradients(gradient, x, weight, self.options, mask)[0]
        return lambda: adjoint.put(back, of_tile)

    def of_parameters(
        self, gradient: Tensor, x: Tensor, strips: list[Tensor], weight: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        of_weight, of_bias = gradients(gradient, x, weight, self.options, mask)[1:]
        if mask[1]:
            for strip, border in zip(strips, self.borders, strict=True):
                kernel, extended = at(weight, border.taps), border.extended(strip)
                part = gradients(at(gradient, border.where), extended, kernel, self.of_strips, (False, True, False))
                at(of_weight, border.taps).add_(part[1])
        return of_weight, of_bias


Way = Joined | Apart  # how a rank's part of a convolution is computed


def choose(
    reached: HaloPlan,
    x: SpatialTensor,
    local: Tensor,
    weight: Tensor,
    windows: Sequence[Window],
    options: ConvolutionOptions,
) -> Way:
    """The faster way to a convolution of `windows` along the last dims of x, of which this rank has `local`."""
    exchange = reached.exchange
    if exchange is None or not _pays(exchange, local, weight):
        return Joined(exchange, options)
    axes = axes_of(x, len(windows))
    if None in axes:
        return Joined(exchange, options)
    along = tuple((axis, window) for axis, window in zip(axes, windows, strict=True) if axis is not None)
    found = _borders(exchange.plan, exchange.dims, reached.output.held, along)
    if found is None:
        return Joined(exchange, options)
    padding, borders = found
    return Apart(exchange, options._replace(padding=padding), options._replace(padding=(0,) * len(padding)), borders)


def _pays(exchange: Exchange, x: Tensor, weight: Tensor) -> bool:
    """Whether copies of the tile cost more than the convolutions of the strips; and these round as one would.

    Of halves the sums at the border would be rounded twice.
    """
    strips = exchange.plan.moves(exchange.dims, x.shape).strips
    spare = x.nbytes - len(strips) * (PER_STRIP + PER_WEIGHT * weight.nbytes)
    if x.dtype in HALVES or spare <= 0:
        return False
    return spare > weight[0, 0].numel() * x.itemsize * sum(math.prod(shape) for shape in strips)


@lru_cache(maxsize=4096)
def _borders(
    plan: ExchangePlan, dims: Dims, output: Box, windows: tuple[tuple[int, Window], ...]
) -> tuple[tuple[int, ...], tuple[Border, ...]] | None:
    """The padding of the tile, and the border that each strip makes; None where PyTorch's padding would not do.

    PyTorch pads both sides by the same, so what it makes of the tile must be of the output's size.
    """
    others = [axis for axis in range(len(dims)) if axis not in dict(windows)]
    if plan.kept != plan.held or plan.kept.empty or output.empty:
        return None
    if any(plan.kept[axis] != plan.needed[axis] for axis in others):
        return None
    padding = []
    for axis, window in windows:
        lead = plan.kept[axis].start - window.needs(output[axis], 0).start
        made = (plan.kept[axis].length + 2 * lead - window.extent) // window.stride + 1
        if lead < 0 or made != output[axis].length:
            return None
        padding.append(lead)
    borders = []
    for slab in plan.receives:
        where = [
            (dim, slab.box[axis].start - output[axis].start, slab.box[axis].length)
            for axis, dim in enumerate(dims)
            if axis in others and dim is not None and slab.box[axis] != output[axis]
        ]
        taps: list[tuple[int, int, int]] = []
        around: list[int] = []
        for axis, window in windows:
            rows = window.readers(slab.box[axis]).intersect(output[axis])
            hit = window.taps(rows, slab.box[axis])
            dim = dims[axis]
            if rows.empty or hit.empty or dim is None:
                return None
            first = rows.start * window.stride - window.before + hit.start * window.dilation
            read = (rows.length - 1) * window.stride + (hit.length - 1) * window.dilation + 1
            where.append((dim, rows.start - output[axis].start, rows.length))
            taps.append((2 + len(taps), hit.start, hit.length))
            around = [slab.box[axis].start - first, first + read - slab.box[axis].stop, *around]
        borders.append(Border(tuple(where), tuple(taps), around))
    return tuple(padding), tuple(borders)


def gradients(gradient: Tensor, x: Tensor, weight: Tensor, options: ConvolutionOptions, mask: Mask) -> Gradients:
    """Those gradients of input, weight and bias that the mask asks for."""
    if gradient.numel() == 0 or x.numel() == 0:
        of_bias = gradient.sum(dim=[dim for dim in range(gradient.dim()) if dim != 1])
        found = x.new_zeros(x.shape), weight.new_zeros(weight.shape), of_bias
        return tuple(each if asked else None for each, asked in zip(found, mask, strict=True))  # type: ignore[return-value]
    bias_sizes = [gradient.shape[1]] if mask[2] else None
    return torch.ops.aten.convolution_backward(gradient, x, weight, bias_sizes, *options, mask)


# Layers of images of whose channels each rank has some: those that it has are treated as if they were all.
#
# column   weight (out | , in, k, k)   each rank computes some channels, of all of the input's
# row      weight (out, in | , k, k)   each rank has some channels of the input, and all add up
# groups   weight (out | , 1, k, k)    each rank has the same groups of the input's channels and of the output's


def own_channels(x: Tensor) -> Tensor:
    """This rank's channels of x, as if these were all."""
    if not isinstance(x, SpatialTensor):
        return x
    layout = x.layout
    return wrap(x.local, layout.with_dims([*layout.dims[:-1], None]))


def as_own(y: Tensor, grid: Grid, split: Split, dim: int) -> SpatialTensor:
    """y, made of this rank's own channels, as what it has of all of them, which are cut so."""
    layout = y.layout if isinstance(y, SpatialTensor) else Layout.of_copies(grid)
    tiling = layout.tiling.replace(grid.axes[-1], split)
    return SpatialTensor(local_part(y), Layout(grid, tiling, (*layout.dims[:-1], dim), layout.flat))


def of_channels(x: Tensor | None, channels: Interval) -> Tensor | None:
    """Those entries of x, which every rank has for all channels."""
    return None if x is None else x[channels.start : channels.stop]


Convolve = Callable[..., Tensor]
GROUPS = 3  # the place of `groups` in what follows a convolution's bias
BEHIND_BIAS = (
    ("stride", "padding", "dilation", "groups"),
    ("stride", "padding", "output_padding", "groups", "dilation"),
)


def with_cut_channels(function: Any, convolution: Convolve, out: int = 0) -> Convolve:
    """The rule `convolution` of this function, for weights too that are cut; `out` is the weight's dim of outputs."""

    @wraps(convolution)
    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
        dim = input.dim() - weight.dim() + 1
        if not isinstance(weight, SpatialTensor) and not shared(input, dim):
            return convolution(input, weight, bias, *args, **options)
        if isinstance(weight, SpatialTensor) and not shared(weight, 0) and not shared(weight, 1):
            raise refusal(function_name(function), "an argument other than the input is a SpatialTensor")
        groups = options.get("groups", args[GROUPS] if len(args) > GROUPS else 1)
        if not isinstance(weight, SpatialTensor):
            return function(with_all_features(input), weight, bias, *args, **options)  # type: ignore[arg-type]
        grid, split = weight.layout.grid, weight.layout.tiling.splits[-1]
        if groups == 1 and shared(weight, out):
            x = with_all_features(input) if shared(input, dim) else input  # type: ignore[arg-type]
            y = function(x, weight.local, _own(bias, weight, split), *args, **options)
            return as_own(y, grid, split, dim)
        if groups == 1:
            x = _these(input, split, dim, grid)
            y = function(x, weight.local, None, *args, **options)
            total = exchange.all_reduce(local_part(y), grid.along((grid.axes[-1],)))
            y = wrap(total, y.layout) if isinstance(y, SpatialTensor) else total
            return y if bias is None else y + bias.view(-1, *[1] * (weight.dim() - 2))
        # Groups: some of the inputs make some of the outputs.
        if not shared(weight, 0) or weight.shape[0] % groups or any(n * groups % weight.shape[0] for n in split.cuts):
            raise refusal(function_name(function), f"a weight of {groups} groups is cut elsewhere than between these")
        cuts = [n * groups // weight.shape[0] for n in split.cuts]  # in groups
        number = cuts[grid.coordinates[-1] + 1] - cuts[grid.coordinates[-1]]
        own = {**dict(zip(BEHIND_BIAS[out], args, strict=False)), **options, "groups": number}
        x = _these(input, Split.at([n * (input.shape[dim] // groups) for n in cuts]), dim, grid)
        made = Split.at([n * (weight.shape[out] // (1 if out else groups)) for n in cuts])
        return as_own(function(x, weight.local, _own(bias, weight, split), **own), grid, made, dim)

    return rule


def _own(bias: Tensor | None, weight: SpatialTensor, split: Split) -> Tensor | None:
    if isinstance(bias, SpatialTensor):
        return bias.local
    return of_channels(bias, split.owned(weight.layout.grid.coordinates[-1]))


def _these(x: Tensor, split: Split, dim: int, grid: Grid) -> Tensor:
    """Of x this rank's channels by that split."""
    if shared(x, dim) and x.layout.tiling.splits[-1] == split:  # type: ignore[attr-defined]
        return own_channels(x)
    x = with_all_features(x) if shared(x, dim) else x  # type: ignore[arg-type]
    mine = split.owned(grid.coordinates[-1])
    return x.narrow(dim, mine.start, mine.length)


WORTH_ONEDNN = 1 << 22  # multiplications
ONE_CALL = 1 << 22  # multiplications up to which one call finds all gradients: strips leave later, but it costs less


class Later(Protocol):
    """Takes note of `gradients`: called with `held`, it computes the gradients of a layer's weight and bias."""

    def __call__(self, gradients: Callable[..., tuple[Tensor | None, ...]], *held: Tensor) -> None: ...


class Convolution(torch.autograd.Function):
    """A convolution by one `Way`. It saves the tile itself and the strips that came.

    With `later`, weight and bias come without a graph of their own, and backward tells `later` how to compute their
    gradients. `anchor` is then any tensor that requires a gradient, of which it gets none: it makes this a part of the
    graph even if x is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        way: Way,
        shape: Sequence[int],
        later: Later | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        ctx.way, ctx.has_bias, ctx.later = way, bias is not None, later
        y, strips = way.forward(x, weight, bias, shape)
        ctx.save_for_backward(x, weight, *strips)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *strips = ctx.saved_tensors
        way: Way = ctx.way
        mask = need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        if isinstance(way, Joined) and ctx.later is None and _is_small(gradient, weight):
            return *way.in_one_call(gradient, x, strips, weight, mask), *(None,) * 4
        of_x = of_weight = of_bias = None
        if ctx.later is not None:
            of_all = False, True, ctx.has_bias
            ctx.later(lambda g, x: way.of_parameters(g, x, strips, weight, of_all), gradient, x.detach())
        if need_x:
            of_x = way.of_input(gradient, x, weight)
        if need_weight or need_bias:
            of_weight, of_bias = way.of_parameters(gradient, x, strips, weight, (False, need_weight, need_bias))
        return (
            of_x() if of_x is not None else None,
            of_weight if need_weight else None,
            of_bias if need_bias else None,
            *(None,) * 4,
        )


def _is_small(gradient: Tensor, weight: Tensor) -> bool:
    return gradient.is_cpu and gradient.numel() * weight.numel() <= ONE_CALL * len(weight)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, options: ConvolutionOptions) -> None:
    """Raise on all ranks what PyTorch raises only where a tile has pixels."""
    if input.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        dtypes = [t.dtype for t in (input, weight, bias) if t is not None]
        raise RuntimeError(f"input, weight and bias of a convolution must be of one type, but are {dtypes}")
    channels, groups = weight.shape[0 if options.transposed else 1], options.groups
    expected = channels if options.transposed else channels * groups
    if input.shape[1] != expected or weight.shape[0] % groups:
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} in {groups} groups needs {expected} input channels and "
            f"a first dim that {groups} divides, but the input has {input.shape[1]} channels"
        )


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, way: Way, shape: Sequence[int]) -> Tensor:
    """Convolve this rank's part in that way, to an output of `shape`.

    It can be overridden with `__torch_function__`, as PyTorch's own operators can.
    """
    if has_torch_function_variadic(input, weight, bias):
        tensors = (input, weight, bias)
        return handle_torch_function(convolve, tensors, *tensors, way, shape)
    input, weight, bias = cast(input, weight, bias)
    _check(input, weight, bias, way.options)
    if way.exchange is None and 0 not in shape and input.numel():
        return torch.convolution(input, weight, bias, *way.options)
    return Convolution.apply(input, weight, bias, way, shape)


class _Planned(NamedTuple):
    """How a convolution is computed: in which way, to which shape; or of an image that is padded first."""

    reached: HaloPlan
    way: Way
    shape: list[int]
    first: list[int] | None


def _convolution(
    count: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    x = check_image(input, f"torch.conv{count}d", count)
    local = x.local
    if local.dim() == count + 1:
        y = _convolution(count, x.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return y.squeeze(0)
    options = hashable(stride), hashable(padding), hashable(dilation), groups
    key = _convolution, count, options, local.shape, local.dtype, weight.shape, weight.dtype, weight.device
    planned = x.layout.known(key, lambda: _plan(count, x, weight, *options))
    if planned.first is not None:
        return _convolution(count, F.pad(x, planned.first), weight, bias, stride, 0, dilation, groups)
    reached, way, shape, _ = planned
    reached.ask(x)
    if reached.exchange is None:
        local = reached.crop(local)
    return wrap(convolve(local, weight, bias, way, shape), reached.output)


def _plan(
    count: int,
    x: SpatialTensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> _Planned:
    kernel, stride, dilation = weight.shape[2:], each(stride, count), each(dilation, count)
    if padding == "same":
        if set(stride) != {1}:
            raise RuntimeError(f"padding='same' is not supported for strided convolutions, but stride is {stride}")
        totals = [dilation[i] * (kernel[i] - 1) for i in range(count)]
        around = [(n // 2, n - n // 2) for n in totals]
    else:
        around = [(n, n) for n in each(0 if padding == "valid" else padding, count)]
    windows = [Window(kernel[i], stride[i], *around[i], dilation[i]) for i in range(count)]
    sliding, sides = slide(x, windows), None
    if any(itself and before != after for itself, (before, after) in zip(sliding.own, around, strict=True)):
        # An even kernel with padding "same" on an axis that is not cut: the operator cannot pad one side alone.
        sides = [side for pair in reversed(around) for side in pair]
    remaining = tuple(before if itself else 0 for itself, (before, _) in zip(sliding.own, around, strict=True))
    if kernel == (1,) * count and weight.is_cpu and x.local.numel() * weight.shape[0] >= WORTH_ONEDNN:
        # Dilation means nothing to a kernel of one pixel, except that PyTorch then takes it to oneDNN on a rank of one
        # thread too, and not to an older kernel, which takes twice the time, or, of little work, half of it.
        dilation = (2,) * count
    options = ConvolutionOptions(stride, remaining, dilation, False, (0,) * count, groups)
    local = sliding.reached.begin(x)
    way = choose(sliding.reached, x, local, weight, windows, options)
    return _Planned(sliding.reached, way, sliding.shape(local, weight.shape[0]), sides)


def _transposed_convolution(
    count: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    x = check_image(input, f"torch.conv_transpose{count}d", count)
    if x.local.dim() == count + 1:
        args = stride, padding, output_padding, groups, dilation
        return _transposed_convolution(count, x.unsqueeze(0), weight, bias, *args).squeeze(0)
    stride, padding, output_padding, dilation = (each(n, count) for n in (stride, padding, output_padding, dilation))
    windows = [
        TransposedWindow(*numbers)
        for numbers in zip(weight.shape[2:], stride, padding, output_padding, dilation, strict=True)
    ]
    reached, own, needed, made = sliding = slide(x, windows)
    kept = [both if itself else (0, 0) for itself, *both in zip(own, padding, output_padding, strict=True)]
    options = ConvolutionOptions(
        stride, tuple(before for before, _ in kept), dilation, True, tuple(after for _, after in kept), groups
    )
    local = reached.begin(x)
    # The output rows to which the needed rows contribute; they are cropped, or padded, to the requested ones.
    covered, crop = sliding.shape(local, weight.shape[1] * groups), []
    for i in reversed(range(count)):
        touched, wanted = made[i] if own[i] else windows[i].adds_to(needed[i]), made[i]
        covered[i - count] = touched.length
        crop += [touched.start - wanted.start, wanted.stop - touched.stop] if touched.length else [0, wanted.length]
    y = convolve(local, weight, None, Joined(reached.exchange, options), covered)
    if any(crop):
        y = F.pad(y, crop)
    if bias is not None:
        y = y + cast(bias)[0].view(-1, *(1,) * count)
    return wrap(y, reached.output)


def _along_tokens(function: Callable[..., Tensor], rule: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """The rule; tokens (N, heads, tokens, features) are cut as the rows and columns of an image first."""

    def opened(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, SpatialTensor) or not input.layout.flat:
            return rule(input, *args, **kwargs)
        image = input.dim() == count + 2 and len(input.layout.grid.space) == count
        return function(as_image(input) if image else gather_axes(input, ()), *args, **kwargs)

    return opened


for count in (1, 2, 3):
    for name, rule, out in (
        (f"conv{count}d", _convolution, 0),
        (f"conv_transpose{count}d", _transposed_convolution, 1),
    ):
        function = getattr(torch, name)
        rule = with_cut_channels(function, partial(rule, count), out)
        register(function, flat=out == 0)(_along_tokens(function, rule, count) if out == 0 else rule)
