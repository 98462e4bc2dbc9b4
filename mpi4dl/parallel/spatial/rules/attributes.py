"""What a tensor says of itself: shapes are those of the whole, autograd's state is that of the local part."""

from typing import Any

import torch
from torch import Tensor

from mpi4dl.parallel.spatial.tensor import SpatialTensor, register

OF_THE_WHOLE = [
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.ndimension,
    Tensor.__len__,
    Tensor.__hash__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_tensor,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape ndim dtype device itemsize nbytes "
            "is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_mps is_xpu is_nested"
        ).split()
    ),
]
OF_THE_PART = [
    Tensor.is_contiguous,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_tensor,
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version")),
]


def _of_the_whole(function: Any) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return rule


def _of_the_part(function: Any) -> Any:
    return lambda x, *args, **kwargs: function(x.local, *args, **kwargs)


for function in OF_THE_WHOLE:
    register(function, flat=True)(_of_the_whole(function))
for function in OF_THE_PART:
    register(function, flat=True)(_of_the_part(function))


@register(Tensor.__format__, flat=True)
def format_(x: SpatialTensor, specification: str) -> str:
    return repr(x)


@register(Tensor.requires_grad_, flat=True)
def requires_grad_(x: SpatialTensor, requires_grad: bool = True) -> SpatialTensor:
    x.local.requires_grad_(requires_grad)
    return x


@register(Tensor.data.__get__, flat=True)  # type: ignore[attr-defined]
def data(x: SpatialTensor) -> SpatialTensor:
    return x.like(x.local.data)
