"""Training on a GPU that is not there: exact by every plan, without a race, and sparing with what a GPU is slow at."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.geometry import GridShape
from mpi4dl.models import registry
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas.buckets import GPU_BUCKET_BYTES
from mpi4dl.parallel.spatial import gather
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import shard
from mpi4dl.parallel.streaming.leading_part import EACH_NORM, StreamOptions
from tests.fakegpu.device import CUDA, FakeGpu, installed
from tests.fakegpu.nccl import Step, joined, stuck
from tests.parallel.replicas.test_zero import PLANS, SMALL
from tests.pool.ranks import Ranks, on_ranks
from tests.support import short_runs
from tests.support.short_runs import HOOKED, NARROWING, UNUSED, Outcome, Task

FEW = ("data2", "stages-tiles", "gems")
ON_GPU = replace(SMALL, device="cuda", optimizer="AdamW")


@contextmanager
def on_gpus(comm: Communicator, wire: str) -> Iterator[tuple[Communicator, FakeGpu, list[Step]]]:
    """The same ranks on GPUs that are not there, and what NCCL is asked for, in order."""
    if wire == "nccl":
        with joined(comm) as found:
            yield found
        return
    comm.gpu_wire = wire
    with installed() as gpu:
        yield comm, gpu, []


def train(comm: Communicator, task: Task, plan: Plan, wire: str) -> tuple[Outcome, list[Step]]:
    with on_gpus(comm, wire) as (gpus, _, steps):
        outcome = short_runs.train(gpus, task, plan)
        state = {name: value.cpu() for name, value in outcome.state.items()}
        gradients = {name: g if g is None else g.cpu() for name, g in outcome.gradients.items()}
        return replace(outcome, state=state, gradients=gradients), steps


CASES = [
    pytest.param(
        replace(plan, zero=zero),
        ("staged", "direct")[(i + zero) % 2],
        marks=() if name in FEW and zero == i % 4 else pytest.mark.exhaustive,
        id=f"{name}-zero{zero}",
    )
    for i, (name, plan) in enumerate(PLANS.items())
    for zero in range(4)
]
TASKS = [
    *(pytest.param(ON_GPU, case.values[0], id=case.id) for case in CASES),
    *(pytest.param(replace(t, device="cuda"), Plan(((2, 2),)), id=str(t.model)) for t in (NARROWING, UNUSED, HOOKED)),
]


@pytest.mark.parametrize(("plan", "wire"), CASES)
@pytest.mark.sample(1)
def test_every_plan_is_exact_and_waits_for_what_it_has_to(ranks: Ranks, plan: Plan, wire: str) -> None:
    outcomes = [outcome for outcome, _ in ranks(plan.num_ranks).run(train, ON_GPU, plan, wire)]
    short_runs.assert_like(outcomes[0], short_runs.plain(replace(ON_GPU, device="cpu"), plan.num_microbatches))


@pytest.mark.parametrize(("task", "plan"), TASKS)
@pytest.mark.exhaustive
def test_by_nccl_every_plan_is_exact_and_waits_in_no_circle(ranks: Ranks, task: Task, plan: Plan) -> None:
    found = ranks(plan.num_ranks).run(train, task, plan, "nccl")
    short_runs.assert_like(found[0][0], short_runs.plain(replace(task, device="cpu"), plan.num_microbatches))
    rows = [steps for _, steps in found]
    assert stuck(rows) == []
    summed = sum(step.sums for step in rows[0])
    assert bool(summed) == (not plan.zero and not plan.bidirectional and len(plan.holders(0)) > 1)


STREAMED = Task(
    "small_resnet",
    (50, 66),
    model_options=(("num_filters", 4),),
    stream=StreamOptions((1, 2), "stage1_block1", segments=EACH_NORM),
    balance=(9, 2),
    device="cuda",
)


@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize("plan", [Plan(((1, 2),)), Plan(), Plan(((1, 2), (1, 1)), microbatches=2)])
@pytest.mark.sample(1)
def test_what_streaming_keeps_may_leave_the_gpu(ranks: Ranks, plan: Plan, where: str) -> None:
    assert STREAMED.stream is not None
    task = replace(STREAMED, stream=replace(STREAMED.stream, keep=Keep(where)), num_steps=2)
    outcomes = [outcome for outcome, _ in ranks(plan.num_ranks).run(train, task, plan, "staged")]
    short_runs.assert_like(outcomes[0], short_runs.plain(replace(task, device="cpu"), plan.num_microbatches))


def train_against_the_rule(comm: Communicator, task: Task, plan: Plan) -> tuple[Outcome, list[Step]]:
    subset = Communicator.subset
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "subset", lambda self, ranks, ordered=True: subset(self, ranks))
        return train(comm, task, plan, "nccl")


@pytest.mark.exhaustive
def test_ranks_of_both_directions_would_wait_in_a_circle(ranks: Ranks) -> None:
    """They end their stages in opposite orders, which the groups of the two stages have nothing to tell by."""
    found = ranks(2).run(train_against_the_rule, ON_GPU, PLANS["gems"])
    assert len(stuck([steps for _, steps in found])) == 2


def steps_of(comm: Communicator, name: str, wire: str) -> tuple[list[dict[str, int]], float]:
    """What each of five steps on two tiles asks of the GPU; how far the weights are from plain PyTorch's after two."""
    plain = registry.build(name, num_classes=4).double()
    images, targets = torch.randn(2, 3, 64, 64, dtype=torch.float64), torch.tensor([1, 3])
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.001)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(plain(images), targets).backward()
        optimizer.step()
    counts = []
    with on_gpus(comm, wire) as (gpus, gpu, _):
        model = model.to(CUDA)
        trained = torch.optim.SGD(model.parameters(), lr=0.001, foreach=True)
        plan = Plan(((1, comm.size),))
        engine = Engine(model, plan, trained, F.cross_entropy, comm=gpus, bucket_bytes=2 * GPU_BUCKET_BYTES)
        tiles = short_runs.tiles_of(images, engine)
        for number in range(5):
            counts.append(gpu.counters.since(lambda: engine.step(tiles, targets, (64, 64))))
            if number == 1:
                state = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    worst = max(
        float((state[name].double() - value.double()).abs().max()) for name, value in plain.state_dict().items()
    )
    return counts, worst


