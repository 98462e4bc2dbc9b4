"""Backward in two parts: the gradients of a stage's inputs first, those of its weights when a schedule has time.

    forward    x -> conv -> norm -> conv -> y       within `deferred()`
    input     gx <- conv <- norm <- conv <- gy      backward, whose gx is sent upstream; it leaves behind what each
                     |               |              convolution or linear layer took, and the gradient that came to it
    weight          gW              gW              `compute()`, at any time after that

Nothing is computed twice: the backward of a convolution is two convolutions anyway, one for the gradient of its input
and one for that of its weight. Here they run at different times.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpi4dl.comm.exchange import LocalFunction
from mpi4dl.parallel.replicas.reducer import Reducer
from mpi4dl.parallel.spatial.rules.convolution import ConvolutionOptions, convolve, gradients
from mpi4dl.parallel.spatial.rules.windows import Later, Windowed, WithHalo, cast
from mpi4dl.parallel.spatial.tensor import SpatialTensor


class LayerGradients(NamedTuple):
    """Deferred gradients of a layer's call: `gradients(*saved)` are those of these parameters (None: not asked for)."""

    parameters: tuple[nn.Parameter | None, ...]
    gradients: Callable[..., tuple[Tensor | None, ...]]
    saved: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def compute(self) -> tuple[Tensor | None, ...]:
        if _versions(self.saved) != self.versions:
            raise RuntimeError(
                "an input of a layer, or the gradient of its output, was overwritten between backward and compute(), "
                "which needs it for the gradient of the layer's weight: copy it, or overwrite it after compute()"
            )
        with torch.no_grad():
            return self.gradients(*self.saved)


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


class WeightGradients:
    """The weight gradients of one microbatch in one stage, which backward leaves for later (Qi et al., ICLR 2024).

        weights = WeightGradients()
        with weights.deferred():
            outputs = stage(*inputs)
        torch.autograd.backward(outputs, gradients)  # gradients of the inputs, and of all other parameters
        weights.compute()  # gradients of the weights

    The queue of gradients of weight and bias of convolutions, transposed ones too, and of `F.linear`, on tiles too,
    where weight and bias are parameters themselves. All others have their gradients after backward, as in plain
    PyTorch: other operators, weights that are computed from parameters or have hooks on their gradients, images
    without a batch, layers under a checkpoint or another hook on saved tensors, and those that a function of PyTorch
    calls inside, such as `F.multi_head_attention_forward`. Queued gradients cannot be differentiated twice.

    Between backward and `compute()` it holds the inputs of these layers, which the graph saved before, the gradients
    of their outputs, and under autocast the weights as they were cast. None of them may be overwritten meanwhile.
    """

    def __init__(self) -> None:
        self._deferred: deque[LayerGradients] = deque()

    def deferred(self) -> TorchFunctionMode:
        """The context for the stage's forward."""
        return _Deferring(self._deferred)

    def compute(self) -> None:
        """Add what waits to the parameters' gradients, and let go of it.

        Parameters come in the order of backward, each once, however often the stage used it.

        Raises:
            RuntimeError: an input or a gradient was overwritten since backward.
        """
        uses = Counter(id(p) for deferred in self._deferred for p in deferred.parameters)
        sums: dict[int, Tensor] = {}
        while self._deferred:
            deferred = self._deferred.popleft()
            parameters, computed = deferred.parameters, deferred.compute()
            del deferred
            for parameter, gradient in zip(parameters, computed, strict=True):
                if parameter is None:
                    continue
                assert gradient is not None
                gradient = gradient.to(parameter.dtype)
                key = id(parameter)
                sums[key] = sums[key].add_(gradient) if key in sums else gradient
                uses[key] -= 1
                if not uses[key]:
                    _accumulate(parameter, sums.pop(key))


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """As autograd does at a leaf, which takes ten times as long; it does so where hooks wait for the gradient."""
    hooked = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooked or (parameter.grad is None and gradient.stride() != parameter.stride()):
        torch.autograd.backward([parameter], [gradient])
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad += gradient


class _Deferring(TorchFunctionMode):
    """Runs layers so that their backward appends to `deferred`."""

    def __init__(self, deferred: deque[LayerGradients]) -> None:
        super().__init__()
        self._deferred = deferred
        # Weights come to a layer without their graph, so that nothing reaches them in backward, not even their hooks.
        # This makes the layer a part of the graph where its input is not, as in the first stage; it gets no gradient.
        self._anchor = torch.empty(0, requires_grad=True)

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        layer_of = LAYERS.get(function)
        if layer_of is None or not torch.is_grad_enabled() or _saved_tensors_are_hooked():
            return function(*args, **kwargs)
        if SpatialTensor in types:
            with self:  # The rule comes back here with the tensors of this rank.
                return SpatialTensor.__torch_function__(function, types, args, kwargs)
        weight, bias = _parameters(*args, **kwargs)
        foreign = any(kind is not Tensor for kind in types)
        layer = None if foreign or weight is None else layer_of(*args, **kwargs)
        if weight is None or layer is None:
            return function(*args, **kwargs)
        x, *tensors = cast(layer.input, weight.detach(), None if bias is None else bias.detach())
        wanted = (weight, bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None)
        return layer.apply(x, *tensors, partial(self._later, wanted), self._anchor)

    def _later(
        self,
        parameters: tuple[nn.Parameter | None, ...],
        gradients: Callable[..., tuple[Tensor | None, ...]],
        *saved: Tensor,
    ) -> None:
        self._deferred.append(LayerGradients(parameters, gradients, saved, _versions(saved)))


