"""Own slides, model and loss, on tiles and in stages, with validation and checkpoints: `mpirun -n 5 python own.py`."""

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

import mpi4dl


class Slide:  # whatever has a size and reads a box of itself: each rank asks for its own
    def __init__(self, index: int) -> None:
        self.size, self.wavelength = (128, 128), 4 + 8 * (index % 2)

    def read(self, rows: tuple[int, int], cols: tuple[int, int]) -> np.ndarray:
        y, x = np.mgrid[slice(*rows), slice(*cols)]
        return np.cos(2 * np.pi * (x + y)[..., None] / self.wavelength).astype(np.float32)


class Slides(list[Slide]):  # so many of them, and what is to be learnt of each
    classes, channels, image, label = ("fine", "coarse"), 1, list.__getitem__, lambda slides, index: index % 2

    def __init__(self, count: int = 60) -> None:
        super().__init__(map(Slide, range(count)))


def build(num_classes: int) -> nn.Module:
    layers = [nn.Conv2d(1, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, label_smoothing=0.05)


if __name__ == "__main__":  # `mpi4dl train --dataset own.py:Slides` imports this file
    plan = {1: {}, 4: {"tiles": "2x2"}, 5: {"stages": 2, "tiles": "2x2,1x1", "microbatches": 2}}[mpi4dl.world().size]
    mpi4dl.Trainer(
        dataset=(Slides(48), Slides(12)), model=build, loss=loss, image_size=128, batch_size=6, epochs=2,
        optimizer="AdamW", lr=0.02, save_every=8, **plan,
    ).fit()  # fmt: skip
