"""How a convolution takes its halo: joined to the tile, in a copy of both, or apart from it.

    joined   [ strip | tile | strip ]  -> convolution      any convolution; the copy lives only while it runs

    apart    [  0    | tile |   0   ]  -> convolution      PyTorch pads itself; meanwhile the strips travel
             [ strip |  0  ]           -> convolution   +  a convolution is linear in its input, so what each strip
                       [  0  | strip ] -> convolution   +  makes of a tile of zeros is added at the border

Apart, the gradients of the strips are computed first, and travel while that of the tile is. It saves a copy of the
tile in forward and two in backward, and costs a small convolution for each strip, which reads the weights again.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Cut, Dims, Exchange, ExchangePlan, Like, at
from mpi4dl.geometry import Box, Window
from mpi4dl.parallel.spatial.halo import Reach
from mpi4dl.parallel.spatial.rules.windows import axes_of
from mpi4dl.parallel.spatial.tensor import SpatialTensor

# What the convolution of a strip costs, in bytes of the tile that could be copied meanwhile, measured on CPUs: whatever
# its size; for each byte of the weights; and one for each byte of the strip and pixel of the kernel.
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


class Way(Protocol):
    """How a rank's part of a convolution is computed. `x` is what this rank holds, strips are what came for it."""

    @property
    def exchange(self) -> Exchange | None: ...

    @property
    def options(self) -> ConvolutionOptions: ...

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, of this shape, and the strips."""

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """What waits for the gradient of x, whose strips travel from here on."""

    def of_parameters(
        self, gradient: Tensor, x: Tensor, strips: list[Tensor], weight: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias, those of them that the mask asks for."""


class Joined(NamedTuple):
    """The convolution of a new tensor, the tile with its halo. Without an exchange, of the tile as it is."""

    exchange: Exchange | None
    options: ConvolutionOptions

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        strips: list[Tensor] = []
        if self.exchange is not None:
            incoming = self.exchange.start(x)
            strips, x = incoming.strips, self.exchange.assemble(x, incoming)
        if 0 in shape or not x.numel():
            y = x.new_zeros(shape)
            return y if bias is None else y + bias.view(-1, *(1,) * (y.dim() - 2)), strips
        return torch.convolution(x, weight, bias, *self.options), strips

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
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
        padded = x if self.exchange is None else self.exchange.assemble(x, self.exchange.again(strips))
        return gradients(gradient, padded, weight, self.options, mask)[1:]


class Border(NamedTuple):
    """What a strip does to the output: where, by which part of the kernel, and with how much around it."""

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


def choose(
    reached: Reach,
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
        bias_gradient = gradient.sum(dim=[dim for dim in range(gradient.dim()) if dim != 1])
        return x.new_zeros(x.shape), weight.new_zeros(weight.shape), bias_gradient
    bias_sizes = [gradient.shape[1]] if mask[2] else None
    return torch.ops.aten.convolution_backward(gradient, x, weight, bias_sizes, *options, mask)
