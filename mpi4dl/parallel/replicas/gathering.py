"""ZeRO 3: parameters are there when a module needs them, and cut up over the ranks at all other times.

forward    bucket 3    gather 3, start 2 -> compute -> free 3, gather 2, start 1 -> compute -> ...
backward   bucket 1    the graph keeps no parameter, but where it was: gather 1, start 2 -> compute -> free 1, ...

As in Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (SC 2020). The calls of
PyTorch's functions alone decide which buckets are gathered, and which ahead. So all ranks that run the same model
gather in the same order. Ranks that run it on images of their own gather all buckets at once instead.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from mpi4dl.comm import Communicator, Pending, Refusal
from mpi4dl.parallel.replicas.buckets import BucketLayout

# Attributes that give a parameter's values, beside `data`.
VIEWS = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
KEPT = 2  # buckets that stay after their use: a layer's weight and bias may lie in two
# Functions that look at no values of a parameter, like most attributes.
ABOUT = frozenset(
    "size dim ndimension numel nelement stride storage_offset element_size get_device data_ptr untyped_storage __len__ "
    "is_contiguous is_floating_point is_complex requires_grad_ register_hook register_post_accumulate_grad_hook "
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full".split()
)


def needs_values(function: Any) -> bool:
    """Whether a function of a parameter reads or writes its values."""
    data: Any = Tensor.data  # which rules of tensors that are spread replace when they are imported
    if getattr(function, "__name__", "") not in ("__get__", "__set__", "__delete__"):
        return getattr(function, "__name__", "") not in ABOUT
    return function in VIEWS or function in (data.__get__, data.__set__)


class AbsentParameter(nn.Parameter):
    """A parameter of which a rank has its own part alone. PyTorch would find numbers that are none."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if needs_values(function):
            shape = next((f" of shape {tuple(x.shape)}" for x in args if isinstance(x, AbsentParameter)), "")
            raise Refusal(
                f"a parameter{shape} is read or written outside of a step, when with ZeRO 3 each rank has a part of it "
                "alone: call engine.gather_state() or engine.predict(), change weights before the engine is made, or "
                "train with ZeRO 2 or less"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Gatherer:
    """Keeps of each bucket of `parameters` the part `part(number)`, which it makes whole over the ranks of `comm`.

    `layout` is how the ranks of `comm` share the parameters, which it takes out of the module. Collective.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: BucketLayout, comm: Communicator) -> None:
        self.parameters, self.layout = list(parameters), layout
        self._kinds = [type(p) for p in self.parameters]
        self.comm = comm.split(0, comm.rank)  # its messages meet no others
        self._parts: list[Tensor] = []
        self._absent: dict[int, Tensor] = {}  # by parameter
        self._whole: dict[int, Tensor] = {}  # by bucket, the one used last at the end
        self._versions: dict[int, int] = {}
        self._exposed: set[int] = set()
        self._addresses: dict[int, int] = {}
        self._ahead: tuple[int, Tensor, Pending] | None = None
        self._next: dict[tuple[int | None, int], int] = {}
        self._last: tuple[int | None, int | None] = (None, None)
        self._keeps_all = False
        self.freed: list[tuple[int, StorageWeakRef]] = []  # memory of buckets, which others may use
        self._earlier = self.freed
        self.bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(layout.buckets):
            part = layout.flatten(number, self.parameters)[layout.own(number)].clone()
            self._parts.append(part)
            # Shapes stay to be seen.
            nothing = torch.full((), torch.nan, dtype=part.dtype, device=part.device)
            for i in bucket.members:
                self.bucket_of[id(self.parameters[i])] = number
                self._absent[i] = nothing.expand(self.parameters[i].shape)
                self._take_away(i)

    def _take_away(self, i: int) -> None:
        self.parameters[i].data = self._absent[i]
        if self._absent[i].numel():
            self.parameters[i].__class__ = AbsentParameter

    def part(self, number: int) -> Tensor:
        """This rank's part of a bucket, flat; it may be changed while no parameter is whole."""
        return self._parts[number]

    def _start(self, number: int) -> tuple[int, Tensor, Pending]:
        part = self._parts[number]
        flat = torch.empty(self.layout.buckets[number].length, dtype=part.dtype, device=part.device)
        flat[self.layout.own(number)] = part
        return number, flat, self.comm.iall_gather_into(flat, self.layout.cuts[number])

    def need(self, numbers: Iterable[int]) -> None:
        """Make these buckets whole, and start the one that came after them the last time. Collective."""
        numbers = list(dict.fromkeys(numbers))
        for number in numbers:
            if number in self._whole:
                self._whole[number] = self._whole.pop(number)
                continue
            self._fetch(number)
        if self._keeps_all:
            return
        idle = [n for n in self._whole if n not in numbers and n not in self._exposed]  # others are compared at the end
        for number in idle[: max(0, len(self._whole) - KEPT)]:
            self._free(number)

    def _fetch(self, number: int) -> None:
        before, last = self._last
        if last is not None:
            self._next[before, last] = number
        self._last = (last, number)
        if self._ahead is None or self._ahead[0] != number:
            self._forget()
            self._ahead = self._start(number)
        _, flat, pending = self._ahead
        self._ahead = None
        coming = self._next.get((last, number))
        if coming is not None and coming not in self._whole and coming != number:
            self._ahead = self._start(coming)
        pending.wait()
        self._whole[number] = flat
        self._addresses[flat.untyped_storage().data_ptr()] = number
        for i in self.layout.buckets[number].members:
            self.parameters[i].__class__ = self._kinds[i]
        self.layout.point(number, self.parameters, flat)
        self._versions[number] = self._version(number)

    def expose(self, number: int) -> None:
        """This bucket's values are given away where PyTorch does not count changes in place."""
        self._exposed.add(number)

    def refuse(self, number: int) -> None:
        raise Refusal(
            f"a parameter was changed while the model ran (one of shape {self._shapes(number)}), but with ZeRO 3 ranks "
            "keep their parts of parameters alone, which such a change does not reach: train with ZeRO 2 or less"
        )

    def _shapes(self, number: int) -> str:
        return ", ".join(str(tuple(self.parameters[i].shape)) for i in self.layout.buckets[number].members)

    def kept(self) -> str | None:
        """Why memory of buckets that was freed in a step before this one is in use; None if it is not."""
        if any(not memory.expired() for _, memory in self._earlier):
            gc.collect()
        old = next((number for number, memory in self._earlier if not memory.expired()), None)
        if old is None:
            self._earlier = self.freed
            return None
        return (
            "the model or a hook keeps a tensor in the memory of a parameter (one of shape "
            f"{self._shapes(old)}), such as its detach(), data or a view, which with ZeRO 3 would not "
            "follow the steps: keep its clone(), or train with ZeRO 2 or less"
        )

    def _version(self, number: int) -> int:
        return sum(self.parameters[i]._version for i in self.layout.buckets[number].members)

    def _is_changed(self, number: int, flat: Tensor) -> bool:
        if self._version(number) != self._versions[number]:
            return True
        own, part = flat[self.layout.own(number)], self._parts[number]
        return number in self._exposed and not torch.equal(own.view(torch.uint8), part.view(torch.uint8))

    def _free(self, number: int) -> None:
        flat = self._whole.pop(number)
        if self._is_changed(number, flat):
            self.refuse(number)
        self._exposed.discard(number)
        self._addresses.pop(flat.untyped_storage().data_ptr(), None)  # buckets of no elements share an address
        for i in self.layout.buckets[number].members:
            self._take_away(i)
        self.freed.append((number, StorageWeakRef(flat.untyped_storage())))

    def _forget(self) -> None:
        if self._ahead is not None:
            self._ahead[2].wait()
            self._ahead = None

    @contextmanager
    def watched(self, at_once: bool = False) -> Iterator[None]:
        """Within this context functions find the parameters among their arguments.

        `at_once`: all are gathered now, so that ranks may do different things in it.
        """
        self._last, self._keeps_all = (None, None), at_once
        if at_once:
            self.need(range(len(self.layout.buckets)))
        with _Watch(self):
            yield
        self._keeps_all = False
        with self.comm.together((Refusal,)):  # a rank may see alone that its part was changed by way of `data`
            self.free()

    def free(self) -> None:
        """No parameter is whole any more."""
        self._forget()
        for number in list(self._whole):
            self._free(number)
        self.freed = [(number, memory) for number, memory in self.freed if not memory.expired()]

    def pack(self, value: Tensor) -> Any:
        """The saved form of a value in the graph: for a parameter, its place."""
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
            return value
        number = self._addresses.get(value.untyped_storage().data_ptr())
        if number is None or value.dtype is not self._parts[number].dtype or value.is_conj() or value.is_neg():
            return value
        return number, value.size(), value.stride(), value.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The value of what was a parameter."""
        number, size, stride, offset = packed
        with torch._C.DisableTorchFunction():  # what is done to parameters here is not the model's doing
            self.need([number])
            return self._whole[number].as_strided(size, stride, offset)


@contextmanager
def there_together(gatherers: Sequence[Gatherer], at_once: bool = False) -> Iterator[None]:
    """Within this context, forward and backward find the parameters of all of these: the graph asks one hook only.

    All ranks do the same in it, unless all are gathered `at_once`.
    """

    def pack(value: Tensor) -> Any:
        for gatherer in gatherers:
            packed = gatherer.pack(value)
            if packed is not value:
                return gatherer, packed
        return value

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        gatherer, place = packed
        return gatherer.unpack(place)

    with ExitStack() as stack:
        for gatherer in gatherers:
            stack.enter_context(gatherer.watched(at_once))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Watch(TorchFunctionMode):
    """Sees to it that the parameters among the arguments of a function are there."""

    def __init__(self, gatherer: Gatherer) -> None:
        super().__init__()
        self._gatherer = gatherer

    def _find(self, values: Iterable[Any], found: list[int]) -> None:
        """Add the buckets of the parameters among these values, or in lists of them, to `found`."""
        bucket_of = self._gatherer.bucket_of
        for value in values:
            if isinstance(value, list | tuple):
                self._find(value, found)
            elif id(value) in bucket_of:
                found.append(bucket_of[id(value)])

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if needs_values(function):
            data: Any = Tensor.data
            found: list[int] = []
            self._find(args, found)
            if kwargs:
                self._find(kwargs.values(), found)
            if found:
                self._gatherer.need(found)
                if function == data.__get__:
                    self._gatherer.expose(found[0])
                elif function == data.__set__:
                    self._gatherer.refuse(found[0])
                elif torch.is_grad_enabled() and not getattr(function, "__name__", "").endswith("_"):
                    args, kwargs = self._as_values(args), {key: self._as_value(x) for key, x in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))

    def _as_values(self, values: Iterable[Any]) -> list[Any]:
        return [self._as_value(value) for value in values]

    def _as_value(self, value: Any) -> Any:
        """A frozen parameter as a plain tensor of its values.

        Of a block that is recomputed, PyTorch keeps a frozen parameter itself up to the backward pass, and there it
        would be without values.
        """
        if isinstance(value, list | tuple) and any(id(x) in self._gatherer.bucket_of for x in value):
            return self._as_values(value)
        if id(value) not in self._gatherer.bucket_of or value.requires_grad:
            return value
        with torch._C.DisableTorchFunction():
            return value.detach()
