"""PyTorch's compiler, `torch._dynamo`, imported when something is compiled, and not before.

Every optimizer imports it, to say in its constructor and in each step that the compiler is to leave it alone. That
takes two CPU seconds and 70 MiB in each process (PyTorch 2.13), which nobody uses where nothing is compiled.

    import torch._dynamo                   finds a stand-in in sys.modules
    torch._dynamo.graph_break()            does nothing
    torch._dynamo.disable(function)        a function that tells the compiler later, if there is to be one
    torch._dynamo.<anything else>          imports the compiler, which takes the place of the stand-in
"""

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

NAME = "torch._dynamo"
PART = f"{NAME}.eval_frame"  # what the compiler imports, and the stand-in has not


def defer_compiler() -> None:
    """Let every import of the compiler find a stand-in from now on, unless the compiler is there already."""
    sys.modules.setdefault(NAME, _StandIn(NAME))


class _StandIn(ModuleType):
    """What is in the compiler's place until somebody needs more than this."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._disabled: weakref.WeakSet[_Disabled] = weakref.WeakSet()

    def __getattr__(self, name: str) -> Any:
        # Who goes through all modules asks for these; only who imports a part of it asks for the path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._give_way(), name)

    def graph_break(self, msg: str = "") -> None:
        pass

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(fn, FunctionType):
            return self._give_way().disable(fn, *args, **options)
        disabled = _Disabled(fn, args, options)
        self._disabled.add(disabled)

        @functools.wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            return disabled.call(*given, **named)

        return call

    def _give_way(self) -> Any:
        """Import the compiler, and tell it of what it is to leave alone."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            try:
                importlib.import_module(NAME)
            except BaseException:
                sys.modules[NAME] = self
                raise
        compiler: Any = sys.modules[NAME]
        for each in self._disabled:
            each.call = compiler.disable(each.function, *each.args, **each.options)
        self._disabled.clear()
        return compiler


class _Disabled:
    """A function that is not to be compiled; `call` does what it does."""

    def __init__(self, function: Callable[..., Any], args: Any, options: Any) -> None:
        self.function, self.args, self.options = function, args, options
        self.call = function
