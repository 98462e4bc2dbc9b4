"""How an optimizer steps, found by trying: copies of it step on small parameters, and what moves is compared.

together    [ a b c d ]          as `step()` of plain PyTorch does
in parts    [ a|a|a b|b|b .. ]   on parts of parameters: ZeRO, if elements do not look at each other
in turns    [ a ] [ b ] [ c ] .. on one bucket after the other: ZeRO, offload, masters
apart       [ a . c . ]          on ranks of their own: ZeRO, stages
            [ . b . d ]
"""

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl._randomness import forked
from mpi4dl.comm.refusal import NOT_TAKEN, is_of_the_machine
from mpi4dl.geometry import even_cuts
from mpi4dl.parallel.replicas.buckets import Span
from mpi4dl.parallel.replicas.offload import Device
from mpi4dl.parallel.replicas.step_hooks import HOOKS, family
from mpi4dl.parallel.replicas.update import NAMES, Update, make_piece, options_of

# Some only limit what is large, some wait for some steps, some treat what has 128 rows and columns in another way.
# Some project what is nearly orthogonal to the weights.
FAINT, STRONG = 1e-3, 1e6
NUM_STEPS = 7
NUM_PARTS = 11  # each so short that its square has room, which some keep for a vector
LARGE, SMALL = (129, 130), (3, 4)
LEARNING_RATE = 0.1  # the optimizer's own may be 0 at the start of a schedule
TOLERANCE = 1e-9
Bucket = Sequence[Span]


class Manner(NamedTuple):
    """How an optimizer steps; what could not be tried is not so, and `error` says why nothing could be.

    `elementwise`: a step on a part of a parameter is the part of a step on the whole. `separate`: the step of a
    parameter is the same without the others. `in_turns`: steps on some parameters after the others are a step on all.
    """

    elementwise: bool
    separate: bool
    in_turns: bool
    error: str = ""

    def problem(self, kind: str, turns: bool) -> str | None:
        """Why `kind` cannot step on the parameters of a stage, or if it `turns`, on one bucket after the other."""
        ways = "ZeRO, low_precision_weights and offload step on one bucket after the other: train without these"
        where = ways if turns else "ranks have stages of their own: use one stage"
        if self.error:
            return f"{kind} cannot be tried on parameters of other shapes ({self.error}), but {where}"
        if not self.separate:
            return f"{kind} steps by all parameters together, but {where}"
        if turns and not self.in_turns:
            return f"{kind} counts its steps for all parameters together, but {where}"
        return None


def manner_of(optimizer: torch.optim.Optimizer) -> Manner:
    """Try copies of an optimizer, which stays as it is, and so do its parameters.

    Raises what says nothing of the optimizer, such as MemoryError; where ranks are to find the same, within `together`.
    """
    with warnings.catch_warnings(), forked():
        warnings.simplefilter("ignore")
        examples = _Examples(optimizer)
        try:
            plain = [_Trial(examples, gradients).step_together() for gradients in examples.series]
        except NOT_TAKEN as error:
            if is_of_the_machine(error):
                raise
            return Manner(False, False, False, f"{type(error).__name__}: {error}")
        spans = [Span(i, 0, start.numel(), 0) for i, start in enumerate(examples.start)]
        parts = [part for span in spans for part in _cut(span)]
        in_parts = _is_like(plain, examples, [[parts]])
        in_turns = _is_like(plain, examples, [[[span] for span in spans]])
        apart = _is_like(plain, examples, [[spans[0::2]], [spans[1::2]]])
    return Manner(in_parts, apart, in_turns)


def _cut(span: Span) -> list[Span]:
    cuts = even_cuts(span.stop, NUM_PARTS)
    return [Span(span.member, start, stop, 0) for start, stop in pairwise(cuts) if start < stop]


class _Moved(NamedTuple):
    """Where steps led: how far each parameter moved, its values, and the options of the groups."""

    moves: list[Tensor]
    values: list[Tensor]
    options: list[str]


def _is_like(plain: Sequence[_Moved], examples: "_Examples", ranks: Sequence[Sequence[Bucket]]) -> bool:
    """Whether steps on the buckets of some ranks lead where steps on all parameters together do."""
    for gradients, wanted in zip(examples.series, plain, strict=True):
        found: dict[int, Tensor] = {}
        for buckets in ranks:
            try:
                moved = _Trial(examples, gradients).step_on(buckets)
            except NOT_TAKEN as error:  # such as those for matrices alone, which refuse anything else
                if is_of_the_machine(error):
                    raise
                return False
            if moved.options != wanted.options:
                return False
            found |= {span.member: moved.moves[span.member] for bucket in buckets for span in bucket}
        for i, (move, value) in enumerate(zip(wanted.moves, wanted.values, strict=True)):
            rounding = 1e-14 * float(value.abs().max())
            if not torch.allclose(found[i], move, rtol=TOLERANCE, atol=rounding, equal_nan=True):
                return False
    return True


