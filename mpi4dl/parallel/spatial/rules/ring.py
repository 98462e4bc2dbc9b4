"""Attention over long sequences: keys and values go round the ranks, block by block, and nobody ever has all of them.

    rank 0    q0 k0 v0 | k2 v2 | k1 v1        each rank keeps its queries, and asks the block that is there while the
    rank 1    q1 k1 v1 | k0 v0 | k2 v2        next one travels; what blocks answer is merged by the logarithms of the
    rank 2    q2 k2 v2 | k1 v1 | k0 v0        sums that their softmax divides by
    backward  the same round again, on which each block gathers its gradient and brings it home

Ring attention of Liu, Zaharia and Abbeel (ICLR 2024), with the merging of FlashAttention (Dao et al., NeurIPS 2022). As
many heads go round at once as have a megabyte of keys, so that what is under way is small beside what is a rank's own.

Where a query asks earlier tokens only, the last rank would have the most to do. So first each rank swaps the later half
of its tokens with the rank that is as far from the other end ("striped" or "zigzag" attention; here by one swap):

    tokens    0 1 | 2 3 | 4 5 | 6 7   -->   0 7 | 2 5 | 3 4 | 1 6     one rank's always lie between another's
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import BACKWARD_TAG, FORWARD_TAG
from mpi4dl.comm.packing import Piece

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
        """Send these blocks of `owner` to the next rank; what comes from the one before, once it is waited for."""
        size = len(self.lengths)
        length = self.taken((owner - 1) % size)
        coming = [block.new_empty(*block.shape[:-2], length, block.shape[-1]) for block in blocks]
        leaving = [Piece((self.place + 1) % size, block) for block in blocks]
        arriving = [Piece((self.place - 1) % size, block) for block in coming]
        return coming, self.comm.iexchange(leaving, arriving, tag, collective=True)

    def round(self, blocks: Sequence[Tensor], tag: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Whose blocks are here, and those blocks, one after the other, while the next ones travel."""
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
    @torch.autograd.function.once_differentiable
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
    """What one block answers, and the logarithm of the sum of each query's exponentials."""
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
