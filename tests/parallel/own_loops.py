"""Training loops as users write them, each a function of what makes a model parallel: plainly, that is nothing.

A loop returns what it found, as tensors: losses, gradients, weights, buffers.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Wrap = Callable[[nn.Module], nn.Module]
SHAPE = (4, 3, 18, 14)


class Network(nn.Module):
    """Convolutions, a batch norm, a layer that is used twice, a frozen one, and a linear head on pooled pixels."""

    def __init__(self, in_channels: int = 3, classes: int = 3, recompute: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.again = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.head = nn.Linear(6, classes)
        self.unused = nn.Parameter(torch.ones(3))
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.again(torch.tanh(self.again(x))) + self.frozen(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in (nn.Sequential(self.first, self.norm), self.body):  # one ends with what is updated in it
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """A picture of a picture, of any size."""

    def __init__(self, in_channels: int = 3, channels: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 5, 3, padding=1),
            nn.InstanceNorm2d(5, affine=True),
            nn.Tanh(),
            nn.Conv2d(5, channels, 3, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batches(count: int, samples: int = SHAPE[0]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(samples, *SHAPE[1:], generator=generator), torch.randint(3, (samples,), generator=generator)


def made(kind: type[nn.Module] = Network, **options: object) -> nn.Module:
    torch.manual_seed(3)
    return kind(**options)


def found_in(*models: nn.Module) -> list[Tensor]:
    values = [value for model in models for value in model.state_dict().values()]
    return values + [p.grad for model in models for p in model.parameters() if p.grad is not None]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)


# Adam divides by the size of a gradient. Where that is zero but for rounding, as of a bias before a batch norm, a small
# `eps` would make steps of rounding.


def steps(wrap: Wrap, model: nn.Module | None = None, samples: int = SHAPE[0]) -> list[Tensor]:
    model = wrap(made() if model is None else model)
    optimizer, losses = sgd(model), []
    for images, labels in batches(3, samples):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *found_in(model)]


def accumulation(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    optimizer = sgd(model)
    model.head.weight.grad = torch.ones_like(model.head.weight)  # that was there before
    for images, labels in batches(4):
        (F.cross_entropy(model(images), labels) / 4).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return [norm, *found_in(model)]


def several_losses(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    for images, labels in batches(1):
        logits = model(images)
        F.cross_entropy(logits, labels).backward(retain_graph=True)
        logits.square().mean().backward(retain_graph=True)
        penalty = sum(p.square().sum() for p in model.parameters())  # outside of the model: not a sum over ranks
        (logits.exp().mean() + 0.01 * penalty).backward()
    return found_in(model)


def tensor_hooks(wrap: Wrap) -> list[Tensor]:
    model, seen = wrap(made()), list[Tensor]()
    model.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model.again.weight.register_hook(lambda g: seen.append(g.clone()))
    model.head.bias.register_hook(lambda g: 3 * g)
    model.unused.register_hook(lambda g: seen.append(g.clone()))
    model.unused.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for images, labels in batches(2):
        F.cross_entropy(model(images), labels).backward()
    return [*seen, *found_in(model)]


def optimizer_in_backward(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    for p in model.parameters():
        if p.requires_grad:
            own = torch.optim.Adam([p], lr=0.01, eps=0.1)

            def step(p: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            p.register_post_accumulate_grad_hook(step)
    for images, labels in batches(3):
        F.cross_entropy(model(images), labels).backward()
    return found_in(model)


def sam(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    optimizer = sgd(model)
    for images, labels in batches(2):
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            known = [p for p in model.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in known]).norm()
            moved = [0.05 * p.grad / norm for p in known]
            torch._foreach_add_(known, moved)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            torch._foreach_sub_(known, moved)
        optimizer.step()
        optimizer.zero_grad()
    return found_in(model)


def both_modes(wrap: Wrap) -> list[Tensor]:
    """A forward pass in evaluation, whose statistics one in training changes before the backward pass."""
    model = wrap(made())
    for images, labels in batches(2):
        loss = F.cross_entropy(model.eval()(images), labels)
        (loss + F.cross_entropy(model.train()(images.flip(3)), labels)).backward()
    return found_in(model)


def lbfgs(wrap: Wrap) -> list[Tensor]:
    model = wrap(made().eval())
    optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)
    for images, labels in batches(1):

        def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
    return found_in(model)


def scaled(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for images, labels in batches(2):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(images), labels)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    return found_in(model)


def ema(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for images, labels in batches(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
    with torch.no_grad():
        logits = averaged.eval()(images)
    return [logits, *found_in(model, averaged)]


def gan(wrap: Wrap) -> list[Tensor]:
    generator, critic = wrap(made(Dense)), wrap(made(Network, classes=1))
    of_generator, of_critic = sgd(generator, 0.01), torch.optim.Adam(critic.parameters(), lr=0.01, eps=0.1)
    for images, _ in batches(2):
        fake = generator(images.flip(0))
        of_critic.zero_grad()
        (F.softplus(critic(fake.detach())) + F.softplus(-critic(images))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_generator.step()
    return found_in(generator, critic)


class Contrast(nn.Module):
    """MoCo: a teacher that follows the student within the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Network()
        self.teacher = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.teacher.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            keys = self.teacher(other)
        return self.online(x), keys


