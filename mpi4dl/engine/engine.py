"""The engine: a model and a plan become `step()` and `evaluate()`, exact for any plan.

step:   the plan's table, action by action: tiles -> stages -> outputs -> loss, alike on every rank of the last stage,
        counted 1 / size on each -> backward, while the reducers sum full buckets of gradients over the replicas
        -> all ranks agree that it is finite -> clip -> optimizer
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.allreduce import pick
from mpi4dl.engine.batch import BatchFeed, Size, Tile, Tiles, spread
from mpi4dl.engine.precision import AUTOCAST, MAX_SKIPPED, LossScaler, lower_precision
from mpi4dl.engine.recompute import recompute as recompute_all
from mpi4dl.engine.restoring import Undo, evaluating
from mpi4dl.geometry import Split
from mpi4dl.parallel.microbatches import Microbatch, Read
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.held import Held, Part
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import GradientHook, ReadShard, ReplicaGroup, ReplicaGroups, Shard, Stepping
from mpi4dl.parallel.replicas.agreement import disagreement
from mpi4dl.parallel.replicas.buckets import bucket_bytes_on
from mpi4dl.parallel.replicas.offload import home_for
from mpi4dl.parallel.replicas.problems import backward_hook_in, problem_with
from mpi4dl.parallel.replicas.trial import Manner, manner_of
from mpi4dl.parallel.replicas.update import options_of, stays
from mpi4dl.parallel.replicas.whole import Fragment, assemble
from mpi4dl.parallel.spatial.wide import fetch_halos
from mpi4dl.parallel.streaming.opening import StreamedImages

NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
UNLIKE = (
    "the ranks have different numbers of step hooks of the optimizer: register them on all ranks",
    "the model drew other random numbers on some ranks than on others that have tiles of the same images: call "
    "torch.manual_seed with the same seed on all ranks, and draw on all ranks or on none between steps",
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


@dataclass(frozen=True)
class Evaluation:
    """Means over `count` samples; `accuracy` is None where the targets are not one class per sample."""

    loss: float
    accuracy: float | None
    count: int


class Engine:
    """Trains `model` by `plan` as one device would on the whole images and the whole batch.

    `model` is an unmodified nn.Module, the same on every rank, whose values on rank 0 count; or, for a plan of several
    stages, what `pipeline.held.split` returns. `optimizer` is any torch.optim optimizer of its parameters.
    `loss(outputs, targets)` is the mean over the samples that it is given: a whole microbatch. `precision` is "fp32"
    (the model's own dtype), "bf16" or "fp16" (autocast, with loss scaling for fp16). `recompute` keeps only the inputs
    of the model's blocks, or of a stage. Halos are fetched by each "layer", at the entry of each "block", or in the
    faster way ("auto"), as `halo` says. `clip_norm` limits the gradient's norm. Modes are the user's: call
    `model.train()`, and `eval()` for what is frozen.

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
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        comm: Communicator,
        precision: str = "fp32",
        recompute: bool = False,
        halo: str = "layer",
        clip_norm: float | None = None,
        gradient_hook: GradientHook | None = None,
        low_precision_weights: bool = False,
        all_reduce: str = "auto",
        offload: str = "none",
        offload_folder: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        if precision not in AUTOCAST:
            raise ValueError(f"precision is {precision!r}, but must be one of {', '.join(AUTOCAST)}")
        self.model = model
        self.held = model if isinstance(model, Held) else Held.whole(model, plan, comm)
        self.plan = plan
        self.optimizer = optimizer
        self.loss = loss
        self.comm = comm
        self.clip_norm = clip_norm
        self.gradient_hook = gradient_hook
        self.device = self.held.device
        self.num_steps = 0
        self._dtype = AUTOCAST[precision]
        self.scaler = LossScaler(enabled=precision == "fp16")
        bucket_bytes = bucket_bytes_on(self.device.type) if bucket_bytes is None else bucket_bytes
        home = home_for(offload, offload_folder)
        if low_precision_weights:
            if self._dtype is None:
                raise ValueError("low_precision_weights needs precision bf16 or fp16, in which the weights are kept")
            for module in self.held.modules_of.values():
                lower_precision(module, self._dtype)
        trained = [p for p in self.held.parameters() if p.requires_grad]
        turns = plan.zero > 0 or not all(stays(p, home) for p in trained)
        manner = manner_of(optimizer) if turns or plan.num_stages > 1 or plan.cuts_parameters else None
        self._agree_on_model(
            manner,
            turns,
            precision=precision,
            recompute=recompute,
            halo=halo,
            clip_norm=clip_norm,
            gradient_hook=gradient_hook is not None,
            low=low_precision_weights,
            offload=offload,
            all_reduce=all_reduce,
            bucket_bytes=bucket_bytes,
        )
        for together in self.held.together:
            for _, p in together.parameters:
                together.comm.broadcast(p.data)
        for stage, module in self.held.modules_of.items():
            for buffer in module.buffers():
                self.held.groups[stage].broadcast(buffer.data)
        fetch_halos(self.held.modules_of.values(), halo, comm, self.device)
        if recompute:
            recompute_all(self.held.modules_of.values(), plan.num_stages > 1)
        # Ranks of one stage may hold others too, and see other parameters in the optimizer.
        whole = bool(comm.all_reduce(torch.tensor([manner is not None and not manner.elementwise]).int(), "max"))
        groups: list[tuple[tuple[int, ...], ReplicaGroup]] = []
        for stages, alike, parameters, zero, copies in self.held.together:
            summing = None if zero else pick(alike, all_reduce, device=self.device)
            apart = plan.num_directions == 2 or len(stages) > 1
            group = ReplicaGroup(parameters, alike, optimizer, home, zero, copies, summing, bucket_bytes, apart, whole)
            groups.append((stages, group))
        self.groups = ReplicaGroups(groups, self.held.runs)
        partial = plan.zero > 0 or plan.num_stages > 1 or plan.cuts_parameters
        self._stepping = Stepping(optimizer, tuple(self.groups), comm, partial)
        seed = comm.broadcast_object(torch.initial_seed())
        self.executor = Executor(self.held, comm, self.autocast, seed, self.groups)
        self._table = plan.table()
        self._evaluation_table = cache(plan.evaluation_table)

    def _agree_on_model(self, manner: Manner | None, turns: bool, **facts: Any) -> None:
        """Ranks that were started with different models or settings find out before they wait for each other."""
        held = self.held
        description = [(name, shape, str(dtype), name in held.trained) for name, (shape, dtype) in held.shapes.items()]
        digest = hashlib.sha256(repr(description).encode()).hexdigest()[:16]
        settings = [options_of(group) for group in self.optimizer.param_groups]
        optimizer = f"{type(self.optimizer).__name__} {settings}"
        named = {name.split(".", 2)[-1]: p for name, p in held.named_parameters()}  # without stages.0.
        problem = problem_with(self.optimizer, named, max(each.comm.size for each in held.together))
        if problem is None and manner is not None:
            problem = manner.problem(type(self.optimizer).__name__, turns)
        if problem is None and self.plan.cuts_parameters:
            problem = self._problem_of_parts(manner)
        self.comm.agree(problem, plan=self.plan, model=digest, balance=held.counts, optimizer=optimizer, **facts)

    def _problem_of_parts(self, manner: Manner | None) -> str | None:
        """What cannot be done with parts of parameters."""
        which = "tensor" if self.plan.tensor > 1 else "experts"
        parts = f"under {which}({getattr(self.plan, which)}) ranks have parts of parameters"
        if self.gradient_hook is not None:
            return f"{parts}, but gradient_hook sees whole gradients"
        if manner is not None and not manner.elementwise:
            return f"{parts}, but {type(self.optimizer).__name__} works on whole ones: choose another optimizer"
        return None

    def reads(self, num_samples: int, size: Size, training: bool = True) -> tuple[Read, ...]:
        """Which boxes of a batch of images of `size` (H, W) this rank passes to `step`, or to `evaluate`."""
        return self.plan.reads(self.comm.rank, self.plan.divide(num_samples, training), size)

    def images(self, part: Part, tile: Tile, microbatch: Microbatch, size: Size) -> Tensor | StreamedImages:
        """A tile, such as (n, C, h, w), of images of `size` on the engine's device, as part of the whole microbatch.

        What is streamed stays where it is.
        """
        if self.held.stream is not None and part.stage == 0:
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
        over all ranks travel with the loss. Raises `NotFinite` on all ranks, with everything as it was, if the loss or
        the gradient is not finite; under fp16 a gradient that overflows makes no step, and 20 in a row are refused.
        """
        undo = Undo(self.held, self.executor)
        try:
            return self._step(BatchFeed(self, tiles, targets, size, microbatches, training=True), tell)
        except Refusal:
            undo.undo()
            raise

    def _step(self, batch: BatchFeed, tell: Tell | None) -> StepResult:
        self._refuse_hooks()
        for part in self.held.parts.values():
            part.grid.foresight.begin()
        self.groups.prepare()
        before = self.executor.print_of_randomness()
        self.executor.run(self._table, batch)
        self.groups.finish()
        for part in self.held.parts.values():
            part.grid.foresight.settle()
        drawn = self._drawn_since(before)
        loss, norm, told = self._sum_up(batch, drawn, () if tell is None else tell())
        if self.gradient_hook is not None and math.isfinite(norm):
            self.groups.change_gradients(self.gradient_hook, self.scaler.scale, self.executor.drawing_alike)
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
        clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + NORM_EPS))
        if finite:  # else fp16 overflowed
            self._stepping.step(clip / self.scaler.scale)
        self.scaler.update(finite)
        self.num_steps += 1
        return StepResult(loss, norm, not finite, told)

    def _refuse_hooks(self) -> None:
        """Hooks may come at any time, so they are looked for in every step."""
        found = [backward_hook_in(part.module, part.grid.size) for part in self.held.parts.values()]
        problem = next((each for each in [*found, self._stepping.problem()] if each is not None), None)
        if problem is not None:
            raise Refusal(problem)

    def _drawn_since(self, before: int) -> int:
        """A number that all ranks have alike if those that share images drew the same random numbers.

        Stages of several are seeded; ranks that share no image may draw as they like.
        """
        after = self.executor.print_of_randomness()
        shared = self.plan.num_stages == 1 and math.prod(self.plan.tiles[0]) * self.plan.tensor > 1
        return after + 1 if shared and after != before else 0

    def _sum_up(
        self, batch: BatchFeed, drawn: int = 0, told: Sequence[float] = ()
    ) -> tuple[float, float, tuple[float, ...]]:
        """The loss and the norm of the gradient, over all stages, and what is told: the same bits on every rank."""
        stages, alike = self.plan.num_stages, (self._stepping.num_hooks, drawn)
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

    def evaluate(self, batches: Iterable[tuple[Any, ...]], size: Size | None = None) -> Evaluation:
        """Loss and accuracy over batches, without training; all modules are in evaluation mode meanwhile.

        A batch is (tiles, targets of the whole batch), as for `step`, or (tiles, targets, microbatches).
        """
        with evaluating(self.held):
            return self._evaluate(batches, size)

    def _evaluate(self, batches: Iterable[tuple[Any, ...]], size: Size | None) -> Evaluation:
        count, sums = 0, torch.zeros(3, dtype=torch.float64)
        for tiles, targets, *rest in batches:
            batch = BatchFeed(self, tiles, targets, size, rest[0] if rest else None, training=False)
            self.executor.run(self._evaluation_table(1 + batch.microbatches[-1].number), batch)
            samples = batch.num_samples
            count += samples
            found = [float(batch.total) * samples, batch.correct, float(batch.classified)]
            sums += torch.tensor(found, dtype=torch.float64)
        loss, correct, classified = self.comm.all_reduce(sums).tolist()
        return Evaluation(loss / max(count, 1), correct / count if classified else None, count)

    def shards(self) -> Iterator[Shard]:
        """The trained parameters that this rank owns, with the optimizer's state; those of all ranks are each once."""
        return self.groups.shards()

    def load_shards(self, read: ReadShard) -> None:
        """Take the trained parameters and the optimizer's state from `read(name, start, stop)`. Collective.

        It is asked for every part that this rank works on, and gives its values, flat, and the state as in a Shard.
        """
        self.groups.load(read)

    def gather_state(self) -> dict[str, Tensor] | None:
        """The state of the whole model on rank 0, on the host, under its own names and in its own order. Collective."""
        held = self.held
        parts = [Fragment(shard.name, shard.start, shard.stop, shard.value) for shard in self.shards()]
        parts += [Fragment(name, 0, value.numel(), value) for name, value in self.untrained().items()]
        found = assemble(self.comm, parts, held.shapes)
        if found is None:
            return None
        of_root = {held.ties.get(name, name): value for name, value in found.items()}
        return {name: of_root[held.ties.get(name, name)] for name in held.shapes}

    def gather_gradients(self) -> dict[str, Tensor | None] | None:
        """The gradient of each trained parameter in the last step, on rank 0; None where it had none. Collective."""
        found = assemble(self.comm, self.groups.gradients(), self.held.shapes)
        return (
            None if found is None else {name: found.get(name) for name in self.held.shapes if name in self.held.trained}
        )

    def check_replicas(self) -> None:
        """Raise `Refusal` on all ranks unless those that hold the same weights and buffers have the same bits of them.

        Under ZeRO 3 there is one copy of a parameter, and only buffers are compared. Collective.
        """
        problems = list(self.groups.problems())
        for stage, module in self.held.modules_of.items():
            problems.append(disagreement(self.held.groups[stage], dict(module.named_buffers())))
        problem = next((problem for problem in problems if problem), None)
        self.comm.agree(None if problem is None else f"replicas have come apart: {problem}")

    def untrained(self) -> dict[str, Tensor]:
        """Buffers, and parameters that were frozen from the start, of stages whose first holder is this rank."""
        held = self.held
        trained = {held.ties.get(name, name) for name in held.trained}
        return {
            name: value
            for stage, module in held.modules_of.items()
            if self.plan.ranks(0, stage)[0] == self.comm.rank
            for name, value in module.state_dict().items()
            if name not in trained and name not in held.ties and held.shared.get(name, (stage,))[0] == stage
        }

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model and the loss compute in the engine's precision."""
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, self._dtype)
