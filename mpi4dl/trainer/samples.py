"""A few images of a batch, small, so that a reader sees what the model is shown."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mpi4dl.engine import Engine
from mpi4dl.options.config import Config
from mpi4dl.options.data import normalisation
from mpi4dl.parallel import spatial

SAMPLE_IMAGES = 4
SAMPLE_IMAGE_PX = 256


def samples(engine: Engine, tiles: Sequence[Any], microbatch: Any, size: tuple[int, ...]) -> Tensor | None:
    """The first images of a microbatch, (N, channels, H, W), of at most 256 px; None where the first stage is not.

    Of volumes it is the slice in the middle, and a sequence is shown as one row. Of images that are streamed there is
    none: nobody has them whole.

    Collective over the ranks of the first stage.
    """
    part = engine.held.parts.get((0, 0))
    if part is None or engine.held.stream is not None:
        return None
    shrink: Any = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(size)]
    small = shrink(engine.images(part, tiles[0], microbatch, size), [min(pixels, SAMPLE_IMAGE_PX) for pixels in size])
    whole = (spatial.gather(small) if isinstance(small, spatial.SpatialTensor) else small)[:SAMPLE_IMAGES]
    return whole[:, :, whole.shape[2] // 2] if len(size) == 3 else whole.unsqueeze(2) if len(size) == 1 else whole


def show_samples(reporter: Any, engine: Engine, tiles: Sequence[Any], microbatch: Any, config: Config) -> None:
    """Give rank 0's reporter a few images for TensorBoard, as they were before they were normalised."""
    found = samples(engine, tiles, microbatch, config.data.image_size)
    if found is not None and reporter is not None and found.shape[1] in (1, 3):
        mean, std = (found.new_tensor(each)[:, None, None] for each in normalisation(config, found.shape[1]))
        reporter.images("samples", found * std + mean, engine.num_steps)
