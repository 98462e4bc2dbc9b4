"""Which parameters of a model are cut over ranks, and along which dim: a table from names to styles.

    column      y = x W' + b: each rank has some of the outputs          weight (out | , in), bias (out |)
    row         each rank has some of the inputs, and all add up         weight (out, in | ), bias (out), whole
    vocabulary  a table of embeddings, or what makes logits              weight (rows | , features)
    heads       column, cut between the heads of an attention            as column
    fused-heads those of queries, keys and values, one behind the other  weight (3 x out | , in)
    heads-row   row, cut between the heads                               as row
    heads-last  a table with numbers of each head                        (rows, heads | )
    whole       every rank has all of it

Names are those of modules, whose weight and bias are meant, or of single parameters: of these, what a weight is by its
outputs is the first dim, what it is by its inputs the last.
Of convolutions, column is of output channels (of groups, if there are several), and row of input channels.

A column-parallel layer before a row-parallel one, with whatever works on each feature alone between them, takes one sum
over the ranks: Shoeybi et al., "Megatron-LM" (2019).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

STYLES = (
    "column", "gated-column", "row", "vocabulary", "heads", "fused-heads", "heads-row", "heads-last", "experts", "whole"
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """A parameter's `dim`, seen as (`outer`, n), is cut along n, at multiples of `multiple`, over ranks of `axes`."""

    dim: int
    outer: int = 1
    multiple: int = 1
    axes: tuple[str, ...] = ("features",)


Cuts = tuple[Cut, ...]  # of one parameter, along different dims


class Degrees(NamedTuple):
    """How many ranks share the features of layers, and how many experts; or `whole_experts`, those of features too."""

    features: int = 1
    experts: int = 1
    whole_experts: bool = False


@dataclass(frozen=True)
class Cutting:
    """How the parameters of a model are cut, by their names.

    `experts` are the layers of experts, by path, with how many each has, whole ones of which are shared out over the
    ranks along `axes_of_experts`.
    """

    parameters: Mapping[str, Cuts] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    axes_of_experts: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((tuple(self.parameters.items()), tuple(self.experts.items()), self.axes_of_experts))

    def __bool__(self) -> bool:
        return bool(self.parameters or self.experts)

    def of(self, module: nn.Module) -> dict[str, Cuts]:
        """Those of the parameters of this module."""
        named = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return {name: cuts for name, cuts in self.parameters.items() if name in named}

    def axes(self, name: str) -> tuple[str, ...]:
        """Along which axes ranks have different parts of a parameter."""
        found = {axis for cut in self.parameters.get(name, ()) for axis in cut.axes}
        return tuple(axis for axis in Degrees._fields if axis in found)


# By patterns of paths of modules and parameters, in which * is a part between dots; with ? there may be none, and
# modules without a matrix called weight are passed by.
Styles = Mapping[str, str]

