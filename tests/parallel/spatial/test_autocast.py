"""Under autocast operators on tiles give PyTorch's dtypes, those of GPUs too, and values as near as 16 bits are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.pool.ranks import on_ranks

WEIGHT, KERNEL = torch.linspace(0.5, 1.5, 4), torch.linspace(-1, 1, 16).view(4, 4, 1, 1)


def labels(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64)


FUNCTIONS = {
    "conv2d": lambda x: F.conv2d(x, KERNEL, WEIGHT),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, KERNEL, WEIGHT),
    "linear": lambda x: F.linear(x.movedim(1, -1), KERNEL[..., 0, 0]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, WEIGHT, WEIGHT, True),
    "group_norm": lambda x: F.group_norm(x, 2, WEIGHT, WEIGHT),
    "group_norm without weights": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x, weight=WEIGHT, bias=WEIGHT),
    "layer_norm of the image": lambda x: F.layer_norm(x, x.shape[1:]),
    "layer_norm of the image, weights": lambda x: F.layer_norm(x, x.shape[2:], torch.ones(x.shape[2:])),
    "layer_norm of channels": lambda x: F.layer_norm(x.movedim(1, -1), (4,), WEIGHT, WEIGHT),
    "rms_norm of the image": lambda x: F.rms_norm(x, x.shape[1:]),
    "rms_norm of channels": lambda x: F.rms_norm(x.movedim(1, -1), (4,)),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad by reflection": lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
    "pad by replication": lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"),
    "pad by replication of nothing": lambda x: F.pad(x, (0, 0, 0, 0), mode="replicate"),
    "pad circularly": lambda x: F.pad(x, (1, 2, 0, 1), mode="circular"),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "interpolate, bicubic": lambda x: F.interpolate(x, size=(9, 5), mode="bicubic"),
    "interpolate, area": lambda x: F.interpolate(x, size=(3, 2), mode="area"),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive_avg_pool2d to one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "sum": lambda x: x.sum((2, 3)),
    "mean": lambda x: x.mean((2, 3)),
    "prod": lambda x: x.prod(2),
    "var": lambda x: x.var((2, 3)),
    "std_mean": lambda x: torch.std_mean(x, (0, 2, 3)),
    "amax": lambda x: x.amax((2, 3)),
    "max along rows": lambda x: x.max(2)[0],
    "topk": lambda x: x.topk(2)[0],
    "quantile": lambda x: x.float().quantile(0.5, 2),
    "softmax": lambda x: x.softmax(1),
    "softmax along columns": lambda x: x.softmax(3),
    "log_softmax along rows": lambda x: F.log_softmax(x, 2),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "cumsum of channels": lambda x: x.cumsum(1),
    "norm of channels": lambda x: x.norm(dim=1),
    "normalize": lambda x: F.normalize(x),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(x.shape, dtype=x.dtype)),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros(x.shape, dtype=x.dtype)),
    "smooth_l1_loss per pixel": lambda x: F.smooth_l1_loss(x, torch.zeros(x.shape, dtype=x.dtype), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros(x.shape, dtype=x.dtype), reduction="sum"),
    "binary cross entropy with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, labels(x)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 2),
    "prelu": lambda x: F.prelu(x, WEIGHT),
    "powers": lambda x: x**2 + x.exp() * x.sigmoid(),
    "cat": lambda x: torch.cat([x, x.float()], 1),
    "relu": lambda x: F.relu(x),
    "gelu": lambda x: F.gelu(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(4)
def test_operators_have_the_dtypes_of_plain_pytorch(comm: Communicator, dtype: torch.dtype) -> None:
    image = torch.rand(2, 4, 6, 8).to(dtype) + 0.25
    x = spatial.shard(image, spatial.Grid(comm, rows=2, cols=2))
    wrong = {}
    for name, function in FUNCTIONS.items():
        with torch.autocast("cpu", torch.bfloat16):
            plain, ours = function(image), function(x)
        pairs = zip(plain, ours, strict=True) if isinstance(plain, tuple) else [(plain, ours)]
        for whole, mine in pairs:
            if mine.dtype != whole.dtype:
                wrong[name] = f"{mine.dtype}, but plain {whole.dtype}"
            elif not torch.allclose(spatial.gather(mine).float(), whole.float(), rtol=0.03, atol=0.03):
                wrong[name] = "other values"
    assert wrong == {}


# Of those that PyTorch runs in float32 on CUDA devices, and on CPUs as they come.
IN_FLOAT32 = (
    "group_norm",
    "layer_norm",
    "rms_norm",
    "linalg_vector_norm",
    "logsumexp",
    "softmax.int",
    "log_softmax.int",
    "cumsum",
    "upsample_nearest2d",
    "upsample_bilinear2d",
)
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 2),
    "layer norm over the image": lambda x: F.layer_norm(x, x.shape[2:]),
    "rms norm over the image": lambda x: F.rms_norm(x, list(x.shape[2:])),
    "layer norm of pixels": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "softmax": lambda x: x.softmax(2),
    "log softmax": lambda x: x.log_softmax(3),
    "cumsum": lambda x: x.cumsum(3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, size=(12, 9), mode="bilinear", align_corners=True),
}


@contextmanager
def as_on_gpus() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")

    def in_float32(name: str) -> Callable[..., Any]:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                wide = tree_map(lambda a: a.float() if isinstance(a, Tensor) and a.is_floating_point() else a, args)
                return operator(*wide, **kwargs)

        return kernel

    for name in IN_FLOAT32:
        library.impl(name, in_float32(name), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("name", OPERATORS)
@on_ranks(2)
def test_operators_work_in_the_dtype_of_the_device(comm: Communicator, name: str) -> None:
    function, x = OPERATORS[name], torch.randn(2, 4, 8, 6).bfloat16()
    with torch.autocast("cpu"):
        before = function(x).dtype
        with as_on_gpus():
            plain = function(x)
            ours = spatial.gather(function(spatial.shard(x, spatial.Grid(comm, rows=2))))
    assert (before, plain.dtype, ours.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert float((plain.double() - ours.double()).abs().max()) < 1e-5
