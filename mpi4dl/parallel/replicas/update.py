"""The optimizer's step on the part of the parameters that this rank owns, bucket by bucket.

gradients of a bucket, summed   [ . . . g g g . . . ]
master weights of this rank           m m m            in the model's precision: the parameters themselves, else float32
                                        |              optimizer.step(), which sees only them
parameters of the bucket        [ . . . p p p . . . ]  and then to the other ranks
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mpi4dl.comm.transport import LOW_PRECISION
from mpi4dl.parallel.replicas.buckets import Span, laid_out, seen_as
from mpi4dl.parallel.replicas.optimizer_traits import STEP_UNITS, step_unit

# Where master weights and the optimizer's state live: on the device of the model, on the host, or on disk.

OFFLOADS = ("none", "cpu", "disk")
BLOCK_BYTES = 64 << 20  # of one file: each is open while it is in use
ALIGNMENT_BYTES = 64


class Home(Protocol):
    """Gives values a place to stay."""

    def place(self, value: Tensor) -> Tensor:
        """A tensor with the same values, shape, dtype and strides that stays there; the same one if it is there."""

    def has(self, value: Tensor) -> bool:
        """Whether it is there."""


class Device:
    """On the device of the model."""

    def place(self, value: Tensor) -> Tensor:
        return value

    def has(self, value: Tensor) -> bool:
        return True


class Host:
    """In memory of the host, pinned if the model is on a GPU."""

    def place(self, value: Tensor) -> Tensor:
        if self.has(value):
            return value
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)

    def has(self, value: Tensor) -> bool:
        return value.device.type == "cpu"


class Disk:
    """In files that are mapped into memory: the system keeps of them what it has room for.

    They have no names, so that nothing is left of them when the process ends, however it does. `folder` should be on a
    fast local disk; None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._blocks: list[Tensor] = []  # the last one is being filled
        self._filled_bytes = 0

    def place(self, value: Tensor) -> Tensor:
        if self.has(value):
            return value
        if not self._blocks or self._filled_bytes + value.nbytes > self._blocks[-1].nbytes:
            self._blocks.append(self._map(max(BLOCK_BYTES, value.nbytes)))
            self._filled_bytes = 0
        room = self._blocks[-1][self._filled_bytes : self._filled_bytes + value.nbytes]
        self._filled_bytes += -(-value.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return seen_as(room.view(value.dtype), value).copy_(value)

    def has(self, value: Tensor) -> bool:
        return any(block.data_ptr() <= value.data_ptr() < block.data_ptr() + block.nbytes for block in self._blocks)

    def _map(self, num_bytes: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self.folder) as file:
            # Reserved before use: a mapping of a hole ends the process with a signal when the disk is full.
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise OSError(
                    f"there is no room for {num_bytes >> 20} MiB more in {self.folder or tempfile.gettempdir()} "
                    f"({error.strerror}): make room, or choose another `offload_folder`"
                ) from error
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def home_for(offload: str, folder: str | Path | None = None) -> Home:
    """The place that `offload` names. Raises ValueError if it names none."""
    if offload not in OFFLOADS:
        raise ValueError(f"offload is {offload!r}, but must be one of {', '.join(OFFLOADS)}")
    return Disk(folder) if offload == "disk" else Host() if offload == "cpu" else Device()


NAMES = "param_names"  # of an optimizer that was made of named parameters


@dataclass(frozen=True)
class Portion:
    """A part that the optimizer works on: `value` for the elements of `span`; the model has them in `target`, if
    elsewhere.

    It has the parameter's shape if it is a whole parameter, and one dim if it is a part of it.
    """

    span: Span
    value: nn.Parameter
    target: Tensor | None


def stays(parameter: Tensor, home: Home) -> bool:
    """Whether the optimizer can work on a parameter where it is and as it is."""
    return parameter.dtype not in LOW_PRECISION and home.has(parameter)


def make_piece(span: Span, parameter: nn.Parameter, target: Tensor, home: Home) -> Portion:
    """The piece for a span of a parameter whose elements in the model are `target`, flat."""
    if span.stop - span.start == parameter.numel():
        target = target.view(parameter.shape)
    value = home.place(target.float() if target.dtype in LOW_PRECISION else target)
    return Portion(span, nn.Parameter(value), None if value.data_ptr() == target.data_ptr() else target)


def is_like(value: Any, piece: Portion) -> bool:
    """Whether this state of a piece is one number for each element."""
    return isinstance(value, Tensor) and value.numel() == piece.value.numel() and value.dim() > 0


class Update:
    """Steps of `optimizer`, whose parameters it replaces by pieces, one list of them for each bucket.

    `pieces[number]` are those of a bucket of `parameters`; a parameter that is its own piece stays where it is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[Sequence[Portion]],
        home: Home,
    ) -> None:
        self.optimizer, self.pieces, self.home = optimizer, pieces, home
        of: dict[int, list[nn.Parameter]] = {id(p): [] for p in parameters}
        begun = {id(p): dict(optimizer.state.pop(p, {})) for p in parameters}
        for piece in (piece for some in pieces for piece in some):
            p = parameters[piece.span.member]
            of[id(p)].append(piece.value)
            if begun[id(p)]:
                optimizer.state[piece.value] = {k: self._part(v, p, piece) for k, v in begun[id(p)].items()}
        for group in optimizer.param_groups:
            replaced = [of.get(id(p), [p]) for p in group["params"]]
            if NAMES in group:
                group[NAMES] = [name for name, some in zip(group[NAMES], replaced, strict=True) for _ in some]
            group["params"] = [value for some in replaced for value in some]
        self.num_groups = len(optimizer.param_groups)
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        number_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._groups: list[list[list[nn.Parameter]]] = []  # of each bucket: the pieces in each of the groups
        for bucket in pieces:
            self._groups.append([[] for _ in optimizer.param_groups])
            for piece in bucket:
                if id(piece.value) in number_of:
                    self._groups[-1][number_of[id(piece.value)]].append(piece.value)

    @contextmanager
    def _only(self, number: int) -> Iterator[None]:
        """Within this context the optimizer has the pieces of this bucket alone, and need not look at all others."""
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        for group, values in zip(groups, self._groups[number], strict=True):
            group["params"] = values
        try:
            yield
        finally:
            for group, values in zip(groups, everything, strict=True):
                group["params"] = values

    def _part(self, value: Any, parameter: nn.Parameter, piece: Portion) -> Any:
        """A piece's part of the state with which some optimizers begin."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape or not value.dim():
            return value.clone()
        part = value.reshape(-1)[piece.span.start : piece.span.stop].to(piece.value.dtype)
        return self.home.place(laid_out(part, piece.value))

    def receive(self, piece: Portion, key: str, value: Any, saved_as: torch.dtype) -> Any:
        """Some state of a piece as the optimizer wants it, from a checkpoint in which the parameter was `saved_as`."""
        if not isinstance(value, Tensor):
            return value
        if value.dtype is saved_as and key != "step":
            value = value.to(piece.value.dtype)
        if is_like(value, piece):
            return self.home.place(laid_out(value, piece.value))
        options = self._group_of.get(id(piece.value), {})
        on_host = key == "step" and not (options.get("capturable") or options.get("fused"))
        return value if on_host else value.to(piece.value.device)

    def hand_out(self, number: int, gradient: Tensor, offset: int, used: Sequence[bool], factor: float) -> None:
        """Give the pieces of a bucket their gradients, times `factor`. `gradient` is the bucket's from `offset` on."""
        if factor != 1.0 and gradient.dtype not in LOW_PRECISION:
            gradient.mul_(factor)
            factor = 1.0
        for piece in self.pieces[number]:
            if used[piece.span.member]:
                begin = piece.span.offset - offset
                mine = seen_as(gradient[begin : begin + piece.value.numel()], piece.value)
                piece.value.grad = mine.to(piece.value.device, piece.value.dtype)
                if factor != 1.0:
                    piece.value.grad.mul_(factor)

    def step(self, number: int, keep: bool = False) -> None:
        """Step on the pieces of a bucket that have a gradient, which is gone then, unless they `keep` it."""
        pieces = [piece for piece in self.pieces[number] if piece.value.grad is not None]
        with self._only(number):
            self.optimizer.step()
        for piece in pieces:
            piece.value.grad = piece.value.grad if keep else None
            self._settle(piece)
        self.publish(number)

    def _settle(self, piece: Portion) -> None:
        """The optimizer's state goes to where the master weights are, after the step that made it."""
        state = self.optimizer.state[piece.value]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() == piece.value.numel() > 1:
                state[key] = self.home.place(value)

    @torch.no_grad()
    def publish(self, number: int) -> None:
        """Bring the master weights of a bucket to the model."""
        for piece in self.pieces[number]:
            if piece.target is not None:
                piece.target.copy_(piece.value)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group of an optimizer."""
    return {name: value for name, value in group.items() if name not in ("params", NAMES)}


class MultiOptimizer(torch.optim.Optimizer):
    """Optimizers of parameters of their own that step together, whose groups and state are theirs and this one's.

    Schedules and hooks of each go on as they were. Its class is named after theirs, such as SGD+AdamW. Raises
    ValueError if two of them have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.members = list(optimizers)
        for one in self.members:
            self.state.update(one.state)
            one.state = self.state
        self.step_unit = max(map(step_unit, self.members), key=STEP_UNITS.index)
        self.__class__ = type("+".join(type(one).__name__ for one in self.members), (MultiOptimizer,), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.members:
            one.step()


def as_one(optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer for all of them."""
    return optimizers if isinstance(optimizers, torch.optim.Optimizer) else MultiOptimizer(optimizers)