BERT: Styles = MappingProxyType(
    {
        "bert.embeddings.word_embeddings": "vocabulary",
        "bert.encoder.layer.*.attention.self.query": "heads",
        "bert.encoder.layer.*.attention.self.key": "heads",
        "bert.encoder.layer.*.attention.self.value": "heads",
        "bert.encoder.layer.*.attention.output.dense": "heads-row",
        "bert.encoder.layer.*.intermediate.dense": "column",
        "bert.encoder.layer.*.output.dense": "row",
        "cls.predictions.decoder": "vocabulary",
    }
)
ROBERTA: Styles = MappingProxyType(
    {
        **{name.replace("bert.", "roberta."): style for name, style in BERT.items() if name.startswith("bert.")},
        "lm_head.decoder?": "vocabulary",
    }
)  # with whatever head
OWN: Styles = MappingProxyType(
    {
        **{f"blocks.*.attention.{name}": "heads" for name in ("query", "key", "value")},
        "blocks.*.attention.output": "heads-row",
        "blocks.*.feed_forward.up?": "column",
        "blocks.*.feed_forward.gate?": "column",
        "blocks.*.feed_forward.output?": "row",
        "blocks.*.feed_forward.shared.up?": "column",
        "blocks.*.feed_forward.shared.gate?": "column",
        "blocks.*.feed_forward.shared.output?": "row",
        "blocks.*.feed_forward.experts?": "experts",
        "blocks.*.feed_forward.experts.up?": "column",
        "blocks.*.feed_forward.experts.gate?": "column",
        "blocks.*.feed_forward.experts.output?": "row",
    }
)
VISION_TRANSFORMER: Styles = MappingProxyType(
    {
        "encoder.layers.*.self_attention.in_proj_weight": "fused-heads",
        "encoder.layers.*.self_attention.in_proj_bias": "fused-heads",
        "encoder.layers.*.self_attention.out_proj": "heads-row",
        "encoder.layers.*.mlp.0": "column",
        "encoder.layers.*.mlp.3": "row",
    }
)
SWIN: Styles = MappingProxyType(
    {
        "features.*.*.attn.qkv.weight": "fused-heads",  # the bias stays whole: version 2 writes to a part of it
        "features.*.*.attn.proj": "heads-row",
        "features.*.*.attn.relative_position_bias_table?": "heads-last",
        "features.*.*.mlp.0": "column",
        "features.*.*.mlp.3": "row",
    }
)
HF_VIT: Styles = MappingProxyType(
    {
        **{f"vit.layers.*.attention.{name}_proj": "heads" for name in ("q", "k", "v")},
        "vit.layers.*.attention.o_proj": "heads-row",
        "vit.layers.*.mlp.fc1": "column",
        "vit.layers.*.mlp.fc2": "row",
    }
)
CONVOLUTIONS = ("conv1?", "conv1.*?", "layer*.*.conv*?", "layer*.*.convs.*?", "layer*.*.downsample.*?")
RESNET: Styles = MappingProxyType({**dict.fromkeys(CONVOLUTIONS, "column"), "layer*.*": "whole", "fc": "row"})
TABLES: Mapping[str, Styles] = MappingProxyType(
    {
        "GPT": {**OWN, "embedding.tokens": "vocabulary", "lm_head": "vocabulary"},
        "BERT": {**OWN, "embedding.tokens": "vocabulary", "decoder": "vocabulary"},
        "ViT": OWN,
        "ResNet": RESNET,
        "BertForMaskedLM": BERT,
        **{
            f"{family}For{task}": ROBERTA
            for family in ("Roberta", "XLMRoberta")
            for task in ("MaskedLM", "CausalLM", "SequenceClassification", "TokenClassification")
        },
        "VisionTransformer": VISION_TRANSFORMER,
        "SwinTransformer": SWIN,
        "ViTForImageClassification": HF_VIT,
    }
)  # by the name of the model's class
LIBRARIES = ("transformers.models.", "transformers.modeling_utils", "timm.")  # whose models carry plans, or known names


def styles_of(model: nn.Module, num_ranks: int = 2) -> Styles:
    """The styles of a model, or of those in it: by a table for the class; of transformers and timm by a plan or names.

    Raises:
        ValueError: there is neither, or nothing of the model can be cut over so many ranks.
    """
    name, found = type(model).__name__, _known_styles(model, num_ranks)
    if found is None:
        raise ValueError(
            f"there is no table of how parameters of {name} are cut, only of {', '.join(TABLES)}, and of models of "
            "transformers and timm: pass styles, such as {'blocks.*.up': 'column', 'blocks.*.down': 'row'}"
        )
    if not found:
        raise ValueError(
            f"{name} carries no plan that says how its parameters are cut, and has no layers of known names that "
            f"{num_ranks} ranks can share: pass styles, such as {{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}"
        )
    return found


def _known_styles(model: nn.Module, num_ranks: int) -> Styles | None:
    """Those of the outermost modules that are known; None if there are none."""
    found, known = dict[str, str](), tuple[str, ...]()
    for path, module in model.named_modules():
        if path.startswith(known):
            continue
        styles = _table_of(module)
        if styles is None and any(kind.__module__.startswith(LIBRARIES) for kind in type(module).__mro__):
            styles = planned_styles(module, num_ranks)
        if styles is not None:
            inside = path and f"{path}."
            found |= {f"{inside}{pattern}": style for pattern, style in styles.items()}
            known = (*known, inside)
    return found if known else None


def _table_of(model: nn.Module) -> Styles | None:
    """The table for the model's class; None if there is none, or it is for another class of this name."""
    found = TABLES.get(type(model).__name__, {})
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    needed = (_matching(pattern) for pattern in found if not pattern.endswith("?"))
    return found if found and all(any(map(parts.fullmatch, names)) for parts in needed) else None


