"""Trains a transformer within a limit of memory for each rank.

    mpirun -n 2 python -m tests.support.limited ZERO OFFLOAD

In small what BERT with 2.5 billion parameters is on GPUs of 32 GB: the weights of the model fit one rank, the state of
its training only two.
"""

import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, failure, world
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan

FEATURES, LAYERS = 512, 16  # 50 million parameters, whose training takes 16 bytes each: 0.8 GB
LIMIT_BYTES = 650 << 20


class Transformer(nn.Module):
    """Patches of an image, encoder layers as BERT has them, the mean over the patches, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, FEATURES, 16, 16)
        layers = [nn.TransformerEncoderLayer(FEATURES, 8, 4 * FEATURES, 0.0, batch_first=True) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(FEATURES, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def data_bytes() -> int:
    """What RLIMIT_DATA counts: private memory that can be written."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def main(comm: Communicator) -> None:
    torch.set_num_threads(1)
    limit = data_bytes() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    model = Transformer()
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    plan = Plan(data=comm.size, zero=int(sys.argv[1]))
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm, offload=sys.argv[2])
    for _ in range(2):
        result = engine.step([torch.ones(2 // comm.size, 3, 32, 32)], torch.tensor([1, 2]), (32, 32))
    if comm.rank == 0:
        print(f"{count} parameters, loss {result.loss:.6f}", flush=True)


if __name__ == "__main__":
    failure.run(lambda: main(world()))
