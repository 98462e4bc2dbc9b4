"""Metrics over ranks: each adds what it has of the outputs, and what all added comes together on rank 0, in float64.

A metric is an object with `update(predictions, targets)` and `compute()`, such as those of torchmetrics. Where several
ranks add to one, it has `merge_state(other)` too.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.spatial import Grid
from mpi4dl.parallel.spatial.sums import owned

Value = float | list[Any]
NO_CLASS = -(1 << 62)  # in a mask of int64: the outputs of this pixel are not numbers


def maker_of(name: str, metric: Any) -> Callable[[], Any]:
    """A factory of a fresh metric: of a class, of an object that is one, or of a function of all predictions and
    targets.

    Raises Refusal for anything else.
    """
    if isinstance(metric, type | functools.partial):
        return metric
    if callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None)):
        return functools.partial(copy.deepcopy, metric)
    if callable(metric):
        return functools.partial(OfAll, metric)
    raise Refusal(
        f"`metrics` has {name}, a {type(metric).__name__}, but a metric is an object with update(predictions, targets) "
        "and compute(), a class of such, or a function of predictions and targets"
    )


class OfAll:
    """A metric that is a function of all predictions and targets, which it keeps."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.seen: list[tuple[Any, Any]] = []

    def update(self, predictions: Any, targets: Any) -> None:
        self.seen.append((predictions, targets))

    def merge_state(self, other: "OfAll") -> None:
        self.seen += other.seen

    def compute(self) -> Any:
        return self.function(*joined(self.seen))


def joined(parts: Sequence[Any]) -> Any:
    """Trees of tensors (n, ...), one tree with these behind each other."""
    return pytree.tree_map(lambda *x: torch.cat(x) if isinstance(x[0], Tensor) else x[0], *parts)