# The names in plans of transformers for layers that are cut by outputs, or by inputs. Any cut is exact: others stay
# whole.
PLANNED = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), "column"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), "row"),
    **dict.fromkeys(("embedding_rowwise", "vocab_parallel_rowwise"), "vocabulary"),
    "packed_colwise": "gated-column",
}
# Names of layers in attentions and feed-forward layers of models that carry no plan.
IN_BLOCKS = re.compile(r"\.\d+\.")
QUERIES = frozenset("q k v q_proj k_proj v_proj query key value query_key_value".split())
FUSED = frozenset("Wqkv qkv qkv_proj c_attn".split())
ATTENDED = frozenset("o_proj out_proj dense c_proj o proj".split())
WIDENING = frozenset("fc1 fc1_g fc1_x fc_in c_fc up_proj gate_proj wi w1 w3 dense_h_to_4h lin1".split())
NARROWING = frozenset("fc2 fc_out c_proj down_proj wo w2 dense_4h_to_h lin2".split())


def planned_styles(model: nn.Module, num_ranks: int) -> Styles:
    """Styles of a model of transformers or timm, by module: from the plan that it carries, or by names of layers.

    Layers whose heads so many ranks cannot share stay whole, and so do experts of another form than a table knows.
    """
    modules = dict(model.named_modules())
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    found: dict[str, str] = {}
    for pattern, planned in plan.items():
        parts = _matching(pattern)
        if planned in PLANNED:
            found |= dict.fromkeys(filter(parts.fullmatch, modules), PLANNED[planned])
    of_blocks = any(IN_BLOCKS.search(path) for path in found)
    by_names = _by_names(modules).items()
    found |= {path: style for path, style in by_names if not of_blocks or ".shared_expert." in path}
    words = [_embeddings(model, which) for which in ("input", "output")]
    found |= {path: "vocabulary" for path, module in modules.items() if any(module is each for each in words)}
    chosen = {path: fitting for path, style in found.items() if (fitting := _fitting(path, modules, style, num_ranks))}
    return chosen | _experts(modules, num_ranks)


def _by_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Styles by what layers in blocks are called."""
    found = {}
    for path in modules:
        above, _, leaf = path.rpartition(".")
        if not IN_BLOCKS.search(path):
            continue
        if _in_attention(path, modules):
            style = "column" if leaf in QUERIES | FUSED else "row" if leaf in ATTENDED else None
        else:
            style = "column" if leaf in WIDENING else "row" if leaf in NARROWING else None
        if style is not None and not any(isinstance(p, nn.ModuleList) for p in modules[above].children()):
            found[path] = style
    return found


def _in_attention(path: str, modules: Mapping[str, nn.Module]) -> bool:
    around = type(modules[path.rpartition(".")[0]]).__name__.lower()
    return "attention" in around or "attn" in around


def _embeddings(model: nn.Module, which: str) -> nn.Module | None:
    try:
        found = getattr(model, f"get_{which}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Embedding | nn.Linear) else None


def _fitting(path: str, modules: Mapping[str, nn.Module], style: str, num_ranks: int) -> str | None:
    """The style by which a layer is cut, between heads if it is an attention's; None if it stays whole."""
    module = modules[path]
    weight = _matrix_of(module)
    if weight is None or weight.dim() != 2 or not _plainly_linear(module):
        return None
    if style in ("column", "row") and _in_attention(path, modules):
        fused = path.rpartition(".")[2] in FUSED
        style = "heads-row" if style == "row" else "fused-heads" if fused else "heads"
        if style == "fused-heads" and max(weight.shape) != 3 * min(weight.shape):
            return None
    try:
        list(_cuts(path, modules, style, num_ranks))
    except ValueError:
        return None
    return style


def _plainly_linear(module: nn.Module) -> bool:
    """Whether this is a layer of PyTorch's, or of transformers', whose weight is (out, in), or (in, out) of Conv1D."""
    return isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"


def _experts(modules: Mapping[str, nn.Module], num_ranks: int) -> dict[str, str]:
    """Styles of layers of experts that have the parameters of Mixtral's, as most models of transformers."""
    found: dict[str, str] = {}
    for path, module in modules.items():
        parameters = dict(module.named_parameters())
        if set(parameters) != {"gate_up_proj", "down_proj"} or getattr(module, "is_transposed", False):
            continue
        number, gated, down = getattr(module, "num_experts", None), parameters["gate_up_proj"], parameters["down_proj"]
        alike = gated.dim() == down.dim() == 3 and gated.shape[0] == down.shape[0] == number
        if alike and gated.shape[1] == 2 * down.shape[2] and down.shape[2] >= num_ranks:
            found |= {path: "experts", f"{path}.gate_up_proj": "gated-column", f"{path}.down_proj": "row"}
    return found


