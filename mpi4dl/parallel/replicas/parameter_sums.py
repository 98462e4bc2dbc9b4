"""Gradients that are summed over ranks where autograd computes them, before it accumulates them in `p.grad`.

    p.grad <- hooks of p <- AccumulateGrad <- _Sum, one for each bucket <- _Use, one for each parameter <- operators
                                                  waits for the sum            puts it into its bucket

A model's forward pass gets its parameters from `SummedParameters`. Its backward pass reaches a `_Use` as soon as the
layer's gradient is there, since autograd runs first what was made last: the last `_Use` of a bucket starts the bucket's
sum. It reaches `_Sum`, made at the beginning of the forward pass, at the end; a parameter with hooks has one of its
own. So all that follows sees whole gradients, as in one process: several backward passes, hooks, optimizers in hooks,
`torch.autograd.grad`, clipping. Uses outside of the forward pass, such as a penalty on weights, have gradients that
every rank computes alike, and are not summed.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.exchange import LocalFunction, forward_pass, once_differentiable
from mpi4dl.parallel.replicas.buckets import bucket_bytes_on, plan_buckets, seen_as


class SummedParameters(dict[str, "nn.Parameter | None"]):
    """The `_parameters` of a module: within a `ForwardPass` each is a tensor whose gradient is summed over ranks."""

    def __reduce__(self) -> Any:
        return SummedParameters, (), None, None, iter(dict.items(self))

    def __getitem__(self, name: str) -> Any:
        return self._summed(dict.__getitem__(self, name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._summed(dict.get(self, name, default))

    def values(self) -> Any:
        return map(self._summed, dict.values(self))

    def items(self) -> Any:
        return ((name, self._summed(p)) for name, p in dict.items(self))

    def __setitem__(self, name: str, p: Any) -> None:
        dict.__setitem__(self, name, p.parameter if isinstance(p, UsedParameter) else p)

    def _summed(self, p: Any) -> Any:
        running = forward_pass.get()
        return p if p is None or running is None or not torch.is_grad_enabled() else running.use(p)


def _attribute(name: str) -> Any:
    """An attribute of a `UsedParameter` that is that of its parameter."""

    def get(self: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return getattr(self.parameter, name)

    def put(self: Any, value: Any) -> None:
        with torch._C.DisableTorchFunction():
            setattr(self.parameter, name, value)
            if name == "data":
                Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    return property(get, put)


def _method(method: Any) -> Any:
    """A method of a `UsedParameter` that is called with its parameter."""

    def call(self: Any, *args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(self.parameter, *args)

    return call


class UsedParameter(nn.Parameter):
    """The values of `parameter` in a forward pass. What is asked of it or changed beside them is the parameter's."""

    parameter: nn.Parameter
    grad, data, is_leaf, grad_fn, requires_grad = map(_attribute, "grad data is_leaf grad_fn requires_grad".split())
    requires_grad_ = _method(Tensor.requires_grad_)
    register_hook = _method(unwrap(Tensor.register_hook))
    register_post_accumulate_grad_hook = _method(Tensor.register_post_accumulate_grad_hook)


