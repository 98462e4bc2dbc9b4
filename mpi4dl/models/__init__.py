"""Models in plain PyTorch that know nothing of ranks: `build` makes one by name, `names` lists them.

Each file of a model is imported when a name of it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mpi4dl.models.registry import build, names

if TYPE_CHECKING:
    from mpi4dl.models.amoebanet import amoebanetd
    from mpi4dl.models.bert import BERT
    from mpi4dl.models.gpt import GPT
    from mpi4dl.models.resnet import resnet_v1, resnet_v2, small_resnet
    from mpi4dl.models.unet import UNet
    from mpi4dl.models.vit import ViT

__all__ = ["BERT", "GPT", "UNet", "ViT", "amoebanetd", "build", "names", "resnet_v1", "resnet_v2", "small_resnet"]

_HOMES = {name: "resnet" for name in ("resnet_v1", "resnet_v2", "small_resnet")}
_HOMES |= {"BERT": "bert", "GPT": "gpt", "UNet": "unet", "ViT": "vit", "amoebanetd": "amoebanet"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
