"""The trained parameters of one stage, on all ranks that hold them: their gradients, their step, who owns what.

              parameters            gradients              optimizer's state, masters
ZeRO 0        on every rank         on every rank          on every rank
ZeRO 1        on every rank         on every rank          each rank has those of its part
ZeRO 2        on every rank         each rank its part     each rank its part
ZeRO 3        each rank its part    each rank its part     each rank its part

Tiles, data replicas, the ways of a split batch and both directions of GEMS are all the same here: ranks of `comm`.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending, Refusal
from mpi4dl.parallel.replicas.buckets import BUCKET_BYTES, BucketSegment, Shard, State, checksums, seen_as
from mpi4dl.parallel.replicas.gathering import Gatherer, there_together
from mpi4dl.parallel.replicas.optimizer_traits import hook_on_gradient
from mpi4dl.parallel.replicas.reducer import AllReduce, LocalGradients, Reducer, plan_layout
from mpi4dl.parallel.replicas.update import Device, Disk, Master, Update, is_like, make_master

# Hooks on the gradients of parameters: called when these are whole, not by autograd, which has one rank's part.
#
# backward    autograd calls p's hooks: each is replaced by one that does nothing while a reducer collects
# finish      the gradient is summed over all ranks that hold p
# afterwards  the hooks of `register_hook`, in their order, then those of `register_post_accumulate_grad_hook`


class DeferredHook:
    """The function that autograd calls in place of a hook. Outside of the reducer's steps it is the hook."""

    def __init__(self, hook: Callable[[Tensor], Any], reducer: Reducer) -> None:
        self.hook = hook
        self._reducer = weakref.ref(reducer)

    def __call__(self, value: Tensor) -> Any:
        alive = self._reducer()
        return None if alive is not None and alive.collecting else self.hook(value)


def _hooks_of(parameter: nn.Parameter) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Where the user's hooks on a gradient are kept, by what key, and they themselves, in the order of their calls."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        for key, hook in [*(hooks or {}).items()]:
            if not Reducer.is_hook(hook):
                assert hooks is not None
                yield hooks, key, hook


def defer_hooks(parameter: nn.Parameter, reducer: Reducer) -> bool:
    """Let the hooks on a gradient wait for `call_hooks`; returns whether there are any. Handles still remove them."""
    found = [*_hooks_of(parameter)] if Reducer.has_other_hooks(parameter) else []
    for hooks, key, hook in found:
        hooks[key] = DeferredHook(hook.hook if isinstance(hook, DeferredHook) else hook, reducer)
    return bool(found)


