"""Traits of an optimizer and its hooks: how it steps, and why it cannot train a model as it is."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn, optim
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from mpi4dl.comm import Refusal
from mpi4dl.parallel.replicas.reducer import Reducer

# Hooks of `optimizer.step()` run once a step, though ranks make it of many: bucket by bucket, each on its part.

BEFORE, AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
OF_ALL_BEFORE = torch_optimizer._global_optimizer_pre_hooks
OF_ALL_AFTER = torch_optimizer._global_optimizer_post_hooks


def family(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """An optimizer, and those that it holds as wrappers do, such as the one within a Lookahead; the outermost first."""
    members = [optimizer]
    for member in members:
        values = [*vars(member).values()]
        values += [one for value in values if isinstance(value, list | tuple) for one in value]
        inner = (value for value in values if isinstance(value, optim.Optimizer))
        members += [one for one in inner if all(one is not known for known in members)]
    return members


def is_replaced(optimizer: optim.Optimizer) -> bool:
    """Whether the object has a `step` of its own, beside the one by which PyTorch's schedulers notice steps."""
    own = vars(optimizer).get("step")
    noticed = hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is type(optimizer).step
    return own is not None and not noticed


def refuse_step_by_hand(optimizer: optim.Optimizer, *_: Any) -> None:
    """The hook on `optimizer.step()` where only an engine gives the optimizer gradients: the step would do nothing."""
    raise Refusal(
        f"step() of {type(optimizer).__name__} was called outside of engine.step(), but with ZeRO, "
        "low_precision_weights or offload it works on values of its own, which have no gradients there: call "
        "engine.step(), which also steps the optimizer"
    )


class StepHooks:
    """The user's hooks before and after the steps of an optimizer, and of those within it."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._members = family(optimizer)

    def _of(self, which: str) -> list[tuple[optim.Optimizer, Callable[..., Any]]]:
        common = OF_ALL_BEFORE if which == BEFORE else OF_ALL_AFTER
        found = []
        for member in self._members:
            own = vars(member).get(which, {})
            order = (common, own) if which == BEFORE else (own, common)
            found += [(member, hook) for each in order for hook in each.values() if hook is not refuse_step_by_hand]
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


# How an optimizer steps: what a rank may leave out of a step without another result for the rest.
#
# element      a step on a part of a parameter is that part of a step on the whole     ZeRO cuts parameters
# parameter    a step on a parameter is the same without all others                    ZeRO deals out whole parameters
# all          anything else, such as a limit for the norm of all gradients            neither ZeRO nor stages

StepUnit = Literal["element", "parameter", "all"]
STEP_UNITS: tuple[StepUnit, ...] = get_args(StepUnit)
OF_PYTORCH: dict[str, StepUnit] = {
    **dict.fromkeys("ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split(), "element"),
    **dict.fromkeys(("Adafactor", "Muon"), "parameter"),
}


def step_unit(optimizer: optim.Optimizer) -> StepUnit:
    """The smallest unit that the optimizer may step on alone, any number of times in a step of the whole.

    Known for torch.optim, and for subclasses that add a constructor alone. Others declare it as an attribute
    `step_unit`; without one it is "all". Raises ValueError if they declare something else.
    """
    declared: StepUnit | None = getattr(optimizer, "step_unit", None)
    kind, own = type(optimizer), set[str]()
    if declared is not None:
        if declared not in STEP_UNITS:
            raise ValueError(
                f"step_unit of {kind.__name__} is {declared!r}, but must be one of {', '.join(STEP_UNITS)}"
            )
        return declared
    for base in kind.__mro__:
        if vars(optim).get(base.__name__) is base and base.__name__ in OF_PYTORCH:
            inherited = inspect.unwrap(kind.step) is inspect.unwrap(base.step)  # PyTorch wraps it for each subclass
            return OF_PYTORCH[base.__name__] if inherited and own <= {"step"} else "all"
        own |= {name for name in vars(base) if not name.startswith("__")}
    return "all"


def problem_with_unit(optimizer: optim.Optimizer, unit: StepUnit, turns: bool, parts: str | None) -> str | None:
    """Why the optimizer, of this step unit, cannot step on what ranks have of the parameters; None if it can.

    `turns`: it steps on one bucket after the other. `parts`: by which option ranks have parts of parameters, if any.
    """
    kind = type(optimizer).__name__
    if unit == "all":
        where = (
            "ZeRO, low_precision_weights and offload step on one bucket after the other: train without these"
            if turns
            else "ranks have stages of their own: use one stage"
            if parts is None
            else f"under {parts} ranks have parts of parameters: train without it"
        )
        return (
            f"{kind} may step by all parameters together, but {where}, or declare `step_unit` of the class, "
            '"element" or "parameter", if each steps without the others'
        )
    if parts is not None and unit != "element":
        return f"under {parts} ranks have parts of parameters, but {kind} works on whole ones: choose another optimizer"
    return None


# Why a model cannot be trained as it is with its optimizer: what would give other numbers than plain PyTorch.


def problem_with(
    optimizer: optim.Optimizer,
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
    if isinstance(optimizer, optim.SparseAdam):
        return "SparseAdam takes sparse gradients alone, but ranks add them up as dense ones: choose torch.optim.Adam"
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        return (
            "the optimizer has parameters that the model does not have, as after it was passed to another engine: make "
            "a new one, of model.parameters()"
        )
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
        hooked = Reducer.has_other_hooks(p)
        if hooked and in_parts:
            return f"{name} has a hook on its gradient, but ranks have parts of parameters: remove it, or train without"
        if hooked and not alone and num_passes > 1:
            return (
                f"{name} has a hook on its gradient, which would have to see those of {num_passes} microbatches apart, "
                "but ranks add up those of all: remove it, and pass gradient_hook to the engine, which sees each "
                "gradient whole, or train with one of `microbatches`"
            )
    return None


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and all modules in it, as `model.modules()`, whose generators take a call for each level of each."""
    found, pending = dict[nn.Module, None](), [model]
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            pending += [part for part in reversed(module._modules.values()) if part is not None]
    return list(found)