# Waits for the GPU, and copies each way, in a step. By NCCL these are the loss, the images and the labels.
MOST = {"staged": (40, 40), "nccl": (41, 2)}


@pytest.mark.parametrize("wire", MOST)
@pytest.mark.exhaustive
def test_a_step_of_resnet18_spares_the_gpu(ranks: Ranks, wire: str) -> None:
    """Of 20 norms three wait for others, and the rest bring all halos, both ways. The first step learns it."""
    waits, copies = MOST[wire]
    for (first, second, third, *later), worst in ranks(2).run(steps_of, "resnet18", wire):
        assert worst < 1e-10
        assert (first["pinned"] > second["pinned"] > third["pinned"]) == (wire == "staged")
        # Where nothing else is staged, an image's memory is given back before anybody has asked whether it is there.
        assert sum(counts["pinned"] for counts in later) <= (wire == "nccl")
        for counts in (second, third, *later):
            assert counts["blocking"] <= 1
            assert counts["waits"] <= waits
            assert counts["to_host"] <= copies
            assert counts["to_device"] <= copies


@pytest.mark.exhaustive
def test_a_step_of_resnet50_launches_few_kernels(ranks: Ranks) -> None:
    """On two tiles. An operator counts as one kernel: plain PyTorch's 409 were 716 on an H200, whose convolutions take
    several. So 1,500 there are about 1,190 here.
    """
    for (_, *later), worst in ranks(2).run(steps_of, "resnet50", "staged"):
        assert worst < 1e-8  # norms of few samples make much of a rounding
        for counts in later:
            assert counts["launches"] <= 1100
            assert counts["copies"] <= 260


