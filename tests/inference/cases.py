"""Weights that say what they are of, as training writes them, and images for them."""

from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import PIL.Image
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mpi4dl.checkpoints.manifest import ABOUT, MODEL
from mpi4dl.datasets.transform import Fit
from mpi4dl.options.config import Config, to_toml
from mpi4dl.options.declare import from_keywords
from mpi4dl.options.models import build_model
from mpi4dl.runs.description import Description

SIZE = (24, 32)
CLASSES = ("benign", 'a,"b"', "tumour")


class Shown(NamedTuple):
    """How training brought images to its size, and the largest of them."""

    fit: Fit = "resize"
    largest: tuple[int, ...] | None = None


class Like:
    """As much of the images of a run as its description needs."""

    def __init__(self, task: str, classes: tuple[str, ...], shown: Shown) -> None:
        self.training, self.classes, self.channels, self.fit = self, classes, 3, shown.fit
        self.task, self.largest = task, shown.largest


def train_nothing(
    folder: Path,
    task: str = "classify",
    classes: tuple[str, ...] = CLASSES,
    images: Shown | None = None,
    **options: Any,
) -> nn.Module:
    """Put what a run leaves into a folder: a model with weights as drawn, which is returned."""
    asked = {"model": "small_resnet", "image_size": SIZE, "batch_size": 3, "num_workers": 0, "task": task, **options}
    config = from_keywords(Config, asked)
    model = build_model(config, len(classes), 3).eval()
    spread_outputs(model)
    about = Description.of(config, Like(task, classes, images or Shown()), len(classes)).signed()
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "model.json").write_text(about.text)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / MODEL, {ABOUT: about.text}
    )
    return model


@torch.no_grad()
def spread_outputs(model: nn.Module) -> None:
    """Draw weights by a seed, and scale the last layer so that outputs of different images lie well apart.

    Nearly equal outputs change their order with the rounding of a processor or a plan, and ranks and classes with it.
    """
    draws = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p += 0.1 * torch.randn(p.shape, generator=draws)
    *_, last = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    assert last.bias is not None
    grounds = torch.rand((32, 3, 1, 1), generator=draws) * 200 / 255
    images = ((grounds + torch.rand((32, 3, *SIZE), generator=draws) * 56 / 255) - 0.5) / 0.25
    outputs = model(images).transpose(0, 1).flatten(1)
    scale = 1.5 / outputs.std(1)
    last.weight *= scale.reshape(-1, *[1] * (last.weight.dim() - 1))
    last.bias.copy_((last.bias - outputs.mean(1)) * scale)


def write_images(folder: Path, count: int, suffix: str = ".png") -> list[Path]:
    """Noise on grounds of different colours, every second one in a folder below. Folders differ in their images."""
    drawn, paths = np.random.default_rng(crc32(folder.name.encode())), []
    (folder / "more").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / ("more" if number % 2 else ".") / f"{number}{suffix}"
        ground = drawn.integers(0, 200, 3)
        pixels = (ground + drawn.integers(0, 56, (*SIZE, 3))).astype(np.uint8)
        PIL.Image.fromarray(pixels).save(path)
        paths.append(path)
    return paths


def shown(path: Path) -> Tensor:
    """What a model is to see of an image that has its size already: (1, 3, H, W)."""
    pixels = torch.from_numpy(np.asarray(PIL.Image.open(path)).copy())
    return ((pixels / 255 - 0.5) / 0.25).permute(2, 0, 1)[None]
