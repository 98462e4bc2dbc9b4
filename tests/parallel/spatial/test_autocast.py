"""Under autocast, operators on tiles give the dtype that PyTorch gives, and values as near as 16 bits are."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.pool.ranks import Ranks

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


def run_under_autocast(comm: Communicator, dtype: torch.dtype) -> dict[str, str]:
    """What differs from plain PyTorch, by operator."""
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
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_have_the_dtypes_of_plain_pytorch(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks(4).run(run_under_autocast, dtype) == [{}] * 4