def moco(wrap: Wrap) -> list[Tensor]:
    model = wrap(made(Contrast))
    optimizer = sgd(model)
    for images, _ in batches(3):
        optimizer.zero_grad()
        queries, keys = model(images, images.flip(3))
        F.cross_entropy(queries @ keys.T, torch.arange(len(images))).backward()
        optimizer.step()
    return found_in(model)


def autograd_grad(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    images, labels = next(batches(1))
    images.requires_grad_()
    loss = F.cross_entropy(model(images), labels)
    some = [model.head.weight, model.first.bias]
    found = torch.autograd.grad(loss, [images, *some], retain_graph=True)
    return [*found, *torch.autograd.grad(loss, [model.again.weight])]


def attack(wrap: Wrap) -> list[Tensor]:
    """Projected gradient descent on the images, then a step on what it found; and a temperature, a plain tensor."""
    model, temperature = wrap(made()), torch.full((), 2.0, requires_grad=True)
    images, labels = next(batches(1))
    x = images.clone()
    for _ in range(3):
        x = x.detach().requires_grad_()
        (F.cross_entropy(model(x) / temperature, labels) + x.square().mean()).backward()
        x = (x + 0.05 * x.grad.sign()).detach()
    model.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    return [x, temperature.grad, *found_in(model)]


def freezing(wrap: Wrap) -> list[Tensor]:
    model = wrap(made())
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(batches(3)):
        if number == 2:
            model.first.requires_grad_(True)
            model.head = nn.Linear(6, 3)
            with torch.no_grad():
                model.head.weight.fill_(0.1)
                model.head.bias.fill_(0.2)
            optimizer.add_param_group({"params": model.head.parameters()})
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return found_in(model)


def a_shared_module(wrap: Wrap) -> list[Tensor]:
    first, second = made(), made(Network, classes=5)
    second.first, second.norm = first.first, first.norm
    first, second = wrap(first), wrap(second)
    optimizer = torch.optim.SGD({*first.parameters(), *second.parameters()}, lr=0.1)
    for images, labels in batches(2):
        optimizer.zero_grad()
        (F.cross_entropy(first(images), labels) + F.cross_entropy(second(images), labels)).backward()
        optimizer.step()
    return found_in(first, second)


def a_chain(wrap: Wrap) -> list[Tensor]:
    """A model behind a model, and a head that is not parallel, of two optimizers."""
    front, back, head = wrap(made(Dense)), wrap(made()), nn.Linear(3, 3, bias=False)
    nn.init.eye_(head.weight)
    optimizers = [sgd(front), sgd(back), sgd(head)]
    for images, labels in batches(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(head(back(front(images))), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    return found_in(front, back, head)


def recomputed(wrap: Wrap) -> list[Tensor]:
    return steps(wrap, made(Network, recompute=False))


def compiled(wrap: Wrap) -> list[Tensor]:
    """A model that is compiled, a layer of it, and one in functions that are, with and without its backward pass."""
    model = wrap(made())
    optimizer, alone = sgd(model), torch.compile(model, backend="eager")

    def step(compute: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(compute(images), labels).backward()

    for compute in (alone, torch.compile(lambda x: model(x) * 2, backend="eager"), model):
        for images, labels in batches(2):
            optimizer.zero_grad()
            (torch.compile(step, backend="eager") if compute is model else step)(compute, images, labels)
            optimizer.step()
    model.first.compile(backend="eager")
    F.cross_entropy(model(images), labels).backward()
    return found_in(model)


def last_batch(wrap: Wrap) -> list[Tensor]:
    """Fewer samples than parts of the batch."""
    return steps(wrap, samples=1)


def dropped(wrap: Wrap) -> list[Tensor]:
    model = nn.Sequential(made(Dense), nn.Dropout(0.3), made(), nn.Dropout(0.5))
    torch.manual_seed(11)
    return steps(wrap, model)


def a_dense_loss(wrap: Wrap) -> list[Tensor]:
    model = wrap(made(Dense, channels=3))
    for images, _ in batches(2):
        F.cross_entropy(model(images), images.argmax(1)).backward()
    return found_in(model)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.features(x).mean((2, 3))
        return {"logits": self.lstm(torch.stack([y, y.sin()], 1))[0][:, -1]}


def a_recurrent_layer(wrap: Wrap) -> list[Tensor]:
    model = wrap(made(Recurrent))
    for images, labels in batches(2):
        F.cross_entropy(model(images)["logits"], labels).backward()
    return found_in(model)


def reparametrized(wrap: Wrap) -> list[Tensor]:
    model = made()
    nn.utils.parametrizations.weight_norm(model.first)
    nn.utils.parametrizations.spectral_norm(model.again)
    return steps(wrap, model)


def reparametrized_by_hooks(wrap: Wrap) -> list[Tensor]:
    model = made()
    nn.utils.weight_norm(model.first)
    nn.utils.spectral_norm(model.again)
    model = wrap(model)
    for images, labels in batches(2):
        F.cross_entropy(model(images), labels).backward()
    return found_in(model)


class Results(dict[str, Any]):
    """A mapping of a class of one's own, which is also an object with attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.first = next(iter(values.values()))


class Keeping(Network):
    """Keeps a penalty and a state as attributes, and returns its results in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = [torch.tanh, lambda x: x, self.frozen.forward]
        self.state: Tensor | None = None
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Results:
        features = activation(self.norm(self.first(x))).mean((2, 3))
        self.state = features if self.state is None else torch.tanh(self.state + features)
        self.penalty = features.square().mean()
        return Results(logits=self.head(self.state), parts=[features, {"mean": features.mean()}])


def kept_tensors(wrap: Wrap) -> list[Tensor]:
    """A penalty that the model keeps, a state that it goes on with, and what a forward hook keeps."""
    model, seen = made(Keeping), list[Tensor]()
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(module.weight))
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output.mean((2, 3))))
    model = wrap(model)
    loss = torch.zeros(())
    for images, labels in batches(2):
        found = model(images, torch.tanh)
        loss = loss + F.cross_entropy(found["logits"], labels) + 0.1 * model.penalty + found["parts"][1]["mean"]
    (loss + sum(x.square().mean() for x in seen) + found.first.std()).backward()
    return found_in(model)


def leaves_within(wrap: Wrap) -> list[Tensor]:
    """Leaves that a forward pass makes: of what is frozen, as PEFT with checkpointing does, and a bias, as T5 does."""
    model, seen = made(), list[Tensor]()
    model.first.requires_grad_(False)
    model.head.register_forward_pre_hook(lambda module, inputs: seen.append(torch.zeros(6).requires_grad_()))
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + seen[-1],))
    model.first.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    model = wrap(model)
    for images, labels in batches(2):
        F.cross_entropy(model(images), labels).backward()
    return found_in(model) + [x.grad for x in seen if x.grad is not None]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def kept_by_all_means(wrap: Wrap) -> list[Tensor]:
    """By writes into a buffer, a function's result, and an exception; with hooks and writes outside."""
    seen, gradients = list[Tensor](), list[Tensor]()

    class Stop(Exception):
        pass

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        pooled, buffer = output.mean((2, 3)), torch.zeros(len(output), output.shape[1] + 1)
        buffer[:, 1:] = pooled
        pooled.retain_grad()
        seen.extend([pooled, buffer, Doubled.apply(pooled), pooled[:, 0]])

    def stop(module: nn.Module, inputs: Any) -> None:
        raise Stop

    model = made()
    model.again.register_forward_hook(keep)
    ending = model.head.register_forward_pre_hook(stop)
    model = wrap(model)
    for images, labels in batches(1):
        with contextlib.suppress(Stop):
            model(images)
        ending.remove()
        first, seen[:] = seen[:], []
        loss = F.cross_entropy(model(images), labels)
        seen[0].register_hook(gradients.append)
        seen[2].mul_(3)
        for scale, x in enumerate((*first, *seen), start=1):
            loss = loss + scale * Doubled.apply(x).square().mean()
        gradients += torch.autograd.grad(loss, seen[0], retain_graph=True)
        loss.backward()
    return [*found_in(model), *gradients, seen[0].grad]


