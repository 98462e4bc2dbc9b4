"""Weights of 8 bits: the weights of linear and convolutional layers, rounded alike on every rank.

Each output of a layer has a scale, the largest absolute weight of the output divided by 127. A weight becomes the
nearest multiple of the scale, from -127 to 127 times. The layers compute in float32 with these weights, so tiles,
stages and streaming have no part in it.
"""

import torch
from torch import Tensor, nn

from mpi4dl._wording import counted
from mpi4dl.comm import Refusal
from mpi4dl.engine.precision import int8_of
from mpi4dl.parallel.pipeline.local_stages import LocalStages

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # whose weights have an output in each row
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def weights_of_layers(model: nn.Module) -> dict[str, int]:
    """The names of the weights that int8 rounds, and of each the groups of a transposed convolution; of others 0."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        names: tuple[str, ...] = ()
        if isinstance(module, PLAIN + TRANSPOSED):
            names = ("weight",)
        elif isinstance(module, nn.MultiheadAttention):
            names = ATTENTION_WEIGHTS
        for name in names:
            if isinstance(module._parameters.get(name), Tensor):
                groups = module.groups if isinstance(module, TRANSPOSED) else 0
                found[f"{path}.{name}" if path else name] = groups
    return found


def rounded(weight: Tensor, groups: int = 0) -> Tensor:
    """A weight (outputs, inputs, ...) of a layer as int8 has it, of the same shape and dtype.

    With `groups` it is that of a transposed convolution, (inputs, outputs of a group, ...).
    """
    if groups:
        by_outputs = weight.unflatten(0, (groups, -1)).transpose(1, 2)  # (groups, outputs, inputs, ...)
        rows = rounded(by_outputs.reshape(-1, *by_outputs.shape[2:])).view(by_outputs.shape)
        return rows.transpose(1, 2).reshape(weight.shape)
    numbers, scales = int8_of(weight.flatten(1))
    return (numbers.to(scales.dtype) * scales[:, None]).view(weight.shape).to(weight.dtype)


@torch.no_grad()
def round_weights(stages: LocalStages, model: nn.Module) -> str:
    """Round the weights of layers to 8 bits, in place, and return a remark. `model` is the whole one, maybe on meta.

    Raises:
        Refusal: on all ranks: the plan cuts weights, or the model has no such layer.
    """
    layers = weights_of_layers(model)
    if not layers:
        raise Refusal("`precision` int8 rounds weights of linear and convolutional layers: the model has none")
    if stages.cutting.parameters:
        raise Refusal("`precision` int8 needs whole weights on each rank: leave out `tensor` and `experts`")
    groups_of: dict[str, int] = {}
    num_rounded = 0
    for first, same in stages.names_of.items():  # a tied weight has a layer under one of its names, at least
        known = [layers[name] for name in same if name in layers]
        if known:
            groups_of |= dict.fromkeys(same, known[0])
            num_rounded += torch.Size(stages.shapes[first][0]).numel()
    for together in stages.together:
        for name, p in together.parameters:
            if name in groups_of:
                p.copy_(rounded(p, groups_of[name]))
    share = num_rounded / max(1, stages.num_parameters)
    return (
        f"int8: {counted(len(layers), 'weight')} of linear and convolutional layers, {100 * share:.3g} % of "
        "the parameters, have 8 bits and a scale for each output; they compute in float32"
    )
