"""The linear maps between ranks that autograd sees, each with its exact adjoint as its backward pass.

One convention makes every gradient right: *the objective is the sum of what the ranks contribute*. A loss that every
rank of a group computes alike therefore counts 1 / size on each. The gradient of anything that ranks hold copies of,
such as a parameter, is then the plain sum over those ranks. As in Hewett and Grady, "A linear algebraic approach to
model parallelism in deep learning" (2020), each map A is tested by <A x, y> = <x, A' y> summed over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Map, adjoint: Map) -> Tensor:
        ctx.adjoint = adjoint
        return apply(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear(x: Tensor, apply: Map, adjoint: Map) -> Tensor:
    """`apply(x)`, a linear map whose backward pass is `adjoint`."""
    return _Linear.apply(x, apply, adjoint)


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """The sum of x over all ranks, on all ranks. It is its own adjoint."""

    def total(t: Tensor) -> Tensor:
        return comm.all_reduce(t.clone(memory_format=torch.contiguous_format))

    return linear(x, total, total)
