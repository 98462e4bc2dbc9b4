"""Networks for sequences, images and volumes, put together from layers of many kinds, as data to draw and shrink."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

CHANNELS, CLASSES = 4, 3
Size = tuple[int, ...]
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def of(module: Any, name: str, size: Size) -> Any:
    """What is called name1d, name2d or name3d, by how many sides images have."""
    return getattr(module, f"{name}{len(size)}d")


def along(size: Size, dim: int, count: int) -> tuple[int, ...]:
    """The shape of something that differs along one axis of space alone."""
    shape = [1] * len(size)
    shape[dim] = count
    return tuple(shape)


def _shrunk(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, ceil: bool = False) -> int:
    """How many windows fit: https://docs.pytorch.org/docs/stable/generated/torch.nn.MaxPool2d.html."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil else room // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


class Layer(nn.Module):
    """One that keeps the size of images, unless it says otherwise. `size` is that of its inputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size

    def behind(self) -> Size:
        return self.size


class Convolution(Layer):
    """`how`: a plain one, with a weight that is computed from others, or recomputed in the backward pass."""

    def __init__(self, size: Size, kernel: int, stride: int, dilation: int, groups: int, mode: str, how: str) -> None:
        super().__init__(size)
        padding = dilation * (kernel - 1) // 2
        self.window = kernel, stride, padding, dilation
        made = of(nn, "Conv", size)(CHANNELS, CHANNELS, kernel, stride, padding, dilation, groups, padding_mode=mode)
        makers = {"weight norm": parametrizations.weight_norm, "spectral norm": parametrizations.spectral_norm}
        self.inner = makers[how](made) if how in makers else made
        self.recomputed = how == "recomputed"

    def behind(self) -> Size:
        return tuple(_shrunk(each, *self.window) for each in self.size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x)
        return y


class Norm(Layer):
    """`still`: it stays in evaluation mode."""

    def __init__(self, size: Size, kind: str, still: bool) -> None:
        super().__init__(size)
        kinds: dict[str, Callable[[], nn.Module]] = {
            "batch": lambda: of(nn, "BatchNorm", size)(CHANNELS),
            "batch, plain": lambda: of(nn, "BatchNorm", size)(CHANNELS, affine=False, momentum=None),
            "batch, of now": lambda: of(nn, "BatchNorm", size)(CHANNELS, track_running_stats=False),
            "group": lambda: nn.GroupNorm(2, CHANNELS),
            "instance": lambda: of(nn, "InstanceNorm", size)(CHANNELS, affine=True),
            "layer": lambda: nn.LayerNorm(CHANNELS),
            "image": lambda: nn.LayerNorm((CHANNELS, *size)),
        }
        self.inner, self.last = kinds[kind](), kind == "layer"
        if still:
            self.inner.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            return self.inner(x.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]
        y: Tensor = self.inner(x)
        if type(y) is Tensor and y.requires_grad:
            y.register_hook(Tensor.contiguous)  # PyTorch misreads other strides where the batch has one image
        return y


class Activation(Layer):
    def __init__(self, size: Size, kind: str) -> None:
        super().__init__(size)
        kinds = {"relu in place": lambda: nn.ReLU(inplace=True), "gelu": nn.GELU, "tanh": nn.Tanh}
        kinds |= {"prelu": lambda: nn.PReLU(CHANNELS), "softmax": lambda: nn.Softmax(1)}
        self.inner = kinds[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Pool(Layer):
    def __init__(self, size: Size, kind: str, kernel: int, stride: int, padding: bool, ceil: bool) -> None:
        super().__init__(size)
        self.window = kernel, stride, kernel // 2 * padding, 1, ceil
        made = of(nn, {"max": "MaxPool", "average": "AvgPool"}[kind], size)
        self.inner = made(kernel, stride, kernel // 2 * padding, ceil_mode=ceil)

    def behind(self) -> Size:
        return tuple(_shrunk(each, *self.window) for each in self.size)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Up(Layer):
    def __init__(self, size: Size, mode: str) -> None:
        super().__init__(size)
        self.mode = LINEAR[len(size)] if mode == "linear" else mode
        if mode == "transposed":
            self.inner = of(nn, "ConvTranspose", size)(CHANNELS, CHANNELS, 3, 2, 1, 1)

    def behind(self) -> Size:
        return tuple(2 * each for each in self.size)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "transposed":
            return self.inner(x)
        if self.mode == "shuffle":
            return F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2)  # of images alone
        return F.interpolate(x, scale_factor=2, mode=self.mode, align_corners=False if self.mode != "nearest" else None)


class Positions(Layer):
    """A parameter with numbers of each place, of each row, or of each channel, which begins as zeros or as others."""

    def __init__(self, size: Size, of: str, begin: str, how: str) -> None:
        super().__init__(size)
        shapes = {"row": along(size, 0, size[0]), "column": along(size, -1, size[-1]), "channel": along(size, 0, 1)}
        shapes["place"] = size
        self.table = nn.Parameter(getattr(torch, begin)(CHANNELS, *shapes[of]))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gain":
            return x + self.table * x.tanh()
        return x + self.table if self.how == "add" else x * (1 + self.table)


class Mask(Layer):
    mask: Tensor

    def __init__(self, size: Size, how: str) -> None:
        super().__init__(size)
        mask = torch.ones(1, 1, *size)
        mask[:, :, : max(1, size[0] // 3)][..., size[-1] // 2 :] = 0.25
        self.register_buffer("mask", mask)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "where":
            return torch.where(self.mask > 0.5, x, x.sin())
        return x.masked_fill(self.mask < 0.5, 0.1) if self.how == "fill" else x * self.mask


class Coordinates(Layer):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.mix = of(nn, "Conv", size)(CHANNELS + 1, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype, device=x.device).view(-1, *[1] * (len(self.size) - 1))
        return self.mix(torch.cat([x, rows.expand(x.shape[0], 1, *x.shape[2:])], 1))  # type: ignore[no-any-return]


class Gate(Layer):
    """Weights of channels, or of places, from means of the whole image: squeeze and excitation."""

    def __init__(self, size: Size, of: str) -> None:
        super().__init__(size)
        self.of, self.inner = of, nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "places":
            return x * x.flatten(2).softmax(2).view(x.shape).mean(1, keepdim=True) * x[0, 0].numel()
        space = tuple(range(2, 2 + len(self.size)))
        pooled = x.amax(space) if self.of == "maxima" else x.mean(space)
        return x * self.inner(pooled).sigmoid()[(..., *[None] * len(space))]


class Attention(Layer):
    def __init__(self, size: Size, heads: int) -> None:
        super().__init__(size)
        self.inner = nn.TransformerEncoderLayer(CHANNELS, heads, 6, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.flatten(2).transpose(1, 2))
        return y.transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class Dropout(Layer):
    def __init__(self, size: Size, kind: str, p: float) -> None:
        super().__init__(size)
        kinds = {"pixels": nn.Dropout, "channels": of(nn, "Dropout", size), "alpha": nn.AlphaDropout}
        self.inner = kinds[kind](p)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Depth(Layer):
    """A branch that is left out of some samples, by chance: stochastic depth, as timm has it."""

    def __init__(self, size: Size, p: float) -> None:
        super().__init__(size)
        self.inner, self.p = of(nn, "Conv", size)(CHANNELS, CHANNELS, 1), p

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.training:
            y = y * x.new_empty(x.shape[0], *[1] * (1 + len(self.size))).bernoulli_(1 - self.p) / (1 - self.p)
        return x + y


class Counter(Layer):
    """A buffer that counts steps, and weighs what comes out."""

    steps: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x * (1 + self.steps.detach().clone() / 10)


class Tracker(Layer):
    """A buffer that follows the means of what comes in, as codebooks and queues do."""

    mean: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.register_buffer("mean", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean.clone().view(-1, *[1] * len(self.size))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, *range(2, 2 + len(self.size)))), alpha=0.1)
        return y


class Moves(Layer):
    """Whatever moves pixels or channels."""

    def __init__(self, size: Size, kind: str) -> None:
        super().__init__(size)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "flip":
            return x.flip(-1)
        if self.kind == "roll":
            return x.roll((1, -2), (2, -1))
        if self.kind == "channels":
            first, second = x.chunk(2, 1)
            return torch.cat([second, first.sigmoid()], 1)
        if self.kind == "pad":
            return F.pad(x, (1, 2) * len(self.size), mode="replicate")[:, :, 1:-2][..., 1:-2]
        if self.kind == "in place":
            same = x = x * 1.0
            x[:, :2] += 0.1
            return x + same
        if self.kind == "without gradient":
            with torch.no_grad():
                still = x.sigmoid()
            return x * still
        return x + x.detach() * x.shape[2] / x.shape[-1]


class Idle(Layer):
    """Parameters that play no part, and one without elements."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.unused, self.empty = nn.Linear(2, 2), nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


