"""A short training run by the engine on ranks, and the same one by a plain PyTorch loop: they should agree."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.checkpoints import Checkpoints, save_model
from mpi4dl.comm import Communicator
from mpi4dl.datasets.slides.compose import Cohort
from mpi4dl.engine import Engine, Evaluation, Runner, StepResult
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from mpi4dl.tasks.formulas import main_output
from tests.pool.ranks import Ranks
from tests.support.differences import first_difference

NUM_CLASSES = 3
NUM_STEPS = 3
EVALUATED = 2  # steps before the validation, which the last step must not suffer from
EXACT = 1e-10
ROUNDING = 1e-15

TILES_1x2 = Plan(((1, 2),))
TILES_2x2 = Plan(((2, 2),))
DATA_2 = Plan(data=2)
BOTH = Plan(((1, 2),), data=2)


def words_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy of a class for each token: logits (N, T, C), which models of Hugging Face have in an object."""
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@dataclass(frozen=True)
class Task:
    """What is trained, and how; the plan is no part of it. Options are pairs, so that a task can be a key.

    `model` is a name, or a function that can be pickled. Its inputs are images of `size`, or if there are `tokens`,
    sequences of so many, of which the next ones are the targets. `optimizer` is one of OPTIMIZERS, or a function.
    `balance` cuts the model into the plan's stages, the first of which is streamed if `stream` says how; `styles` cut
    its parameters. `frozen_last`: all modules are in evaluation mode in the last step. Losses, gradients and weights
    agree up to `tolerance`. Everything happens within the context that `within` makes.
    """

    model: str | Callable[[], nn.Module]
    size: tuple[int, ...]
    batch: int = 4
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "SGD"
    dense: bool = False
    tokens: int = 0
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    model_options: tuple[tuple[str, Any], ...] = ()
    engine_options: tuple[tuple[str, Any], ...] = ()
    balance: str | tuple[int, ...] = "flops"
    num_steps: int = NUM_STEPS
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    stream: StreamOptions | None = None
    styles: tuple[tuple[str, str], ...] = ()
    frozen_last: bool = False
    tolerance: float = EXACT
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def with_engine(self, **options: Any) -> "Task":
        return replace(self, engine_options=tuple(options.items()))

    def __str__(self) -> str:
        words = [
            *(
                each if isinstance(each, str) else getattr(each, "__name__", "own")
                for each in (self.model, self.optimizer)
            ),
            "x".join(map(str, self.size)),
            f"batch{self.batch}",
        ]
        return "-".join(words + [f"{name}={getattr(value, '__name__', value)}" for name, value in self.engine_options])


def label(value: object) -> str:
    """The name of a task or a plan in the ids of tests."""
    return value.describe().replace(", ", "-") if isinstance(value, Plan) else str(value)


@dataclass
class Outcome:
    """What a training run left behind; ranks other than 0 give no more than digests of what they hold.

    `gradients` are those of the last step, None where there is none. Digests are of the state and of the gradients,
    `watched` is what `train` was asked to watch.
    """

    steps: list[StepResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    watched: Any = None


SMALL = Task("small_resnet", (66, 50), model_options=(("num_filters", 8),))
UNEVEN = replace(SMALL, batch=3)
NARROWING = replace(SMALL, size=(24, 20), batch=8)  # one pixel at the end: three of four tiles are empty there
DEEP = Task("resnet_v2", (19, 14), optimizer="AdamW", model_options=(("depth", 11), ("num_filters", 4)))
TORCHVISION = Task("resnet18", (71, 45))
DENSE = Task("unet", (23, 18), batch=2, dense=True, model_options=(("num_filters", 4), ("depth", 2)))
DROPPING = Task("dropping", (21, 17))
UNUSED = Task("unused", (12, 10))
ALIASED = Task("aliased", (12, 8))
ATTENDING = Task("attending", (12, 8))
SKIPPING = Task("skipping", (13, 10))
FROZEN = Task("frozen", (13, 10))
HOOKED = Task("hooked", (13, 10))


class _Block(nn.Module):
    """Two convolutions, and dropout whose mask differs from pixel to pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Dropping(nn.Module):
    """Dropout of pixels in a block that can be recomputed, and of features that all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class _Unused(nn.Module):
    """Parameters that play no part, forgotten or frozen, between others that do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.forgotten = nn.Linear(4, 4)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).relu().mean((2, 3)))


class _Skipping(nn.Module):
    """Two skips that cross, over batch norms and a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(c, 4, 3, s, 1, bias=False) for c, s in ((3, 1), (4, 1), (4, 2), (4, 1))])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(4)])
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norms[0](self.convs[0](x)).relu()
        second = self.norms[1](self.convs[1](first)).relu()
        third = self.norms[2](self.convs[2](second + first)).relu()
        fourth = self.norms[3](self.convs[3](third)) + F.max_pool2d(first, 2, ceil_mode=True)
        return self.last((fourth + third).mean((2, 3)))


