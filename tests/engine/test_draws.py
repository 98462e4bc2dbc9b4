"""Models that draw from Python's and NumPy's generators: ranks that share images draw the same, as one process does."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.checkpoints import Checkpoints, load
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, NUM_CLASSES, Task, TILES_1x2, assert_close, batch_of, digest_of, tiles_of

TASK = Task("drawing", (12, 10))
PROCESSES = {"python": random.random, "numpy": np.random.rand}


class Shaken(nn.Module):
    """A block of which a number by a generator decides what it does, and how much; and what it counts."""

    def __init__(self, channels: int, by: str) -> None:
        super().__init__()
        self.layers, self.by, self.calls = nn.ModuleList([nn.Conv2d(channels, 4, 3, padding=1)]), by, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        draw = PROCESSES[self.by]
        y: Tensor = self.layers[0](x)
        if draw() < 0.5:
            y = F.max_pool2d(y, 3, 1, 1)  # takes a message of its own
        return y.tanh() * (draw() + self.calls)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Shaken(3, "numpy"), Shaken(4, "python"), Shaken(4, "numpy"))
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x).mean((2, 3)))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def engine_of(comm: Communicator, plan: Plan, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = Drawing().double()
    return Engine(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, comm=comm, **options)


def step(engine: Engine, number: int) -> float:
    images, targets = batch_of(TASK, number)
    return engine.step(tiles_of(images, engine), targets, TASK.size).loss


def evaluate(engine: Engine) -> float:
    images, targets = batch_of(TASK, 9)
    return engine.evaluate([(tiles_of(images, engine, training=False), targets)], TASK.size).loss


def train(comm: Communicator, plan: Plan, recompute: bool) -> Any:
    engine = engine_of(comm, plan, recompute=recompute)
    seed_all(5)
    losses = [step(engine, number) for number in range(3)]
    losses.append(evaluate(engine))
    state = engine.gather_state()
    return [*losses, *drawn()], state


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", [TILES_1x2, Plan(data=2), Plan(((1, 2),), data=2)], ids=Plan.describe)
@pytest.mark.sample(2)
def test_a_model_that_draws_is_plain_pytorch(ranks: Ranks, plan: Plan, recompute: bool) -> None:
    torch.manual_seed(0)
    model = Drawing().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_all(5)
    losses = []
    for number in range(3):
        images, targets = batch_of(TASK, number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    images, targets = batch_of(TASK, 9)
    with torch.no_grad():
        losses.append(F.cross_entropy(model(images), targets).item())
    expected = [*losses, *drawn()]
    found, state = ranks(plan.num_ranks).run(train, plan, recompute)[0]
    assert found == pytest.approx(expected, rel=EXACT)
    for name, value in model.state_dict().items():
        assert_close(state[name], value, EXACT, name)


def begin_unlike(comm: Communicator) -> Any:
    """What ranks draw whose generators nobody seeded; then what is said where they come apart later on."""
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    engine = engine_of(comm, TILES_1x2)
    alike = step(engine, 0), random.random(), float(np.random.rand())
    said = []
    images = [(tiles_of(batch_of(TASK, 1)[0], engine, training=False), TASK.batch)]
    for seed in (random.seed, np.random.seed):
        for act in (lambda: step(engine, 1), lambda: evaluate(engine), lambda: list(engine.predict(images, TASK.size))):
            seed_all(4)
            seed(20 + 30 * comm.rank)  # which decide alike at first
            with pytest.raises(Refusal) as raised:
                act()
            said.append(str(raised.value))
    return alike, said


def test_ranks_that_share_images_begin_alike_and_stay_so(ranks: Ranks) -> None:
    (alike, said), (others, too) = ranks(2).run(begin_unlike)
    assert alike == others
    assert said == too
    assert all("random.seed" in each for each in said)


def in_stages(comm: Communicator, plan: Plan) -> Any:
    """Losses, digests of the parameters, and whether the generators of this process stay as they are."""
    options: Any = {
        "image": (TASK.batch, 3, *TASK.size),
        "balance": (2, 3),
        "whole": ("blocks.0", "blocks.1", "blocks.2"),
    }
    held = split(lambda: Drawing().double(), plan, comm, **options)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    seed_all(comm.rank)
    losses = [step(engine, 0), step(engine, 1), evaluate(engine)]
    after = drawn()
    seed_all(comm.rank)
    engine.check_replicas()
    return losses, drawn() == after


@pytest.mark.parametrize("schedule", [{}, {"microbatches": 2}])
@pytest.mark.sample(1)
def test_ranks_that_share_a_stage_draw_alike(ranks: Ranks, schedule: dict[str, int]) -> None:
    """As one rank in its place would."""
    one, wide = Plan(((1, 1), (1, 1)), **schedule), Plan(((1, 2), (1, 1)), **schedule)
    expected = ranks(2).run(in_stages, one)
    found = ranks(3).run(in_stages, wide)
    assert all(stay for _, stay in (*expected, *found))
    assert found[0][0] == pytest.approx(expected[0][0], rel=EXACT)


def go_on(comm: Communicator, folder: Path) -> Any:
    """Digests after two more steps, straight on and resumed; and what is drawn behind a checkpoint of unlike ranks."""
    engine, again = (engine_of(comm, TILES_1x2) for _ in range(2))
    seed_all(3)
    with Checkpoints(folder, comm) as checkpoints:
        step(engine, 0)
        checkpoints.save(engine, {})
        digests = []
        for each in (engine, again):
            if each is again:
                seed_all(8)
                for module in again.stages.modules():
                    if isinstance(module, Shaken):
                        module.calls = 1  # what Python counts is in no checkpoint
                checkpoints.wait()
                load(again, checkpoints.newest() or folder)
            losses = [step(each, number) for number in (1, 2)]
            digests.append((losses, drawn(), digest_of(dict(each.stages.named_parameters()))))
        random.seed(comm.rank)
        np.random.seed(comm.rank)
        checkpoints.save(engine, {})
        checkpoints.wait()
        load(again, checkpoints.newest() or folder)
    return digests, drawn()[1:]


def test_a_resumed_run_draws_what_it_would_have_drawn(ranks: Ranks, tmp_path: Path) -> None:
    (digests, after), (_, other) = ranks(2).run(go_on, tmp_path)
    assert digests[0] == digests[1]
    assert after == other
