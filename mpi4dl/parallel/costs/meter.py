"""A dry run of a part of a model: it runs on shapes on one rank of a grid, and its work and messages are counted.

Nothing is computed, nothing allocated, nothing sent. All estimates of a plan are sums over the records of such runs,
`UnitCosts`: FLOPs, bytes kept and at work, messages, rounds of statistics. Seconds are these times rates, or are timed.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpi4dl._randomness import forked
from mpi4dl.comm.traffic import Traffic
from mpi4dl.parallel.spatial.dry_run_grid import DryRunGrid
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned

FLASH, FLASH_BACKWARD, FLASH_ON_CPUS, FLASH_BACKWARD_ON_CPUS = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{where}{way}")
    for where in ("", "_for_cpu")
    for way in ("", "_backward")
)
FLOPS = {
    **flop_registry,
    FLASH_ON_CPUS: flop_registry[FLASH],
    FLASH_BACKWARD_ON_CPUS: flop_registry[FLASH_BACKWARD],
}
ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class OperatorMeter(TorchDispatchMode):
    """A meter of the operators within it, forward and backward.

    `flops` are those of convolutions, matrix products and attention, by PyTorch's own formulas. `live_bytes` are those
    of the tensors that were made and are not freed yet, `peak_bytes` the most of them at a time, and `largest_bytes`
    those of the largest tensor. `touched_bytes` are read and written by operators that have no FLOPs. Of `operators`
    views are none.

    PyTorch's FlopCounterMode also tells modules apart. For that it hooks into autograd, and fails where a module hands
    on a parameter itself, as a stage of a vision transformer does with the class token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.live_bytes = self.peak_bytes = self.largest_bytes = self.touched_bytes = self.operators = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = FLOPS.get(function._overloadpacket)
        if formula is None:
            with self:
                results = function.decompose(*args, **kwargs)
            if results is not NotImplemented:
                return results
        results = function(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(results)
        places = {x.untyped_storage()._cdata for x in given}
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=results)
            self.operators += 1
        elif not _is_view(function, places, made):
            self.operators += 1
            self.touched_bytes += sum({id(x): x.nbytes for x in (*given, *made)}.values())
        for storage in (x.untyped_storage() for x in made):
            place, size = storage._cdata, storage.nbytes()
            if place not in places and place not in self._known:
                self._known.add(place)
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                self.largest_bytes = max(self.largest_bytes, size)
                weakref.finalize(storage, self._freed, place, size)
        return results

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live_bytes -= size


