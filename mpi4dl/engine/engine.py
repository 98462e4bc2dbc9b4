"""The engine: a model and a plan become `step()` and `evaluate()`, exact for any plan.

step:   the plan's table, action by action: tiles -> stages -> outputs -> loss, alike on every rank of the last stage,
        counted 1 / size on each -> backward, while the reducers sum full buckets of gradients over the replicas
        -> all ranks agree that it is finite -> clip -> optimizer
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mpi4dl._patterns import select
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.allreduce import pick
from mpi4dl.engine.batch import (
    AUTOCAST,
    MAX_SKIPPED,
    BatchFeed,
    LossScaler,
    Size,
    Tile,
    Tiles,
    lower_precision,
    require_batches_for,
    spread,
)
from mpi4dl.engine.evaluating import BatchOutputs, Evaluation, Undo, evaluate, measured_as_is, predict
from mpi4dl.engine.recompute import recompute as recompute_all
from mpi4dl.geometry import Split
from mpi4dl.parallel.inputs import Microbatch, Read
from mpi4dl.parallel.pipeline.executor import UNLIKE_DRAWS, Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages, Part
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import GradientHook, ReadShard, ReplicaGroup, ReplicaGroups, Shard, Stepping, trainable
from mpi4dl.parallel.replicas.buckets import assemble, bucket_bytes_on
from mpi4dl.parallel.replicas.groups import PartsOf, disagreement
from mpi4dl.parallel.replicas.optimizer_traits import (
    StepUnit,
    backward_hook_in,
    problem_with,
    problem_with_unit,
    step_unit,
)
from mpi4dl.parallel.replicas.update import as_one, home_for, options_of, stays
from mpi4dl.parallel.spatial.wide import fetch_halos
from mpi4dl.parallel.streaming.leading_part import StreamedImages
from mpi4dl.parallel.tables.table import Table
from mpi4dl.tasks.formulas import main_output

# Whether all ranks were given the same model, optimizer and settings, before any waits for another.


class Started(Protocol):
    """The arguments of an engine."""

    comm: Communicator
    plan: Plan
    stages: LocalStages
    optimizer: torch.optim.Optimizer


class Known(NamedTuple):
    """This rank's findings about the model and the optimizer: errors, and values that must agree over ranks."""

    problem: str | None
    facts: dict[str, Any]
    learnt: list[frozenset[str]]  # the names of what may be trained, for each group of ranks that hold the same


def known_of_model(given: Started, unit: StepUnit, turns: bool) -> Known:
    """The values that `agree_on_model` compares. No other rank is asked."""
    stages, optimizer, name = given.stages, given.optimizer, type(given.optimizer).__name__
    description = [(name, shape, str(dtype), name in stages.trained) for name, (shape, dtype) in stages.shapes.items()]
    digest = hashlib.sha256(repr(description).encode()).hexdigest()[:16]
    settings = [options_of(group) for group in optimizer.param_groups]
    named = {name.split(".", 2)[-1]: p for name, p in stages.named_parameters()}  # without stages.0.
    holders = max(each.comm.size for each in stages.together)
    problem = problem_with(optimizer, named, holders, given.plan.num_microbatches, given.plan.cuts_parameters)
    if problem is None:
        which = "tensor" if given.plan.tensor > 1 else "experts"
        parts = f"{which}({getattr(given.plan, which)})" if given.plan.cuts_parameters else None
        problem = problem_with_unit(optimizer, unit, turns, parts)
    facts = {"plan": given.plan, "model": digest, "balance": stages.counts, "optimizer": f"{name} {settings}"}
    learnt = [frozenset(name for name, _ in trainable(each.parameters, optimizer)) for each in stages.together]
    return Known(problem, facts, learnt)


def agree_on_model(given: Started, known: Known, **facts: Any) -> None:
    """Raise Refusal on all ranks if they were started with different models or settings, or with what cannot be."""
    given.comm.agree(known.problem, **known.facts, **facts)
    # All ranks come here, and have the same groups.
    unlike = None
    for together, mine in zip(given.stages.together, known.learnt, strict=True):
        for other in together.comm.all_gather_object(mine):
            if mine != other:
                unlike = f"the optimizer has {min(mine ^ other)} on some ranks alone: pass it the same on all"
    given.comm.agree(unlike)


# The values of an engine on ranks: shard by shard as they own them, or whole on rank 0.


