"""Hooks on gradients, which see that of the whole tensor; and what a spread tensor says of itself.

    autograd, on each rank     the gradient of what this rank holds: its share of the objective, see comm.collectives
    whole                      summed over all who hold an element; each rank has what it owns
    hook                       a SpatialTensor that is cut like the tensor, so that `g.sum()` is that of the whole
    part                       what goes on in backward: an owner's, or where all own a copy, an equal share

So it is with plain tensors of which every rank has a copy, such as pooled features, within `whole_gradients`.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from mpi4dl.comm import Refusal
from mpi4dl.comm.exchange import WITHIN, narrow, running_forward
from mpi4dl.parallel.spatial.alignment import part
from mpi4dl.parallel.spatial.comparing import compare_use
from mpi4dl.parallel.spatial.flattening import among_copies, between_copies, copies_of
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import gather_axes, retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap

Hook = Callable[[Tensor], Tensor | None]
_register_hook, _retain_grad, _data = Tensor.register_hook, Tensor.retain_grad, vars(torch._C.TensorBase)["data"]


class Gradient:
    """The gradient of a tensor of this layout. Collective, and so are its methods."""

    def __init__(self, layout: Layout) -> None:
        if layout.flat and layout.wide:
            raise refusal("a hook", "the tensor has several axes in one dim, and halos")
        self.layout = layout
        absent = tuple(axis for axis, dim in enumerate(layout.dims) if dim is None and layout.grid.shape[axis] > 1)
        self.holders = layout.grid.along(absent) if absent else None
        self.copies = tuple((flat, layout.grid.along(flat.axes)) for flat in layout.flat if flat.copies)

    def whole(self, share: Tensor) -> Tensor:
        """The whole gradient, spread as the tensor is, from this rank's share of it."""
        if running_forward:
            raise Refusal(WITHIN)
        if self.layout.grid.loop is not None:
            compare_use(self.layout.grid, Tensor.register_hook)
        if self.layout.wide:
            halo = self.layout.narrow.exchange_to(self.layout.tiling)
            share = halo.adjoint.bring(share)
        if self.holders is not None:
            share = self.holders.all_reduce(share.clone(memory_format=torch.contiguous_format))
        for flat, ranks in self.copies:  # of these entries every rank has a share of the gradient
            rest, beside = between_copies(share, flat), copies_of(share, flat)
            share = among_copies(rest, ranks.all_reduce(beside), flat)
        return wrap(share, self.layout.narrow)

    def part(self, whole: Tensor, share: Tensor) -> Tensor:
        """The part of a gradient that a hook returned with which this rank continues, instead of its share."""
        layout = self.layout.narrow
        if whole.shape != (shape := layout.global_shape(share.shape)):
            raise ValueError(f"a hook got a gradient of shape {tuple(shape)}, but returned one of {tuple(whole.shape)}")
        if isinstance(whole, SpatialTensor) and whole.layout.dims == layout.dims and whole.layout.flat == layout.flat:
            mine = retile(whole, layout.tiling).local
        else:
            mine = part(whole, layout)
        if self.holders is not None:
            mine = mine / self.holders.size
        for flat, ranks in self.copies:
            mine = among_copies(between_copies(mine, flat), copies_of(mine, flat) / ranks.size, flat)
        if not self.layout.wide:
            return mine.to(share.dtype)
        held = torch.zeros_like(share)
        narrow(held, layout.dims, self.layout.held, layout.owned).copy_(mine)
        return held

    def seen_by(self, hook: Hook) -> Hook:
        """The function for autograd on this rank with which `hook` sees the whole."""

        def run(share: Tensor) -> Tensor | None:
            whole = self.whole(share)
            _here.hooks += 1
            try:
                changed = hook(whole)
            finally:
                _here.hooks -= 1
            return None if changed is None else self.part(changed, share)

        return run

    def keep(self, local: Tensor, store: Callable[[Tensor], None]) -> None:
        """Pass the whole gradient to `store` at the end of backward, when all hooks have had their say."""
        _retain_grad(local)
        if local.is_leaf:
            return
        found = weakref.ref(local)  # a tensor must not be kept by its own hook

        def give() -> None:
            kept = found()
            if kept is not None and kept.grad is not None:
                store(self.whole(kept.grad))

        _register_hook(local, lambda _: torch.autograd.Variable._execution_engine.queue_callback(give))


