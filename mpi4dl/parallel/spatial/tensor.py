"""`SpatialTensor`: this rank's part of a tensor, which models use as if it were the whole.

It works above autograd, at the level of `__torch_function__`: each function that a model calls has a rule in a table.
The rule exchanges data where it must, and calls plain PyTorch on this rank's part. A function without a rule raises
`NoRule`. Its `shape` is the shape of the whole.

      model:   y = F.conv2d(x, weight)          x is a SpatialTensor: shape of the whole, a Layout, a local part
                       |
      rule:    fetch the halo, convolve the local part, wrap the result in the output's Layout
                       |
      autograd sees only plain tensors and linear maps between ranks (mpi4dl.comm.exchange, .exchange)
"""

import functools
import inspect
import operator
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from mpi4dl._compiler import PART
from mpi4dl.comm.exchange import forward_pass, narrow
from mpi4dl.geometry import Tiling
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo_prefetch import HaloSource

# The shared record of tensors that share memory: these tensors, and the copies that PyTorch would have made views.
#
# A view of pixels that other ranks hold, or of all pixels in one dim, is a copy here. A write to one of the two would
# then have to reach the other:
#
#       x = spread              y = x.flatten(2)        gathered, so y is a copy
#       y.add_(1)               found when x is used next: PyTorch counts the writes to y's memory
#       x.add_(1)               refused, as long as y is there; so is a write to a copy that is spread itself

WRITTEN_COPY = "a view of it that is a copy on tiles, as a reshape that merges pixels, was written in place"
WRITING_COPY = "it would write in place to a copy, where PyTorch would make a view of another tensor"
WRITING_COPIED = "it would write in place to a tensor of which a copy is in use, where PyTorch would have made a view"

IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv div floordiv mod pow and or xor lshift rshift".split()}
NOT_IN_PLACE = {"requires_grad_"}
MAY_COPY = {torch.reshape, torch.flatten, *(getattr(Tensor, name) for name in "reshape flatten contiguous".split())}
SEVERAL = (tuple, list)


class Copy(NamedTuple):
    """A copy of a memory: its storage, and a counter of writes to it, if it is a plain tensor."""

    storage: StorageWeakRef
    counter: Tensor | None
    writes: int


class Memory:
    """The memory of one tensor and all its views on this rank."""

    def __init__(self) -> None:
        self.source: Memory | None = None
        self.is_written = False
        self.tensors: list[Callable[[], Any]] = []
        self.copies: list[Copy] = []

    def add_copy(self, copy: Tensor, memory: "Memory | None" = None) -> None:
        """Take note of a copy: nobody may write to one that is spread, which has a `memory`. Writes to a plain one are
        counted by PyTorch.
        """
        counter = None
        if memory is not None:
            memory.source = self
        else:
            counter = copy.detach()
            counter.data = counter.new_empty(0)  # keeps counting, without keeping the storage
        known = Copy(StorageWeakRef(copy.untyped_storage()), counter, 0 if counter is None else counter._version)
        of: Memory | None = self
        while of is not None:  # a copy of a copy is one of both
            of.copies.append(known)
            of = of.source

    def problem_of_reading(self) -> str:
        if any(copy.counter is not None and copy.counter._version != copy.writes for copy in self.copies):
            return WRITTEN_COPY
        return ""

    def problem_of_writing(self) -> str:
        if self.source is not None:
            return WRITING_COPY
        self.copies = [copy for copy in self.copies if not copy.storage.expired()]
        return WRITING_COPIED if self.copies else ""