def _saved_tensors_are_hooked() -> bool:
    """Whether what a graph saves is changed on the way, as by a checkpoint.

    A checkpoint runs its layers again in backward, without the mode, and takes what they save for what was to be saved
    here: both must be PyTorch's own.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _parameters(
    input: Tensor, weight: Any, bias: Any = None, *others: Any, **options: Any
) -> tuple[nn.Parameter | None, Tensor | None]:
    """A layer's weight and bias, if their gradients can wait; otherwise None for the weight."""
    own = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf and weight.is_floating_point()
    own_bias = bias is None or not bias.requires_grad or (isinstance(bias, nn.Parameter) and bias.is_leaf)
    if not (own and own_bias and weight.numel() and input.numel()):
        return None, None
    # Hooks wait for the sum with the gradients of other operators, which do not wait.
    hooked = any(isinstance(p, nn.Parameter) and Reducer.has_other_hooks(p) for p in (weight, bias))
    return (None, None) if hooked else (weight, bias)


class Layer(NamedTuple):
    """A call of a layer: what it takes, and the function that is applied to (input, weight, bias, later, anchor)."""

    input: Tensor
    apply: Callable[..., Tensor]


class _Rooted(LocalFunction):
    """The identity, made a part of the graph by the anchor, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor) -> Tensor:
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _watched(
    forward: Callable[..., Tensor],
    gradients: Callable[..., tuple[Tensor | None, ...]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    later: Later,
    anchor: Tensor,
) -> Tensor:
    """PyTorch's own function, with a hook for the gradient that comes to its result."""
    y = forward(x, weight, bias)
    if y.grad_fn is None:
        y = _Rooted.apply(y, anchor)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(
        partial(_came, later, partial(gradients, weight, bias is not None), x.detach(), x._version)
    )
    return y


def _came(
    later: Later,
    gradients: Callable[..., tuple[Tensor | None, ...]],
    x: Tensor,
    version: int,
    arrived: Sequence[Tensor | None],
) -> None:
    (gradient,) = arrived
    if x._version != version:
        raise RuntimeError(
            "an input of a layer, which is needed for the gradient of its weight, has been modified by an inplace "
            f"operation: it is at version {x._version}, expected version {version} instead; copy it before"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the gradient of a weight that is computed later cannot be differentiated twice: leave out create_graph"
        )
    if gradient is not None:
        later(gradients, gradient, x)


def _linear_gradients(weight: Tensor, has_bias: bool, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    rows = gradient.reshape(-1, weight.shape[0])
    return rows.t() @ x.reshape(-1, weight.shape[1]), rows.sum(0) if has_bias else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Layer:
    return Layer(input, partial(_watched, F.linear, _linear_gradients))


def _plain(input: Tensor, options: ConvolutionOptions) -> Layer:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *options)

    def gradients_of(weight: Tensor, has_bias: bool, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
        return gradients(gradient, x, weight, options, (False, True, has_bias))[1:]

    return Layer(input, partial(_watched, forward, gradients_of))


def _tiles(input: Tensor, weight: Tensor, bias: Tensor | None, operator: WithHalo) -> Layer:
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None, later: Later, anchor: Tensor) -> Tensor:
        return Windowed.apply(x, operator, weight, bias, later, anchor)[0]

    return Layer(input, apply)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Layer | None:
    num_dims = weight.dim() - 2
    stride, dilation = _each(stride, num_dims), _each(dilation, num_dims)
    refused = padding not in ("same", "valid") or (padding == "same" and set(stride) != {1})
    if input.dim() != weight.dim() or (isinstance(padding, str) and refused):
        return None
    if padding == "same":
        totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        padding = tuple(total // 2 for total in totals)
        if any(total % 2 for total in totals):
            input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
    around = (0,) * num_dims if isinstance(padding, str) else _each(padding, num_dims)
    options = ConvolutionOptions(stride, around, dilation, False, (0,) * num_dims, groups)
    return _plain(input, options)


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Layer | None:
    if input.dim() != weight.dim():
        return None
    each = partial(_each, num_dims=weight.dim() - 2)
    options = ConvolutionOptions(each(stride), each(padding), each(dilation), True, each(output_padding), groups)
    return _plain(input, options)


def _each(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """An argument that PyTorch lets one give once, or for each dim."""
    if isinstance(value, int):
        return (value,) * num_dims
    return tuple(value) * num_dims if len(value) == 1 else tuple(value)


LAYERS: Mapping[Any, Callable[..., Layer | None]] = MappingProxyType(
    {
        F.linear: _linear,
        torch.conv1d: _convolution,
        torch.conv2d: _convolution,
        torch.conv3d: _convolution,
        torch.conv_transpose1d: _transposed_convolution,
        torch.conv_transpose2d: _transposed_convolution,
        torch.conv_transpose3d: _transposed_convolution,
        convolve: _tiles,
    }
)
