"""Builds a model from its name: one of our own, from the table below, or of timm, smp or torchvision.

resnet_v2                           OWN_MODELS
uni2                                OWN_MODELS too: an encoder of tiles of slides, which timm makes
resnet50, fcn_resnet50, r3d_18      a builder of torchvision.models
timm/vit_tiny_patch16_224           what timm.create_model makes, if that package is installed
smp/Unet                            a class of segmentation_models_pytorch, likewise; its classes are num_classes
ssd300_vgg16.backbone               what a detection model of torchvision looks at images with, without its heads
ssd300_vgg16, raft_small            refused, with the reason
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, Literal, get_type_hints

from torch import nn

from mpi4dl._torchvision import import_torchvision, torchvision_models
from mpi4dl._wording import to_install

# Images, volumes and sequences of values (batch, channels, *space), or tokens (batch, length).
Takes = Literal["images", "tokens"]


@dataclass(frozen=True)
class Entry:
    """The builder of a model, the options that its name implies, the kind of its inputs, and its `usual` options.

    `path` is the module of `mpi4dl.models` and the name in it, which are imported when the model is wanted. With
    `mixture` the builder takes a `Mixture`, whose fields are options of the model. `page` is where Hugging Face has the
    weights of a published encoder of tiles of slides, which needs timm.
    """

    path: str
    fixed: Mapping[str, object] = field(default_factory=dict)
    takes: Takes = "images"
    usual: Mapping[str, object] = field(default_factory=dict)
    mixture: bool = False
    page: str = ""

    @property
    def builder(self) -> Callable[..., nn.Module]:
        return _at(self.path)


def _at(path: str) -> Any:
    module, _, name = path.partition(".")
    return getattr(importlib.import_module(f"mpi4dl.models.{module}"), name)


def _of_text(path: str, vocabulary: int, context: int, *sizes: int) -> Entry:
    fixed = dict(zip(("num_layers", "num_heads", "hidden"), sizes, strict=True))
    return Entry(path, fixed, "tokens", {"vocabulary": vocabulary, "context": context, "dropout": 0.1})


OWN_MODELS: Mapping[str, Entry] = MappingProxyType(
    {
        "amoebanetd": Entry("amoebanet.amoebanetd"),
        "bert": Entry("bert.BERT", takes="tokens"),
        "bert_base": _of_text("bert.BERT", 30522, 512, 12, 12, 768),
        "bert_2_5b": _of_text("bert.BERT", 30522, 512, 54, 20, 1920),  # in the shape that Megatron-LM has for that size
        "gpt": Entry("gpt.GPT", takes="tokens", mixture=True),
        "gpt2": _of_text("gpt.GPT", 50257, 1024, 12, 12, 768),
        "gpt2_medium": _of_text("gpt.GPT", 50257, 1024, 24, 16, 1024),
        "gpt2_large": _of_text("gpt.GPT", 50257, 1024, 36, 20, 1280),
        "gpt2_xl": _of_text("gpt.GPT", 50257, 1024, 48, 25, 1600),
        "resnet_v1": Entry("resnet.resnet_v1", {"dims": 2}),
        "resnet_v2": Entry("resnet.resnet_v2"),
        "resnet110_v2": Entry("resnet.resnet_v2", {"depth": 110}),
        "resnet1001_v2": Entry("resnet.resnet_v2", {"depth": 1001}),
        "small_resnet": Entry("resnet.small_resnet"),
        "resnet1d": Entry("resnet.resnet_v1", {"dims": 1}, usual={"depth": 20}),
        "resnet3d": Entry("resnet.resnet_v1", {"dims": 3}, usual={"depth": 20}),
        "unet": Entry("unet.UNet", {"dims": 2}),
        # As wide and as deep as in Cicek et al. 2016, "3D U-Net", https://arxiv.org/abs/1606.06650.
        "unet3d": Entry("unet.UNet", {"dims": 3}, usual={"num_filters": 32, "depth": 3}),
        "vit": Entry("vit.ViT", mixture=True),
        "uni": Entry("pathology.uni", page="MahmoodLab/UNI"),
        "uni2": Entry("pathology.uni2", page="MahmoodLab/UNI2-h"),
        "virchow": Entry("pathology.virchow", page="paige-ai/Virchow"),
        "virchow2": Entry("pathology.virchow2", page="paige-ai/Virchow2"),
        "gigapath": Entry("pathology.gigapath", page="prov-gigapath/prov-gigapath"),
        "hoptimus0": Entry("pathology.hoptimus0", page="bioptimus/H-optimus-0"),
        "hoptimus1": Entry("pathology.hoptimus1", page="bioptimus/H-optimus-1"),
        "conch": Entry("pathology.conch", page="MahmoodLab/CONCH"),
    }
)


# By the part of torchvision.models that their builders are in.
REFUSALS: Mapping[str, str] = MappingProxyType(
    {
        "detection": "takes a list of images of any sizes and a list of their boxes, and returns losses of its own: "
        "training has one batch of images of one size, and a loss beside the model. Train the part of it that looks at "
        "images, {name}.backbone, with heads and a loss of your own",
        "optical_flow": "takes two images, and returns a list of ever better flows between them: training feeds a "
        "model one batch of images",
    }
)
BACKBONE, TIMM, SMP = ".backbone", "timm/", "smp/"
LOADING = ("pretrained", "checkpoint_path", "encoder_weights")  # options of theirs that read weights, some as pickles
SMP_TIMM = "tu-"  # what encoders of timm are called by segmentation_models_pytorch


def names(torchvision: bool = False) -> list[str]:
    """Return the names that `build` builds, sorted: our own and, if `torchvision`, its names too."""
    found = set(OWN_MODELS)
    for name in torchvision_models() if torchvision else ():
        if torchvision_models()[name] == "detection":
            found.add(name + BACKBONE)
        elif refusal(name) is None:
            found.add(name)
    return sorted(found)


def refusal(name: str) -> str | None:
    """Why this model of torchvision is not built: because it cannot be trained here. None if it can."""
    reason = REFUSALS.get(torchvision_models()[name])
    return None if reason is None else f"model {name!r} {reason.format(name=name)}"


def takes(name: str) -> Takes:
    """The kind of inputs of a model of this name: all but some of our own take images."""
    return OWN_MODELS[name].takes if name in OWN_MODELS else "images"


def option_of_channels(name: str) -> str | None:
    """The option by which a model of this name is built for a number of channels; None of others, which take 3."""
    if name.startswith(TIMM):
        return "in_chans"
    own = name in OWN_MODELS and "in_channels" in _parameter_names(OWN_MODELS[name].builder)
    return "in_channels" if own or name.startswith(SMP) else None


def page_of(name: str) -> str:
    """The page of Hugging Face that has the weights of a published encoder of tiles of slides; empty of others."""
    return OWN_MODELS[name].page if name in OWN_MODELS else ""


def with_defaults(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of a published encoder of tiles, with those that its name implies. Raises ValueError without timm."""
    _require_timm(name)
    parameters = inspect.signature(OWN_MODELS[name].builder).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | dict(options)


