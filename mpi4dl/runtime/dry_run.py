"""What training would take, said without training: parameters, activations, messages, the timeline."""

from collections.abc import Iterator
from typing import Any

from mpi4dl.parallel import spatial
from mpi4dl.runtime.build import build_model, state_bytes
from mpi4dl.runtime.config import Config
from mpi4dl.runtime.overview import overview


def title(config: Config, engine: Any) -> str:
    """What is trained, and how, in one line."""
    height, width = config.data.image_size
    return (
        f"{config.model.model}, {engine.held.num_parameters:,} parameters, on {engine.comm.size} ranks: "
        f"{engine.plan.describe()}, images of {height} x {width} px, batches of {config.data.batch_size}, "
        f"{engine.device.type}"
    )


def explain(config: Config, engine: Any, num_classes: int, channels: int) -> Iterator[str]:
    """What each operator of a model in one stage sends; or who holds which stage."""
    shape = (config.data.batch_size, channels, *config.data.image_size)
    yield title(config, engine)
    yield from (
        _by_operator(engine, shape) if engine.plan.num_stages == 1 else _by_stage(config, engine, num_classes, shape)
    )


def _by_operator(engine: Any, shape: tuple[int, int, int, int]) -> Iterator[str]:
    """What each operator sends, and the memory of a rank."""
    model = engine.held.modules_of[0]
    found = spatial.explain(model.train(), shape, engine.held.parts[0, 0].grid)
    weights, states = sum(p.nbytes for p in model.parameters()), state_bytes(engine.optimizer)
    yield str(found)
    yield (
        f"memory of a rank: parameters {weights / 2**20:.1f} MiB, gradients {weights / 2**20:.1f} MiB, "
        f"optimizer {states / 2**20:.1f} MiB, activations at most {found.saved_bytes / 2**20:.1f} MiB"
    )


def _by_stage(config: Config, engine: Any, num_classes: int, shape: tuple[int, int, int, int]) -> Iterator[str]:
    """Who holds which stage and reads which images, and the timeline."""
    held = engine.held
    found = overview(
        config.model.model, lambda: build_model(config, num_classes), held.plan, shape, balance=held.counts
    )
    yield from (*found.stages(), *found.images(), *found.ranks())
