"""All replica groups of a rank: those who hold the same values of parameters are a group.

They are all ranks of a stage, those of several stages that share parameters, or those with one part of what is cut.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.replicas.buckets import Shard, State
from mpi4dl.parallel.replicas.gathering import there_together
from mpi4dl.parallel.replicas.group import GradientHook, ReadShard, ReplicaGroup, ask
from mpi4dl.parallel.replicas.optimizer_traits import StepHooks, family, is_replaced, refuse_step_by_hand
from mpi4dl.parallel.replicas.reducer import sums_on_host


class Elements(NamedTuple):
    """Elements of a part from number `first` on that are together in the whole, as its elements [start, stop)."""

    first: int
    start: int
    stop: int


class PartsOf(NamedTuple):
    """The ranks of `comm` have all parts of parameters, each another one; `shapes` are those of whole ones, by name."""

    comm: Communicator
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


ElementsOf = Callable[[str, int, int], Iterator[Elements]]  # of elements from .. to of this rank's part of a parameter


class ReplicaGroups:
    """Each with the numbers of its stages; `runs` says where elements of what a rank has are in the whole parameter.

    Groups are in an order in which all ranks come to those they have in common. Stages that share parameters pass
    backward at different times, so the gradients of such parameters are summed after the last pass of all stages.
    """

    def __init__(self, groups: Iterable[tuple[tuple[int, ...], ReplicaGroup]], runs: ElementsOf) -> None:
        self._groups, self._runs = list(groups), runs

    def __iter__(self) -> Iterator[ReplicaGroup]:
        return (group for _, group in self._groups)

    def enter(self, stack: ExitStack, stage: int, at_once: bool, last: bool | None) -> None:
        """Enter the contexts of an action of a stage.

        `at_once`: ranks may do different things in it. `last`: it is a backward pass, and whether it is the last one.
        """
        gatherers = [group.gatherer for of, group in self._groups if stage in of and group.gatherer is not None]
        if gatherers:
            stack.enter_context(there_together(gatherers, at_once))
        for of, group in self._groups:
            if last is not None and of == (stage,):
                stack.enter_context(group.one_pass(last))

    def cannot_unfreeze(self, names: Collection[str]) -> str | None:
        """Why parameters of these names cannot be trained from now on; None if they can."""
        fixed = next((name for group in self for name, _ in group.fixed if name in names), None)
        if fixed is None:
            return None
        return (
            f"{fixed} cannot be unfrozen, as the optimizer does not have it: make it of all that is trained later too"
        )

    def finish(self) -> str | None:
        """Wait until all gradients are complete. Returns why this rank refuses the step; None if it does not."""
        problem = None
        for stages, group in self._groups:
            with group.one_pass(last=True) if len(stages) > 1 else nullcontext():
                pass
            problem = group.finish() or problem
        return problem

    def call_hooks(self, alike: Callable[[Any], Any]) -> None:
        """Within `alike(stages)`, call the hooks on the gradients of each group's parameters."""
        for stages, group in self._groups:
            with alike(stages):
                group.call_hooks()

    def squares(self, num_stages: int, *totals: Tensor) -> list[float]:
        """Of each stage what adds up over ranks to the square of the gradient's norm; then the totals. On the host."""
        sums = sums_on_host([*([total] for total in totals), *(group.squares() for group in self)])
        last, own = sums[: len(totals)], sums[len(totals) :]
        found = [0.0] * num_stages
        for (stages, _), square in zip(self._groups, own, strict=True):
            found[stages[0]] += square
        return [*found, *last]

    def whole_in(self, stage: int, size: int) -> list[Tensor]:
        """The parameters that each of the ranks of a stage, so many, has all of."""
        groups = [group for of, group in self._groups if of == (stage,) and group.comm.size == size]
        return [p for group in groups if group.gatherer is None for _, p in group.named]

    def change_gradients(
        self, hook: GradientHook, scale: float, alike: Callable[[Any], Any], across: Sequence[PartsOf | None]
    ) -> None:
        """Within `alike(stages)`, let a hook change the gradients of each group.

        Where a group has parts of parameters, `across` says who has the others: all of them see the whole gradient.
        """
        for (stages, group), others in zip(self._groups, across, strict=True):
            with alike(stages):
                if others is None:
                    group.change_gradients(hook, scale)
                else:
                    used = torch.tensor(group.reducer.used, dtype=torch.uint8)
                    group.reducer.use(others.comm.all_reduce(used, "max").bool().tolist())
                    group.change_gradients(partial(self._change_whole, hook, others), scale)

    def _change_whole(self, hook: GradientHook, others: PartsOf, name: str, part: Tensor) -> Tensor:
        """This part of a gradient after a hook that sees the whole."""
        whole = part.new_zeros(others.shapes[name][0])
        flat, own = whole.view(-1), part.reshape(-1)
        runs = [*self._runs(name, 0, part.numel())]
        for first, start, stop in runs:
            flat[start:stop] = own[first : first + stop - start]
        flat = ask(hook, name, others.comm.all_reduce(whole)).reshape(-1)
        return torch.cat([flat[start:stop] for _, start, stop in runs]).view(part.shape) if runs else part

    def problems(self) -> Iterator[str | None]:
        """Of each group, which parameter is not the same on all of its ranks. Collective."""
        for group in self:
            yield disagreement(group.comm, dict(group.named) if group.gatherer is None else {})

    def shards(self) -> Iterator[Shard]:
        """Of whole parameters what this rank owns."""
        for group in self:
            for shard in group.shards():
                for first, start, stop in self._runs(shard.name, shard.start, shard.stop):
                    some, like = slice(first, first + stop - start), shard.value
                    state = {key: value[some] if _is_flat(value, like) else value for key, value in shard.state.items()}
                    yield shard._replace(start=start, value=like[some], state=state)

    def gradients(self) -> Iterator[Shard]:
        """The same of gradients, where there are any."""
        for group in self:
            for name, segment, value in group.gradient_shards():
                for first, start, stop in self._runs(name, segment.start, segment.stop) if value is not None else ():
                    yield Shard(name, start, value[first : first + stop - start])  # type: ignore[index]

    def load(self, read: ReadShard) -> None:
        """Take parameters, and the optimizer's state, from `read(name, start, stop)` of the whole ones. Collective."""

        def of_part(name: str, start: int, stop: int) -> tuple[Tensor, State]:
            found = [read(name, run.start, run.stop) for run in self._runs(name, start, stop)]
            if len(found) == 1:
                return found[0]
            value, state = found[0]
            together = {
                key: torch.cat([each[key] for _, each in found]) if _is_flat(known, value) else known
                for key, known in state.items()
            }
            return torch.cat([each for each, _ in found]), together

        for group in self:
            group.load(of_part)


