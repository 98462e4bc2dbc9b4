"""The states of a process's random number generators, as JSON: PyTorch's, Python's and NumPy's."""

import base64
import random
from typing import Any

import numpy as np
import torch


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


def set_random_state(state: dict[str, Any]) -> None:
    """Go on as the process did from which `random_state` is. The GPU's generator is set where both have a GPU."""
    torch.set_rng_state(torch.frombuffer(_bytes(state["torch"]), dtype=torch.uint8))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(_bytes(words), np.uint32).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_bytes(keys), np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(_bytes(state["cuda"]), dtype=torch.uint8))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))
