"""The optimizer's step on the part of the parameters that this rank owns, bucket by bucket.

gradients of a bucket, summed   [ . . . g g g . . . ]
master weights of this rank           m m m            in the model's precision: the parameters themselves, else float32
                                        |              optimizer.step(), which sees only them
parameters of the bucket        [ . . . p p p . . . ]  and then to the other ranks
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm.streams import NOWHERE, Nowhere, here, to_pinned
from mpi4dl.comm.transport import LOW_PRECISION
from mpi4dl.parallel.replicas.buckets import BucketSegment, laid_out, seen_as
from mpi4dl.parallel.replicas.optimizer_traits import STEP_UNITS, step_unit

# Where master weights and the optimizer's state live: on the device of the model, on the host, or on disk.

OFFLOADS = ("none", "cpu", "disk")
BLOCK_BYTES = 64 << 20  # of one file, each is open while it is in use; and of pinned memory
ALIGNMENT_BYTES = 64


class Device:
    """On the device of the model."""

    def place(self, value: Tensor) -> Tensor:
        """A tensor with the same values, shape, dtype and strides that stays there; the same one if it is there."""
        return value

    def has(self, value: Tensor) -> bool:
        """Whether it is there."""
        return True


class Host(Device):
    """In memory of the host, pinned if the model is on a GPU."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # the last one is being filled
        self._filled_bytes = 0

    def place(self, value: Tensor) -> Tensor:
        if self.has(value):
            return value
        if not self._blocks or self._filled_bytes + value.nbytes > self._blocks[-1].nbytes:
            self._blocks.append(self._block(max(BLOCK_BYTES, value.nbytes)))
            self._filled_bytes = 0
        room = self._blocks[-1][self._filled_bytes : self._filled_bytes + value.nbytes]
        self._filled_bytes += -(-value.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return seen_as(room.view(value.dtype), value).copy_(value)

    def has(self, value: Tensor) -> bool:
        return value.device.type == "cpu"

    def _block(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Disk(Host):
    """In files that are mapped into memory: the system keeps of them what it has room for.

    They have no names, so that nothing is left of them when the process ends, however it does. `folder` should be on a
    fast local disk; None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def has(self, value: Tensor) -> bool:
        return any(block.data_ptr() <= value.data_ptr() < block.data_ptr() + block.nbytes for block in self._blocks)

    def _block(self, num_bytes: int) -> Tensor:
        from mpi4dl.parallel.disk import mapped

        return mapped(num_bytes, self.folder)


def home_for(offload: str, folder: str | Path | None = None) -> Device:
    """The place that `offload` names. Raises ValueError if it names none."""
    if offload not in OFFLOADS:
        raise ValueError(f"offload is {offload!r}, but must be one of {', '.join(OFFLOADS)}")
    return Disk(folder) if offload == "disk" else Host() if offload == "cpu" else Device()


NAMES = "param_names"  # of an optimizer that was made of named parameters


@dataclass(frozen=True)
class Master:
    """A part that the optimizer works on: `value` for the elements of `segment`; the model has them in `target`, if
    elsewhere.

    It has the parameter's shape if it is a whole parameter, and one dim if it is a part of it.
    """

    segment: BucketSegment
    value: nn.Parameter
    target: Tensor | None


def stays(parameter: Tensor, home: Device) -> bool:
    """Whether the optimizer can work on a parameter where it is and as it is."""
    return parameter.dtype not in LOW_PRECISION and home.has(parameter)


def make_master(segment: BucketSegment, parameter: nn.Parameter, target: Tensor, home: Device) -> Master:
    """The master for a segment of a parameter whose elements in the model are `target`, flat."""
    if segment.stop - segment.start == parameter.numel():
        target = target.view(parameter.shape)
    value = home.place(target.float() if target.dtype in LOW_PRECISION else target)
    return Master(segment, nn.Parameter(value), None if value.data_ptr() == target.data_ptr() else target)


def is_like(value: Any, master: Master) -> bool:
    """Whether this state of a master is one number for each element."""
    return isinstance(value, Tensor) and value.numel() == master.value.numel() and value.dim() > 0


class Update:
    """Steps of `optimizer`, whose parameters it replaces by masters, one list of them for each bucket.

    `masters[number]` are those of a bucket of `parameters`; a parameter that is its own master stays where it is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        masters: Sequence[Sequence[Master]],
        home: Device,
    ) -> None:
        self.optimizer, self.masters, self.home = optimizer, masters, home
        self._published: dict[int, Nowhere] = {}  # by bucket, where its copies from the host to a GPU are under way
        of: dict[int, list[nn.Parameter]] = {id(p): [] for p in parameters}
        begun = {id(p): dict(optimizer.state.pop(p, {})) for p in parameters}
        for master in (master for some in masters for master in some):
            p = parameters[master.segment.member]
            of[id(p)].append(master.value)
            if begun[id(p)]:
                optimizer.state[master.value] = {k: self._part(v, p, master) for k, v in begun[id(p)].items()}
        for group in optimizer.param_groups:
            replaced = [of.get(id(p), [p]) for p in group["params"]]
            if NAMES in group:
                group[NAMES] = [name for name, some in zip(group[NAMES], replaced, strict=True) for _ in some]
            group["params"] = [value for some in replaced for value in some]
        self.num_groups = len(optimizer.param_groups)
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        number_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._groups: list[list[list[nn.Parameter]]] = []  # of each bucket: the masters in each of the groups
        for bucket in masters:
            self._groups.append([[] for _ in optimizer.param_groups])
            for master in bucket:
                if id(master.value) in number_of:
                    self._groups[-1][number_of[id(master.value)]].append(master.value)

    @contextmanager
    def _only(self, number: int) -> Iterator[None]:
        """Within this context the optimizer has the masters of this bucket alone, and need not look at all others."""
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        for group, values in zip(groups, self._groups[number], strict=True):
            group["params"] = values
        try:
            yield
        finally:
            for group, values in zip(groups, everything, strict=True):
                group["params"] = values

    def _part(self, value: Any, parameter: nn.Parameter, master: Master) -> Any:
        """A master's part of the state with which some optimizers begin."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape or not value.dim():
            return value.clone()
        part = value.reshape(-1)[master.segment.start : master.segment.stop].to(master.value.dtype)
        return self.home.place(laid_out(part, master.value))

    def receive(self, master: Master, key: str, value: Any, saved_as: torch.dtype) -> Any:
        """Some state of a master as the optimizer wants it, from a checkpoint in which the parameter was `saved_as`."""
        if not isinstance(value, Tensor):
            return value
        if value.dtype is saved_as and key != "step":
            value = value.to(master.value.dtype)
        if is_like(value, master):
            return self.home.place(laid_out(value, master.value))
        options = self._group_of.get(id(master.value), {})
        on_host = key == "step" and not (options.get("capturable") or options.get("fused"))
        return value if on_host else value.to(master.value.device)

    def hand_out(self, number: int, gradient: Tensor, offset: int, used: Sequence[bool], factor: float) -> None:
        """Give the masters of a bucket their gradients, times `factor`. `gradient` is the bucket's from `offset` on."""
        if factor != 1.0 and gradient.dtype not in LOW_PRECISION:
            gradient.mul_(factor)
            factor = 1.0
        masters = [master for master in self.masters[number] if used[master.segment.member]]
        if masters and gradient.is_cuda and masters[0].value.is_cpu:
            gradient = to_pinned(gradient)
        for master in masters:
            begin = master.segment.offset - offset
            mine = seen_as(gradient[begin : begin + master.value.numel()], master.value)
            master.value.grad = mine.to(master.value.dtype)
            if factor != 1.0:
                master.value.grad.mul_(factor)

    def step(self, number: int, keep: bool = False) -> None:
        """Step on the masters of a bucket that have a gradient, which is gone then, unless they `keep` it."""
        masters = [master for master in self.masters[number] if master.value.grad is not None]
        self.wait(number)
        with self._only(number):
            self.optimizer.step()
        for master in masters:
            master.value.grad = master.value.grad if keep else None
            state = self.optimizer.state[master.value]  # which goes to where the master weights are
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() == master.value.numel() > 1:
                    state[key] = self.home.place(value)
        self.publish(number)

    @torch.no_grad()
    def publish(self, number: int) -> None:
        """Bring the master weights of a bucket to the model. Pinned ones must not change before `wait()`."""
        pairs = [(master.target, master.value) for master in self.masters[number] if master.target is not None]
        for target, value in pairs:
            target.copy_(value, non_blocking=True)
        if any(target.is_cuda and value.is_cpu for target, value in pairs):
            self._published[number] = here()
            self._published[number].mark()

    def wait(self, *numbers: int) -> None:
        """Wait until the model has what was published of these buckets, or of all."""
        for number in numbers or [*self._published]:
            self._published.pop(number, NOWHERE).wait()


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
