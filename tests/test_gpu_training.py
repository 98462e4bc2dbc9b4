"""Training on a GPU, which ranks may share, equals plain PyTorch on the CPU; skipped where there is none."""

from dataclasses import replace

import pytest
import torch

from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.test_zero import PLANS, SMALL
from tests.training import check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
ON_GPU = replace(SMALL, device="cuda", optimizer="AdamW")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_training_equals_plain_pytorch(ranks: Ranks, plan: Plan, zero: int) -> None:
    check(ranks, ON_GPU, replace(plan, zero=zero))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_what_stays_on_the_host_equals_plain_pytorch(ranks: Ranks, offload: str) -> None:
    check(ranks, ON_GPU.with_engine(**dict(SMALL.engine_options), offload=offload), Plan(data=2, zero=2))
