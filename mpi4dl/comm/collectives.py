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


def copy(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """The root's x on every rank; the others pass any tensor like it. Its adjoint is `sum`."""
    return linear(x, lambda t: _broadcast(t, comm, root), lambda t: _reduce(t, comm, root))


def sum(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """The sum of x over all ranks on the root, zeros elsewhere. Its adjoint is `copy`."""
    return linear(x, lambda t: _reduce(t, comm, root), lambda t: _broadcast(t, comm, root))


def gather(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """All ranks' x stacked, (size, *shape), on the root, zeros elsewhere. Its adjoint is `scatter`."""
    return linear(x, lambda t: _gather(t, comm, root), lambda t: comm.scatter(t, root))


def scatter(x: Tensor, comm: Communicator, root: int = 0) -> Tensor:
    """Entry i of the root's x, (size, *shape), on rank i. Its adjoint is `gather`."""
    return linear(x, lambda t: comm.scatter(t, root), lambda t: _gather(t, comm, root))


def all_to_all(x: Tensor, comm: Communicator) -> Tensor:
    """Entry i of x, (size, *shape), goes to rank i; entry i of the result came from rank i. It is its own adjoint."""
    return linear(x, comm.all_to_all, comm.all_to_all)


def _broadcast(x: Tensor, comm: Communicator, root: int) -> Tensor:
    return comm.broadcast(x.clone(memory_format=torch.contiguous_format), root)


def _reduce(x: Tensor, comm: Communicator, root: int) -> Tensor:
    total = comm.reduce(x.clone(memory_format=torch.contiguous_format), root)
    return total if comm.rank == root else torch.zeros_like(total)


def _gather(x: Tensor, comm: Communicator, root: int) -> Tensor:
    stacked = comm.gather(x, root)
    return x.new_zeros((comm.size, *x.shape)) if stacked is None else stacked
