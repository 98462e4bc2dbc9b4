"""The device: its tensors, its streams and events, its pinned memory, and what the wire hands to MPI.

CPU tensors stand for those of the GPU. What is made on "cuda", or computed from what was, is the device's; what is
made with `pin_memory`, poisoned at first, is pinned; all others are the host's. Kernels run at once, but count as done
on the current stream, so that a missing wait shows by `clocks`, not by luck. Events are first found not to be reached.

    an operator on device tensors      reads and writes them on the current stream, after all that the host has done
    a copy to or from pinned memory    the same, if it is non-blocking; else the host waits, which is counted
    item(), synchronize()              the host waits, which is counted
    MPI                                touches what it is handed from the call until it is found to be complete
"""

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl.comm import Communicator, streams
from mpi4dl.comm.packing import Message, is_dense
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.transport import PointToPoint
from mpi4dl.parallel.spatial import tensor
from mpi4dl.parallel.spatial.tensor import SpatialTensor, _rules, find_rule
from tests.fakegpu.clocks import Memory, Race, Timeline
from tests.fakegpu.kernels import KERNELS, can_use_efficient_attention, can_use_flash_attention

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
POISON = 0xA5
FACTORIES = tuple(
    "empty zeros ones full tensor rand randn arange randint empty_strided empty_permuted as_tensor".split()
)
NO_KERNEL = ("aten.empty", "aten.new_empty", "aten.set_", "aten.resize_", "aten._local_scalar_dense")
MIXING = ("aten.index", "aten._index_put_impl_", "aten.index_put")


# Without a deterministic kernel: what torch.use_deterministic_algorithms lists as errors on CUDA tensors.
BY_CHANCE = re.compile(
    r"aten\.(_?adaptive_(avg|max)_pool[23]d_backward|(avg|max)_pool3d(_with_indices)?_backward|fractional_max_pool.*_backward"
    r"|max_unpool.*|upsample_(linear|bilinear|bicubic|trilinear)[123]d_backward|(reflection|replication)_pad[123]d_backward"
    r"|nll_loss2d_(forward|backward)|_ctc_loss_backward|grid_sampler_[23]d_backward|kthvalue|median|histc|_?cumsum|put_)\."
)


class WrongPlace(AssertionError):
    """Memory of the host is used as the device's, or the other way round."""


@dataclass
class Counters:
    """What a GPU would have been asked for. `waits` counts what the host waited for: events, and what is blocking.

    `launches` counts operators that read or write device memory, each as one kernel, and `copies` those that only move
    bytes, which the device's copy engine does: to, from and within the device.
    """

    launches: int = 0
    copies: int = 0
    waits: int = 0
    blocking: int = 0
    to_host: int = 0
    to_device: int = 0
    pinned: int = 0
    messages: int = 0

    def since(self, step: Callable[[], Any]) -> dict[str, int]:
        """What this step asks for."""
        before = dict(vars(self))
        step()
        return {name: count - before[name] for name, count in vars(self).items()}


