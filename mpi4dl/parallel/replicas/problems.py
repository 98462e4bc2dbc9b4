"""Why a model cannot be trained as it is with its optimizer: what would give other numbers than plain PyTorch."""

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from mpi4dl.parallel.replicas.reducer import Reducer


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
