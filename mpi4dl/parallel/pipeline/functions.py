"""Functions that a model's forward calls and torch.fx cannot look through: they stay whole, as layers do.

def forward(self, tokens):
    x = self.embed(tokens)
    mask = causal_mask(x)       # asks how large x is, and what it does follows from that: one call, made as it is
    for block in self.blocks: ...
"""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import base_types

HIDDEN = (Path(torch.__file__).parent, Path(__file__).parent)  # whose lines are none of a model's
NESTS = (tuple, list, dict, set, frozenset, slice, range)


@dataclass(frozen=True)
class Global:
    """A function by the module of Python that calls it, whose names are in `place`, and its name there."""

    module: str
    name: str
    function: Callable[..., Any] = field(compare=False)
    place: dict[str, Any] = field(compare=False, repr=False)


def culprit(error: BaseException, module: nn.Module) -> Global | None:
    """The function that the forward of `module` was in when it failed; None if it failed by itself."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    codes = list(_codes(error.__traceback__))
    if forward.__code__ not in codes:
        return None
    inside = codes[len(codes) - codes[::-1].index(forward.__code__) :]
    own = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    for code in inside:
        for name, found in own.items():
            if isinstance(found, FunctionType) and code in _layers(found):
                return Global(str(forward.__globals__.get("__name__")), name, found, forward.__globals__)
    return None


def _codes(trace: TracebackType | None) -> Iterator[CodeType]:
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _layers(function: Callable[..., Any]) -> Iterator[CodeType]:
    """The code of a function, and of those that it decorates."""
    seen: Callable[..., Any] | None = function
    while seen is not None:
        if isinstance(seen, FunctionType):
            yield seen.__code__
        seen = getattr(seen, "__wrapped__", None)


@contextmanager
def kept_whole(functions: Collection[Global], note: Callable[..., Any]) -> Iterator[None]:
    """Within this context, a call of these functions is `note(function, args, kwargs)`."""

    def instead(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: note(function, args, kwargs)

    with ExitStack() as stack:
        for each in functions:
            stack.enter_context(patch.dict(each.place, {each.name: instead(each.function)}))
        yield


def is_opaque(value: Any) -> bool:
    """Whether this is some object that a function is given, such as a configuration, in which fx need not look.

    One that has layers or tensors is none: whose they are must be known.
    """
    if isinstance(value, (*NESTS, *base_types, fx.Node, fx.Proxy, nn.Module)) or callable(value):
        return False
    return not any(isinstance(each, nn.Module | Tensor) for each in getattr(value, "__dict__", {}).values())


def reason_of(error: Exception) -> str:
    """What went wrong, and on which line of the model."""
    return f"{str(error) or type(error).__name__}{line_of(traceback.extract_tb(error.__traceback__))}"


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line of a model's own among these, in words."""
    own = [frame for frame in frames if not set(HIDDEN) & set(Path(frame.filename).parents)]
    return f" (line {own[-1].lineno} of {Path(own[-1].filename).name}: `{own[-1].line}`)" if own else ""
