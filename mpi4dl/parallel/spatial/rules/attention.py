"""Attention: each rank computes it for its own queries, with the keys and values of all ranks.

Where ranks share the tokens of a sequence or an image, they gather keys and values in the forward and again in the
backward pass, so each keeps only its own part between. Many tokens travel around a ring instead (`ring`). Where ranks
share the batch alone, nothing is sent. Attention with dropout, or with returned weights, computes the weights
explicitly.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import BACKWARD_TAG, FORWARD_TAG, once_differentiable
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import Split
from mpi4dl.parallel.spatial.alignment import part_of
from mpi4dl.parallel.spatial.grid import Factor, Flat, Layout
from mpi4dl.parallel.spatial.halo import gather_dim
from mpi4dl.parallel.spatial.rules.windows import cast
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part, refusal, register, wrap

# Attention over long sequences: keys and values go round the ranks, block by block, and nobody ever has all of them.
#
#     rank 0    q0 k0 v0 | k2 v2 | k1 v1        each rank keeps its queries, and asks the block that is there while the
#     rank 1    q1 k1 v1 | k0 v0 | k2 v2        next one travels; what blocks answer is merged by the logarithms of the
#     rank 2    q2 k2 v2 | k1 v1 | k0 v0        sums that their softmax divides by
#     backward  the same round again, on which each block gathers its gradient and brings it home
#
# Ring attention of Liu, Zaharia and Abbeel (ICLR 2024), with the merging of FlashAttention (Dao et al., NeurIPS 2022).
# As many heads go round at once as have a megabyte of keys, so that what is under way is small beside what is a rank's
# own.
#
# Where a query asks earlier tokens only, the last rank would have the most to do. So first each rank swaps the later
# half of its tokens with the rank that is as far from the other end ("striped" or "zigzag" attention; here by one
# swap):
#
#     tokens    0 1 | 2 3 | 4 5 | 6 7   -->   0 7 | 2 5 | 3 4 | 1 6     one rank's always lie between another's

aten = torch.ops.aten
CHUNK = 1024  # queries whose scores are there at once, where PyTorch has no kernel that does without scores
BLOCK_BYTES = 1 << 20  # of keys that travel at once, if a head has no more
ALL = slice(None)


class Ring(NamedTuple):
    """The ranks that share tokens: this one's place among them, how many each has, and how scores are scaled.

    `causal`: a query asks the tokens up to its own, of ranks that have tokens one after the other.
    """

    comm: Communicator
    place: int
    lengths: tuple[int, ...]
    scale: float
    causal: bool

    @property
    def mirror(self) -> int:
        return len(self.lengths) - 1 - self.place

    def halves(self, place: int) -> tuple[int, int]:
        return self.lengths[place] // 2, self.lengths[place] - self.lengths[place] // 2

    def swapped(self, tensors: Sequence[Tensor], tag: int) -> list[Tensor]:
        """Of tensors (..., tokens, features), the tokens of which this rank takes care, in their order."""
        if not self.causal or self.mirror == self.place:
            return list(tensors)
        kept, theirs = self.halves(self.place)[0], self.halves(self.mirror)[1]
        coming = self._swap([x[..., kept:, :] for x in tensors], theirs, tag)
        pairs = zip((x[..., :kept, :] for x in tensors), coming, strict=True)
        return [torch.cat([a, b] if self.place < self.mirror else [b, a], -2) for a, b in pairs]

    def swapped_back(self, tensors: Sequence[Tensor], tag: int) -> list[Tensor]:
        """The way back."""
        if not self.causal or self.mirror == self.place:
            return list(tensors)
        kept, leaving = self.halves(self.place)[0], self.halves(self.mirror)[1]
        lengths = [kept, leaving] if self.place < self.mirror else [leaving, kept]
        parts = [x.split(lengths, -2) for x in tensors]
        own = int(self.place > self.mirror)
        coming = self._swap([pair[1 - own] for pair in parts], self.halves(self.place)[1], tag)
        return [torch.cat([pair[own], b], -2) for pair, b in zip(parts, coming, strict=True)]

    def _swap(self, tensors: Sequence[Tensor], length: int, tag: int) -> list[Tensor]:
        coming = [x.new_empty(*x.shape[:-2], length, x.shape[-1]) for x in tensors]
        leaving = [Piece(self.mirror, x) for x in tensors]
        self.comm.iexchange(leaving, [Piece(self.mirror, x) for x in coming], tag, collective=True).wait()
        return coming

    def taken(self, place: int) -> int:
        """How many tokens the rank at this place takes care of."""
        if not self.causal:
            return self.lengths[place]
        return self.halves(place)[0] + self.halves(len(self.lengths) - 1 - place)[1]

    def diagonal(self, owner: int) -> bool:
        return self.causal and owner == self.place

    def asking(self, owner: int) -> tuple[slice, slice]:
        """Which of the queries here ask which keys of the block of `owner`."""
        if not self.causal or self.diagonal(owner):
            return ALL, ALL
        (begin, length), (their_begin, their_length) = self._earlier(self.place), self._earlier(owner)
        if their_begin < begin:  # ours lie between theirs
            return ALL, slice(their_length)
        return slice(length, None), ALL

    def _earlier(self, place: int) -> tuple[int, int]:
        """Of the two halves of which a rank takes care, the earlier one's number among all, and how long it is."""
        mirror = len(self.lengths) - 1 - place
        return (2 * place, self.halves(place)[0]) if place <= mirror else (2 * mirror + 1, self.halves(mirror)[1])

    def onward(self, blocks: Sequence[Tensor], owner: int, tag: int) -> tuple[list[Tensor], Any]:
        """Send these blocks of `owner` to the next rank, and return those of the one before, and the wait for them."""
        size = len(self.lengths)
        length = self.taken((owner - 1) % size)
        coming = [block.new_empty(*block.shape[:-2], length, block.shape[-1]) for block in blocks]
        leaving = [Piece((self.place + 1) % size, block) for block in blocks]
        arriving = [Piece((self.place - 1) % size, block) for block in coming]
        return coming, self.comm.iexchange(leaving, arriving, tag, collective=True)

    def round(self, blocks: Sequence[Tensor], tag: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """The owner of the present blocks, and those blocks, one after the other, while the next ones travel."""
        owner, size = self.place, len(self.lengths)
        for step in range(size):
            coming, pending = self.onward(blocks, owner, tag) if step + 1 < size else ([], None)
            yield owner, blocks
            if pending is not None:
                pending.wait()
            blocks, owner = coming, (owner - 1) % size

    def heads(self, k: Tensor) -> Iterator[slice]:
        """Which heads go round at once, of keys (batch and heads, tokens, features): alike on all ranks."""
        bytes_of_head = max(self.lengths) * k.shape[-1] * k.element_size()
        count = max(1, BLOCK_BYTES // max(1, bytes_of_head))
        return (slice(start, start + count) for start in range(0, max(1, k.shape[0]), count))


class RingAttention(torch.autograd.Function):
    """Of queries, keys and values (batch and heads, this rank's tokens, features)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        sums = []
        for heads in ring.heads(k):
            answers, sums_of_heads = _forward([x[heads] for x in (q, k, v)], ring)
            y[heads] = ring.swapped_back([answers], FORWARD_TAG)[0]
            sums.append(sums_of_heads)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, y, torch.cat(sums))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for heads in ctx.ring.heads(k):
            parts = _backward([x[heads] for x in (gradient, q, k, v, y)], sums[heads], ctx.ring)
            for whole, part in zip(found, ctx.ring.swapped_back(parts, BACKWARD_TAG), strict=True):
                whole[heads] = part
        return *found, None


def _forward(tensors: Sequence[Tensor], ring: Ring) -> tuple[Tensor, Tensor]:
    """The answers of some heads, and the logarithms of the sums, of the tokens of which this rank takes care."""
    q, k, v = ring.swapped([x.contiguous() for x in tensors], FORWARD_TAG)
    wide = torch.promote_types(q.dtype, torch.float32)
    merged = q.new_zeros(q.shape, dtype=wide)
    sums = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    for owner, (keys, values) in ring.round((k, v), FORWARD_TAG):
        ours, theirs = ring.asking(owner)
        if not q[:, ours].numel() or not keys[:, theirs].numel():
            continue
        answer, own_sums = _ask(q[:, ours], keys[:, theirs], values[:, theirs], ring.diagonal(owner), ring.scale)
        before, both = sums[:, ours], torch.logaddexp(sums[:, ours], own_sums)
        merged[:, ours].mul_((before - both).exp_().unsqueeze(-1))
        merged[:, ours].add_(answer * (own_sums - both).exp_().unsqueeze(-1))
        before.copy_(both)
    return merged.to(q.dtype), sums


def _backward(tensors: Sequence[Tensor], sums: Tensor, ring: Ring) -> list[Tensor]:
    """The gradients of the queries, keys and values of some heads, of those same tokens."""
    gradient, q, k, v, y = ring.swapped([x.contiguous() for x in tensors], BACKWARD_TAG)
    of_q, *of_block = (torch.zeros_like(x, dtype=sums.dtype) for x in (q, k, v))
    arriving: Any = None
    for owner, (keys, values) in ring.round((k, v), BACKWARD_TAG):
        ours, theirs = ring.asking(owner)
        parts: Sequence[Tensor] = ()
        if q[:, ours].numel() and keys[:, theirs].numel():
            own = [x[:, ours] for x in (gradient, q, y, sums)]
            parts = _ask_back(own, keys[:, theirs], values[:, theirs], ring.diagonal(owner), ring.scale)
        if arriving is not None:
            arriving.wait()
        if parts:
            of_q[:, ours] += parts[0]
            of_block[0][:, theirs] += parts[1]
            of_block[1][:, theirs] += parts[2]
        of_block, arriving = ring.onward(of_block, owner, BACKWARD_TAG)
    arriving.wait()
    return [x.to(q.dtype) for x in (of_q, *of_block)]


def _has_kernel(q: Tensor) -> bool:
    """Whether PyTorch has a kernel for blocks that tells its sums, and is known to us."""
    return q.is_cpu


def _ask(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The attention to one block, and the logarithm of the sum of each query's exponentials."""
    if _has_kernel(q):
        alone = [x.contiguous().unsqueeze(0) for x in (q, k, v)]  # as the kernels take for granted
        y, sums = aten._scaled_dot_product_flash_attention_for_cpu(*alone, 0.0, causal, attn_mask=None, scale=scale)
        return y[0], sums[0]
    answers, all_sums = [], []
    for start in range(0, q.shape[-2], CHUNK):
        scores = _scores(q, k, start, causal, scale)
        sums = scores.logsumexp(-1)
        answers.append((scores - sums.unsqueeze(-1)).exp() @ v.to(scores.dtype))
        all_sums.append(sums)
    return torch.cat(answers, -2), torch.cat(all_sums, -1)


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, scale: float) -> Tensor:
    """Of the queries of one chunk, not in 16 bits."""
    wide = torch.promote_types(q.dtype, torch.float32)
    asking = q[..., start : start + CHUNK, :].to(wide)
    scores = asking @ k.to(wide).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _ask_back(own: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values that pass through one block.

    `own`: of these queries the gradient of the answer, themselves, their answer and the sums, both of all blocks.
    """
    gradient, q, y, sums = own
    if _has_kernel(q):
        alone = [x.contiguous().unsqueeze(0) for x in (gradient, q, k, v, y, sums)]
        of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *alone, 0.0, causal, attn_mask=None, scale=scale
        )
        return of_q[0], of_k[0], of_v[0]
    wide, chunks = sums.dtype, []
    keys, values = k.to(wide), v.to(wide)
    of_k, of_v = torch.zeros_like(keys), torch.zeros_like(values)
    for start in range(0, q.shape[-2], CHUNK):
        rows = slice(start, start + CHUNK)
        asking, share, answer = (x[..., rows, :].to(wide) for x in (q, gradient, y))
        weights = (_scores(q, k, start, causal, scale) - sums[..., rows].unsqueeze(-1)).exp()
        of_scores = weights * (share @ values.mT - (share * answer).sum(-1, keepdim=True)) * scale
        chunks.append(of_scores @ keys)
        of_k += of_scores.mT @ asking
        of_v += weights.mT @ share
    return torch.cat(chunks, -2), of_k, of_v


# So many tokens are not gathered, unless `Grid.attention` says so.
MANY_TOKENS = 4096
FEATURES = "features are spread over ranks"
TOKENS = -2  # their dim, in front of that of features
OF_HEADS = inspect.signature(F.multi_head_attention_forward)


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
        heads = [x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in local]
        return query.like(RingAttention.apply(*heads, around).reshape(local[0].shape))
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    spread = isinstance(query, SpatialTensor) and query.layout.cut(query.dim() - 2)
    if is_causal and (spread or dropout_p):
        attn_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
        is_causal = False
    if dropout_p:
        return _dropping(query, key, value, attn_mask, dropout_p, **options)
    lead = next((x for x in (query, key, value) if isinstance(x, SpatialTensor)), attn_mask)
    assert isinstance(lead, SpatialTensor)
    asking = _layout_of_queries(name, query, lead)
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
        outputs = checkpoint(attend, own, *parts, use_reentrant=False, preserve_rng_state=False)
    else:
        outputs = attend(own, *parts)
    return wrap(outputs, asking)


def _ring(query: Tensor, key: Tensor, value: Tensor, causal: bool, options: dict[str, Any]) -> Ring | None:
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


@register(F.multi_head_attention_forward, flat=True)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Dims: tokens, batch, features; or tokens and features of one image."""
    name = "torch.nn.functional.multi_head_attention_forward"
    given = OF_HEADS.bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    inputs = {name: options[name] for name in ("query", "key", "value")}
    query, num_heads, need_weights = options["query"], options["num_heads"], options["need_weights"]
    attn_mask, padding = options["attn_mask"], options["key_padding_mask"]
    dropout_p = options["dropout_p"] if options["training"] else 0.0
    apart = _shares_batch_alone(list(inputs.values()), 1 if query.dim() == 3 else None)
    if apart and not dropout_p and not _differs(attn_mask, padding):
        local = {name: x.local for name, x in inputs.items()}
        y, weights = F.multi_head_attention_forward(**options | local | {"dropout_p": 0.0})
        first = query.layout.moved(lambda dim: 0)
        return wrap(y, query.layout), None if weights is None else wrap(weights, first)
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
    alike = len(layouts) == 3 and all(layout == layouts[0] for layout in layouts)
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
