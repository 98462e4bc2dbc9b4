"""The communication of a model on a grid: operators and bytes. Nothing is computed, nothing is sent.

The model runs on meta tensors, once for every rank of the grid, on a communicator that counts instead of sending.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpi4dl import geometry
from mpi4dl._wording import aligned
from mpi4dl.parallel.inputs import made_up
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator, DryRunGrid, dry_run_grid
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import even_layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name

COUNTS = ("halo_bytes", "messages", "gathered_bytes", "reduced_bytes")
WORDS = {"module", "operator", "output"}
HEADINGS: tuple[str, ...] = ("module", "operator", "output", "halo bytes", "messages", "gathered", "reduced")


@dataclass
class Operator:
    """The messages of one call of an operator in a forward pass: the most of any one rank."""

    module: str
    name: str
    output: tuple[int, ...]
    halo_bytes: int = 0
    messages: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0

    @property
    def communicates(self) -> bool:
        return any(getattr(self, count) for count in COUNTS)


@dataclass
class Explanation:
    """The operators of one forward pass, in order; printed, a table of those that communicate.

    Backward sends the halos' gradients back: the same messages and bytes again.
    """

    operators: list[Operator] = field(default_factory=list)

    def total(self, count: str) -> int:
        return sum(getattr(operator, count) for operator in self.operators)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [HEADINGS]
        for o in self.operators:
            if o.communicates:
                rows.append((o.module, o.name, "x".join(map(str, o.output)), *_cells(partial(getattr, o))))
        rows.append((f"{len(self.operators)} operators", f"{len(rows) - 1} communicate", "", *_cells(self.total)))
        return "\n".join(aligned(rows, WORDS))


def _cells(value: Callable[[str], int]) -> tuple[str, ...]:
    return tuple(f"{value(count):,}" for count in COUNTS)


class _Recorder(TorchFunctionMode):
    """Notes every function that the model calls on a SpatialTensor, with what it made the communicator count."""

    def __init__(self, counting: DryRunCommunicator, path: list[str]) -> None:
        super().__init__()
        self.counting = counting
        self.path = path
        self.operators: list[Operator] = []

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Note what a module sent by itself, in none of its functions; and leave it."""
        noted = {count: sum(getattr(operator, count) for operator in self.operators) for count in COUNTS}
        counts = {count: self.counting.counts[count] - noted[count] for count in COUNTS}
        if isinstance(output, Tensor) and any(counts.values()):
            self.operators.append(Operator(self.path[-1], type(module).__name__, tuple(output.shape), **counts))
        self.path.pop()

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = dict(self.counting.counts)
        result = function(*args, **(kwargs or {}))
        name = function_name(function).removeprefix("torch.nn.functional.").removeprefix("torch.")
        bare = name.removeprefix("Tensor.")
        name = name if hasattr(Tensor, bare) else bare
        if isinstance(result, Tensor) and any(issubclass(kind, SpatialTensor) for kind in types):
            counts = {count: self.counting.counts[count] - before[count] for count in COUNTS}
            self.operators.append(Operator(self.path[-1], name, tuple(result.shape), **counts))
        return result


def whole(model: nn.Module, grid: Grid) -> nn.Module:
    """The model as a rank of the grid has it, if nothing of it is cut."""
    return model


def require_rules(
    model: nn.Module, shape: tuple[int, ...], grid: geometry.GridShape, held: Callable[..., nn.Module] = whole
) -> None:
    """Run the model on the first tile of images of `shape` (N, C, H, W), on meta tensors; nothing is sent.

    `held(model, grid)` is what a rank has of it. Raises NoRule, or ValueError, where training on such a grid would.
    """
    imaginary = dry_run_grid(grid)
    _forward(held(model, imaginary), shape, imaginary)


def explain(model: nn.Module, size: Sequence[int], grid: Grid, held: Callable[..., nn.Module] = whole) -> Explanation:
    """The operators of the model on images of `size`, (H, W) or (N, C, H, W), cut over the grid, and what they send.

    Of volumes and sequences likewise, and of tokens, (N, T). `held(model, grid)` is what a rank has of the model.
    """
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    channels = next((m.in_channels for m in model.modules() if isinstance(m, convolutions)), 3)
    shape = tuple(size) if len(size) > len(grid.space) else (grid.shape.batch, channels, *size)
    most = Explanation()
    for rank in range(grid.size):
        imaginary = dry_run_grid(grid.shape, rank)
        imaginary.arrangement = grid.arrangement
        part = held(model, imaginary)
        operators = _forward(part, shape, imaginary)
        most.operators = most.operators or operators
        for known, operator in zip(most.operators, operators, strict=True):
            for count in COUNTS:
                setattr(known, count, max(getattr(known, count), getattr(operator, count)))
    return most


def _forward(model: nn.Module, shape: tuple[int, ...], grid: DryRunGrid) -> list[Operator]:
    """Run the model on this rank's meta tile: its operators."""
    values = {
        name: value.detach().to("meta").requires_grad_(value.requires_grad)
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    layout = even_layout(grid, shape)
    x = SpatialTensor(made_up(model, layout.local_shape(shape), shape, torch.device("meta")), layout)
    path = [""]
    hooks, recorder = [], _Recorder(grid.comm, path)
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        hooks.append(module.register_forward_hook(recorder.leave))
    try:
        with recorder:
            torch.func.functional_call(model, values, (x,))
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.operators
