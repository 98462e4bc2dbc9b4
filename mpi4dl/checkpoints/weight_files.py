"""Where weights come from: files that PyTorch or safetensors wrote, runs, and what packages keep of trained models.

weights.pt  epoch=3.ckpt    what torch.save wrote: a state_dict, or a dict that has one
weights.safetensors         the same without pickles
runs/mine                   a run's newest checkpoint, or the weights that it ended with
ResNet50_Weights.DEFAULT    torchvision's, from PyTorch's cache
pretrained                  those of the model's own package, torchvision or timm, from its cache

Nothing is downloaded: the ranks of a job may have no network.
"""

import pickle
import re
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpi4dl._torchvision import import_torchvision
from mpi4dl._wording import to_install
from mpi4dl.checkpoints.manifest import ABOUT, CLASSES, MODEL, candidates_at
from mpi4dl.checkpoints.saved import newest_whole

ENUM = re.compile(r"\w+_Weights\.\w+")
PRETRAINED, TIMM = "pretrained", "timm/"
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
# What reading a damaged pickle raises.
DAMAGED = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError, struct.error)
CACHED_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class WeightSource:
    """Values by name: their shapes, and `read(name)`. `origin` says where they are, `metadata` what is said of them."""

    origin: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def open_weights(source: str, model: str = "") -> WeightSource:
    """The weights that `source` names, for a model that has the name `model` where it is made by name.

    Raises ValueError in one sentence where there are none, and OSError.
    """
    path = Path(source)
    if path.is_dir():
        path = _of_run(path)
    elif not path.exists():
        path = _cached(source, model)
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_pickle(path)


def _of_run(folder: Path) -> Path:
    chosen, skipped = newest_whole(candidates_at(folder))
    if chosen is None and skipped:
        raise ValueError(f"`weights` {folder}: no checkpoint is whole: {'; '.join(skipped)}")
    path = (chosen or folder) / MODEL
    if not path.is_file():
        raise ValueError(
            f"`weights` {folder} is neither a run with weights nor a checkpoint of one: there is no {MODEL}"
        )
    return path


def _of_safetensors(path: Path) -> WeightSource:
    try:
        file = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"`weights` {path} is no whole safetensors file: {error}") from None
    metadata = file.metadata() or {}
    ties = {name: first for name, first in metadata.items() if first in shapes and name not in (CLASSES, ABOUT)}
    shapes |= {name: shapes[first] for name, first in ties.items()}
    return WeightSource(str(path), shapes, lambda name: file.get_tensor(ties.get(name, name)), metadata)


def _of_pickle(path: Path) -> WeightSource:
    try:
        with torch.serialization.safe_globals([Namespace]):
            whole = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = (
            f"holds objects of {foreign[1]} beside weights"
            if foreign
            else "is no file of weights that torch.save wrote"
        )
        raise ValueError(
            f"`weights` {path} {what}, and pickles can run code: if you trust it, load it once by "
            "torch.load(..., weights_only=False), and save its state_dict alone"
        ) from None
    except DAMAGED as error:
        if path.stat().st_size == 0:
            raise ValueError(f"`weights` {path} is empty (0 bytes)") from None
        said = type(error).__name__ + (f": {str(error).splitlines()[0]}" if str(error) else "")
        raise ValueError(f"`weights` {path} is no file that torch.save wrote, or is cut off ({said})") from None
    state = _state_dict(whole)
    if state is None:
        has = (
            f"has {', '.join(map(str, list(whole)[:5]))}"
            if isinstance(whole, Mapping)
            else f"is a {type(whole).__name__}"
        )
        raise ValueError(
            f"`weights` {path} {has}, but must be a state_dict, or a dict that has one as state_dict or model"
        )
    told = getattr(
        whole, "_metadata", None
    )  # where PyTorch has what is not a value, and mpi4dl.export what they are of
    metadata = told.get(ABOUT, {}) if isinstance(told, Mapping) else {}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    return WeightSource(str(path), shapes, state.__getitem__, metadata if isinstance(metadata, Mapping) else {})


def _state_dict(found: Any) -> dict[str, Tensor] | None:
    """The tensors by name in what torch.save wrote; None if that is not clear."""
    if not isinstance(found, Mapping):
        return None
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        return tensors
    for key in WRAPPERS:
        if isinstance(found.get(key), Mapping) and (state := _state_dict(found[key])):
            return state
    nested = [state for value in found.values() if (state := _state_dict(value))]
    return nested[0] if len(nested) == 1 else None


def _cached(source: str, model: str) -> Path:
    """The file of weights that a package keeps under a name. Raises ValueError if it is not there."""
    if source != PRETRAINED and not ENUM.fullmatch(source):
        raise ValueError(
            f"`weights` {source}: there is no such file or folder; name one, a run, torchvision's weights such as "
            f"ResNet50_Weights.DEFAULT, or {PRETRAINED}, which are those of the model's own package"
        )
    if source == PRETRAINED and model.startswith(TIMM):
        return _of_timm(model.removeprefix(TIMM))
    models = import_torchvision().models
    try:
        found = models.get_model_weights(model).DEFAULT if source == PRETRAINED else models.get_weight(source)
    except (ValueError, KeyError, AttributeError):
        known = ""
        with suppress(ValueError, KeyError, AttributeError):  # torchvision does not have this model
            known = f"; of {model} it has {', '.join(str(one) for one in models.get_model_weights(model))}"
        what = f"{model} has no trained weights" if source == PRETRAINED else f"there are no weights {source}"
        remedy = known or "; name a file of weights, or choose a `model` of torchvision or timm"
        raise ValueError(f"`weights` {source}: {what} in torchvision{remedy}") from None
    file = Path(torch.hub.get_dir()) / "checkpoints" / found.url.rpartition("/")[2]
    return _there(file, f"{source} of torchvision", f"torch.hub.load_state_dict_from_url({found.url!r})")


def _of_timm(name: str) -> Path:
    import_torchvision()  # which timm imports in its own way
    try:
        timm = import_module("timm")
    except ImportError:
        message = f"`weights` {PRETRAINED}: {TIMM}{name} needs the package timm; run {to_install('timm')}"
        raise ValueError(message) from None
    known = timm.models.get_pretrained_cfg(name)
    if known is None or not (known.hf_hub_id or known.url):
        raise ValueError(f"`weights` {PRETRAINED}: timm has no trained weights of {name}")
    if known.hf_hub_id:
        from huggingface_hub import try_to_load_from_cache

        for file in (known.hf_hub_filename,) if getattr(known, "hf_hub_filename", None) else CACHED_NAMES:
            found = try_to_load_from_cache(known.hf_hub_id, file)
            if isinstance(found, str):
                return Path(found)
    file = Path(torch.hub.get_dir()) / "checkpoints" / (known.url or f"{name}.pth").rpartition("/")[2]
    return _there(file, f"the weights of {TIMM}{name}", f"timm.create_model({name!r}, pretrained=True)")


def _there(file: Path, what: str, call: str) -> Path:
    if not file.is_file():
        raise ValueError(
            f"`weights`: {what} are not in the cache ({file.parent} has no {file.name}), and nothing is downloaded: "
            f"call {call} once where there is a network"
        )
    return file