def whole_gradient(layout: Layout, share: Tensor) -> Tensor:
    """The gradient of a tensor of this layout, spread in the same way, from this rank's share of it. Collective."""
    return Gradient(layout).whole(share)


class whole_gradients:
    """Within this context, hooks on plain tensors of which every rank of `grid` has a copy see the whole gradient."""

    def __init__(self, grid: Grid) -> None:
        self._layout = Layout.of_copies(grid)

    def __enter__(self) -> None:
        _here.of_copies.append(self._layout)

    def __exit__(self, *error: Any) -> None:
        _here.of_copies.pop()

    @staticmethod
    def is_entered() -> bool:
        """Whether a model runs over ranks here."""
        return bool(_here.of_copies)


def runs_hook() -> bool:
    """Whether a hook of a user's sees a gradient here."""
    return _here.hooks > 0


class _Contexts(threading.local):
    """The layouts of the contexts that this thread is in, and how many hooks of users."""

    def __init__(self) -> None:
        self.of_copies: list[Layout] = []
        self.hooks = 0  # of users, that run


_here = _Contexts()


@functools.wraps(_register_hook)
def _register_hook_here(self: Tensor, hook: Hook) -> Any:
    if _here.of_copies and not has_torch_function_unary(self):
        hook = Gradient(_here.of_copies[-1]).seen_by(hook)
    return _register_hook(self, hook)


@functools.wraps(_retain_grad)
def _retain_grad_here(self: Tensor) -> None:
    if has_torch_function_unary(self):
        handle_torch_function(Tensor.retain_grad, (self,), self)
    elif _here.of_copies and not self.retains_grad:
        _keep_of_copies(Gradient(_here.of_copies[-1]), self)
    else:
        _retain_grad(self)


# A mode of PyTorch's would see these calls too, but among all others, each of which it slows down.
Tensor.register_hook, Tensor.retain_grad = _register_hook_here, _retain_grad_here  # type: ignore


def _keep_of_copies(gradient: Gradient, x: Tensor) -> None:
    """Let `x.grad`, of which each rank has a copy, be the whole gradient, added up over backward passes."""
    found, before = weakref.ref(x), list[Tensor | None]()

    def begin(_: Tensor) -> None:
        kept = found()
        before[:] = [None if kept is None or kept.grad is None else kept.grad.clone()]

    def store(whole: Tensor) -> None:
        (known,), kept = before, found()
        if kept is not None:  # what was there is whole already, and every rank has added it
            kept.grad = whole if known is None else whole - (gradient.layout.grid.size - 1) * known

    _register_hook(x, begin)
    gradient.keep(x, store)


@register(Tensor.register_hook, flat=True)
def register_hook(x: SpatialTensor, hook: Hook) -> Any:
    if x.parameter is not None:
        raise Refusal(
            f"a hook is registered on a weight of shape {tuple(x.shape)}, of which ranks have parts: pass "
            "gradient_hook to the engine, or hook what is computed of the weight"
        )
    return _register_hook(x.local, Gradient(x.layout).seen_by(hook))


@register(Tensor.retain_grad, flat=True)
def retain_grad(x: SpatialTensor) -> None:
    found = weakref.ref(x)

    def store(whole: Tensor) -> None:
        kept = found()
        if kept is not None:
            kept.retained = gather_axes(whole, kept.layout.grid.axes) if kept.kept else whole

    Gradient(x.layout).keep(x.local, store)


@register(Tensor.grad.__get__, flat=True)  # type: ignore[union-attr]
def grad(x: SpatialTensor) -> Tensor | None:
    if x.parameter is not None:
        return None if x.parameter.grad is None else x.like(x.parameter.grad)
    if x.retained is not None or x.local.grad is None:
        return x.retained
    gradient = Gradient(x.layout)
    if gradient.holders is not None or x.layout.wide:
        raise refusal("Tensor.grad", "ranks hold copies of it, each with a share of the gradient")
    return x.like(x.local.grad)


