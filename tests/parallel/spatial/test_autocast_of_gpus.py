"""Rules ask the dispatcher in which dtype an operator works: here it is taught what autocast does on CUDA devices."""

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
from tests.pool.ranks import Ranks

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


def compare(comm: Communicator, name: str) -> tuple[torch.dtype, torch.dtype, torch.dtype, float]:
    """The dtype of plain PyTorch's result, without and with the policy of GPUs, of ours, and how far they are apart."""
    function, x = OPERATORS[name], torch.randn(2, 4, 8, 6).bfloat16()
    with torch.autocast("cpu"):
        before = function(x).dtype
        with as_on_gpus():
            plain = function(x)
            ours = spatial.gather(function(spatial.shard(x, spatial.Grid(comm, rows=2))))
    return before, plain.dtype, ours.dtype, float((plain.double() - ours.double()).abs().max())


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_work_in_the_dtype_of_the_device(ranks: Ranks, name: str) -> None:
    for before, plain, ours, apart in ranks(2).run(compare, name):
        assert (before, plain, ours) == (torch.bfloat16, torch.float32, torch.float32)
        assert apart < 1e-5