class Stream(Timeline):
    """torch.cuda.Stream."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        super().__init__(f"stream {Stream.made}")
        self.device = CUDA

    def wait_event(self, event: "Event") -> None:
        self.learn(event.recorded)

    def synchronize(self) -> None:
        gpu().wait(self.snapshot(), blocking=True)


class Event:
    """torch.cuda.Event."""

    def __init__(self) -> None:
        self.recorded: dict[Timeline, int] = {}
        self.asked = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = (stream or gpu().current).snapshot()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or gpu().current).wait_event(self)

    def query(self) -> bool:
        """Reached when it is asked a second time: so nobody can take it for granted."""
        self.asked += 1
        if self.asked == 2:
            gpu().wait(self.recorded)
        return self.asked > 1

    def synchronize(self) -> None:
        gpu().wait(self.recorded, blocking=True)


class FakeGpu(TorchDispatchMode):
    """Within its context there is a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Timeline("the host")
        self.default = Stream()
        self.current = self.default
        self.counters = Counters()
        self.constants_are_here = False  # tensors of the host that are older than this count as the device's, too
        self.making = False  # by a function of Python's, that says where
        self._memory: dict[int, Memory] = {}

    # What memory is where.

    def memory_of(self, x: Tensor) -> Memory | None:
        return self._memory.get(x.untyped_storage()._cdata)

    def place(self, x: Tensor, place: str) -> Tensor:
        """This tensor is new there."""
        storage = x.untyped_storage()
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = memory = Memory(place)
            weakref.finalize(storage, self._release, storage._cdata, memory, self.current)
        return x

    def _release(self, key: int, memory: Memory, stream: Stream) -> None:
        self._memory.pop(key, None)
        if memory.place == "device" and active and active[-1] is self:
            late = memory.released(stream, self.host)
            if late:
                who, what = late[0].timeline.name, late[0].what
                self.problems.append(f"memory of {stream.name} is given back while {who} may still use it: {what}")

    def on_device(self, x: Tensor) -> bool:
        memory = self.memory_of(x)
        return memory is not None and memory.place == "device"

    def only_on_host(self, x: Tensor) -> bool:
        memory = self.memory_of(x)
        return not self.constants_are_here if memory is None else memory.place not in ("device", "anywhere")

    # Who touches it.

    def touch(self, timeline: Timeline, x: Tensor, writes: bool, what: str) -> None:
        memory = self.memory_of(x)
        if memory is not None and x.numel():
            start = x.storage_offset() * x.itemsize
            reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            memory.touch(timeline, start, start + (reach + 1) * x.itemsize, writes, what)

    def wait(self, known: dict[Timeline, int], blocking: bool = False) -> None:
        """The host waits for this."""
        self.counters.waits += 1
        self.counters.blocking += blocking
        self.host.learn(known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_view, places = described(function)
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        written = [*tensors_in(args[i] for i in places if i < len(args)), *tensors_in([kwargs.get("out")])]
        here = [x for x in inputs if self.on_device(x)]
        if name.startswith("aten.copy_"):
            return self._copy(function, args, kwargs)
        if "_local_scalar_dense" in name and here:
            self.touch(self.current, inputs[0], False, name)
            self.wait(self.current.snapshot(), blocking=True)
            self.counters.to_host += 1
        timeline: Timeline = self.host
        if here:
            timeline = self.current
            self.current.learn(self.host.knows)
            elsewhere = [x for x in inputs if x.dim() and self.only_on_host(x) and not x.is_meta and x.numel()]
            if elsewhere and not name.startswith(MIXING):
                raise WrongPlace(f"{name} of device tensors and one of the host, of shape {tuple(elsewhere[0].shape)}")
        if here and torch.are_deterministic_algorithms_enabled() and BY_CHANCE.match(name):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        kernel = KERNELS.get(name.rpartition(".")[0]) if here else None
        result = NotImplemented if kernel is None else kernel(*args, **kwargs)
        result = function(*args, **kwargs) if result is NotImplemented else result
        views = not written and is_view
        for x in [] if views else inputs:
            self.touch(timeline, x, any(x is w for w in written), name)
        if here and not views and not name.startswith(NO_KERNEL):
            moved = name.startswith("aten.clone") and is_dense(inputs[0]) and is_dense(result)
            self.counters.copies += moved
            self.counters.launches += 0 if moved else kernels_of(name, args)
        # Zeros that autograd makes by itself, for a gradient that is none, are where the others are.
        of_autograd = name == "aten.zeros.default" and not self.making and torch._C._current_graph_task_id() >= 0
        for x in tensors_in([result]):
            if self.memory_of(x) is None and not x.is_meta:
                if here or of_autograd:
                    self.touch(timeline, self.place(x, "device"), True, name)
                elif self.constants_are_here and any(self.only_on_host(y) for y in inputs):
                    self.place(x, "host")
        return result

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        into, source, *rest = args
        non_blocking = bool(rest[0]) if rest else kwargs.get("non_blocking", False)
        places = [self.on_device(x) for x in (into, source)]
        timeline: Timeline = self.current if any(places) else self.host
        if any(places):
            self.current.learn(self.host.knows)
        moved = places[0] != places[1] or (source.dtype == into.dtype and is_dense(source) and is_dense(into))
        if any(places) and into.numel():
            self.counters.copies += moved
            self.counters.launches += not moved
        result = function(*args, **kwargs)
        self.touch(timeline, source, False, "copy")
        self.touch(timeline, into, True, "copy")
        if places[0] != places[1] and into.numel():
            self.counters.to_device += places[0]
            self.counters.to_host += places[1]
            other = self.memory_of(source if places[0] else into)
            if not non_blocking or other is None:  # memory that is not pinned makes any copy blocking
                self.wait(self.current.snapshot(), blocking=True)
        return result

    # MPI.

    def hand_over(
        self, tensors: list[tuple[Tensor, bool]], call: Callable[[], Pending], direct: bool, what: str = "MPI"
    ) -> Pending:
        """`call()` lets MPI touch these, as (tensor, writes), until what it returns is complete."""
        timeline = Timeline(what)
        for x, writes in tensors:
            if self.on_device(x) and not direct:
                raise WrongPlace(f"device memory is handed to an MPI that is not CUDA-aware: {tuple(x.shape)}")
            self.touch(self.host, x, writes, what)  # which finds races before MPI is called
        self.counters.messages += len(tensors)
        pending = call()
        timeline.learn(self.host.knows)
        for x, writes in tensors:
            self.touch(timeline, x, writes, what)
        pending._deliveries.insert(0, lambda: timeline.end(self.host))
        return pending

    problems: list[str]


active: list[FakeGpu] = []


def gpu() -> FakeGpu:
    return active[-1]


def kernels_of(name: str, args: Any) -> int:
    """How many kernels an operator takes: one, and one for each pair of a list whose dtypes or strides are unlike."""
    if not name.startswith("aten._foreach_copy_"):
        return 1
    pairs = list(zip(*args[:2], strict=True))
    one = all(x.stride() == y.stride() for x, y in pairs) and len({t.dtype for pair in pairs for t in pair}) == 1
    return 1 if one else len(pairs)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """What an operator takes or returns: tensors, lists of them, and others."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@cache
def described(function: Any) -> tuple[str, bool, tuple[int, ...]]:
    """An operator's name, whether it makes views, and which of its arguments it writes."""
    name, schema = str(function), function._schema
    aliases = [each.alias_info for each in schema.returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    written = [i for i, each in enumerate(schema.arguments) if each.alias_info is not None and each.alias_info.is_write]
    return name, is_view, tuple(written)


@contextlib.contextmanager
def stream_context(stream: Stream) -> Iterator[None]:
    before, gpu().current = gpu().current, stream
    try:
        yield
    finally:
        gpu().current = before


def _noting_inputs(apply: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.Function.apply, which remembers for its backward pass where its inputs are."""

    def noting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        places = [x.device if isinstance(x, Tensor) else None for x in args]
        result = apply(cls, *args, **kwargs)
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Tensor) and isinstance(x.grad_fn, BackwardCFunction):
                x.grad_fn.inputs_are_on = places
        return result

    return noting


def _checking_gradients(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of a Function, whose gradients are on the devices of its inputs, or autograd refuses them."""

    def checking(node: Any, *gradients: Any) -> Any:
        found = apply(node, *gradients)
        places = getattr(node, "inputs_are_on", ())
        for place, x in zip(places, found if isinstance(found, tuple) else (found,), strict=False):
            if isinstance(x, Tensor) and x.dim() and place is not None and x.device != place:
                raise RuntimeError(
                    f"{node.name()} returned an invalid gradient: expected device {place} but got {x.device}"
                )
        return found

    return checking


def _plain(x: Tensor) -> Tensor:
    return x.local if isinstance(x, SpatialTensor) else x


def _factory(make: Callable[..., Any]) -> Callable[..., Any]:
    def factory(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if device is None and gpu().constants_are_here and "/tests/parallel/spatial/test_" in caller:
            device = CUDA  # what a test's own function makes, as under torch.set_default_device
        kind = None if device is None else torch.device(device)
        where = {} if kind is None else {"device": CPU if kind.type == "cuda" else kind}
        gpu().making = True
        try:
            result = make(*args, **where, **kwargs)
        finally:
            gpu().making = False
        if pin_memory:
            gpu().counters.pinned += 1
            return gpu().place(result.fill_(POISON), "pinned")
        if kind != CUDA and gpu().constants_are_here:
            gpu().place(result, "host")
        if kind is not None and kind.type == "cuda":
            gpu().touch(gpu().current, gpu().place(result, "device"), True, make.__name__)
        return result

    return factory


def _to(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> Any:
        if isinstance(self, SpatialTensor):  # its rule is asked, and calls this with the tile
            return (
                move(self, *args, non_blocking=non_blocking, **options)
                if non_blocking
                else move(self, *args, **options)
            )
        target = options.pop("device", None)
        for x in args:
            if isinstance(x, Tensor):
                target, options["dtype"] = x.device, x.dtype
            elif isinstance(x, str | torch.device):
                target = torch.device(x)
            elif isinstance(x, torch.dtype):
                options["dtype"] = x
            elif isinstance(x, bool):
                non_blocking = x
        target = None if target is None else torch.device(target)
        if target is not None and target.type == "meta":
            return move(self, target, **options)
        result = move(self, **options) if options else self
        on_device = target is not None and target.type == "cuda"
        if target is None or isinstance(self, SpatialTensor) or on_device == gpu().on_device(result):
            return result
        strides = result.stride() if 0 not in result.stride() else result.contiguous().stride()
        moved = torch.empty_strided(result.size(), strides, dtype=result.dtype, device=target)
        return moved.copy_(result, non_blocking=non_blocking)

    return to


def _cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    def cpu(self: Tensor, **options: Any) -> Any:
        return move(self, **options) if isinstance(self, SpatialTensor) else self.to("cpu")

    return cpu


@contextlib.contextmanager
def installed(constants_are_here: bool = False) -> Iterator[FakeGpu]:
    """There is one GPU in this process, for the tensors that are made in this context."""
    fake = FakeGpu()
    fake.problems = []
    fake.constants_are_here = constants_are_here
    patch = pytest.MonkeyPatch()
    _device_constructors()  # remembered by torch for `with torch.device(...)`, so not the functions of this context
    for name in FACTORIES:
        patch.setattr(torch, name, _factory(getattr(torch, name)))
    for name, replace in (("to", _to), ("cpu", _cpu)):
        original = getattr(Tensor, name)
        replaced = replace(original)
        rule = find_rule(original)
        if rule is not None:
            patch.setitem(_rules, replaced, rule)
            patch.setattr(tensor, "_of_flat", {*tensor._of_flat, replaced})
        patch.setattr(Tensor, name, replaced)
    as_array = Tensor.numpy

    def numpy(x: Tensor, **options: Any) -> Any:
        if fake.on_device(x):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return as_array(x, **options)

    patch.setattr(Tensor, "numpy", numpy)
    apply = vars(torch.autograd.Function)["apply"]  # of Python or, since PyTorch 2.15, of C
    noting = _noting_inputs(lambda function, *args, **options: apply.__get__(None, function)(*args, **options))
    patch.setattr(torch.autograd.Function, "apply", classmethod(noting))
    patch.setattr(BackwardCFunction, "apply", _checking_gradients(BackwardCFunction.apply))
    patch.setattr(Tensor, "is_cuda", property(lambda x: fake.on_device(_plain(x))), raising=False)
    patch.setattr(Tensor, "is_cpu", property(lambda x: not x.is_meta and not fake.on_device(_plain(x))), raising=False)
    device_of = Tensor.device.__get__  # type: ignore[attr-defined]
    patch.setattr(
        Tensor, "device", property(lambda x: CUDA if fake.on_device(_plain(x)) else device_of(x)), raising=False
    )
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": stream_context,
        "current_stream": lambda device=None: gpu().current,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu().wait(gpu().current.snapshot(), blocking=True),
        "default_generators": (torch.Generator(),),
        "get_rng_state": lambda device=None: torch.cuda.default_generators[0].get_state(),
        "set_rng_state": lambda state, device=None: torch.cuda.default_generators[0].set_state(state),
    }.items():
        patch.setattr(torch.cuda, name, value)
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):  # before, since 2.14
        patch.setattr(torch.optim.Optimizer, name, lambda self: None, raising=False)
    patch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use_flash_attention)
    patch.setattr(torch.backends.cuda, "can_use_efficient_attention", can_use_efficient_attention)
    post = PointToPoint._post

    def checked_post(self: PointToPoint, leaving: list[Message], arriving: list[Message], *rest: Any) -> Pending:
        pieces = [(x, False) for m in leaving for x in m.pieces] + [(x, True) for m in arriving for x in m.pieces]
        return fake.hand_over(pieces, lambda: post(self, leaving, arriving, *rest), self.gpu_wire == "direct")

    def checked(collective: Callable[..., Pending]) -> Callable[..., Pending]:
        def call(self: Communicator, *args: Any) -> Pending:
            tensors = [(x, True) for x in args if isinstance(x, Tensor)]
            return fake.hand_over(tensors, lambda: collective(self, *args), False)

        return call

    patch.setattr(PointToPoint, "_post", checked_post)
    for name in ("_reduce", "_broadcast", "_gather"):
        patch.setattr(Communicator, name, checked(getattr(Communicator, name)))
    streams.staging_buffers_of.cache_clear()
    active.append(fake)
    try:
        with fake:
            yield fake
        if fake.problems:
            raise Race(fake.problems[0])
    finally:
        active.pop()
        streams.staging_buffers_of.cache_clear()
        patch.undo()
