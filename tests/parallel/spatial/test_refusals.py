"""What has no exact rule is refused on every rank, naming the operator, the module and the ways out; never computed."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.pool.ranks import on_ranks

LABELS = torch.zeros(2, 8, 8, dtype=torch.int64)
WEIGHT = torch.ones(4, 4, 3, 3)

# A function, and what the message has to name.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "fft2": lambda x: torch.fft.fft2(x),
    "einsum": lambda x: torch.einsum("nchh->nch", x),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "grid_sample": lambda x: F.grid_sample(x.unsqueeze(2), torch.zeros(2, 8, 8, 2)),
    "complex": lambda x: torch.complex(x, x),
    "glu": lambda x: F.glu(x),
    "a mask": lambda x: x[x > 0],
    "frequencies": lambda x: F.embedding(x.argmax(1), torch.ones(4, 2), scale_grad_by_freq=True),
    "it reinterprets bytes": lambda x: x.view(torch.int32),
    "conv1d": lambda x: F.conv1d(x[0], torch.ones(4, 4, 3)),
    "conv3d": lambda x: F.conv3d(x.permute(2, 3, 0, 1).unsqueeze(0), torch.ones(4, 8, 1, 1, 1)),
    "torch.conv2d": lambda x: F.conv2d(x.permute(0, 2, 3, 1), torch.ones(4, 8, 3, 3)),
    "an argument other than the input": lambda x: F.conv2d(torch.ones(2, 4, 8, 8), x),
    "max_pool3d": lambda x: F.max_pool3d(x.permute(2, 3, 0, 1).unsqueeze(0), 2),
    "batch_norm": lambda x: F.batch_norm(x.permute(0, 2, 3, 1), None, None, training=True),
    "group_norm": lambda x: F.group_norm(x.permute(0, 2, 3, 1), 2),
    "prelu": lambda x: F.prelu(x.permute(0, 2, 3, 1), torch.ones(8)),
    "avg_pool2d": lambda x: F.avg_pool2d(x.long(), 2, divisor_override=3),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[0], 1),
    "torch.nn.functional.fold": lambda x: F.fold(x.permute(0, 2, 1, 3).flatten(1, 2), (4, 2), 1),
    "data_ptr": lambda x: x.data_ptr(),
    "numpy": lambda x: x.detach().numpy(),
    "__array__": lambda x: np.asarray(x.detach()),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.item(),
    "__float__": lambda x: float(x),
    "__bool__": lambda x: bool(x),
    "__contains__": lambda x: 3.0 in x,
    "untyped_storage": lambda x: x.untyped_storage(),
    "stride": lambda x: x.stride(),
    "equal": lambda x: torch.equal(x, x),
    "where": lambda x: torch.where(x > 0),
    "allclose": lambda x: torch.allclose(x, x),
    "Tensor.backward": lambda x: x.backward(torch.ones(2, 4, 8, 8)),
    "out=": lambda x: torch.add(x, x, out=torch.empty(2, 4, 8, 8)),
    "Tensor.__setitem__": lambda x: x.clone().__setitem__(x > 0, torch.ones(3)),
    "which pixel gets which value": lambda x: x.clone().__setitem__(x > 0, torch.ones(3)),
    "Tensor.__setitem__ has no": lambda x: x.clone().__setitem__((slice(None), slice(None), [0, 3]), 1.0),
    "in place to a copy": lambda x: x.unfold(2, 3, 1).__setitem__((slice(None), 0), 1.0),
    "a plain operand has shape (8, 5)": lambda x: x + torch.ones(8, 5),
    "reduce_ex": lambda x: pickle.dumps(x),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "torch.histogram": lambda x: torch.histogram(x, 4),
    "cdist": lambda x: torch.cdist(x, x),
    "trace": lambda x: x[0, 0].trace(),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "its parameters are tensors": lambda x: x.clone().bernoulli_(torch.rand(8)),
}


@on_ranks(4)
def test_what_has_no_rule_is_refused_alike_on_all_ranks(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(2, 4, 8, 8, requires_grad=True), spatial.Grid(comm, rows=2, cols=2)) * 1
    raised = {}
    for name, function in REFUSED.items():
        try:
            function(x)
        except Exception as error:
            raised[name] = type(error).__name__, str(error)
        else:
            raised[name] = "", "nothing was raised"
    comm.agree(None, raised=raised)
    assert {name for name, (kind, _) in raised.items() if kind != "NoRule"} == set()
    unnamed = {name: message for name, (_, message) in raised.items() if name not in message}
    assert unnamed == {}, unnamed
    for _, message in raised.values():
        assert "has no exact rule for a tensor whose image is spread over ranks" in message
        assert "spatial.gather(x)" in message
        assert "spatial.register(" in message
        assert "spatial.gathering()" in message
        assert "`no_rule` gather" in message


class Fourier(nn.Module):
    """A layer that looks at the whole image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).real


