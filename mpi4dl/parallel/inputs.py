"""Inputs of a model, by their shape alone; and how a batch is divided into microbatches and shares."""

from collections import UserList, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mpi4dl.geometry import Box, Interval, even_cuts

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Shape = tuple[int, ...]
MOST_ITEMS = 10_000  # of an object, of which no more are looked at


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


def computed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules have as plain attributes, such as what the old `weight_norm` makes of its parameters."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def tensors_within(
    value: Any, seen: set[int] | None = None, module: nn.Module | None = None, depth: int = 4
) -> Iterator[Tensor]:
    """Tensors that an object of any kind reaches, but for those of objects that were `seen`.

    With a `module`, those of other modules that it reaches are among them, unless they are what it is part of.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, ModuleType, torch.Generator)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        if module is not None and all(each is not module for each in value.modules()):
            yield from [*value.parameters(), *value.buffers()]
    elif depth:
        inner = list(getattr(value, "__dict__", {}).values())
        inner += [getattr(value, name, None) for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        if isinstance(value, partial):
            inner += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType | FunctionType):
            cells = [cell for cell in value.__closure__ or () if cell != CellType()]  # but empty ones
            inner += [getattr(value, "__self__", None), *(cell.cell_contents for cell in cells)]
        elif isinstance(value, Mapping):
            inner += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque, UserList)):
            inner += value
        for x in islice(inner, MOST_ITEMS):
            yield from tensors_within(x, seen, module, depth - 1)


def made_by_jit(model: nn.Module) -> str | None:
    """Which module of a model has operators that nobody can give other tensors; None if there is none."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{path or 'the model'} is made by torch.jit, whose operators pass tiles by: use torch.compile"
    return None


def copied(model: ModuleT, memo: Mapping[int, Tensor] | None = None) -> ModuleT:
    """A copy of a module, with tensors of `memo` by the ids of others. `deepcopy` refuses those that were computed."""
    plain = {id(value): value.detach().clone() for value in computed_tensors(model) if value.grad_fn is not None}
    return deepcopy(model, {**plain, **(memo or {})})


# Parts of a batch: microbatches, how the first stage shares their samples, and which boxes a rank reads of them.


class Microbatch(NamedTuple):
    """Number `number` of a direction: which samples of the batch it has, and how the first stage shares them.

    Way i of the first stage (over all replicas) has the samples from `cuts[i]` up to `cuts[i + 1]`. Where replicas have
    microbatches of their own, it is one of `replica`, and its ways are those of that.
    """

    direction: int
    number: int
    cuts: tuple[int, ...]
    replica: int = 0

    @property
    def samples(self) -> Interval:
        return Interval(self.cuts[0], self.cuts[-1])

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.cuts))

    def without(self, positions: Collection[int]) -> "Microbatch":
        """The rest of it in the batch without these samples."""
        return self._replace(cuts=tuple(cut - sum(position < cut for position in positions) for cut in self.cuts))


@dataclass(frozen=True)
class OwnSizes:
    """The sizes of the samples of a batch that differ, such as (H, W) of each. A microbatch has one sample then."""

    of_samples: tuple[Shape, ...]


Sizes = Shape | OwnSizes


def own_or(of_samples: Sequence[Shape] | None, size: Shape) -> Sizes:
    """The sizes of a batch whose samples have their own, if they have; else that of all."""
    return tuple(size) if of_samples is None else OwnSizes(tuple(of_samples))


def size_of(sizes: Sizes, microbatch: Microbatch) -> Shape:
    """The size of a microbatch's samples. Raises ValueError if they differ."""
    if not isinstance(sizes, OwnSizes):
        return tuple(sizes)
    found = set(sizes.of_samples[slice(*microbatch.samples)])
    if len(found) != 1:
        sides = ", ".join("x".join(map(str, each)) for each in sorted(found)) or "none"
        raise ValueError(f"the samples of a microbatch must have one size, but have {sides}")
    return found.pop()


class Read(NamedTuple):
    """A box of a batch of images that a rank reads, because it works on that part of that microbatch first."""

    microbatch: Microbatch
    box: Box


def nested_cuts(outer: Sequence[int], ways: int) -> tuple[int, ...]:
    """Every part of `outer` cut again into `ways` parts as even as can be."""
    inner = [[start + cut for cut in even_cuts(stop - start, ways)][:-1] for start, stop in pairwise(outer)]
    return (*(cut for cuts in inner for cut in cuts), outer[-1])
