"""ZeRO shares out what ranks would repeat, and trains as plain PyTorch does on the union of their batches."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks
from tests.support import short_runs
from tests.support.short_runs import ATTENDING, DROPPING, UNUSED, Task, assert_like, check, check_going_on, label, train

# Buckets so small that there are many, and that parameters are cut.
SMALL = Task("small_resnet", (32, 24), batch=16, model_options=(("num_filters", 4),))
SMALL = SMALL.with_engine(bucket_bytes=1000, clip_norm=1.0)

PLANS = {
    "data2": Plan(data=2),
    "data4": Plan(data=4),
    "tiles": Plan(((1, 2),)),
    "tiles-data": Plan(((2, 1),), data=2),
    "accumulation": Plan(data=2, microbatches=2),
    "stages": Plan(((1, 1), (1, 1)), microbatches=2),
    "stages-data": Plan(((1, 1), (1, 1)), data=2, microbatches=2),
    "stages-tiles": Plan(((1, 2), (1, 1)), microbatches=2, schedule="gpipe"),
    "zero-bubble": Plan(((1, 1), (1, 1)), data=2, microbatches=2, schedule="zero-bubble"),
    "interleaved": Plan(((1, 2), (1, 2)), microbatches=2, schedule="interleaved", chunks=2),
    "gems": Plan(((1, 1), (1, 1)), bidirectional=1, microbatches=2),
    "gems-data": Plan(((1, 1), (1, 1)), bidirectional=1, data=2, microbatches=2),
    "gems-tiles": Plan(((1, 2), (1, 1)), bidirectional=1, microbatches=2),
    "gems-odd": Plan(((1, 1),) * 3, bidirectional=1),
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop")
OFFLOADS = ("none", "cpu", "disk")


def cases() -> list[object]:
    """Every plan by one ZeRO stage, optimizer and home in turn; the others only on demand."""
    found = []
    for i, (name, plan) in enumerate(PLANS.items()):
        for zero in range(4):
            for j, optimizer in enumerate(OPTIMIZERS):
                for k, offload in enumerate(OFFLOADS):
                    chosen = (i + zero) % 4 == 3 and i % 4 == j and i % 3 == k
                    marks = () if chosen or (name == "data2" and zero == j) else (pytest.mark.exhaustive,)
                    case = (replace(plan, zero=zero), optimizer, offload)
                    found.append(pytest.param(*case, marks=marks, id=f"{name}-zero{zero}-{optimizer}-{offload}"))
    return found


@pytest.mark.parametrize(("plan", "optimizer", "offload"), cases())
@pytest.mark.sample(6)
def test_training_equals_plain_pytorch(ranks: Ranks, plan: Plan, optimizer: str, offload: str) -> None:
    options = dict(SMALL.engine_options)
    check(ranks, replace(SMALL, optimizer=optimizer).with_engine(**options, offload=offload), plan)


class Recomputing(nn.Module):
    """A model that runs a part of itself again in backward, with a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12))
        self.last = nn.Linear(12, 3)
        self.empty = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, x.flatten(1), use_reentrant=False)) + self.empty.sum()


