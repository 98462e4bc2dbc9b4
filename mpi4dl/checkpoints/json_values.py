"""JSON that anybody may have edited, read field by field; settings and random states as JSON, exactly."""

import base64
import json
import math
import random
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

MOST_LEVELS = 100
LARGEST = 2**64 - 1  # as seeds of PyTorch are; other numbers are far smaller
MOST = 2**63 - 1  # of what PyTorch, and the system, count

T = TypeVar("T")


class Damaged(ValueError):
    """A file does not hold what was written to it; the message says what is wrong."""


class Unreadable(ValueError):
    """A file may be whole, but cannot be read here and now: a disk that fails, no permission, another format."""


@dataclass(frozen=True)
class JsonValue:
    """A value of a parsed file, and where it stands. Its methods raise Damaged unless it is what they want."""

    plain: Any
    where: str

    def wrong(self, wanted: str) -> Damaged:
        return Damaged(f"{self.where} is {reprlib.repr(self.plain)}, but must be {wanted}")

    def integer(self, least: int = 0, most: int = MOST) -> int:
        if not isinstance(self.plain, int) or isinstance(self.plain, bool) or not least <= self.plain <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.plain

    def number(self) -> float:
        if not isinstance(self.plain, int | float) or isinstance(self.plain, bool):
            raise self.wrong("a number")
        return float(self.plain)

    def flag(self) -> bool:
        if not isinstance(self.plain, bool):
            raise self.wrong("true or false")
        return self.plain

    def text(self) -> str:
        if not isinstance(self.plain, str):
            raise self.wrong("text")
        return self.plain

    def items(self, count: int | None = None) -> "list[JsonValue]":
        """The values of a list, of this length if one is named."""
        if not isinstance(self.plain, list) or len(self.plain) != (len(self.plain) if count is None else count):
            raise self.wrong("a list" if count is None else f"a list of {count}")
        return [JsonValue(item, f"{self.where}[{number}]") for number, item in enumerate(self.plain)]

    def entries(self) -> "dict[str, JsonValue]":
        """The values of an object by their keys."""
        if not isinstance(self.plain, dict):
            raise self.wrong("an object")
        return {key: JsonValue(item, f"{self.where}: {reprlib.repr(key)}") for key, item in self.plain.items()}

    def at(self, key: str) -> "JsonValue":
        found = self.entries()
        if key not in found:
            raise Damaged(f"{self.where} has no {key!r}")
        return found[key]

    def optional(self, read: "Callable[[JsonValue], T]") -> T | None:
        """The result of `read`; None if it is null."""
        return None if self.plain is None else read(self)


def parse(data: bytes, file: str) -> JsonValue:
    """The content of a JSON file. Raises Damaged for what is no JSON, and for nests and numbers beyond all use."""
    try:
        plain = json.loads(
            data, parse_constant=_no_number, parse_int=_integer, parse_float=_finite, object_pairs_hook=_unique
        )
        if _is_deeper(plain, MOST_LEVELS):
            raise ValueError(f"it is nested more than {MOST_LEVELS} deep")
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from None
    return JsonValue(plain, file)


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


def decode(node: JsonValue) -> Any:
    """The value that was encoded. Raises Damaged for what cannot have been."""
    if isinstance(node.plain, list):
        return [decode(item) for item in node.items()]
    if not isinstance(node.plain, dict):
        return node.plain
    entries = node.entries()
    tag = next(iter(entries)) if len(entries) == 1 else ""
    if tag not in TAGS:
        return {key: decode(item) for key, item in entries.items()}
    inner = entries[tag]
    if tag == "tuple":
        return tuple(decode(item) for item in inner.items())
    if tag == "float":
        if inner.text() not in ("nan", "inf", "-inf"):
            raise inner.wrong("nan, inf or -inf")
        return float(inner.plain)
    if tag == "tensor":
        return _tensor(inner)
    return _pairs(inner, counts=tag == "counter")


def _tensor(node: JsonValue) -> Tensor:
    dtype, values = getattr(torch, node.at("dtype").text(), None), node.at("values")
    if not isinstance(dtype, torch.dtype):
        raise node.at("dtype").wrong("a dtype of PyTorch")
    try:
        return torch.tensor(decode(values), dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise values.wrong(f"the values of a tensor of {dtype}") from None


def _pairs(node: JsonValue, counts: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = Counter() if counts else {}
    for pair in node.items():
        key, value = pair.items(2)
        try:
            found[decode(key)] = value.integer() if counts else decode(value)
        except TypeError:
            raise key.wrong("the key of a dict") from None
    return found


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


def random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _text(np.array(words, np.uint32).tobytes()), gauss],
        "numpy": [kind, _text(np.asarray(keys, np.uint32).tobytes()), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_initialized():  # asking for the state would make a context on a GPU that nobody uses
        found["cuda"] = _text(torch.cuda.get_rng_state().numpy().tobytes())
    return found


class Randomness:
    """States of all generators that can be gone on from; `set` does. Raises Damaged if `node` does not hold such.

    The GPU's generator is set where both processes use a GPU.
    """

    def __init__(self, node: JsonValue) -> None:
        entries = node.entries()
        self._torch = _read(node.at("torch"), _torch_state)
        self._python = _read(node.at("python"), _python_state)
        self._numpy = _read(node.at("numpy"), _numpy_state)
        here = "cuda" in entries and torch.cuda.is_initialized()
        self._cuda = _read(entries["cuda"], partial(_torch_state, device="cuda")) if here else None

    def set(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def set_random_state(state: dict[str, Any]) -> None:
    """Go on as this process did when `random_state` returned this."""
    Randomness(JsonValue(state, "the random state")).set()


def _read(node: JsonValue, read: Callable[[JsonValue], T]) -> T:
    """A state, which a generator of its own has been given to see whether it takes it."""
    try:
        return read(node)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # of which Damaged is one: a state is of one piece
        raise node.wrong("the state of a generator of random numbers") from None


def _torch_state(node: JsonValue, device: str = "cpu") -> Tensor:
    state = torch.frombuffer(_bytes(node), dtype=torch.uint8)
    torch.Generator(device).set_state(state)
    return state


def _python_state(node: JsonValue) -> tuple[Any, ...]:
    version, words, gauss = node.items(3)
    state = (
        version.integer(),
        tuple(np.frombuffer(_bytes(words), np.uint32).tolist()),
        gauss.optional(JsonValue.number),
    )
    random.Random().setstate(state)
    return state


def _numpy_state(node: JsonValue) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = node.items(5)
    # NumPy itself does not look at the position, and would read beyond its state; nor at how many words there are.
    where, has, words = position.integer(most=NUMPY_WORDS), has_gauss.integer(most=1), _bytes(keys)
    if len(words) != 4 * NUMPY_WORDS:
        raise keys.wrong(f"{NUMPY_WORDS} words")
    state = (kind.text(), np.frombuffer(words, np.uint32), where, has, cached.number())
    np.random.RandomState().set_state(state)
    return state


@contextmanager
def put_back(executor: Any) -> Iterator[None]:
    """If the block fails, the random state, and what `executor` draws from, become as they were before it."""
    state, num_runs = random_state(), executor.num_runs
    try:
        yield
    except BaseException:
        set_random_state(state)
        executor.num_runs = num_runs
        raise


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(node: JsonValue) -> bytearray:
    return bytearray(base64.b64decode(node.text(), validate=True))