def described(name: str, options: Mapping[str, object]) -> list[str]:
    """A line about a published encoder of tiles, with all of its options; of other models none."""
    if not page_of(name):
        return []
    chosen = ", ".join(f"{option} {value}" for option, value in with_defaults(name, options).items())
    return [f"{name}: the architecture of {page_of(name)}, by timm: {chosen}"]


def without_loading(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of a model that gets its weights from elsewhere: without those that make its package load some."""
    loads = LOADING if name.startswith((TIMM, SMP)) else ()
    return {option: value for option, value in options.items() if option not in loads}


def build(name: str, num_classes: int | None = None, **options: object) -> nn.Module:
    """Build the model called `name`, with freshly drawn weights.

    Args:
        name: one of `names(torchvision=True)`, timm/ and one of `timm.list_models()`, or smp/ and a class of
            segmentation_models_pytorch, such as smp/Unet.
        num_classes: the number of logits (of each image or pixel); None keeps the model's own default. Models that take
            tokens have none.
        options: the model's further options, such as `depth` of "resnet_v2" or `num_filters` of "unet".

    Raises:
        ValueError: the name or an option is unknown, a value is not possible, or the model cannot be trained.
    """
    if num_classes is not None:
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes} is not possible: a model needs at least one class")
        if takes(name) == "tokens":
            raise ValueError(f"model {name!r} takes tokens and has no classes: leave out num_classes={num_classes}")
        options["num_classes"] = num_classes
    if name in OWN_MODELS:
        return _build_own(name, OWN_MODELS[name], options)
    if name.startswith(TIMM):
        found: nn.Module = _timm_with(name.removeprefix(TIMM)).create_model(name.removeprefix(TIMM), **options)
        return found
    if name.startswith(SMP):
        return _build_smp(name.removeprefix(SMP), options)
    require_known(name)
    if name.endswith(BACKBONE):
        return _build_torchvision(name.removesuffix(BACKBONE), options).get_submodule("backbone")
    return _build_torchvision(name, options)


def require_known(name: str) -> None:
    """Raises ValueError for a name that is none of ours or of its package, and for models that are not built."""
    if name.startswith(TIMM):
        _timm_with(name.removeprefix(TIMM))
    elif name.startswith(SMP):
        _smp_with(name.removeprefix(SMP))
    _require_timm(name)
    if name in OWN_MODELS or name.startswith((TIMM, SMP)):
        return
    known = names(torchvision=True)
    if name not in known and name in torchvision_models():
        raise ValueError(refusal(name))
    if name.endswith(".py"):
        raise ValueError(f"model {name!r} is a file: name what makes the model in it too, as in {name}:build")
    if name not in known:
        raise ValueError(
            f"model {name!r} is unknown; {_nearest(name.lower(), known, names())} "
            "(mpi4dl.models.names(torchvision=True) lists all)"
        )


def _build_own(name: str, entry: Entry, options: Mapping[str, object]) -> nn.Module:
    _require_timm(name)
    own = _parameter_names(entry.builder) - entry.fixed.keys() - {"mixture"}
    mixture = _at("experts.Mixture") if entry.mixture else None
    of_mixture = set() if mixture is None else _parameter_names(mixture)
    _check_options(name, options, own | of_mixture)
    given, chosen = ({key: options[key] for key in options if key in names} for names in (own, of_mixture))
    if chosen and "num_experts" not in chosen:
        raise ValueError(f"model {name!r} needs 'num_experts' beside {_listed(sorted(chosen))}")
    if mixture is not None and chosen:
        given["mixture"] = mixture(**chosen)
    return entry.builder(**entry.fixed, **{**entry.usual, **given})


def _require_timm(name: str) -> None:
    """Raises ValueError for an encoder of tiles if its package is not installed."""
    if page_of(name):
        _imported("timm", name)


def _timm_with(name: str) -> Any:
    """The package timm, which has this model. Raises ValueError."""
    timm = _imported("timm", TIMM + name)
    if not timm.is_model(name):
        known = timm.list_models()
        raise ValueError(f"timm has no model {name!r}; {_nearest(name, known, timm.list_models('resnet?8'))}")
    return timm


def _smp_with(name: str) -> tuple[Any, Callable[..., nn.Module]]:
    """The package segmentation_models_pytorch, and its model of this name. Raises ValueError."""
    smp = _imported("segmentation_models_pytorch", SMP + name)
    known = {model.__name__: model for model in smp.MODEL_ARCHITECTURES_MAPPING.values()}
    if name not in known:
        raise ValueError(f"segmentation_models_pytorch has no model {name!r}; {_nearest(name, known, sorted(known))}")
    return smp, known[name]


def _build_smp(name: str, options: dict[str, object]) -> nn.Module:
    smp, builder = _smp_with(name)
    if "num_classes" in options:
        options["classes"] = options.pop("num_classes")
    encoder = str(options.get("encoder_name", "resnet34"))
    encoders = smp.encoders.get_encoder_names()
    of_timm = encoder.startswith(SMP_TIMM) and importlib.import_module("timm").is_model(encoder.removeprefix(SMP_TIMM))
    if encoder not in encoders and not of_timm:
        near = _nearest(encoder, encoders, ["resnet18", "resnet50"])
        raise ValueError(
            f"segmentation_models_pytorch has no encoder {encoder!r}; {near}, and {SMP_TIMM}NAME is a model of timm"
        )
    try:
        # Left to itself, it downloads the weights of the encoder.
        found = builder(**{"encoder_weights": None, **options})
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"segmentation_models_pytorch refuses the options {options} for {name!r}: {error}") from error
    return found


def _imported(package: str, model: str) -> ModuleType:
    """A package that builds models, which need not be installed."""
    import_torchvision()  # which such packages import in their own way
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"model {model} needs the package {package}; run {to_install(package)}") from None


def _build_torchvision(name: str, options: dict[str, object]) -> nn.Module:
    builder = import_torchvision().models.get_model_builder(name)
    builder_names = _parameter_names(builder)
    # The **kwargs of a builder go to the class that it returns. Some swallow what they do not know, so this is checked
    # before it is tried.
    model_class = get_type_hints(builder)["return"]
    bases = model_class.__mro__[: model_class.__mro__.index(nn.Module)]
    legal = builder_names.union(*(_parameter_names(base) for base in bases))
    _check_options(name, options, legal)
    if options.get("quantize"):
        raise ValueError(
            f"{name!r} with quantize=True has weights of 8 bits, which have no gradient: leave it out, train the same "
            "model in floating point, and quantize it afterwards"
        )
    # Left to themselves, the detection and segmentation models download the weights of their backbone.
    downloads: dict[str, object] = {"weights": None, "weights_backbone": None}
    defaults = {option: value for option, value in downloads.items() if option in builder_names}
    if "init_weights" in legal:  # as it is anyway, but GoogLeNet and Inception warn of it unless the option is set
        defaults["init_weights"] = True
    try:
        return builder(**(defaults | options))
    except TypeError as error:
        raise ValueError(f"torchvision refuses the options {options} for {name!r}: {error}") from error


def _parameter_names(function: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _check_options(name: str, options: Mapping[str, object], legal: Iterable[str]) -> None:
    unknown = options.keys() - set(legal)
    if unknown:
        raise ValueError(
            f"model {name!r} has no option {_listed(sorted(unknown))}; its options are {_listed(sorted(legal))}"
        )


def _nearest(name: str, known: Iterable[str], others: Iterable[str]) -> str:
    """Which of the known names are like this one; if none is, the others."""
    return f"the nearest names are {_listed(difflib.get_close_matches(name, list(known)) or others)}"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(repr(word) for word in words)
