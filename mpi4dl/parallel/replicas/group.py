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
from mpi4dl.parallel.replicas.buckets import BUCKET_BYTES, Shard, Span, State, seen_as
from mpi4dl.parallel.replicas.gathering import Gatherer
from mpi4dl.parallel.replicas.optimizer_traits import hook_on_gradient
from mpi4dl.parallel.replicas.reducer import AllReduce, Reducer, plan_layout
from mpi4dl.parallel.replicas.update import Disk, Home, Portion, Update, is_like, make_piece

# Gradients of parameters that one rank holds alone: they stay where autograd adds them up, and nothing is summed.
#
# A stage of a pipeline without tiles and replicas has such parameters. See `reducer` for those of several ranks.


class Alone:
    """The gradients of `parameters`, as a Reducer of one rank has them, without its hooks, buckets and copies.

    `prepare()` before backward, `finish()` after it; passes in between add up. Then `used` says which parameters have
    a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.used: list[bool] = []
        self.idle: set[int] = set()  # no bucket is, as there are none

    def prepare(self, accumulate: bool = True) -> None:
        """Forget the gradients of the step before. Passes add up either way."""
        for p in self.parameters:
            p.grad = None

    def wake(self, i: int) -> None:
        """Autograd adds up the gradient of a parameter that is trained from now on like any other."""

    def begin_pass(self, last: bool) -> None:
        """Passes differ in nothing."""

    def end_pass(self) -> None:
        """Finish the sums of a pass."""

    def finish(self, hooked: Sequence[bool] = ()) -> bool:
        """Hooks have seen all that there is, whichever there are."""
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

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def squares(self) -> list[Tensor]:
        """The sum of the squares of the gradients, if there are any."""
        gradients = [gradient for gradient in self._gradients() if gradient.numel()]
        if not gradients:
            return []
        return [torch.stack(torch._foreach_norm(gradients)).double().square().sum()]

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        if factor != 1.0 and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, factor)

    def clamp(self, limit: float) -> None:
        """Limit each element of the gradients."""
        for gradient in self._gradients():
            gradient.clamp_(-limit, limit)

    def change(self, by: Callable[[int, Tensor], Tensor]) -> None:
        """Replace each gradient by `by(i, gradient)`, from the first parameter on."""
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                p.grad.copy_(by(i, p.grad))


# Hooks on the gradients of parameters: called when these are whole, not by autograd, which has one rank's part.
#
# backward    autograd calls p's hooks: each is replaced by one that does nothing while a reducer collects
# finish      the gradient is summed over all ranks that hold p
# afterwards  the hooks of `register_hook`, in their order, then those of `register_post_accumulate_grad_hook`


class WaitingHook:
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


def postpone(parameter: nn.Parameter, reducer: Reducer) -> bool:
    """Let the hooks on a gradient wait for `call_hooks`; returns whether there are any. Handles still remove them."""
    found = [*_hooks_of(parameter)]
    for hooks, key, hook in found:
        hooks[key] = WaitingHook(hook.hook if isinstance(hook, WaitingHook) else hook, reducer)
    return bool(found)


def call_hooks(name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The whole gradient after the hooks. Raises Refusal if they change the parameter, or leave no gradient."""
    kept, version = parameter.grad, parameter._version
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
        if not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
            what = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise ValueError(
                f"a hook on the gradient of {name}, of shape {tuple(parameter.shape)}, returned {what}: return a "
                "tensor of the same shape, or None"
            )
    return gradient


# An exponential moving average of what a rank's optimizer works on, for evaluations: the EMA of weights.
#
# after a step   average = decay * average + (1 - decay) * weights       element by element, so on parts too
# evaluation     weights <-> average ... average <-> weights             changed places; owners share as after a step

SLOT = "weight_average"  # as which checkpoints have it, beside the state of the optimizer


