"""What the stages of a model have to do for a microbatch: counted by running them on the meta device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.parallel.costs.meter import KnownValues, SavedTensors, TensorMeter
from mpi4dl.parallel.inputs import shape_only
from mpi4dl.parallel.pipeline.flops import FlopCounter
from mpi4dl.parallel.pipeline.handover import map_leaves, pack
from mpi4dl.parallel.pipeline.stage import Stage


class Work(NamedTuple):
    """What one stage has to do for a microbatch, over all its ranks together: counted, not measured.

    `forward_flops` of convolutions and matrix products; `activation_bytes` that autograd keeps for the backward pass,
    and `working_bytes` at most beside them while layers compute; `handed_bytes` of what goes to the next stage, and
    `largest_bytes` of the largest tensor.
    """

    atoms: tuple[str, ...]
    num_parameters: int
    forward_flops: float
    activation_bytes: int
    working_bytes: int
    handed_bytes: int
    largest_bytes: int = 0


def count_work(
    stages: Sequence[nn.Module],
    names: Sequence[tuple[str, ...]],
    microbatch: tuple[int, ...],
    accept: Callable[[Any], None] = lambda outputs: None,
) -> tuple[Work, ...]:
    """Run the stages of a model on the meta device one after the other, and backward, and count what they do.

    `accept` is given what comes out in the end.
    """
    values: tuple[Any, ...] = (shape_only(nn.ModuleList(stages), microbatch),)
    found = []
    for stage, atoms in zip(stages, names, strict=True):
        saved, meter = SavedTensors([*stage.parameters(), *stage.buffers()]), TensorMeter()
        with torch.enable_grad(), KnownValues(), meter:
            with saved.counting(), FlopCounter() as counter:
                results = stage(*values)
            last = stage is stages[-1]
            if last:
                accept(results)
            handed = pack(results, stage.recipe.outputs)[0] if isinstance(stage, Stage) and not last else []
            kept = saved.num_bytes
            saved.let_go()
            _backward(stage, results)
        most = meter.peak_bytes + sum(value.nbytes for value in pytree.tree_leaves(values) if isinstance(value, Tensor))
        size = sum(p.numel() for p in stage.parameters())
        flops, out = counter.total, sum(t.nbytes for t in handed)
        found.append(Work(atoms, size, flops, kept, max(0, most - kept), out, meter.largest_bytes))
        if not last:
            values = map_leaves(_received, results)
    return tuple(found)


def _backward(stage: nn.Module, results: Any) -> None:
    """The backward pass of a stage, whose parameters' gradients are let go of as they come."""
    roots = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    handles = [
        p.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for p in stage.parameters()
        if p.requires_grad
    ]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    for handle in handles:
        handle.remove()


def _received(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
