"""Products of a few rows in which no row's bits depend on how many there are: by packed weights, or with more rows."""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpi4dl._memory import forget
from mpi4dl.models.experts import Router, grouped_linear
from mpi4dl.models.transformer import Attention
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.spatial import SpatialTensor

# On CPUs PyTorch's product of a few rows adds in another order than one of many, so that a request alone would get
# other last bits than in a batch. Two ways out:
#
#     packed    oneDNN's product by a weight in an order of oneDNN's choice: from `fewest_rows` (1 or 2) on, each of
#               `PACKED_ROWS` gives a row the same bits. Zeros fill up to the next; more are multiplied 16 at a time.
#     padded    PyTorch's own product of a multiple of 8, 16, 32 or 64 rows, the last of which may be zeros. Which of
#               these it takes depends on the processor and the matrix: it is found out by trying (`rows_of_product`).

ROWS_OF_PRODUCTS = 8
MULTIPLES = (ROWS_OF_PRODUCTS, 16, 32, 64)
MOST_ROWS = 512  # up to which products are tried
PACKED_ROWS = 1, 2, 4, 8, 12, 16  # that are multiplied: for each number oneDNN keeps a kernel, of 0.5 MB
BLOCK = PACKED_ROWS[-1]
ENOUGH = [next(many for many in PACKED_ROWS if many >= number) for number in range(BLOCK + 1)]
TABLE_BYTES = 1 << 24  # up to which an embedding keeps its own copy of a weight that a linear layer has too
OUTPUTS_AT_ONCE = 512  # of a weight of which an embedding looks up rows, too: it unpacks as many for one
LOGITS_LAYER = "lm_head"  # behind which there is no activation

# PyTorch computes functions such as GELU for 32 elements at once, at most. For the few that are left it has another
# formula, with other last bits: at the end, and where threads share many elements, at the end of each one's part.

VECTOR = 32  # elements
ONE_THREAD = 16384  # elements, which no threads share yet
INEXACT = {F.gelu, F.silu, torch._C._nn.silu, torch.sigmoid, Tensor.sigmoid, Tensor.cos, Tensor.sin}


class ReplacedWeight(Tensor):
    """A replacement of a floating-point tensor, for the functions of `uses` alone."""

    uses: ClassVar[Mapping[Any, Callable[..., Any]]] = {}

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in cls.uses:
            return cls.uses[function](*args, **kwargs or {})
        if function in (Tensor.view_as, Tensor.detach):  # as layers that are cut over ranks look at it
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{function} of a {cls.__name__}: only the layer whose weight it is can use it")


class PackedWeight(ReplacedWeight):
    """A float32 matrix (outputs, inputs), packed for F.linear, which then gives a row the same bits in any number.

    It is packed in `parts` of so many outputs, or in one; the memory of `weight` may be let go part by part.
    `fewest_rows` was found for this number of `threads`.
    """

    parts: list[Tensor]
    at_once: int
    fewest_rows: int
    threads: int
    _is_param: bool

    @staticmethod
    def __new__(cls, weight: Tensor, at_once: int = sys.maxsize, let_go: bool = False) -> "PackedWeight":
        self = Tensor._make_wrapper_subclass(cls, tuple(weight.shape), dtype=weight.dtype, device=weight.device)
        self.parts, self.at_once = [], at_once
        for part in weight.detach().contiguous().split(at_once):
            self.parts.append(torch.ops.mkldnn._reorder_linear_weight(part, BLOCK))
            if let_go:
                forget(part)
        self.fewest_rows, self.threads = ROWS_OF_PRODUCTS, 0
        self._is_param = True  # as nn.Parameter(self) would do, which imports modules of PyTorch for seconds
        return self

    def plain(self) -> Tensor:
        """The values as an ordinary tensor, a copy."""
        return torch.cat([part.to_dense() for part in self.parts])


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x W' + b by the packed product."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= BLOCK:
        found = _padded(rows, weight, bias)
    else:
        found = torch.cat([_padded(block, weight, bias) for block in rows.split(BLOCK)])
    return found.view(*x.shape[:-1], found.shape[-1])


