"""How an optimizer steps, found by trying: copies of it step on small parameters, and what moves is compared.

together    [ a b c d ]          as `step()` of plain PyTorch does
in parts    [ a|a|a b|b|b .. ]   on parts of parameters: ZeRO, if elements do not look at each other
in turns    [ a ] [ b ] [ c ] .. on one bucket after the other: ZeRO, offload, masters
apart       [ a . c . ]          on ranks of their own: ZeRO, stages
            [ . b . d ]
"""

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from mpi4dl._randomness import forked
from mpi4dl.comm.refusal import NOT_TAKEN, is_of_the_machine
from mpi4dl.geometry import even_cuts
from mpi4dl.parallel.replicas.buckets import Span
from mpi4dl.parallel.replicas.reducer import Reducer
from mpi4dl.parallel.replicas.update import NAMES, Device, Update, make_piece, options_of

# Hooks of `optimizer.step()` run once a step, though ranks make it of many: bucket by bucket, each on its part.

HOOKS = "_optimizer_"  # attributes of an optimizer that begin so hold hooks
BEFORE, AFTER = f"{HOOKS}step_pre_hooks", f"{HOOKS}step_post_hooks"
OF_ALL_BEFORE = torch_optimizer._global_optimizer_pre_hooks
OF_ALL_AFTER = torch_optimizer._global_optimizer_post_hooks


