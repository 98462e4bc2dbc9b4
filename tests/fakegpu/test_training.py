"""Training on a GPU that is not there: exact by every plan, without a race, and sparing with what a GPU is slow at."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.models import registry
from mpi4dl.parallel.plan import Plan
from tests import training
from tests.fakegpu.device import CUDA, installed
from tests.pool.ranks import Ranks
from tests.test_zero import PLANS, SMALL
from tests.training import Outcome, Task

FEW = ("data2", "tiles", "tiles-data", "accumulation", "stages-tiles", "gems")
ON_GPU = replace(SMALL, device="cuda", optimizer="AdamW")


def train(comm: Communicator, task: Task, plan: Plan, wire: str) -> Outcome:
    comm.gpu_wire = wire
    with installed():
        outcome = training.train(comm, task, plan)
        state = {name: value.cpu() for name, value in outcome.state.items()}
        gradients = {name: g if g is None else g.cpu() for name, g in outcome.gradients.items()}
        return replace(outcome, state=state, gradients=gradients)


def cases() -> list[object]:
    found = []
    for i, (name, plan) in enumerate(PLANS.items()):
        for zero in range(4):
            wire = ("staged", "direct")[(i + zero) % 2]
            marks = () if name in FEW and zero == i % 4 else (pytest.mark.exhaustive,)
            found.append(pytest.param(replace(plan, zero=zero), wire, marks=marks, id=f"{name}-zero{zero}-{wire}"))
    return found


@pytest.mark.parametrize(("plan", "wire"), cases())
def test_every_plan_is_exact_and_waits_for_what_it_has_to(ranks: Ranks, plan: Plan, wire: str) -> None:
    outcomes = ranks(plan.num_ranks).run(train, ON_GPU, plan, wire)
    training.assert_like(outcomes[0], training.plain(replace(ON_GPU, device="cpu"), plan.num_microbatches))


def step_of_resnet18(comm: Communicator) -> tuple[list[dict[str, int]], float]:
    """What each of three steps on two tiles asks of the GPU, and how far the weights are from plain PyTorch's."""
    comm.gpu_wire = "staged"
    plain = registry.build("resnet18", num_classes=4).double()
    images, targets = torch.randn(2, 3, 64, 64, dtype=torch.float64), torch.tensor([1, 3])
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(images), targets).backward()
        optimizer.step()
    counts = []
    with installed() as gpu:
        model = model.to(CUDA)
        trained = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = Engine(model, Plan(((1, 2),)), trained, F.cross_entropy, comm=comm, bucket_bytes=50 << 20)
        tiles = training.tiles_of(images, engine)
        for _ in range(3):
            before = dict(vars(gpu.counters))
            engine.step(tiles, targets.to(CUDA), (64, 64))
            counts.append({name: count - before[name] for name, count in vars(gpu.counters).items()})
        state = {name: value.cpu() for name, value in model.state_dict().items()}
    worst = max(
        float((state[name].double() - value.double()).abs().max()) for name, value in plain.state_dict().items()
    )
    return counts, worst


def test_a_step_of_resnet18_spares_the_gpu(ranks: Ranks) -> None:
    """20 norms and 18 halos, forward and backward, and what the first convolution's input does not need."""
    for (first, *later), worst in ranks(2).run(step_of_resnet18):
        assert worst < 1e-10
        assert first["pinned"] > 0
        for counts in later:
            assert counts["pinned"] == 0
            assert counts["blocking"] <= 4
            assert counts["waits"] <= 80
            assert counts["to_host"] <= 80
            assert counts["to_device"] <= 80
