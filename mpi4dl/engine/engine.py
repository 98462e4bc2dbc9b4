"""The engine: a runner that also trains. `step()` is exact for any plan.

step:   the plan's table, action by action: tiles -> stages -> outputs -> loss, alike on every rank of the last stage,
        counted 1 / size on each -> backward, while the reducers sum full buckets of gradients over the replicas
        -> all ranks agree that it is finite -> clip -> optimizer
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from mpi4dl._patterns import select
from mpi4dl._randomness import RandomStates
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.allreduce import pick
from mpi4dl.engine.precision import AUTOCAST, MAX_SKIPPED, LossScaler, lower_precision
from mpi4dl.engine.runner import UNLIKE_TARGETS, BatchFeed, Given, Loss, Runner, Tiles, refuse_unlike
from mpi4dl.parallel.inputs import Microbatch, Sizes, made_by_jit
from mpi4dl.parallel.pipeline.decisions import Buffers, hidden_tensors
from mpi4dl.parallel.pipeline.executor import UNLIKE_DRAWS, Executor
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import GradientHook, ReadShard, ReplicaGroup, ReplicaGroups, Shard, Stepping, trainable
from mpi4dl.parallel.replicas.buckets import assemble, bucket_bytes_on, digest_of
from mpi4dl.parallel.replicas.groups import PartsOf, disagreement
from mpi4dl.parallel.replicas.optimizer_traits import (
    StepUnit,
    backward_hook_in,
    modules_of,
    problem_with,
    problem_with_memory,
    problem_with_unit,
    step_unit,
)
from mpi4dl.parallel.replicas.update import as_one, home_for, options_of, stays
from mpi4dl.parallel.spatial.sharding import spread_buffer
from mpi4dl.tasks.formulas import SummedLoss

NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
UNLIKE = (
    "the ranks have different numbers of step hooks of the optimizer: register them on all ranks",
    UNLIKE_DRAWS,
    UNLIKE_TARGETS,
    "the ranks have different learning rates or other settings of the optimizer: change them, and let schedulers step, "
    "on all ranks alike",
)
UNLIKE_WEIGHTS = (
    "ranks have different values of the same weights or buffers: change them, as by load_state_dict or a call of the "
    "model itself, on all ranks alike"
)
UNLIKE_LOSSES = (
    "the ranks computed other losses of the same outputs: give the loss the same settings on all ranks, such as "
    "weights of classes"
)
GPU_EVERY = 100  # steps in which ranks compare weights on GPUs
UNLIKE_SHARE = 1e-3  # of a loss, which kernels of GPUs do not change
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


class Undo:
    """The buffers of `model`, the states of the random number generators, and how often `executor` ran, as they are."""

    def __init__(self, model: nn.Module, executor: Executor) -> None:
        self._executor, self._num_runs = executor, executor.num_runs
        self._random, self._buffers = RandomStates.of_process(), Buffers(model)
        self._values = self._buffers.values()

    def undo(self) -> None:
        self._buffers.assign(self._values)
        self._random.put()
        self._executor.num_runs = self._num_runs


@dataclass(frozen=True)
class EngineOptions:
    """How an `Engine` trains. All ranks have the same, but for `offload_folder`.

    Attributes:
        precision: "fp32" (the model's own dtype), "bf16" or "fp16" (autocast, which scales the loss).
        recompute: whether to keep only the inputs of the model's blocks, or of a stage.
        clip_norm: the most that the norm of the whole gradient may be; None: anything.
        clip_value: the most that each of its elements may be.
        ema: the decay of an average of the weights, such as 0.999; see `Engine.averaged`.
        gradient_hook: `hook(name, gradient)` sees the whole gradient of each parameter, once a step, before it is
            clipped, on every rank that holds the parameter; it changes it in place, or returns another one. All ranks
            must do the same.
        low_precision_weights: whether parameters are kept in the type that `precision` names. Those in bfloat16 or
            float16 have float32 masters, on which the optimizer works.
        all_reduce: how ranks sum gradients without ZeRO, a choice of `mpi4dl.comm.allreduce.pick`.
        offload: where masters and the optimizer's state are: "none" (on the device), "cpu", or "disk".
        offload_folder: the folder of their files; None: the system's for temporary ones.
        bucket_bytes: the size of buckets of gradients; None: what suits the device.

    Raises:
        ValueError: two of them contradict each other.
    """

    precision: str = "fp32"
    recompute: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: float | None = None
    gradient_hook: GradientHook | None = None
    low_precision_weights: bool = False
    all_reduce: str = "auto"
    offload: str = "none"
    offload_folder: str | None = None
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        norm, value, ema = self.clip_norm, self.clip_value, self.ema
        if norm is not None and value is not None:
            raise ValueError(f"`clip_norm` is {norm} and `clip_value` {value}, but one of them clips: choose one")
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"`ema` is {ema}, but must be at least 0 and less than 1, such as 0.999")
        if self.low_precision_weights and self.precision == "fp32":
            raise ValueError("low_precision_weights needs precision bf16 or fp16, in which the weights are kept")


class Engine(Runner):
    """Trains `model` by `plan` as one device would on the whole images and the whole batch.

    `model`, `plan` and `loss` are those of a `Runner`. `optimizer` is any torch.optim optimizer of the model's
    parameters, or several of them with parameters of their own. `options` are those of `EngineOptions`. Modes are the
    user's: call `model.train()`, and `eval()` for what is frozen. Frozen parameters that the optimizer knows may be
    trained later: see `unfreeze`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss,
        *,
        comm: Communicator,
        **options: Any,
    ) -> None:
        with comm.together((ValueError,)):
            require_one_batch(loss, plan)
            chosen = EngineOptions(**options)
        self._place(model, plan, loss, comm, chosen.precision)
        bucket_bytes = bucket_bytes_on(self.device.type) if chosen.bucket_bytes is None else chosen.bucket_bytes
        self.options = chosen = replace(chosen, bucket_bytes=bucket_bytes)
        self.is_averaged = False
        self.num_steps = 0
        self.scaler = LossScaler(enabled=chosen.precision == "fp16")
        with comm.together((ValueError,)):  # what may go wrong on one rank alone, before any waits for another
            self.optimizer = optimizer = as_one(optimizer)
            home, lowered = home_for(chosen.offload, chosen.offload_folder), AUTOCAST[chosen.precision]
            for module in self.stages.modules_of.values() if chosen.low_precision_weights else ():
                assert lowered is not None
                lower_precision(module, lowered)
            parameters = trainable(self.stages.named_parameters(), optimizer)
            turns = plan.zero > 0 or not all(stays(p, home) for _, p in parameters)
            on_parts = turns or plan.num_stages > 1 or plan.cuts_parameters
            unit: StepUnit = step_unit(optimizer) if on_parts else "element"
            problem = self._problem(unit, turns)
            agreed = {**vars(chosen), "offload_folder": None, "gradient_hook": chosen.gradient_hook is not None}
            settings = f"{type(optimizer).__name__} {[options_of(group) for group in optimizer.param_groups]}"
            trained = [
                frozenset(name for name, _ in trainable(each.parameters, optimizer)) for each in self.stages.together
            ]
        comm.agree(problem, optimizer=settings, **agreed)
        self._require_alike(trained)
        self._share_values()
        if chosen.recompute:
            from mpi4dl.engine.recompute import recompute_stages

            recompute_stages(self.stages.modules_of.values(), plan.num_stages > 1)
        # Ranks of one stage may hold others too, and see other parameters in the optimizer.
        whole = bool(comm.all_reduce(torch.tensor([unit != "element"]).int(), "max"))
        groups: list[tuple[tuple[int, ...], ReplicaGroup]] = []
        for stages, alike, parameters, zero, copies, _ in self.stages.together:
            summing = None if zero else pick(alike, chosen.all_reduce, device=self.device)
            apart = plan.num_directions == 2 or len(stages) > 1
            how = (home, zero, copies, summing, bucket_bytes, apart, whole, chosen.ema)
            groups.append((stages, ReplicaGroup(parameters, alike, optimizer, *how)))
        self.groups = self.executor.parameters = ReplicaGroups(groups, self.stages.runs)
        partial = plan.zero > 0 or plan.num_stages > 1 or plan.cuts_parameters
        cut = [p for each in self.stages.together if len(each.across) > 1 for _, p in each.parameters]
        self._stepping = Stepping(optimizer, tuple(self.groups), comm, partial, cut if plan.cuts_parameters else None)
        self._across = [self._parts_of(each.parameters, each.across) for each in self.stages.together]
        self._table = plan.table()
        named = [each for module in modules_of(self.stages) for each in module._parameters.items()]
        self._known = {(name, id(p)): p for name, p in named}

    def _require_alike(self, trained: Sequence[frozenset[str]]) -> None:
        """Refuse an optimizer that does not train the same parameters of each group on all of its ranks. Collective."""
        unlike = None
        for group, mine in zip(self.stages.together, trained, strict=True):  # all ranks have the same groups
            for other in group.comm.all_gather_object(mine):
                if mine != other:
                    unlike = f"the optimizer has {min(mine ^ other)} on some ranks alone: pass it the same on all"
        self.comm.agree(unlike)

    def _parts_of(self, parameters: Sequence[Any], across: Sequence[int]) -> PartsOf | None:
        """The ranks that have the other parts of these, for a hook that sees whole gradients. Collective."""
        if self.options.gradient_hook is None or len(across) < 2 or not parameters:
            return None
        return PartsOf(self.comm.subset(across), self.stages.shapes)

    def _problem(self, unit: StepUnit, turns: bool) -> str | None:
        """Why this rank's part of the model cannot be trained by the optimizer; None if it can. Asks no other rank."""
        stages, plan = self.stages, self.plan
        named = {name.split(".", 2)[-1]: p for name, p in stages.named_parameters()}  # without stages.0.
        holders = max(each.comm.size for each in stages.together)
        problem = next((each for module in stages.modules_of.values() if (each := made_by_jit(module))), None)
        if problem is None:
            problem = problem_with(self.optimizer, named, holders, plan.num_microbatches, plan.cuts_parameters)
        if problem is None:
            which = "tensor" if plan.tensor > 1 else "experts"
            parts = f"{which}({getattr(plan, which)})" if plan.cuts_parameters else None
            problem = problem_with_unit(self.optimizer, unit, turns, parts)
        if problem is None and plan.zero > 0:
            others = [(f"the buffer {name.split('.', 2)[-1]}", buffer) for name, buffer in stages.named_buffers()]
            hidden = (x for module in stages.modules_of.values() for x in hidden_tensors(module))
            others += [(f"a tensor {tuple(x.shape)} that the model has in an attribute", x) for x in hidden]
            problem = problem_with_memory(dict(trainable(named.items(), self.optimizer)), others)
        return problem

    def step(
        self,
        tiles: Tiles,
        targets: Any,
        size: Sizes | None = None,
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
            with self.comm.going_on():
                return self._step(BatchFeed(self, Given(tiles, size, microbatches), targets, self.scaler.scale), tell)
        except Refusal:
            undo.undo()
            raise

    def _step(self, batch: BatchFeed, tell: Tell | None) -> StepResult:
        problem = self._prepare(len(batch.microbatches))
        self.executor.drawn = 0
        with self.executor.watching_draws():
            self._run(self._table, batch, problem)
            problem = self.groups.finish()
            for part in self.stages.parts.values():
                part.grid.halo_prefetch.commit()
        drawn = self.executor.drawn
        self.groups.call_hooks(self.executor.drawing_alike)
        loss, norm, told = self._sum_up(batch, drawn, () if tell is None else tell(), problem)
        self.executor.drew_alike()
        if self.options.gradient_hook is not None and math.isfinite(norm):
            alike = self.executor.drawing_alike
            self.groups.change_gradients(self.options.gradient_hook, self.scaler.scale, alike, self._across)
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
        if finite and self.options.clip_value is not None:
            for group in self.groups:
                group.reducer.clamp(self.options.clip_value * self.scaler.scale)
        clip = 1.0 if self.options.clip_norm is None else min(1.0, self.options.clip_norm / (norm + NORM_EPS))
        if finite:  # else fp16 overflowed
            self._stepping.step(clip / self.scaler.scale)
        self.scaler.update(finite)
        self.num_steps += 1
        return StepResult(loss, norm, not finite, told)

    def _prepare(self, num_microbatches: int) -> str | None:
        """Make ready for a step. Returns why this rank refuses it, which all ranks learn as they run it."""
        hooks = (backward_hook_in(part.module, part.grid.size) for part in self.stages.parts.values())
        buffer = spread_buffer(modules_of(self.stages))
        found = (self._unknown(), buffer, *hooks, self._stepping.problem())
        problem = next((each for each in found if each is not None), None)
        if problem is not None:  # hooks may come at any time
            return problem
        for part in self.stages.parts.values():
            part.grid.halo_prefetch.begin()
        try:
            for group in self.groups:
                group.prepare(num_microbatches, self.plan.cuts_parameters)
        except Refusal as refusal:
            return str(refusal)
        return None

    def unfreeze(self, patterns: str | Sequence[str]) -> list[str]:
        """Train parameters from now on that were frozen so far, by patterns of their names: "layer4.*,bn*". Collective.

        Returns the names of all that match. It is as if `requires_grad_()` was called in plain PyTorch: the optimizer
        must have had them from the start, and leaves them alone until they have a gradient. Refused on all ranks alike.
        """
        with self.comm.together((ValueError,)):
            names = select(patterns, self.stages.names_of)
        chosen = {name for first in names for name in self.stages.names_of[first]}
        self.comm.agree(self.groups.cannot_unfreeze(chosen), unfrozen=names)
        for group in self.groups:
            group.unfreeze(chosen)
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
        for group in self.groups:
            group.swap()
        self.is_averaged = averaged

    def _unknown(self) -> str | None:
        """Why a parameter of the model would not be trained as the others; None if there is none."""
        for module in modules_of(self.stages):
            for name, p in module._parameters.items():
                if p is not None and (name, id(p)) not in self._known:
                    return (
                        f"{name} of {type(module).__name__} is another parameter than when the engine was made, as "
                        "after load_state_dict(assign=True), pruning, or with a new layer: write to it in place, or "
                        "make a new engine"
                    )
        return None

    def _sum_up(
        self, batch: BatchFeed, drawn: int = 0, told: Sequence[float] = (), problem: str | None = None
    ) -> tuple[float, float, tuple[float, ...]]:
        """The loss and the norm of the gradient, over all stages, and sums of `told`: the same bits on every rank.

        All ranks refuse what is a `problem` of one of them.
        """
        stages = self.plan.num_stages
        settings = crc32(repr([options_of(group) for group in self.optimizer.param_groups]).encode()) & 0xFFF
        alike = (self._stepping.num_hooks, drawn, batch.digest, settings)
        squares = (n**2 for n in alike)
        *own, own_loss = self.groups.squares(stages, batch.total, batch.own)
        losses = (own_loss, own_loss**2, batch.has_loss)
        words = [*own, problem is not None, *alike, *squares, *losses, *self._samples(), *told]
        found = torch.tensor(words, dtype=torch.float64)
        self.comm.all_reduce(found)
        norm = math.sqrt(float(found[:stages].sum())) / self.scaler.scale
        loss, refused, *rest = found[stages:].tolist()
        if refused:
            self.comm.agree(problem)
        refuse_unlike(rest[: 2 * len(alike)], self.comm.size, UNLIKE)
        loss_sum, loss_squares, num_losses, *rest = rest[2 * len(alike) :]
        for stage in range(stages):
            digest, square, size = rest[stage : 3 * stages : stages]
            refuse_unlike((digest, square), size, (UNLIKE_WEIGHTS,))
        if num_losses * loss_squares - loss_sum**2 > UNLIKE_SHARE**2 * loss_sum**2:
            raise Refusal(UNLIKE_LOSSES)
        return loss, norm, tuple(rest[3 * stages :])

    def _samples(self) -> list[float]:
        """Of each stage a digest of a parameter and a buffer that all its ranks have, others in each step; its square;
        a 1. Zeros of stages of others.
        """
        found, stages = [0.0] * 3 * self.plan.num_stages, self.plan.num_stages
        for stage, module in self.stages.modules_of.items():
            known = self.groups.whole_in(stage, self.stages.groups[stage].size), [*module.buffers()]
            chosen = [each[self.num_steps % len(each)] for each in known if each]
            # A GPU is waited for now and then.
            asks = self.num_steps % GPU_EVERY == GPU_EVERY - 1
            digest = digest_of(x for x in chosen if x.device.type == "cpu" or asks)
            found[stage::stages] = digest, digest**2, 1
        return found

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
        stages, trained = self.stages, {name for same in self.stages.names_of.values() for name in same}
        return {
            name: value
            for stage, module in stages.modules_of.items()
            if self.plan.ranks(0, stage)[0] == self.comm.rank
            for name, value in module.state_dict(keep_vars=True).items()
            if name not in trained and name not in stages.ties
        }


def is_of_whole_batch(loss: Loss) -> bool:
    """Whether a loss compares all samples of a batch, which nothing may cut then."""
    return isinstance(loss, SummedLoss) and loss.whole_batch


def require_one_batch(loss: Loss, plan: Plan) -> None:
    """Refuse a loss that compares all samples of a batch where the plan cuts it."""
    if is_of_whole_batch(loss) and plan.num_microbatches_of_all > 1:
        raise Refusal(
            f"the loss compares all samples of a batch with each other, but {plan.describe()} cuts it into "
            f"{plan.num_microbatches_of_all}: leave out `microbatches`, `accumulate`, `bidirectional` and, with "
            "`fit` own, `data`, or choose another `loss`"
        )