def _is_view(function: Any, places: set[int], made: Sequence[Tensor]) -> bool:
    """Whether an operator shows its arguments otherwise: by storages, since `_unsafe_view` declares no alias."""
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments)
    return bool(made) and not writes and all(x.untyped_storage()._cdata in places for x in made)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class SavedTensors:
    """Counts the bytes that autograd saves for the backward pass, each storage once, without those of `own` tensors.

    `with saved.counting(): ...` counts what is saved in there, on any device, meta too. Storages are kept alive, for
    the address of one that is freed is used again. `turns` says by address in which `turn` each was saved first.
    """

    def __init__(self, own: Iterable[Tensor] = ()) -> None:
        self.turn = 0
        self.turns: dict[int, int] = {}
        self.num_bytes = 0
        self._storages: list[torch.UntypedStorage] = []
        self._own: list[torch.UntypedStorage] = []
        self._addresses: set[int] = set()
        self.disregard(own)

    def disregard(self, own: Iterable[Tensor]) -> None:
        """Do not count these tensors from now on."""
        for tensor in own:
            self._own.append(tensor.untyped_storage())
            self._addresses.add(self._own[-1]._cdata)

    def counting(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor as saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._addresses and storage._cdata not in self.turns:
            self.turns[storage._cdata] = self.turn
            self.num_bytes += storage.nbytes()
            self._storages.append(storage)
        return tensor


class KnownValues(TorchDispatchMode):
    """Meta tensors that follow from numbers alone have values within it, so that a forward may look at them.

    A mask is made of positions, which are made of sizes: `torch.arange(n) < n`. Such tensors, of up to `MOST_VALUES`
    elements, are computed on the CPU too. Values that depend on parameters or inputs have only a shape.

        values of     torch.arange, torch.full, ..., and of what is computed of such tensors
        no values of  parameters, inputs, random numbers, and what is computed of them
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, torch.UntypedStorage] = {}  # by the address of the storage on the meta device

    def value(self, x: Tensor) -> Tensor | None:
        """A tensor's value on the CPU, which shares memory with those of its views; None if it is not known."""
        if not x.is_meta:
            return x.detach()
        if type(x) not in (Tensor, torch.nn.Parameter):
            return None
        known = self._values.get(x.untyped_storage()._cdata)
        if known is None:
            return None
        return torch.empty(0, dtype=x.dtype).set_(known, x.storage_offset(), x.size(), x.stride())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        device = kwargs.get("device")
        if not any(x.is_meta for x in given) and (device is None or torch.device(device).type != "meta"):
            return function(*args, **kwargs)
        changes = function._schema.is_mutable
        aliases = any(result.alias_info is not None for result in function._schema.returns)
        if aliases and not changes:
            return function(*args, **kwargs)
        name = function._overloadpacket.__name__
        operands = self._operands(name, args, kwargs)
        if changes:
            result = function(*args, **kwargs)
            if operands is None:
                self._forget(function, args, kwargs)
            else:
                function(*operands[0], **operands[1])
            return result
        unknown = torch.Tag.nondeterministic_seeded in function.tags or name.startswith(("empty", "new_empty"))
        if operands is None or unknown:
            return function(*args, **kwargs)
        if not any(size in function.tags for size in DECIDED_BY_VALUES):
            shapes = function(*args, **kwargs)
            leaves = _tensors(shapes)
            if any(not leaf.is_meta or leaf.numel() > MOST_VALUES for leaf in leaves):
                return shapes
            values = function(*operands[0], **operands[1])
            for shape, value in zip(leaves, pytree.tree_leaves(values), strict=True):
                self._know(shape, value)
            return shapes
        values = function(*operands[0], **operands[1])
        if device is not None and torch.device(device).type != "meta":
            return values
        return pytree.tree_map_only(Tensor, self._shown, values)

    def _operands(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The arguments with values for tensors, on the CPU; None if one of them has none."""
        kwargs = {name: torch.device("cpu") if name == "device" and x is not None else x for name, x in kwargs.items()}
        fills = name in ("fill_", "zero_", "copy_")
        shape_counts = name.startswith("new_") or name.endswith("_like")
        missing = False

        def known(place: int, x: Tensor) -> Tensor:
            nonlocal missing
            value = self.value(x)
            if value is not None or type(x) not in (Tensor, torch.nn.Parameter):
                missing = missing or value is None
                return x if value is None else value
            small = x.numel() <= MOST_VALUES
            if place == 0 and small and shape_counts:
                return torch.empty(x.shape, dtype=x.dtype)
            storage = x.untyped_storage()
            if place == 0 and small and fills and x.numel() * x.itemsize == storage.nbytes() and not x.requires_grad:
                return self._know(x, torch.empty(x.shape, dtype=x.dtype).as_strided(x.size(), x.stride()))
            missing = True
            return x

        leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
        others = [known(i, x) if i and isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
        if missing or not leaves:
            return None if missing else (tuple(args), kwargs)
        if isinstance(leaves[0], Tensor):
            others[0] = known(0, leaves[0])
        return None if missing else pytree.tree_unflatten(others, structure)

    def _know(self, x: Tensor, value: Tensor) -> Tensor:
        """Keep the value of a new meta tensor as long as its storage lives. Returns the value as it is kept."""
        storage = x.untyped_storage()
        kept = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        place = storage._cdata
        self._values[place] = kept
        weakref.finalize(storage, self._values.pop, place, None)
        own = torch.empty(0, dtype=x.dtype).set_(kept, x.storage_offset(), x.size(), x.stride())
        return own.copy_(value)

    def _shown(self, value: Tensor) -> Tensor:
        shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._know(shape, value)
        return shape

    def _forget(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Written tensors lose their values, because the written ones have none."""
        for argument, x in zip(function._schema.arguments, args, strict=False):
            if isinstance(x, Tensor) and x.is_meta and argument.alias_info is not None and argument.alias_info.is_write:
                self._values.pop(x.untyped_storage()._cdata, None)


MOST_VALUES = 1 << 22
DECIDED_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def needs_values(error: Exception) -> bool:
    """Whether this is what PyTorch says where a forward on the meta device looks at a value."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).partition("\n")[0].lower()


def made_up_part(known: Callable[[Tensor], Tensor | None], x: Tensor) -> Tensor:
    """Values on the CPU for a meta tensor: its own if they are known; else zeros of integers, and random numbers."""
    value = known(x)
    if value is None:
        made = torch.zeros(x.shape, dtype=x.dtype)
        value = made.normal_(std=0.1) if x.is_floating_point() else made.fill_(x.dtype == torch.bool)
    return value.clone().requires_grad_(x.requires_grad)


class FusedAttention(TorchFunctionMode):
    """Within it, attention of meta tensors is the kernel that PyTorch chooses on CPUs wherever it can.

    On the meta device PyTorch computes it by products, and keeps the weights of all pairs of tokens for backward.
    """

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        spread = [x for x in args if isinstance(x, SpatialTensor)] if function in ATTENTION else []
        if spread:
            with self:  # for what the rule calls
                return SpatialTensor.__torch_function__(function, tuple(types), args, kwargs)
        if function is F.scaled_dot_product_attention and not spread:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == value.shape[-1]
    trained = attn_mask is not None and attn_mask.requires_grad
    if not alike or not query.is_meta or dropout_p or trained or 0 in (*query.shape, *key.shape):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    attended: Tensor = FLASH_ON_CPUS(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale")
    )[0]
    return attended


class UnitCosts(NamedTuple):
    """The costs of a unit on a rank for a microbatch: what a dry run counts, and seconds that follow or are timed.

    Args:
        kept_bytes: what autograd keeps of the forward pass, each storage once.
        output_bytes: what is needed behind the unit, of which no unit from there on keeps `unsaved_output_bytes`.
        forward_bytes, backward_bytes: the most memory of either pass at a time, beside what is kept.
        largest_bytes: the largest tensor.
        summed_bytes: what ranks that share features sum up, forward and backward.
        flops, backward_flops: those of convolutions, matrix products and attention, of either pass. Frozen weights have
            no gradients.
        touched_bytes: what operators without FLOPs read and write, forward.
        operators: how many there are, with FLOPs or without, forward.
        there, back: what ranks send each other in the forward and the backward pass.
        forward_seconds, backward_seconds: the time of either pass, without waits for other ranks.
        weight_seconds: of the backward pass, those of gradients of weights, where a schedule takes them later.
    """

    kept_bytes: int = 0
    output_bytes: int = 0
    unsaved_output_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    largest_bytes: int = 0
    summed_bytes: int = 0
    flops: float = 0.0
    backward_flops: float = 0.0
    touched_bytes: int = 0
    operators: int = 0
    there: Traffic = ()
    back: Traffic = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    weight_seconds: float = 0.0

    def part(self, num_ranks: int) -> "UnitCosts":
        """An even part of the counts for each of so many ranks, which send each other nothing."""
        parts = {name: ceil(getattr(self, name) / num_ranks) for name in COUNTS if name.endswith("_bytes")}
        flops = {name: getattr(self, name) / num_ranks for name in COUNTS if name.endswith("flops")}
        return UnitCosts(**parts, **flops, operators=self.operators)


COUNTS = UnitCosts._fields[: UnitCosts._fields.index("there")]
SECONDS = UnitCosts._fields[-3:]
Column = tuple[UnitCosts, ...]  # of all units, at one site


def local_tensors(results: Any) -> list[Tensor]:
    """A rank's parts of the tensors in these values, each once."""
    leaves = {id(leaf): leaf for leaf in _tensors(results)}
    return [owned(leaf) if isinstance(leaf, SpatialTensor) else leaf for leaf in leaves.values()]


class DryRun(NamedTuple):
    """The results of a part of a model, what it was counted to cost, and by kind what was `sent` forward.

    Of what it hands on, `unsaved_output_bytes` are not known.
    """

    results: Any
    costs: UnitCosts
    sent: dict[str, int]


def dry_run(
    grid: DryRunGrid,
    part: Callable[[], Any],
    backward: Callable[[Any], Any] = lambda results: None,
    saved: SavedTensors | None = None,
) -> DryRun:
    """Run a part of a model, and what `backward` does with its results. What is `saved` stays alive meanwhile.

    Without `saved` nothing counts as kept, and all memory is that of the passes.
    """
    counts, meter, kept = grid.comm.counts, OperatorMeter(), 0 if saved is None else saved.num_bytes
    before = dict(counts)
    grid.halo_prefetch.begin()
    grid.comm.recorder.take()
    with torch.enable_grad(), forked(), meter, FusedAttention():
        with nullcontext() if saved is None else saved.counting():
            results = part()
            grid.halo_prefetch.flush()
        sent, there = {name: number - before[name] for name, number in counts.items()}, grid.comm.recorder.take()
        kept = 0 if saved is None else saved.num_bytes - kept
        output_bytes = sum(tensor.nbytes for tensor in local_tensors(results))
        work = {"flops": meter.flops, "touched_bytes": meter.touched_bytes, "operators": meter.operators}
        forward, meter.peak_bytes = meter.peak_bytes, meter.live_bytes
        backward(results)
    grid.halo_prefetch.commit()
    costs = UnitCosts(
        kept,
        output_bytes,
        forward_bytes=max(0, forward - kept),
        backward_bytes=max(0, meter.peak_bytes - kept),
        largest_bytes=meter.largest_bytes,
        summed_bytes=counts["over_features"] - before["over_features"],
        backward_flops=meter.flops - work["flops"],
        **work,  # type: ignore[arg-type]
        there=there,
        back=grid.comm.recorder.take(),
    )
    return DryRun(results, costs, sent)
