"""How many units each stage gets: the block partition whose slowest stage is as fast as can be.

costs of the units    seconds timed | counted FLOPs | bytes that training keeps           or counts by hand
partition             costs of every unit on every stage -> number of units of each stage
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mpi4dl.parallel.pipeline.split import Cuttable


def partition(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The number of units of each stage, at least one, that minimises the largest cost of a stage.

    `costs[s][i]` is what unit i costs on stage s, on each of its ranks. Exact, by dynamic programming in
    O(stages * units^2). Of equally good partitions, always the same one.

    Raises:
        ValueError: fewer units than stages, no stage, or a cost that is negative or not finite.
    """
    stages, units = len(costs), len(costs[0]) if costs else 0
    if not 1 <= stages <= units:
        raise ValueError(
            f"{stages} stages cannot be made of {units} units: every stage needs at least one; "
            f"choose between 1 and {units} stages"
        )
    for stage, row in enumerate(costs):
        wrong = next((i for i, cost in enumerate(row) if not 0 <= cost < float("inf")), None)
        if wrong is not None:
            raise ValueError(
                f"the cost of unit {wrong} on stage {stage} is {row[wrong]}, but must be finite and not negative"
            )
    best = np.full(units + 1, np.inf)  # best[j]: the slowest stage's cost if the first j units are dealt out so far
    best[0] = 0
    starts = []
    for row in costs:
        sums = np.array([0, *accumulate(map(float, row))])
        # spans[i, j] is the cost of units i to j - 1; a stage of none is no stage.
        spans = sums[None, :] - sums[:, None]
        spans[np.tril_indices(len(sums))] = np.inf
        slowest = np.maximum(best[:, None], spans)
        starts.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    counts, end = [], units
    for start in reversed(starts):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return tuple(reversed(counts))


def shared_out(costs: Sequence[float], sharing: Sequence[int]) -> list[list[float]]:
    """Costs as `partition` takes them, if ranks share the work of a stage evenly: stage s has `sharing[s]` of them."""
    return [[cost / ranks for cost in costs] for ranks in sharing]


def by_hand(cuttable: Cuttable, counts: Sequence[int], stages: int) -> tuple[int, ...]:
    """`counts`, if they are one number of units for each stage and add up to the model's.

    Raises:
        ValueError: they do not.
    """
    if len(counts) != stages:
        raise ValueError(
            f"balance {','.join(map(str, counts))} has {len(counts)} numbers, but there are {stages} stages"
        )
    cuttable.check(counts)
    return tuple(counts)