# The names of numbers of heads in attentions: first those of keys and values, which are the fewest.
HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads", "n_head")


def cutting_of(model: nn.Module, styles: Styles | None, degrees: Degrees) -> Cutting:
    """How each parameter of a model is cut, by its name; those that are not there stay whole.

    Without `styles` they are those of the table for its class, or of the plan that a model of transformers carries;
    without either a model has none but whole parameters.

    Raises:
        ValueError: a style or a pattern that fits nothing; heads, features or experts that cannot be shared by so many
            ranks; or no table.
    """
    if styles is None and degrees.features == degrees.experts == 1:
        styles = _known_styles(model, 1) or {}  # ranks that share the batch alone share the tokens of experts
    styles = styles_of(model, degrees.features) if styles is None else styles
    modules = dict(model.named_modules())
    layers: dict[str, int] = {}
    for pattern, style in styles.items():
        if style == "experts":
            parts = _matching(pattern)
            layers |= {path: _num_experts(path, module) for path, module in modules.items() if parts.fullmatch(path)}
    if degrees.experts > 1 and not layers:
        raise ValueError(f"{type(model).__name__} has no experts to share: leave out `experts` {degrees.experts}")
    both = ("experts", "features") if degrees.whole_experts else ("experts",)
    axes = tuple(axis for axis in both if getattr(degrees, axis) > 1)
    count = prod(getattr(degrees, axis) for axis in axes)
    for path, number in layers.items():
        if number < count:
            flags = " and ".join({"experts": "`experts`", "features": "`tensor`"}[axis] for axis in axes)
            raise ValueError(f"{path} has {number} experts, which {count} ranks cannot share: use fewer for {flags}")
    found: dict[str, Cuts] = {}
    if degrees.features > 1:
        for name, cut in _cuts_of(model, styles, degrees.features).items():
            if name.rpartition(".")[0] not in layers or not degrees.whole_experts:
                found[name] = (cut,)
        for path in () if degrees.whole_experts else layers:
            _check_parts(path, modules[path], found)
    if count > 1:
        for path in layers:
            for name, _ in modules[path].named_parameters():
                found[f"{path}.{name}"] = (Cut(0, axes=axes), *found.get(f"{path}.{name}", ()))
    return Cutting(found, layers, axes)


NOT_CUT = Cutting()


def _matching(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern.removesuffix("?")).replace(r"\*", r"[^.]+"))


def _num_experts(path: str, module: nn.Module) -> int:
    """How many experts a layer has, which each of its parameters has first."""
    first = {p.shape[0] if p.dim() else 0 for p in module.parameters()}
    number = getattr(module, "num_experts", None)
    if first != {number}:
        raise ValueError(
            f"{path} is to be experts, but its parameters do not have num_experts as their first dim: {number}, {first}"
        )
    return int(first.pop())


def _check_parts(path: str, module: nn.Module, cuts: Mapping[str, Cuts]) -> None:
    """Refuse parts of experts that would not add up to what whole ones make: all are cut along the same features."""
    widths = {}
    for name, parameter in module.named_parameters():
        if f"{path}.{name}" not in cuts:
            raise ValueError(
                f"{path}.{name} is whole, but ranks of `tensor` that have parts of experts add up what these make: "
                "give it the style column, gated-column or row, or let ranks have whole experts (`moe` expert)"
            )
        (cut,) = cuts[f"{path}.{name}"]
        widths[name] = parameter.shape[cut.dim] // cut.outer
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{number} of {name}" for name, number in widths.items())
        raise ValueError(
            f"{path} is cut along different features, {found}: parts of experts are cut where one product meets the "
            "next (gated-column for two in one), or let ranks have whole experts (`moe` expert)"
        )


