"""Ring attention: keys and values go round the ranks that share a sequence; no rank holds all of them.

    rank 0    q0 k0 v0 | k2 v2 | k1 v1        Each rank keeps its queries and attends to the block that is there while
    rank 1    q1 k1 v1 | k0 v0 | k2 v2        the next one travels. The outputs for the blocks are merged by their
    rank 2    q2 k2 v2 | k1 v1 | k0 v0        logsumexp, the logarithm of the sum that their softmax divides by.
    backward  the same round again: each block gathers its gradient on the way and brings it home

Ring attention of Liu, Zaharia and Abbeel (ICLR 2024), with the merging of FlashAttention (Dao et al., NeurIPS 2022).
Some heads go round at a time, so that what travels is small beside what a rank holds.

Under a causal mask the last rank would have the most to do. So each rank first swaps the later half of its tokens with
the rank that is as far from the other end ("striped" or "zigzag" attention; here by one swap):

    tokens    0 1 | 2 3 | 4 5 | 6 7   -->   0 7 | 2 5 | 3 4 | 1 6     one rank's always lie between another's
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import BACKWARD_TAG, FORWARD_TAG, LocalFunction, once_differentiable
from mpi4dl.comm.packing import Piece

aten = torch.ops.aten
CHUNK = 1024  # queries whose scores are there at once, where PyTorch has no kernel that does without scores
# Of keys that travel at once, if a head has no more: on CPUs what a cache holds, on a GPU what makes few launches.
BLOCK_BYTES, GPU_BLOCK_BYTES = 1 << 20, 64 << 20
MOST_HEADS = 65_535  # of a launch of CUDA's kernels: the limit of its grid's second and third dims
ALIGNED = 8  # the features of a head are a multiple of it for CUDA's kernels
ALL = slice(None)
State = Sequence[Tensor]


class Ring(NamedTuple):
    """The ranks that share tokens: this one's place among them, how many each has, and how scores are scaled.

    `causal`: a query asks the tokens up to its own, of ranks that have tokens one after the other.
    """

    comm: Communicator
    place: int
    lengths: tuple[int, ...]
    scale: float
    causal: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to the keys of all ranks, of this rank's (batch and heads, tokens, features)."""
        spare = -q.shape[-1] % ALIGNED if q.is_cuda else 0
        if spare:  # features of zeros change no score
            q, k, v = (F.pad(x, (0, spare)) for x in (q, k, v))
        y: Tensor = RingAttention.apply(q, k, v, self)
        return y[..., :-spare] if spare else y

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
        block_bytes = BLOCK_BYTES if k.is_cpu else GPU_BLOCK_BYTES
        count = min(MOST_HEADS, max(1, block_bytes // max(1, bytes_of_head)))
        return (slice(start, start + count) for start in range(0, max(1, k.shape[0]), count))


class RingAttention(LocalFunction):
    """Of queries, keys and values (batch and heads, this rank's tokens, features)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        sums, ctx.groups = [], []
        for heads in ring.heads(k):
            outputs, sums_of_heads, state = _forward([x[heads] for x in (q, k, v)], ring)
            y[heads] = ring.swapped_back([outputs], FORWARD_TAG)[0]
            sums.append(sums_of_heads)
            ctx.groups.append((heads, state))
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, y, torch.cat(sums))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for heads, state in ctx.groups:
            parts = _backward([x[heads] for x in (gradient, q, k, v, y)], sums[heads], state, ctx.ring)
            for whole, part in zip(found, ctx.ring.swapped_back(parts, BACKWARD_TAG), strict=True):
                whole[heads] = part
        return *found, None


def _forward(tensors: Sequence[Tensor], ring: Ring) -> tuple[Tensor, Tensor, State]:
    """The outputs of some heads and their logsumexp, of the tokens of which this rank takes care."""
    q, k, v = ring.swapped([x.contiguous() for x in tensors], FORWARD_TAG)
    wide = torch.promote_types(q.dtype, torch.float32)
    merged = q.new_zeros(q.shape, dtype=wide)
    sums = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
    state: State = ()
    for owner, block in ring.round((k, v), FORWARD_TAG):
        ours, theirs = ring.asking(owner)
        queries, keys, values = _alone(q[:, ours], *(x[:, theirs] for x in block))
        if not queries.numel() or not keys.numel():
            continue
        causal = ring.diagonal(owner)
        kernel = kernel_of(queries, keys, values, causal)
        y, own_sums, *state = kernel.forward(queries, keys, values, causal, ring.scale)
        before, both = sums[:, ours], torch.logaddexp(sums[:, ours], own_sums[0])
        merged[:, ours].mul_((before - both).exp_().unsqueeze(-1))
        merged[:, ours].add_(y[0] * (own_sums[0] - both).exp_().unsqueeze(-1))
        before.copy_(both)
    return merged.to(q.dtype), sums, state


def _backward(tensors: Sequence[Tensor], sums: Tensor, state: State, ring: Ring) -> list[Tensor]:
    """The gradients of the queries, keys and values of some heads, of those same tokens."""
    gradient, q, k, v, y = ring.swapped([x.contiguous() for x in tensors], BACKWARD_TAG)
    of_q, *of_block = (torch.zeros_like(x, dtype=sums.dtype) for x in (q, k, v))
    arriving: Any = None
    for owner, block in ring.round((k, v), BACKWARD_TAG):
        ours, theirs = ring.asking(owner)
        queries, keys, values = _alone(q[:, ours], *(x[:, theirs] for x in block))
        parts: Sequence[Tensor] = ()
        if queries.numel() and keys.numel():
            share, output, own_sums = _alone(*(x[:, ours] for x in (gradient, y, sums)))
            causal = ring.diagonal(owner)
            kernel = kernel_of(queries, keys, values, causal)
            parts = kernel.backward((share, queries, keys, values, output, own_sums), state, causal, ring.scale)
        if arriving is not None:
            arriving.wait()
        if parts:
            of_q[:, ours] += parts[0][0]
            of_block[0][:, theirs] += parts[1][0]
            of_block[1][:, theirs] += parts[2][0]
        of_block, arriving = ring.onward(of_block, owner, BACKWARD_TAG)
    arriving.wait()
    return [x.to(q.dtype) for x in (of_q, *of_block)]


def _alone(*tensors: Tensor) -> list[Tensor]:
    """As the kernels take them: contiguous, all heads those of one image."""
    return [x.contiguous().unsqueeze(0) for x in tensors]


class Kernel(Protocol):
    """Attention of queries to one block of keys and values, each (1, batch and heads, tokens, features), contiguous.

    `causal`: queries and keys are the same tokens. `forward` returns the outputs, the logsumexp of the scores
    (1, batch and heads, queries), and what else `backward` takes as `state`. `backward` takes the gradient of the
    outputs, queries, keys, values, and the outputs and the logsumexp over *all* blocks. It returns the gradients of
    queries, keys and values that pass through this one.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]: ...

    @staticmethod
    def backward(tensors: Sequence[Tensor], state: State, causal: bool, scale: float) -> Sequence[Tensor]: ...


class CpuFlash:
    """PyTorch's kernel for CPUs."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=None, scale=scale
        )
        return found

    @staticmethod
    def backward(tensors: Sequence[Tensor], state: State, causal: bool, scale: float) -> Sequence[Tensor]:
        found: Sequence[Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, causal, attn_mask=None, scale=scale
        )
        return found


# The two kernels of CUDA are called as PyTorch's context parallelism calls them (torch/distributed/tensor/experimental/
# _context_parallel/_attention.py): in the backward pass with the merged output and logsumexp, and with the state of the
# generator that the last block's forward pass returned. Without dropout no kernel reads it.


class CudaFlash:
    """FlashAttention, in 16 bits; heads of 256 features at most."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        y, sums, *_, state, unused, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return y, sums, state, unused

    @staticmethod
    def backward(tensors: Sequence[Tensor], state: State, causal: bool, scale: float) -> Sequence[Tensor]:
        of_sequences = None, None, tensors[1].shape[-2], tensors[2].shape[-2]  # cum_seq_q, cum_seq_k, max_q, max_k
        found: Sequence[Tensor] = aten._scaled_dot_product_flash_attention_backward(
            *tensors, *of_sequences, 0.0, causal, *state, scale=scale
        )
        return found


class CudaEfficient:
    """Memory-efficient attention (Rabe and Staats, 2021), in 32 bits too."""

    WHOLE = 32  # queries, of which its logsumexp has a multiple

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        y, sums, *state = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return y, sums[..., : q.shape[-2]], *state

    @classmethod
    def backward(cls, tensors: Sequence[Tensor], state: State, causal: bool, scale: float) -> Sequence[Tensor]:
        gradient, q, k, v, y, sums = tensors
        sums = F.pad(sums, (0, -sums.shape[-1] % cls.WHOLE), value=math.inf)
        *found, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, y, sums, *state, 0.0, [True, True, True, False], causal, scale=scale
        )
        return found