def doubled(value: Tensor) -> Tensor:
    return 2 * value


def shifted_inputs(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] + 0.1,)


def gated_output(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output * inputs[0].tanh()


def halved_gradients(module: nn.Module, before: tuple[Tensor], behind: tuple[Tensor]) -> tuple[Tensor]:
    return (before[0] / 2,)


def tripled_gradients(module: nn.Module, behind: tuple[Tensor]) -> tuple[Tensor]:
    return (3 * behind[0],)


class Hooked(Layer):
    """A hook on the gradient of an activation or of a parameter, or on a module of its own."""

    def __init__(self, size: Size, where: str) -> None:
        super().__init__(size)
        self.scale, self.where = nn.Parameter(torch.ones(CHANNELS, *[1] * len(size))), where
        self.inner = of(nn, "Conv", size)(CHANNELS, CHANNELS, 1)
        if where == "parameter":
            self.scale.register_hook(doubled)
        elif where == "before":
            self.inner.register_forward_pre_hook(shifted_inputs)
        elif where == "behind":
            self.inner.register_forward_hook(gated_output)
        elif where == "backward":
            self.inner.register_full_backward_hook(halved_gradients)
        elif where == "before backward":
            self.inner.register_full_backward_pre_hook(tripled_gradients)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.scale)
        if self.where == "activation" and y.requires_grad:
            y.register_hook(doubled)
        return y


