"""Attention over long sequences: keys and values go round the ranks, block by block, and nobody ever has all of them.

    rank 0    q0 k0 v0 | k2 v2 | k1 v1        each rank keeps its queries, and asks the block that is there while the
    rank 1    q1 k1 v1 | k0 v0 | k2 v2        next one travels; what blocks answer is merged by the logarithms of the
    rank 2    q2 k2 v2 | k1 v1 | k0 v0        sums that their softmax divides by
    backward  the same round again, on which each block gathers its gradient and brings it home

Ring attention of Liu, Zaharia and Abbeel (ICLR 2024), with the merging of FlashAttention (Dao et al., NeurIPS 2022). A
rank's memory grows with its own tokens and one block of another rank's.
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


class Ring(NamedTuple):
    """The ranks that share tokens, in their order, how many each has, and how scores are scaled.

    `causal`: a query asks the tokens up to its own, of ranks that have tokens one after the other.
    """

    comm: Communicator
    lengths: tuple[int, ...]
    scale: float
    causal: bool

    def asks(self, owner: int) -> bool:
        """Whether this rank's queries ask the block of `owner` at all."""
        nothing = self.lengths[owner] == 0 or self.lengths[self.comm.rank] == 0
        return not nothing and (not self.causal or owner <= self.comm.rank)

    def diagonal(self, owner: int) -> bool:
        return self.causal and owner == self.comm.rank

    def onward(self, blocks: Sequence[Tensor], owner: int, tag: int) -> tuple[list[Tensor], Any]:
        """Send these blocks of `owner` to the next rank; what comes from the one before, once it is waited for."""
        rank, size = self.comm.rank, self.comm.size
        length = self.lengths[(owner - 1) % size]
        coming = [block.new_empty(*block.shape[:-2], length, block.shape[-1]) for block in blocks]
        leaving = [Piece((rank + 1) % size, block) for block in blocks]
        arriving = [Piece((rank - 1) % size, block) for block in coming]
        return coming, self.comm.iexchange(leaving, arriving, tag, collective=True)

    def round(self, blocks: Sequence[Tensor], tag: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Whose blocks are here, and those blocks, one after the other, while the next ones travel."""
        owner, size = self.comm.rank, self.comm.size
        for step in range(size):
            coming, pending = self.onward(blocks, owner, tag) if step + 1 < size else ([], None)
            yield owner, blocks
            if pending is not None:
                pending.wait()
            blocks, owner = coming, (owner - 1) % size


class RingAttention(torch.autograd.Function):
    """Of queries, keys and values (batch, heads, this rank's tokens, features)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # as the kernels take for granted
        wide = torch.promote_types(q.dtype, torch.float32)
        merged = q.new_zeros(q.shape, dtype=wide)
        sums = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
        for owner, (keys, values) in ring.round((k, v), FORWARD_TAG):
            if ring.asks(owner):
                answer, own_sums = _ask(q, keys, values, ring.diagonal(owner), ring.scale)
                both = torch.logaddexp(sums, own_sums)
                merged = merged * (sums - both).exp().unsqueeze(-1) + answer * (own_sums - both).exp().unsqueeze(-1)
                sums = both
        y = merged.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, y, sums)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide, gradient = sums.dtype, gradient.contiguous()
        of_q = torch.zeros_like(q, dtype=wide)
        of_block: list[Tensor] = [
            torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v)
        ]
        for owner, (keys, values) in ring.round((k, v), BACKWARD_TAG):
            if ring.asks(owner):
                parts = _ask_back(gradient, q, keys, values, y, sums, ring.diagonal(owner), ring.scale)
                for total, part in zip((of_q, *of_block), parts, strict=True):
                    total.add_(part)
            of_block, pending = ring.onward(of_block, owner, BACKWARD_TAG)
            pending.wait()
        return of_q.to(q.dtype), of_block[0].to(k.dtype), of_block[1].to(v.dtype), None


def _has_kernel(q: Tensor) -> bool:
    """Whether PyTorch has a kernel for blocks that tells its sums, and is known to us."""
    return q.is_cpu


def _ask(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What one block answers, and the logarithm of the sum of each query's exponentials."""
    if _has_kernel(q):
        y, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
        return y, sums
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


def _ask_back(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values that pass through one block; y and `sums` are of all blocks."""
    if _has_kernel(q):
        found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, y, sums, 0.0, causal, attn_mask=None, scale=scale
        )
        return found
    wide = sums.dtype
    keys, values, of_q = k.to(wide), v.to(wide), []
    of_k, of_v = torch.zeros_like(keys), torch.zeros_like(values)
    for start in range(0, q.shape[-2], CHUNK):
        rows = slice(start, start + CHUNK)
        asking, share, answer = (x[..., rows, :].to(wide) for x in (q, gradient, y))
        weights = (_scores(q, k, start, causal, scale) - sums[..., rows].unsqueeze(-1)).exp()
        of_scores = weights * (share @ values.mT - (share * answer).sum(-1, keepdim=True)) * scale
        of_q.append(of_scores @ keys)
        of_k += of_scores.mT @ asking
        of_v += weights.mT @ share
    return torch.cat(of_q, -2), of_k, of_v