class GradientBuckets:
    """The buckets of these parameters' gradients, and their sums over the ranks of `comm`, in one backward pass.

    Sums start in the order of the buckets, so that all ranks start the same ones together. A parameter that took part
    on some rank has a gradient on all; one that took part nowhere has none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
        self.parameters, self.comm = parameters, comm
        limit = bucket_bytes_on(parameters[0].device.type) if parameters else 1
        widest = max((p.element_size() for p in parameters), default=4)
        kinds = [(p.dtype, p.device) for p in parameters]
        self.buckets = plan_buckets([p.numel() for p in parameters], kinds, max(1, limit // widest))
        self.place = {
            id(parameters[i]): (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, i in enumerate(bucket.members)
        }

    def members(self, number: int) -> list[nn.Parameter]:
        return [self.parameters[i] for i in self.buckets[number].members]


class BackwardPass:
    """The gradients of one backward pass on their way into `buckets`. `expected` are how many come to each."""

    def __init__(self, buckets: GradientBuckets, expected: Sequence[int]) -> None:
        self.buckets, self.expected = buckets, expected
        self.task = torch._C._current_graph_task_id()
        self._flat: dict[int, Tensor] = {}
        self._arrived: list[dict[int, bool]] = [{} for _ in expected]  # by slot: whether there was a gradient
        self._next = 0
        self._pending: dict[int, Pending] = {}
        self._found: dict[int, list[Tensor | None]] = {}

    def add(self, number: int, slot: int, gradient: Tensor | None) -> None:
        """The gradient of a parameter on this rank, None for zero. The last one of a bucket starts its sum."""
        p = self.buckets.parameters[self.buckets.buckets[number].members[slot]]
        if number in self._pending:
            raise RuntimeError("a parameter's gradient came after the sum over ranks that it belongs to: report this")
        known = self._arrived[number]
        if gradient is not None:
            view = seen_as(self._part(number, slot), p)
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            view.add_(gradient) if known.get(slot) else view.copy_(gradient)
        known[slot] = known.get(slot, False) or gradient is not None
        while self._next < len(self.expected) and len(self._arrived[self._next]) == self.expected[self._next]:
            self._start(self._next)
            self._next += 1
        for pending in self._pending.values():
            if not pending.test():
                break

    def _part(self, number: int, slot: int) -> Tensor:
        bucket = self.buckets.buckets[number]
        if number not in self._flat:
            like = self.buckets.parameters[bucket.members[0]]
            # Behind the gradients one flag for each: how many ranks have one.
            self._flat[number] = torch.empty(bucket.length + len(bucket.members), dtype=like.dtype, device=like.device)
        start = bucket.offsets[slot]
        return self._flat[number][start : start + self.buckets.parameters[bucket.members[slot]].numel()]

    def _start(self, number: int) -> None:
        bucket, arrived = self.buckets.buckets[number], self._arrived[number]
        if not arrived or number in self._pending:
            return
        there = [arrived.get(slot, False) for slot in range(len(bucket.members))]
        for slot, each in enumerate(there):
            if not each:
                self._part(number, slot).zero_()
        flat = self._flat[number]
        flat[bucket.length :] = torch.tensor(there, dtype=flat.dtype)
        self._pending[number] = self.buckets.comm.iall_reduce(flat)

    def collect(self, number: int, slots: Sequence[int]) -> list[Tensor | None]:
        """Some sums of a bucket, None for parameters without a gradient, once all of this pass has come. Collective."""
        if number not in self._found:
            self._found[number] = self._collect(number)
        found = self._found[number]
        taken = [found[slot] for slot in slots]
        for slot in slots:
            found[slot] = None
        if not any(x is not None for x in found):
            del self._found[number]
        return taken

    def _collect(self, number: int) -> list[Tensor | None]:
        for each in range(len(self.expected)):
            self._start(each)
        self._next = len(self.expected)
        if number not in self._pending:
            return [None] * len(self.buckets.buckets[number].members)
        self._pending.pop(number).wait()
        flat, bucket = self._flat.pop(number), self.buckets.buckets[number]
        self._arrived[number] = {}
        used = flat[bucket.length :].tolist()
        return [
            seen_as(flat[start : start + p.numel()], p) if count else None
            for start, p, count in zip(bucket.offsets, self.buckets.members(number), used, strict=True)
        ]

    def abandon(self) -> None:
        """Wait for sums that nobody will collect."""
        for pending in self._pending.values():
            pending.wait()

    @property
    def done(self) -> bool:
        """Whether all sums that were started have been collected."""
        return not self._pending and not self._found


class ForwardPass:
    """One call of a model: `use(p)` is a tensor with the values of a parameter, whose gradient is summed over ranks.

    All ranks know it by the same `number`.
    """

    def __init__(self, buckets: GradientBuckets, number: int) -> None:
        self.buckets, self.number = buckets, number
        self.backward: BackwardPass | None = None
        self._expected = [0] * len(buckets.buckets)
        self._sums: dict[int, Tensor] = {}
        self._uses: dict[int, Tensor] = {}
        for number in reversed(range(len(buckets.buckets))):
            members = buckets.members(number)
            hooked = [
                slot
                for slot, p in enumerate(members)
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
            ]
            others = [slot for slot in range(len(members)) if slot not in hooked]
            for slots in (others, *([slot] for slot in hooked)):  # hooks are not called where nothing uses p
                some = [members[slot] for slot in slots]
                for p, summed in zip(some, _Sum.apply(self, number, slots, *some) if some else (), strict=True):
                    self._sums[id(p)] = summed

    @staticmethod
    def now() -> "ForwardPass | None":
        """The pass that runs."""
        return forward_pass.get()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this context modules use parameters by this pass."""
        before = forward_pass.set(self)
        try:
            yield
        finally:
            forward_pass.reset(before)
            self._sums, self._uses = {}, {}  # autograd has them

    def use(self, p: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            if not p.requires_grad or (id(p) not in self._sums and not isinstance(p, nn.Parameter)):
                return p  # which is frozen, or which functional_call has put in its place
            if id(p) not in self._sums:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} is used with a gradient in a forward pass that began "
                    "without it: call the model with gradients enabled, unfreeze before, and make layers before the "
                    "call"
                )
            if id(p) not in self._uses:
                number, slot = self.buckets.place[id(p)]
                use = _Use.apply(self, number, slot, self._sums[id(p)])
                use.__class__, use.parameter = UsedParameter, p
                self._uses[id(p)] = use
                self._expected[number] += 1
            return self._uses[id(p)]

    def used(self) -> Iterable[Tensor]:
        """What `use` has returned."""
        return self._uses.values()

    def add(self, number: int, slot: int, gradient: Tensor | None) -> None:
        if self.backward is None or self.backward.task != torch._C._current_graph_task_id():
            if self.backward is not None:  # it was ended by an error
                self.backward.abandon()
            self.backward = BackwardPass(self.buckets, self._expected)
        self.backward.add(number, slot, gradient)

    def collect(self, number: int, slots: Sequence[int]) -> list[Tensor | None]:
        if self.backward is None or self.backward.task != torch._C._current_graph_task_id():
            return [None] * len(slots)
        found = self.backward.collect(number, slots)
        if self.backward.done:
            self.backward = None  # the graph may be gone through once more
        return found


