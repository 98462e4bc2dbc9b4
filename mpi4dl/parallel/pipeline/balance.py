"""How many atoms each stage gets: the block partition whose slowest stage is as fast as can be.

costs of the atoms    counted FLOPs | bytes that training keeps | measured seconds        or counts by hand
partition             costs, number of tiles of each stage -> number of atoms of each stage
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpi4dl.parallel.pipeline.flops import FlopCounter
from mpi4dl.parallel.pipeline.handover import map_leaves, pack
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.pipeline.stage import Stage

Costs = list[float]


def partition(costs: Sequence[float], stages: int, divisors: Sequence[int] | None = None) -> tuple[int, ...]:
    """The number of atoms of each stage, at least one, that minimises the largest cost of a stage.

    The cost of a stage is the sum of its atoms' costs over its divisor: the number of tiles that share the work.
    Exact, by dynamic programming in O(stages * atoms^2). Of equally good partitions, always the same one.

    Raises:
        ValueError: fewer atoms than stages, divisors that are not one positive number for each stage, or a cost that is
            negative or not finite.
    """
    divisors = [1] * stages if divisors is None else list(divisors)
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{stages} stages cannot be made of {len(costs)} atoms: every stage needs at least one; "
            f"choose between 1 and {len(costs)} stages"
        )
    if len(divisors) != stages or min(divisors) < 1:
        raise ValueError(f"divisors {divisors} must be one positive number for each of {stages} stages")
    wrong = next((i for i, cost in enumerate(costs) if not 0 <= cost < float("inf")), None)
    if wrong is not None:
        raise ValueError(f"the cost of atom {wrong} is {costs[wrong]}, but must be finite and not negative")
    sums = np.array([0, *accumulate(map(float, costs))])
    # spans[i, j] is the cost of atoms i to j - 1; a stage of none is no stage.
    spans = sums[None, :] - sums[:, None]
    spans[np.tril_indices(len(sums))] = np.inf
    best = np.full(len(sums), np.inf)  # best[j]: the slowest stage's cost if the first j atoms are dealt out so far
    best[0] = 0
    starts = []
    for divisor in divisors:
        slowest = np.maximum(best[:, None], spans / divisor)
        starts.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    counts, end = [], len(costs)
    for start in reversed(starts):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return tuple(reversed(counts))


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

    `inputs` are the model's, of which only shapes matter: nothing is computed.
    """
    costs = []
    with torch.no_grad():
        for run in _each_atom_on_meta(cuttable, inputs):
            with FlopCounter() as counter:
                run()
            costs.append(counter.total)
    return costs


def count_bytes(cuttable: Cuttable, *inputs: Any) -> Costs:
    """Bytes that training keeps for each atom: parameters, and what autograd saves of the forward pass.

    What two atoms save counts for the first, and so does a tied parameter. Nothing is computed.
    """
    seen: dict[int, torch.UntypedStorage] = {}
    total = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            total += storage.nbytes()
        return tensor

    costs = []
    for run in _each_atom_on_meta(cuttable, inputs):
        before = total
        for parameter in run.stage.parameters():
            keep(parameter)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run()
        costs.append(float(total - before))
    return costs


def measure_seconds(cuttable: Cuttable, *inputs: Any, device: torch.device | str = "cpu", repeats: int = 3) -> Costs:
    """Seconds of each atom's forward and backward pass on `device`: the median of `repeats`, after one to warm up.

    One atom at a time is copied to the device, with made-up values if the model lies on the meta device; the model
    itself stays as it is. `inputs` are real tensors. Times differ between runs and ranks: measure on one rank, and tell
    the others the result.
    """
    device = torch.device(device)
    costs = []
    values = tuple(map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, i) for i in inputs)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for i in range(len(cuttable)):
            atom = _copied_to(device, cuttable.atom(i))
            seconds = []
            for _ in range(repeats + 1):
                # What is received is overwritten by some atoms, and must be as good as new.
                received = map_leaves(_fresh, values)
                _wait_for(device)
                start = perf_counter()
                results = atom(*received)
                _backward(results)
                _wait_for(device)
                seconds.append(perf_counter() - start)
            costs.append(median(seconds[1:]))
            values = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, results)
    return costs


class _Run:
    """One atom and what it receives; running it notes what the next one receives."""

    def __init__(self, stage: Stage, values: tuple[Any, ...]) -> None:
        self.stage = stage
        self.values = values

    def __call__(self) -> None:
        self.values = self.stage(*self.values)


def _each_atom_on_meta(cuttable: Cuttable, inputs: tuple[Any, ...]) -> Iterator[_Run]:
    """Each atom, on the meta device in training mode, with the values of the one before."""
    model = cuttable.model
    empty: dict[int, Tensor] = {}  # one for each of the model's tensors, so that tied ones stay tied
    for value in [*model.parameters(), *model.buffers()]:
        shape = torch.empty_like(value, device="meta")
        empty[id(value)] = nn.Parameter(shape, value.requires_grad) if isinstance(value, nn.Parameter) else shape
    values = map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
    for i in range(len(cuttable)):
        run = _Run(deepcopy(cuttable.atom(i), {**empty}).train(), values)
        yield run
        values = run.values


def _copied_to(device: torch.device, stage: Stage) -> Stage:
    values = [*stage.parameters(), *stage.buffers()]
    if not any(value.is_meta for value in values):
        return deepcopy(stage).to(device).train()
    copied = deepcopy(stage).to_empty(device=device).train()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.normal_(std=0.02)
        for buffer in copied.buffers():
            buffer.fill_(1)
    return copied


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _backward(results: Any) -> None:
    tensors = [t for t in pack((results,))[0] if t.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
