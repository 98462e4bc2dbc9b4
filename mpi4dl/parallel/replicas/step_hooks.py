"""Hooks of `optimizer.step()` run once a step, though ranks make it of many: bucket by bucket, each on its part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

HOOKS = "_optimizer_"  # attributes of an optimizer that begin so hold hooks
BEFORE, AFTER = f"{HOOKS}step_pre_hooks", f"{HOOKS}step_post_hooks"
OF_ALL_BEFORE = torch_optimizer._global_optimizer_pre_hooks
OF_ALL_AFTER = torch_optimizer._global_optimizer_post_hooks


def family(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer, and those that it holds as wrappers do, such as the one within a Lookahead; the outermost first."""
    members = [optimizer]
    for member in members:
        values = [*vars(member).values()]
        values += [one for value in values if isinstance(value, list | tuple) for one in value]
        inner = (value for value in values if isinstance(value, torch.optim.Optimizer))
        members += [one for one in inner if all(one is not known for known in members)]
    return members


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the object has a `step` of its own, beside the one by which PyTorch's schedulers notice steps."""
    own = vars(optimizer).get("step")
    noticed = hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is type(optimizer).step
    return own is not None and not noticed


class StepHooks:
    """What is registered to be called before and after the steps of an optimizer, and of those within it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._members = family(optimizer)

    def _of(self, which: str) -> list[tuple[torch.optim.Optimizer, Callable[..., Any]]]:
        common = OF_ALL_BEFORE if which == BEFORE else OF_ALL_AFTER
        found = []
        for member in self._members:
            own = vars(member).get(which, {})
            order = (common, own) if which == BEFORE else (own, common)
            found += [(member, hook) for hook in chain(*(hooks.values() for hooks in order))]
        return found

    def __len__(self) -> int:
        return len(self._of(BEFORE)) + len(self._of(AFTER))

    @property
    def look_first(self) -> bool:
        """Whether something is called before a step, which may look at gradients."""
        return bool(self._of(BEFORE))

    def before(self) -> None:
        for member, hook in self._of(BEFORE):
            hook(member, (), {})

    def after(self) -> None:
        for member, hook in self._of(AFTER):
            hook(member, (), {})

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within this context `step()` calls none of them."""
        own = [vars(member).get(which, {}) for member in self._members for which in (BEFORE, AFTER)]
        places: list[dict[int, Any]] = [OF_ALL_BEFORE, OF_ALL_AFTER, *own]
        kept = [dict(place) for place in places]
        for place in places:
            place.clear()
        try:
            yield
        finally:
            for place, hooks in zip(places, kept, strict=True):
                place.update(hooks)
