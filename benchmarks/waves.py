"""Images of any size that are made as they are read: each pixel is a formula of its place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpi4dl.geometry import Box


@dataclass(frozen=True)
class Waves:
    """A source of images (N, C, H, W): waves over each other, the same wherever they are read from."""

    shape: torch.Size
    dtype: torch.dtype = torch.float32

    def read(self, box: Box) -> Tensor:
        rows, cols = (torch.arange(*interval, dtype=torch.float32) for interval in box.space)
        samples, channels = torch.arange(*box.batch, dtype=torch.float32), torch.arange(float(self.shape[1]))
        phase = samples.view(-1, 1, 1, 1) + channels.view(1, -1, 1, 1)
        return torch.sin(rows.mul(0.13).view(-1, 1) + phase) + torch.cos(cols.mul(0.07) - phase)
