"""Counts that the tests of several models need."""

from torch import nn


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_without_gradient(model: nn.Module) -> list[str]:
    """Return the names of the parameters whose gradient is missing, all zero or not finite."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any()
    ]
