"""Attention: each rank computes it for its own queries, with the keys and values of all ranks.

Where ranks share the tokens of a sequence or an image, they gather keys and values in the forward and again in the
backward pass, so each keeps only its own part between. Many tokens go around a ring instead (`ring_attention`). Where
ranks share the batch alone, nothing is sent. Attention with dropout, or with returned weights, computes the weights
explicitly.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.geometry import Split
from mpi4dl.parallel.spatial.alignment import part_of
from mpi4dl.parallel.spatial.grid import Factor, Flat, Layout
from mpi4dl.parallel.spatial.halo import gather_axes, gather_dim
from mpi4dl.parallel.spatial.rules.windows import cast
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part, refusal, register, wrap

if TYPE_CHECKING:  # loaded where tokens go around
    from mpi4dl.parallel.spatial.rules.ring_attention import Ring

# So many tokens are not gathered, unless `Grid.attention` says so.
MANY_TOKENS = 4096
FEATURES = "features are spread over ranks"
TOKENS = -2  # their dim, in front of that of features
OF_HEADS = {name: of.default for name, of in inspect.signature(F.multi_head_attention_forward).parameters.items()}


@register(F.scaled_dot_product_attention, flat=True)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Dims: batch and heads, any number of them, then tokens and features. The output is spread as the query is."""
    name = "torch.nn.functional.scaled_dot_product_attention"
    if is_causal and attn_mask is not None:
        raise RuntimeError(f"{name}: a mask is given, and is_causal as well")
    if any(isinstance(x, SpatialTensor) and x.layout.cut(x.dim() - 1) for x in (query, key, value)):
        raise refusal(name, FEATURES)
    attn_mask = None if attn_mask is None else gather_dim(attn_mask, -1)
    around = None if attn_mask is not None or dropout_p else _ring(query, key, value, is_causal, options)
    if around is not None and isinstance(query, SpatialTensor):
        local = cast(*(x.local for x in (query, key, value) if isinstance(x, SpatialTensor)))
        q, k, v = (x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in local)
        return query.like(around.attend(q, k, v).reshape(local[0].shape))
    spread = isinstance(query, SpatialTensor) and query.layout.cut(query.dim() - 2)
    if is_causal and (spread or dropout_p):
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        is_causal = False
    if dropout_p:
        return _dropping(query, key, value, attn_mask, dropout_p, **options)
    lead = next((x for x in (query, key, value) if isinstance(x, SpatialTensor)), attn_mask)
    if not isinstance(lead, SpatialTensor):  # a mask alone was spread, along its keys
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    asking = _layout_of_queries(name, query, lead)
    key, value = (_cut_as(asking, x) for x in (key, value))
    beside = asking.moved(lambda dim: None if dim == query.dim() - 2 else dim)
    if options.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        fewer = _of_fewer_heads(beside, query.dim() - 3, query.shape[-3] // key.shape[-3])
        if fewer is None:
            key, value = (_repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
        else:
            beside = fewer
    mask = None if attn_mask is None else part_of(attn_mask, asking, query.dim(), name)
    parts = [local_part(x) for x in (key, value)]

    def attend(own: Tensor, *others: Tensor) -> Tensor:
        alike = (
            x.like(part) if isinstance(x, SpatialTensor) else part for x, part in zip((key, value), others, strict=True)
        )
        keys, values = (part_of(gather_dim(x, TOKENS), beside, query.dim(), name) for x in alike)
        if 0 in own.shape:
            if options.get("enable_gqa"):
                keys, values = (x.repeat_interleave(own.shape[-3] // x.shape[-3], -3) for x in (keys, values))
            scores = own @ keys.mT  # so that backward sends this rank's share, nothing, to the others
            return (scores if mask is None or mask.dtype == torch.bool else scores + mask) @ values
        return F.scaled_dot_product_attention(own, keys, values, mask, 0.0, is_causal, **options)

    own = part_of(query, asking, query.dim(), name)
    gathered = any(isinstance(x, SpatialTensor) and x.layout.cut(x.dim() - 2) for x in (key, value))
    if gathered and torch.is_grad_enabled():
        return wrap(checkpoint(attend, own, *parts, use_reentrant=False, preserve_rng_state=False), asking)
    return wrap(attend(own, *parts), asking)


def _ring(query: Tensor, key: Tensor, value: Tensor, causal: bool, options: dict[str, Any]) -> "Ring | None":
    """The ranks round which keys and values go, where that is possible and asked for, or there are many tokens."""
    if not isinstance(query, SpatialTensor):
        return None
    layout, tokens = query.layout, query.dim() - 2
    others = [
        x
        for x in (key, value)
        if isinstance(x, SpatialTensor) and (x.layout, x.shape, x.dtype) == (layout, query.shape, query.dtype)
    ]
    flat, way = layout.flat_at(tokens), layout.grid.attention
    many = query.shape[-2] >= MANY_TOKENS if way == "auto" else way == "ring"
    if len(others) < 2 or not many or not layout.cut(tokens) or layout.wide or options.get("enable_gqa"):
        return None
    if flat is not None and (flat.copies or causal):
        return None
    axes = tuple(axis for axis in layout.axes_at([tokens]) if layout.grid.shape[axis] > 1)
    ranks = layout.grid.ranks_along(axes)
    boxes = [layout.tiling.owned(rank) for rank in ranks]
    factors = flat.factors if flat is not None else (Factor(layout.axis(tokens)),)
    lengths = tuple(math.prod(Flat(tokens, factors).sizes(box)) for box in boxes)
    from mpi4dl.parallel.spatial.rules.ring_attention import Ring

    return Ring(layout.grid.along(axes), ranks.index(layout.grid.rank), lengths, _scale(query, **options), causal)


def _of_fewer_heads(layout: Layout, heads: int, groups: int) -> Layout | None:
    """The layout where each of the heads, which are dim `heads`, belongs to a group of those that are cut here.

    None if they are cut within such a group.
    """
    tiling = layout.tiling
    for axis, dim in enumerate(layout.dims):
        if dim == heads:
            cuts = tiling.splits[axis].cuts
            if any(cut % groups for cut in cuts):
                return None
            tiling = tiling.replace(axis, Split.at([cut // groups for cut in cuts]))
    return replace(layout, tiling=tiling)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Keys or values (..., heads, tokens, features), each head so many times."""
    return x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:]).flatten(-4, -3)


def _scale(query: Tensor, scale: float | None = None, **options: Any) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _dropping(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, **options: Any) -> Tensor:
    """Attention with weights of which some are dropped, as `dropout` drops what is spread."""
    if options.get("enable_gqa"):
        key, value = (_repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    nobody = None
    if mask is not None:
        mask = _added(~mask if mask.dtype == torch.bool else mask, query)
        nobody = (mask == float("-inf")).all(-1, keepdim=True)
        mask = mask.masked_fill(nobody, 0.0)
    weights = _weights(query * _scale(query, **options), key, mask)
    weights = weights if nobody is None else weights.masked_fill(nobody, 0.0)  # as PyTorch has it
    return F.dropout(weights, p) @ gather_dim(value, TOKENS)


def _weights(asking: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Those of all keys, for queries that were scaled; `mask` is added to scores."""
    scores = asking @ gather_dim(key, TOKENS).mT
    return (scores if mask is None else scores + mask).softmax(-1)


def _added(flags: Tensor, like: Tensor) -> Tensor:
    """The term that a mask adds to scores: for flags, minus infinity where they are true."""
    if flags.dtype != torch.bool:
        return flags
    return torch.zeros_like(flags, dtype=like.dtype).masked_fill(flags, float("-inf"))


def _layout_of_queries(name: str, query: Tensor, lead: SpatialTensor) -> Layout:
    """How the output is spread: as the query; over the batch as keys are, where the query is whole."""
    if isinstance(query, SpatialTensor):
        return query.layout.narrow
    tokens = lead.dim() - 2
    if lead.dim() != query.dim():
        raise refusal(name, "a query that every rank has differs in its number of dims from what is spread")
    return lead.layout.narrow.moved(lambda dim: None if dim == tokens else dim)


def _cut_as(asking: Layout, x: Tensor) -> Tensor:
    """Keys or values with all along each axis that cuts other dims of queries, or none; tokens are gathered later."""
    dims = x.layout.dims if isinstance(x, SpatialTensor) else ()
    tokens = x.dim() + TOKENS
    elsewhere = [axis for axis, dim in enumerate(dims) if dim not in (None, tokens, asking.dims[axis])]
    return gather_axes(x, elsewhere) if elsewhere else x


@register(F.multi_head_attention_forward, flat=True)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Dims: tokens, batch, features; or tokens and features of one image."""
    name = "torch.nn.functional.multi_head_attention_forward"
    options = OF_HEADS | dict(zip(OF_HEADS, args, strict=False)) | kwargs
    inputs = {name: options[name] for name in ("query", "key", "value")}
    query, num_heads, need_weights = options["query"], options["num_heads"], options["need_weights"]
    attn_mask, padding = options["attn_mask"], options["key_padding_mask"]
    dropout_p = options["dropout_p"] if options["training"] else 0.0
    apart = _shares_batch_alone(list(inputs.values()), 1 if query.dim() == 3 else None)
    if apart and not dropout_p and not _differs(attn_mask, padding):
        local = {name: x.local for name, x in inputs.items()}
        y, weights = F.multi_head_attention_forward(**options | local | {"dropout_p": 0.0})
        return wrap(y, query.layout), None if weights is None else wrap(weights, query.layout.moved(lambda dim: 0))
    added = (options[name] for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if options["add_zero_attn"] or any(x is not None for x in added):
        raise refusal(name, "keys or values are added to those of the tokens")
    if query.dim() == 2:
        batched = {name: x.unsqueeze(1) for name, x in inputs.items()}
        batched["key_padding_mask"] = None if padding is None else padding.unsqueeze(0)
        y, weights = multi_head_attention_forward(**options | batched)
        return y.squeeze(1), None if weights is None else weights.squeeze(0)
    if options["use_separate_proj_weight"]:
        kernels = [options[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        kernels = list(options["in_proj_weight"].chunk(3))
    shifts = [None] * 3 if options["in_proj_bias"] is None else list(options["in_proj_bias"].chunk(3))
    q, k, v = (
        F.linear(x, kernel, shift).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, kernel, shift in zip(inputs.values(), kernels, shifts, strict=True)
    )
    mask = _merged_mask(attn_mask, padding, num_heads, q)
    if need_weights:
        weights = F.dropout(_weights(q * _scale(q), k, mask), dropout_p)
        y = weights @ gather_dim(v, TOKENS)
    else:
        weights = None
        causal = options["is_causal"] and padding is None
        y = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout_p, causal)
    y = F.linear(y.permute(2, 0, 1, 3).flatten(2), options["out_proj_weight"], options["out_proj_bias"])
    return y, weights if weights is None or not options["average_attn_weights"] else weights.mean(1)


def _shares_batch_alone(inputs: Sequence[Tensor], batch: int | None) -> bool:
    """Whether ranks have images of their own, whole, all three alike."""
    layouts = [x.layout for x in inputs if isinstance(x, SpatialTensor)]
    alike = len(layouts) == 3 and layouts[0] == layouts[1] == layouts[2]
    return alike and all(dim in (None, batch) for dim in layouts[0].dims) and not layouts[0].flat


def _differs(mask: Tensor | None, padding: Tensor | None) -> bool:
    """Whether a mask is one of each image."""
    return padding is not None or (mask is not None and (isinstance(mask, SpatialTensor) or mask.dim() > 2))


def _merged_mask(mask: Tensor | None, padding: Tensor | None, num_heads: int, q: Tensor) -> Tensor | None:
    """The term added to scores (batch, heads, queries, keys), of a mask (queries, keys), or one for each head of each
    image, and of the keys (batch, keys) that are only padding.
    """
    found = None if mask is None else _added(mask, q)
    if found is not None and found.dim() == 3:
        found = found.unflatten(0, (-1, num_heads))
    if padding is None:
        return found
    without = _added(gather_dim(padding, -1), q).unsqueeze(1).unsqueeze(1)
    return without if found is None else found + without
