"""The random number generators of this process as one, PyTorch's, Python's and NumPy's: kept, put back, compared."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PythonStates:
    """The states of Python's `random` and of NumPy's global generator."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "PythonStates":
        return cls(random.getstate(), np.random.get_state(legacy=False))

    def put(self) -> None:
        """Go on from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def digests(self) -> tuple[int, int]:
        """One number for each generator: the same in all processes whose states are."""
        version, words, gauss = self.python
        return (
            crc32(f"{version} {gauss}".encode(), crc32(np.array(words, np.uint32).tobytes())),
            crc32(repr(_plain(self.numpy)).encode()),
        )


@dataclass(frozen=True)
class RandomStates:
    """The states of all generators: PyTorch's on the host and on some GPUs, Python's and NumPy's."""

    host: Tensor
    gpus: tuple[tuple[torch.device, Tensor], ...]
    others: PythonStates

    @classmethod
    def now(cls, devices: Iterable[torch.device] = ()) -> "RandomStates":
        """`devices` other than GPUs have no generator of their own."""
        gpus = tuple((device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda")
        return cls(torch.get_rng_state(), gpus, PythonStates.now())

    @classmethod
    def of_process(cls) -> "RandomStates":
        """With that of the GPU, if this process uses one."""
        return cls.now([torch.device("cuda")] if torch.cuda.is_initialized() else ())

    def put(self) -> None:
        """Go on from these states."""
        torch.set_rng_state(self.host)
        for device, state in self.gpus:
            torch.cuda.set_rng_state(state, device)
        self.others.put()

    def digests(self) -> tuple[int, ...]:
        """One number for each generator: the same in all processes whose states are."""
        states = (self.host, *(state for _, state in self.gpus))
        return (*(crc32(state.numpy().tobytes()) for state in states), *self.others.digests())


def generator_state(value: Any) -> Callable[[], Any] | None:
    """A function that restores the state of a generator; None if this is no generator."""
    if isinstance(value, torch.Generator):
        drawn = value.get_state()
        return lambda: value.set_state(drawn)
    if isinstance(value, np.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        known = value.get_state(legacy=False)
        return lambda: value.set_state(known)
    if isinstance(value, random.Random):
        own = value.getstate()
        return lambda: value.setstate(own)
    return None


def _plain(state: Any) -> Any:
    """A state of NumPy's, in which arrays are bytes."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def seed_python(seed: int) -> None:
    """Seed Python's and NumPy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes no more bits


@contextmanager
def forked(devices: Iterable[torch.device] = (), enabled: bool = True) -> Iterator[None]:
    """Put all generators back behind this context: PyTorch's on the host and on these GPUs, Python's and NumPy's."""
    states = RandomStates.now(devices) if enabled else None
    try:
        yield
    finally:
        if states is not None:
            states.put()


def seed_host(seed: int) -> None:
    """Seed PyTorch's generator on the host, Python's and NumPy's. Unlike torch.manual_seed it leaves GPUs alone."""
    torch.default_generator.manual_seed(seed)
    seed_python(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within this context the generators of the host begin with this seed; behind it they go on as before."""
    with forked():
        seed_host(seed)
        yield
