"""The tensors of a call as the wire takes them: dense, and cut into the parts of each rank."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def plain(tensor: Tensor) -> Tensor:
    """The tensor that MPI can read: one with a place in memory."""
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor is still to come
    tensor = wait() if callable(wait) else tensor
    if tensor.layout is not torch.strided:
        raise TypeError(f"the backend mpi4dl moves dense tensors, not {tensor.layout}: pass tensor.to_dense()")
    return tensor


def all_plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [plain(tensor) for tensor in tensors]


def flat(name: str, tensor: Tensor) -> Tensor:
    tensor = plain(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, but must be contiguous: pass {name}.contiguous()")
    return tensor.view(-1)


def one_each(name: str, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    """`tensors`, of which there must be one for each of `size` ranks."""
    if len(tensors) != size:
        raise ValueError(f"{name} has {len(tensors)} tensors, but the group has {size} ranks: pass one each")
    return all_plain(tensors)


def even_parts(name: str, tensor: Tensor, size: int) -> list[Tensor]:
    """The even parts of a tensor, flat views, one for each of `size` ranks."""
    whole = flat(name, tensor)
    if whole.numel() % size:
        raise ValueError(
            f"{name} has {whole.numel()} elements, which must be divisible by the number of ranks (={size})"
        )
    return list(whole.view(size, -1)) if whole.numel() else [whole] * size


def rows(name: str, tensor: Tensor, sizes: Sequence[int], size: int) -> list[Tensor]:
    """The rows of a tensor for each of `size` ranks: as many as `sizes` says, or alike. A 0-d tensor is one row."""
    tensor = plain(tensor).reshape(1) if tensor.dim() == 0 else plain(tensor)
    num_rows = tensor.shape[0]
    if not sizes:
        if num_rows % size:
            raise ValueError(
                f"{name} has {num_rows} rows, which must be divisible by the number of ranks (={size}): "
                f"pass {name}_split_sizes"
            )
        sizes = [num_rows // size] * size
    if len(sizes) != size or sum(sizes) != num_rows:
        raise ValueError(
            f"{name}_split_sizes is {list(sizes)}, but must be {size} numbers (one a rank) whose sum is "
            f"{num_rows}, the number of rows of {name}"
        )
    cuts = [0, *itertools.accumulate(sizes)]
    return [tensor[start:stop] for start, stop in itertools.pairwise(cuts)]