class Values:
    """Parameters, buffers, gradients and the optimizer's state of what `stages` is, which `groups` share out."""

    stages: LocalStages
    groups: ReplicaGroups
    comm: Communicator
    plan: Plan

    def shards(self) -> Iterator[Shard]:
        """The parameters that this rank owns, with the optimizer's state; those of all ranks are each once."""
        return self.groups.shards()

    def load_shards(self, read: ReadShard) -> None:
        """Take the parameters and the optimizer's state from `read(name, start, stop)`. Collective.

        It is asked for every part that this rank works on, and gives its values, flat, and the state as in a Shard.
        """
        self.groups.load(read)

    def gather_state(self) -> dict[str, Tensor] | None:
        """The state of the whole model on rank 0, on the host, under its own names and in its own order. Collective."""
        stages = self.stages
        parts = list(self.shards())
        parts += [Shard(name, 0, value) for name, value in self.buffers().items()]
        found = assemble(self.comm, parts, stages.shapes)
        if found is None:
            return None
        of_root = {stages.ties.get(name, name): value for name, value in found.items()}
        return {name: of_root[stages.ties.get(name, name)] for name in stages.shapes}

    def gather_gradients(self) -> dict[str, Tensor | None] | None:
        """The gradient of each trained parameter in the last step, on rank 0; None where it had none. Collective."""
        found = assemble(self.comm, self.groups.gradients(), self.stages.shapes)
        return (
            None
            if found is None
            else {name: found.get(name) for name in self.stages.shapes if name in self.stages.trained}
        )

    def check_replicas(self) -> None:
        """Raise `Refusal` on all ranks unless those that hold the same weights and buffers have the same bits of them.

        Under ZeRO 3 there is one copy of a parameter, and only buffers are compared. Collective.
        """
        problems = list(self.groups.problems())
        for stage, module in self.stages.modules_of.items():
            problems.append(disagreement(self.stages.groups[stage], dict(module.named_buffers())))
        problem = next((problem for problem in problems if problem), None)
        self.comm.agree(None if problem is None else f"replicas have come apart: {problem}")

    def buffers(self) -> dict[str, Tensor]:
        """Those of stages whose first holder is this rank."""
        stages, learnt = self.stages, {name for same in self.stages.names_of.values() for name in same}
        return {
            name: value
            for stage, module in stages.modules_of.items()
            if self.plan.ranks(0, stage)[0] == self.comm.rank
            for name, value in module.state_dict().items()
            if name not in learnt and name not in stages.ties
        }


NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
UNLIKE = (
    "the ranks have different numbers of step hooks of the optimizer: register them on all ranks",
    UNLIKE_DRAWS,
    "the ranks have hooks on the gradients of different parameters: register them on all ranks that hold a parameter",
)
Loss = Callable[[Any, Any], Tensor]
Tell = Callable[[], Sequence[float]]


@dataclass(frozen=True)
class StepResult:
    """The loss (the mean over the whole batch) before the step, and the global norm of its gradient.

    `skipped`: under fp16 the gradient overflowed, so that the step was not made. `told` are the sums over all ranks of
    what they had to tell.
    """

    loss: float
    gradient_norm: float
    skipped: bool = False
    told: tuple[float, ...] = ()


class NotFinite(Refusal):
    """The loss or the gradient of a step is infinite or not a number. All ranks raise it together."""


