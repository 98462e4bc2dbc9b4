"""The optimizer's step on the part of the parameters that this rank owns, bucket by bucket.

gradients of a bucket, summed   [ . . . g g g . . . ]
master weights of this rank           m m m            in the model's precision: the parameters themselves, else float32
                                        |              optimizer.step(), which sees only them
parameters of the bucket        [ . . . p p p . . . ]  and then to the other ranks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Refusal
from mpi4dl.comm.scattering import LOW_PRECISION
from mpi4dl.parallel.replicas.buckets import Span
from mpi4dl.parallel.replicas.offload import Home


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


class Update:
    """Steps of `optimizer`, whose parameters it replaces by pieces: one list of them for each bucket, or None for all.

    `pieces[number]` are those of a bucket of `parameters`; a parameter that is its own piece stays where it is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[Sequence[Piece]],
        home: Home,
    ) -> None:
        if any(optimizer.state.get(p) for p in parameters):
            raise Refusal("the optimizer has made steps already: build the engine before the first step")
        self.optimizer, self.pieces, self.home = optimizer, pieces, home
        of: dict[int, list[nn.Parameter]] = {id(p): [] for p in parameters}
        for piece in (piece for some in pieces for piece in some):
            of[id(parameters[piece.span.member])].append(piece.value)
        for group in optimizer.param_groups:
            group["params"] = [value for p in group["params"] for value in of.get(id(p), [p])]

    def step(self, number: int, gradient: Tensor, offset: int, used: Sequence[bool], factor: float) -> None:
        """Step on the pieces of a bucket. `gradient` is that of its elements from `offset` on, before `factor`."""
        if factor != 1.0 and gradient.dtype not in LOW_PRECISION:
            gradient.mul_(factor)
            factor = 1.0
        pieces = [piece for piece in self.pieces[number] if used[piece.span.member]]
        for piece in pieces:
            begin = piece.span.offset - offset
            mine = gradient[begin : begin + piece.value.numel()].view(piece.value.shape)
            piece.value.grad = mine.to(piece.value.device, piece.value.dtype, non_blocking=True)
            if factor != 1.0:
                piece.value.grad.mul_(factor)
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

    It is found by trying: two steps on a matrix, and on its halves.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)

    def after(cut: Callable[[Tensor], Sequence[Tensor]]) -> Iterator[Tensor]:
        some = [part.clone().requires_grad_() for part in cut(values[0])]
        group: dict[str, Any] = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        group |= {"params": some, "lr": 0.1}  # it may be 0 at the start of a schedule
        trial: torch.optim.Optimizer = type(optimizer)([group])  # type: ignore[call-arg]
        for gradient in values[1:]:
            for part, g in zip(some, cut(gradient), strict=True):
                part.grad = g.clone()
            trial.step()
        return (part.detach().flatten() for part in some)

    try:
        whole, parts = (torch.cat([*after(cut)]) for cut in (lambda x: [x], lambda x: x.flatten().split(7)))
        return torch.allclose(whole, parts, rtol=1e-9, atol=0)
    except Exception:  # optimizers for matrices alone refuse anything else, each in its own way
        return False
