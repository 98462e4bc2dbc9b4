"""The states of a process's random number generators, as JSON: PyTorch's, Python's and NumPy's."""

import base64
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpi4dl.checkpoints.node import Machine

NUMPY_WORDS = 624  # of the Mersenne twister
T = TypeVar("T")


def random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _text(np.array(words, np.uint32).tobytes()), gauss],
        "numpy": [kind, _text(np.asarray(keys, np.uint32).tobytes()), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        found["cuda"] = _text(torch.cuda.get_rng_state().numpy().tobytes())
    return found


class Randomness:
    """States of all generators that can be gone on from; `set` does. Raises Damaged if `node` does not hold such.

    The GPU's generator is set where both processes have a GPU.
    """

    def __init__(self, node: Machine) -> None:
        entries = node.entries()
        self._torch = _read(node.at("torch"), _torch_state)
        self._python = _read(node.at("python"), _python_state)
        self._numpy = _read(node.at("numpy"), _numpy_state)
        here = "cuda" in entries and torch.cuda.is_available()
        self._cuda = _read(entries["cuda"], _cuda_state) if here else None

    def set(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def set_random_state(state: dict[str, Any]) -> None:
    """Go on as this process did when `random_state` returned this."""
    Randomness(Machine(state, "the random state")).set()


def _read(node: Machine, read: Callable[[Machine], T]) -> T:
    """A state, which a generator of its own has been given to see whether it takes it."""
    try:
        return read(node)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # of which Damaged is one: a state is of one piece
        raise node.wrong("the state of a generator of random numbers") from None


def _torch_state(node: Machine) -> Tensor:
    state = torch.frombuffer(_bytes(node), dtype=torch.uint8)
    torch.Generator().set_state(state)
    return state


def _cuda_state(node: Machine) -> Tensor:
    state = torch.frombuffer(_bytes(node), dtype=torch.uint8)
    torch.Generator("cuda").set_state(state)
    return state


def _python_state(node: Machine) -> tuple[Any, ...]:
    version, words, gauss = node.items(3)
    state = (version.integer(), tuple(np.frombuffer(_bytes(words), np.uint32).tolist()), gauss.optional(Machine.number))
    random.Random().setstate(state)
    return state


def _numpy_state(node: Machine) -> tuple[Any, ...]:
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


def _bytes(node: Machine) -> bytearray:
    return bytearray(base64.b64decode(node.text(), validate=True))