class InDouble(TorchFunctionMode):
    """Within it PyTorch computes in float64 where it would go to float32 from integers, float64, or Python's numbers.

    So metrics that divide counts as float32 have all digits.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)
        if not _single(result) or _single((args, options)):
            return result
        if func is Tensor.float:
            return args[0].double()

        def wide(x: Any) -> Any:
            whole_numbers = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
            return x.double() if whole_numbers else torch.float64 if x is torch.float32 else x

        try:
            given, named = pytree.tree_map(wide, (tuple(args), options))
            found = func(*given, **named)
            if _single(found):
                found = func(*given, **named | {"dtype": torch.float64})
            return found
        except (TypeError, RuntimeError, IndexError):
            return pytree.tree_map(lambda x: x.double() if _single(x) else x, result)


def is_undefined(x: Any) -> bool:
    """Whether some of a prediction is not a number, or no class because outputs were none."""
    if not isinstance(x, Tensor) or not x.numel():
        return False
    return bool(x.isnan().any()) if x.is_floating_point() else x.dtype == torch.int64 and int(x.min()) == NO_CLASS


def _single(values: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype is torch.float32 for x in pytree.tree_leaves(values))


@contextmanager
def _in_double() -> Iterator[None]:
    """Metrics warn of missing classes; their values show it."""
    with InDouble(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class Measures:
    """Metrics, by name, of outputs as they come: `update` on ranks that have them, then `values` on all.

    `measured(outputs, targets)` is what metrics compare with targets. Metrics are made where they are needed.
    """

    def __init__(self, metrics: Mapping[str, Any], measured: Callable[[Any, Any], Any]) -> None:
        self.makers = {name: maker_of(name, metric) for name, metric in metrics.items()}
        self.measured = measured
        self.own: dict[str, Any] | None = None
        self.undefined = False
        self.error: Exception | None = None

    def update(self, grid: Grid, outputs: Any, targets: Any) -> None:
        """Add a microbatch, of which every rank of this grid has outputs. Collective over the grid."""
        predictions = self.measured(outputs, targets)
        if not self.makers:
            return
        part = owned(predictions, grid) if isinstance(predictions, Tensor) else None
        if self.error is not None or (grid.rank if part is None else not part.counts):
            return
        try:  # all ranks learn of an error here at the end
            if part is not None and part.dense:
                predictions, targets = part.values, part.of_targets(targets)
                self._require_parts()
                if not predictions.numel():
                    return
            self._add(*pytree.tree_map(_on_host, (predictions, targets)))
        except Exception as error:
            self.error = error

    def _require_parts(self) -> None:
        for name, maker in self.makers.items():
            if isinstance(maker, functools.partial) and maker.func is OfAll:
                raise Refusal(
                    f"`metrics` has {name}, a function of all predictions at once, but these are tiles on several "
                    "ranks: write an object with update(predictions, targets), merge_state(other) and compute()"
                )

    @torch.no_grad()
    def _add(self, predictions: Any, targets: Any) -> None:
        if self.own is None:
            self.own = self._made()
        self.undefined = self.undefined or any(map(is_undefined, pytree.tree_leaves(predictions)))
        if not self.undefined:
            with _in_double():
                for metric in self.own.values():
                    metric.update(predictions, targets)

    def _made(self) -> dict[str, Any]:
        with InDouble():
            made = {name: make() for name, make in self.makers.items()}
        for metric in made.values():
            if isinstance(metric, torch.nn.Module):  # as torchmetrics' are
                metric.set_dtype(torch.float64)  # type: ignore[operator]
                for module in metric.modules():
                    module.sync_on_compute = False  # type: ignore[assignment]  # of torch.distributed
        return made

    def values(self, comm: Communicator) -> dict[str, Value]:
        """Each metric over all that was added on any rank of `comm`: the same on all. NaN if that was nothing.

        NaN too if a prediction was not a number. Raises Refusal, or what a metric raised, on all ranks. Collective.
        """
        if not self.makers:
            return {}
        with comm.together((ValueError, TypeError, AttributeError, ImportError)):
            if self.error is not None:
                raise self.error
        has, undefined = zip(*comm.all_gather_object((self.own is not None, self.undefined)), strict=True)
        nothing: dict[str, Value] = dict.fromkeys(self.makers, math.nan)
        if any(undefined) or not any(has):
            return nothing
        sending = comm.isend_object(self.own, 0) if comm.rank and self.own is not None else None
        found: dict[str, Value] = {}
        with comm.together((ValueError, TypeError, AttributeError, RuntimeError)):
            if comm.rank == 0:
                others = [comm.recv_object(rank) for rank, one in enumerate(has) if one and rank]
                found = self._computed([self.own, *others] if has[0] else others)
        if sending is not None:
            sending.wait()
        return comm.broadcast_object(found)

    @torch.no_grad()
    def _computed(self, parts: Sequence[Any]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        first, *others = parts
        with _in_double():
            for name, metric in first.items():
                for other in others:
                    if not callable(getattr(metric, "merge_state", None)):
                        raise Refusal(
                            f"`metrics` has {name}, to which several ranks added, but {type(metric).__name__} has no "
                            "merge_state(other), which adds up what two of them have seen"
                        )
                    metric.merge_state(other[name])
                found |= _plain(name, metric.compute())
        return found


def _on_host(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.double() if x.is_floating_point() else x).detach().cpu()


def _plain(name: str, value: Any) -> dict[str, Value]:
    """A metric's value in Python's numbers; several, by name, as NAME/KEY."""
    if isinstance(value, Mapping):
        return {key: number for each in value for key, number in _plain(f"{name}/{each}", value[each]).items()}
    if isinstance(value, tuple | list):
        return {name: [x for each in value for x in _plain("", each).values()]}
    found = value.tolist() if hasattr(value, "tolist") else value
    return {name: found if isinstance(found, list) else float(found)}


def measured_here(metrics: Mapping[str, Any], predictions: Any, targets: Any) -> dict[str, Value]:
    """Each metric of predictions and targets that this process has all of. NaN if a prediction is not a number."""
    measures = Measures(metrics, lambda outputs, _: outputs)
    measures._add(predictions, targets)
    return dict.fromkeys(metrics, math.nan) if measures.undefined else measures._computed([measures.own])