class Scaled(nn.Module):
    """Beside a matrix, a number, and parameters with one element or none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))
        self.empty = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1) + self.shift) * self.scale + self.empty.sum()


STAGES_DATA = PLANS["stages-data"]
FURTHER = [
    *((ATTENDING.with_engine(bucket_bytes=500), Plan(data=2, zero=zero)) for zero in range(4)),
    *((replace(SMALL, optimizer="Adafactor"), Plan(data=4, zero=zero)) for zero in (1, 2, 3)),
    *(
        (SMALL.with_engine(bucket_bytes=1000, recompute=True, clip_norm=0.1), replace(plan, zero=zero))
        for plan in (Plan(data=2), STAGES_DATA)
        for zero in (2, 3)
    ),
    (Task(Recomputing, (2, 2), batch=2).with_engine(bucket_bytes=100), Plan(zero=3)),
    *((UNUSED.with_engine(bucket_bytes=40, clip_norm=0.5), Plan(((1, 2),), zero=zero)) for zero in (1, 2, 3)),
]


@pytest.mark.parametrize(("task", "plan"), FURTHER, ids=label)
@pytest.mark.sample(6)
def test_transformers_whole_parameters_recomputed_blocks_and_idle_ones(ranks: Ranks, task: Task, plan: Plan) -> None:
    """Attention takes the parameters of a module that is never called; Adafactor needs whole ones."""
    check(ranks, task, plan)


@pytest.mark.parametrize("zeros", [(0, 1), (1, 3), (3, 0)], ids=str)
@pytest.mark.sample(1)
def test_parameters_with_few_elements_are_saved_and_go_on(ranks: Ranks, tmp_path: Path, zeros: tuple[int, int]) -> None:
    task = Task(Scaled, (2, 2), batch=2, optimizer="Adam").with_engine(bucket_bytes=100)
    check_going_on(ranks, task, tmp_path, *((Plan(data=2, zero=zero), 1 + 2 * i) for i, zero in enumerate(zeros)))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.sample(1)
def test_random_numbers_are_those_of_training_without_zero(ranks: Ranks, zero: int) -> None:
    task = DROPPING.with_engine(bucket_bytes=40)
    shared, repeated = (ranks(2).run(train, task, Plan(((1, 2),), zero=stage))[0] for stage in (zero, 0))
    assert_like(shared, repeated)


TOUCHED = ("head.linear.weight", "stem.1.running_mean")


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.sample(1)
@on_ranks(3)
def test_replicas_that_have_come_apart_are_found(comm: Communicator, zero: int) -> None:
    """What the check says before and after one rank changes one weight, or, under ZeRO 3, a buffer."""
    engine = short_runs.engine_of(comm, SMALL, Plan(data=comm.size, zero=zero))
    short_runs.step(engine, SMALL, 0)
    engine.check_replicas()
    if comm.rank == 1:
        model = engine.stages.modules_of[0]
        (model.get_buffer if zero == 3 else model.get_parameter)(TOUCHED[zero == 3]).data[0] += 1e-9
    words = rf"^replicas have come apart: {TOUCHED[zero == 3]} on ranks \[1\] of the 3"
    with pytest.raises(Refusal, match=words):
        engine.check_replicas()


def engine_of(
    comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, zero: int, **options: Any
) -> Engine:
    return Engine(model, Plan(data=comm.size, zero=zero), optimizer, F.cross_entropy, comm=comm, **options)


def images_of(step: int) -> Tensor:
    return torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


TARGETS = torch.tensor([0, 2])


@pytest.mark.parametrize("zero", [0, 1, 3])
@on_ranks(2)
def test_a_model_without_trained_parameters(comm: Communicator, zero: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = engine_of(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), zero)
    result = engine.step([images_of(0)[comm.rank :][:1]], TARGETS, (2, 2))
    after = engine.gather_state()
    torch.testing.assert_close(before if after is None else after, before)
    assert result.gradient_norm == 0.0


@pytest.mark.parametrize("zero", [0, 1, 3])
@on_ranks(2)
def test_a_second_engine_takes_no_optimizer_or_model_that_was_shared_out(comm: Communicator, zero: int) -> None:
    """A second engine with the optimizer of the first one, and with a new one."""
    model = Recomputing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine_of(comm, model, optimizer, zero)
    new, absent = torch.optim.SGD(model.parameters(), lr=0.1), "^a parameter of shape .* when with ZeRO 3 each rank has"
    for again, is_refused, words in (
        (optimizer, zero > 0, absent if zero == 3 else "^the optimizer has parameters that the model does not have"),
        (new, zero == 3, absent),
    ):
        with pytest.raises(Refusal, match=words) if is_refused else nullcontext():
            engine_of(comm, model, again, 0)


class Counting(torch.optim.SGD):
    """Goes more slowly from step to step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] /= 2
        super().step()


def count(comm: Communicator, zero: int) -> str:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 3)).double()
    optimizer = Counting(model.parameters(), lr=1.0)
    try:
        engine = engine_of(comm, model, optimizer, zero, bucket_bytes=8)
    except Refusal as refusal:
        return str(refusal)
    engine.step([images_of(0)[comm.rank :][:1]], TARGETS, (2, 2))
    return str(optimizer.param_groups[0]["lr"])


def test_optimizers_that_count_their_steps_make_one_or_none(ranks: Ranks) -> None:
    assert ranks(2).run(count, 0) == ["0.5", "0.5"]
    for said in ranks(2).run(count, 2):
        assert said.startswith("Counting may step by all parameters together, but ZeRO")


def overflow(comm: Communicator, zero: int) -> tuple[float, list[float]]:
    """The first step overflows in fp16, the second is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    options = {"precision": "fp16", "low_precision_weights": True, "bucket_bytes": 16}
    engine = engine_of(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), zero, **options)
    begun, found = engine.gather_state(), []
    for scale in (2.0**30, 1.0):
        engine.scaler.scale = scale
        engine.step([images_of(0)[comm.rank :][:1].float()], TARGETS, (2, 2))
        now = engine.gather_state()
        if begun is not None and now is not None:
            found.append(max(float((now[name] - begun[name]).abs().max()) for name in now))
    return engine.scaler.scale, found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_overflows_changes_nothing(ranks: Ranks, zero: int) -> None:
    (scale, (first, second)), _ = ranks(2).run(overflow, zero)
    assert (first, scale) == (0.0, 1.0)
    assert 0.001 < second < 1.0