def family(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer, and those that it holds as wrappers do, such as the one within a Lookahead; the outermost first."""
    members = [optimizer]
    for member in members:
        values = [*vars(member).values()]
        values += [one for value in values if isinstance(value, list | tuple) for one in value]
        inner = (value for value in values if isinstance(value, torch.optim.Optimizer))
        members += [one for one in inner if all(one is not known for known in members)]
    return members


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the object has a `step` of its own, beside the one by which PyTorch's schedulers notice steps."""
    own = vars(optimizer).get("step")
    noticed = hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is type(optimizer).step
    return own is not None and not noticed


class StepHooks:
    """The hooks before and after the steps of an optimizer, and of those within it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._members = family(optimizer)

    def _of(self, which: str) -> list[tuple[torch.optim.Optimizer, Callable[..., Any]]]:
        common = OF_ALL_BEFORE if which == BEFORE else OF_ALL_AFTER
        found = []
        for member in self._members:
            own = vars(member).get(which, {})
            order = (common, own) if which == BEFORE else (own, common)
            found += [(member, hook) for hook in chain(*(hooks.values() for hooks in order))]
        return found

    def __len__(self) -> int:
        return len(self._of(BEFORE)) + len(self._of(AFTER))

    @property
    def look_first(self) -> bool:
        """Whether something is called before a step, which may look at gradients."""
        return bool(self._of(BEFORE))

    def before(self) -> None:
        for member, hook in self._of(BEFORE):
            hook(member, (), {})

    def after(self) -> None:
        for member, hook in self._of(AFTER):
            hook(member, (), {})

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within this context `step()` calls none of them."""
        own = [vars(member).get(which, {}) for member in self._members for which in (BEFORE, AFTER)]
        places: list[dict[int, Any]] = [OF_ALL_BEFORE, OF_ALL_AFTER, *own]
        kept = [dict(place) for place in places]
        for place in places:
            place.clear()
        try:
            yield
        finally:
            for place, hooks in zip(places, kept, strict=True):
                place.update(hooks)


# Some only limit what is large, some wait for some steps, some treat what has 128 rows and columns in another way.
# Some project what is nearly orthogonal to the weights.
FAINT, STRONG = 1e-3, 1e6
NUM_STEPS = 7
NUM_PARTS = 11  # each so short that its square has room, which some keep for a vector
LARGE, SMALL = (129, 130), (3, 4)
LEARNING_RATE = 0.1  # the optimizer's own may be 0 at the start of a schedule
TOLERANCE = 1e-9
Bucket = Sequence[Span]


class OptimizerTraits(NamedTuple):
    """How an optimizer steps; what could not be tried is not so, and `error` says why nothing could be.

    `elementwise`: a step on a part of a parameter is the part of a step on the whole. `separate`: the step of a
    parameter is the same without the others. `in_turns`: steps on some parameters after the others are a step on all.
    """

    elementwise: bool
    separate: bool
    in_turns: bool
    error: str = ""

    def problem(self, kind: str, turns: bool) -> str | None:
        """Why `kind` cannot step on the parameters of a stage, or if it `turns`, on one bucket after the other."""
        ways = "ZeRO, low_precision_weights and offload step on one bucket after the other: train without these"
        where = ways if turns else "ranks have stages of their own: use one stage"
        if self.error:
            return f"{kind} cannot be tried on parameters of other shapes ({self.error}), but {where}"
        if not self.separate:
            return f"{kind} steps by all parameters together, but {where}"
        if turns and not self.in_turns:
            return f"{kind} counts its steps for all parameters together, but {where}"
        return None


def manner_of(optimizer: torch.optim.Optimizer) -> OptimizerTraits:
    """Try copies of an optimizer, which stays as it is, and so do its parameters.

    Raises what says nothing of the optimizer, such as MemoryError; where ranks are to find the same, within `together`.
    """
    with warnings.catch_warnings(), forked():
        warnings.simplefilter("ignore")
        examples = _Examples(optimizer)
        try:
            plain = [_Trial(examples, gradients).step_together() for gradients in examples.series]
        except NOT_TAKEN as error:
            if is_of_the_machine(error):
                raise
            return OptimizerTraits(False, False, False, f"{type(error).__name__}: {error}")
        spans = [Span(i, 0, start.numel(), 0) for i, start in enumerate(examples.start)]
        parts = [part for span in spans for part in _cut(span)]
        in_parts = _is_like(plain, examples, [[parts]])
        in_turns = _is_like(plain, examples, [[[span] for span in spans]])
        apart = _is_like(plain, examples, [[spans[0::2]], [spans[1::2]]])
    return OptimizerTraits(in_parts, apart, in_turns)


def _cut(span: Span) -> list[Span]:
    cuts = even_cuts(span.stop, NUM_PARTS)
    return [Span(span.member, start, stop, 0) for start, stop in pairwise(cuts) if start < stop]


class _Moved(NamedTuple):
    """Where steps led: how far each parameter moved, its values, and the options of the groups."""

    moves: list[Tensor]
    values: list[Tensor]
    options: list[str]


def _is_like(plain: Sequence[_Moved], examples: "_Examples", ranks: Sequence[Sequence[Bucket]]) -> bool:
    """Whether steps on the buckets of some ranks lead where steps on all parameters together do."""
    for gradients, wanted in zip(examples.series, plain, strict=True):
        found: dict[int, Tensor] = {}
        for buckets in ranks:
            try:
                moved = _Trial(examples, gradients).step_on(buckets)
            except NOT_TAKEN as error:  # such as those for matrices alone, which refuse anything else
                if is_of_the_machine(error):
                    raise
                return False
            if moved.options != wanted.options:
                return False
            found |= {span.member: moved.moves[span.member] for bucket in buckets for span in bucket}
        for i, (move, value) in enumerate(zip(wanted.moves, wanted.values, strict=True)):
            rounding = 1e-14 * float(value.abs().max())
            if not torch.allclose(found[i], move, rtol=TOLERANCE, atol=rounding, equal_nan=True):
                return False
    return True


class _Examples:
    """Parameters for copies of an optimizer: for each group one parameter for each number of dims, two at least.

    `groups[i]` has their numbers, `models[n]` is the real parameter that one is like, None in a group that has none.
    They begin as `start`; each of the `series` has the gradients of some steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.models: list[Tensor | None] = []
        self.groups: list[list[int]] = []
        for group in optimizer.param_groups:
            kinds: list[Any] = [*{p.dim(): p for p in group["params"]}.values()] or [None]
            kinds *= 2 if len(kinds) == 1 else 1
            self.groups.append([*range(len(self.models), len(self.models) + len(kinds))])
            self.models += kinds
        draws = torch.Generator().manual_seed(0)
        self.start, *steps = (
            [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in self._shapes()]
            for _ in range(1 + NUM_STEPS)
        )
        faint = [[FAINT * g for g in step] for step in steps]
        strong = [[STRONG * _across(g, w) for g, w in zip(step, self.start, strict=True)] for step in steps]
        self.series = (faint, strong)

    def _shapes(self) -> Iterator[list[int]]:
        for group in self.groups:
            large = True
            for number in group:
                model = self.models[number]
                dims = 2 if model is None else model.dim()
                yield [*(LARGE if large and dims > 1 else SMALL), *[1] * dims][:dims]
                large = large and dims < 2

    def device(self, number: int) -> torch.device | None:
        model = self.models[number]
        return None if model is None else model.device


def _across(gradient: Tensor, weight: Tensor) -> Tensor:
    """The component of each row of a gradient orthogonal to that of the weight."""
    if gradient.dim() < 2:
        return gradient
    g, w = gradient.flatten(1), weight.flatten(1)
    return (g - w * ((g * w).sum(1, keepdim=True) / w.square().sum(1, keepdim=True))).view_as(gradient)


class _Trial:
    """A copy of an optimizer with parameters of its own, and the gradients of the steps that it is to make."""

    def __init__(self, examples: _Examples, gradients: Sequence[Sequence[Tensor]]) -> None:
        torch.default_generator.manual_seed(0)  # for optimizers that draw
        self.examples, self.gradients = examples, gradients
        self.parameters = [
            nn.Parameter(start.to(examples.device(i), copy=True)) for i, start in enumerate(examples.start)
        ]
        self.optimizer = _twin(examples, self.parameters)

    def _gradients(self) -> Iterator[list[Tensor]]:
        for step in self.gradients:
            yield [gradient.to(self.examples.device(i), copy=True) for i, gradient in enumerate(step)]

    def step_together(self) -> _Moved:
        for gradients in self._gradients():
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient
            self.optimizer.step()
        return self._moved()

    def step_on(self, buckets: Sequence[Bucket]) -> _Moved:
        """Steps on these buckets, by the way that ranks take in training."""
        home = Device()
        pieces = []
        for bucket in buckets:
            offset, some = 0, []
            for span in bucket:
                p = self.parameters[span.member]
                target = p.detach().reshape(-1)[span.start : span.stop]
                some.append(make_piece(span._replace(offset=offset), p, target, home))
                offset += span.stop - span.start
            pieces.append(some)
        update = Update(self.optimizer, self.parameters, pieces, home)
        used = [True] * len(self.parameters)
        for gradients in self._gradients():
            for number, bucket in enumerate(buckets):
                flat = [gradients[span.member].reshape(-1)[span.start : span.stop] for span in bucket]
                update.hand_out(number, torch.cat(flat), 0, used, 1.0)
                update.step(number)
        return self._moved()

    def _moved(self) -> _Moved:
        values = [p.detach() for p in self.parameters]
        moves = [value - start.to(value.device) for value, start in zip(values, self.examples.start, strict=True)]
        return _Moved(moves, values, [repr(options_of(group)) for group in self.optimizer.param_groups])


def _twin(examples: _Examples, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of the optimizer, and of those within it, for these parameters instead of their models.

    Its state for real parameters is fitted to these; it has no hooks. Raises what copying raises.
    """
    optimizer = examples.optimizer
    members = family(optimizer)
    # Wherever a copy would refer to a real parameter, it refers to the one like it, or to none that could change.
    memo: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0)) for g in optimizer.param_groups for p in g["params"]}
    alike = [(real, p) for real, p in zip(examples.models, parameters, strict=True) if real is not None]
    memo |= {id(real): p for real, p in alike}
    for member in members:
        if any(isinstance(value, nn.Module) for value in vars(member).values()):
            raise TypeError("it holds modules of the model")
        memo[id(member)] = object.__new__(type(member))
        if "state" in vars(member):
            memo[id(member.state)] = defaultdict(dict)
    for member in members:
        hooks = [name for name in vars(member) if name.startswith(HOOKS)]
        own = {name: value for name, value in vars(member).items() if name not in ("step", *hooks)}
        twin = memo[id(member)]
        vars(twin).update(copy.deepcopy(own, memo))
        vars(twin).update({name: OrderedDict() for name in hooks})
        for real, p in alike:
            if member.state.get(real):
                twin.state[p] = {key: _fitted(value, real, p) for key, value in member.state[real].items()}
    found: torch.optim.Optimizer = memo[id(optimizer)]
    for group, numbers in zip(found.param_groups, examples.groups, strict=True):
        group["params"] = [parameters[number] for number in numbers]
        if NAMES in group:
            group[NAMES] = [str(number) for number in numbers]
        lr = group.get("lr")
        if isinstance(lr, Tensor | float | int):
            group["lr"] = torch.full_like(lr, LEARNING_RATE) if isinstance(lr, Tensor) else LEARNING_RATE
    return found