KINDS: Mapping[str, type[Layer]] = {
    kind.__name__.lower(): kind
    for kind in (
        Convolution, Norm, Activation, Pool, Up, Positions, Mask, Coordinates, Gate, Attention, Dropout, Depth,
        Counter, Tracker, Moves, Idle, Hooked,
    )
}  # fmt: skip
DRAWING = ("dropout", "depth")  # their numbers are those of plain PyTorch in a single stage alone
CHANGING = ("counter", "tracker")
# Not layers: what the network itself does with a layer, or with what an earlier one gave.
BESIDE = ("again", "borrow", "skip", "average")
HEADS = ("mean", "maximum", "auxiliary", "dense", "pooled", "token")


@dataclass(frozen=True)
class Loss:
    """Cross entropy of the logits, and 0.3 of that of others beside them."""

    smoothing: float = 0.0
    weighted: bool = False
    ignores: bool = False

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        if isinstance(outputs, tuple):
            return self(outputs[0], targets) + 0.3 * self(outputs[1], targets)
        weight = torch.tensor([1.0, 2.0, 0.5], dtype=outputs.dtype, device=outputs.device) if self.weighted else None
        ignored = CLASSES - 1 if self.ignores else -100
        return F.cross_entropy(
            outputs, targets, weight, label_smoothing=self.smoothing, ignore_index=ignored, reduction="mean"
        )


@dataclass(frozen=True)
class Network:
    """Layers, or what is done beside them, one after the other, each with its options; and what makes logits."""

    size: Size
    layers: tuple[tuple[str, dict[str, Any]], ...]
    head: str
    loss: Loss = Loss()

    tokens = 0

    @property
    def changes(self) -> bool:
        """Whether layers change buffers that are no statistics of batch norms."""
        return any(kind in CHANGING or options.get("how") == "spectral norm" for kind, options in self.layers)

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, *self.size, generator=generator, dtype=torch.float64)
        shape = (count, *self.size) if self.head == "dense" else (count,)
        return images, torch.randint(CLASSES - self.loss.ignores, shape, generator=generator)

    def build(self) -> nn.Module:
        return Made(self).double()


class Made(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, size = network, network.size
        self.stem, self.layers = of(nn, "Conv", size)(3, CHANNELS, 1), nn.ModuleList()
        for kind, options in network.layers:
            if kind in KINDS:
                layer = KINDS[kind](size, **options)
                size = layer.behind()
                if min(size) < 1:
                    raise ValueError("nothing is left of the image")
            else:
                layer = Layer(size)
            self.layers.append(layer)
        if network.head == "dense":
            self.last: nn.Module = of(nn, "Conv", size)(CHANNELS, CLASSES, 1)
        elif network.head == "pooled":
            self.last = nn.Linear(2 ** len(size) * CHANNELS, CLASSES)
        else:
            self.last = nn.Linear(CHANNELS, CLASSES)
        if network.head == "auxiliary":
            self.beside = nn.Linear(CHANNELS, CLASSES)
        if network.head == "token":
            self.token = nn.Parameter(torch.randn(1, 1, CHANNELS))
            self.looks = nn.MultiheadAttention(CHANNELS, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        size, space = x.shape[2:], tuple(range(2, 2 + len(self.network.size)))
        x = self.stem(x)
        seen = [x]
        for (kind, options), layer in zip(self.network.layers, self.layers, strict=True):
            if kind == "skip":
                x = x + F.interpolate(seen[options["of"]], x.shape[2:])
            elif kind == "average":
                x = x + seen[options["of"]].mean((0, *space), keepdim=True)
            elif kind == "again":
                other = self.layers[options["of"]]
                x = other(x) if other.behind() == other.size == layer.size else x
            elif kind == "borrow":
                weight = self.stem.weight.mean(1, keepdim=True)
                x = of(F, "conv", size)(x, weight.expand(-1, CHANNELS, *weight.shape[2:]))
            else:
                x = layer(x)
            seen.append(x)
        head = self.network.head
        if head == "dense":
            return F.interpolate(self.last(x), size, mode=LINEAR[len(self.network.size)])
        if head == "pooled":
            return self.last(of(F, "adaptive_avg_pool", size)(x, 2).flatten(1))
        if head == "token":
            tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
            return self.last(self.looks(tokens[:, :1], tokens, tokens, need_weights=False)[0][:, 0])
        if head == "auxiliary":
            return self.last(x.mean(space)), self.beside(seen[len(seen) // 2].mean(space))
        return self.last(x.amax(space) if head == "maximum" else x.mean(space))
