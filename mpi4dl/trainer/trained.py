"""What a run left: where its weights are, what they are of, and how ranks that hold a model read their parts of them.

runs/mine                           the newest whole checkpoint, or the weights that it ended with
runs/mine/checkpoints/step-...      that checkpoint
runs/mine/model.safetensors         these weights
weights.safetensors, weights.pt     what mpi4dl.export wrote
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpi4dl.checkpoints.checkpoints import refusing
from mpi4dl.checkpoints.manifest import MODEL, candidates_at
from mpi4dl.checkpoints.saved import newest_whole
from mpi4dl.checkpoints.storage import Reader
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.options.config import ConfigError
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.trainer.description import KEY, Description, described_by

PICKLED = (".pt", ".pth")
WEIGHTS = (*PICKLED, ".safetensors")


@dataclass(frozen=True)
class FoundWeights:
    """Where weights are; `remarks` are about damaged ones."""

    weights: Path
    remarks: tuple[str, ...]


def folder_of(comm: Communicator, source: Path) -> Path:
    """The folder of the run that `source` is, or is a checkpoint of; of a file of weights the one that it is in.

    Collective. Raises Refusal on all ranks if there is no such folder or file.
    """
    with comm.together((ValueError, OSError)):
        if source.suffix in WEIGHTS and source.is_file():
            return source.absolute().parent
        folder = next((path for path in (source, *source.absolute().parents[:2]) if _is_run(path)), None)
        if folder is None:
            raise ConfigError(f"{source} is neither a run of mpi4dl.train with weights nor a checkpoint of one")
    assert folder is not None
    return folder


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def find_weights(comm: Communicator, source: Path) -> FoundWeights:
    """The newest whole checkpoint of a run, or without any the weights that it ended with, or the file. Collective.

    Raises:
        Refusal: on all ranks: there are no weights, or no checkpoint is whole.
    """
    if comm.broadcast_object(source.is_file()):
        return FoundWeights(source, ())
    with refusing():
        chosen, skipped = newest_whole(candidates_at(source), comm)
    if chosen is None and skipped:
        raise Refusal(f"no checkpoint is whole: {'; '.join(skipped)}")
    weights = (chosen or source) / MODEL
    comm.agree(None if weights.is_file() else f"{source} has no weights yet: there is no checkpoint, and no {MODEL}")
    return FoundWeights(weights, tuple(f"skipped {one}" for one in skipped))


def description_of(weights: Path, folder: Path) -> Description:
    """What weights are of, as they say themselves, or the run that they lie in. Raises ConfigError, OSError."""
    with opened(weights) as values:
        told = values.about
    found = described_by(folder) if told is None else Description.read(told, str(weights))
    if found is None:
        raise ConfigError(
            f"{weights} does not say what it is of: name a run of mpi4dl.train, or weights of one by mpi4dl.export"
        )
    return found


@dataclass(frozen=True)
class WholeValues:
    """Whole values in a file: their shapes by name, `read(name, start, stop)` of the flattened ones, what is said."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, int, int], Tensor]
    about: str | None


@contextmanager
def opened(path: Path) -> Iterator[WholeValues]:
    """A file of weights, of safetensors or of torch.save. Raises ValueError, OSError."""
    if path.suffix not in PICKLED:
        with Reader(path) as reader:
            shapes = {name: tuple(spec.shape) for name, spec in reader.layout.specs.items()}
            yield WholeValues(path, shapes, reader.read, reader.layout.metadata.get(KEY))
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: is no whole file of weights: {str(error).splitlines()[0]}") from None
    told: Any = getattr(state, "_metadata", None)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path}: is no state_dict, as mpi4dl.export writes it")
    about = told.get(KEY, {}).get(KEY) if isinstance(told, Mapping) else None
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    yield WholeValues(path, shapes, lambda name, start, stop: state[name].reshape(-1)[start:stop], about)


def load_weights(held: Held, stored: WholeValues) -> None:
    """Read this rank's part of all parameters and buffers. Raises ValueError, OSError."""
    for name, value in _values(held):
        first, shape = held.ties.get(name, name), tuple(held.shapes[name][0])
        there = first if first in stored.shapes else name
        if stored.shapes.get(there) != shape:
            found = f"has shape {stored.shapes[there]}" if there in stored.shapes else "is not there"
            raise ValueError(f"{stored.path} is of another model: {name} {found}, but has shape {shape} here")
        parts = [stored.read(there, run.start, run.stop) for run in held.runs(name, 0, value.numel())]
        value.copy_(torch.cat(parts).view(value.shape))


def _values(held: Held) -> Iterator[tuple[str, Tensor]]:
    for module in held.modules_of.values():
        saved = module.state_dict()
        yield from ((name, value) for name, value in saved.items() if isinstance(value, Tensor))
