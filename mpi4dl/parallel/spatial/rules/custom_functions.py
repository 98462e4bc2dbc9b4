"""`torch.autograd.Function` on spread tensors: its forward and its backward pass are lines of rules, as a model is.

    forward     wholes, spread over ranks -> the user's forward -> wholes, of which autograd sees the local parts
    backward    shares of gradients -> whole gradients, spread likewise -> the user's backward -> their local parts

So a function sees what it would see on one device, also where it reduces over the image. See `hooks` on gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoints

from mpi4dl.comm.exchange import APPLY, LocalFunction, no_view, once_differentiable, running_forward
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.rules.hooks import Gradient
from mpi4dl.parallel.spatial.tensor import NOT_DIFFERENTIATED, SpatialTensor, local_part, owned, refusal, wrap

SAVING_INPUTS = getattr(checkpoints, "_NoopSaveInputs", None)  # before PyTorch 2.13: it computes nothing


class Context:
    """The `ctx` of a user's function. What it saves may be spread."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.materialize_grads = True
        self.saved_tensors: tuple[Any, ...] = ()
        self.not_differentiable: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.not_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise refusal("torch.autograd.Function", "it writes to its input")


class CustomCall:
    """One call of a user's function on tensors of a grid."""

    def __init__(self, function: Any, args: Sequence[Any], grid: Grid) -> None:
        self.function, self.args, self.grid, self.num_args = function, args, grid, len(args)
        self.places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        self.layouts = [self.layout_of(args[place]).narrow for place in self.places]
        self.is_tuple = False
        self.outputs: list[Any] = []  # layouts of tensors, and other values

    def layout_of(self, x: Tensor) -> Layout:
        return x.layout if isinstance(x, SpatialTensor) else Layout.of_copies(self.grid)

    def locals(self) -> Iterator[Tensor]:
        """The tensors among the arguments, of which autograd is to know: what this rank owns of them."""
        for place in self.places:
            x = self.args[place]
            yield owned(x) if isinstance(x, SpatialTensor) else x

    def forward(self, ctx: Context, inputs: Sequence[Tensor]) -> list[Any]:
        """The user's forward pass. Returns the local parts of what is a tensor in the results."""
        args = list(self.args)
        for place, layout, x in zip(self.places, self.layouts, inputs, strict=True):
            args[place] = wrap(x, layout)
        self.args = ()
        if self.function.setup_context is torch.autograd.Function.setup_context:
            found = self.function.forward(ctx, *args)
        else:
            found = self.function.forward(*args)
            self.function.setup_context(ctx, tuple(args), found)
        self.is_tuple = isinstance(found, tuple)
        results = list(found) if self.is_tuple else [found]
        self.outputs = [self.layout_of(y) if isinstance(y, Tensor) else y for y in results]
        return [local_part(y) if isinstance(y, Tensor) else y for y in results]

    def results(self, found: Sequence[Any]) -> Any:
        """The results for the model, of which autograd has found these."""
        every = [wrap(y, each) if isinstance(y, Tensor) else y for y, each in zip(found, self.outputs, strict=True)]
        return tuple(every) if self.is_tuple else every[0]

    def backward(self, ctx: Context, shares: Sequence[Tensor | None], like: Sequence[Any]) -> list[Tensor | None]:
        """The local parts of the gradients of the inputs, of the shapes and types of `like`."""
        gradients: list[Any] = []
        for share, layout in zip(shares, self.outputs, strict=True):
            given = None if share is None or not isinstance(layout, Layout) else Gradient(layout).whole(share)
            gradients.append(given)
        found = self.function.backward(ctx, *gradients)
        every = found if isinstance(found, tuple) else (found,)
        if len(every) < self.num_args:
            name = self.function.__name__
            raise RuntimeError(f"{name}.backward returned {len(every)} gradients, but got {self.num_args} inputs")
        parts: list[Tensor | None] = []
        for place, layout, x in zip(self.places, self.layouts, like, strict=True):
            whole = every[place]
            if whole is None or x is None:
                parts.append(None)
                continue
            if whole.shape != (shape := layout.global_shape(x.shape)):
                whole = whole.sum_to_size(shape)  # as autograd does with gradients of what was expanded
            parts.append(Gradient(layout).part(whole, x))
        return parts


class _Spread(LocalFunction):
    @staticmethod
    def forward(ctx: Any, call: CustomCall, *inputs: Tensor) -> tuple[Any, ...]:
        needs = dict(zip(call.places, ctx.needs_input_grad[1:], strict=True))
        user = Context(tuple(needs.get(place, False) for place in range(call.num_args)))
        found = call.forward(user, inputs)
        ctx.call, ctx.user = call, user
        ctx.like = [
            x.new_empty(()).expand(x.shape) if needed else None
            for x, needed in zip(inputs, needs.values(), strict=True)
        ]
        ctx.layouts = [x.layout if isinstance(x, SpatialTensor) else None for x in user.saved_tensors]
        ctx.save_for_backward(*(x if x is None else local_part(x) for x in user.saved_tensors))
        ctx.set_materialize_grads(user.materialize_grads)
        fixed = [local_part(x) for x in user.not_differentiable]
        outputs = [_not_a_view(y, inputs) for y in found]
        ctx.mark_non_differentiable(*(y for old, y in zip(found, outputs, strict=True) if any(old is x for x in fixed)))
        user.saved_tensors = user.not_differentiable = ()
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *shares: Tensor | None) -> tuple[Any, ...]:
        saved = zip(ctx.saved_tensors, ctx.layouts, strict=True)
        ctx.user.saved_tensors = tuple(x if layout is None else wrap(x, layout) for x, layout in saved)
        try:
            return None, *ctx.call.backward(ctx.user, shares, ctx.like)
        finally:
            ctx.user.saved_tensors = ()  # autograd frees its own


def _not_a_view(y: Any, inputs: Sequence[Tensor]) -> Any:
    if not isinstance(y, Tensor) or not y._is_view() or any(torch._C._is_alias_of(y, x) for x in inputs):  # type: ignore
        return y
    return no_view(y, inputs[0])


def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.Function.apply`, also of spread tensors."""
    if torch.is_grad_enabled() and not kwargs and function is not SAVING_INPUTS:
        spread = next((x for x in args if isinstance(x, SpatialTensor)), None)
        if spread is not None and _is_within(spread) and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            if function is checkpoints.CheckpointFunction:
                raise refusal("torch.autograd.Function", NOT_DIFFERENTIATED)
            call = CustomCall(function, args, spread.layout.grid)
            return call.results(_Spread.apply(call, *call.locals()))
    return APPLY.__get__(None, function)(*args, **kwargs)


def _is_within(x: SpatialTensor) -> bool:
    """Whether gradients of x are shares of the objective, as within a model: outside of one they may be multiples."""
    return x.layout.grid.loop is None or bool(running_forward) or torch._C._current_graph_task_id() >= 0


torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
