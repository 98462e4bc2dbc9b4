"""Training loops as users write them, with models on tiles, equal the same lines in one process."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpi4dl
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.spatial import NoRule
from tests.pool.ranks import Ranks

CHANNELS, CLASSES = 4, 3
Wrap = Callable[[nn.Module], nn.Module]
GRIDS = {"1x2": 1, "2x1": 1, "1x1": 2, "2x2": 1, "1x4": 1}  # tiles, and parts of the batch


class Around(nn.Module):
    """A module with what users put around one: `how` is residual, recomputed, twice, squeezed or attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.query, self.gate = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "residual":
            return x + torch.tanh(self.layer(x))
        if self.how == "recomputed":
            return checkpoint(self.layer, x, use_reentrant=False)
        if self.how == "twice":
            return self.layer(torch.tanh(self.layer(x)))
        if self.how == "squeezed":
            return x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]
        parts = self.query(x.flatten(2).mT).chunk(3, -1)
        return x + F.scaled_dot_product_attention(*parts).mT.reshape(x.shape)


class Own(torch.autograd.Function):
    """Reversed gradients, as of adversarial losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient * ctx.saved_tensors[0].cos()


class Does(nn.Module):
    """What users write within a forward pass: `what` is in place, counted, noisy, standardized or an own function."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "own":
            return Own.apply(x)
        if self.what == "standardized":
            return (x - x.mean((0, 2, 3), keepdim=True)) / (x.std((0, 2, 3), keepdim=True) + 0.1)
        if self.what == "noisy":
            return x + 0.1 * torch.randn_like(x) if self.training else x
        if self.what == "counted":
            if self.training:
                self.calls += 1
                self.steps += 1
            return x * (1 + 0.01 * self.steps + 0.01 * self.calls)
        x = x.clone()
        x[:, 0] *= 0.5
        x[x < -1] = 0
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode="reflect"),
    "strided": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 1)),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "average of batches": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "instance norm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
    "tanh": nn.Tanh,
    "pool": lambda: nn.AvgPool2d(3, 1, 1),
    "dropout": lambda: nn.Dropout2d(0.3),
    **{how: lambda how=how: Around(how) for how in ("residual", "recomputed", "twice", "squeezed", "attention")},
    **{what: lambda what=what: Does(what) for what in ("in place", "counted", "noisy", "standardized", "own")},
}


class Network(nn.Module):
    """Layers, of which `kept` keeps the maps, a dense head and one of classes."""

    def __init__(self, layers: list[str], kept: bool) -> None:
        super().__init__()
        self.stem, self.kept, self.maps = nn.Conv2d(3, CHANNELS, 3, padding=1), kept, list[Tensor]()
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.dense, self.head = nn.Conv2d(CHANNELS, 2, 1), nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, self.maps = self.stem(x), []
        for layer in self.layers:
            x = layer(x)
            if self.kept:
                self.maps.append(x)
        return {"logits": self.head(x.mean((2, 3))), "map": self.dense(x)}


class Loop(NamedTuple):
    """A network, its images, and what the loop does beside a plain one."""

    layers: list[str]
    size: tuple[int, int, int]  # samples, rows, columns
    grid: str
    style: str
    optimizer: str
    accumulate: int
    hook: str
    extras: list[str]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9, nesterov=True, weight_decay=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3),
}
STYLES = ["one", "two", "grad", "input", "adversarial", "kept", "teacher", "detached", "scaled"]
HOOKS = ["", "", "parameter", "output", "forward", "pre"]
EXTRAS = ["clip", "evaluate", "reload", "freeze", "average", "outer head", "frozen norms"]


@st.composite
def cases(draw: st.DrawFn) -> Loop:
    return Loop(
        draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=5)),
        draw(st.tuples(st.integers(2, 4), st.integers(6, 13), st.integers(6, 13))),
        draw(st.sampled_from(list(GRIDS))),
        draw(st.sampled_from(STYLES)),
        draw(st.sampled_from(list(OPTIMIZERS))),
        draw(st.integers(1, 2)),
        draw(st.sampled_from(HOOKS)),
        draw(st.lists(st.sampled_from(EXTRAS), max_size=3, unique=True)),
    )


