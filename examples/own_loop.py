"""A training loop of your own on tiles: `mpirun -n 4 python -m examples.own_loop`, or plainly without mpirun.

The lines that differ from plain PyTorch end with `# mpi4dl`. The images are synthetic: a bright spot, left or right.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mpi4dl  # mpi4dl
from mpi4dl import models


def spots(count: int, size: int) -> TensorDataset:
    """Images (count, 3, size, size) of noise with a bright spot, and whether it is on the right."""
    labels = torch.randint(2, (count,))
    images = torch.randn(count, 3, size, size)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, col = torch.randint(size // 2 - 8, (2,)).tolist()
        image[:, row : row + 8, col + label * size // 2 :][..., :8] += 3
    return TensorDataset(images, labels)


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="sides of the images in pixels")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/own_loop.pt"))
    options = parser.parse_args()

    torch.manual_seed(0)  # ranks read the same images in the same order
    loader = DataLoader(spots(24, options.size), batch_size=2, shuffle=True)
    model = models.build("resnet18", num_classes=2)  # torchvision's, or any nn.Module of yours
    model = mpi4dl.parallelize(model)  # mpi4dl
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    accumulate, losses = 4, list[float]()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader) // accumulate)
    criterion = nn.CrossEntropyLoss()

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return criterion(model(images), labels)

    for _ in range(options.epochs):
        for number, (images, labels) in enumerate(loader, start=1):
            loss = loss_of(images, labels) / accumulate
            loss.backward()
            losses.append(loss.item() * accumulate)
            if number % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if mpi4dl.world().rank == 0:  # mpi4dl
            options.out.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.out)
            print(f"mean loss {sum(losses[-len(loader) :]) / len(loader):.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
