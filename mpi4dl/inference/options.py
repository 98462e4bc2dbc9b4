"""The options of commands that use a trained model: changes to options of the training, plan and devices."""

from dataclasses import dataclass, field, fields, replace
from math import isqrt, prod
from typing import Any

from mpi4dl.options.config import Config, Parallel, Training
from mpi4dl.options.declare import instead, like, option, same_as
from mpi4dl.options.kinds import BOOLEAN, COUNT, COUNT_OR_ZERO, GRIDS, PART, choice, optional

LARGE_PIXELS = 1 << 22  # of an image, from which on ranks share each one


@dataclass(frozen=True)
class Inputs:
    """How the model sees images, and how many at once."""

    model: Any = option(
        None,
        "your own model again, such as my_code.py:build, if its file was moved or changed; none: as in training",
        optional(PART),
    )
    transforms: Any = option(None, "your own --transforms again; none: as in training", optional(PART))
    average: bool = option(
        True,
        "use the average of the weights of a run with --ema, as its validations did",
        BOOLEAN,
        known_as=instead("use {option}", "use-ema"),
    )
    fit: str = option(
        "auto",
        "how images get the image size: resize whole images, or crop their centre; auto: as in training, but without "
        "its automatic crop, and masks by windows over whole images",
        choice("auto", "resize", "crop"),
    )
    trust_code: bool = option(
        False, "load code that the run or the weights name, even if your training did not sign it", BOOLEAN
    )
    batch_size: int | None = option(
        None,
        "images in each batch, over all ranks together; none: as in training, and at least one for each of --data",
        optional(COUNT),
        brief="images at once, over all ranks",
        known_as=same_as("b batch eval-batch-size per-device-eval-batch-size"),
    )
    num_workers: int = option(
        2,
        "number of threads on each rank that read images ahead",
        COUNT_OR_ZERO,
        per_rank=True,
        known_as=same_as("workers j"),
    )


@dataclass(frozen=True)
class Placing:
    """How ranks share the work, and where it is computed."""

    tiles: tuple[tuple[int, ...], ...] | None = option(
        None,
        "grid of tiles of every image, one tile per rank; none: one tile for each rank for large images",
        optional(GRIDS),
        brief="the grid of tiles that each image is cut into",
    )
    stages: int = like(Parallel, "stages")
    data: int | None = option(
        None,
        "number of data replicas that share the batch; none: as many as the ranks allow",
        optional(COUNT),
        brief="groups of ranks that share the images",
        known_as=same_as("dp"),
    )
    microbatches: int = like(Parallel, "microbatches")
    tensor: int = like(Parallel, "tensor")
    experts: int = like(Parallel, "experts")
    halo: str = like(Parallel, "halo")
    stream: tuple[int, ...] | str | None = like(Parallel, "stream")
    stream_until: str | None = like(Parallel, "stream_until")
    memory_limit: int | None = like(Parallel, "memory_limit")
    no_rule: str = like(Parallel, "no_rule")
    precision: str = like(Training, "precision")
    threads: int | None = like(Parallel, "threads")
    device: str = like(Parallel, "device")
    gpu_wire: str = like(Parallel, "gpu_wire")
    hang_timeout: float = like(Parallel, "hang_timeout")


@dataclass(frozen=True)
class Inference:
    """How a trained model is used, whatever for."""

    inputs: Inputs = field(default_factory=Inputs)
    placing: Placing = field(default_factory=Placing)


def placed(config: Config, chosen: Inference, num_ranks: int) -> tuple[Config, str]:
    """The configuration of training with the plan that is asked for now, or that fits to so many ranks; and why."""
    asked, size = chosen.placing, config.data.image_size
    batch_size = chosen.inputs.batch_size or config.data.batch_size
    tiles, data, why = asked.tiles, asked.data, ""
    alone = asked.stages == asked.tensor == asked.experts == 1
    if tiles is None and data is None and alone and num_ranks > 1:
        shared = prod(size) >= LARGE_PIXELS or (chosen.inputs.batch_size or num_ranks) < num_ranks
        if config.model.patches is not None:
            tiles, why = ((1, num_ranks),), f"`tiles` 1x{num_ranks}: ranks share the patches of each image"
        elif shared or config.data.fit == "own":
            tiles = (_near_square(num_ranks, len(size)),)
            grid = "x".join(map(str, tiles[0]))
            why = f"`tiles` {grid}: all ranks share each image; `data` {num_ranks} would share out the images"
        else:
            why = f"`data` {num_ranks}: ranks share out the images; `tiles` would spread each one over them"
    if tiles is None:
        tiles = ((1,) * max(2, len(size)) if len(size) != 1 else (1,),)
    if data is None:
        others = asked.tensor * asked.experts * sum(prod(grid) for grid in _each(tiles, asked.stages))
        data = max(1, num_ranks // others)
    if config.data.fit == "own":
        batch_size = asked.microbatches
    elif chosen.inputs.batch_size is None:
        batch_size = max(batch_size, data * asked.experts * asked.microbatches)
    parallel = replace(
        config.parallel,
        tiles=tiles,
        data=data,
        balance="flops",
        **{name: getattr(asked, name) for name in sorted(_SAME)},
    )
    data_section = replace(config.data, batch_size=batch_size, num_workers=chosen.inputs.num_workers)
    training = replace(config.training, precision=asked.precision)
    return replace(config, parallel=parallel, data=data_section, training=training), why


_SAME = frozenset(each.name for each in fields(Placing)) & frozenset(each.name for each in fields(Parallel))
_SAME -= {"tiles", "data"}  # None of which is to be chosen


def _each(tiles: tuple[tuple[int, ...], ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """The grid of each stage: the last one is that of all that follow."""
    return tuple(tiles[min(stage, len(tiles) - 1)] for stage in range(stages))


def _near_square(count: int, num_axes: int) -> tuple[int, ...]:
    """So many tiles: of pictures as many rows as go, up to as many as columns; of volumes all of the depth."""
    if num_axes == 1:
        return (count,)
    rows = next(n for n in range(isqrt(count), 0, -1) if count % n == 0)
    return (*(1,) * (num_axes - 2), rows, count // rows)