class Explicit:
    """Scores in chunks of queries, not in 16 bits, where PyTorch has no kernel that returns the logsumexp."""

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        outputs, all_sums = [], []
        for start in range(0, q.shape[-2], CHUNK):
            scores = cls._scores(q, k, start, causal, scale)
            sums = scores.logsumexp(-1)
            outputs.append((scores - sums.unsqueeze(-1)).exp() @ v.to(scores.dtype))
            all_sums.append(sums)
        return torch.cat(outputs, -2), torch.cat(all_sums, -1)

    @classmethod
    def backward(cls, tensors: Sequence[Tensor], state: State, causal: bool, scale: float) -> Sequence[Tensor]:
        gradient, q, k, v, y, sums = tensors
        wide, chunks = sums.dtype, []
        keys, values = k.to(wide), v.to(wide)
        of_k, of_v = torch.zeros_like(keys), torch.zeros_like(values)
        for start in range(0, q.shape[-2], CHUNK):
            rows = slice(start, start + CHUNK)
            queries, share, output = (x[..., rows, :].to(wide) for x in (q, gradient, y))
            weights = (cls._scores(q, k, start, causal, scale) - sums[..., rows].unsqueeze(-1)).exp()
            of_scores = weights * (share @ values.mT - (share * output).sum(-1, keepdim=True)) * scale
            chunks.append(of_scores @ keys)
            of_k += of_scores.mT @ queries
            of_v += weights.mT @ share
        return torch.cat(chunks, -2), of_k, of_v

    @staticmethod
    def _scores(q: Tensor, k: Tensor, start: int, causal: bool, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q[..., start : start + CHUNK, :].to(wide) @ k.to(wide).mT * scale
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
            scores = scores.masked_fill(later, -math.inf)
        return scores


def kernel_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> type[Kernel]:
    """The kernel for such blocks: the one that `scaled_dot_product_attention` would take, if it returns the sums."""
    if q.is_cpu:
        return CpuFlash
    if q.is_cuda:
        given = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
        if torch.backends.cuda.can_use_flash_attention(given):
            return CudaFlash
        if torch.backends.cuda.can_use_efficient_attention(given):
            return CudaEfficient
    return Explicit
