"""JSON that anybody may have edited, read field by field; settings and random states as JSON, exactly."""

import base64
import json
import math
import random
import reprlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpi4dl._numbers import Damaged, typed
from mpi4dl._randomness import PythonStates, RandomStates

MOST_LEVELS = 100
LARGEST = 2**64 - 1  # as seeds of PyTorch are; other numbers are far smaller


class Unreadable(ValueError):
    """A file may be whole, but cannot be read here and now: a disk that fails, no permission, another format."""


def parse(data: bytes, file: str) -> Any:
    """The content of a JSON file. Raises Damaged for what is no JSON, and for nests and numbers beyond all use."""
    try:
        plain = json.loads(
            data, parse_constant=_no_number, parse_int=_integer, parse_float=_finite, object_pairs_hook=_unique
        )
        if _is_deeper(plain, MOST_LEVELS):
            raise ValueError(f"it is nested more than {MOST_LEVELS} deep")
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from None
    return plain


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > len(str(LARGEST)) + 1 or abs(int(text)) > LARGEST:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return float(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _is_deeper(plain: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than so many levels deep."""
    some = [plain]
    for _ in range(levels + 1):
        some = [inner for one in some for inner in _inner(one)]
    return bool(some)


def _inner(plain: Any) -> list[Any]:
    return plain if isinstance(plain, list) else list(plain.values()) if isinstance(plain, dict) else []


# Settings as JSON, exactly: what optimizers and schedulers remember beside tensors of parameters.
#
# JSON has no tuples, no keys but text, no infinity and no tensors: these become objects with one key that says what it
# was, such as {"tuple": [0.9, 0.999]}.

TAGS = ("tuple", "pairs", "counter", "float", "tensor")
DEEPEST = MOST_LEVELS // 4  # each level of a dict without text keys takes three, and a tensor has levels of its own


def encode(value: Any, levels: int = DEEPEST) -> Any:
    """The value in a form that `json.dumps` takes. Raises ValueError for what has no such form, such as a function."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"a number of {value.bit_length()} bits cannot be kept in a checkpoint: 64 are the most")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not levels:
        raise ValueError(f"values that are nested more than {DEEPEST} deep cannot be kept in a checkpoint")
    levels -= 1
    if isinstance(value, list):
        return [encode(item, levels) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, levels) for item in value]}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(isinstance(key, str) and key not in TAGS for key in value):
            return {key: encode(item, levels) for key, item in value.items()}
        tag = "counter" if isinstance(value, Counter) else "pairs"
        return {tag: [[encode(key, levels), encode(item, levels)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        values = encode(value.tolist(), max(levels, value.dim() + 1))
        return {"tensor": {"dtype": str(value.dtype).removeprefix("torch."), "values": values}}
    if hasattr(value, "item"):  # a number of numpy
        return encode(value.item())
    raise ValueError(f"{value!r} cannot be kept in a checkpoint: only numbers, text, tensors and nests of them can")


class _EncodedTensor(NamedTuple):
    dtype: str
    values: Any


def decode(plain: Any, where: str) -> Any:
    """The value that was encoded, which stands there. Raises Damaged for what cannot have been."""
    if isinstance(plain, list):
        return [decode(item, f"{where}[{number}]") for number, item in enumerate(plain)]
    if not isinstance(plain, dict):
        return plain
    tag = next(iter(plain)) if len(plain) == 1 else ""
    if tag not in TAGS:
        return {key: decode(item, f"{where}: {reprlib.repr(key)}") for key, item in plain.items()}
    inner, where = plain[tag], f"{where}: {tag!r}"
    if tag == "tuple":
        return tuple(decode(typed(list[Any], inner, where), where))
    if tag == "float":
        return float(typed(Literal["nan", "inf", "-inf"], inner, where))
    if tag == "tensor":
        found = typed(_EncodedTensor, inner, where)
        dtype = getattr(torch, found.dtype, None)
        try:
            return torch.tensor(decode(found.values, where), dtype=dtype)
        except (ValueError, TypeError, RuntimeError, OverflowError):
            raise Damaged(f"{where} is {reprlib.repr(inner)}, but must be a tensor of {dtype}") from None
    pairs: dict[Any, Any] = {} if tag == "pairs" else Counter()
    for number, (key, item) in enumerate(typed(list[tuple[Any, Any]], inner, where)):
        there = f"{where}[{number}]"
        try:
            pairs[decode(key, there)] = decode(item, there) if tag == "pairs" else typed(int, item, there)
        except TypeError:
            raise Damaged(f"{there} is {reprlib.repr(key)}, but must be the key of a dict") from None
    return pairs


# Whether a setting that was read could stand where another stands: 0.5 for 1, a tuple of numbers for such a tuple.


def unlike(found: Mapping[Any, Any], expected: Mapping[Any, Any], optional: Collection[Any] = ()) -> str | None:
    """An error in settings that are to replace others; None if there is none.

    All of the others must be there but the `optional` ones, and each must be of its kind. There may be more: a schedule
    notes things in an optimizer's options, for instance.
    """
    for name, value in expected.items():
        if name not in found:
            if name in optional:
                continue
            return f"{name!r} is missing"
        if not _is_like(found[name], value):
            return f"{name!r} is {reprlib.repr(found[name])}, which cannot stand for {reprlib.repr(value)}"
    reserved = next((name for name in found if name in RESERVED and name not in expected), None)
    return None if reserved is None else f"{reserved!r} is no option"


RESERVED = ("params", "param_names")


def _is_like(found: Any, expected: Any) -> bool:
    kind = _kind(expected)
    if kind in ("list", "tuple"):
        return _kind(found) == kind and len(found) == len(expected) and all(map(_is_like, found, expected))
    allowed = {None: (None, "flag", "number"), "flag": (None, "flag")}.get(kind, (kind,))
    return _kind(found) in allowed


def _kind(value: Any) -> str | None:
    """The kind of a value: values of one kind may replace each other."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return "number" if value.numel() == 1 else f"tensor of {tuple(value.shape)}"
    kinds = {"flag": bool, "number": int | float, "text": str, "list": list, "tuple": tuple, "mapping": Mapping}
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), type(value).__name__)


# The states of a process's random number generators, as JSON: PyTorch's, Python's and NumPy's.

NUMPY_WORDS = 624  # of the Mersenne twister


class SavedRandomness(NamedTuple):
    """The states of all generators as JSON has them; `cuda` is there where the process used a GPU."""

    torch: str
    python: tuple[int, str, float | None]
    numpy: tuple[str, str, Annotated[int, range(NUMPY_WORDS + 1).__contains__, "a place"], int, float]
    cuda: str | None = None

    @classmethod
    def now(cls) -> "SavedRandomness":
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        # Asking for the state would make a context on a GPU that nobody uses.
        cuda = _text(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_initialized() else None
        return cls(
            _text(torch.get_rng_state().numpy()),
            (version, _text(np.array(words, np.uint32)), gauss),
            (kind, _text(np.asarray(keys, np.uint32)), int(position), int(has_gauss), float(cached)),
            cuda,
        )

    def states(self, where: str) -> RandomStates:
        """The states, which generators of their own took. Raises Damaged for those that none takes.

        The GPU's is among them where both processes use a GPU.
        """
        (version, words, gauss), (kind, keys, position, has_gauss, cached) = self.python, self.numpy
        try:
            python = version, tuple(_array(words, np.uint32).tolist()), gauss
            # NumPy itself looks neither at the position, beyond which it would read, nor at how many words there are.
            numpy = kind, _array(keys, np.uint32).reshape(NUMPY_WORDS), position, has_gauss, cached
            here = {"cpu": self.torch} | ({"cuda": self.cuda} if self.cuda and torch.cuda.is_initialized() else {})
            host, *gpus = ((torch.device(on), torch.from_numpy(_array(text, np.uint8))) for on, text in here.items())
            for device, state in (host, *gpus):
                torch.Generator(device).set_state(state)
            random.Random().setstate(python)
            np.random.RandomState().set_state(numpy)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise Damaged(f"{where}: no generator of random numbers has such a state: {error}") from None
        return RandomStates(host[1], tuple(gpus), PythonStates(python, numpy))


@contextmanager
def put_back(executor: Any) -> Iterator[None]:
    """If the block fails, the random state, and what `executor` draws from, become as they were before it."""
    states, num_runs = RandomStates.of_process(), executor.num_runs
    try:
        yield
    except BaseException:
        states.put()
        executor.num_runs = num_runs
        raise


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype)
