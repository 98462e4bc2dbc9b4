"""Attention on the meta device as devices compute it: fused, so that nothing of the size of its weights is kept."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpi4dl.parallel.spatial.tensor import SpatialTensor

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class FusedAttention(TorchFunctionMode):
    """Within it, attention of meta tensors is the kernel that PyTorch chooses on CPUs wherever it can.

    On the meta device PyTorch computes it by products, and keeps the weights of all pairs of tokens for backward. Where
    tokens are spread it stays so: there the rule computes attention again in backward, and keeps its inputs alone.
    """

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in ATTENTION:
            return function(*args, **kwargs)
        spread = [x for x in args if isinstance(x, SpatialTensor)]
        if any(x.layout.cut(x.dim() - 2) for x in spread):
            return function(*args, **kwargs)
        if spread:
            with self:  # for what the rule calls
                return SpatialTensor.__torch_function__(function, tuple(types), args, kwargs)
        if function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == value.shape[-1]
    trained = attn_mask is not None and attn_mask.requires_grad
    if not alike or not query.is_meta or dropout_p or trained or 0 in (*query.shape, *key.shape):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]
    return attended
