"""Models in plain PyTorch that know nothing of ranks: `build` makes one by name, `names` lists them."""

from mpi4dl.models.amoebanet import amoebanetd
from mpi4dl.models.bert import BERT
from mpi4dl.models.gpt import GPT
from mpi4dl.models.registry import build, names
from mpi4dl.models.resnet import resnet_v1, resnet_v2, small_resnet
from mpi4dl.models.unet import UNet
from mpi4dl.models.vit import ViT

__all__ = ["BERT", "GPT", "UNet", "ViT", "amoebanetd", "build", "names", "resnet_v1", "resnet_v2", "small_resnet"]
