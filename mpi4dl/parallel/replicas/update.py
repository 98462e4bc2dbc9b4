"""The optimizer's step on the part of the parameters that this rank owns, bucket by bucket.

gradients of a bucket, summed   [ . . . g g g . . . ]
master weights of this rank           m m m            in the model's precision: the parameters themselves, else float32
                                        |              optimizer.step(), which sees only them
parameters of the bucket        [ . . . p p p . . . ]  and then to the other ranks
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm.scattering import LOW_PRECISION
from mpi4dl.parallel.replicas.buckets import Span
from mpi4dl.parallel.replicas.offload import Home
from mpi4dl.parallel.replicas.strides import laid_out, seen_as

NAMES = "param_names"  # of an optimizer that was made of named parameters


@dataclass(frozen=True)
class Piece:
    """What the optimizer works on: `value` for the elements of `span`; the model has them in `target`, if elsewhere.

    It has the parameter's shape if it is a whole parameter, and one dim if it is a part of it.
    """

    span: Span
    value: nn.Parameter
    target: Tensor | None


def make_piece(span: Span, parameter: nn.Parameter, target: Tensor, home: Home) -> Piece:
    """The piece for a span of a parameter whose elements in the model are `target`, flat."""
    if span.stop - span.start == parameter.numel():
        target = target.view(parameter.shape)
    value = home.place(target.float() if target.dtype in LOW_PRECISION else target)
    return Piece(span, nn.Parameter(value), None if value.data_ptr() == target.data_ptr() else target)


def is_like(value: Any, piece: Piece) -> bool:
    """Whether this state of a piece is one number for each element."""
    return isinstance(value, Tensor) and value.numel() == piece.value.numel() and value.dim() > 0


class Update:
    """Steps of `optimizer`, whose parameters it replaces by pieces, one list of them for each bucket.

    `pieces[number]` are those of a bucket of `parameters`; a parameter that is its own piece stays where it is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[Sequence[Piece]],
        home: Home,
    ) -> None:
        self.optimizer, self.pieces, self.home = optimizer, pieces, home
        of: dict[int, list[nn.Parameter]] = {id(p): [] for p in parameters}
        begun = {id(p): dict(optimizer.state.pop(p, {})) for p in parameters}
        for piece in (piece for some in pieces for piece in some):
            p = parameters[piece.span.member]
            of[id(p)].append(piece.value)
            if begun[id(p)]:
                optimizer.state[piece.value] = {k: self._part(v, p, piece) for k, v in begun[id(p)].items()}
        for group in optimizer.param_groups:
            replaced = [of.get(id(p), [p]) for p in group["params"]]
            if NAMES in group:
                group[NAMES] = [name for name, some in zip(group[NAMES], replaced, strict=True) for _ in some]
            group["params"] = [value for some in replaced for value in some]
        self.num_groups = len(optimizer.param_groups)
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        number_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._groups: list[list[list[nn.Parameter]]] = []  # of each bucket: the pieces in each of the groups
        for bucket in pieces:
            self._groups.append([[] for _ in optimizer.param_groups])
            for piece in bucket:
                if id(piece.value) in number_of:
                    self._groups[-1][number_of[id(piece.value)]].append(piece.value)

    @contextmanager
    def _only(self, number: int) -> Iterator[None]:
        """Within this context the optimizer has the pieces of this bucket alone, and need not look at all others."""
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        for group, values in zip(groups, self._groups[number], strict=True):
            group["params"] = values
        try:
            yield
        finally:
            for group, values in zip(groups, everything, strict=True):
                group["params"] = values

    def _part(self, value: Any, parameter: nn.Parameter, piece: Piece) -> Any:
        """What of the state with which some optimizers begin is a piece's."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape or not value.dim():
            return value.clone()
        part = value.reshape(-1)[piece.span.start : piece.span.stop].to(piece.value.dtype)
        return self.home.place(laid_out(part, piece.value))

    def receive(self, piece: Piece, key: str, value: Any, saved_as: torch.dtype) -> Any:
        """Some state of a piece as the optimizer wants it, from a checkpoint in which the parameter was `saved_as`."""
        if not isinstance(value, Tensor):
            return value
        if value.dtype is saved_as and key != "step":
            value = value.to(piece.value.dtype)
        if is_like(value, piece):
            return self.home.place(laid_out(value, piece.value))
        options = self._group_of.get(id(piece.value), {})
        on_host = key == "step" and not (options.get("capturable") or options.get("fused"))
        return value if on_host else value.to(piece.value.device)

    def step(self, number: int, gradient: Tensor, offset: int, used: Sequence[bool], factor: float) -> None:
        """Step on the pieces of a bucket. `gradient` is that of its elements from `offset` on, before `factor`."""
        if factor != 1.0 and gradient.dtype not in LOW_PRECISION:
            gradient.mul_(factor)
            factor = 1.0
        pieces = [piece for piece in self.pieces[number] if used[piece.span.member]]
        for piece in pieces:
            begin = piece.span.offset - offset
            mine = seen_as(gradient[begin : begin + piece.value.numel()], piece.value)
            piece.value.grad = mine.to(piece.value.device, piece.value.dtype)
            if factor != 1.0:
                piece.value.grad.mul_(factor)
        with self._only(number):
            self.optimizer.step()
        for piece in pieces:
            piece.value.grad = None
            self._settle(piece)
        self.publish(number)

    def _settle(self, piece: Piece) -> None:
        """The optimizer's state goes to where the master weights are, after the step that made it."""
        state = self.optimizer.state[piece.value]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() == piece.value.numel() > 1:
                state[key] = self.home.place(value)

    @torch.no_grad()
    def publish(self, number: int) -> None:
        """Bring the master weights of a bucket to the model."""
        for piece in self.pieces[number]:
            if piece.target is not None:
                piece.target.copy_(piece.value)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step on a part of a parameter is the part of a step on the whole, as for all but a few optimizers.

    It is found by trying, for each group of parameters: two steps on a matrix, and on parts of it.
    """
    for group in optimizer.param_groups:
        try:
            whole, parts = (_values(_try(optimizer, group, cut)) for cut in (_whole, _in_parts))
        except Exception:  # optimizers for matrices alone refuse anything else, each in its own way
            return False
        if not torch.allclose(whole, parts, rtol=1e-9, atol=0):
            return False
    return True


def is_separate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of a parameter is the same without the others, unlike where, say, all gradients have one norm.

    It is found by trying, for each group of parameters: two steps on two matrices, together and alone.
    """
    for group in optimizer.param_groups:
        try:
            together = _values(_try(optimizer, group, _halves))
            alone = torch.cat([_values(_try(optimizer, group, half)) for half in (_upper, _lower)])
        except Exception:  # it cannot be built from its groups alone: let it be
            continue
        if not torch.allclose(together, alone, rtol=1e-9, atol=0):
            return False
    return True