@register(torch.autograd.grad, flat=True)
def take_gradient(*args: Any, **options: Any) -> None:
    raise refusal(
        "torch.autograd.grad", "of a gradient within a model or its hooks each rank has a part: take it outside"
    )


# Attributes of a tensor: shapes are those of the whole, autograd's state is that of the local part.


def _of_tensor(methods: str, attributes: str) -> list[Any]:
    """The methods of tensors with these names, and what reads the attributes with those."""
    read = (getattr(Tensor, name).__get__ for name in attributes.split())
    return [*(getattr(Tensor, name) for name in methods.split()), *read]


OF_THE_WHOLE = [
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor),
    *_of_tensor(
        "size dim numel nelement element_size is_floating_point is_complex get_device ndimension __len__ __hash__",
        "shape ndim dtype device itemsize nbytes "
        "is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_mps is_xpu is_nested",
    ),
]
OF_THE_PART = _of_tensor(
    "is_contiguous new_zeros new_ones new_empty new_full new_tensor", "requires_grad is_leaf _version"
)


def _of_the_whole(function: Any) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return rule


def _of_the_part(function: Any) -> Any:
    return lambda x, *args, **kwargs: function(x.local, *args, **kwargs)


for function in OF_THE_WHOLE:
    register(function, flat=True)(_of_the_whole(function))
for function in OF_THE_PART:
    register(function, flat=True)(_of_the_part(function))


class FunctionOfShares:
    """The function of autograd that made a tensor in a model on tiles, without hooks: they would see a rank's share."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        if "hook" in name:
            raise refusal(f"grad_fn.{name}", "the hook would see one rank's share of a gradient: use y.register_hook")
        return getattr(self._function, name)


@register(Tensor.grad_fn.__get__, flat=True)  # type: ignore[union-attr]
def grad_fn(x: SpatialTensor) -> FunctionOfShares | None:
    return None if x.local.grad_fn is None else FunctionOfShares(x.local.grad_fn)


@register(Tensor.__format__, flat=True)
def format_(x: SpatialTensor, specification: str) -> str:
    return repr(x)


@register(Tensor.requires_grad_, Tensor.requires_grad.__set__, flat=True)  # type: ignore[attr-defined]
def requires_grad_(x: SpatialTensor, requires_grad: bool = True) -> SpatialTensor:
    (x.local if x.parameter is None else x.parameter).requires_grad_(requires_grad)
    x.local.is_of_one_rank = True  # type: ignore[attr-defined]
    return x


def _assign_data(x: Tensor, values: Tensor) -> None:
    """Assign to `x.data`: PyTorch asks no rule where only the values are spread, and would read memory of nobody."""
    if not isinstance(x, SpatialTensor):
        _data.__set__(x, gather_axes(values, values.layout.grid.axes) if isinstance(values, SpatialTensor) else values)
    elif getattr(values, "local", None) is not x.local:  # as it is where `Module.to()` changes nothing
        if x.parameter is None or (values.shape, values.dtype, values.device) != (x.shape, x.dtype, x.device):
            raise refusal("Tensor.data", "it is assigned to: write to the tensor in place")
        x.data.copy_(values)


Tensor.data = property(_data.__get__, _assign_data)  # type: ignore


@register(Tensor.data.__get__, flat=True)  # type: ignore[attr-defined]
def data(x: SpatialTensor) -> SpatialTensor:
    # Of a parameter it counts writes, of which ZeRO 3 loses none in silence.
    return x.like(x.local.data if x.parameter is None else x.local.detach())


@register(torch._has_compatible_shallow_copy_type, flat=True)
def may_be_assigned(x: Tensor, values: Tensor) -> bool:
    """Whether x may have these values as `x.data`, which `Module.to()` asks, also where it changes nothing."""
    return True