def _cuts_of(model: nn.Module, styles: Styles, num_ranks: int) -> dict[str, Cut]:
    """How each parameter is cut along its features."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Cut] = {}
    all_experts = [_matching(pattern) for pattern, style in styles.items() if style == "experts"]
    of_experts = {path for path in modules if any(parts.fullmatch(path) for parts in all_experts)}
    for pattern, style in styles.items():
        if style not in STYLES:
            raise ValueError(f"{pattern} has the style {style!r}, but must have one of {', '.join(STYLES)}")
        parts = _matching(pattern)
        paths = [path for path in modules if parts.fullmatch(path)]
        single = [path for path in parameters if parts.fullmatch(path)]
        if not paths and not single and not pattern.endswith("?"):
            raise ValueError(
                f"no module or parameter of {type(model).__name__} has a name like {pattern}, which is to be {style}"
            )
        for path in paths:
            if _matrix_of(modules[path]) is not None or not pattern.endswith("?"):
                found |= dict(_cuts(path, modules, style, num_ranks))
        for path in single if style not in ("whole", "experts") else ():
            shape = parameters[path].shape
            last = style in ("row", "heads-row", "heads-last")
            first = int(path.rpartition(".")[0] in of_experts)
            found[path] = _cut(path, modules, shape, len(shape) - 1 if last else first, style, num_ranks)
    return found


def _matrix_of(module: nn.Module) -> nn.Parameter | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, nn.Parameter) and weight.dim() > 1 else None


def _cuts(path: str, modules: Mapping[str, nn.Module], style: str, num_ranks: int) -> Iterator[tuple[str, Cut]]:
    """Those of the parameters of one module."""
    module = modules[path]
    weight = _matrix_of(module)
    if style in ("whole", "experts"):
        return
    if weight is None:
        raise ValueError(f"{path} is to be {style}, but {type(module).__name__} has no matrix called weight")
    if isinstance(module, _ConvNd):
        yield from _channel_cuts(path, module, style, num_ranks)
        return
    turned = type(module).__name__ == "Conv1D"  # of transformers, which multiplies from the other side
    is_row = style in ("row", "heads-row")
    cut = _cut(path, modules, weight.shape, int(is_row != turned), style, num_ranks)
    yield f"{path}.weight", cut
    if getattr(module, "bias", None) is not None and not is_row:
        yield f"{path}.bias", replace(cut, dim=0)
    adapter = f"{path}.lora_{'A' if is_row else 'B'}"  # the factor that has these features, too
    if isinstance(modules.get(adapter), nn.Linear):
        yield from _cuts(adapter, modules, style, num_ranks)


def _cut(
    path: str, modules: Mapping[str, nn.Module], shape: Sequence[int], dim: int, style: str, num_ranks: int
) -> Cut:
    """The cut of a parameter of this shape, which `path` has or is, along `dim`."""
    outer = {"fused-heads": 3, "gated-column": 2}.get(style, 1)
    size, rest = divmod(shape[dim], outer)
    number, what = size, "rows" if style == "vocabulary" else "features"
    if "heads" in style:
        number, what = _heads(path, modules), "heads of keys"
    if rest or size % number:
        raise ValueError(f"{path} has {shape[dim]} features, which are not those of {number} heads")
    if number < num_ranks:
        raise ValueError(f"{path} has {number} {what}, which {num_ranks} ranks cannot share: use fewer for `tensor`")
    return Cut(dim, outer, size // number)


def _channel_cuts(path: str, module: _ConvNd, style: str, num_ranks: int) -> Iterator[tuple[str, Cut]]:
    """Those of a convolution: its weight is (out, in / groups, ..), or (in, out / groups, ..) if it is transposed."""
    if style not in ("column", "row") or (style == "row" and module.groups > 1):
        what = f"a convolution of {module.groups} groups" if module.groups > 1 else "a convolution"
        raise ValueError(f"{path} is to be {style}, but {what} can only be column{' or row' * (module.groups == 1)}")
    dim = 0 if module.groups > 1 else int(module.transposed) if style == "column" else int(not module.transposed)
    number = module.groups if module.groups > 1 else module.weight.shape[dim]
    if number < num_ranks:
        what = "groups" if module.groups > 1 else "channels"
        raise ValueError(f"{path} has {number} {what}, which {num_ranks} ranks cannot share: use fewer for `tensor`")
    yield f"{path}.weight", Cut(dim, 1, module.weight.shape[dim] // number)
    if module.bias is not None and style == "column":
        yield f"{path}.bias", Cut(0, 1, module.out_channels // number)


def _heads(path: str, modules: Mapping[str, nn.Module]) -> int:
    """How many heads the attention around a module has: those of keys, of which each goes with several of queries."""
    around = path
    while around:
        around = around.rpartition(".")[0]
        for holder in (modules[around], getattr(modules[around], "config", None)):
            for name in HEADS:
                number = getattr(holder, name, None)
                if isinstance(number, int):
                    return number
    raise ValueError(f"no module around {path} says how many heads it has, by one of {', '.join(HEADS)}")


def names_by_first(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by that which comes first in the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {same[0]: same for same in names.values()}