def kept_maps(wrap: Wrap) -> list[Tensor]:
    """Maps that hooks keep, and their gradients: in a loss beside a teacher's, in a head outside, as Grad-CAM."""
    seen, taught, found, gradients, values = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor](), list[Any]()
    student, teacher = made(), made().requires_grad_(False)
    with torch.no_grad():
        teacher.first.weight.mul_(-0.5)
    student.frozen.register_forward_hook(lambda module, inputs, output: seen.append(output))
    student.frozen.register_forward_hook(lambda module, inputs, output: output.register_hook(gradients.append) and None)
    teacher.frozen.register_forward_hook(lambda module, inputs, output: taught.append(output))
    teacher.again.register_forward_hook(lambda module, inputs, output: values.append(output.detach().cpu().numpy()))
    head = nn.Conv2d(6, 6, 3)
    nn.init.constant_(head.weight, 0.05)
    nn.init.constant_(head.bias, 0.1)
    student, teacher = wrap(student), wrap(teacher)
    for images, labels in batches(2):
        logits = student(images)
        with torch.no_grad():
            teacher(images)
        mine, its = seen[-1], taught[-1]
        mine.retain_grad()
        found += torch.autograd.grad(logits[:, 1].sum(), [mine, logits], retain_graph=True)
        cam = (found[-2].mean((2, 3), keepdim=True) * mine.detach()).sum(1).relu()
        likeness = (mine - its).square().mean() + F.mse_loss(head(mine), its[:, :, 1:-1, 1:-1])
        (F.cross_entropy(logits, labels) + likeness + head(cam[:, None] * its).mean()).backward()
        assert mine.grad is not None
        found += [cam, mine.grad, torch.tensor(its.numpy()), gradients[-1][gradients[-1] > 0]]
        found += [torch.tensor(gradient.detach().cpu().numpy()) for gradient in gradients]
    return [*found_in(student, head), *found, *map(torch.tensor, values)]


