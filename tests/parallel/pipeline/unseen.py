"""Models whose own forward does what a trace does not see, or saw wrongly."""

import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Rounded(torch.autograd.Function):
    """A straight-through estimator with a scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Base(nn.Module):
    """Two convolutions with a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.norm(self.first(x))))
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


class Reversing(Base):
    def middle(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)


class Rounding(Base):
    def middle(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, 8.0)


class Recomputing(Base):
    """By a module, in whose recomputation the norm counts once more."""

    reentrant: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Tanh())

    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class RecomputingReentrantly(Recomputing):
    reentrant: ClassVar[bool] = True


class RecomputingAFunction(Base):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


class Following(Base):
    """A teacher that follows by an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.first.parameters(), self.teacher.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
        return super().forward(x) + self.teacher(x).mean((2, 3))[:, :3]


class OfAClass(Base):
    scale: ClassVar[float] = 1.0

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale


class Placing(Base):
    """Two stages read a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.full((1,), 1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.places) * self.places


class Generating(Base):
    def middle(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)


class Remembering(Base):
    """Python that no trace sees: the length of a list in an object of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SimpleNamespace(calls=iter(range(100)))

    def middle(self, x: Tensor) -> Tensor:
        return x * (1 + next(self.seen.calls))


class OldWeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.second)


class OldSpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.second)


class Orthogonal(Base):
    """What the meta device cannot compute gives it its buffer."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.head)


class Making(Base):
    """Plain tensors that the forward makes, or holds."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.std = torch.full((1, 3, 1, 1), 0.5), torch.tensor([2.0, 3.0, 4.0]).view(1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - self.mean.to(x)) / self.std.to(x))

    def middle(self, x: Tensor) -> Tensor:
        return x * torch.ones(1, 4, 1, 1, dtype=x.dtype) + torch.linspace(0, 1, 4, dtype=x.dtype).view(1, 4, 1, 1)


class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:  # an evaluation has microbatches, too
            self.count.add_(1)
        return x


class Cumulative(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, momentum=None)


class Turning(Base):
    """A module counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def middle(self, x: Tensor) -> Tensor:
        return self.counter(x)


class Counter(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + self.calls)


SEEN: list[int] = []


class TurningByAGlobal(Turning):
    """The same in a list of the file's, which the outputs do not show: all models of a test share it."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = GlobalCounter()


class GlobalCounter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return x * (1 + min(len(SEEN), 0))


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeprecationWarning, and FutureWarning since PyTorch 2.15
    scripted = torch.jit.script(swish)


class Scripted(Base):
    def middle(self, x: Tensor) -> Tensor:
        return scripted(x)


@dataclass
class Named:
    logits: Tensor
    others: tuple[Tensor, ...] = ()


class Naming(Base):
    """A result that no trace knows."""

    def forward(self, x: Tensor) -> Named:  # type: ignore[override]
        logits = super().forward(x)
        return Named(logits, (logits.exp(),))


class Fixed(dict[str, float]):
    """Forbids changes, as the configuration of a model of diffusers does."""

    def clear(self) -> None:
        raise TypeError("it is fixed")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("it is fixed")


class Configured(Base):
    def __init__(self) -> None:
        super().__init__()
        self.config = Fixed(scale=0.5)

    def middle(self, x: Tensor) -> Tensor:
        return x * self.config["scale"]


class Sampling(Base):
    """A variational layer, of random numbers that one process would draw."""

    def middle(self, x: Tensor) -> Tensor:
        return self.noise(x)

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.distributions.Normal(x, x.exp()).rsample() * 0.1 + torch.randn_like(x) if self.training else x


MADE: ContextVar[list[Tensor] | None] = ContextVar("MADE", default=None)


def note(layer: nn.Module, inputs: Any, made: Tensor) -> None:
    if (maps := MADE.get()) is not None:
        maps.append(made)


class Backbone(nn.Module):
    """Hooks its layers when it first runs, and returns what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1))
        self.is_hooked = False

    def forward(self, x: Tensor) -> list[Tensor]:
        if not self.is_hooked:
            for layer in self.layers:
                layer.register_forward_hook(note)
            self.is_hooked = True
        before = MADE.set(maps := [])
        self.layers(x)
        MADE.reset(before)
        return maps


class Neck(nn.Module):
    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.stack(maps).mean(0) + maps[-1]


class Hooking(Base):
    """As transformers' models do that are read by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.neck = Backbone(), Neck()

    def middle(self, x: Tensor) -> Tensor:
        return self.neck(self.backbone(x))


class Peeking(Base):
    """Gives a layer what a hook keeps, of which a trace sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = Neck()
        self.first.register_forward_hook(note)

    def forward(self, x: Tensor) -> Tensor:
        before = MADE.set(maps := [])
        x = self.norm(self.first(x))
        MADE.reset(before)
        return self.head(torch.tanh(self.neck(maps or None) + self.second(x)).mean((2, 3)))


EXACT = [
    Hooking,
    Base,
    Reversing,
    Rounding,
    Recomputing,
    RecomputingReentrantly,
    OldWeightNorm,
    OldSpectralNorm,
    Orthogonal,
    Making,
    Counting,
    Cumulative,
    OfAClass,
    Placing,
    Scripted,
    Naming,
    Configured,
    Turning,
    TurningByAGlobal,
]
REFUSED = {
    RecomputingAFunction: "gives torch.utils.checkpoint a function",
    Following: "the parameter teacher.weight differs behind step 1",
    Generating: "draws from a torch.Generator",
    Remembering: "",
    Peeking: "it runs in one piece, but its stages fail",
}


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(getattr(outputs, "logits", outputs), targets)