class Engine(Values):
    """Trains `model` by `plan` as one device would on the whole images and the whole batch.

    `model` is an unmodified nn.Module, the same on every rank, whose values on rank 0 count; or, for a plan of several
    stages, what `pipeline.local_stages.split` returns. `optimizer` is any torch.optim optimizer of its parameters,
    or several of them with parameters of their own.
    `loss(outputs, targets)` is the mean over the samples that it is given: a whole microbatch; one with `sums` and
    `weights` (`tasks.formulas.SummedLoss`) adds up to that of the whole batch instead. `precision` is "fp32"
    (the model's own dtype), "bf16" or "fp16" (autocast, with loss scaling for fp16). `recompute` keeps only the inputs
    of the model's blocks, or of a stage. Halos are fetched by each "layer", or at the entry of each "block", as `halo`
    says. `clip_norm` limits the gradient's norm, `clip_value` each of its elements.
    With `ema`, such as 0.999, there is an average of the weights, as `averaged` says. Modes are the user's: call
    `model.train()`, and `eval()` for what is frozen. Frozen parameters that the optimizer knows may be trained later:
    see `unfreeze`.

    `gradient_hook(name, gradient)` sees the whole gradient of each parameter, once a step, before it is clipped, on
    every rank that holds the parameter; it changes it in place, or returns another one. All ranks must do the same.

    Parameters in bfloat16 or float16 have float32 masters, on which the optimizer works; `low_precision_weights` makes
    them so, in the type that `precision` names. `offload` is where masters and the optimizer's state are: "none" (on
    the device), "cpu", or "disk" (in `offload_folder`). `all_reduce` is how ranks sum gradients without ZeRO: a
    choice of mpi4dl.comm.allreduce.pick.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss,
        *,
        comm: Communicator,
        precision: str = "fp32",
        recompute: bool = False,
        halo: str = "layer",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        ema: float | None = None,
        gradient_hook: GradientHook | None = None,
        low_precision_weights: bool = False,
        all_reduce: str = "auto",
        offload: str = "none",
        offload_folder: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.model, self.plan, self.loss, self.comm = model, plan, loss, comm
        self._dtype = AUTOCAST.get(precision)
        with comm.together((ValueError,)):
            self._require_options(precision, clip_norm, clip_value, ema, low_precision_weights)
        comm.agree(None, plan=plan)  # by which ranks form groups
        self.stages = model if isinstance(model, LocalStages) else LocalStages.whole(model, plan, comm)
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.is_averaged = False
        self.gradient_hook = gradient_hook
        self.device = self.stages.device
        self.num_steps = 0
        self.scaler = LossScaler(enabled=precision == "fp16")
        with comm.together((ValueError,)):  # what may go wrong on one rank alone, before any waits for another
            self.optimizer = optimizer = as_one(optimizer)
            bucket_bytes = bucket_bytes_on(self.device.type) if bucket_bytes is None else bucket_bytes
            home = home_for(offload, offload_folder)
            if low_precision_weights and self._dtype is not None:
                for module in self.stages.modules_of.values():
                    lower_precision(module, self._dtype)
            learnt = trainable(self.stages.named_parameters(), optimizer)
            turns = plan.zero > 0 or not all(stays(p, home) for _, p in learnt)
            on_parts = turns or plan.num_stages > 1 or plan.cuts_parameters
            unit: StepUnit = step_unit(optimizer) if on_parts else "element"
            known = known_of_model(self, unit, turns)
        agree_on_model(
            self,
            known,
            precision=precision,
            recompute=recompute,
            halo=halo,
            clip_norm=clip_norm,
            clip_value=clip_value,
            ema=ema,
            gradient_hook=gradient_hook is not None,
            low=low_precision_weights,
            offload=offload,
            all_reduce=all_reduce,
            bucket_bytes=bucket_bytes,
        )
        for together in self.stages.together:
            for _, p in together.parameters:
                together.comm.broadcast(p.data)
        for stage, module in self.stages.modules_of.items():
            for buffer in module.buffers():
                self.stages.groups[stage].broadcast(buffer.data)
        fetch_halos(self.stages.modules_of.values(), halo)
        if recompute:
            recompute_all(self.stages.modules_of.values(), plan.num_stages > 1)
        # Ranks of one stage may hold others too, and see other parameters in the optimizer.
        whole = bool(comm.all_reduce(torch.tensor([unit != "element"]).int(), "max"))
        groups: list[tuple[tuple[int, ...], ReplicaGroup]] = []
        self._across: list[PartsOf | None] = []
        for stages, alike, parameters, zero, copies, across in self.stages.together:
            looks = gradient_hook is not None and len(across) > 1 and parameters
            self._across.append(PartsOf(comm.subset(across), self.stages.shapes) if looks else None)
            summing = None if zero else pick(alike, all_reduce, device=self.device)
            apart = plan.num_directions == 2 or len(stages) > 1
            how = (home, zero, copies, summing, bucket_bytes, apart, whole, ema)
            groups.append((stages, ReplicaGroup(parameters, alike, optimizer, *how)))
        self.groups = ReplicaGroups(groups, self.stages.runs)
        partial = plan.zero > 0 or plan.num_stages > 1 or plan.cuts_parameters
        self._stepping = Stepping(optimizer, tuple(self.groups), comm, partial)
        seed = comm.broadcast_object(torch.initial_seed())
        self.executor = Executor(self.stages, comm, self.autocast, seed, self.groups)
        self.executor.draw_alike()
        self._table = plan.table()
        self.evaluation_table: Callable[[int], Table] = cache(plan.evaluation_table)

    def _require_options(
        self, precision: str, clip_norm: float | None, clip_value: float | None, ema: float | None, lowered: bool
    ) -> None:
        if precision not in AUTOCAST:
            raise ValueError(f"precision is {precision!r}, but must be one of {', '.join(AUTOCAST)}")
        require_batches_for(self.loss, self.plan)
        if clip_norm is not None and clip_value is not None:
            raise ValueError(
                f"`clip_norm` is {clip_norm} and `clip_value` {clip_value}, but one of them clips: choose one"
            )
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"`ema` is {ema}, but must be at least 0 and less than 1, such as 0.999")
        if lowered and self._dtype is None:
            raise ValueError("low_precision_weights needs precision bf16 or fp16, in which the weights are kept")

    def reads(self, num_samples: int, size: Size, training: bool = True) -> tuple[Read, ...]:
        """Which boxes of a batch of images of `size` (H, W) this rank passes to `step`, or to `evaluate`."""
        return self.plan.reads(self.comm.rank, self.plan.divide(num_samples, training), size)

    def images(self, part: Part, tile: Tile, microbatch: Microbatch, size: Size) -> Tensor | StreamedImages:
        """A tile, such as (n, C, h, w), of images of `size` on the engine's device, as part of the whole microbatch.

        Streamed images stay where they are.
        """
        if self.stages.stream is not None and part.stage == 0:
            samples = Split.at([cut - microbatch.cuts[0] for cut in microbatch.cuts])
            return StreamedImages(tile, part.grid, samples, size, self.executor.progress)
        assert isinstance(tile, Tensor)
        return spread(part, tile, microbatch, size, self.device)

    def step(
        self,
        tiles: Tiles,
        targets: Any,
        size: Size | None = None,
        microbatches: Sequence[Microbatch] | None = None,
        tell: Tell | None = None,
    ) -> StepResult:
        """One optimizer step on a batch of images of `size` (H, W) of which this rank passes its tiles.

        `tiles` are those that `reads` names, in that order, (n, C, h, w) each; one may come without a sequence around
        it. `targets` are those of the whole batch. `microbatches` says how the batch is divided if samples were taken
        out of it since. `tell()`, called when the gradients are there, gives numbers, as many on each rank, whose sums
        over all ranks travel with the loss. Raises `NotFinite` on all ranks, and changes nothing, if the loss or the
        gradient is not finite. Under fp16 a gradient that overflows skips the step, and 20 in a row are refused.
        """
        if self.is_averaged:
            raise ValueError("a step was asked for while the weights are their average: leave `averaged()` before it")
        undo = Undo(self.stages, self.executor)
        try:
            return self._step(BatchFeed(self, tiles, targets, size, microbatches, training=True), tell)
        except Refusal:
            undo.undo()
            raise

    def _step(self, batch: BatchFeed, tell: Tell | None) -> StepResult:
        self._refuse_hooks()
        for part in self.stages.parts.values():
            part.grid.foresight.begin()
        self.groups.prepare(len(batch.microbatches), self.plan.cuts_parameters)
        self.executor.drawn = 0
        with self.executor.watching_draws():
            self.executor.run(self._table, batch)
            unlike = self.groups.finish()
            for part in self.stages.parts.values():
                part.grid.foresight.settle()
        drawn = self.executor.drawn
        self.groups.call_hooks(self.executor.drawing_alike)
        loss, norm, told = self._sum_up(batch, drawn, () if tell is None else tell(), unlike)
        self.executor.drew_alike()
        if self.gradient_hook is not None and math.isfinite(norm):
            alike = self.executor.drawing_alike
            self.groups.change_gradients(self.gradient_hook, self.scaler.scale, alike, self._across)
            loss, norm, _ = self._sum_up(batch)
        finite = math.isfinite(norm)
        if not math.isfinite(loss) or not (finite or self.scaler.enabled):
            which = "gradient" if math.isfinite(loss) else "loss"
            raise NotFinite(
                f"step {self.num_steps}: the {which} is not finite (loss {loss}, gradient norm {norm}); the weights "
                "are as before it: try a smaller `lr` or `precision` fp32"
            )
        if not finite and self.scaler.skipped_in_a_row + 1 == MAX_SKIPPED:
            raise NotFinite(
                f"step {self.num_steps}: the gradient of {MAX_SKIPPED} steps in a row was not finite in fp16, down to "
                f"a loss scale of {self.scaler.scale:g}; the weights are as before them: try `precision` bf16 or fp32"
            )
        if finite and self.clip_value is not None:
            self.groups.clamp(self.clip_value * self.scaler.scale)
        clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + NORM_EPS))
        if finite:  # else fp16 overflowed
            self._stepping.step(clip / self.scaler.scale)
        self.scaler.update(finite)
        self.num_steps += 1
        return StepResult(loss, norm, not finite, told)

    def unfreeze(self, patterns: str | Sequence[str]) -> list[str]:
        """Train parameters from now on that were frozen so far, by patterns of their names: "layer4.*,bn*". Collective.

        Returns the names of all that match. It is as if `requires_grad_()` was called in plain PyTorch: the optimizer
        must have had them from the start, and leaves them alone until they have a gradient. Refused on all ranks alike.
        """
        with self.comm.together((ValueError,)):
            names = select(patterns, self.stages.names_of)
        chosen = {name for first in names for name in self.stages.names_of[first]}
        self.comm.agree(self.groups.cannot_unfreeze(chosen), unfrozen=names)
        self.groups.unfreeze(chosen)
        self.stages.trained |= set(names)
        self.executor.forget_values()
        return names

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the weights are their exponential moving average, for an evaluation, or to be saved.

        The average is that of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(ema): it begins with the
        weights after the first step; buffers stay those of the model. Checkpoints keep it. Collective.
        """
        if self.is_averaged:
            raise ValueError("the weights are their average already: leave `averaged()` before it is entered again")
        self._swap(True)
        try:
            with self.comm.together(()):  # else ranks that failed would wait for others who do not come
                yield
        except Exception:  # of all ranks; one that ends by anything else must not wait for others on its way out
            self._swap(False)
            raise
        self._swap(False)

    def _swap(self, averaged: bool) -> None:
        self.groups.swap()
        self.is_averaged = averaged

    def _refuse_hooks(self) -> None:
        """Hooks may come at any time, so they are looked for in every step."""
        found = (backward_hook_in(part.module, part.grid.size) for part in self.stages.parts.values())
        problem = next((each for each in (*found, self._stepping.problem()) if each is not None), None)
        if problem is not None:
            raise Refusal(problem)

    def _sum_up(
        self, batch: BatchFeed, drawn: int = 0, told: Sequence[float] = (), unlike: bool = False
    ) -> tuple[float, float, tuple[float, ...]]:
        """The loss and the norm of the gradient, over all stages, and sums of `told`: the same bits on every rank."""
        stages = self.plan.num_stages
        alike = (self._stepping.num_hooks, drawn, (1 + self.comm.rank) * unlike)  # no two ranks alike, if they are not
        squares = (n**2 for n in alike)
        own = self.groups.squares(stages, batch.total)
        found = torch.tensor([*own, *alike, *squares, *told], dtype=torch.float64)
        self.comm.all_reduce(found)
        norm = math.sqrt(float(found[:stages].sum())) / self.scaler.scale
        loss, *rest = found[stages:].tolist()
        for total, square, problem in zip(rest, rest[len(alike) :], UNLIKE, strict=False):
            if total**2 != self.comm.size * square:  # their variance is 0 if all ranks have the same
                raise Refusal(problem)
        return loss, norm, tuple(rest[2 * len(alike) :])

    def evaluate(
        self,
        batches: Iterable[tuple[Any, ...]],
        size: Size | None = None,
        metrics: Mapping[str, Any] | None = None,
        measured: Callable[[Any, Any], Any] = measured_as_is,
    ) -> Evaluation:
        """Loss, accuracy and metrics over batches, without training; all modules are in evaluation mode meanwhile.

        A batch is (tiles, targets of the whole batch), as for `step`, or (tiles, targets, microbatches). Metrics, by
        name, are objects of torchmetrics, or of your own with `update(predictions, targets)` and `compute()`, classes
        of such, or functions of all predictions and targets. `measured(outputs, targets)` are the predictions, such as
        `Task.measured`; by itself the main output. Of dense outputs each rank adds its tile.
        """
        return evaluate(self, batches, size, metrics or {}, measured)

    def predict(
        self, batches: Iterable[Any], size: Size | None = None, of: Callable[[Any], Tensor] = main_output
    ) -> Iterator[BatchOutputs]:
        """The outputs for batches of images, one by one, without training; all ranks take all of them. Collective.

        A batch is (tiles, number of its samples), or (tiles, number, microbatches), or, on one rank, just the images.
        `of(outputs)` is what is wanted of them, such as `Task.predictions`; by itself the main output.
        """
        return predict(self, batches, size, of)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model and the loss compute in the engine's precision."""
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, self._dtype)