def other_ways_in(wrap: Wrap) -> list[Tensor]:
    """A parameter of no module, a tensor by an attribute, and results of the step before."""

    class Conditioned(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.condition + self.before

    hidden, encoder = nn.Parameter(torch.full((), 1.2)), nn.Linear(3, 3)
    nn.init.constant_(encoder.weight, 0.3)
    nn.init.constant_(encoder.bias, 0.1)
    model = made(Conditioned)
    model.first.register_forward_pre_hook(lambda module, inputs: inputs[0] * hidden)
    model = wrap(model)
    model.before, loss = torch.zeros(()), torch.zeros(())
    for images, labels in batches(5):  # the last without the comparisons of the first ones
        model.condition = encoder(torch.ones(3))
        found = model(images)
        model.before = 0.5 * found
        loss = loss + F.cross_entropy(found, labels)
    loss.backward()
    return [*found_in(model, encoder), hidden.grad]


def after_an_error(wrap: Wrap) -> list[Tensor]:
    """A hook fails in a backward pass, which then is made again."""
    model, fails = wrap(made()), [True]

    def fail(gradient: Tensor) -> None:
        if fails.pop() if fails else False:
            raise ArithmeticError

    model.first.weight.register_hook(fail)
    for images, labels in batches(1):
        loss = F.cross_entropy(model(images), labels)
        with contextlib.suppress(ArithmeticError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    return found_in(model)


def in_other_types(wrap: Wrap) -> list[Tensor]:
    """Parameters that change their type and shape between two calls."""
    model = wrap(made().eval().float())
    for number, (images, labels) in enumerate(batches(2)):
        model.zero_grad()
        F.cross_entropy(model(images.to(model.head.weight.dtype)), labels[: 3 + number].repeat(2)[:4]).backward()
        if number == 0:
            model.double()
            model.head.weight.grad = model.head.bias.grad = None
            model.head.weight.data, model.head.bias.data = torch.ones(5, 6), torch.zeros(5)
    return found_in(model)


def recomputed_outside(wrap: Wrap) -> list[Tensor]:
    """The whole model is called again in a backward pass."""
    model = wrap(made().eval())
    for images, labels in batches(2):
        F.cross_entropy(checkpoint(model, images.requires_grad_(), use_reentrant=True), labels).backward()
    return found_in(model)


class Changing(Network):
    """Changes what it is given: the image and a vector in place, items of a dict and of a list in it."""

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        x, parts = given["image"], given.pop("parts")
        x[:, :, :2] = 0
        x.sub_(0.1).mul_(self.head.weight.sum())
        given["scale"].mul_(3).add_(self.head.bias)
        given["image"] = features = torch.tanh(self.norm(self.first(x)))
        parts.append(features.mean())
        given["parts"], given["logits"] = parts, self.head(features.mean((2, 3))) * given["scale"]
        return given


def changed_inputs(wrap: Wrap) -> list[Tensor]:
    model, scale = wrap(made(Changing)), nn.Parameter(torch.ones(3))
    for images, labels in batches(2):
        vector = scale * 2
        given = {"image": images, "scale": vector, "parts": [images.clone()]}
        found = model(given)
        loss = F.cross_entropy(found["logits"], labels) + given["parts"][1] * given["image"].square().mean()
        (loss + images.square().mean() + vector.square().mean()).backward()
        assert found["logits"] is given["logits"]
    with torch.no_grad():
        model({"image": images.detach_(), "scale": vector.detach(), "parts": [images]})
    return [*found_in(model), scale.grad, images]


class Adjusting(Network):
    """Sets, freezes, hooks, asks and scales its parameters as it runs."""

    seen: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data = torch.renorm(self.head.weight.data, 2, 0, 0.5)
        if self.again.weight.grad is None:
            self.again.weight.register_hook(lambda g: self.seen.append(g.clone()))
            self.first.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.clone()))
        else:
            x = x * self.again.weight.grad.norm()
            self.norm.zero_grad()
        self.again_too = self.again.weight
        self.norm.requires_grad_(len(self.seen) < 4)
        self.again.weight.requires_grad = len(self.seen) != 2
        biases = [p for name, p in self.named_parameters() if "bias" in name and isinstance(p, nn.Parameter)]
        logits = super().forward(x) + sum(p.square().sum() for p in biases if p.is_leaf)
        scaled = {"weight": self.first.weight * 0.1, "bias": self.first.bias}
        logits = logits + functional_call(self.first, scaled, (x,)).mean((2, 3)).sin()[:, :3]
        self.norm.requires_grad_()
        self.again.weight.requires_grad = True
        return logits


def adjusted_parameters(wrap: Wrap) -> list[Tensor]:
    model = made(Adjusting)
    model.seen = []
    return [*steps(wrap, model), *model.seen]


# All functions of this file that make a model parallel.
LOOPS: dict[str, Callable[[Wrap], list[Tensor]]] = {
    name: loop for name, loop in list(globals().items()) if "wrap" in getattr(loop, "__annotations__", ())
}
