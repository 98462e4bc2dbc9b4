"""How the experts of a model are used: of each layer the load of every expert, what found them full, the entropy.

A step's last microbatch is looked at. Loads make a picture: a row for each layer, a column for each expert, from dark
(none of the tokens) to light (twice its even share, or more).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mpi4dl._palette import LOADS
from mpi4dl.engine import Engine
from mpi4dl.models.experts import Router
from mpi4dl.parallel.spatial.tensor import SpatialTensor

CELL_PIXELS = 16
BRIGHTEST = 2.0  # times the even share


@dataclass(frozen=True)
class ExpertUse:
    """Of each layer, by its path: the load (E,) of experts as a multiple of the even share, which is 1.

    `imbalance` is the largest load of any; `dropped` the share, 0 to 1, of choices that found an expert full;
    `entropy` the mean of that of tokens' scores, in nats: log E if they are even.
    """

    loads: Mapping[str, Tensor]
    dropped: float
    entropy: float

    @property
    def imbalance(self) -> float:
        return max(float(load.max()) for load in self.loads.values())

    def picture(self) -> Tensor:
        """(1, 3, H, W), from 0 to 1: a row of cells for each layer, in the order of the model."""
        widest = max(len(load) for load in self.loads.values())
        rows = [torch.nn.functional.pad(load, (0, widest - len(load))) for load in self.loads.values()]
        place = (torch.stack(rows) / BRIGHTEST).clamp(0, 1) * (len(LOADS) - 1)
        colours = torch.tensor(LOADS)
        below = place.floor().long().clamp_max(len(LOADS) - 2)
        part = (place - below)[..., None]
        cells = (colours[below] * (1 - part) + colours[below + 1] * part).permute(2, 0, 1)
        return cells.repeat_interleave(CELL_PIXELS, 1).repeat_interleave(CELL_PIXELS, 2)[None]


def expert_use(engine: Engine) -> ExpertUse | None:
    """How experts were used in the last step; None for a model that has none of ours. Collective."""
    own = {name: _counts(router) for name, router in _routers(engine) if router.last is not None}
    found: dict[str, Tensor] = {}
    for each in engine.comm.all_gather_object(own):
        for name, counts in each.items():
            found[name] = found[name] + counts if name in found else counts
    if not found:
        return None
    order = [name.removesuffix(".weight") for name in engine.stages.shapes]
    loads, dropped, entropy = {}, 0.0, 0.0
    for name in sorted(found, key=order.index):
        *load, missed, surprise, tokens = found[name].tolist()
        counted = torch.tensor(load)
        loads[name] = counted * len(load) / max(float(counted.sum()), 1.0)
        dropped += missed / max(float(counted.sum()) + missed, 1.0) / len(found)
        entropy += surprise / max(tokens, 1.0) / len(found)
    return ExpertUse(loads, dropped, entropy)


def _routers(engine: Engine) -> list[tuple[str, Router]]:
    modules = [pair for module in engine.stages.modules_of.values() for pair in module.named_modules()]
    return [(name, module) for name, module in modules if isinstance(module, Router)]


def _counts(router: Router) -> Tensor:
    """This rank's part of the sums: tokens of each expert, choices without one, entropy, and tokens."""
    assert router.last is not None
    chosen, scores = router.last
    alike = 1  # ranks that have the same tokens
    if isinstance(chosen, SpatialTensor):
        sides = zip(chosen.layout.dims, chosen.layout.grid.shape, strict=True)
        alike = chosen.layout.grid.size // prod(parts for dim, parts in sides if dim is not None)
        chosen, scores = chosen.local, scores.local if isinstance(scores, SpatialTensor) else scores
    counts = torch.bincount(chosen.flatten().cpu(), minlength=router.num_experts + 1).double()
    scores = scores.double().cpu()
    surprise = -torch.special.xlogy(scores, scores).sum()
    tokens = float(scores.numel() // router.num_experts)
    return torch.cat([counts, torch.tensor([float(surprise), tokens], dtype=torch.float64)]) / alike
