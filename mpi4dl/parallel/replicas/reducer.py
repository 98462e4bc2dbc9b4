"""Gradients of replicated parameters, added up over the ranks that hold them, while backward still runs.

parameters, last first   [ p9 p8 p7 | p6 p5 | p4 p3 p2 p1 ]      flat buckets; each p.grad is a view into one
                              |        |         |
backward fills them           v        v         v               a full bucket's all-reduce starts at once,
                          reduce    reduce    reduce             in this order on every rank
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending

BUCKET_BYTES = 4 << 20


class Bucket(NamedTuple):
    """Which parameters share one flat buffer, by number, and where each one's gradient begins in it."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int


def plan_buckets(lengths: list[int], kinds: list[object], limit: int) -> tuple[Bucket, ...]:
    """Put parameters of these numbers of elements into buckets of at most `limit` elements, the last one first.

    Parameters of different kinds (dtype and device) do not share a bucket; one that is larger than the limit has a
    bucket to itself.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    offsets: list[int] = []
    length = 0
    for i in reversed(range(len(lengths))):
        if members and (length + lengths[i] > limit or kinds[i] != kinds[members[0]]):
            buckets.append(Bucket(tuple(members), tuple(offsets), length))
            members, offsets, length = [], [], 0
        members.append(i)
        offsets.append(length)
        length += lengths[i]
    if members:
        buckets.append(Bucket(tuple(members), tuple(offsets), length))
    return tuple(buckets)


class Reducer:
    """Sums the gradients of parameters over the ranks of `comm`, each of which holds all of these parameters.

    `prepare()` before backward gives every parameter a zero gradient that is a view into a bucket; hooks start a
    bucket's reduction when its last gradient is there; `finish()` after backward waits for all. Where several backward
    passes add up, `prepare(accumulate=True)` waits with that until `last_pass()`. Behind the gradients, a
    bucket has one number per parameter that says whether there was a gradient: one that took no part in the loss on any
    rank has none afterwards, so that optimizers leave it alone, as they do in plain PyTorch. `reduce()` does the same
    for gradients that exist already.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], comm: Communicator, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.comm = comm
        widest = max((p.element_size() for p in self.parameters), default=4)
        kinds: list[object] = [(p.dtype, p.device) for p in self.parameters]
        self.buckets = plan_buckets([p.numel() for p in self.parameters], kinds, bucket_bytes // widest)
        self._flat: list[Tensor] = []
        self._missing: list[set[int]] = []
        self._used: list[set[int]] = []
        self._started: list[Pending] = []

    def attach(self) -> "Reducer":
        """Watch the parameters' gradients from now on. Collective."""
        # What starts during backward must not meet the collectives of backward: it gets a communicator of its own.
        self.comm = self.comm.split(0)
        for number, bucket in enumerate(self.buckets):
            for slot, i in enumerate(bucket.members):
                self.parameters[i].register_post_accumulate_grad_hook(partial(self._arrived, number, slot))
        return self

    def prepare(self, accumulate: bool = False) -> None:
        self._flat = self._flat or [self._empty(bucket) for bucket in self.buckets]
        for bucket, flat in zip(self.buckets, self._flat, strict=True):
            flat.zero_()
            for p, view in self._views(bucket, flat):
                p.grad = view
        self._used = [set() for _ in self.buckets]
        self._missing, self._started = [], []
        if not accumulate:
            self.last_pass()

    def last_pass(self) -> None:
        """The gradients that come from now on are the last ones."""
        self._missing = [set(range(len(bucket.members))) for bucket in self.buckets]

    def _empty(self, bucket: Bucket) -> Tensor:
        like = self.parameters[bucket.members[0]]
        return torch.empty(bucket.length + len(bucket.members), dtype=like.dtype, device=like.device)

    def _views(self, bucket: Bucket, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for i, offset in zip(bucket.members, bucket.offsets, strict=True):
            p = self.parameters[i]
            yield p, flat[offset : offset + p.numel()].view(p.shape)

    def _arrived(self, number: int, slot: int, parameter: Tensor) -> None:
        if not self._used:
            return
        self._used[number].add(slot)
        if not self._missing:
            return
        if slot not in self._missing[number]:
            raise RuntimeError(
                "a parameter's gradient came twice in one backward pass, as it does under reentrant checkpoints: its "
                "sum over the ranks may be under way; use torch.utils.checkpoint with use_reentrant=False"
            )
        self._missing[number].discard(slot)
        for pending in self._started:
            pending.ready()
        # Non-blocking collectives must start in the same order on all ranks, whatever order the buckets fill in.
        while len(self._started) < len(self.buckets) and not self._missing[len(self._started)]:
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._started)
        bucket, flat = self.buckets[number], self._flat[number]
        used = [slot in self._used[number] for slot in range(len(bucket.members))]
        flat[bucket.length :] = torch.tensor(used, dtype=flat.dtype)
        self._started.append(self.comm.iall_reduce(flat))

    def finish(self) -> None:
        while len(self._started) < len(self.buckets):
            self._start_next()
        Pending.all(self.comm.node, self._started).wait()
        self._missing, self._used, self._started = [], [], []
        for bucket, flat in zip(self.buckets, self._flat, strict=True):
            for i, used in zip(bucket.members, flat[bucket.length :].tolist(), strict=True):
                if not used:
                    self.parameters[i].grad = None

    def gradients(self) -> list[Tensor]:
        """The buckets' gradients, flat. For use after `finish()`."""
        return [flat[: bucket.length] for bucket, flat in zip(self.buckets, self._flat, strict=True)]

    def square(self) -> float:
        """The sum of the squares of the whole gradient, the same on every rank."""
        squares = [torch.linalg.vector_norm(flat, dtype=torch.float64).cpu() ** 2 for flat in self.gradients()]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def scale(self, factor: float) -> None:
        """Multiply the gradient by a factor."""
        for flat in self.gradients():
            flat.mul_(factor)

    def reduce(self) -> None:
        """Sum gradients that are there already, in place. A rank that has none of a parameter counts as zero."""
        for bucket in self.buckets:
            flat = self._empty(bucket).zero_()
            for slot, (p, view) in enumerate(self._views(bucket, flat)):
                if p.grad is not None:
                    view.copy_(p.grad)
                    flat[bucket.length + slot] = 1
            used = self.comm.all_reduce(flat)[bucket.length :].tolist()
            for (p, total), anywhere in zip(self._views(bucket, flat), used, strict=True):
                if anywhere and p.grad is not None:
                    p.grad.copy_(total)
                elif anywhere:
                    p.grad = total.clone()
