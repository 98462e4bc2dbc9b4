"""mpi4dl.engine: training by any plan equals a plain PyTorch loop over the whole images and the whole batch."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation, StepResult
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks

NUM_CLASSES = 3
NUM_STEPS = 3
EXACT = 1e-10

TILES_1x2 = Plan((1, 2))
TILES_2x2 = Plan((2, 2))
DATA_2 = Plan(data=2)
BOTH = Plan((1, 2), data=2)


@dataclass(frozen=True)
class Task:
    """What is trained, and how; the plan is no part of it."""

    model: str
    size: tuple[int, int]
    batch: int = 4
    optimizer: str = "SGD"
    dense: bool = False
    model_options: tuple[tuple[str, Any], ...] = ()
    engine_options: tuple[tuple[str, Any], ...] = ()


@dataclass
class Outcome:
    """What a training run left behind; ranks other than 0 give the digest of the state alone."""

    steps: list[StepResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    digest: str = ""


SMALL = Task("small_resnet", (66, 50), model_options=(("num_filters", 8),))
DEEP = Task("resnet_v2", (19, 14), optimizer="AdamW", model_options=(("depth", 20), ("num_filters", 4)))
TORCHVISION = Task("resnet18", (71, 45))
NARROWING = Task("small_resnet", (24, 20), batch=8)  # one pixel at the end: three of four tiles are empty there
UNEVEN = Task("small_resnet", (66, 50), batch=3, model_options=(("num_filters", 8),))
DENSE = Task("unet", (23, 18), batch=2, dense=True, model_options=(("num_filters", 4), ("depth", 2)))


class Dropping(nn.Module):
    """A layer whose mask differs from pixel to pixel, and one that drops whole features, of a replicated tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.ReLU()))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class Unused(nn.Module):
    """A model that has parameters which play no part: forgotten, or frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.forgotten = nn.Linear(4, 4)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).relu().mean((2, 3)))


OWN = {"dropping": Dropping, "unused": Unused}


def build(task: Task, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    options = dict(task.model_options)
    model = OWN[task.model]() if task.model in OWN else models.build(task.model, NUM_CLASSES, **options)
    model.double()
    if task.optimizer == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch_of(task: Task, number: int, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Whole images, and the targets of all of them, or of all of their pixels."""
    generator = torch.Generator().manual_seed(100 + number)
    count = task.batch if size is None else size
    images = torch.randn(count, 3, *task.size, generator=generator, dtype=torch.float64)
    shape = (count, *task.size) if task.dense else (count,)
    return images, torch.randint(NUM_CLASSES, shape, generator=generator)


def held_out(task: Task) -> list[tuple[Tensor, Tensor]]:
    """Batches for validation; the last one has a single image, fewer than there are replicas."""
    return [batch_of(task, 50), batch_of(task, 51, size=1)]


def tile_of(images: Tensor, engine: Engine) -> Tensor:
    box = engine.grid.box(len(images), (images.shape[2], images.shape[3]))
    batch, rows, cols = (slice(part.start, part.stop) for part in (box.batch, box.rows, box.cols))
    return images[batch, :, rows, cols].contiguous()


def digest_of(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(comm: Communicator, task: Task, plan: Plan) -> Outcome:
    """A body: the task on ranks, whose models begin with different values."""
    model, optimizer = build(task, seed=comm.rank)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm, **dict(task.engine_options))
    torch.manual_seed(7)
    outcome = Outcome()
    for number in range(NUM_STEPS):
        images, targets = batch_of(task, number)
        outcome.steps.append(engine.step(tile_of(images, engine), targets, task.size))
    batches = [(tile_of(images, engine), targets) for images, targets in held_out(task)]
    outcome.evaluation = engine.evaluate(batches, task.size)
    outcome.digest = digest_of(model.state_dict())
    outcome.state = model.state_dict() if comm.rank == 0 else {}
    return outcome


@cache
def plain(task: Task) -> Outcome:
    """The reference: the loop of any PyTorch tutorial."""
    model, optimizer = build(task)
    clip_norm = dict(task.engine_options).get("clip_norm")
    outcome = Outcome()
    for number in range(NUM_STEPS):
        images, targets = batch_of(task, number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))
        optimizer.step()
        outcome.steps.append(StepResult(float(loss.detach()), float(norm)))
    model.eval()
    total, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, targets in held_out(task):
            outputs = model(images)
            total += float(F.cross_entropy(outputs, targets)) * len(targets)
            correct += int((outputs.argmax(1) == targets).sum())
            count += len(targets)
    outcome.evaluation = Evaluation(total / count, None if task.dense else correct / count, count)
    outcome.state = model.state_dict()
    return outcome