class _Examples:
    """What copies of an optimizer step on: for each group one parameter for each number of dims, two at least.

    `groups[i]` has their numbers, `models[n]` is the real parameter that one is like, None in a group that has none.
    They begin as `start`; each of the `series` has the gradients of some steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.models: list[Tensor | None] = []
        self.groups: list[list[int]] = []
        for group in optimizer.param_groups:
            kinds: list[Any] = [*{p.dim(): p for p in group["params"]}.values()] or [None]
            kinds *= 2 if len(kinds) == 1 else 1
            self.groups.append([*range(len(self.models), len(self.models) + len(kinds))])
            self.models += kinds
        draws = torch.Generator().manual_seed(0)
        self.start, *steps = (
            [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in self._shapes()]
            for _ in range(1 + NUM_STEPS)
        )
        faint = [[FAINT * g for g in step] for step in steps]
        strong = [[STRONG * _across(g, w) for g, w in zip(step, self.start, strict=True)] for step in steps]
        self.series = (faint, strong)

    def _shapes(self) -> Iterator[list[int]]:
        for group in self.groups:
            large = True
            for number in group:
                model = self.models[number]
                dims = 2 if model is None else model.dim()
                yield [*(LARGE if large and dims > 1 else SMALL), *[1] * dims][:dims]
                large = large and dims < 2

    def device(self, number: int) -> torch.device | None:
        model = self.models[number]
        return None if model is None else model.device


def _across(gradient: Tensor, weight: Tensor) -> Tensor:
    """What of each row of a gradient is orthogonal to that of the weight."""
    if gradient.dim() < 2:
        return gradient
    g, w = gradient.flatten(1), weight.flatten(1)
    return (g - w * ((g * w).sum(1, keepdim=True) / w.square().sum(1, keepdim=True))).view_as(gradient)


class _Trial:
    """A copy of an optimizer with parameters of its own, and the gradients of the steps that it is to make."""

    def __init__(self, examples: _Examples, gradients: Sequence[Sequence[Tensor]]) -> None:
        torch.default_generator.manual_seed(0)  # for optimizers that draw
        self.examples, self.gradients = examples, gradients
        self.parameters = [
            nn.Parameter(start.to(examples.device(i), copy=True)) for i, start in enumerate(examples.start)
        ]
        self.optimizer = _twin(examples, self.parameters)

    def _gradients(self) -> Iterator[list[Tensor]]:
        for step in self.gradients:
            yield [gradient.to(self.examples.device(i), copy=True) for i, gradient in enumerate(step)]

    def step_together(self) -> _Moved:
        for gradients in self._gradients():
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient
            self.optimizer.step()
        return self._moved()

    def step_on(self, buckets: Sequence[Bucket]) -> _Moved:
        """Steps on these buckets, by the way that ranks take in training."""
        home = Device()
        pieces = []
        for bucket in buckets:
            offset, some = 0, []
            for span in bucket:
                p = self.parameters[span.member]
                target = p.detach().reshape(-1)[span.start : span.stop]
                some.append(make_piece(span._replace(offset=offset), p, target, home))
                offset += span.stop - span.start
            pieces.append(some)
        update = Update(self.optimizer, self.parameters, pieces, home)
        used = [True] * len(self.parameters)
        for gradients in self._gradients():
            for number, bucket in enumerate(buckets):
                flat = [gradients[span.member].reshape(-1)[span.start : span.stop] for span in bucket]
                update.hand_out(number, torch.cat(flat), 0, used, 1.0)
                update.step(number)
        return self._moved()

    def _moved(self) -> _Moved:
        values = [p.detach() for p in self.parameters]
        moves = [value - start.to(value.device) for value, start in zip(values, self.examples.start, strict=True)]
        return _Moved(moves, values, [repr(options_of(group)) for group in self.optimizer.param_groups])


def _twin(examples: _Examples, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of the optimizer, and of those within it, for these parameters instead of their models.

    What it keeps for real parameters is fitted to these; it has no hooks. Raises what copying raises.
    """
    optimizer = examples.optimizer
    members = family(optimizer)
    # Wherever a copy would refer to a real parameter, it refers to the one like it, or to none that could change.
    memo: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0)) for g in optimizer.param_groups for p in g["params"]}
    alike = [(real, p) for real, p in zip(examples.models, parameters, strict=True) if real is not None]
    memo |= {id(real): p for real, p in alike}
    for member in members:
        if any(isinstance(value, nn.Module) for value in vars(member).values()):
            raise TypeError("it holds modules of the model")
        memo[id(member)] = object.__new__(type(member))
        if "state" in vars(member):
            memo[id(member.state)] = defaultdict(dict)
    for member in members:
        hooks = [name for name in vars(member) if name.startswith(HOOKS)]
        own = {name: value for name, value in vars(member).items() if name not in ("step", *hooks)}
        twin = memo[id(member)]
        vars(twin).update(copy.deepcopy(own, memo))
        vars(twin).update({name: OrderedDict() for name in hooks})
        for real, p in alike:
            if member.state.get(real):
                twin.state[p] = {key: _fitted(value, real, p) for key, value in member.state[real].items()}
    found: torch.optim.Optimizer = memo[id(optimizer)]
    for group, numbers in zip(found.param_groups, examples.groups, strict=True):
        group["params"] = [parameters[number] for number in numbers]
        if NAMES in group:
            group[NAMES] = [str(number) for number in numbers]
        lr = group.get("lr")
        if isinstance(lr, Tensor | float | int):
            group["lr"] = torch.full_like(lr, LEARNING_RATE) if isinstance(lr, Tensor) else LEARNING_RATE
    return found


def _fitted(value: Any, real: Tensor, likeness: Tensor) -> Any:
    """Some state of a real parameter as state of its likeness."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return copy.deepcopy(value)
    if value.shape != real.shape:
        raise ValueError(f"it begins with a state of shape {tuple(value.shape)} that is not the parameter's")
    flat = value.detach().reshape(-1)[: likeness.numel()]
    times = -(-likeness.numel() // flat.numel())
    return flat.repeat(times)[: likeness.numel()].view(likeness.shape).to(likeness.dtype)
