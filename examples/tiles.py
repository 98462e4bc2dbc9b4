"""Exact tiles of a model in a few lines: `mpirun -n 4 python examples/tiles.py`, on as many ranks as you like."""

import torch

import mpi4dl
from mpi4dl import models

torch.manual_seed(0)  # the same weights, and here the same images, on every rank
model = models.build("resnet18", num_classes=2)  # torchvision's, or any nn.Module of yours
model = mpi4dl.parallelize(model)  # from here on, each rank computes its tile of every image
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.randn(2, 3, 512, 512), torch.tensor([0, 1])
for _ in range(2):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if mpi4dl.world().rank == 0:
        print("loss:", loss.item())