class Average:
    """The averages of pieces of parameters, which live in `home`.

    As torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay), the first update copies.
    """

    def __init__(self, pieces: Iterable[Sequence[Portion]], decay: float, home: Home) -> None:
        self.decay, self.home = decay, home
        self._pieces = [piece for some in pieces for piece in some]
        self._of: dict[int, Tensor] = {}  # by the id of a piece's value

    @property
    def values(self) -> list[Tensor]:
        """The averages that there are."""
        return [*self._of.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step that was made."""
        known = [piece for piece in self._pieces if id(piece.value) in self._of]
        for piece in self._pieces:
            if id(piece.value) not in self._of:
                self._of[id(piece.value)] = self.home.place(piece.value.detach().clone())
        if known:
            averages = [self._of[id(piece.value)] for piece in known]
            torch._foreach_lerp_(averages, [piece.value.detach() for piece in known], 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """The weights become the average, and the average the weights; nothing happens before the first update."""
        for piece in self._pieces:
            if id(piece.value) in self._of:
                average = self._of[id(piece.value)]
                weights = piece.value.detach().clone()
                piece.value.copy_(average)
                average.copy_(weights)

    def of(self, piece: Portion) -> dict[str, Tensor]:
        """The average of a piece by `SLOT`, if there is one yet."""
        found = self._of.get(id(piece.value))
        return {} if found is None else {SLOT: found}

    @torch.no_grad()
    def load(self, piece: Portion, value: Tensor | None) -> None:
        """Go on from an average, or, without one, begin with the next update."""
        if value is None:
            self._of.pop(id(piece.value), None)
        else:
            like = torch.empty_like(piece.value)
            self._of[id(piece.value)] = self.home.place(like.copy_(value.to(like.device).view(like.shape)))


ReadShard = Callable[[str, int, int], tuple[Tensor, State]]
GradientHook = Callable[[str, Tensor], Tensor | None]


def learners(
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
    if not isinstance(result, Tensor) or result.shape != gradient.shape:
        what = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"gradient_hook got the gradient of {name}, of shape {tuple(gradient.shape)}, but returned {what}: return "
            "a tensor of the same shape, or None"
        )
    return result


class ReplicaGroup:
    """The replicas of some `parameters`, by name, which the ranks of `comm` hold with the same values. Collective.

    That is what `learners` says. All others stay as they are.

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
        home: Home,
        zero: int = 0,
        copies: int = 1,
        all_reduce: AllReduce | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        mirrored: bool = False,
        whole: bool = False,
        decay: float | None = None,
    ) -> None:
        self.named = list(parameters)
        named = learners(self.named, optimizer)
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self._fixed = [(name, p) for name, p in self.named if all(p is not one for _, one in named)]
        self._frozen = {name: p for name, p in self.named if not p.requires_grad}
        self.comm, self.optimizer = comm, optimizer
        self.zero = zero
        self.layout = plan_layout(self.parameters, comm, bucket_bytes, zero > 0 and whole)
        self.gatherer: Gatherer | None = None
        self._flats: list[Tensor] = []
        self._spread: Callable[[int], Pending] | None = None
        if self.zero == 3:
            self._cut_up(copies)
        elif self.zero:
            self._flatten()
        self._placing: Callable[[], AbstractContextManager[None]] = (
            comm.together if isinstance(home, Disk) else nullcontext
        )
        with self._placing():
            pieces = [[*self._pieces(number, home)] for number in range(len(self.layout.buckets))]
        self.in_place = not self.zero and all(piece.target is None for some in pieces for piece in some)
        self.reducer: Reducer | Alone
        if self.in_place and comm.size == 1:
            self.reducer = Alone(self.parameters)
        else:
            self.reducer = Reducer(self.parameters, comm, self.layout, self.zero, all_reduce).attach()
        self.update = Update(optimizer, self.parameters, pieces, home)
        self.average: Average | None = None if decay is None else Average(pieces, decay, home)
        self.mirrored = mirrored
        self._copied = zero == 3 or any(piece.target is not None for some in pieces for piece in some)
        self._versions = self._count_changes()
        self._hooked: list[bool] = []

    @property
    def fixed(self) -> list[str]:
        """Names of those that nothing here will ever train."""
        return [name for name, _ in self._fixed]

    def _flatten(self) -> None:
        """Lay the parameters of a bucket side by side, so that ranks can give each other their parts."""
        for number, bucket in enumerate(self.layout.buckets):
            like = self.parameters[bucket.members[0]]
            flat = torch.empty(bucket.length, dtype=like.dtype, device=like.device)
            for span in self.layout.spans(number):
                p = self.parameters[span.member]
                flat[span.place] = p.detach().reshape(-1)
                p.data = flat[span.place].view(p.shape)
            self._flats.append(flat)
        self._spread = lambda number: self.comm.iall_gather_into(self._flats[number], self.layout.cuts[number])

    def _cut_up(self, copies: int) -> None:
        comm, layout = self.comm, self.layout
        together = comm.split(comm.rank % copies, comm.rank)
        cuts = tuple(cuts[::copies] for cuts in layout.cuts)
        self.gatherer = gatherer = Gatherer(self.parameters, replace(layout, cuts=cuts, rank=together.rank), together)
        self._flats = [gatherer.part(number) for number in range(len(layout.buckets))]
        if copies > 1:
            same = comm.split(comm.rank // copies, comm.rank)
            first = comm.rank // copies * copies
            parts = [[c - cuts[first] for c in cuts[first : first + copies + 1]] for cuts in layout.cuts]
            self._spread = lambda number: same.iall_gather_into(self._flats[number], parts[number])

    def _first(self, number: int) -> int:
        """Which element of a bucket is the first one of its flat parameters here."""
        return 0 if self.gatherer is None else self.gatherer.layout.own(number).start

    def _pieces(self, number: int, home: Home) -> Iterator[Portion]:
        everything = slice(0, self.layout.buckets[number].length)
        for span in self.layout.spans(number, self.layout.own(number) if self.zero else everything):
            p = self.parameters[span.member]
            if self.zero:
                begin = span.offset - self._first(number)
                yield make_piece(span, p, self._flats[number][begin : begin + span.stop - span.start], home)
            else:
                piece = make_piece(span, p, p.detach(), home)
                yield piece if piece.target is not None else Portion(span, p, None)

    def there_when_needed(self) -> AbstractContextManager[None]:
        """The context in which forward and backward find the parameters."""
        return nullcontext() if self.gatherer is None else self.gatherer.there_when_needed()

    def _count_changes(self) -> list[int]:
        """How often each parameter was written to, as far as PyTorch counts it."""
        return [p._version for p in self.parameters]

    def _refuse_changes(self, since: list[int], why: str) -> None:
        now = zip(self.names, since, self._count_changes(), strict=True)
        changed = next((name for name, before, after in now if before != after), None)
        if changed is not None:
            raise Refusal(f"{changed} was changed {why}")

    def prepare(self, num_passes: int = 1, in_parts: bool = False) -> None:
        """Forget the gradients of the step before, and let hooks wait for whole ones of the step, of so many passes.

        `in_parts`: ranks may have parts of parameters. Raises Refusal for what would not reach all who step.
        """
        named = dict(zip(self.names, self.parameters, strict=True))
        problem = hook_on_gradient(named, isinstance(self.reducer, Alone), num_passes, in_parts)
        if problem is not None:
            raise Refusal(problem)
        if isinstance(self.reducer, Reducer):
            self._hooked = [postpone(p, self.reducer) for p in self.parameters]
        if not self.in_place and len(self.optimizer.param_groups) != self.update.num_groups:
            raise Refusal(
                "the optimizer has other groups of parameters than when the engine was made: add them before, or train "
                "without ZeRO, low_precision_weights and offload"
            )
        if self._copied:
            self._refuse_changes(
                self._versions,
                "outside of the optimizer, which with ZeRO 3, low_precision_weights or offload works on values of its "
                "own: change it before the engine is made, or train without these",
            )
        thawed = next((name for name, p in self._frozen.items() if p.requires_grad), None)
        if thawed is not None:
            raise Refusal(
                f"{thawed} is trained now, but was frozen when the engine was made: leave it as it was, and let "
                "engine.unfreeze() of all ranks say from when on it is trained"
            )
        self._versions = self._count_changes()
        self.reducer.prepare(accumulate=True)

    def unfreeze(self, names: Collection[str]) -> None:
        """Train parameters of these names from now on, which were frozen. All ranks do so, between two steps."""
        for i, (name, p) in enumerate(zip(self.names, self.parameters, strict=True)):
            if name in names and self._frozen.pop(name, None) is not None:
                p.requires_grad_(True)
                self.reducer.wake(i)

    def finish(self) -> bool:
        """Wait until the gradients are complete. Collective. Raises Refusal for changes that not all have seen.

        Returns whether ranks have hooks on the gradients of different parameters, which are not called then.
        """
        if self._copied or self.mirrored:
            self._refuse_changes(
                self._versions,
                "while the model ran, which with ZeRO 3, low_precision_weights, offload or bidirectional not every "
                "copy of it sees: train without these",
            )
        unlike = self.reducer.finish(self._hooked)
        self._hooked = [] if unlike else self._hooked
        return unlike

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
        for number in range(len(self.layout.buckets)):
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
        spreading = []
        with self._placing():
            for number in range(len(self.layout.buckets)):
                if number in self.reducer.idle:
                    continue
                if factor is not None:
                    self._hand_out(number, factor)
                self.update.step(number, keep=self.in_place)
                if self._spread is not None:
                    spreading.append(self._spread(number))
        Pending.all(self.comm.node, spreading).wait()
        self._versions = self._count_changes()

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
        for number, pieces in enumerate(self.update.pieces):
            pieces_of = {piece.span.member: piece for piece in pieces}
            for span in self.layout.spans(number, self.layout.own(number)):
                piece = pieces_of[span.member]
                own = slice(span.start - piece.span.start, span.stop - piece.span.start)
                state = {
                    key: value.reshape(-1)[own] if is_like(value, piece) else value
                    for key, value in self._state_of(piece).items()
                }
                value = piece.value.detach().reshape(-1)[own]
                yield Shard(self.names[span.member], span.start, value, state, groups.get(id(piece.value)))
        for name, p in zip(self.names, self.parameters, strict=True):
            if self.comm.rank == 0 and not p.numel():  # nobody owns an element of it
                yield Shard(name, 0, p.detach().reshape(-1), {}, groups.get(id(p)))
        for name, p in self._fixed if self.comm.rank == 0 else ():
            yield Shard(name, 0, p.detach().reshape(-1))

    def _state_of(self, piece: Portion) -> State:
        return self.optimizer.state.get(piece.value, {}) | ({} if self.average is None else self.average.of(piece))

    def swap(self) -> None:
        """The weights and their average change places. Collective."""
        if self.average is not None:
            with self._placing():
                self.average.swap()
            self._share()

    def _share(self) -> None:
        """Bring new values to the model, and to those who do not own them. Collective."""
        spreading = []
        for number in range(len(self.layout.buckets)):
            self.update.publish(number)
            if self._spread is not None:
                spreading.append(self._spread(number))
        Pending.all(self.comm.node, spreading).wait()
        self._versions = self._count_changes()

    def gradient_shards(self) -> Iterator[tuple[str, Span, Tensor | None]]:
        """The gradient of what this rank owns, after a step; None for a parameter that had none."""
        for number in range(len(self.layout.buckets)):
            own = self.layout.own(number)
            for span in self.layout.spans(number, own):
                found = None
                p = self.parameters[span.member]
                if self.reducer.used[span.member] and isinstance(self.reducer, Reducer) and self.zero:
                    begin = span.offset - own.start
                    found = self.reducer.owned(number)[begin : begin + span.stop - span.start]
                elif self.reducer.used[span.member]:
                    gradient = p.grad
                    if isinstance(self.reducer, Reducer) and not self.in_place:  # the optimizer had a copy of it
                        begin = span.offset - span.start
                        gradient = seen_as(self.reducer.owned(number)[begin : begin + p.numel()], p)
                    found = None if gradient is None else gradient.reshape(-1)[span.start : span.stop]
                yield self.names[span.member], span, found
        for member, p in enumerate(self.parameters):
            if self.comm.rank == 0 and not p.numel():  # nobody owns an element of it
                yield self.names[member], Span(member, 0, 0, 0), p.detach() if self.reducer.used[member] else None

    @torch.no_grad()
    def load(self, read: ReadShard) -> None:
        """Take masters and the optimizer's state from `read(name, start, stop)`, and share them. Collective.

        It gives the values of these elements, flat, and the optimizer's state as in a Shard: {} before the first step.
        """
        for name, p in self._fixed:
            if p.numel():
                p.copy_(read(name, 0, p.numel())[0].view(p.shape))
        for pieces in self.update.pieces:
            for piece in pieces:
                span = piece.span
                value, state = read(self.names[span.member], span.start, span.stop)
                piece.value.copy_(value.view(piece.value.shape))
                average = state.pop(SLOT, None)
                if self.average is not None:
                    self.average.load(piece, average)
                self.optimizer.state[piece.value] = {
                    key: self.update.receive(piece, key, found, value.dtype) for key, found in state.items()
                }
        self._share()
