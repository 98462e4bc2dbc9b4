"""Training on a GPU, which ranks may share, equals plain PyTorch on the CPU; skipped where there is none."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mpi4dl.comm import Communicator
from mpi4dl.parallel.plan import Plan
from tests.parallel.replicas.test_zero import PLANS, SMALL
from tests.pool.ranks import Ranks
from tests.support.short_runs import Outcome, Task, assert_like, check, plain, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
ON_GPU = replace(SMALL, device="cuda", optimizer="AdamW")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_training_equals_plain_pytorch(ranks: Ranks, plan: Plan, zero: int) -> None:
    check(ranks, ON_GPU, replace(plan, zero=zero))


def train_by_nccl(comm: Communicator, task: Task, plan: Plan) -> Outcome:
    comm.choose_gpu_wire("nccl")
    return train(comm, task, plan)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="no NCCL, or no two GPUs here"
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["data2", "tiles", "stages", "gems"])
def test_training_by_nccl_equals_plain_pytorch(ranks: Ranks, name: str, zero: int) -> None:
    plan = replace(PLANS[name], zero=zero)
    outcomes = ranks(2).run(train_by_nccl, ON_GPU, plan)
    assert_like(outcomes[0], plain(replace(ON_GPU, device="cpu"), plan.num_microbatches))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_what_stays_on_the_host_equals_plain_pytorch(ranks: Ranks, offload: str) -> None:
    check(ranks, ON_GPU.with_engine(**dict(SMALL.engine_options), offload=offload), Plan(data=2, zero=2))
