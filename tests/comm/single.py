"""Collectives of one tensor, by their names of PyTorch 2.13; in 2.10 they have the names that it deprecated."""

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