class Network(nn.Module):
    """Holds it some levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 1), Fourier()))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))


@on_ranks(2)
def test_the_message_names_the_module_by_its_path(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(1, 3, 8, 8), spatial.Grid(comm, cols=comm.size))
    with pytest.raises(spatial.NoRule) as caught:
        Network()(x)
    comm.agree(None, message=str(caught.value))
    assert "fft2 in module stages.1.1 (Fourier) has no exact rule" in str(caught.value)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_reentrant_checkpoint_is_refused_rather_than_left_without_gradients(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(1, 3, 8, 8), spatial.Grid(comm, cols=comm.size))
    layer = nn.Conv2d(3, 4, 3)
    messages = []
    for reduce in (lambda y: y * 2, lambda y: y.mean((2, 3))):
        with pytest.raises(spatial.NoRule) as caught:
            spatial.gather(checkpoint(reduce, layer(x), use_reentrant=True)).sum().backward()
        messages.append(str(caught.value))
    assert layer.weight.grad is None
    comm.agree(None, messages=messages)
    assert all("use_reentrant=True" in message for message in messages)


@on_ranks(2)
def test_without_gradients_custom_functions_and_inference_work(comm: Communicator) -> None:
    """Where nothing needs a gradient, a custom function is its forward pass, made of operators that have rules."""
    image = torch.randn(1, 3, 8, 8)
    x = spatial.shard(image, spatial.Grid(comm, cols=comm.size))
    layer = nn.Conv2d(3, 4, 3, padding=1)
    with torch.no_grad():
        first = torch.equal(spatial.gather(Double.apply(x)), 2 * image)
        second = torch.allclose(spatial.gather(layer(x)), layer(image))
    with torch.inference_mode():
        third = torch.allclose(spatial.gather(layer(x)), layer(image))
    assert first
    assert second
    assert third


@on_ranks(2)
def test_questions_about_a_tensor_are_answered_for_the_whole(comm: Communicator) -> None:
    grid = spatial.Grid(comm, rows=2)
    x = spatial.shard(torch.randn(2, 3, 10, 7, requires_grad=True), grid)
    y = x * 2
    assert isinstance(y, torch.Tensor)
    assert torch.is_tensor(y)
    assert y.requires_grad
    assert x.layout == y.layout
    assert hash(x) == hash(x)
    assert {x: 1}[x] == 1
    assert not x.is_cuda
    assert not y.is_leaf
    assert torch.equal(copy.deepcopy(x).local, x.local)
    assert "(2, 3, 10, 7)" in repr(x)
    assert "SpatialTensor" in str(x)
    assert x.new_zeros(3).shape == (3,)
    print(x, file=io.StringIO())
    found = [y.shape, y.size(), y.size(-1), y.ndim, y.dim(), y.numel(), len(y), y.dtype, y.device.type, y.nbytes]
    assert found == [(2, 3, 10, 7), (2, 3, 10, 7), 7, 4, 4, 420, 2, torch.float32, "cpu", 1680]


@on_ranks(2)
def test_a_user_can_teach_a_rule(comm: Communicator) -> None:
    """A rule that a user registers: a spectrum of channels is local."""
    image = torch.randn(1, 4, 6, 6)
    x = spatial.shard(image, spatial.Grid(comm, rows=2))
    with pytest.raises(spatial.NoRule):
        torch.fft.fft(x, dim=1)

    @spatial.register(torch.fft.fft)
    def fft(input: spatial.SpatialTensor, n: int | None = None, dim: int = -1) -> Tensor:
        assert not input.layout.cut(dim)
        return spatial.wrap(torch.fft.fft(input.local, n, dim), input.layout)

    assert torch.equal(spatial.gather(torch.fft.fft(x, dim=1)), torch.fft.fft(image, dim=1))