class _Attending(nn.Module):
    """A small transformer over the patches of an image, with a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head(self.encoder(x)[:, 0])


class _Aliased(nn.Module):
    """A layer that the forward pass uses only by the name that it has in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList([self.alias, nn.Conv2d(4, 4, 3)])
        self.also_unused = nn.Linear(2, 2)
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean((2, 3)))


class _Frozen(_Skipping):
    """Some of its batch norms are in evaluation mode, as is usual with few samples in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms[1].eval()
        self.norms[2].eval()


class _Normalizing(nn.Module):
    """Hands gradients on with a norm of 1."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.square().sum().sqrt())
        return x


class _Hooked(nn.Module):
    """Hooks on the gradients of an activation and of pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2)
        self.normalizing, self.again = _Normalizing(), _Normalizing()
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalizing(self.first(x)).relu()
        return self.last(self.again(self.second(x).square().mean((2, 3))))


class _Transforming(nn.Module):
    """A block with layers that look at the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.fft.fft2(self.first(x)).real.tanh().sort(2).values)


class _Spectral(nn.Module):
    """What has no rules for tiles: within a block that can be recomputed, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.Sequential(_Transforming()), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.last((x * torch.fft.fft2(x).abs().sqrt()).mean((2, 3)))


OWN = {
    "aliased": _Aliased,
    "attending": _Attending,
    "dropping": _Dropping,
    "frozen": _Frozen,
    "hooked": _Hooked,
    "skipping": _Skipping,
    "spectral": _Spectral,
    "unused": _Unused,
}


def model_of(task: Task) -> nn.Module:
    options = dict(task.model_options)
    own = OWN.get(task.model) if isinstance(task.model, str) else task.model
    model = models.build(task.model, NUM_CLASSES, **options) if own is None else own()
    return model.to(task.dtype)


OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "smooth AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-2),  # does not enlarge the rounding of tiny gradients
    "slow SGD": partial(torch.optim.SGD, lr=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.9),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


def optimizer_of(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(task.optimizer, str):
        return OPTIMIZERS[task.optimizer](model.parameters())
    return task.optimizer(model)


def build(task: Task, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = model_of(task)
    return model, optimizer_of(task, model)


def batch_of(task: Task, number: int, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images, and the targets of all of them or of all of their pixels; or tokens, and the next ones."""
    generator = torch.Generator().manual_seed(100 + number)
    count = task.batch if count is None else count
    if task.tokens:
        tokens = torch.randint(1, task.tokens, (count, task.size[0] + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.randn(count, 3, *task.size, generator=generator, dtype=torch.float64).to(task.dtype)
    shape = (count, *task.size) if task.dense else (count,)
    return images, torch.randint(NUM_CLASSES, shape, generator=generator)


def held_out(task: Task) -> list[tuple[Tensor, Tensor]]:
    """Batches for validation: one that is smaller than in training, and one image, fewer than there are replicas."""
    return [batch_of(task, 50 + i, count) for i, count in enumerate((max(1, task.batch - 1), 1))]


def tiles_of(images: Tensor, engine: Runner, training: bool = True) -> list[Tensor]:
    """The parts of whole images that the engine's rank reads."""
    size = images.shape[1:] if images.dim() == 2 else images.shape[2:]
    boxes = [read.box for read in engine.reads(len(images), tuple(size), training)]
    return [
        images[(slice(*box.batch), ..., *(slice(*interval) for interval in box.space))].contiguous() for box in boxes
    ]


def digest_of(values: Mapping[str, Tensor]) -> str:
    """Equal for equal bits."""
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(name.encode() + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def engine_of(comm: Communicator, task: Task, plan: Plan, seed: int = 0) -> Engine:
    """The task's model, by this plan."""
    options: dict[str, Any] = {"styles": dict(task.styles) or None}
    if plan.num_stages > 1 or task.stream is not None:
        options |= {"device": task.device, "seed": seed, "balance": task.balance, "stream": task.stream}
        image = (task.batch, *task.size) if task.tokens else (task.batch, 3, *task.size)
        model = split(lambda: model_of(task), plan, comm, image=image, **options)
    else:
        torch.manual_seed(seed)
        model = LocalStages.whole(model_of(task).to(task.device), plan, comm, **options)
    for value in model.buffers() if seed else ():
        value += seed
    return Engine(model, plan, optimizer_of(task, model), task.loss, comm=comm, **dict(task.engine_options))


def step(engine: Engine, task: Task, number: int) -> StepResult:
    """The step of this number, which is that of its batch."""
    images, targets = batch_of(task, number)
    return engine.step(tiles_of(images, engine), targets, task.size)


Watch = Callable[[Engine], Callable[[], Any]]


def train(comm: Communicator, task: Task, plan: Plan, own_values: bool = False, watch: Watch | None = None) -> Outcome:
    """A body: the task on ranks, whose models begin with the same values or each with its own.

    `watch` is called with the engine before the first step, and what it returns after the last one.
    """
    with task.within():
        engine = engine_of(comm, task, plan, comm.rank if own_values else 0)
        watched = None if watch is None else watch(engine)
        torch.manual_seed(7)
        outcome = Outcome()
        for number in range(task.num_steps):
            if number == min(EVALUATED, task.num_steps - 1):
                batches = [(tiles_of(images, engine, training=False), targets) for images, targets in held_out(task)]
                outcome.evaluation = engine.evaluate(batches, task.size)
            if task.frozen_last and number == task.num_steps - 1:
                engine.stages.eval()
            outcome.steps.append(step(engine, task, number))
        return outcome_of(engine, outcome, watched)


def outcome_of(engine: Engine, outcome: Outcome, watched: Callable[[], Any] | None = None) -> Outcome:
    """With what all ranks have learnt. Collective."""
    engine.check_replicas()
    plan, stages = engine.plan, engine.stages
    own = {} if plan.zero == 3 or plan.cuts_parameters else stages.own_state()
    if own and not plan.zero:
        mine = gradients_of(stages.modules_of.values())
        own |= {f"{name}.grad": value for name, value in mine.items() if value is not None}
    outcome.digests = {name: digest_of({name: value}) for name, value in own.items()}
    outcome.state = engine.gather_state() or {}
    outcome.gradients = engine.gather_gradients() or {}
    outcome.watched = None if watched is None else watched()
    return outcome


def go_on(comm: Communicator, task: Task, plan: Plan, folder: Path, num_steps: int) -> Outcome:
    """A body: the task goes on from the newest checkpoint, if there is any, until so many steps are made."""
    with task.within():
        engine, outcome = engine_of(comm, task, plan), Outcome()
        with Checkpoints(folder, comm) as checkpoints:
            found = checkpoints.newest()
            if found is not None:
                checkpoints.load(engine, found)
            for number in range(engine.num_steps, num_steps):
                outcome.steps.append(step(engine, task, number))
            checkpoints.save(engine, {})
        save_model(engine, folder / "model.safetensors")
        return outcome_of(engine, outcome)


def gradients_of(modules: Iterable[nn.Module]) -> dict[str, Tensor | None]:
    return {name: p.grad for module in modules for name, p in module.named_parameters()}


def plain(task: Task, num_microbatches: int = 1) -> Outcome:
    """The reference: the loop of any PyTorch tutorial, over microbatches of even cuts."""
    options = {
        name: value for name, value in task.engine_options if name in ("clip_norm", "clip_value", "gradient_hook")
    }
    return _plain(
        replace(task, balance="flops", stream=None, styles=(), device="cpu").with_engine(**options), num_microbatches
    )


@cache
def _plain(task: Task, num_microbatches: int) -> Outcome:
    options, outcome = dict(task.engine_options), Outcome()
    clip_norm, hook = options.get("clip_norm", float("inf")), options.get("gradient_hook")
    with task.within():
        model, optimizer = build(task)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        torch.manual_seed(7)
        for number in range(task.num_steps):
            if number == min(EVALUATED, task.num_steps - 1):
                outcome.evaluation = evaluate(model, held_out(task), task.loss)
            if task.frozen_last and number == task.num_steps - 1:
                model.eval()
            images, targets = batch_of(task, number)
            optimizer.zero_grad()
            total = 0.0
            cuts = [len(images) * i // num_microbatches for i in range(1, num_microbatches)]
            for some, wanted in zip(images.tensor_split(cuts), targets.tensor_split(cuts), strict=True):
                loss = task.loss(model(some), wanted) * (len(some) / len(images))
                loss.backward()
                total += float(loss.detach())
            for name, p in model.named_parameters() if hook is not None else ():
                if p.grad is not None:
                    p.grad = hook(name, p.grad)
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if "clip_value" in options:
                nn.utils.clip_grad_value_(model.parameters(), options["clip_value"])
            optimizer.step()
            outcome.steps.append(StepResult(total, float(norm)))
    outcome.state = model.state_dict()
    outcome.gradients = {name: model.get_parameter(name).grad for name in trained}
    return outcome


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_of: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
) -> Evaluation:
    """The means over all images, by plain PyTorch, of a model whose modules are then in their own modes again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    total, correct, count, classified = 0.0, 0, 0, True
    for images, targets in batches:
        outputs = model(images)
        classified = targets.dim() == 1
        total += float(loss_of(outputs, targets)) * len(targets)
        correct += int((main_output(outputs).argmax(1) == targets).sum()) if classified else 0
        count += len(targets)
    for module, mode in modes.items():
        module.training = mode
    return Evaluation(total / count, correct / count if classified else None, count)


def assert_like(found: Outcome, expected: Outcome, tolerance: float = EXACT) -> None:
    """Losses, norms, gradients, every weight and buffer, and the validation agree, each relative to its own size."""
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance), f"loss of step {number}"
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=tolerance), f"norm of step {number}"
    assert found.evaluation is not None
    assert expected.evaluation is not None
    assert found.evaluation.loss == pytest.approx(expected.evaluation.loss, rel=tolerance)
    assert found.evaluation.accuracy == expected.evaluation.accuracy
    assert found.evaluation.count == expected.evaluation.count
    assert_learnt(found, expected, tolerance)


def assert_learnt(found: Outcome, expected: Outcome, tolerance: float = EXACT) -> None:
    """Every weight and buffer, and the gradients of the last step, agree."""
    assert list(found.state) == list(expected.state)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, value in expected.state.items():
        assert_close(found.state[name], value, tolerance, name)
    rounding = ROUNDING * max(1.0, expected.steps[-1].gradient_norm)  # all that is known of what cancels out
    for name, gradient in expected.gradients.items():
        ours = found.gradients[name]
        assert (ours is None) == (gradient is None), f"{name}.grad"
        if ours is not None and gradient is not None:
            assert_close(ours, gradient, tolerance, f"{name}.grad", rounding)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str, rounding: float = ROUNDING) -> None:
    assert found.shape == expected.shape, name
    if not expected.numel():
        return
    errors, size = (found.double() - expected.double()).abs(), float(expected.double().abs().max())
    wrong = ~(errors <= tolerance * size + rounding)
    if wrong.any():
        first = first_difference(found, expected, wrong)
        raise AssertionError(f"{name}: off by {errors.max():.1e} of {size:.1e}; {first}")


def assert_learnt_alike(engine: Engine, expected: nn.Module) -> None:
    """All ranks together have the state, and had the last gradients, of a plain model. Collective."""
    gradients, state = engine.gather_gradients(), engine.gather_state()
    engine.check_replicas()
    if engine.comm.rank:
        return
    assert state is not None
    assert gradients is not None
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert_close(state[name], value, EXACT, name)
    assert list(gradients) == [name for name, p in expected.named_parameters() if p.requires_grad]
    for name, p in expected.named_parameters():
        if p.requires_grad:
            found = gradients[name]
            assert found is not None
            assert p.grad is not None
            assert_close(found, p.grad, EXACT, f"{name}.grad")


def check(ranks: Ranks, task: Task, plan: Plan, watch: Watch | None = None) -> list[Outcome]:
    """The task by this plan equals the plain loop, and all ranks that hold a value end with the same bits of it."""
    outcomes: list[Outcome] = ranks(plan.num_ranks).run(train, task, plan, False, watch)
    bits: dict[str, str] = {}
    for outcome in outcomes:
        for name, digest in outcome.digests.items():
            assert bits.setdefault(name, digest) == digest, name
    if not plan.zero and not plan.cuts_parameters:
        gradients = {f"{name}.grad" for name, value in outcomes[0].gradients.items() if value is not None}
        assert bits.keys() >= outcomes[0].state.keys() | gradients
    assert all(outcome.steps == outcomes[0].steps for outcome in outcomes)
    assert all(outcome.evaluation == outcomes[0].evaluation for outcome in outcomes)
    try:
        assert_like(outcomes[0], plain(task, plan.num_microbatches), task.tolerance)
    except AssertionError as error:
        error.add_note(f"{task}, by {plan}")
        raise
    return outcomes


def check_going_on(ranks: Ranks, task: Task, folder: Path, *parts: tuple[Plan, int]) -> None:
    """By one plan up to a step, from its checkpoint by the next: it ends as the plain loop does."""
    expected, first = plain(task), 0
    for plan, last in parts:
        outcome: Outcome = ranks(plan.num_ranks).run(go_on, task, plan, folder, last)[0]
        losses = [result.loss for result in outcome.steps]
        assert losses == pytest.approx([result.loss for result in expected.steps[first:last]], rel=task.tolerance)
        first = last
    assert_learnt(outcome, expected, task.tolerance)
    written = load_file(folder / "model.safetensors")
    assert written.keys() <= expected.state.keys()
    assert len({id(value) for value in written.values()}) == len({v.data_ptr() for v in expected.state.values()})
    for name, value in written.items():
        assert_close(value, expected.state[name], task.tolerance, name)


def write_mixed_cohort(folder: Path, count: int = 6, side_px: int = 700) -> Path:
    """Write small slides of several sizes, in three formats and of two magnifications, and their table."""
    slides = Cohort(count, 1, side_px, (0.5, 0.25), (".tif", ".ome.tif", ".svs"), 0.009)
    for number in range(len(slides)):
        slides.write(folder, number)
    (folder / "slides.csv").write_text(slides.table())
    return folder
