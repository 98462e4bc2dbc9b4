"""Takes the portrait of a run, from its engine, and shows it in TensorBoard too."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from mpi4dl._memory import MemoryMeter
from mpi4dl.engine import Engine
from mpi4dl.forecast.dry_run import title
from mpi4dl.forecast.forecast import foreseen
from mpi4dl.options.config import Config, to_toml
from mpi4dl.parallel.tables.drawing import as_image, as_text
from mpi4dl.parallel.tables.simulator import Simulation
from mpi4dl.trainer.folder import RunFolder
from mpi4dl.trainer.portrait import PORTRAIT, Portrait

MOST_SPANS = 20_000  # of a timeline that is kept
MOST_DRAWN = 2_000  # of one that is drawn for TensorBoard
REST = "activations and the rest"


class Painter:
    """Keeps the portrait of a run in its folder, and shows it in TensorBoard; made on rank 0, before the first step.

    A folder that cannot be written is said, and ends nothing.
    """

    def __init__(self, reporter: Any, folder: RunFolder, config: Config, engine: Engine, num_steps: int) -> None:
        self._reporter, self._folder, self._step = reporter, folder, engine.num_steps
        prices, plan = engine.held.prices, engine.plan.describe()
        source, timeline = "" if prices is None else prices.source, timeline_of(engine)
        modules = tuple(modules_of(engine))
        self.portrait = Portrait(title(config, engine), plan, num_steps, modules, (), source, timeline)
        reporter.text("run/options", to_toml(config), self._step)
        reporter.rows("run/parameters by module", ("module", "values", "of them trained"), modules, self._step)
        if timeline is not None:
            if reporter.has_pictures and sum(map(len, timeline.rows)) <= MOST_DRAWN:
                reporter.figure("run/timeline", np.asarray(as_image(timeline)), self._step)
            reporter.text("run/timeline", f"{as_text(timeline)}\n{source}", self._step)
        self._write()

    def remember(self, memory: Sequence[Mapping[str, int]]) -> None:
        """Add what the memory of each rank is for."""
        self.portrait = replace(self.portrait, memory=tuple(memory))
        rows = [[rank, *(f"{n / 2**20:,.1f}" for n in one.values())] for rank, one in enumerate(memory)]
        self._reporter.rows("run/memory in MiB", ("rank", *memory[0]), rows, self._step)
        self._write()

    def _write(self) -> None:
        path = self._folder.path / PORTRAIT
        try:
            path.write_text(self.portrait.text(), encoding="utf-8")
        except OSError as error:
            self._reporter.say(f"{path} cannot be written: {error.strerror}; the run goes on without")


def remember(painter: Painter | None, config: Config, engine: Engine, meter: MemoryMeter) -> bool:
    """Have rank 0's painter remember the memory of all ranks, once steps were made. Collective; True, as it is done."""
    own = purposes_of(engine, meter.peak_bytes(), config.parallel.offload == "disk")
    memory = engine.comm.all_gather_object(own)
    if painter is not None:
        painter.remember(memory)
    return True


def timeline_of(engine: Engine) -> Simulation | None:
    """How a step of a plan of several stages was foreseen, where what its atoms cost is known."""
    held, plan = engine.held, engine.plan
    if held.prices is None or plan.num_stages == 1:
        return None
    found = foreseen(plan, held.prices, held.counts)
    return found if sum(map(len, found.rows)) <= MOST_SPANS else None


def modules_of(engine: Engine) -> Iterator[tuple[str, int, int]]:
    """The values of each part of the model, tied ones once: its first two levels, or one where that says enough."""
    held = engine.held
    sizes = {name: prod(shape) for name, (shape, _) in held.shapes.items() if name not in held.ties}
    tops = {name.partition(".")[0] for name in sizes}
    levels = 1 if len(tops) > 3 else 2
    found: dict[str, list[int]] = {}
    for name, size in sizes.items():
        *above, _ = name.split(".")
        row = found.setdefault(".".join(above[:levels]) or name, [0, 0])
        row[0] += size
        row[1] += size * (name in held.trained)
    return ((name, values, trained) for name, (values, trained) in found.items())


def purposes_of(engine: Engine, peak_bytes: int, on_disk: bool = False) -> dict[str, int]:
    """What this rank's memory is for, in bytes, once steps were made; of the peak the rest is activations' and others'.

    Storages count once, whole: flat buckets too. Gradients are those that stay until the step. What the optimizer has
    on disk is none of the memory.
    """
    held, optimizer = engine.held, engine.optimizer
    kept: list[Tensor] = [*held.parameters(), *held.buffers()]
    updated: list[Tensor] = []
    gradients = 0
    for group in engine.groups:
        for piece in (piece for bucket in group.update.pieces for piece in bucket):
            size = piece.span.stop - piece.span.start
            own = piece.value if piece.target is None else piece.target
            kept.append(own.detach())
            if piece.target is not None:
                updated.append(piece.value.detach())
            gradients += size * own.element_size() if group.zero > 1 else 0
        if group.zero <= 1:
            gradients += sum(p.numel() * p.element_size() for p in group.parameters)
        updated += [] if group.average is None else group.average.values
    updated += [each for state in optimizer.state.values() for each in state.values() if hasattr(each, "nbytes")]
    found = {
        "parameters and buffers": _bytes_of(kept),
        "gradients": gradients,
        "optimizer": 0 if on_disk else _bytes_of(updated),
    }
    return found | {REST: max(0, peak_bytes - sum(found.values()))}


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the storages of some tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
