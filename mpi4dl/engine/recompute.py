"""Activation recomputation for unmodified models: keep the inputs of blocks, and run each block again in backward.

Chen et al., "Training deep nets with sublinear memory cost" (2016).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mpi4dl._randomness import PythonStates
from mpi4dl.comm import Refusal
from mpi4dl.parallel.blocks import rows_of
from mpi4dl.parallel.pipeline.decisions import Buffers, ForwardState, Watch, watches_of
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.spatial import SpatialTensor


def recompute_stages(modules: Iterable[nn.Module], stages: bool) -> None:
    """Make these keep only the inputs of their blocks, or as `stages` only their own. Raises Refusal without blocks.

    Of a streamed stage, blocks are computed again within each tile, and behind the streamed part.
    """
    for module in modules:
        if stages and not (isinstance(module, Stage) and module.opening is not None):
            recompute_whole(module)
        elif not recompute_blocks(module) and not stages:
            raise Refusal("this model has no blocks that could be recomputed: leave out `recompute`")


def recompute_blocks(model: nn.Module) -> int:
    """Make every block of the model keep only its inputs for the backward pass. Returns how many there are."""
    chosen = [block for row in rows_of(model) for block in row]
    for block in chosen:
        recompute_whole(block)
    return len(chosen)


def recompute_whole(block: nn.Module) -> None:
    """Make a module keep only its inputs for the backward pass."""
    block.forward = partial(_forward, block, watches_of(block), block.forward)


def _forward(block: nn.Module, watches: Sequence[Watch], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    known, states = ForwardState(block, watches), PythonStates.now()  # checkpoint() itself sees to PyTorch's

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _as_before(block, watches, known, states)

    values, structure = pytree.tree_flatten((args, kwargs))
    spread = [value if isinstance(value, SpatialTensor) else None for value in values]

    def run(*values: Any) -> Any:
        again = [value if was is None else was.like(value) for value, was in zip(values, spread, strict=True)]
        args, kwargs = pytree.tree_unflatten(again, structure)
        return forward(*args, **kwargs)

    # The kept values are plain tensors, which others may hook.
    plain = [value if was is None else was.local for value, was in zip(values, spread, strict=True)]
    before, given = _versions(block), [value._version for value in plain if isinstance(value, torch.Tensor)]
    outputs = checkpoint(run, *plain, use_reentrant=False, context_fn=contexts)
    if given != [value._version for value in plain if isinstance(value, torch.Tensor)]:
        raise Refusal(
            f"a block of the model ({type(block).__name__}) changes its inputs in place, and cannot be computed again "
            "from them: leave out `recompute`, or let it work on a copy (inplace=False)"
        )
    changed = next((name for name, version in _versions(block).items() if version != before.get(name)), None)
    if changed is not None:
        raise Refusal(
            f"the model changes {changed} as it runs, which is no statistic of a batch norm: when a block is computed "
            "again it would find other values; leave out `recompute`"
        )
    return outputs


def _versions(block: nn.Module) -> dict[str, tuple[int, int]]:
    """Which parameters and buffers a block has, batch norms' aside, and how often they were written to."""
    norms = (m for m in block.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats)
    known = {id(value) for m in norms for value in m.buffers(recurse=False)}
    values = [*block.named_buffers()]
    for path, m in block.named_modules():
        values += [(f"{path}.{name}".lstrip("."), p) for name, p in dict.items(m._parameters) if p is not None]
    return {name: (id(value), value._version) for name, value in values if id(value) not in known}


@contextmanager
def _as_before(block: nn.Module, watches: Sequence[Watch], first: ForwardState, states: PythonStates) -> Iterator[None]:
    """The second run of a block finds all as the first one did, `first` and `states`, and leaves no trace.

    Raises Refusal if it changes what cannot be put back, such as a tensor in place.
    """
    now, states_now = ForwardState(block, watches), PythonStates.now()
    first.restore()
    states.put()
    try:
        with Buffers(block).copied():  # of running statistics, which are updated once
            yield
    finally:
        now.restore()
        states_now.put()
        # PyTorch ends the run by an exception once it has what it needs.
        if (changed := next(now.changes(), None)) is not None:
            raise Refusal(
                f"the model changes {changed} as it runs, and did so twice for a block that was computed "
                "again; leave out `recompute`"
            )