@pytest.mark.exhaustive
@on_ranks(1)
def test_rules_on_one_rank_launch_what_plain_pytorch_does(comm: Communicator) -> None:
    """A step of plain PyTorch, and one by the rules of tiles."""
    comm.gpu_wire = "staged"
    images, targets = torch.randn(2, 3, 64, 64), torch.tensor([1, 3])
    with installed() as gpu:
        grid = Grid.of(comm, GridShape(1, 1, 1))
        found = []
        for spread in (False, True):
            model = registry.build("resnet50", num_classes=4).to(CUDA)
            trained = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)

            def step(spread: bool = spread, model: nn.Module = model, trained: torch.optim.Optimizer = trained) -> None:
                x = images.to(CUDA)
                trained.zero_grad()
                F.cross_entropy(gather(model(shard(x, grid) if spread else x)), targets.to(CUDA)).backward()
                trained.step()

            step()
            found.append(gpu.counters.since(step))
    plain, ours = found
    assert ours["launches"] <= plain["launches"] + 10
    assert ours["copies"] == plain["copies"]


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize(
    "plan",
    [
        *(
            pytest.param(Plan(data=2, zero=zero), marks=() if zero == 3 else pytest.mark.exhaustive)
            for zero in (0, 2, 3)
        ),
        pytest.param(Plan(((1, 2), (1, 1)), data=2, zero=3, microbatches=2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_what_the_optimizer_keeps_may_leave_the_gpu(ranks: Ranks, plan: Plan, offload: str) -> None:
    task = ON_GPU.with_engine(**dict(SMALL.engine_options), offload=offload)
    outcomes = [outcome for outcome, _ in ranks(plan.num_ranks).run(train, task, plan, "staged")]
    short_runs.assert_like(outcomes[0], short_runs.plain(replace(ON_GPU, device="cpu"), plan.num_microbatches))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(1)
def test_offload_waits_once_for_a_bucket_and_not_for_each_parameter(comm: Communicator, kind: torch.dtype) -> None:
    """In the fourth step of a model of twelve parameters, whose master weights are on the host. Steps before, and every
    100th, compare them with what users may have written.
    """
    with on_gpus(comm, "staged") as (gpus, gpu, _):
        layers = [nn.Conv2d(3, 3, 1) for _ in range(5)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).to(CUDA, kind)
        trained = torch.optim.AdamW(model.parameters())
        engine = Engine(model, Plan(), trained, F.cross_entropy, comm=gpus, offload="cpu")
        images, targets = torch.randn(4, 3, 8, 8, dtype=kind), torch.zeros(4, dtype=torch.int64)
        counts = [gpu.counters.since(lambda: engine.step([images], targets, (8, 8))) for _ in range(4)][-1]
    assert counts["to_host"] == 2  # the gradients, and the loss
    assert counts["waits"] <= 5  # gradients, what was published before, the loss, the norm, the images


@on_ranks(2)
def test_ranks_compare_weights_on_gpus_now_and_then(comm: Communicator) -> None:
    with on_gpus(comm, "staged") as (gpus, *_), pytest.MonkeyPatch.context() as patch:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(CUDA)
        engine = Engine(model, Plan(data=2), torch.optim.SGD(model.parameters()), F.cross_entropy, comm=gpus)
        batch = [torch.randn(2, 3, 8, 8)], torch.zeros(4, dtype=torch.int64), (8, 8)
        engine.step(*batch)
        patch.setattr("mpi4dl.engine.engine.GPU_EVERY", 1)
        engine.step(*batch)
        if comm.rank:
            model[0].weight.data.mul_(0.5)
            model[0].bias.data.add_(0.5)
        with pytest.raises(Refusal, match="different values of the same weights"):
            engine.step(*batch)


def train_deterministically(comm: Communicator, task: Task, plan: Plan) -> str:
    torch.use_deterministic_algorithms(True)
    try:
        return short_runs.digest_of(train(comm, replace(task, num_steps=1), plan, "staged")[0].state)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("plan", [Plan(((1, 2),)), Plan(((2, 1), (1, 1)), microbatches=2)], ids=str)
@pytest.mark.sample(1)
def test_tiles_call_nothing_without_a_deterministic_kernel(ranks: Ranks, plan: Plan) -> None:
    first, again = (ranks(plan.num_ranks).run(train_deterministically, ON_GPU, plan) for _ in range(2))
    assert first == again
