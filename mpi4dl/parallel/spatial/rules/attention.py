"""Attention over tokens that every rank has whole: ranks may share the batch, not the tokens of one image."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap

TOKENS_ARE_SPREAD = "the tokens, which attend to each other, are spread over ranks"
MASKED = "a mask that differs from image to image would have to be spread over ranks too"
RANDOM = "it drops out by a mask for the whole batch: choose a dropout of 0 within attention"


def _cut_alike(function: str, dims: set[int], *values: Tensor) -> Layout:
    """The layout of tensors that are cut in no other dims than these, and all in the same way."""
    layouts = [value.layout for value in values if isinstance(value, SpatialTensor)]
    if len(layouts) < len(values) or any(layout != layouts[0] for layout in layouts):
        raise refusal(function, "query, key and value are not spread over ranks alike")
    if any(layouts[0].cut(dim) for dim in range(values[0].dim()) if dim not in dims):
        raise refusal(function, TOKENS_ARE_SPREAD)
    return layouts[0]


def _differs(mask: Tensor | None) -> bool:
    return mask is not None and (isinstance(mask, SpatialTensor) or mask.dim() > 2)


def _part(value: Tensor) -> Tensor:
    assert isinstance(value, SpatialTensor)
    return value.local


@register(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Dims: batch and heads, any number of them, then tokens and features."""
    name = "torch.nn.functional.scaled_dot_product_attention"
    layout = _cut_alike(name, set(range(query.dim() - 2)), query, key, value)
    if _differs(attn_mask):
        raise refusal(name, MASKED)
    if dropout_p:
        raise refusal(name, RANDOM)
    outputs = F.scaled_dot_product_attention(
        _part(query), _part(key), _part(value), attn_mask, 0.0, is_causal, **options
    )
    return wrap(outputs, layout)


@register(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Dims: tokens, batch, features; or tokens and features of one image."""
    name = "torch.nn.functional.multi_head_attention_forward"
    layout = _cut_alike(name, {1} if query.dim() == 3 else set(), query, key, value)
    if key_padding_mask is not None or _differs(attn_mask):
        raise refusal(name, MASKED)
    if dropout_p and training:
        raise refusal(name, RANDOM)
    outputs, weights = F.multi_head_attention_forward(
        _part(query),
        _part(key),
        _part(value),
        embed_dim_to_check,
        num_heads,
        in_proj_weight,
        in_proj_bias,
        bias_k,
        bias_v,
        add_zero_attn,
        0.0,
        out_proj_weight,
        out_proj_bias,
        training,
        None,
        need_weights,
        attn_mask,
        **options,
    )
    if weights is None:
        return wrap(outputs, layout), None
    batch = layout.dims[0]
    return wrap(outputs, layout), wrap(weights, layout.with_dims((None if batch is None else 0, None, None)))