def hooked(output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(torch.tanh)


def train(loop: Loop, wrap: Wrap) -> list[Tensor]:
    """Two steps: outputs, losses, gradients, and all values at the end."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model: Any = Network(loop.layers, loop.style == "kept")
    teacher = wrap(copy.deepcopy(model)).requires_grad_(False).eval() if loop.style == "teacher" else None
    found, target = list[Tensor](), model.layers[0]
    if loop.hook == "forward":
        target.register_forward_hook(lambda module, inputs, output: output * 1.1)
    elif loop.hook == "pre":
        target.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9,))
    elif loop.hook == "output":
        target.register_forward_hook(lambda module, inputs, output: hooked(output))
    elif loop.hook == "parameter":
        model.stem.weight.register_hook(lambda gradient: gradient * 1.5 + 0.01)
    if "frozen norms" in loop.extras:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    model.stem.requires_grad_("freeze" not in loop.extras)
    model = wrap(model)
    head = nn.Linear(CLASSES, CLASSES) if "outer head" in loop.extras else nn.Identity()
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = OPTIMIZERS[loop.optimizer](parameters)
    averages = copy.deepcopy(model.state_dict())

    def losses(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(x)
        found.extend(outputs.values())
        first = F.cross_entropy(head(outputs["logits"]), labels)
        second = outputs["map"].square().mean()
        if loop.style == "kept":
            second = second + sum(x.abs().mean() for x in model.maps)
        if teacher is not None:
            with torch.no_grad():
                theirs = teacher(x)
            second = second + sum(F.mse_loss(outputs[name], theirs[name]) for name in outputs)
        return first, second

    def backward(x: Tensor, labels: Tensor) -> Tensor:
        if loop.style == "adversarial":
            x.requires_grad_()
            x = (x + torch.autograd.grad(losses(x, labels)[0], x)[0]).detach()
        x.requires_grad_(loop.style == "input")
        first, second = losses(x, labels)
        loss = first * second.detach() + second if loop.style == "detached" else first + 0.3 * second
        if loop.style == "two":
            first.backward(retain_graph=True)
            second.backward()
        elif loop.style == "grad":
            trained = [p for p in parameters if p.requires_grad]
            for p, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                if gradient is not None:
                    p.grad = gradient.clone() if p.grad is None else p.grad + gradient
        else:
            (loss * 8 if loop.style == "scaled" else loss).backward()
        found.extend([loss, *([x.grad] if loop.style == "input" else [])])
        return loss

    draws = [(torch.randn(loop.size[0], 3, *loop.size[1:]), torch.arange(loop.size[0]) % CLASSES) for _ in range(4)]
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for number in range(loop.accumulate):
                images, labels = draws[(step + number) % len(draws)]
                loss = loss + backward(images.clone(), labels).detach()
            if "clip" in loop.extras:
                found.append(nn.utils.clip_grad_norm_(parameters, 0.5))
            found.extend(p.grad for p in parameters if p.grad is not None)
            return loss

        optimizer.step(closure)
        if "average" in loop.extras:
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    if value.is_floating_point():
                        averages[name].lerp_(value, 0.1)
        if "evaluate" in loop.extras:
            modes = {module: module.training for module in model.modules()}
            with torch.no_grad():
                found.extend(model.eval()(draws[3][0]).values())
            for module, mode in modes.items():
                module.training = mode
        if "reload" in loop.extras:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        model.stem.requires_grad_(True)
    return [x.detach().clone() for x in (*found, *model.state_dict().values(), *averages.values())]


def compare(comm: Communicator, loop: Loop) -> str | None:
    try:
        ours = train(loop, lambda model: mpi4dl.parallelize(model, loop.grid, GRIDS[loop.grid], comm=comm))
    except (NoRule, Refusal) as refused:
        return f"refused: {refused}"
    plain = train(loop, lambda model: model)
    if [x.shape for x in ours] != [x.shape for x in plain]:
        return f"{len(ours)} values, but plain {len(plain)}, or other shapes"
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        if not torch.allclose(a, b, rtol=1e-8, atol=1e-9):
            return f"value {number} of {len(ours)} is off by {float((a - b).abs().max())} of {float(b.abs().max())}"
    return None


def problem(ranks: Ranks, loop: Loop) -> str | None:
    """What is wrong with a loop, or why it is refused."""
    rows, columns = map(int, loop.grid.split("x"))
    said = ranks(rows * columns * GRIDS[loop.grid]).run(compare, loop)
    return said[0] if len(set(said)) == 1 else f"ranks disagree: {said}"
