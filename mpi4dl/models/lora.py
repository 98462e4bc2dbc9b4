"""Low-rank adapters of linear layers: Hu et al. 2021, "LoRA", https://arxiv.org/abs/2106.09685.

    y = W x + b + alpha / r * B A x        A (r, in), B (out, r): trained; W and b: frozen

A layer keeps the names of its weight and bias, so weights of the plain model load into it. Beside them it has
`lora_A.weight` and `lora_B.weight`, as in the package peft, and `lora_alpha`, so that weights alone say what they are
merged to. B begins as zero: the model begins as the plain one.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from mpi4dl.models.int8 import hold_in_int8


class LoRALinear(nn.Linear):
    """A linear layer with an adapter of rank `r`: (..., in) to (..., out). It takes over the parameters of `base`."""

    lora_alpha: Tensor

    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self._parameters["bias"] = base.weight, base._parameters["bias"]
        like: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A = nn.Linear(base.in_features, r, **like)  # Kaiming uniform with a = sqrt(5)
        self.lora_B = nn.Linear(r, base.out_features, **like)
        nn.init.zeros_(self.lora_B.weight)
        self.register_buffer("lora_alpha", base.weight.new_tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.lora_alpha / self.lora_A.out_features
        # Scaled where it has r features, not where it has all.
        return super().forward(x) + self.lora_B(self.lora_A(self.lora_dropout(x)) * scale)


def add_lora(
    model: nn.Module,
    r: int,
    alpha: float,
    targets: Sequence[str],
    dropout: float = 0.0,
    train: Sequence[str] = (),
    base: str | None = None,
) -> None:
    """Give linear layers of a model adapters, in place, and freeze the rest of it.

    Args:
        model: a plain model.
        r: rank of the adapters; alpha: their scale times `r`.
        targets: the ends of the paths of layers, such as qkv or attn.proj, in which * is anything. What they match
            besides linear layers, such as a convolution, stays frozen.
        dropout: of the inputs of adapters.
        train: modules that are trained whole, likewise. So are the aggregator of a model of patches, the classifiers
            of a model of timm, and the last layer of others.
        base: "int8" rounds the frozen weights of linear layers to 8 bits, and holds them so; those that another module
            has too stay as they are.

    Raises:
        ValueError: a name matches no module, or no linear layer; or a layer cannot have an adapter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = {*_heads(model, modules), *(path for name in train for path in _matching(name, modules, "train"))}
    within = tuple(f"{path}." for path in whole)
    inner = {path: each for path, each in modules.items() if path not in whole and not path.startswith(within)}
    layers = {path: each for path, each in inner.items() if isinstance(each, nn.Linear)}
    chosen: dict[str, nn.Linear] = {}
    for name in targets:
        found = _matching(name, inner, "targets", layers)
        linear = [path for path in found if path in layers]
        if not linear:
            raise ValueError(
                f"targets {name}: {found[0]} is a {type(inner[found[0]]).__name__}, and adapters are of linear layers; "
                f"{_candidates(layers)}"
            )
        chosen |= {path: layers[path] for path in linear}
    for path, layer in chosen.items():
        _require_own_call(path, layer, modules)
    model.requires_grad_(False)
    made = {id(layer): LoRALinear(layer, r, alpha, dropout) for layer in chosen.values()}
    for path, layer in chosen.items():
        home, _, leaf = path.rpartition(".")
        setattr(modules[home], leaf, made[id(layer)].train(layer.training))
    for path in whole:
        modules[path].requires_grad_(True)
    if base == "int8":
        homes = Counter(id(p) for each in model.modules() for p in each._parameters.values())
        for each in model.modules():
            if isinstance(each, nn.Linear) and not each.weight.requires_grad and homes[id(each.weight)] == 1:
                hold_in_int8(each)


def _heads(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    """The paths of what is new for the task: the aggregator, the classifiers that timm names, or the last layer."""
    if "aggregator" in modules:
        return ["aggregator"]
    named: Any = getattr(model, "get_classifier", tuple)()
    classifiers = {id(each) for each in (named if isinstance(named, tuple | list) else (named,))}
    found = [path for path, each in modules.items() if id(each) in classifiers and any(True for _ in each.parameters())]
    return found or [[*dict(model.named_parameters())][-1].rpartition(".")[0]]


def _matching(name: str, modules: Iterable[str], option: str, layers: Iterable[str] | None = None) -> list[str]:
    found = [path for path in modules if path and (fnmatchcase(path, name) or fnmatchcase(path, f"*.{name}"))]
    if not found:
        raise ValueError(f"{option} {name} matches no module; {_candidates(modules if layers is None else layers)}")
    return found


def _candidates(paths: Iterable[str]) -> str:
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    return f"names to choose from are {', '.join(name for name in names if name) or 'none'}"


def _require_own_call(path: str, layer: nn.Linear, modules: dict[str, nn.Module]) -> None:
    """Refuse a layer whose weight is used past its own `forward`, which would leave out the adapter."""
    home, _, leaf = path.rpartition(".")
    around = type(modules[home])
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        raise ValueError(f"targets {path}: it is a {type(layer).__name__}, no plain torch.nn.Linear: leave it out")
    try:
        source = inspect.getsource(around.forward)
    except (OSError, TypeError):
        source = ""
    if f"self.{leaf}.weight" in source:
        raise ValueError(
            f"targets {path}: {around.__name__} reads its weight and never calls the layer, so an adapter would have "
            "no effect: leave it out"
        )
    others = [other for other, each in modules.items() if each is not layer]
    if any(layer.weight is p for other in others for p in modules[other]._parameters.values()):
        raise ValueError(f"targets {path}: it shares its weight with another layer: leave it out")
