"""The optimizer that a configuration names, and the learning rate's schedule."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl._patterns import select
from mpi4dl._wording import counted
from mpi4dl.comm import NOT_TAKEN, Refusal
from mpi4dl.engine.tuning import names_and_trained, parameter_groups
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import nearest, saying
from mpi4dl.options.kinds import part_name
from mpi4dl.options.parts import call, is_own, load

PER_STEP = ("OneCycleLR", "CyclicLR")
SGD_RATE = 0.01
WARMUP_START = 0.01


def by_torch_name(kind: str, home: Any, base: type, name: str, *args: Any, **options: Any) -> Any:
    """An instance of the class `name` of a torch module. Raises ConfigError for unknown names and options."""
    known = [n for n, c in vars(home).items() if inspect.isclass(c) and issubclass(c, base) and c is not base]
    if name not in known:
        hint = nearest(name, known) or f"; it has {', '.join(sorted(known))}"
        by_step = ", or give `lr_schedule` linear or cosine instead" if kind == "scheduler" and "?" not in hint else ""
        raise ConfigError(f"`{kind}` {name}: {home.__name__} has no such class{hint}{by_step}")
    kind_of = getattr(home, name)
    legal = list(inspect.signature(kind_of).parameters)[len(args) :]
    for option in options:
        if option not in legal:
            hint = nearest(option, legal) or f"; its options are {', '.join(legal)}"
            raise ConfigError(f"`{kind}` {name} has no option {option}{hint}")
    # PyTorch raises any of these for values that it cannot use.
    with saying(f"`{kind}` {name} does not take these options {dict(options)}", *NOT_TAKEN):
        return kind_of(*args, **options)


def groups_of(config: Config, model: nn.Module) -> Iterable[Any]:
    """The parameters that are trained, now or later: in groups, if some have options of their own.

    `model` is a plain one, or what ranks hold of one. Raises ConfigError.
    """
    chosen, (known, trained) = config.tuning, names_and_trained(model)
    later: list[str] = []
    for epoch, pattern in chosen.unfreeze:
        with saying(f"`unfreeze` {epoch}:{pattern}"):
            names = select(pattern, known)
        if trained >= {*names}:
            raise ConfigError(f"`unfreeze` {epoch}:{pattern}: {names[0]} is not frozen; add it to `freeze`")
        later += names
    for option, numbers in (("lr_of", chosen.lr_of), ("weight_decay_of", chosen.weight_decay_of)):
        for pattern in numbers:
            with saying(f"`{option}` {pattern}"):
                select((pattern,), known)
    with saying(f"`freeze` {','.join(chosen.freeze)}"):
        groups = parameter_groups(model, chosen.lr_of, chosen.weight_decay_of, later)
    alike = len(groups) == 1 and groups[0].keys() == {"params"}
    return (alike and groups[0]["params"]) or groups


def usual_rate(optimizer: Any) -> float:
    """The learning rate of an optimizer, by name or the user's own, for which nobody gave one: its own default.

    0.01 for SGD, and where there is no default. Raises ConfigError for an own one that cannot be loaded.
    """
    made = load("optimizer", optimizer) if is_own(optimizer) else getattr(torch.optim, optimizer, None)
    if made is None or made is torch.optim.SGD:
        return SGD_RATE
    try:
        found = inspect.signature(made).parameters["lr"].default
    except (TypeError, ValueError, KeyError):  # written in C, or without a rate
        return SGD_RATE
    return float(found) if isinstance(found, int | float) else SGD_RATE


def build_optimizer(config: Config, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of these parameters, or of groups of them. Raises ConfigError."""
    chosen = config.optimizer
    options = {"lr": chosen.lr, **chosen.optimizer_options}
    base = torch.optim.Optimizer
    if is_own(chosen.optimizer):
        given = {"lr": chosen.lr} if "lr" not in chosen.optimizer_options else {}
        optimizer = call("optimizer", chosen.optimizer, parameters, known=given, **chosen.optimizer_options)
        if not isinstance(optimizer, base):
            made = type(optimizer).__name__
            raise ConfigError(f"`optimizer` {part_name(chosen.optimizer)} made a {made}, no torch.optim.Optimizer")
    else:
        optimizer = by_torch_name("optimizer", torch.optim, base, chosen.optimizer, parameters, **options)
    if config.tuning.weight_decay_of and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"`weight_decay_of`: {type(optimizer).__name__} has no weight decay; choose another `optimizer`"
        )
    with saying(f"`optimizer` {part_name(chosen.optimizer)} cannot make a step here", *NOT_TAKEN):
        _trial(optimizer, lambda p: _zeros(p, (1,) * p.dim()), [group["params"] for group in optimizer.param_groups])
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of an optimizer's state, found by a step on parameters of the same shapes.

    Of parameters that are alike two make the step for all of them, if each has a state of its own.
    """
    groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    kinds = [(number, p.shape, p.dtype) for number, group in enumerate(groups) for p in group]
    seen: Counter[Any] = Counter()
    few: list[list[Tensor]] = [[] for _ in groups]
    for kind, p in zip(kinds, (p for group in groups for p in group), strict=True):
        seen[kind] += 1
        if seen[kind] <= 2:
            few[kind[0]].append(p)
    sizes = _state_sizes(optimizer, few)
    if all(len(of_group) == len(group) for of_group, group in zip(sizes, few, strict=True)):
        of_kind = {
            (number, p.shape, p.dtype): size
            for number, (of_group, group) in enumerate(zip(sizes, few, strict=True))
            for p, size in zip(group, of_group, strict=True)
        }
        return sum(of_kind[kind] for kind in kinds)
    return sum(map(sum, _state_sizes(optimizer, groups)))


def _state_sizes(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The bytes of the state of each parameter that has one, for a step on parameters like these."""
    try:
        states = _trial(optimizer, lambda p: torch.empty_like(p, device="meta"), groups)
    except (RuntimeError, NotImplementedError):  # its step looks at values, or has no kernel without them
        states = _trial(optimizer, lambda p: _zeros(p, p.shape), groups)
    return [[sum(x.nbytes for x in state.values() if isinstance(x, Tensor)) for state in each] for each in states]


