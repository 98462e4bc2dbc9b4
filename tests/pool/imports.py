"""What a rank of any program may import that takes long; not mpi4py, which starts MPI, and not what is tested."""

import importlib

from mpi4dl._torchvision import import_torchvision

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

import_torchvision()
for name in SLOW:
    importlib.import_module(name)
