"""How unlike two images are to the first layers of a VGG of torchvision, as a loss.

Johnson et al. 2016, "Perceptual losses for real-time style transfer and super-resolution".
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Refusal
from mpi4dl.tasks.formulas import BatchLoss, as_targets, spread

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


class Perceptual(BatchLoss):
    """The sum over `layers` of the mean absolute difference of what they make of two images, times `factor`.

    Images are (N, 1 or 3 channels, height, width) with values from 0 to 1; the VGG sees grey ones as RGB. `vgg` is a
    state_dict of torchvision's vgg16 or vgg19. Raises ValueError without one, and for layers that it has not.
    """

    def __init__(self, vgg: Mapping[str, Tensor] | None, layers: str, factor: float) -> None:
        own = {name: value for name, value in (vgg or {}).items() if name.startswith("features.")}
        with torch.device("meta"):
            build = getattr(import_torchvision().models, "vgg19" if "features.34.weight" in own else "vgg16")
            whole = build(weights=None, init_weights=False).requires_grad_(False).eval()
        shapes = {name: value.shape for name, value in whole.state_dict().items() if name.startswith("features.")}
        if shapes != {name: value.shape for name, value in own.items()}:
            other = "" if vgg is None else ", as torchvision names them, and those of `vgg` are others"
            raise ValueError(f"`loss` perceptual needs weights of vgg16 or vgg19{other}: `loss_options` vgg=vgg16.pth")
        whole.load_state_dict(own, strict=False, assign=True)
        ends, block, number = dict[str, int](), 1, 0
        for end, layer in enumerate(whole.features, 1):
            if isinstance(layer, nn.ReLU):
                number += 1
                ends[f"relu{block}_{number}"] = end
            elif isinstance(layer, nn.MaxPool2d):
                block, number = block + 1, 0
        wanted = [name.strip() for name in str(layers).split("+")]
        if unknown := [name for name in wanted if name not in ends]:
            raise ValueError(f"`loss` perceptual: `layers` {unknown[0]} is none of {', '.join(ends)}")
        self.ends, self.factor = {ends[name] for name in wanted}, float(factor)
        self.layers = whole.features[: max(self.ends)]

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        outputs = as_targets(outputs, targets)
        targets = spread(targets, outputs)
        if outputs.dim() != 4 or outputs.shape != targets.shape or outputs.shape[1] not in (1, 3):
            raise Refusal(
                "`loss` perceptual compares pictures (N, 1 or 3 channels, height, width), not outputs of shape "
                f"{tuple(outputs.shape)} with targets of {tuple(targets.shape)}: choose another `loss`"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
            self.layers.to(outputs.device, wide)
            found = zip(self._seen(outputs.to(wide)), self._seen(targets.to(wide)), strict=True)
            return (self.factor * torch.stack([(made - own).abs().mean((1, 2, 3)).sum() for made, own in found]).sum(),)

    def _seen(self, images: Tensor) -> list[Tensor]:
        mean, std = (torch.tensor(of, dtype=images.dtype, device=images.device).view(3, 1, 1) for of in (MEAN, STD))
        x, found = (images - mean) / std, []  # grey becomes three channels here
        for end, layer in enumerate(self.layers, 1):
            x = layer(x)
            if end in self.ends:
                found.append(x)
        return found
