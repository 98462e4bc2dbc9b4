"""Exact tiles of a model in eight lines: `mpirun -n 4 python examples/tiles.py`, on as many ranks as you like."""

import torch

import mpi4dl
from mpi4dl import models

torch.manual_seed(0)  # the same weights, and here the same image, on every rank
tiles, model = mpi4dl.tiles(), models.build("resnet18", num_classes=2)  # torchvision's, or any nn.Module of yours
images, labels = torch.randn(2, 3, 512, 512), torch.tensor([0, 1])
logits = tiles.whole(model(tiles.cut(images)))
tiles.backward(torch.nn.functional.cross_entropy(logits, labels), model)
torch.optim.SGD(model.parameters(), lr=0.1).step()
if mpi4dl.world().rank == 0:
    print("logits:", logits.tolist())