def assert_like(found: Outcome, expected: Outcome, tolerance: float) -> None:
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance), f"loss of step {number}"
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=tolerance), f"norm of step {number}"
    assert list(found.state) == list(expected.state)
    for name, value in expected.state.items():
        error = float((found.state[name].double() - value.double()).abs().max())
        assert error <= tolerance * float(value.double().abs().max()) + 1e-15, f"{name} is wrong by {error}"
    assert found.evaluation is not None
    assert expected.evaluation is not None
    assert found.evaluation.loss == pytest.approx(expected.evaluation.loss, rel=tolerance)
    assert found.evaluation.accuracy == expected.evaluation.accuracy
    assert found.evaluation.count == expected.evaluation.count


def check(ranks: Ranks, task: Task, plan: Plan) -> None:
    """The task by this plan equals the plain loop, and all ranks end with the same bits."""
    outcomes = ranks(plan.num_ranks).run(train, task, plan)
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert all(outcome.steps == outcomes[0].steps for outcome in outcomes)
    assert all(outcome.evaluation == outcomes[0].evaluation for outcome in outcomes)
    assert_like(outcomes[0], plain(task), EXACT)


@pytest.mark.parametrize("plan", [TILES_1x2, TILES_2x2, DATA_2, BOTH], ids=str)
@pytest.mark.parametrize("task", [SMALL, DEEP], ids=lambda task: task.model)
def test_three_steps_equal_plain_pytorch(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


@pytest.mark.parametrize(
    ("task", "plan"),
    [(TORCHVISION, TILES_2x2), (TORCHVISION, BOTH), (UNEVEN, DATA_2), (UNEVEN, BOTH), (NARROWING, TILES_2x2)],
)
def test_parts_need_not_be_equal_nor_filled(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


@pytest.mark.parametrize("plan", [TILES_2x2, BOTH], ids=str)
def test_a_class_for_every_pixel_with_targets_of_the_whole_image(ranks: Ranks, plan: Plan) -> None:
    check(ranks, DENSE, plan)


def with_options(task: Task, **options: Any) -> Task:
    return replace(task, engine_options=tuple(options.items()))


@pytest.mark.parametrize(
    "task",
    [
        with_options(SMALL, recompute=True),
        with_options(DEEP, recompute=True),
        with_options(DENSE, recompute=True),
        with_options(SMALL, clip_norm=0.1),
        with_options(SMALL, clip_norm=1e9),
        Task("unused", (12, 10)),
        Task("unused", (12, 10), optimizer="AdamW"),
    ],
    ids=lambda task: f"{task.model}-{task.optimizer}-{dict(task.engine_options)}",
)
def test_no_option_changes_what_plain_pytorch_computes(ranks: Ranks, task: Task) -> None:
    check(ranks, task, BOTH)


def test_clipping_is_not_idle(ranks: Ranks) -> None:
    """The norms above are large enough to be clipped by 0.1, and clipping changes the weights."""
    clipped, free = plain(with_options(SMALL, clip_norm=0.1)), plain(SMALL)
    assert min(step.gradient_norm for step in free.steps) > 0.1
    assert not torch.equal(clipped.state["head.linear.weight"], free.state["head.linear.weight"])


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("plan", [TILES_2x2, BOTH], ids=str)
def test_the_same_seed_gives_the_same_bits(ranks: Ranks, plan: Plan, options: dict[str, Any]) -> None:
    task = with_options(Task("dropping", (21, 17)), **options)
    first, second = (ranks(plan.num_ranks).run(train, task, plan) for _ in range(2))
    assert [a.digest for a in first] == [b.digest for b in second]
    assert [a.steps for a in first] == [b.steps for b in second]
    assert len({a.digest for a in first}) == 1


def test_dropout_is_drawn_alike_when_it_is_recomputed(ranks: Ranks) -> None:
    task = Task("dropping", (21, 17))
    kept, again = (ranks(4).run(train, t, TILES_2x2)[0] for t in (task, with_options(task, recompute=True)))
    assert_like(again, kept, EXACT)


def autocast_losses(comm: Communicator, plan: Plan | None, precision: str) -> list[float]:
    """Losses of float32 training by the engine, or by the plain loop with autocast and, for fp16, loss scaling."""
    model, optimizer = build(SMALL)
    model.float()
    engine = None if plan is None else Engine(model, plan, optimizer, F.cross_entropy, comm=comm, precision=precision)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    for number in range(NUM_STEPS):
        images, targets = batch_of(SMALL, number)
        images = images.float()
        if engine is not None:
            losses.append(engine.step(tile_of(images, engine), targets, SMALL.size).loss)
            continue
        optimizer.zero_grad()
        with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
            loss = F.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_stays_near_plain_autocast(ranks: Ranks, precision: str) -> None:
    (expected,) = ranks(1).run(autocast_losses, None, precision)
    for plan in (TILES_2x2, BOTH):
        for losses in ranks(4).run(autocast_losses, plan, precision):
            assert losses == pytest.approx(expected, rel=0.05)
    exact = [step.loss for step in plain(SMALL).steps]
    assert all(ours != theirs for ours, theirs in zip(expected, exact, strict=True)), "autocast was not on"


def overflow(comm: Communicator, clip_norm: float | None) -> tuple[list[bool], list[float], bool]:
    """Steps of fp16 with a loss so large that its scaled gradient overflows: which of them moved the weights."""
    model, optimizer = build(SMALL)
    model.float()

    def large(outputs: Tensor, targets: Tensor) -> Tensor:
        return 300 * F.cross_entropy(outputs, targets)

    engine = Engine(model, TILES_1x2, optimizer, large, comm=comm, precision="fp16", clip_norm=clip_norm)
    images, targets = batch_of(SMALL, 0)
    moved, norms = [], []
    for _ in range(12):
        before = [p.detach().clone() for p in model.parameters()]
        norms.append(engine.step(tile_of(images.float(), engine), targets, SMALL.size).gradient_norm)
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        if moved[-1]:
            break
    return moved, norms, all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_fp16_leaves_out_steps_that_overflow_until_its_scale_fits(ranks: Ranks, clip_norm: float | None) -> None:
    for moved, norms, finite in ranks(2).run(overflow, clip_norm):
        assert moved[0] is False
        assert moved[-1] is True
        assert [math.isfinite(norm) for norm in norms] == moved
        assert finite


def recomputed(comm: Communicator, recompute: bool) -> tuple[int, int]:
    """How often batch norm counted three steps, and how often its forward ran."""
    model, optimizer = build(SMALL)
    engine = Engine(model, TILES_1x2, optimizer, F.cross_entropy, comm=comm, recompute=recompute)
    norm = model.get_submodule("stage2_block1.norm1")
    calls: list[int] = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    for number in range(NUM_STEPS):
        images, targets = batch_of(SMALL, number)
        engine.step(tile_of(images, engine), targets, SMALL.size)
    return int(norm.num_batches_tracked), len(calls)


def test_recomputing_runs_blocks_twice_and_counts_batches_once(ranks: Ranks) -> None:
    assert ranks(2).run(recomputed, False) == [(NUM_STEPS, NUM_STEPS)] * 2
    assert ranks(2).run(recomputed, True) == [(NUM_STEPS, 2 * NUM_STEPS)] * 2


def vanishing_root(outputs: Tensor, targets: Tensor) -> Tensor:
    """A finite loss whose gradient is infinite."""
    return (outputs - outputs.detach()).abs().sum().sqrt() + 1.0


def diverge(comm: Communicator, loss: Callable[..., Tensor], bad_rank: int | None) -> tuple[str, bool, bool]:
    """One good step, then one of which the tile of one rank is not finite, or whose loss has no finite gradient."""
    model, optimizer = build(SMALL)
    engine = Engine(model, TILES_2x2, optimizer, loss if bad_rank is None else F.cross_entropy, comm=comm)
    images, targets = batch_of(SMALL, 0)
    tile = tile_of(images, engine)
    if bad_rank is not None:
        engine.step(tile, targets, SMALL.size)
        tile = tile.clone()
        if comm.rank == bad_rank:
            tile[0, 0, 0, 0] = float("nan")
    weights = digest_of(dict(model.named_parameters()) | {})
    momenta = digest_of({str(i): s["momentum_buffer"] for i, s in optimizer.state_dict()["state"].items()})
    with pytest.raises(Refusal) as caught:
        engine.step(tile, targets, SMALL.size)
    return (
        str(caught.value),
        weights == digest_of(dict(model.named_parameters())),
        momenta == digest_of({str(i): s["momentum_buffer"] for i, s in optimizer.state_dict()["state"].items()}),
    )