def call_hooks(name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The whole gradient after the hooks. Raises Refusal if they change the parameter, or leave no gradient."""
    kept, version = parameter.grad, parameter._version
    gradient = gradient.clone()  # which a hook may keep: the bucket is scaled, and used again
    for hooks, _, hook in _hooks_of(parameter):
        if hooks is parameter._backward_hooks:
            result = hook(gradient)
            gradient = gradient if result is None else result
        else:
            parameter.grad = gradient
            hook(parameter)
            result, parameter.grad = parameter.grad, kept
            if result is None or parameter._version != version:
                raise Refusal(
                    f"a hook on the gradient of {name} steps, or takes the gradient away: leave that to the optimizer"
                )
            gradient = result
        _require_gradient(gradient, parameter, f"a hook got the gradient of {name}")
    return gradient


def _require_gradient(found: Any, like: Tensor, hook: str) -> None:
    if not isinstance(found, Tensor) or found.shape != like.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"{hook}, of shape {tuple(like.shape)}, but returned {what}: return a tensor of the same shape, or None"
        )


# An exponential moving average of what a rank's optimizer works on, for evaluations: the EMA of weights.
#
# after a step   average = decay * average + (1 - decay) * weights       element by element, so on parts too
# evaluation     weights <-> average ... average <-> weights             changed places; owners share as after a step

SLOT = "weight_average"  # as which checkpoints have it, beside the state of the optimizer


class WeightAverage:
    """The averages of masters of parameters, which live in `home`.

    As torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay), the first update copies.
    """

    def __init__(self, masters: Iterable[Sequence[Master]], decay: float, home: Device) -> None:
        self.decay, self.home = decay, home
        self._masters = [master for some in masters for master in some]
        self._of: dict[int, Tensor] = {}  # by the id of a master's value

    @property
    def values(self) -> list[Tensor]:
        """The averages that there are."""
        return [*self._of.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step that was made."""
        known = [master for master in self._masters if id(master.value) in self._of]
        for master in self._masters:
            if id(master.value) not in self._of:
                self._of[id(master.value)] = self.home.place(master.value.detach().clone())
        if known:
            averages = [self._of[id(master.value)] for master in known]
            torch._foreach_lerp_(averages, [master.value.detach() for master in known], 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """The weights become the average, and the average the weights; nothing happens before the first update."""
        for master in self._masters:
            if id(master.value) in self._of:
                average = self._of[id(master.value)]
                weights = master.value.detach().clone()
                master.value.copy_(average)
                average.copy_(weights)

    def of(self, master: Master) -> dict[str, Tensor]:
        """The average of a master by `SLOT`, if there is one yet."""
        found = self._of.get(id(master.value))
        return {} if found is None else {SLOT: found}

    @torch.no_grad()
    def load(self, master: Master, value: Tensor | None) -> None:
        """Go on from an average, or, without one, begin with the next update."""
        if value is None:
            self._of.pop(id(master.value), None)
        else:
            like = torch.empty_like(master.value)
            self._of[id(master.value)] = self.home.place(like.copy_(value.to(like.device).view(like.shape)))


OUTSIDE = (
    "outside of the optimizer, which with ZeRO 3, low_precision_weights or offload works on values of its own: change "
    "it before the engine is made, or train without these"
)
MEANWHILE = (
    "while the model ran, which with ZeRO 3, low_precision_weights, offload or bidirectional not every copy of it "
    "sees: train without these"
)
UNLIKE_HOOKS = (
    "the ranks have hooks on the gradients of different parameters: register them on all ranks that hold a parameter"
)
ReadShard = Callable[[str, int, int], tuple[Tensor, State]]
GradientHook = Callable[[str, Tensor], Tensor | None]


def trainable(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> list[tuple[str, nn.Parameter]]:
    """Those of `parameters` that are trained, or may be later: the optimizer has them, though they are frozen."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    real = [(name, p) for name, p in parameters if p.is_floating_point() or p.is_complex()]
    return [(name, p) for name, p in real if p.requires_grad or id(p) in stepped]


def ask(hook: GradientHook, name: str, gradient: Tensor) -> Tensor:
    """The gradient that a hook makes of this one. Raises ValueError if it is none."""
    result = hook(name, gradient)
    result = gradient if result is None else result
    _require_gradient(result, gradient, f"gradient_hook got the gradient of {name}")
    return result


class ReplicaGroup:
    """The replicas of some `parameters`, by name, which the ranks of `comm` hold with the same values. Collective.

    That is what `trainable` says. All others stay as they are.

    `zero` is the ZeRO stage, which cuts no parameter if it is to keep them `whole`. With ZeRO 3, each of `copies` sets
    of ranks, of which rank r belongs to number r % copies, keeps all parameters and gathers them on its own. The
    parameters of `optimizer` are replaced by the parts that this rank updates; bfloat16 and float16 ones have float32
    masters, which live in `home`. With `mirrored`, some ranks run the module on some microbatches, others on others.
    With a `decay`, there is an average of the weights.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        comm: Communicator,
        optimizer: torch.optim.Optimizer,
        home: Device,
        zero: int = 0,
        copies: int = 1,
        all_reduce: AllReduce | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        mirrored: bool = False,
        whole: bool = False,
        decay: float | None = None,
    ) -> None:
        self.named = list(parameters)
        named = trainable(self.named, optimizer)
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.fixed = [(name, p) for name, p in self.named if all(p is not one for _, one in named)]
        self._frozen = {name: p for name, p in self.named if not p.requires_grad}
        self.comm, self.optimizer = comm, optimizer
        self.zero = zero
        self.layout = plan_layout(self.parameters, comm, bucket_bytes, zero > 0 and whole)
        self._numbers = range(len(self.layout.buckets))
        self.gatherer: Gatherer | None = None
        self._flats: list[Tensor] = []
        self._spread: Callable[[int], Pending] | None = None
        if self.zero == 3:
            self._cut_up(copies)
        elif self.zero:  # so that ranks can give each other their parts
            self._flats = [self.layout.flatten(number, self.parameters) for number in self._numbers]
            for number, flat in enumerate(self._flats):
                self.layout.point(number, self.parameters, flat)
            self._spread = lambda number: self.comm.iall_gather_into(self._flats[number], self.layout.cuts[number])
        self._placing: Callable[[], AbstractContextManager[None]] = (
            comm.together if isinstance(home, Disk) else nullcontext
        )
        with self._placing():
            masters = [[*self._masters(number, home)] for number in self._numbers]
        self.in_place = not self.zero and all(master.target is None for some in masters for master in some)
        self.reducer: Reducer | LocalGradients
        if self.in_place and comm.size == 1:
            self.reducer = LocalGradients(self.parameters)
        else:
            self.reducer = Reducer(self.parameters, comm, self.layout, self.zero, all_reduce).attach()
        self.update = Update(optimizer, self.parameters, masters, home)
        self.average: WeightAverage | None = None if decay is None else WeightAverage(masters, decay, home)
        self.mirrored = mirrored
        self._copied = zero == 3 or any(master.target is not None for some in masters for master in some)
        self._know()
        self._places = [p.data_ptr() for p in self.parameters]
        self._hooked: list[bool] = []

    def _cut_up(self, copies: int) -> None:
        comm, layout = self.comm, self.layout
        together = comm.split(comm.rank % copies, comm.rank)
        cuts = tuple(cuts[::copies] for cuts in layout.cuts)
        self.gatherer = gatherer = Gatherer(self.parameters, replace(layout, cuts=cuts, rank=together.rank), together)
        self._flats = [gatherer.part(number) for number in self._numbers]
        if copies > 1:
            same = comm.split(comm.rank // copies, comm.rank)
            first = comm.rank // copies * copies
            parts = [[c - cuts[first] for c in cuts[first : first + copies + 1]] for cuts in layout.cuts]
            self._spread = lambda number: same.iall_gather_into(self._flats[number], parts[number])

    def _first(self, number: int) -> int:
        """Which element of a bucket is the first one of its flat parameters here."""
        return 0 if self.gatherer is None else self.gatherer.layout.own(number).start

    def _masters(self, number: int, home: Device) -> Iterator[Master]:
        everything = slice(0, self.layout.buckets[number].length)
        for segment in self.layout.segments(number, self.layout.own(number) if self.zero else everything):
            p = self.parameters[segment.member]
            if self.zero:
                begin = segment.offset - self._first(number)
                yield make_master(segment, p, self._flats[number][begin : begin + segment.stop - segment.start], home)
            else:
                master = make_master(segment, p, p.detach(), home)
                yield master if master.target is not None else Master(segment, p, None)

    def there_when_needed(self) -> AbstractContextManager[None]:
        """The context in which forward and backward find the parameters."""
        return nullcontext() if self.gatherer is None else there_together([self.gatherer])

    def _know(self) -> None:
        """Remember the values of parameters, so that changes of them show. PyTorch counts no writes to `p.data`."""
        self._versions, self._checksums = [p._version for p in self.parameters], self._sum_bits()

    def _sum_bits(self) -> Tensor:
        """A row of numbers for each parameter, by which writes to `p.data` show, if some copy would not see them."""
        return checksums(self.parameters if self.gatherer is None and (self._copied or self.mirrored) else ())

    def _written(self, why: str) -> str | None:
        """Which parameter was written to since `_know`, as far as PyTorch counts it, in words; None if none was."""
        each = zip(self.names, self.parameters, self._versions, strict=True)
        return next((f"{name} was changed {why}" for name, p, version in each if p._version != version), None)

    @property
    def _thawed(self) -> str | None:
        thawed = next((name for name, p in self._frozen.items() if p.requires_grad), None)
        if thawed is None:
            return None
        return (
            f"{thawed} is trained now, but was frozen when the engine was made: leave it as it was, and let "
            "engine.unfreeze() of all ranks say from when on it is trained"
        )

    def prepare(self, num_passes: int = 1, in_parts: bool = False) -> None:
        """Forget the gradients of the step before, and let hooks wait for whole ones of the step, of so many passes.

        `in_parts`: ranks may have parts of parameters. Raises Refusal for what would not reach all who step.
        """
        named = dict(zip(self.names, self.parameters, strict=True))
        problem = hook_on_gradient(named, isinstance(self.reducer, LocalGradients), num_passes, in_parts)
        if problem is not None:
            raise Refusal(problem)
        if self.gatherer is not None:
            self.gatherer.free()  # what an error in the last step left
            self.gatherer.freed = []  # what evaluations freed may have become their outputs
        if isinstance(self.reducer, Reducer):
            self._hooked = [defer_hooks(p, self.reducer) for p in self.parameters]
        if not self.in_place and len(self.optimizer.param_groups) != self.update.num_groups:
            raise Refusal(
                "the optimizer has other groups of parameters than when the engine was made: add them before, or train "
                "without ZeRO, low_precision_weights and offload"
            )
        for name, p, place in zip(self.names, self.parameters, () if self.in_place else self._places, strict=False):
            if p.numel() and p.data_ptr() != place:
                raise Refusal(
                    f"{name} has other memory than when the engine was made, as after `p.data = value` or "
                    "`model.to()`, but with ZeRO, low_precision_weights and offload the optimizer works on that: do so "
                    "before the engine is made, or write to it in place"
                )
        problem = self._written(OUTSIDE) if self._copied else None
        problem = problem or self._thawed
        if problem is not None:
            raise Refusal(problem)
        if not self._copied:
            self._know()
        self.reducer.prepare(accumulate=True)

    def unfreeze(self, names: Collection[str]) -> None:
        """Train parameters of these names from now on, which were frozen. All ranks do so, between two steps."""
        for i, (name, p) in enumerate(zip(self.names, self.parameters, strict=True)):
            if name in names and self._frozen.pop(name, None) is not None:
                p.requires_grad_(True)
                self.reducer.wake(i)

    def finish(self) -> str | None:
        """Wait until the gradients are complete. Collective.

        Returns why this rank refuses the step, such as for changes that not all ranks have seen; None if it does not.
        """
        problem = self._thawed if isinstance(self.reducer, Reducer) else None  # by the model as it ran
        if self._copied or self.mirrored:
            problem = problem or self._written(MEANWHILE)
            changed = (self._checksums != self._sum_bits()).any(1).nonzero().flatten().tolist()
            if problem is None and changed:
                problem = f"{self.names[changed[0]]} was changed {OUTSIDE if self._copied else MEANWHILE}"
        if self.reducer.finish(self._hooked):
            self._hooked, problem = [], problem or UNLIKE_HOOKS
        if problem is None and self.gatherer is not None:
            problem = self.gatherer.kept()
        return problem

    def call_hooks(self) -> None:
        """Call the hooks on the gradients of parameters. Collective."""
        if any(self._hooked):

            def changed(i: int, gradient: Tensor) -> Tensor:
                return call_hooks(self.names[i], self.parameters[i], gradient) if self._hooked[i] else gradient

            with torch.no_grad():
                self.reducer.change(changed)

    @contextmanager
    def one_pass(self, last: bool) -> Iterator[None]:
        """The context of one backward pass; all ranks make as many."""
        self.reducer.begin_pass(last)
        yield
        self.reducer.end_pass()

    def squares(self) -> list[Tensor]:
        """This rank's term of the square of the gradient's norm, which is a sum over all ranks."""
        return self.reducer.squares() if self.zero or self.comm.rank == 0 else []

    def hand_out(self, factor: float) -> None:
        """Give the optimizer this rank's gradients, times `factor`."""
        if self.in_place:
            self.reducer.scale(factor)
            return
        for number in self._numbers:
            self._hand_out(number, factor)

    def _hand_out(self, number: int, factor: float) -> None:
        assert isinstance(self.reducer, Reducer)
        if number in self.reducer.idle:
            return
        first = self.layout.own(number).start if self.zero else 0
        self.update.hand_out(number, self.reducer.owned(number), first, self.reducer.used, factor)

    def step(self, factor: float | None) -> None:
        """Step on this rank's part by its gradient times `factor`, and share the new values. Collective.

        None: the gradients were handed out already, and not only those of the bucket that is worked on.
        """
        if self.in_place and factor is not None:  # beside another group that is not
            self.hand_out(factor)
            factor = None

        def update(number: int) -> None:
            if factor is not None:
                self._hand_out(number, factor)
            self.update.step(number, keep=self.in_place)

        self._share(update, but=self.reducer.idle)

    def change_gradients(self, hook: GradientHook, scale: float) -> None:
        """Let `hook(name, gradient)` change the whole gradient of each parameter, which is `scale` times as large here.

        Collective. Parameters come in the model's order; hooks that draw random numbers draw the same on all ranks.
        """

        def changed(member: int, gradient: Tensor) -> Tensor:
            seen = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / scale
            return ask(hook, self.names[member], seen) * scale

        with torch.no_grad():
            self.reducer.change(changed)

    def shards(self) -> Iterator[Shard]:
        """The shards of this rank; those of all ranks are each parameter once, without ZeRO too."""
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for number, masters in enumerate(self.update.masters):
            masters_of = {master.segment.member: master for master in masters}
            for segment in self.layout.segments(number, self.layout.own(number)):
                master = masters_of[segment.member]
                own = slice(segment.start - master.segment.start, segment.stop - master.segment.start)
                known = self.optimizer.state.get(master.value, {})
                known = known | ({} if self.average is None else self.average.of(master))
                state = {key: x.reshape(-1)[own] if is_like(x, master) else x for key, x in known.items()}
                value = master.value.detach().reshape(-1)[own]
                yield Shard(self.names[segment.member], segment.start, value, state, groups.get(id(master.value)))
        for name, p in zip(self.names, self.parameters, strict=True):
            if self.comm.rank == 0 and not p.numel():  # nobody owns an element of it
                yield Shard(name, 0, p.detach().reshape(-1), {}, groups.get(id(p)))
        for name, p in self.fixed if self.comm.rank == 0 else ():
            yield Shard(name, 0, p.detach().reshape(-1))

    def swap(self) -> None:
        """The weights and their average change places. Collective."""
        if self.average is not None:
            self.update.wait()
            with self._placing():
                self.average.swap()
            self._share(self.update.publish)

    def _share(self, update: Callable[[int], None], but: Collection[int] = ()) -> None:
        """Update all buckets `but` these, and bring the new values to those who do not own them. Collective."""
        spreading = []
        with self._placing():
            for number in self._numbers:
                if number in but:
                    continue
                update(number)
                if self._spread is not None:
                    spreading.append(self._spread(number))
        Pending.all(self.comm.node, spreading).wait()
        self._know()

    def gradient_shards(self) -> Iterator[tuple[str, BucketSegment, Tensor | None]]:
        """The gradient of what this rank owns, after a step; None for a parameter that had none."""
        for number in self._numbers:
            own = self.layout.own(number)
            for segment in self.layout.segments(number, own):
                found = None
                p = self.parameters[segment.member]
                if self.reducer.used[segment.member] and isinstance(self.reducer, Reducer) and self.zero:
                    begin = segment.offset - own.start
                    found = self.reducer.owned(number)[begin : begin + segment.stop - segment.start]
                elif self.reducer.used[segment.member]:
                    gradient = p.grad
                    if isinstance(self.reducer, Reducer) and not self.in_place:  # the optimizer had a copy of it
                        begin = segment.offset - segment.start
                        gradient = seen_as(self.reducer.owned(number)[begin : begin + p.numel()], p)
                    found = None if gradient is None else gradient.reshape(-1)[segment.start : segment.stop]
                yield self.names[segment.member], segment, found
        for member, p in enumerate(self.parameters):
            if self.comm.rank == 0 and not p.numel():  # nobody owns an element of it
                yield (
                    self.names[member],
                    BucketSegment(member, 0, 0, 0),
                    p.detach() if self.reducer.used[member] else None,
                )

    @torch.no_grad()
    def load(self, read: ReadShard) -> None:
        """Take masters and the optimizer's state from `read(name, start, stop)`, and share them. Collective.

        It gives the values of these elements, flat, and the optimizer's state as in a Shard: {} before the first step.
        """
        self.update.wait()
        for name, p in self.fixed:
            if p.numel():
                p.copy_(read(name, 0, p.numel())[0].view(p.shape))
        for masters in self.update.masters:
            for master in masters:
                segment = master.segment
                value, state = read(self.names[segment.member], segment.start, segment.stop)
                master.value.copy_(value.view(master.value.shape))
                average = state.pop(SLOT, None)
                if self.average is not None:
                    self.average.load(master, average)
                self.optimizer.state[master.value] = {
                    key: self.update.receive(master, key, found, value.dtype) for key, found in state.items()
                }
        self._share(self.update.publish)
