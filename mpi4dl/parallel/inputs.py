"""What a model is given, told by the shape alone: images (N, C, H, W), volumes, sequences (N, C, L), tokens (N, T)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


def of_tokens(shape: Sequence[int]) -> bool:
    """Whether a batch of this shape is of tokens, which have no channels."""
    return len(shape) == 2


def space_of(shape: Sequence[int]) -> Shape:
    """The sizes along the axes of space: (H, W), or (T,)."""
    return tuple(shape[1:] if of_tokens(shape) else shape[2:])


def batch_shape(num_samples: int, channels: int, size: Sequence[int]) -> Shape:
    """The shape of a batch; samples of no channels are of tokens."""
    return (num_samples, *((channels,) if channels else ()), *size)


def input_dtype(model: nn.Module, shape: Sequence[int]) -> torch.dtype:
    """Numbers of tokens if the model looks up embeddings, or images in the first real type of its parameters."""
    if of_tokens(shape) and _embeddings(model):
        return torch.int64
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def shape_only(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """A batch on the meta device, of which only the shape is there."""
    return torch.empty(tuple(shape), dtype=input_dtype(model, shape), device="meta")


def made_up(model: nn.Module, shape: Sequence[int], whole: Sequence[int], device: torch.device) -> Tensor:
    """Values of this shape that a model which is given a batch of the shape `whole` can take, the same every time."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=input_dtype(model, whole), device=device)
    generator = torch.Generator().manual_seed(0)
    if input_dtype(model, whole) == torch.int64:
        kinds = min(table.num_embeddings for table in _embeddings(model))
        return torch.randint(kinds, tuple(shape), generator=generator).to(device)
    return torch.rand(tuple(shape), dtype=input_dtype(model, whole), generator=generator).to(device)
