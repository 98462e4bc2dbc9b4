"""Own parts of a run, such as my_code.py:build or package.module:Class: loaded by all ranks, blamed by their line.

    --model my_code.py:build          build(num_classes=2, **model_options) -> nn.Module
    --optimizer my_code.py:Lion       Lion(parameters, lr=0.1, **optimizer_options)

From Python the object itself may stand where the text does.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from mpi4dl._torchvision import prepare_torchvision
from mpi4dl.comm import Refusal
from mpi4dl.options.declare import ConfigError, nearest, saying
from mpi4dl.options.kinds import part_name


def is_own(part: Any) -> bool:
    """Whether this is no name of ours: an object, or text such as file.py:name or package.module:name."""
    if not isinstance(part, str):
        return True
    where, colon, name = part.rpartition(":")
    dotted = all(word.isidentifier() for word in where.split("."))
    return bool(colon) and name.isidentifier() and (where.endswith(".py") or dotted)


def load(option: str, part: Any) -> Any:
    """The object that a part names, or is. Raises ConfigError."""
    if not isinstance(part, str):
        return part
    where, _, name = part.rpartition(":")
    if not is_own(part):
        raise ConfigError(f"`{option}` {part} must be my_code.py:NAME or package.module:NAME")
    module = _module(option, part, where)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"`{option}` {part}: {where} has no {name}{nearest(name, known)}") from None


def file_of(part: Any) -> str | None:
    """The file that an own part is written in, by its whole path; None if there is none."""
    if isinstance(part, str):
        if not is_own(part):
            return None
        where = part.rpartition(":")[0]
        file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    else:
        try:
            file = inspect.getsourcefile(_made_by(part))
        except (TypeError, OSError):  # written in C, or as a class at a prompt
            file = None
        if file is not None and not Path(file).is_file():  # what a notebook calls its cells
            file = None
    return None if file is None else str(Path(file).expanduser().absolute())


def print_of(part: Any) -> str | None:
    """A digest of the file that an own part is written in, which all ranks must have alike.

    Of what is written at a prompt or in a notebook it is that of its byte code. None if there is neither.
    """
    file = file_of(part)
    try:
        code = _byte_code(part) if file is None else Path(file).read_bytes()
    except OSError:
        return None
    return hashlib.sha256(code).hexdigest()[:16] if code else None


def _made_by(part: Any) -> Any:
    return part if inspect.isroutine(part) or inspect.isclass(part) else type(part)


def _byte_code(part: Any) -> bytes:
    """The byte code of a function, or of the methods of a class, the same in all processes; empty of what has none."""
    made = None if isinstance(part, str) else _made_by(part)
    members = [value for _, value in sorted(vars(made).items())] if inspect.isclass(made) else [made]
    functions = [getattr(member, "__func__", member) for member in members]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return repr([_plain(code) for code in codes]).encode() if codes else b""


def _plain(value: Any) -> Any:
    """A constant of byte code without addresses, and with sets in order."""
    if isinstance(value, CodeType):
        return value.co_name, value.co_code.hex(), value.co_names, [_plain(each) for each in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def call(option: str, part: Any, *args: Any, known: dict[str, Any] | None = None, **options: Any) -> Any:
    """Call a part with `options`, and with those of `known` that it has parameters for.

    Raises ConfigError, with the line of the user's that raises what it raises.
    """
    made = load(option, part)
    if not callable(made):
        raise ConfigError(f"`{option}` {part_name(part)} is a {type(made).__name__}, which cannot be called")
    with blaming(option, part):
        try:
            signature = inspect.signature(made)
        except (TypeError, ValueError):  # written in C
            return made(*args, **options)
        options = {name: value for name, value in (known or {}).items() if name in signature.parameters} | options
        with saying(f"`{option}` {part_name(part)} does not take these arguments", TypeError):
            signature.bind(*args, **options)
        return made(*args, **options)


@contextmanager
def blaming(option: str, part: Any, *ours: type[Exception]) -> Iterator[None]:
    """An error of the user's code becomes a ConfigError that names the line, once; errors that are `ours` stay."""
    passed: tuple[type[Exception], ...] = (ConfigError, Refusal, *ours)
    try:
        yield
    except passed:
        raise
    except Exception as error:
        raise ConfigError(f"`{option}` {part_name(part)}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The error, and the innermost line that is in no library: the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "/mpi4dl/" not in f.filename.replace("\\", "/")]
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return said
    where = [f"{Path(f.filename).name}, line {f.lineno}: {f.line}" for f in own if f.filename.endswith(".py")]
    return f"{said} ({where[-1]})" if where else said


def _module(option: str, part: str, where: str) -> ModuleType:
    prepare_torchvision()  # which it may import
    if not where.endswith(".py"):
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        with blaming(option, part):
            try:
                return importlib.import_module(where)
            except ModuleNotFoundError as error:
                if error.name is not None and f"{where}.".startswith(f"{error.name}."):
                    raise ConfigError(f"`{option}` {part}: there is no module {where}") from None
                raise
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"`{option}` {part}: there is no file {where}")
    with blaming(option, part):
        return _from_file(path)


@cache
def _from_file(path: Path) -> ModuleType:
    """The module in a file, imported once; what lies beside it can be imported by it."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    name = path.stem if loaded is None else f"_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