class _Use(LocalFunction):
    @staticmethod
    def forward(ctx: Any, running: ForwardPass, number: int, slot: int, summed: Tensor) -> Tensor:
        ctx.running, ctx.place = running, (number, slot)
        ctx.set_materialize_grads(False)
        return summed.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        ctx.running.add(*ctx.place, gradient)
        return None, None, None, None  # `_Sum` has it


class _Sum(LocalFunction):
    @staticmethod
    def forward(
        ctx: Any, running: ForwardPass, number: int, slots: Sequence[int], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.running, ctx.number, ctx.slots = running, number, slots
        ctx.set_materialize_grads(False)
        return tuple(p.detach() for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.running.collect(ctx.number, ctx.slots)


def summed(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], comm: Communicator) -> list[Any]:
    """The sums over ranks of these gradients, None for those that no rank has. Collective."""
    buckets = GradientBuckets(parameters, comm)
    expected = [len(bucket.members) for bucket in buckets.buckets]
    running = BackwardPass(buckets, expected)
    for p, gradient in zip(reversed(parameters), reversed(gradients), strict=True):
        running.add(*buckets.place[id(p)], gradient)
    found: dict[int, Tensor | None] = {}
    for number in range(len(expected)):
        members = buckets.members(number)
        found |= zip(map(id, members), running.collect(number, range(len(members))), strict=True)
    return [found[id(p)] for p in parameters]
