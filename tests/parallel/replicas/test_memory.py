"""What ZeRO leaves on each rank, counted from the tensors that are alive: bytes per parameter as in its paper."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks

FEATURES, DEPTH = 128, 16


def live_bytes() -> int:
    """The storages of all tensors that were made since `gc.freeze`."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


class Watched(torch.optim.Adam):
    """Calls `watch` in the middle of a step."""

    watch: Callable[[], None] | None = None
    step_unit = "element"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Watched.watch is not None:
            Watched.watch()
        super().step()


def bytes_per_parameter(comm: Communicator, zero: int) -> tuple[float, float]:
    """At most while the optimizer works, and after the step."""
    gc.collect()
    gc.freeze()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(FEATURES, FEATURES) for _ in range(DEPTH)))
    optimizer = Watched(model.parameters(), lr=1e-3)
    engine = Engine(
        model,
        Plan(data=comm.size, zero=zero),
        optimizer,
        F.cross_entropy,
        comm=comm,
        precision="bf16",
        low_precision_weights=True,
        bucket_bytes=8 << 10,
    )
    images = torch.randn(1, 2, 8, 8)

    def step() -> None:
        engine.step([images], torch.zeros(comm.size, dtype=torch.int64), (8, 8))

    step()
    seen: list[int] = []
    Watched.watch = lambda: seen.append(live_bytes())
    step()
    Watched.watch = None
    afterwards = live_bytes()
    gc.unfreeze()
    num_parameters = FEATURES * (FEATURES + 1) * DEPTH
    return max(seen) / num_parameters, afterwards / num_parameters


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sample(2)
def test_bytes_per_parameter_are_those_of_the_formulas(ranks: Ranks, zero: int, num_ranks: int) -> None:
    """Of 2 for a parameter, 2 for its gradient, 12 for master, exp_avg and exp_avg_sq, ZeRO shares out some."""
    n = num_ranks
    expected = (16.0, 4 + 12 / n, 2 + 14 / n, 16 / n)[zero]
    for most, afterwards in ranks(n).run(bytes_per_parameter, zero):
        assert most == pytest.approx(expected, rel=0.1)
        assert afterwards == pytest.approx(expected, rel=0.1)
