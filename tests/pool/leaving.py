"""How a forked rank ends without taking apart what it had from before the fork.

The interpreter clears all modules when it ends, and PyTorch's libraries their tables of operators. In a fork each page
that this touches is copied first: a third of a second for what is thrown away. What the rank itself imported, opened
and registered ends as in any process.
"""

import atexit
import ctypes
import sys
import types
import weakref


def leave_all_behind() -> None:
    """From now on, and in forks of this process: do not tidy up what is there by now."""
    modules = {name: module for name, module in sys.modules.items() if name not in ("__main__", "builtins", "sys")}
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(hide, modules)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # is called with the exit code, before the destructors of libraries loaded by now


def hide(modules: dict[str, types.ModuleType]) -> None:
    """Take modules from the interpreter's sight, and never let go of them."""
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]