def _zeros(p: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros for a step of an optimizer that may look at values, which parameters on shapes have not."""
    return p.new_zeros(shape, device="cpu" if p.is_meta else p.device)


def _trial(
    optimizer: torch.optim.Optimizer, like: Callable[[Tensor], Tensor], groups: Sequence[Sequence[Tensor]]
) -> list[list[Mapping[str, Any]]]:
    """The states, by group, that an optimizer of this class and these options has after a step on such parameters."""

    def parameter(p: Tensor) -> Tensor:
        value = like(p.detach()).requires_grad_()
        value.grad = torch.zeros_like(value)
        return value

    parameters = [[parameter(p) for p in group] for group in groups]
    options = zip(optimizer.param_groups, parameters, strict=True)
    trial: torch.optim.Optimizer = type(optimizer)([{**group, "params": own} for group, own in options])  # type: ignore[call-arg]
    trial.step()
    return [[trial.state[p] for p in group if p in trial.state] for group in parameters]


@dataclass
class Schedule:
    """The learning rate's schedule: most count epochs, a few count steps, one looks at the validation loss."""

    scheduler: Any
    planned: "Callable[[int], Any] | None" = None  # what makes it for so many steps, if it is by `lr_schedule`

    def begin(self, num_steps: int) -> None:
        """The run will have so many steps. Raises Refusal, alike on all ranks, if the schedule is not for that."""
        if self.planned is not None:
            self.scheduler = self.planned(num_steps)
        self.require(num_steps)

    @property
    def num_steps(self) -> int | None:
        """How many steps the schedule is for; None if it goes on for ever."""
        return getattr(self.scheduler, "total_steps", None)

    def require(self, num_steps: int, saved: Mapping[str, Any] | None = None) -> None:
        """Raise Refusal, alike on all ranks, if a run of so many steps is longer than the schedule.

        `saved` is the state of the schedule that a resumed run will take over.
        """
        planned = self.num_steps if saved is None or self.scheduler is None else saved.get("total_steps")
        if isinstance(planned, int | float) and planned < num_steps:
            by = "scheduler" if self.planned is None else "lr_schedule"
            raise Refusal(
                f"`{by}` is for {counted(int(planned), 'step')}, but there will be {num_steps}: "
                "to train longer, start a new run from the `weights` of this one"
            )

    @property
    def _counts_steps(self) -> bool:
        return self.planned is not None or type(self.scheduler).__name__ in PER_STEP

    def after_step(self) -> None:
        if self._counts_steps:
            self.scheduler.step()

    def after_epoch(self, validation_loss: float | None) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if validation_loss is not None:
                self.scheduler.step(validation_loss)
        elif self.scheduler is not None and not self._counts_steps:
            self.scheduler.step()


def by_steps(optimizer: torch.optim.Optimizer, form: str, warmup: int | float, num_steps: int) -> Any:
    """A schedule by PyTorch's own ones that counts steps: it rises, and falls to 0 at the end. Raises Refusal.

    Args:
        optimizer: whose learning rates are scheduled.
        form: constant, linear or cosine.
        warmup: in how many steps the rate rises; a number between 0 and 1 is a share of all steps.
        num_steps: how many steps there will be.
    """
    if isinstance(warmup, float):
        share = max(round(warmup * num_steps), 1)
        warmup = share if form == "constant" else min(share, num_steps - 1)
    home, rest = torch.optim.lr_scheduler, num_steps - warmup
    if form != "constant" and rest < 1:
        raise Refusal(f"`warmup` {warmup} takes all of the {num_steps} steps that there will be: choose fewer")
    rise = partial(home.LinearLR, optimizer, start_factor=WARMUP_START, total_iters=warmup)
    if form == "constant":
        return rise()
    if form == "cosine":
        fall: Callable[[], Any] = partial(home.CosineAnnealingLR, optimizer, T_max=rest)
    else:
        fall = partial(home.LinearLR, optimizer, start_factor=1.0, end_factor=0.0, total_iters=rest)
    found: Any = home.SequentialLR(optimizer, [rise(), fall()], milestones=[warmup]) if warmup else fall()
    found.total_steps = num_steps
    return found


def build_schedule(config: Config, optimizer: torch.optim.Optimizer) -> Schedule:
    chosen = config.optimizer
    if chosen.lr_schedule != "constant" or chosen.warmup:
        if chosen.scheduler:
            raise ConfigError(f"`lr_schedule` and `warmup` are a schedule, and so is `scheduler` {chosen.scheduler}")
        return Schedule(None, partial(by_steps, optimizer, chosen.lr_schedule, chosen.warmup))
    if config.tuning.lr_of and chosen.scheduler in PER_STEP:
        raise ConfigError(
            f"`lr_of`: `scheduler` {chosen.scheduler} gives all the same learning rate; choose `lr_schedule`"
        )
    if not chosen.scheduler:
        return Schedule(None)
    home = torch.optim.lr_scheduler
    options = dict(chosen.scheduler_options)

    def schedule(of: torch.optim.Optimizer) -> Schedule:
        return Schedule(by_torch_name("scheduler", home, home.LRScheduler, chosen.scheduler, of, **options))

    trial_optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=chosen.lr, momentum=0.9)
    trial = schedule(trial_optimizer)
    with saying(f"`scheduler` {chosen.scheduler} fails with {options}", *NOT_TAKEN):
        trial_optimizer.step()
        trial.after_step()
        trial.after_epoch(1.0)
    return schedule(optimizer)