def _is_flat(value: Any, like: Tensor) -> bool:
    """Whether a value of the optimizer's state has one element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == like.numel()


def digest(value: Tensor) -> str:
    """Equal for equal bits, shapes and dtypes."""
    found = hashlib.sha256(f"{tuple(value.shape)} {value.dtype}".encode())
    copied = value.detach().clone(memory_format=torch.contiguous_format)  # nobody could resize what NumPy has seen
    found.update(copied.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def disagreement(comm: Communicator, values: Mapping[str, Tensor]) -> str | None:
    """Which of these values differ between the ranks of `comm`, in words; None if all are alike. Collective."""
    found = comm.all_gather_object({name: digest(value) for name, value in values.items()})
    wrong = [name for name in found[0] if any(other.get(name) != found[0][name] for other in found)]
    if not wrong:
        return None
    ranks = [rank for rank, other in enumerate(found) if any(other.get(name) != found[0][name] for name in wrong)]
    others = f" and {len(wrong) - 1} other values" if len(wrong) > 1 else ""
    return f"{wrong[0]}{others} on ranks {ranks} of the {comm.size} that hold them differ from those of the first"


# One step of the optimizer on all that a rank holds: at once, or bucket by bucket.

WHERE = "with ZeRO, several stages, low_precision_weights or offload"
INSTEAD = "pass gradient_hook to the engine, which sees each of them whole"
CHANGED = (
    "a step post-hook changes weights of which ranks have parts: change them in the model's forward, where its modules "
    "see whole ones, or train without `tensor` and `experts`"
)
GRADIENT = (Tensor.grad.__get__, Tensor.grad.__set__)  # type: ignore[union-attr]


class Stepping:
    """Steps of `optimizer` on the parameters of `groups`, which are this rank's of those of the ranks of `comm`.

    Its step hooks run once a step: before it, when all gradients are there, and after it, when all parameters are new
    on all ranks, also those that ZeRO 3 gathers. `partial`: this rank has some of the gradients, or parts of them.
    `cut`: the parameters of which it has parts; None, if no rank has.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ReplicaGroup],
        comm: Communicator,
        partial: bool,
        cut: Sequence[Tensor] | None = None,
    ) -> None:
        self.optimizer, self.groups, self.comm, self.partial, self.cut = optimizer, groups, comm, partial, cut
        self.at_once = all(group.in_place for group in groups)
        for each in () if self.at_once else family(optimizer):
            each.register_step_pre_hook(refuse_step_by_hand)

    @property
    def plain(self) -> bool:
        """Whether a step is just one of plain PyTorch."""
        return self.at_once and not self.partial

    @property
    def num_hooks(self) -> int:
        """How many step hooks run together on all ranks, which must have as many."""
        return 0 if self.plain else len(StepHooks(self.optimizer))

    def problem(self) -> str | None:
        """Why the optimizer cannot step as it is now; None if it can."""
        if not self.plain and is_replaced(self.optimizer):
            return (
                f"step() of the optimizer was replaced by another one, which {WHERE} would be called for parts: use "
                "register_step_pre_hook and register_step_post_hook"
            )
        return None

    def step(self, factor: float) -> None:
        """One step by the gradients times `factor`. Collective. Raises Refusal if a hook changes parts of gradients."""
        hooks = StepHooks(self.optimizer)
        at_once = self.at_once or hooks.look_first
        if at_once:
            for group in self.groups:
                group.hand_out(factor)
        if self.plain:
            self.optimizer.step()
            self._average()
            return
        if hooks.look_first:
            seen = self._gradients()
            with _Elsewhere(self.groups, self.optimizer):
                hooks.before()
            changed = self.partial and seen != self._gradients()
            self.comm.agree(
                f"a step pre-hook changes gradients, of which a rank has some or parts {WHERE}: {INSTEAD}"
                if changed
                else None
            )
        with hooks.silent():
            if self.at_once:
                self.optimizer.step()
            else:
                for group in self.groups:
                    group.step(None if at_once else factor)
        self._average()
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.there_when_needed())
            stack.enter_context(_Elsewhere(self.groups, self.optimizer))
            watched = self.cut if len(hooks) else None
            before = _numbers(watched or ())
            hooks.after()
            if watched is not None:
                self.comm.agree(CHANGED if before != _numbers(watched) else None)

    def _average(self) -> None:
        for group in self.groups:
            if group.average is not None:
                group.average.update()

    def _gradients(self) -> list[tuple[int, float, float]]:
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return _numbers(p.grad for p in parameters if p.grad is not None)


def _numbers(tensors: Iterable[Tensor]) -> list[tuple[int, float, float]]:
    """Which tensors there are, and numbers by which changed ones can be told."""
    return [(id(x), float(x.detach().double().sum()), float(x.detach().norm())) for x in tensors]


class _Elsewhere(TorchFunctionMode):
    """Refuses to look for gradients at parameters of the model instead of which the optimizer has others."""

    def __init__(self, groups: Sequence[ReplicaGroup], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._without = {id(p) for group in groups for p in group.parameters} - stepped

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in GRADIENT and id(args[0]) in self._without:
            raise Refusal(
                "a step hook of the optimizer asks for the gradient of one of the model's parameters, of which a rank "
                f"has parts elsewhere {WHERE}: {INSTEAD}"
            )
        return function(*args, **(kwargs or {}))
