"""The engine: a model and a plan become `step()` and `evaluate()`, exact for any plan.

step:   tile -> SpatialTensor -> model -> outputs -> loss, alike on every rank, counted 1 / size on each
        -> backward, while the reducer sums full buckets of gradients over the replicas
        -> all ranks agree that it is finite -> clip -> optimizer
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.geometry import COLS, ROWS
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import Reducer
from mpi4dl.runtime.recompute import recompute_blocks

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepResult:
    """The loss (the mean over the whole batch) before the step, and the global norm of its gradient."""

    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class Evaluation:
    """Means over `count` samples; `accuracy` is None where the targets are not one class per sample."""

    loss: float
    accuracy: float | None
    count: int


class Engine:
    """Trains `model` by `plan` as one device would on the whole images and the whole batch.

    `model` is an unmodified nn.Module, the same on every rank, whose values on rank 0 count. `optimizer` is any
    torch.optim optimizer of its parameters. `loss(outputs, targets)` is the mean over the batch that it is given, which
    is the whole one on every rank. `precision` is "fp32" (the model's own dtype), "bf16" or "fp16" (autocast, with loss
    scaling for fp16). `recompute` keeps only the inputs of the model's blocks. `clip_norm` limits the gradient's norm.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        comm: Communicator,
        precision: str = "fp32",
        recompute: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        if precision not in AUTOCAST:
            raise ValueError(f"precision is {precision!r}, but must be one of {', '.join(AUTOCAST)}")
        self.model = model
        self.plan = plan
        self.optimizer = optimizer
        self.loss = loss
        self.comm = comm
        self.grid = plan.grid(comm)
        self.clip_norm = clip_norm
        self.device = next(model.parameters()).device
        self.num_steps = 0
        self._dtype = AUTOCAST[precision]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self._agree_on_model(precision=precision, recompute=recompute, clip_norm=clip_norm)
        for value in [*model.parameters(), *model.buffers()]:
            comm.broadcast(value.data)
        if recompute and not recompute_blocks(model):
            raise Refusal("this model has no blocks that could be recomputed: leave out --recompute")
        self.reducer = Reducer(model.parameters(), comm).attach()

    def _agree_on_model(self, **facts: Any) -> None:
        """Ranks that were started with different models or settings find out before they wait for each other."""
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        values = self.model.state_dict().items()
        description = [(name, tuple(v.shape), str(v.dtype), name in trained) for name, v in values]
        digest = hashlib.sha256(repr(description).encode()).hexdigest()[:16]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        optimizer = f"{type(self.optimizer).__name__} {settings}"
        self.comm.agree(None, plan=self.plan, model=digest, optimizer=optimizer, **facts)

    def spread(self, tile: Tensor, size: tuple[int, int] | None = None) -> spatial.SpatialTensor:
        """This rank's tile (n, C, h, w) of images of `size` (H, W), on the engine's device, as the whole batch."""
        size = (tile.shape[-2], tile.shape[-1]) if size is None else size
        return spatial.from_tile(tile.to(self.device, non_blocking=True), self.grid, size)

    def step(self, tile: Tensor, targets: Any, size: tuple[int, int] | None = None) -> StepResult:
        """One optimizer step on a batch of images of `size` (H, W) of which this rank passes its tile.

        `targets` are those of the whole batch. Raises `Refusal` on all ranks, with the weights as they were, if the
        loss or the gradient is not finite.
        """
        self.model.train()
        self.reducer.prepare()
        loss = self._loss(self._outputs(self.spread(tile, size)), targets)
        self._scaler.scale(loss / self.grid.size).backward()
        self.reducer.finish()
        self._scaler.unscale_(self.optimizer)
        norm = self.reducer.norm()
        self._check_finite(float(loss.detach()), norm)
        if self.clip_norm is not None and norm + NORM_EPS > self.clip_norm:
            self.reducer.scale(self.clip_norm / (norm + NORM_EPS))
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.num_steps += 1
        return StepResult(float(loss.detach()), norm)

    def _check_finite(self, loss: float, norm: float) -> None:
        """All ranks stop together, before the optimizer steps. (The loss scaler skips infinite gradients of fp16.)"""
        wrong = [not math.isfinite(loss), not math.isfinite(norm) and not self._scaler.is_enabled()]
        loss_is, norm_is = self.comm.all_reduce(torch.tensor(wrong, dtype=torch.int32), "max").tolist()
        if loss_is or norm_is:
            raise Refusal(
                f"step {self.num_steps}: the {'loss' if loss_is else 'gradient'} is not finite (loss {loss}, "
                f"gradient norm {norm}); the weights are as before it: try a smaller --lr or --precision fp32"
            )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Any]], size: tuple[int, int] | None = None) -> Evaluation:
        """Loss and accuracy over batches of (tile, targets of the whole batch), without training."""
        self.model.eval()
        total, correct, count, classes = 0.0, 0, 0, False
        for tile, targets in batches:
            outputs = self._outputs(self.spread(tile, size))
            number = len(targets)
            total += float(self._loss(outputs, targets)) * number
            count += number
            classes = isinstance(outputs, Tensor) and outputs.dim() == 2 and targets.dim() == 1
            if classes:
                correct += int((outputs.argmax(1) == targets.to(outputs.device)).sum())
        return Evaluation(total / max(count, 1), correct / count if classes else None, count)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, self._dtype)

    def _outputs(self, images: spatial.SpatialTensor) -> Any:
        """What the model says of the whole batch: dense outputs stay spread over the ranks, others are gathered."""
        with self._autocast():
            outputs = self.model(images)
        if isinstance(outputs, spatial.SpatialTensor) and all(
            outputs.layout.dims[axis] is None for axis in (ROWS, COLS)
        ):
            return spatial.gather(outputs)
        return outputs

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        with self._autocast():
            return self.loss(outputs, targets.to(self.device) if isinstance(targets, Tensor) else targets)
