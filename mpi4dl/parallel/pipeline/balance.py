"""How many atoms each stage gets: the block partition whose slowest stage is as fast as can be.

costs of the atoms    seconds timed | counted FLOPs | bytes that training keeps           or counts by hand
partition             costs of every atom on every stage -> number of atoms of each stage
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpi4dl._randomness import forked
from mpi4dl.parallel.costs.meter import KnownValues, SavedTensors, made_up_part, needs_values
from mpi4dl.parallel.inputs import of_tokens
from mpi4dl.parallel.pipeline.program import map_leaves
from mpi4dl.parallel.pipeline.split import Cuttable, shapes_of
from mpi4dl.parallel.pipeline.stage import Stage, made_up_stage

# Counts the floating-point operations of whatever runs in its context, by PyTorch's own formulas.
#
# PyTorch's FlopCounterMode also tells modules apart. For that it hooks into autograd, and fails where a module hands on
# a parameter itself, as a stage of a vision transformer does with the class token.


class FlopCounter(TorchDispatchMode):
    """`total` is the sum over convolutions, matrix products and attention, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


Costs = list[float]


def partition(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The number of atoms of each stage, at least one, that minimises the largest cost of a stage.

    `costs[s][i]` is what atom i costs on stage s, on each of its ranks. Exact, by dynamic programming in
    O(stages * atoms^2). Of equally good partitions, always the same one.

    Raises:
        ValueError: fewer atoms than stages, no stage, or a cost that is negative or not finite.
    """
    stages, atoms = len(costs), len(costs[0]) if costs else 0
    if not 1 <= stages <= atoms:
        raise ValueError(
            f"{stages} stages cannot be made of {atoms} units: every stage needs at least one; "
            f"choose between 1 and {atoms} stages"
        )
    for stage, row in enumerate(costs):
        wrong = next((i for i, cost in enumerate(row) if not 0 <= cost < float("inf")), None)
        if wrong is not None:
            raise ValueError(
                f"the cost of unit {wrong} on stage {stage} is {row[wrong]}, but must be finite and not negative"
            )
    best = np.full(atoms + 1, np.inf)  # best[j]: the slowest stage's cost if the first j atoms are dealt out so far
    best[0] = 0
    starts = []
    for row in costs:
        sums = np.array([0, *accumulate(map(float, row))])
        # spans[i, j] is the cost of atoms i to j - 1; a stage of none is no stage.
        spans = sums[None, :] - sums[:, None]
        spans[np.tril_indices(len(sums))] = np.inf
        slowest = np.maximum(best[:, None], spans)
        starts.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    counts, end = [], atoms
    for start in reversed(starts):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return tuple(reversed(counts))


def shared_out(costs: Sequence[float], sharing: Sequence[int]) -> list[list[float]]:
    """Costs as `partition` takes them, if ranks share the work of a stage evenly: stage s has `sharing[s]` of them."""
    return [[cost / ranks for cost in costs] for ranks in sharing]


def by_hand(cuttable: Cuttable, counts: Sequence[int], stages: int) -> tuple[int, ...]:
    """`counts`, if they are one number of atoms for each stage and add up to the model's.

    Raises:
        ValueError: they do not.
    """
    if len(counts) != stages:
        raise ValueError(
            f"balance {','.join(map(str, counts))} has {len(counts)} numbers, but there are {stages} stages"
        )
    cuttable.check(counts)
    return tuple(counts)


def count_flops(cuttable: Cuttable, *inputs: Any) -> Costs:
    """Floating-point operations of each atom's forward pass: convolutions and matrix products, as PyTorch counts them.

    `inputs` are the model's, of which only shapes matter: nothing is computed, but in atoms that look at values.
    """

    def measure(stage: Stage, values: tuple[Any, ...]) -> tuple[float, Any]:
        with torch.no_grad(), FlopCounter() as counter:
            results = stage(*values)
        return counter.total, results

    return _of_each_atom(cuttable, inputs, measure)


def count_bytes(cuttable: Cuttable, *inputs: Any) -> Costs:
    """Bytes that training keeps for each atom: parameters, and what autograd saves of the forward pass.

    Tensors that two units save count for the first, and so does a tied parameter. Nothing is computed, but in atoms
    that look at values.
    """
    saved = SavedTensors()

    def measure(stage: Stage, values: tuple[Any, ...]) -> tuple[float, Any]:
        before = saved.num_bytes
        for parameter in stage.parameters():
            saved.keep(parameter)
        with torch.enable_grad(), saved.counting():
            results = stage(*values)
        return float(saved.num_bytes - before), results

    return _of_each_atom(cuttable, inputs, measure)


Measure = Callable[[Stage, tuple[Any, ...]], tuple[float, Any]]  # the cost of an atom, and what it makes


def _of_each_atom(cuttable: Cuttable, inputs: tuple[Any, ...], measure: Measure) -> Costs:
    """The cost of each atom, on the meta device in training mode, with the values of the one before.

    An atom that looks at values which do not follow from shapes, such as one that routes tokens, or that calls what has
    no meta kernel for its dtype, is measured on the CPU with made-up values.
    """
    empty, costs = shapes_of(cuttable.model), []
    with KnownValues() as known:
        values = map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
        for i in range(len(cuttable)):
            stage = deepcopy(cuttable.atom(i), {**empty}).train()
            try:
                cost, values = measure(stage, values)
            except (RuntimeError, ValueError, TypeError) as error:
                if not needs_values(error) and not of_tokens(inputs[0].shape):
                    raise
                with forked():
                    torch.default_generator.manual_seed(0)
                    made = map_leaves(partial(_made_up, known), values)
                    cost, results = measure(made_up_stage(stage, torch.device("cpu")), made)
                values = map_leaves(_shape_of, results)
            costs.append(cost)
    return costs


def _made_up(known: KnownValues, leaf: Any) -> Any:
    return made_up_part(known.value, leaf) if isinstance(leaf, Tensor) else leaf


def _shape_of(leaf: Any) -> Any:
    return leaf.detach().to("meta").requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
