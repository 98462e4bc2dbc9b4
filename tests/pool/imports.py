"""What a rank of any program may import that takes long; not mpi4py, which starts MPI, and not what is tested."""

import importlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress

from mpi4dl._torchvision import prepare_torchvision
from tests.pool.zygote import require_one_thread

SLOW = (
    "matplotlib.pyplot",
    "numpy",
    "PIL.Image",
    "safetensors.torch",
    "sklearn.metrics",
    "sympy",
    "tifffile",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "torchmetrics",
    "torchvision.models",
    "torchvision.transforms.v2",
    "tqdm",
)


def import_installed(names: Iterable[str]) -> None:
    """Import those that are installed; a test that needs another one says so itself."""
    for name in names:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
        require_one_thread(name)


sys.modules["triton"] = None  # type: ignore[assignment]  # each fork would end with a list of what it has not freed
prepare_torchvision()
# Two processes start from both ends, so that each finds the bytecode of half of them.
import_installed(SLOW if os.environ.get("PYTHONHASHSEED") == "1" else reversed(SLOW))