def embedding(indices: Tensor, weight: PackedWeight, *options: Any, **named: Any) -> Tensor:
    """Rows of the matrix, from the parts that have them. Options of F.embedding are of its gradients."""
    found = torch.empty(indices.numel(), weight.shape[1])
    places: dict[int, list[int]] = {}
    flat = indices.reshape(-1).tolist()
    for place, index in enumerate(flat):
        if not 0 <= index < weight.shape[0]:
            raise IndexError("index out of range in self")
        places.setdefault(index // weight.at_once, []).append(place)
    for number, own in places.items():
        found[own] = weight.parts[number].to_dense()[[flat[place] % weight.at_once for place in own]]
    return found.view(*indices.shape, weight.shape[1])


PackedWeight.uses = {F.linear: linear, F.embedding: embedding}


def _padded(rows: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    missing = ENOUGH[max(weight.fewest_rows, rows.shape[0])] - rows.shape[0]
    if not missing:
        return _multiply(rows, weight, bias)
    return _multiply(F.pad(rows, (0, 0, 0, missing)), weight, bias)[: len(rows)]


def _multiply(rows: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise
    if len(weight.parts) == 1:
        return multiply(rows, weight.parts[0], bias if bias is None else bias.contiguous(), "none", [], "")
    biases = [None] * len(weight.parts) if bias is None else bias.contiguous().split(weight.at_once)
    products = zip(weight.parts, biases, strict=True)
    return torch.cat([multiply(rows, part, own, "none", [], "") for part, own in products], -1)


def fewest_rows(weight: PackedWeight, biased: bool = True) -> int | None:
    """From which of `PACKED_ROWS` on this machine gives each row the same bits, without a bias and with one.

    None: from more than `ROWS_OF_PRODUCTS` on, or not at all.
    """
    row = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows = row.expand(BLOCK, -1).contiguous()
    found = 1
    for bias in (None, torch.ones(weight.shape[0])) if biased else (None,):
        expected, fewest = _multiply(rows, weight, bias)[0], BLOCK + 1
        for number in reversed(PACKED_ROWS):
            if not (_multiply(rows[:number], weight, bias) == expected).all():
                break
            fewest = number
        found = max(found, fewest)
    return found if found <= ROWS_OF_PRODUCTS else None


def pack_weights(stages: LocalStages) -> None:
    """Pack the float32 matrices of linear layers on CPUs, in place, where this machine then gives rows the same bits.

    The plain ones are let go, but for those that other layers use too; of embeddings' only large ones are. Of packed
    ones that are there it is found out again whether they can stay.
    """
    found = [(m, m._parameters.get("weight")) for m in stages.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    linear = [(m, weight) for m, weight in found if isinstance(m, nn.Linear) and _can_be_packed(weight)]
    weights = {id(weight) for _, weight in linear}
    tables = [
        (m, p)
        for m, p in found
        if isinstance(m, nn.Embedding) and m.max_norm is None and p is not None and id(p) in weights
        if p.nbytes > TABLE_BYTES
    ]
    biased = {weight.shape for module, weight in linear if module.bias is not None and weight is not None}
    looked_up = {id(weight) for _, weight in tables}
    fewest: dict[torch.Size, int | None] = {}

    def packed(weight: nn.Parameter, only_one: bool) -> nn.Parameter:
        at_once = OUTPUTS_AT_ONCE if id(weight) in looked_up else sys.maxsize
        mine = weight if isinstance(weight, PackedWeight) else PackedWeight(weight, at_once, only_one)
        if weight.shape not in fewest:
            fewest[weight.shape] = fewest_rows(mine, weight.shape in biased)
        rows = fewest[weight.shape]
        if rows is None:
            return nn.Parameter(mine.plain(), requires_grad=False) if only_one or mine is weight else weight
        mine.fewest_rows, mine.threads = rows, torch.get_num_threads()
        return cast("nn.Parameter", mine)

    exchange(stages, [(module, "weight") for module, _ in (*linear, *tables)], packed)


def _can_be_packed(weight: Tensor | None) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return isinstance(weight, PackedWeight)
    return weight is not None and weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.numel() > 0


def exchange(
    stages: LocalStages,
    names: Iterable[tuple[nn.Module, str]],
    instead: Callable[[nn.Parameter, bool], nn.Parameter],
) -> None:
    """Put other parameters `instead` of those of these names in these modules, which are let go if no other has them.

    Several places of one parameter get one other. `instead` takes whether nobody else needs its numbers, too.
    """
    places = [(module, name, before) for module, name in names if (before := module._parameters.get(name)) is not None]
    here = Counter(id(before) for _, _, before in places)
    everywhere = Counter(id(p) for module in stages.modules() for p in module._parameters.values())
    storages = Counter(p.data_ptr() for p in {*stages.parameters()} if type(p) is nn.Parameter)
    known: dict[int, nn.Parameter] = {}
    for module, name, before in places:
        if id(before) not in known:
            last = type(before) is nn.Parameter and here[id(before)] == everywhere[id(before)]
            after = known[id(before)] = instead(before, last and storages[before.data_ptr()] == 1)
            if last and after is not before:
                before.data = before.data.new_empty(0)  # now, so that there are never two of all
        module._parameters[name] = known[id(before)]
    for group in stages.together:
        group.parameters[:] = [
            (name, known[id(p)] if here[id(p)] and here[id(p)] == everywhere[id(p)] else p)
            for name, p in group.parameters
        ]


@cache
def rows_of_product(shape: torch.Size, dtype: torch.dtype, device: torch.device, threads: int) -> int | None:
    """The smallest of `MULTIPLES` of which any multiple of rows gives each row the same bits in PyTorch's product.

    The matrix is (outputs, inputs), or (experts, outputs, inputs), whose first expert is tried. None: of none of them.
    """
    generator = torch.Generator().manual_seed(0)
    row, weight = (torch.randn(n, generator=generator).to(device, dtype) for n in (shape[-1:], shape[-2:]))

    def product(number: int) -> Tensor:
        rows = row.expand(number, -1).contiguous()
        if len(shape) == 2:
            return F.linear(rows, weight)
        return grouped_linear(rows, weight[None], torch.tensor([number], device=device))

    expected, found = product(MOST_ROWS)[0], None
    for rows in reversed(MULTIPLES):
        few, many = range(rows, 8 * rows + 1, rows), (MOST_ROWS // 2 + rows, MOST_ROWS - rows, MOST_ROWS)
        if not all(bool((product(number) == expected).all()) for number in (*few, *many)):
            break
        found = rows
    return found


def row_multiple(stages: LocalStages) -> int:
    """The number of rows of which a step has to have a multiple, so that no row's bits depend on how many there are."""
    weights = [p for p in stages.parameters() if isinstance(p, PackedWeight)]
    if any(weight.threads != torch.get_num_threads() for weight in weights):
        pack_weights(stages)
    found = 1
    for path, module in stages.named_modules():
        for name, parameter in module._parameters.items():
            packed = isinstance(module, nn.Linear) and isinstance(parameter, PackedWeight)
            if parameter is None or parameter.dim() < 2 or packed or isinstance(module, nn.Embedding):
                continue
            rows: int | None = ROWS_OF_PRODUCTS
            if type(parameter) is nn.Parameter and parameter.numel():
                rows = rows_of_product(parameter.shape, parameter.dtype, parameter.device, torch.get_num_threads())
            if rows is None:
                rows = ROWS_OF_PRODUCTS
                warnings.warn(
                    f"products by {path}.{name} {tuple(parameter.shape)} give a row other last bits in other numbers "
                    "of rows on this processor: a text alone may differ from the same text in company, by rounding",
                    stacklevel=2,
                )
            found = max(found, rows)
    return found


class RowsApart(TorchFunctionMode):
    """Computes `INEXACT` functions of (N, T, ..) or (T, ..) for so few of T at once that none has other bits.

    On CPUs, whose vectors end where a thread's share does: on a GPU each number is computed alone.
    """

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in INEXACT or not args[0].is_cpu:
            return function(*args, **kwargs or {})
        x, others = args[0], args[1:]
        if isinstance(x, SpatialTensor):
            return x.like(_apart(x.local, lambda part: function(part, *others, **kwargs or {})))
        return _apart(x, lambda part: function(part, *others, **kwargs or {}))


def _apart(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    dim = 1 if x.dim() > 2 else 0
    width = x.numel() // max(1, x.shape[: dim + 1].numel())
    at_once = 1 if width % VECTOR or not width else max(1, ONE_THREAD // width)
    if x.shape[dim] <= at_once:
        return function(x)
    return torch.cat([function(part) for part in x.split(at_once, dim)], dim)


def rows_alike(stages: LocalStages) -> int:
    """Up to how many rows a step gives each row the same bits without `RowsApart`."""
    widths = [
        parameter.shape[0]
        for path, module in stages.named_modules()
        if isinstance(module, nn.Linear) and not path.endswith(LOGITS_LAYER)
        if (parameter := module._parameters.get("weight")) is not None
    ]
    halves = [m.head_dim // 2 for m in stages.modules() if isinstance(m, Attention) and m.rotary]
    mixed = any(isinstance(module, Router) for module in stages.modules())
    if mixed or any(width % VECTOR for width in widths + halves):
        return 0
    if all(width % (VECTOR * math.lcm(*range(1, torch.get_num_threads() + 1))) == 0 for width in widths):
        return sys.maxsize  # threads share rows in whole vectors, however many threads there are
    return ONE_THREAD // max(widths)
