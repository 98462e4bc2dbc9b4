"""One step of the optimizer on all that a rank holds: at once, or bucket by bucket."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.replicas.group import ReplicaGroup
from mpi4dl.parallel.replicas.step_hooks import StepHooks, is_replaced

WHERE = "with ZeRO, several stages, low_precision_weights or offload"
INSTEAD = "pass gradient_hook to the engine, which sees each of them whole"
GRADIENT = (Tensor.grad.__get__, Tensor.grad.__set__)  # type: ignore[union-attr]


class Stepping:
    """Steps of `optimizer` on the parameters of `groups`, which are this rank's of those of the ranks of `comm`.

    Its step hooks run once a step: before it, when all gradients are there, and after it, when all parameters are new
    on all ranks, also those that ZeRO 3 gathers. `partial`: this rank has some of the gradients, or parts of them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[ReplicaGroup], comm: Communicator, partial: bool
    ) -> None:
        self.optimizer, self.groups, self.comm, self.partial = optimizer, groups, comm, partial
        self.at_once = all(group.in_place for group in groups)

    @property
    def plain(self) -> bool:
        """Whether a step is just one of plain PyTorch."""
        return self.at_once and not self.partial

    @property
    def num_hooks(self) -> int:
        """How many step hooks run together on all ranks, which must have as many."""
        return 0 if self.plain else len(StepHooks(self.optimizer))

    def problem(self) -> str | None:
        """Why the optimizer cannot step as it is now; None if it can."""
        if not self.plain and is_replaced(self.optimizer):
            return (
                f"step() of the optimizer was replaced by another one, which {WHERE} would be called for parts: use "
                "register_step_pre_hook and register_step_post_hook"
            )
        return None

    def step(self, factor: float) -> None:
        """One step by the gradients times `factor`. Collective. Raises Refusal if a hook changes parts of gradients."""
        hooks = StepHooks(self.optimizer)
        at_once = self.at_once or hooks.look_first
        if at_once:
            for group in self.groups:
                group.hand_out(factor)
        if self.plain:
            self.optimizer.step()
            self._average()
            return
        if hooks.look_first:
            seen = self._gradients()
            with _Elsewhere(self.groups, self.optimizer):
                hooks.before()
            changed = self.partial and seen != self._gradients()
            self.comm.agree(
                f"a step pre-hook changes gradients, of which a rank has some or parts {WHERE}: {INSTEAD}"
                if changed
                else None
            )
        with hooks.silent():
            if self.at_once:
                self.optimizer.step()
            else:
                for group in self.groups:
                    group.step(None if at_once else factor)
        self._average()
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.there_when_needed())
            stack.enter_context(_Elsewhere(self.groups, self.optimizer))
            hooks.after()

    def _average(self) -> None:
        for group in self.groups:
            if group.average is not None:
                group.average.update()

    def _gradients(self) -> list[tuple[int, float, float]]:
        """Which gradients there are, and numbers by which changed ones can be told."""
        found = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [(id(g), float(g.double().sum()), float(g.norm())) for g in found]


class _Elsewhere(TorchFunctionMode):
    """Refuses to look for gradients at parameters of the model instead of which the optimizer has others."""

    def __init__(self, groups: Sequence[ReplicaGroup], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._without = {id(p) for group in groups for p in group.parameters} - stepped

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in GRADIENT and id(args[0]) in self._without:
            raise Refusal(
                "a step hook of the optimizer asks for the gradient of one of the model's parameters, of which a rank "
                f"has parts elsewhere {WHERE}: {INSTEAD}"
            )
        return function(*args, **(kwargs or {}))
