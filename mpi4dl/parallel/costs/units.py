"""FLOPs, memory and messages of units as they will run: on the tile of a rank of their stage, with padded copies.

Units run one after the other in a dry run of that rank. One that looks at values, such as a router, runs on the CPU,
once, with made-up ones.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._randomness import seeded
from mpi4dl.models.layers import Penalized
from mpi4dl.parallel.costs.meter import (
    Column,
    DryRun,
    KnownValues,
    SavedTensors,
    UnitCosts,
    dry_run,
    local_tensors,
    made_up_part,
    needs_values,
)
from mpi4dl.parallel.costs.sites import Site, Units, as_received, cut_at, imagined, input_at, map_local, on_one_rank
from mpi4dl.parallel.inputs import copied, of_tokens
from mpi4dl.parallel.pipeline.decisions import trial
from mpi4dl.parallel.pipeline.program import pack
from mpi4dl.parallel.pipeline.split import shapes_of
from mpi4dl.parallel.pipeline.stage import made_up_stage

BACKWARD = 2  # times as many FLOPs and bytes as forward


class StageBytes(NamedTuple):
    """What a stage takes of a rank's memory, in bytes: `kept` for each microbatch under way, `working` once.

    Kept is also what the stage before handed on. Its gradients are there while the stage works; so is what is handed
    on, which others may not have received yet, with its gradients. The largest tensor has `largest` bytes.
    Those who share features sum up `summed` of them for each microbatch, forward and backward.
    """

    kept: int
    working: int
    largest: int = 0
    summed: int = 0


def count_units(
    units: Units, site: Site, accept: Callable[[Any], None] = lambda outputs: None, backward: bool = True
) -> Column:
    """The counts of every unit at a site, the last one with the loss of tokens. Tensors of two count for the first.

    Rounds are those of any step but the first, before which norms do not know which of them wait for the next one.
    `accept` is called with the model's outputs, on shapes. Without `backward` nothing is counted of that pass, whose
    FLOPs are taken to be twice those of the forward pass.
    """
    grid, empty = imagined(site), shapes_of(units.model)
    saved = SavedTensors(empty.values())
    found: list[UnitCosts] = []
    handed_on: list[list[torch.UntypedStorage]] = []

    def count(unit: nn.Module, receive: Callable[[], tuple[Any, ...]], last: bool) -> DryRun:
        def run() -> Any:
            results = unit(*receive())
            if not last:
                pack((results,))  # raises ValueError for what no stage can hand to the next
            return _with_loss(results) if last and of_tokens(site.image) else results

        if grid.size > 1:
            dry_run(grid, run)
        saved.disregard(unit.parameters())
        counted = dry_run(grid, run, _differentiate if backward else lambda results: None, saved)
        for parameter in unit.parameters():
            parameter.grad = None
        return counted

    with trial(units.model), KnownValues() as known:
        values: tuple[Any, ...] = (input_at(site, grid, units.model, torch.device("meta")),)
        for i in range(len(units)):
            saved.turn, last = i, i == len(units) - 1
            unit = cut_at(site, copied(units.unit(i), empty).train(), grid)
            try:
                counted = count(unit, partial(map_local, as_received, values), last)
            except (RuntimeError, ValueError, TypeError) as error:
                if not needs_values(error) and not of_tokens(site.image):
                    raise
                with seeded(0):
                    unit = cut_at(site, made_up_stage(copied(units.unit(i), empty), torch.device("cpu")), grid)
                    counted = count(unit, partial(map_local, partial(made_up_part, known.value), values), last)
            values = map_local(lambda t: t.detach().to("meta").requires_grad_(t.requires_grad), counted.results)
            costs = counted.costs
            found.append(costs if backward else costs._replace(backward_flops=BACKWARD * costs.flops))
            handed_on.append([tensor.untyped_storage() for tensor in local_tensors(counted.results)])
    accept(counted.results)
    return tuple(
        unit._replace(
            unsaved_output_bytes=sum(s.nbytes() for s in storages if saved.turns.get(s._cdata, place) <= place)
        )
        for place, (unit, storages) in enumerate(zip(found, handed_on, strict=True))
    )


def count_bytes(units: Units, image: tuple[int, ...]) -> list[float]:
    """The bytes that training keeps for each unit: of the forward pass, parameters, and buffers of real numbers.

    What two units keep counts for the first, and so does a tied parameter.
    """
    seen: set[int] = set()
    found = []
    for i, counts in enumerate(count_units(units, on_one_rank(image), backward=False)):
        unit = units.unit(i)
        own = {id(t): t.nbytes for t in (*unit.parameters(), *unit.buffers()) if t.is_floating_point()}
        found.append(float(counts.kept_bytes + sum(size for key, size in own.items() if key not in seen)))
        seen |= own.keys()
    return found


def _differentiate(results: Any) -> None:
    roots = [tensor for tensor in local_tensors(results) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def _with_loss(outputs: Any) -> Any:
    """The loss of logits for each token, which for many kinds of tokens takes more than a block; others as they are."""
    if isinstance(outputs, Penalized):
        return outputs._replace(outputs=_with_loss(outputs.outputs))
    if not isinstance(outputs, Tensor) or outputs.dim() != 3:
        return outputs
    targets = torch.zeros(outputs.shape[:2], dtype=torch.int64, device=outputs.device)
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def stage_bytes(units: Sequence[UnitCosts], before: UnitCosts | None, is_last: bool) -> StageBytes:
    """What a stage of these units takes, to which the unit `before` them hands what they need.

    While a unit computes, forward or backward, only those before it are kept of the same microbatch.
    """
    kept = list(accumulate(unit.kept_bytes for unit in units))
    most = max(sofar + max(unit.forward_bytes, unit.backward_bytes) for sofar, unit in zip(kept, units, strict=True))
    received, unsaved = (0, 0) if before is None else (before.output_bytes, before.unsaved_output_bytes)
    output_bytes = 0 if is_last else units[-1].output_bytes
    largest, summed = max(unit.largest_bytes for unit in units), sum(unit.summed_bytes for unit in units)
    return StageBytes(kept[-1] + unsaved, max(0, most - kept[-1]) + received + 2 * output_bytes, largest, summed)


def bytes_of_stages(counts: Sequence[int], columns: Sequence[Column]) -> tuple[StageBytes, ...]:
    """Those of stages of so many units; `columns[s]` are all units' on a rank of stage s."""
    bounds = pairwise(accumulate(counts, initial=0))
    return tuple(
        stage_bytes(column[start:stop], column[start - 1] if start else None, stop == len(column))
        for column, (start, stop) in zip(columns, bounds, strict=True)
    )