def backward_hook_in(module: nn.Module, num_ranks: int) -> str | None:
    """Why the backward hooks of these modules, which so many ranks run together, see no whole gradients."""
    common = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    if num_ranks == 1:
        return None
    for part in modules_of(module):
        if part._backward_hooks or part._backward_pre_hooks or common:
            name = next(name for name, each in module.named_modules() if each is part)
            return (
                f"{name or type(module).__name__} has a backward hook, which would see the part of one rank: remove "
                "it, and call output.register_hook in a forward hook, which sees the whole gradient of the output"
            )
    return None


def _overlap(parameters: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """The names of two parameters that have elements in the same place."""
    found = sorted((*_extent(p), name) for name, p in parameters.items() if p.numel() and p.data_ptr())
    end, last = 0, ""
    for start, stop, name in found:
        if start < end:
            return last, name
        end, last = stop, name
    return None


def _extent(x: Tensor) -> tuple[int, int]:
    """Where the elements of x begin and end."""
    extent = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + extent * x.element_size()


def problem_with_memory(parameters: Mapping[str, nn.Parameter], others: Iterable[tuple[str, Tensor]]) -> str | None:
    """Why these parameters cannot be moved in memory: other tensors, by what they are, would stay there; or None."""
    own = {id(p) for p in parameters.values()}
    found = [(*_extent(p), name) for name, p in parameters.items() if p.numel() and p.data_ptr()]
    for what, x in others:
        if id(x) in own or x.layout is not torch.strided or not x.numel() or not x.data_ptr():
            continue
        begin, end = _extent(x)
        for start, stop, name in found:
            if begin < stop and start < end:
                return (
                    f"{what} is in the memory of {name}, which ZeRO moves, so that it would not follow the steps any "
                    f"more: compute it from {name} in each forward, or train with ZeRO 0"
                )
    return None


@contextmanager
def set_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within this context parameters have no gradients and no hooks on them."""
    gradients = [p.grad for p in parameters]
    hooks = [
        (each, dict(each))
        for p in parameters
        for each in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
        if each
    ]
    for p in parameters:
        p.grad = None
    for each, _ in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, known in hooks:
            each.update(known)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
