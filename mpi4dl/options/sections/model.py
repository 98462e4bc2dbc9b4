"""The model, and the patches that it sees."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import COUNT, KEYWORDS, PART, SHARE, choice, optional


@dataclass(frozen=True)
class Model:
    """The model, and the patches that it sees."""

    model: Any = option(
        "resnet18",
        "a model of mpi4dl or torchvision by name, timm/NAME, smp/CLASS, or your own: my_code.py:build or "
        "package.module:Class",
        PART,
        brief="a model of mpi4dl, torchvision, timm/ or smp/, or yours",
        known_as=same_as("arch architecture a backbone model-name model-type net")
        | instead("use {option} for the model, and --weights for its weights", "model-name-or-path"),
    )
    num_classes: int | None = option(
        None,
        "number of classes; none: that of the data",
        optional(COUNT),
        known_as=same_as("nb-classes n-classes num-labels"),
    )
    model_options: Mapping[str, Any] = option(
        {},
        "keyword arguments of the model, such as depth=29,pool=max",
        KEYWORDS,
        known_as=same_as("model-kwargs model-args model-config")
        | instead("use {option} num_layers={value}", "num-layers")
        | instead("use {option} num_filters={value}", "num-filters"),
    )
    patches: int | None = option(
        None,
        "cut images into patches of N x N pixels; the model encodes each patch, and an aggregator combines them; "
        "none: whole images",
        optional(COUNT),
        called="patch_size",
    )
    aggregator: str = option(
        "gated-attention",
        "how the features of all patches of an image are combined",
        choice("mean", "max", "gated-attention", "transformer"),
        needs=("patches", "features"),
    )
    feature_norm: str = option(
        "none",
        "standardize the features of all patches of a batch before the aggregator: batch, as batch norm does, or none",
        choice("none", "batch"),
        needs=("patches", "features"),
    )
    min_tissue: float = option(
        0.0, "drop patches with a smaller share of coloured pixels; 0: keep all", SHARE, needs=("patches", "features")
    )
    patches_at_once: int = option(
        16, "number of patches that each rank processes at once", COUNT, needs=("patches", "features")
    )

    @property
    def sees_patches(self) -> bool:
        return self.patches is not None