def writes(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function writes to its first argument: `x.add_(1)`, `x += 1`, `x[0] = 1`, `F.relu(x, inplace=True)`."""
    return _writes_by_name(function) or (bool(options) and options.get("inplace") is True)


@cache
def _writes_by_name(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    by_name = (name.endswith("_") and not name.endswith("__") and name not in NOT_IN_PLACE) or name in IN_PLACE
    return by_name or name == "__setitem__"


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


def order_in_memory(local: Tensor) -> list[int]:
    """The dims of a tensor, the outermost first. A dim of one entry has the stride of the one that it is within."""
    strides = local.stride()
    return sorted(range(local.dim()), key=lambda dim: (-strides[dim], local.shape[dim] <= 1, dim))


def countable(x: Tensor) -> Tensor:
    """x, or a clone of it where PyTorch would not count the writes to it."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


Rule = Callable[..., Any]
RuleT = TypeVar("RuleT", bound=Rule)

_rules: dict[Any, Rule] = {}
_own_rules: set[Any] = set()  # the functions that were registered by this name
_of_flat: set[Any] = set()  # the functions whose rules know of flat dims
_fallbacks: list[Callable[[Any], Rule | None]] = []
open_flat_dims: list[Callable[[Any], Tensor]] = []  # set by `halo`: a tensor with its flat dims gathered
without_rule: list[Callable[..., Any]] = []  # set by `gathering`: computes a function whole, where it has no rule
# Set by `own_loop`: it may refuse a call, or tell what is called instead.
guards: list[Callable[[Any, Sequence[Any], dict[str, Any]], Callable[[], Any] | None]] = []
substitutes: list[Callable[..., Any]] = []  # the last one is called with a function, its rule, and their arguments

# Other names that PyTorch has for its functions, and those by which rules know them.
ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "fix": "trunc", "ger": "outer", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "moveaxis": "movedim", "multiply": "mul", "negative": "neg", "not_equal": "ne", "row_stack": "vstack",
    "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "true_divide": "div", "expit": "sigmoid",
    "psi": "digamma", "gammaln": "lgamma", "gammainc": "igamma", "gammaincc": "igammac",
    "erf": "erf", "erfc": "erfc", "erfinv": "erfinv", "exp2": "exp2", "expm1": "expm1", "log1p": "log1p",
    "log_softmax": "log_softmax", "logit": "logit", "logsumexp": "logsumexp", "round": "round", "sinc": "sinc",
    "softmax": "softmax", "xlogy": "xlogy", "i0": "i0", "polygamma": "polygamma", "mvlgamma": "mvlgamma",
    "multigammaln": "mvlgamma", "matmul": "matmul",
}  # fmt: skip

NOT_DIFFERENTIATED = (
    "the gradient of torch.utils.checkpoint with use_reentrant=True, of a function in C++ or with keyword arguments, "
    "would not reach the local tensors behind it (checkpoint with use_reentrant=False)"
)


class NoRule(NotImplementedError):
    """A model called a function that has no rule for tensors that are spread over ranks."""


