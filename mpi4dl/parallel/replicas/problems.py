"""Why a model cannot be trained as it is with its optimizer: what would give other numbers than plain PyTorch."""

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mpi4dl.parallel.replicas.reducer import Reducer


def problem_with(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], num_holders: int = 1
) -> str | None:
    """Why this optimizer cannot train these parameters, by name; None if it can.

    `num_holders` is how many ranks add up the gradient of a parameter, at most.
    """
    own = {id(p): p for p in parameters.values()}
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
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
    hooked = next((name for name, p in parameters.items() if num_holders > 1 and _has_hooks(p)), None)
    if hooked:
        return (
            f"{hooked} has a hook on its gradient, which would see the part of one rank before the ranks add them up: "
            "remove it, or let the loss or the optimizer do what it does"
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


def _has_hooks(parameter: nn.Parameter) -> bool:
    after: Iterable[object] = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return bool(parameter._backward_hooks) or any(not Reducer.is_hook(hook) for hook in after)
