"""Sums of sparse tensors, such as the gradients of embeddings: all ranks get all entries, and add them up alike."""

from typing import Any

import torch
from torch import Tensor


def is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


def sum_sparse(group: Any, tensor: Tensor, op: str) -> None:
    """Sum a COO tensor over the ranks of a group, in place. It waits for the others: entries follow their number.

    Raises:
        TypeError: the reduction is another one.
    """
    if op != "sum":
        raise TypeError(f"sparse tensors are reduced by SUM alone, not by {op.upper()}: pass tensor.to_dense()")
    own = tensor.detach().coalesce()
    numbers = [torch.zeros((), dtype=torch.int64, device=own.device) for _ in range(group.size())]
    group.allgather(numbers, torch.tensor(own._nnz(), device=own.device)).wait()
    # Entries come first, as in values: parts of a gather are whole rows.
    indices = [own.indices().new_zeros((int(number), own.sparse_dim())) for number in numbers]
    values = [own.values().new_zeros((int(number), *own.values().shape[1:])) for number in numbers]
    group.allgather(indices, own.indices().t().contiguous()).wait()
    group.allgather(values, own.values()).wait()
    total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), own.shape)
    with torch.no_grad():  # a detached one would get entries of its own
        tensor.copy_(total.coalesce())
