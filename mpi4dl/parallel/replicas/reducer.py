"""Gradients of replicated parameters, added up over the ranks that hold them, while backward still runs.

parameters, last first   [ p9 p8 p7 | p6 p5 | p4 p3 p2 p1 ]      flat buckets
                              |        |         |
backward fills them           v        v         v               a full bucket's sum over the ranks starts at once,
                             sum      sum       sum              in this order on every rank

ZeRO 0    every rank gets the whole sum          all-reduce, after the last backward pass of a step
ZeRO 1    every rank gets the part that it owns  reduce-scatter, after the last pass
ZeRO 2    the same, and keeps only that part     reduce-scatter in every pass; a bucket lives from its first gradient
                                                 until its parts are with their owners
"""

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.packing import copy_all
from mpi4dl.comm.transport import LOW_PRECISION
from mpi4dl.parallel.replicas.buckets import BUCKET_BYTES, BucketLayout, plan_buckets, plan_cuts, seen_as

AllReduce = Callable[[Tensor], Pending]


def plan_layout(
    parameters: list[nn.Parameter], comm: Communicator, bucket_bytes: int = BUCKET_BYTES, whole: bool = False
) -> BucketLayout:
    """How these parameters lie in buckets, and how the ranks of `comm` share them; see `buckets`.

    Those that are frozen now have buckets of their own, behind the others, which may then stay idle.
    """
    lengths = tuple(p.numel() for p in parameters)
    widest = max((p.element_size() for p in parameters), default=4)
    kinds: list[object] = [(p.dtype, p.device) for p in parameters]
    frozen = [not p.requires_grad for p in parameters]
    buckets = plan_buckets(lengths, kinds, max(1, bucket_bytes // widest), frozen)
    return BucketLayout(lengths, buckets, plan_cuts(buckets, comm.size, whole), comm.rank)


class GradientSums(ABC):
    """The gradients of `parameters`, summed over passes and ranks: `prepare()` before backward, `finish()` after it.

    Then `used` says which parameters have a gradient. `idle` are the numbers of buckets that nobody fills.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.used: list[bool] = []
        self.idle: set[int] = set()

    @abstractmethod
    def _sums(self) -> Collection[Tensor]:
        """This rank's part of the sums."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        if factor != 1.0 and (sums := [*self._sums()]):
            torch._foreach_mul_(sums, factor)

    def clamp(self, limit: float) -> None:
        """Limit each element of the gradients."""
        for gradient in self._sums():
            gradient.clamp_(-limit, limit)


class LocalGradients(GradientSums):
    """Those of parameters that one rank holds alone, without hooks, buckets and copies: autograd adds them up.

    A stage of a pipeline without tiles and replicas has such parameters. Passes need no preparation.
    """

    def prepare(self, accumulate: bool = True) -> None:
        for p in self.parameters:
            p.grad = None

    def wake(self, i: int) -> None: ...

    def begin_pass(self, last: bool) -> None: ...

    def end_pass(self) -> None: ...

    def finish(self, hooked: Sequence[bool] = ()) -> bool:
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        self.used = [p.grad is not None for p in self.parameters]
        return False

    def use(self, used: Sequence[bool]) -> None:
        """Some parameters took part in the loss elsewhere: here their gradients are zero."""
        for i, there in enumerate(used):
            if there and not self.used[i]:
                self.used[i], self.parameters[i].grad = True, torch.zeros_like(self.parameters[i])

    def _sums(self) -> Collection[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def squares(self) -> list[Tensor]:
        """The sum of the squares of the gradients, if there are any."""
        gradients = [gradient for gradient in self._sums() if gradient.numel()]
        if not gradients:
            return []
        return [torch.stack(torch._foreach_norm(gradients)).double().square().sum()]

    def change(self, by: Callable[[int, Tensor], Tensor]) -> None:
        """Replace each gradient by `by(i, gradient)`, from the first parameter on."""
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                p.grad.copy_(by(i, p.grad))


class Reducer(GradientSums):
    """Sums the gradients of `parameters` over the ranks of `comm`, each of which holds all of these parameters.

    `prepare()` before backward; hooks move each gradient into its bucket as it comes, and start the bucket's sum with
    the last of them; `finish()` after backward waits for all. Where several backward passes add up,
    `prepare(accumulate=True)`, and each pass stands between `begin_pass(last=...)` and `end_pass()`. All ranks make the
    same number of passes.

    Afterwards `owned(number)` is the sum of a bucket, or of the part that this rank owns if `zero` is not 0. Without
    ZeRO, each p.grad is a view into it. A parameter that took no part in the loss on any rank has no gradient: `used`
    says so, so that optimizers leave it alone, as they do in plain PyTorch.

    Gradients in bfloat16 and float16 are summed in float32. `all_reduce` is how a bucket is summed without ZeRO. A
    bucket of frozen parameters alone is idle, which nobody fills or sums, until `wake` says that one is trained now.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        comm: Communicator,
        layout: BucketLayout | None = None,
        zero: int = 0,
        all_reduce: AllReduce | None = None,
    ) -> None:
        super().__init__(p for p in parameters if p.requires_grad or layout is not None)
        self.comm = comm
        self.layout = plan_layout(self.parameters, comm) if layout is None else layout
        self.zero = zero
        self._all_reduce = all_reduce
        buckets = self.layout.buckets
        self._place = {i: (number, slot) for number, b in enumerate(buckets) for slot, i in enumerate(b.members)}
        trained = [p.requires_grad for p in self.parameters]
        self.idle = {number for number, b in enumerate(buckets) if b.members and not any(trained[i] for i in b.members)}
        self._flat: dict[int, Tensor] = {}  # buckets that gradients go to, by number
        self._views: dict[int, list[Tensor]] = {}  # their parameters, as views of these, by slot
        self._filled: dict[int, set[int]] = {}  # which of their slots have something
        self._late: dict[int, dict[int, Tensor]] = {}  # on GPUs, what goes into a bucket in one call once it is full
        self._owned: dict[int, Tensor] = {}  # what became of them
        self._missing: list[set[int]] = []  # in this pass
        self._next = len(buckets)
        self._started: list[tuple[int, Tensor, Pending]] = []
        self._spare: dict[int, Tensor] = {}
        self.collecting = False

    def attach(self) -> "Reducer":
        """Watch the parameters' gradients from now on. Collective."""
        # Sums that start during backward must not match the collectives of backward: they get a communicator of their
        # own.
        self.comm = self.comm.split(0, self.comm.rank)
        for i, p in enumerate(self.parameters):
            if p.requires_grad:
                self._watch(i)
        return self

    def _watch(self, i: int) -> None:
        # A parameter that held its reducer, which holds all parameters, would keep both for ever.
        self.parameters[i].register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self), i))

    def wake(self, i: int) -> None:
        """A parameter that was frozen so far is trained now: so say all ranks, between steps."""
        self._watch(i)
        self.idle.discard(self._place[i][0])

    @staticmethod
    def is_hook(hook: object) -> bool:
        """Whether this is how some reducer watches a parameter."""
        return getattr(hook, "func", None) is _tell

    @staticmethod
    def has_other_hooks(parameter: nn.Parameter) -> bool:
        """Whether there are hooks on the gradient of a parameter besides those of reducers."""
        after: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        return bool(parameter._backward_hooks) or not all(map(Reducer.is_hook, after.values()))

    def prepare(self, accumulate: bool = False) -> None:
        """Forget the gradients of the step before."""
        for p in self.parameters:
            p.grad = None
        known, self._flat, self._filled, self._late, self._owned = self._flat, {}, {}, {}, {}
        if self.zero < 2:
            self._spare |= {number: flat for number, flat in known.items() if not _is_held(flat, self._views[number])}
        self.used = [False] * len(self.parameters)
        self.collecting = True
        if not accumulate:
            self.begin_pass(last=True)

    def begin_pass(self, last: bool) -> None:
        """The gradients that come from now on, until `end_pass`, are those of one backward pass."""
        if last or self.zero > 1:
            self._missing = [set(b.members) if n not in self.idle else set() for n, b in enumerate(self.layout.buckets)]
            self._next = 0

    def end_pass(self) -> None:
        """Sum the rest of this pass, where the pass has to."""
        while self._next < len(self.layout.buckets):
            self._start_next()
        self._missing = []

    def _arrived(self, i: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self.collecting or gradient is None:
            return
        number, slot = self._place[i]
        if self._missing and number < self._next:
            raise RuntimeError(
                "a parameter's gradient came twice in one backward pass, as it does under reentrant checkpoints: its "
                "sum over the ranks may be under way; use torch.utils.checkpoint with use_reentrant=False"
            )
        self._put(number, slot, parameter, gradient)
        self.used[i] = True
        if not self._missing:
            return
        self._missing[number].discard(i)
        self._collect(wait=False)
        # Non-blocking collectives must start in the same order on all ranks, whatever order the buckets fill in.
        while self._next < len(self.layout.buckets) and not self._missing[self._next]:
            self._start_next()

    def _is_added_up(self, i: int, gradient: Tensor | None) -> bool:
        """Whether autograd has added a gradient to its bucket, with which this pass does no more."""
        if self._missing or not self.collecting or not self.used[i]:
            return False
        number, slot = self._place[i]
        return number in self._flat and gradient is self._views[number][slot]

    def _put(self, number: int, slot: int, parameter: Tensor, gradient: Tensor) -> None:
        """Move a gradient into its bucket, where autograd adds those of the passes that follow."""
        if number not in self._flat:
            self._open(number)
        view, filled, late = self._views[number][slot], self._filled[number], self._late.setdefault(number, {})
        if gradient is view:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if gradient.is_cuda and self._missing and (slot in late or slot not in filled):
            late[slot] = gradient
            filled.add(slot)
            return
        if self.zero > 1 and slot in filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        filled.add(slot)
        parameter.grad = None if self.zero > 1 else view

    def _open(self, number: int) -> None:
        """Make a bucket, or take that of the step before."""
        self._filled[number] = set()
        if number in self._spare:
            self._flat[number] = self._spare.pop(number)
            return
        bucket, lengths = self.layout.buckets[number], self.layout.lengths
        like = self.parameters[bucket.members[0]]
        self._flat[number] = flat = torch.empty(bucket.length, dtype=like.dtype, device=like.device)
        places = zip(bucket.members, bucket.offsets, strict=True)
        self._views[number] = [self._view(i, flat[offset : offset + lengths[i]]) for i, offset in places]

    def _view(self, i: int, flat: Tensor) -> Tensor:
        """A parameter's part of a bucket; under ZeRO, parameters lie in buckets as plainly as this."""
        p = self.parameters[i]
        return flat.view(p.shape) if self.zero else seen_as(flat, p)

    def _start_next(self) -> None:
        number, bucket = self._next, self.layout.buckets[self._next]
        self._next += 1
        if number in self.idle:
            return
        if number not in self._flat:
            self._open(number)
        flat, filled, late = self._flat[number], self._filled[number], self._late.pop(number, {})
        if late:
            views = [self._views[number][slot] for slot in late]
            copy_all(views, list(late.values()))
            for slot, view in zip(late, views, strict=True):
                self.parameters[bucket.members[slot]].grad = None if self.zero > 1 else view
        if len(filled) < len(bucket.members):
            for slot, view in enumerate(self._views[number]):
                if slot not in filled:
                    view.zero_()
        if self.zero > 1:
            del self._flat[number], self._filled[number], self._views[number]
        if self.zero:
            pending = self.comm.ireduce_scatter(flat, self.layout.cuts[number])
        else:
            pending = (self._all_reduce or self.comm.iall_reduce)(flat)
        self._started.append((number, flat, pending))

    def _collect(self, wait: bool) -> None:
        """Take in the sums that are complete, in order; all of them if it is to wait."""
        while self._started and (wait or self._started[0][2].test()):
            number, flat, pending = self._started.pop(0)
            pending.wait()
            part = flat[self.layout.own(number)] if self.zero else flat
            if self.zero < 2:
                self._owned[number] = part
            elif number in self._owned:
                self._owned[number].add_(part)
            else:
                self._owned[number] = part.clone()

    def finish(self, hooked: Sequence[bool] = ()) -> bool:
        """Wait until the gradients are complete. Collective.

        `hooked` says of which of them this rank has hooks; whether other ranks have others is returned.
        """
        self.end_pass()
        flags = torch.tensor([*self.used, *hooked, *(not each for each in hooked)], dtype=torch.uint8)
        pending = self.comm.iall_reduce(flags, "max")
        self._collect(wait=True)
        pending.wait()
        self.collecting = False
        self.used = flags[: len(self.used)].bool().tolist()
        somewhere, elsewhere = flags[len(self.used) :].bool().view(2, -1)
        unlike = bool((somewhere & elsewhere).any())
        for number in self._flat:
            for i, view in zip(self.layout.buckets[number].members, self._views[number], strict=True):
                self.parameters[i].grad = view if self.used[i] and not self.zero else None
        return unlike

    def use(self, used: Sequence[bool]) -> None:
        """Some parameters took part in the loss elsewhere: here their gradients are zero."""
        for i, there in enumerate(used):
            if there and not self.used[i]:
                self.used[i], (number, slot) = True, self._place[i]
                if not self.zero:
                    self.parameters[i].grad = self._views[number][slot]

    def owned(self, number: int) -> Tensor:
        """The sum of the gradients in a bucket, flat: the part that this rank owns, or all of it without ZeRO."""
        return self._owned[number]

    def squares(self) -> list[Tensor]:
        """The sum of the squares of what `owned` gives, for each bucket."""
        types = {dtype: torch.float32 for dtype in LOW_PRECISION}
        parts = self._owned.values()
        return [torch.linalg.vector_norm(x, dtype=types.get(x.dtype)).double().square() for x in parts]

    def _sums(self) -> Collection[Tensor]:
        return self._owned.values()

    def change(self, by: Callable[[int, Tensor], Tensor]) -> None:
        """Replace the whole sum for each used parameter by `by(i, gradient)`, from the first parameter on. Collective.

        Without ZeRO every rank computes all of them, with it what it owns counts; of a shared bucket one is whole at a
        time.
        """
        for number in reversed(range(len(self.layout.buckets))):
            if number in self.idle:
                continue
            flat = owned = self._owned[number]
            if self.zero:
                flat = owned.new_empty(self.layout.buckets[number].length)
                flat[self.layout.own(number)] = owned
                self.comm.iall_gather_into(flat, self.layout.cuts[number]).wait()
            for segment in reversed([*self.layout.segments(number)]):
                if self.used[segment.member]:
                    view = self._view(segment.member, flat[segment.place])
                    view.copy_(by(segment.member, view))
            if self.zero:
                owned.copy_(flat[self.layout.own(number)])


def _is_held(flat: Tensor, views: Sequence[Tensor]) -> bool:
    """Whether somebody else keeps memory of these views, or one of them, such as a gradient of the step before."""
    *counts, of_one = (sys.getrefcount(x) for x in (*views, object()))
    uses = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)  # as in torch/_inductor/cudagraph_trees.py
    return max(counts) > of_one + 1 or uses > len(views) + 2


def _tell(reducer: "weakref.ref[Reducer]", i: int, parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None and not alive._is_added_up(i, parameter.grad):
        with torch._C.DisableTorchFunction():  # what is done to gradients here is not the model's doing
            alive._arrived(i, parameter)


def sums_on_host(lists: Sequence[Sequence[Tensor]]) -> list[float]:
    """The sum of each list of numbers; the host waits once for all that are on one device."""
    numbers = [(place, number) for place, each in enumerate(lists) for number in each]
    sums = [0.0] * len(lists)
    for device in dict.fromkeys(number.device for _, number in numbers):
        there = [(place, number) for place, number in numbers if number.device == device]
        read = torch.stack([number.double() for _, number in there]).cpu().tolist()
        for (place, _), value in zip(there, read, strict=True):
            sums[place] += value
    return sums