def keeps_options(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes parameters and their state alone; some optimizers count steps in their groups' options."""
    for group in optimizer.param_groups:
        try:
            options = [_options(_try(optimizer, group, _whole, num_steps)) for num_steps in (0, 2)]
        except Exception:  # it cannot be built from its groups alone: let it be
            continue
        if options[0] != options[1]:
            return False
    return True


def _whole(value: Tensor) -> Sequence[Tensor]:
    return [value]


def _in_parts(value: Tensor) -> Sequence[Tensor]:
    return value.flatten().split(7)


def _upper(value: Tensor) -> Sequence[Tensor]:
    return [value[:2]]


def _lower(value: Tensor) -> Sequence[Tensor]:
    return [value[2:]]


def _halves(value: Tensor) -> Sequence[Tensor]:
    return [value[:2], value[2:]]


def _values(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([value.detach().flatten() for value in optimizer.param_groups[0]["params"]])


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer says beside which parameters it has."""
    return {name: value for name, value in group.items() if name not in ("params", NAMES)}


def _options(optimizer: torch.optim.Optimizer) -> list[str]:
    return [repr(options_of(group)) for group in optimizer.param_groups]


def _try(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    cut: Callable[[Tensor], Sequence[Tensor]],
    num_steps: int = 2,
) -> torch.optim.Optimizer:
    """An optimizer like this one, with the options of a group, after steps on what `cut` makes of a matrix."""
    device = next((p.device for p in group["params"]), None)
    values = torch.randn(1 + num_steps, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, *gradients = values.to(device)
    some = [part.clone().requires_grad_() for part in cut(value)]
    options = options_of(group) | {"params": some, "lr": 0.1}  # it may be 0 at the start of a schedule
    trial: torch.optim.Optimizer = type(optimizer)([options])  # type: ignore[call-arg]
    for gradient in gradients:
        for part, g in zip(some, cut(gradient), strict=True):
            part.grad = g.clone()
        trial.step()
    return trial
