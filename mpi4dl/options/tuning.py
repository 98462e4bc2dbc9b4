"""The options of fine-tuning: weights to begin with, and what is said of parameters and modules by their names."""

from collections.abc import Mapping
from dataclasses import dataclass

from mpi4dl.options.declare import instead, option, same_as
from mpi4dl.options.kinds import BOOLEAN, NAME, PROPER_FRACTION, optional
from mpi4dl.options.patterns import EPOCHS, NUMBERS, PATTERNS


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning: weights to begin with, frozen parameters, rates by name, EMA."""

    weights: str | None = option(
        None,
        "weights to begin with: a file of PyTorch or safetensors, a run, torchvision's such as "
        "ResNet50_Weights.DEFAULT, or pretrained, those of the model's package, both from its cache; none: drawn",
        optional(NAME),
        brief="weights to begin with: a file, a run, or pretrained",
        known_as=same_as("pretrained-weights initial-checkpoint init-checkpoint load-from init-from finetune")
        | instead("use {option} pretrained", "pretrained"),
    )
    strict: bool = option(False, "refuse weights of which not all names and shapes are the model's", BOOLEAN)
    freeze: tuple[str, ...] = option(
        (),
        "parameters that are not trained, such as layer1.*,bn*",
        PATTERNS,
        known_as=same_as("freeze-layers")
        | instead("use {option} with patterns of names, such as layer1.*,bn*", "freeze-backbone"),
    )
    unfreeze: tuple[tuple[int, str], ...] = option(
        (), "frozen ones that are trained from an epoch on, such as 3:layer4.*,5:layer3.*", EPOCHS
    )
    eval_mode: tuple[str, ...] = option(
        (), "modules that stay in evaluation mode in training too, such as bn*,*.bn*", PATTERNS
    )
    lr_of: Mapping[str, float] = option(
        {}, "learning rates of parameters by name, the first match counts: head.*=0.01,layer4.*=0.001", NUMBERS
    )
    weight_decay_of: Mapping[str, float] = option({}, "the same of weight decay, such as *.bias=0,*bn*=0", NUMBERS)
    ema: float | None = option(
        None,
        "the decay of an average of the weights, such as 0.999, which is validated, and kept in ema.safetensors; none: "
        "no average",
        optional(PROPER_FRACTION),
        known_as=same_as("model-ema-decay ema-decay") | instead("use {option} 0.999", "model-ema"),
    )
