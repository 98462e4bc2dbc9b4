"""Fine-tuning by any plan equals plain PyTorch: frozen layers, unfreezing, groups of learning rates, averages."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpi4dl._patterns import select
from mpi4dl.checkpoints.checkpoints import Checkpoints
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages, names_by_first
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import EXACT, SKIPPING, Task, assert_close, batch_of, model_of, tiles_of

FROZEN = "convs.*,norms.0.*,norms.1.*"
THAWED = {2: "convs.2.*,convs.3.*", 3: "norms.1.*,convs.1.*"}  # by step
NUM_STEPS, DECAY = 5, 0.7
LAST = 4  # in this step all but the last layer is frozen again, which is all of a first stage
SMALL = (("bucket_bytes", 300),)
TASK = Task(SKIPPING.model, SKIPPING.size)


class Case(NamedTuple):
    plan: Plan
    kind: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = SMALL

    def __str__(self) -> str:
        return f"{self.plan}-{self.kind}-{self.options[1:]}"


def prepare(model: nn.Module) -> nn.Module:
    """Frozen as asked, with norms that stay in evaluation mode."""
    named = dict(model.named_parameters())
    for name in select(FROZEN, names_by_first(model)):
        named[name].requires_grad_(False)
    model.get_submodule("norms.0").eval()
    return model


def optimizer_of(kind: str, named: list[tuple[str, nn.Parameter]]) -> list[optim.Optimizer]:
    """Two learning rates, and no weight decay of norms: the same groups, whatever a rank has of the model."""
    head = [p for name, p in named if "last" in name]
    norms = [p for name, p in named if "norms" in name]
    rest = [p for name, p in named if "last" not in name and "norms" not in name]
    groups = [{"params": rest}, {"params": norms, "weight_decay": 0.0}, {"params": head, "lr": 0.02}]
    if kind == "SGD":
        return [optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)]
    if kind == "two":
        return [optim.SGD(groups[:2], lr=0.05, momentum=0.9), optim.AdamW(groups[2:], eps=1e-2)]
    return [optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-2)]


class Learnt(NamedTuple):
    state: dict[str, Tensor]
    average: dict[str, Tensor]
    losses: list[float]


def hold(comm: Communicator, plan: Plan) -> LocalStages:
    if plan.num_stages > 1:
        return split(lambda: prepare(model_of(TASK)), plan, comm, image=(4, 3, *TASK.size))
    torch.manual_seed(0)
    return LocalStages.whole(prepare(model_of(TASK)), plan, comm)


def engine_for(comm: Communicator, case: Case) -> Engine:
    held = hold(comm, case.plan)
    found = optimizer_of(case.kind, list(held.named_parameters()))
    return Engine(
        held,
        case.plan,
        found if len(found) > 1 else found[0],
        F.cross_entropy,
        comm=comm,
        ema=DECAY,
        **dict(case.options),
    )


def freeze_in(step: int, model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if step == LAST and "last" not in name:
            p.requires_grad_(False)


def steps(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        if number in THAWED:
            engine.unfreeze(THAWED[number])
        freeze_in(number, engine.stages)
        images, targets = batch_of(TASK, number)
        losses.append(engine.step(tiles_of(images, engine), targets, TASK.size).loss)
    return losses


def learn(comm: Communicator, case: Case) -> Learnt | None:
    engine = engine_for(comm, case)
    losses = steps(engine, 0, NUM_STEPS)
    with engine.averaged():
        average = engine.gather_state()
    state = engine.gather_state()
    engine.check_replicas()
    return None if state is None or average is None else Learnt(state, average, losses)


def plainly(kind: str, num_microbatches: int) -> Learnt:
    torch.manual_seed(0)
    model = prepare(model_of(TASK))
    optimizers = optimizer_of(kind, list(model.named_parameters()))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for number in range(NUM_STEPS):
        for name in select(THAWED.get(number, ""), names_by_first(model)):
            model.get_parameter(name).requires_grad_()
        freeze_in(number, model)
        images, targets = batch_of(TASK, number)
        model.zero_grad()
        total = 0.0
        for some, wanted in zip(images.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
            loss = F.cross_entropy(model(some), wanted) / num_microbatches
            loss.backward()
            total += float(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        ema.update_parameters(model)
        losses.append(total)
    return Learnt(dict(model.state_dict()), dict(ema.module.state_dict()), losses)


def assert_learnt(found: Learnt | None, case: Case) -> None:
    expected = plainly(case.kind, case.plan.num_microbatches)
    assert found is not None
    assert found.losses == pytest.approx(expected.losses[-len(found.losses) :], rel=EXACT)
    for ours, theirs in ((found.state, expected.state), (found.average, expected.average)):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert_close(ours[name], value, EXACT, name)
    assert not torch.equal(expected.state["last.weight"], expected.average["last.weight"])


CASES = [
    Case(Plan(((1, 2),), data=2, zero=3), "two"),
    Case(Plan(((1, 1), (1, 1)), data=2, microbatches=2, zero=2), "SGD"),
    Case(Plan(((1, 1), (1, 1)), bidirectional=1, microbatches=2, zero=1)),
    Case(Plan(data=2), options=(*SMALL, ("offload", "disk"))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(2)
def test_frozen_layers_that_are_trained_later(ranks: Ranks, case: Case) -> None:
    assert_learnt(ranks(case.plan.num_ranks).run(learn, case)[0], case)


def go_on(comm: Communicator, first: Case, second: Case, at: int, folder: Path) -> Learnt | None:
    """Begin by one plan, and go on from a checkpoint of step `at` by another."""
    with Checkpoints(folder, comm) as checkpoints:
        begun = engine_for(comm, first)
        steps(begun, 0, at)
        checkpoints.save(begun, {})
    with Checkpoints(folder, comm) as checkpoints:
        found = checkpoints.newest()
        assert found is not None
        engine = engine_for(comm, second)
        checkpoints.load(engine, found)
        for number in range(at):
            engine.unfreeze(THAWED.get(number, ""))
        losses = steps(engine, at, NUM_STEPS)
    with engine.averaged():
        average = engine.gather_state()
    state = engine.gather_state()
    return None if state is None or average is None else Learnt(state, average, losses)


ZERO3, STAGES = Case(Plan(data=2, microbatches=2, zero=3), "two"), Case(Plan(((1, 1), (1, 1)), microbatches=2), "two")


@pytest.mark.parametrize(
    ("first", "second", "at"), [(ZERO3, STAGES, 2), pytest.param(STAGES, ZERO3, 3, marks=pytest.mark.exhaustive)]
)
def test_a_checkpoint_before_and_after_layers_are_unfrozen(
    ranks: Ranks, tmp_path: Path, first: Case, second: Case, at: int
) -> None:
    assert_learnt(ranks(2).run(go_on, first, second, at, tmp_path)[0], second)


@on_ranks(2)
def test_what_cannot_be_unfrozen_is_refused_on_all_ranks(comm: Communicator) -> None:
    """What is said of patterns that match nothing, of a parameter that no optimizer has, and of one thawed by hand."""
    torch.manual_seed(0)
    model = prepare(model_of(TASK))
    known = [p for name, p in model.named_parameters() if name != "convs.0.weight"]
    engine = Engine(model, Plan(data=comm.size), optim.SGD(known, lr=0.1), F.cross_entropy, comm=comm)
    said = []
    for pattern in ("convs.2.wight", "convs.0.*", "convs.1.*" if comm.rank else "convs.2.*"):
        with pytest.raises(Refusal) as refused:
            engine.unfreeze(pattern)
        said.append(str(refused.value))
    model.get_parameter("convs.1.weight").requires_grad_()
    with pytest.raises(Refusal) as refused:
        steps(engine, 0, 1)
    unknown, without, unlike, by_hand = [*said, str(refused.value)]
    assert unknown.startswith("no parameter has a name like 'convs.2.wight'; the nearest are convs.2.weight")
    assert without.startswith("convs.0.weight cannot be unfrozen, as the optimizer does not have it")
    assert "unfrozen is ['convs.2.weight'] on rank 0 but ['convs.1.weight'] on rank 1" in unlike
    assert "engine.unfreeze() of all ranks" in by_hand