def _fitted(value: Any, real: Tensor, likeness: Tensor) -> Any:
    """Some state of a real parameter as state of its likeness."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return copy.deepcopy(value)
    if value.shape != real.shape:
        raise ValueError(f"it begins with a state of shape {tuple(value.shape)} that is not the parameter's")
    flat = value.detach().reshape(-1)[: likeness.numel()]
    times = -(-likeness.numel() // flat.numel())
    return flat.repeat(times)[: likeness.numel()].view(likeness.shape).to(likeness.dtype)


# Why a model cannot be trained as it is with its optimizer: what would give other numbers than plain PyTorch.


def problem_with(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    num_holders: int = 1,
    num_passes: int = 1,
    in_parts: bool = False,
) -> str | None:
    """Why this optimizer cannot train these parameters, by name; None if it can.

    `num_holders` is how many ranks add up the gradient of a parameter, at most. It comes in `num_passes` backward
    passes, each of a microbatch. `in_parts`: ranks may have parts of parameters.
    """
    own = {id(p): p for p in parameters.values()}
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return f"{type(optimizer).__name__} computes the loss many times in a step: choose an optimizer that does not"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "SparseAdam takes sparse gradients alone, but ranks add them up as dense ones: choose torch.optim.Adam"
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        return (
            "the optimizer has parameters that the model does not have, as after it was passed to another engine: make "
            "a new one, of model.parameters()"
        )
    if any(p.untyped_storage().nbytes() < p.nbytes for p in own.values()):
        return "the model's parameters are not there: another engine has shared them out by ZeRO 3; build it again"
    if any(float(state.get("step", 1)) for p in own.values() if (state := optimizer.state.get(p))):
        return "the optimizer has made steps already: build the engine before the first step"
    overlap = _overlap(parameters)
    if overlap:
        return f"{overlap[0]} and {overlap[1]} are different parameters in the same memory: use one parameter for both"
    return hook_on_gradient(parameters, num_holders == 1, num_passes, in_parts)


def hook_on_gradient(
    parameters: Mapping[str, nn.Parameter], alone: bool, num_passes: int = 1, in_parts: bool = False
) -> str | None:
    """Why the hooks on the gradients of these parameters do not see what they should; None if they do.

    They see the sum over ranks at the end of a step, which is what a hook sees of a step of one backward pass; and all
    that autograd does, where a rank has the parameters `alone`.
    """
    for name, p in parameters.items():
        after: Iterable[object] = (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
        hooked = bool(p._backward_hooks) or any(not Reducer.is_hook(hook) for hook in after)
        if hooked and in_parts:
            return f"{name} has a hook on its gradient, but ranks have parts of parameters: remove it, or train without"
        if hooked and not alone and num_passes > 1:
            return (
                f"{name} has a hook on its gradient, which would have to see those of {num_passes} microbatches apart, "
                "but ranks add up those of all: remove it, and pass gradient_hook to the engine, which sees each "
                "gradient whole, or train with one of `microbatches`"
            )
    return None


def backward_hook_in(module: nn.Module, num_ranks: int) -> str | None:
    """Why the backward hooks of these modules, which so many ranks run together, see no whole gradients."""
    common = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    if num_ranks == 1:
        return None
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks or common:
            return (
                f"{name or type(module).__name__} has a backward hook, which would see the part of one rank: remove "
                "it, and call output.register_hook in a forward hook, which sees the whole gradient of the output"
            )
    return None


def _overlap(parameters: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """The names of two parameters that have elements in the same place."""
    found = [(p.data_ptr(), name, p) for name, p in parameters.items() if p.numel() and not p.is_meta]
    found.sort(key=lambda each: each[:2])
    end, last = 0, ""
    for start, name, p in found:
        if start < end:
            return last, name
        extent = sum(stride * (size - 1) for stride, size in zip(p.stride(), p.shape, strict=True)) + 1
        end, last = start + extent * p.element_size(), name
    return None