@functools.lru_cache(maxsize=1024)
def numbers_on(device: torch.device, numbers: tuple[Any, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """These numbers on a device, which nobody writes to: uploaded once, not in every step."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def register(*functions: Any, flat: bool = False) -> Callable[[RuleT], RuleT]:
    """Make the decorated function the rule of these PyTorch functions on a `SpatialTensor`.

    The rule takes the function's own arguments, some of which are SpatialTensors, and returns its results: a
    SpatialTensor made by `wrap(local, layout)`, or a plain tensor if every rank holds the whole of it. It must compute
    what PyTorch computes on the whole image, and its exchanges must be differentiable.

    A rule that knows nothing of flat dims (`Layout.flat`) gets tensors that have some with these dims gathered.

    Functions that PyTorch has under several names (`ALIASES`) have the same rule under each, unless one has its own.
    """

    def add(rule: RuleT) -> RuleT:
        for function in functions:
            for alias in aliases_of(function):
                if alias not in _own_rules:
                    _add(alias, rule, flat)
            _own_rules.add(function)
            _add(function, rule, flat)
        find_rule.cache_clear()
        return rule

    return add


def _add(function: Any, rule: Rule, flat: bool) -> None:
    _rules[function] = _of_spread_first(rule, function)
    (_of_flat.add if flat else _of_flat.discard)(function)


def aliases_of(function: Any) -> Iterator[Any]:
    """The same function under its other names in torch, torch.special, torch.linalg and Tensor."""
    name = getattr(function, "__name__", "")
    suffix = "_" * (name.endswith("_") and not name.endswith("__"))
    base = name.removesuffix(suffix).removeprefix("special_").removeprefix("linalg_")
    of_tensor = getattr(Tensor, name, None) is function
    for place in (Tensor,) if of_tensor else (torch, torch.special, torch.linalg):
        for alias in (alias for alias, known in ALIASES.items() if known == base):
            found = getattr(place, f"{alias}{suffix}", None)
            if found is not None and found is not function:
                yield found


def _of_spread_first(rule: Rule, function: Any) -> Rule:
    """The rule; if it says that its first argument is a SpatialTensor, a plain one there is refused."""
    first = next(iter(inspect.signature(rule).parameters.values()), None)
    if first is None or first.annotation is not SpatialTensor:
        return rule

    @functools.wraps(rule)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0] if args else kwargs.get(first.name), SpatialTensor):
            raise refusal(function_name(function), "its first argument is a plain tensor, but another one is spread")
        return rule(*args, **kwargs)

    return checked


def register_fallback(choose: Callable[[Any], Rule | None]) -> None:
    """Ask `choose` for the rule of a function that was not registered."""
    _fallbacks.append(choose)


def named(*names: str) -> list[Any]:
    """All of PyTorch's functions of these names: torch.name, Tensor.name, torch.nn.functional.name, and the like."""
    places = (torch, Tensor, nn.functional, torch.special, torch.linalg)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


def is_registered(function: Any) -> bool:
    """Whether a function has a rule of its own."""
    return function in _rules


@functools.cache
def find_rule(function: Any) -> Rule | None:
    if function in _rules:
        return _rules[function]
    return next((rule for choose in _fallbacks if (rule := choose(function)) is not None), None)


class GatheredWarning(UserWarning):
    """A tensor that tiles would share was gathered on every rank."""


class SpatialTensor(Tensor):
    """A tensor whose height and width (and batch) are spread over the ranks of a grid.

    `x.shape` is the shape of the whole, `x.local` this rank's part of it, `x.layout` where that part lies. Make one
    with `shard` or `from_tile`, and the whole of one with `gather`. Its views share its `memory`. `retained` is the
    gradient of the whole, spread in the same way, once backward has found it after `retain_grad`. `halo_sources` are
    the norms that it was made of and that may be asked to hold more. `gathered` is what `sums` gathered of it.
    `made_by` is the call that made a view, see `of_whole`. `parameter` is the part of a parameter that it shows whole.
    """

    # Asked for several times in every rule: they do not go through the table of rules, and never change.
    shape: torch.Size = torch.Size()
    layout: Layout = None  # type: ignore[assignment]
    _local: Tensor | None
    _first_look: Callable[[], None] | None = None
    _memory: Memory | None = None
    retained: "Tensor | None" = None
    made_in: Any = None  # the forward pass of a model in a user's own loop, see `own_loop`
    output: Tensor | None = None  # what it is outside of the model, if somebody keeps it
    gathered: Any = None
    parameter: nn.Parameter | None = None
    halo_sources: tuple[HaloSource, ...] = ()
    made_by: tuple[Any, ...] | None = None
    _of_whole: Tensor | None = None

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, promised: bool | None = None) -> "SpatialTensor":
        if PART in sys.modules:
            _run_eagerly()
        if not layout.settled:
            layout = layout.grid.intern(layout)
        shape = layout.shapes[local.shape]
        # requires_grad lets a wrapper notice that a custom autograd.Function took it: see `local` and the hook.
        requires_grad = local.requires_grad if promised is None else promised
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self._local = local if promised is None else None
        self.shape, self.layout, self.made_in = shape, layout, forward_pass.get()
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self._backward_hooks = _REFUSING  # type: ignore[assignment]
        return self

    @classmethod
    def promise(cls, like: Tensor, layout: Layout, requires_grad: bool) -> "SpatialTensor":
        """A tensor whose local part, of the kind of `like`, is to come by `fulfil`, at the latest at the first look."""
        return cls(like, layout, requires_grad)

    @property
    def kept(self) -> bool:
        """Whether somebody keeps it beside what a model returned."""
        return self.made_in is not None and self.made_in is not forward_pass.get()

    @property
    def memory(self) -> Memory:
        """The memory that it shares with its views."""
        if self._memory is None:
            self._memory = Memory()
            self._memory.tensors.append(weakref.ref(self))
        return self._memory

    def fulfil(self, local: Tensor) -> None:
        """Give a tensor that was promised its local part."""
        self._local, self._first_look = local, None

    def before_first_look(self, act: Callable[[], None]) -> None:
        """Call `act()` when somebody asks for the local part for the first time."""
        self._first_look = act

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor: what it owns, and the halo that it holds.

        All ranks ask for it at the same point, or none: it may take a message to compute it.
        """
        if self._first_look is not None:
            act, self._first_look = self._first_look, None
            act()
        with torch._C.DisableTorchFunctionSubclass():
            escaped = self.grad_fn is not None
        if escaped:
            raise refusal("torch.autograd.Function", NOT_DIFFERENTIATED)
        memory = self._memory
        if memory is not None and memory.copies and (problem := memory.problem_of_reading()):
            raise refusal("a tensor", problem)
        assert self._local is not None
        return self._local

    def dim(self) -> int:
        return len(self.shape)

    def like(self, local: Tensor) -> "SpatialTensor":
        """A tensor of the same layout whose part on this rank is `local`."""
        return SpatialTensor(local, self.layout)

    def hold_less(self, tiling: Tiling) -> None:
        """Forget what is held beyond `tiling`, of the same cuts, in all views of this memory: it is to be written to
        where that is held alone.
        """
        self.layout.grid.halo_prefetch.flush()
        for known in self.memory.tensors:
            x = known()
            if x is not None and x._local is not None:
                splits = [
                    wanted if split.cuts == wanted.cuts else split.narrow()
                    for split, wanted in zip(x.layout.tiling.splits, tiling.splits, strict=True)
                ]
                less = replace(x.layout, tiling=Tiling(tuple(splits)))
                x._local, x.layout = narrow(x._local, less.dims, x.layout.held, less.held), less

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"SpatialTensor(shape={tuple(self.shape)}, held={self.layout.held}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "SpatialTensor":
        return SpatialTensor(self.local.detach().clone(), self.layout)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule, options = find_rule(function) or functools.partial(_refuse, function), kwargs or {}
        if guards and (instead := guards[0](function, args, options)) is not None:
            return instead()
        if Layout.any_flat and function in _rules and function not in _of_flat:
            args, options, spread = _without_flat_dims(function, args, options)
            if not spread:
                return function(*args, **options)
        if substitutes:
            rule = functools.partial(substitutes[-1], function, rule)
        if "out" in options:
            if options["out"] is not None:
                raise refusal(function_name(function), "it was given out=")
            options = {name: value for name, value in options.items() if name != "out"}
        try:
            if _writes_by_name(function) or options.get("inplace") is True:
                return _write(function, rule, args, options)
            result = rule(*args, **options)
        except NoRule as refused:
            if not (without_rule and _may_gather(function, args, options)):
                raise
            return without_rule[0](function, args, options, refused)
        if type(result) is SpatialTensor or isinstance(result, SEVERAL):
            return _share_memory(function, result, args, options)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:  # by which autograd gives back what checkpoints had saved
            x: SpatialTensor = args[0]
            assert x._local is not None
            back = SpatialTensor(x._local.detach().requires_grad_(x._local.requires_grad), x.layout)
            back.before_first_look(functools.partial(_require_gradients_like, weakref.ref(back)))
            return back
        raise refusal(str(function))


def _require_gradients_like(given_back: "weakref.ref[SpatialTensor]") -> None:
    """Make the local part of a tensor that autograd gave back need a gradient if the tensor itself does.

    A checkpoint within a checkpoint saves a tensor without its need of one, and autograd restores that on the whole.
    """
    x = given_back()
    assert x is not None
    assert x._local is not None
    with torch._C.DisableTorchFunctionSubclass():
        x._local.requires_grad_(x.requires_grad)


_script = torch.jit.ScriptFunction.__call__


def _run_script(script: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch.jit.script. With tensors that are spread it runs as the Python that it was made of: as
    compiled, it would pass their rules by.
    """
    if not any(isinstance(x, SpatialTensor) for x in (*args, *kwargs.values())):
        return _script(script, *args, **kwargs)
    python = getattr(script, "_torchdynamo_inline", None)
    if python is None:
        raise refusal(script.name, "it is compiled by torch.jit.script")
    return python(*args, **kwargs)


torch.jit.ScriptFunction.__call__ = _run_script  # type: ignore

_ENTRY = SpatialTensor.__dict__["__torch_function__"].__func__.__code__
HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # whose lines are none of a model's


def tell_gathered(x: SpatialTensor, num_bytes: int) -> None:
    """Warn, on rank 0 of the grid and once for each line of a model, that its operator has so much more on every rank.

    Gathers outside of operators, by the engine or by users themselves, give no warning.
    """
    if x.layout.grid.rank != 0:
        return
    function = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENTRY:
            function = frame.f_locals["function"]
        elif function is not None and not frame.f_code.co_filename.startswith(HIDDEN):
            break
        frame = frame.f_back  # type: ignore[assignment]
    if function is None or frame is None:
        return
    module = calling_module()
    warnings.warn_explicit(
        f"{function_name(function)}{f' in module {module}' if module else ''} gathers a tensor of shape "
        f"{tuple(x.shape)}: {num_bytes:,} more bytes on every rank, which tiles do not save. The result is exact",
        GatheredWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


@functools.cache
def _run_eagerly() -> None:
    """Keep `torch.compile` from tracing rules, also in backward passes: a compiled model runs them as they are.

    It is done for tensors that are spread once there is a compiler, since importing one takes a second.
    """
    torch._dynamo.trace_rules.add("mpi4dl")


def in_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, of: Callable[[Tensor], Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function of PyTorch's, whose tensors may stand in lists, with `of` each tensor."""

    def each(x: Any) -> Any:
        if isinstance(x, Tensor):
            return of(x)
        if not isinstance(x, SEVERAL):
            return x
        found = [each(one) for one in x]
        if all(map(operator.is_, found, x)):
            return x
        return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)

    found = [of(x) if isinstance(x, Tensor) else each(x) if isinstance(x, SEVERAL) else x for x in args]
    return found, {name: each(x) for name, x in kwargs.items()} if kwargs else {}


def _without_flat_dims(
    function: Any, args: Sequence[Any], options: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], bool]:
    """The arguments, with the flat dims of tensors gathered, and whether one of them is still spread."""
    target, spread = args[0] if args else None, False
    if isinstance(target, SpatialTensor) and target.layout.flat and writes(function, options):
        raise refusal(function_name(function), "it writes to a tensor in which several axes are one dim")

    def opened(x: Tensor) -> Tensor:
        nonlocal spread
        if isinstance(x, SpatialTensor) and x.layout.flat:
            x = copied(open_flat_dims[0](x), x)
        spread = spread or isinstance(x, SpatialTensor)
        return x

    return *in_arguments(args, options, opened), spread


def _share_memory(function: Any, result: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Let results and what they were made of, the first spread argument, know each other where they are its views.

    Returns the results: a copy where PyTorch copies the whole, but the rule made a view of this rank's part.
    """
    for source in args:
        if isinstance(source, SpatialTensor):
            break
    else:
        return result
    for place, view in enumerate((result,) if type(result) is SpatialTensor else result):
        if not isinstance(view, SpatialTensor) or view._local is None or source._local is None:
            continue  # what is promised has new memory
        if view is source or view._memory is None or view._memory is not source._memory:
            if view._local is not source._local and not torch._C._is_alias_of(view._local, source._local):  # type: ignore[attr-defined]
                continue
            if function in MAY_COPY and _copies_whole(function, source, args, options):
                return view.like(view._local.clone(memory_format=options.get("memory_format", torch.contiguous_format)))
            if view is source:
                continue
            view._memory = source.memory
            view._memory.tensors.append(weakref.ref(view))
        if view.made_by is None:
            view.made_by = function, args, options, None if view is result else place
    return result


def of_whole(x: SpatialTensor) -> Tensor:
    """A tensor without values that lies in memory as PyTorch's whole does: what is a view of that, and what a copy.

    The part of a rank does not tell. Behind x[:, :, 2:], the part of a rank that has none of the rows 0 and 1 is
    contiguous, and so is one row behind x.mT.
    """
    if x._of_whole is None and x.made_by is not None:
        function, args, options, place = x.made_by
        args, options = in_arguments(args, options, lambda x: of_whole(x) if isinstance(x, SpatialTensor) else x)
        try:
            found = function(*args, **options)
            x._of_whole = found if place is None else found[place]
        except RuntimeError:  # without values there is no such call, as of x.to("cpu"), or of the whole no such view
            x._of_whole = args[0] if args[0].shape == x.shape else None
    if x._of_whole is None:
        x._of_whole = torch.empty_permuted(x.shape, order_in_memory(x.local), dtype=x.dtype, device="meta")
    x.made_by = None
    return x._of_whole


def _copies_whole(function: Any, x: SpatialTensor, args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether a function that copies if it must copies the whole of x, of which this rank's part needs no copy."""
    thin = any(held <= 1 < n for held, n in zip(x.local.shape, x.shape, strict=True))
    if not thin and x.made_by is None and x._of_whole is None:
        return False
    whole = of_whole(x)
    return not same_memory(function(whole, *args[1:], **options), whole)


def _write(function: Any, rule: Rule, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call what writes to its first argument, unless that is a copy or has one."""
    target = args[0] if args else options.get("input")
    if not isinstance(target, SpatialTensor):
        return rule(*args, **options)
    if problem := target.memory.problem_of_writing():
        raise refusal(function_name(function), problem)
    target.layout.grid.halo_prefetch.flush()  # norms that wait may be of what is written
    target.memory.is_written = True
    result = rule(*args, **options)
    # Written values may have a gradient: from now on all views notice if a custom function takes them.
    with torch._C.DisableTorchFunctionSubclass():
        for known in target.memory.tensors:
            x = known()
            if x is not None and x._local is not None and x._local.requires_grad and not x.requires_grad:
                x.requires_grad_()._backward_hooks = _REFUSING
    return result


def copied(copy: Tensor, source: SpatialTensor) -> Tensor:
    """`copy`, of which PyTorch would have made a view of `source`: writes to either of them are not lost in silence."""
    if isinstance(copy, SpatialTensor):
        source.memory.add_copy(copy.local, copy.memory)
    else:
        copy = countable(copy)
        source.memory.add_copy(copy)
    return copy


def _refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
    raise refusal(function_name(function))


def _refuse_gradient(gradient: Tensor) -> None:
    raise refusal("torch.autograd.Function", NOT_DIFFERENTIATED)


_REFUSING = OrderedDict({0: _refuse_gradient})  # hooked to leaves as `register_hook` does, without a handle


TO_VALUES = (Tensor.numpy, Tensor.tolist, Tensor.__array__)


def _may_gather(function: Any, args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether each rank holds all of each operand, since no axis of it is cut: any operator is exact on these.

    Or whether operands, such as gradients that hooks see, are whole to a user, outside of a model in a loop; values of
    maps, which forward hooks keep, within it.
    """
    spread = [x for x in pytree.tree_leaves((tuple(args), options)) if isinstance(x, SpatialTensor)]
    is_outside = forward_pass.get() is None or function in TO_VALUES
    of_user = is_outside and all(x.layout.grid.loop == "whole" and not x.requires_grad for x in spread)
    layouts = [x.layout for x in spread]
    is_cut = any(
        dim is not None and each.grid.shape[axis] > 1 for each in layouts for axis, dim in enumerate(each.dims)
    )
    return bool(spread) and (of_user or not is_cut)


def wrap(local: Tensor, layout: Layout) -> Tensor:
    """`local` as this rank's part of a tensor; a plain tensor where each rank holds all of it."""
    return local if layout.whole else SpatialTensor(local, layout)


def halo_sources_of(operands: Iterable[Any]) -> tuple[HaloSource, ...]:
    """Whom to ask so that what is made of these pixels can hold more: somebody for each of them, or nobody."""
    found = [x.halo_sources for x in operands if isinstance(x, SpatialTensor)]
    if len(found) == 1:
        return found[0]
    return tuple(dict.fromkeys(halo_source for each in found for halo_source in each)) if all(found) else ()


def with_halo_sources(result: Any, halo_sources: tuple[HaloSource, ...]) -> Any:
    """`result`, which these were asked to let hold more."""
    if isinstance(result, SpatialTensor):
        result.halo_sources = halo_sources
    return result


def local_part(x: Tensor) -> Tensor:
    """This rank's part of x: all of a plain tensor."""
    return x.local if isinstance(x, SpatialTensor) else x


def owned(x: SpatialTensor) -> Tensor:
    """The part of x that this rank owns, without held halos."""
    layout = x.layout
    return narrow(x.local, layout.dims, layout.held, layout.owned)


def place_of(dim: int, ndim: int) -> int:
    """A dim of a tensor of `ndim` dims as a number that is not negative. Raises IndexError if there is no such dim."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % max(ndim, 1)


def function_name(function: Any) -> str:
    """A function's name as a user would write it."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(function.__self__, '__name__', '?')}"
    short = name.removeprefix("linalg_").removeprefix("special_")
    for place in (nn.functional, torch.linalg, torch.special, torch.autograd):
        if getattr(place, short, None) is function:
            return f"{place.__name__}.{short}"
    return f"torch.{name}" if getattr(torch, name, None) is function else f"Tensor.{name}"


def refusal(function: str, why: str = "") -> NoRule:
    """The error for something that cannot be done on tiles: the operator, the module that called it, and ways out."""
    module = calling_module()
    where = f" in module {module}" if module else ""
    return NoRule(
        f"{function}{where} has no exact rule for a tensor whose image is spread over ranks"
        f"{f': {why}' if why else ''}. Either gather first (y = spatial.gather(x), then every rank computes it whole), "
        f"teach it with spatial.register({function}), or let it be gathered, computed whole and cut again within "
        "spatial.gathering(), at the memory of the whole (`no_rule` gather)."
    )


def calling_module() -> str:
    """The path of the innermost module whose forward is running, found on the stack: "layer1.0.conv1 (Conv2d)"."""
    modules: list[nn.Module] = []
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, nn.Module) and (not modules or modules[-1] is not candidate):
            modules.append(candidate)
        frame = frame.f_back  # type: ignore[assignment]
    if not modules:
        return ""
    innermost, root = modules[0], modules[-1]
    path = next((name for name, module in root.named_modules() if module is innermost), "")
    return f"{path} ({type(innermost).__name__})" if path else type(innermost).__name__
