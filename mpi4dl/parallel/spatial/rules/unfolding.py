"""Windows laid out side by side: along one dim as a view of neighbours, or all windows of an image as columns."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import BATCH, Window
from mpi4dl.parallel.spatial.halo import reach
from mpi4dl.parallel.spatial.rules.windows import check_image, each
from mpi4dl.parallel.spatial.tensor import SpatialTensor, copied, place_of, refusal, register, wrap

Size = int | Sequence[int]


@register(Tensor.unfold)
def unfold_dim(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one dim, as a new last dim."""
    x = input
    assert isinstance(x, SpatialTensor)
    dim = place_of(dimension, x.dim())
    axis = x.layout.axis(dim)
    if axis is None:
        return wrap(x.local.unfold(dim, size, step), x.layout)
    if axis == BATCH:
        raise refusal("Tensor.unfold", "a batch that is cut cannot be unfolded")
    reached = reach(x, {axis: Window(size, step)})
    local = reached.fetch(x.local)
    if reached.output.held[axis].empty:
        shape = [*local.shape, size]
        shape[dim] = 0
        windows = local.sum() * local.new_zeros(shape)
    else:
        windows = local.unfold(dim, size, step)
    if reached.exchange is not None:
        return copied(SpatialTensor(windows, reached.output), x)
    if x.layout.wide:  # of the windows over a pixel of a halo, this rank may not have all
        return copied(SpatialTensor(windows.clone(), reached.output), x)
    return SpatialTensor(windows, reached.output)


@register(F.unfold)
def unfold(input: Tensor, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> Tensor:
    """All windows as columns, (N, C * kernel, L). L is a flat dim: windows stay with their pixels."""
    x = check_image(input, "torch.nn.functional.unfold")
    if x.dim() == 3:
        return unfold(x.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    (kh, kw), (ph, pw), (sh, sw), (dh, dw) = (each(n, 2) for n in (kernel_size, padding, stride, dilation))
    windows = F.pad(x, (pw, pw, ph, ph)).unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
    windows = windows[..., ::dh, ::dw]  # (N, C, H', W', kh, kw)
    n, c, h, w = windows.shape[:4]
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(n, c * kh * kw, h * w)
