"""Pretrained weights for a model that is distributed over ranks: rank 0 reads, and each rank gets its part.

rank 0      file -> names matched to those of the model -> values, one after the other
the first holder of each stage, or part      its elements, which the others that hold them then have from it
"""

import pickle
import re
import struct
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpi4dl._files import is_stored_zip, open_regular
from mpi4dl._numbers import Damaged
from mpi4dl._torchvision import import_torchvision
from mpi4dl._wording import counted, printable, some, to_install
from mpi4dl.checkpoints.manifest import ABOUT, AVERAGE, CLASSES, MODEL, OPTIMIZER, candidates_at, step_of
from mpi4dl.checkpoints.saved import newest_whole
from mpi4dl.comm import Communicator
from mpi4dl.models.registry import page_of
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.replicas.group import SLOT

# Where weights come from: files that PyTorch or safetensors wrote, runs, and what packages keep of trained models.
#
# weights.pt  epoch=3.ckpt    what torch.save wrote: a state_dict, or a dict that has one
# weights.safetensors         the same without pickles
# folder with config.json      GPT-2 or Llama, as transformers writes them, for our GPT
# runs/mine                   a run's newest checkpoint, or the weights that it ended with
# ResNet50_Weights.DEFAULT    torchvision's, from PyTorch's cache
# pretrained                  those of the model's own package, torchvision or timm, from its cache
#
# Nothing is downloaded: the ranks of a job may have no network.

ENUM = re.compile(r"\w+_Weights\.\w+")
PRETRAINED, TIMM = "pretrained", "timm/"
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
# Errors of a damaged pickle.
DAMAGED = (
    *(RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, MemoryError, struct.error),
)
MOST_NESTED = 4  # dicts, in one of which a state_dict is
ADAPTER = (".lora_A.weight", ".lora_B.weight", ".lora_alpha")  # of a layer, as models.lora has it
HALF_BYTES = ("F4", "F6_E2M3", "F6_E3M2")  # types of which several values share bytes
CACHED_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class WeightSource:
    """Values by name: their shapes, and `read(name)`. `origin` is their file or model, `metadata` describes them.

    `ties` are names of a value that has another name too, under which it is stored.
    """

    origin: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)


def open_weights(source: str, model: str = "") -> WeightSource:
    """The weights that `source` names, for a model that has the name `model` where it is made by name.

    Raises ValueError in one sentence where there are none, and OSError.
    """
    path = Path(source)
    if path.is_dir():
        from mpi4dl.checkpoints.huggingface import is_checkpoint

        if is_checkpoint(path):
            return _of_transformers(path)
        path = weights_in(path)[0]
        if not path.is_file():
            raise ValueError(
                f"`weights` {source} is neither a run with weights nor a checkpoint of one: there is no {MODEL}"
            )
    elif not path.exists():
        if step_of(path.parent) is not None:
            raise ValueError(
                f"there is no checkpoint {path.parent}: a run removes its oldest ones (`keep`) while it trains; start "
                "again, or name another one"
            )
        path = _cached(source, model)
    try:
        open_regular(path).close()
    except OSError as error:
        raise ValueError(
            f"`weights` {path} cannot be read: {error.strerror}: name a file, or the folder of a run"
        ) from None
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_pickle(path)


def features_in(file: str, option: str) -> dict[str, Tensor]:
    """The values of the part of torchvision's vgg16, alexnet or their like that looks at images, by name.

    Raises ValueError that names the option, and OSError.
    """
    try:
        stored = open_weights(file)
    except ValueError as error:
        raise ValueError(str(error).replace("`weights`", option, 1)) from None
    return {name: stored.read(name) for name in stored.shapes if name.startswith("features.")}


def weights_in(folder: Path, comm: Communicator | None = None) -> tuple[Path, list[str]]:
    """Where the weights are of a run's newest whole checkpoint, or without any those that it ended with.

    Beside it what is wrong with checkpoints that were skipped. Collective over `comm`. Raises Damaged if there are
    checkpoints, and none is whole; on all ranks.
    """
    chosen, skipped = newest_whole(candidates_at(folder), comm)
    if chosen is None and skipped:  # a run that trains may have removed them, and have written others
        chosen, skipped = newest_whole(candidates_at(folder), comm)
    if chosen is None and skipped:
        raise Damaged(f"no checkpoint is whole: {'; '.join(skipped)}")
    return (chosen or folder) / MODEL, skipped


def _of_transformers(folder: Path) -> WeightSource:
    from mpi4dl.checkpoints.huggingface import CONFIG, Checkpoint

    checkpoint = Checkpoint(folder)
    stored: dict[str, WeightSource] = {}
    for path in checkpoint.files:
        open_regular(path).close()
        file = _of_safetensors(path)
        stored |= dict.fromkeys(file.shapes, file)
    places = checkpoint.places(stored)
    shapes = {
        name: tuple(place.of(torch.empty(stored[place.name].shapes[place.name], device="meta")).shape)
        for name, place in places.items()
    }
    return WeightSource(
        str(folder / CONFIG), shapes, lambda name: places[name].of(stored[places[name].name].read(places[name].name))
    )


def _of_safetensors(path: Path) -> WeightSource:
    try:
        file = safe_open(path, framework="pt")
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, *DAMAGED) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"`weights` {path} is no whole safetensors file: {reason}") from None
    packed = next((name for name, part in parts.items() if part.get_dtype() in HALF_BYTES), None)
    if packed is not None:
        raise ValueError(
            f"`weights` {path} has {packed!r} of type {parts[packed].get_dtype()}: save values of 8 bits or more"
        )
    shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
    metadata = file.metadata() or {}
    ties = {name: first for name, first in metadata.items() if first in shapes and name not in (CLASSES, ABOUT)}
    shapes |= {name: shapes[first] for name, first in ties.items()}

    def read(name: str) -> Tensor:  # opened for each, so that what was read of the file does not stay in memory
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(ties.get(name, name))

    return WeightSource(str(path), shapes, read, metadata, ties)


def _of_pickle(path: Path) -> WeightSource:
    try:
        archive = is_stored_zip(path)
    except ValueError as error:
        raise ValueError(f"`weights` {path} {error}") from None
    try:
        with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols of pickle, which damaged files claim
            whole = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
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
        said = type(error).__name__ + (f": {printable(str(error).splitlines()[0])}" if str(error) else "")
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
    for name, value in state.items():
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = f"{'quantized, ' * value.is_quantized}of layout {value.layout} on {value.device}"
            raise ValueError(f"`weights` {path} has {name!r}, which is {kind}: save dense values")
    told = getattr(
        whole, "_metadata", None
    )  # where PyTorch has what is not a value, and mpi4dl.export what they are of
    metadata = told.get(ABOUT, {}) if isinstance(told, Mapping) else {}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    return WeightSource(str(path), shapes, state.__getitem__, metadata if isinstance(metadata, Mapping) else {})


def _state_dict(found: Any, levels: int = MOST_NESTED) -> dict[str, Tensor] | None:
    """The tensors by name in what torch.save wrote; None if that is not clear.

    It looks into dicts in one another, of so many levels: a file may nest them without end, or one in itself.
    """
    if not isinstance(found, Mapping) or not levels:
        return None
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        return tensors
    for key in WRAPPERS:
        if isinstance(found.get(key), Mapping) and (state := _state_dict(found[key], levels - 1)):
            return state
    nested = [state for value in found.values() if (state := _state_dict(value, levels - 1))]
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
    if source == PRETRAINED and page_of(model):
        return _of_page(model, page_of(model))
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
        named = getattr(known, "hf_hub_filename", None)
        found = _of_hub(known.hf_hub_id, (named,) if named else CACHED_NAMES)
        if found is not None:
            return found
    file = Path(torch.hub.get_dir()) / "checkpoints" / (known.url or f"{name}.pth").rpartition("/")[2]
    return _there(file, f"the weights of {TIMM}{name}", f"timm.create_model({name!r}, pretrained=True)")


def _of_page(model: str, page: str) -> Path:
    """The file of a published encoder of tiles. Raises ValueError if it is not in the cache."""
    found = _of_hub(page, CACHED_NAMES)
    if found is None:
        raise ValueError(
            f"`weights`: those of {model} are not in the cache of Hugging Face, and nothing is downloaded: accept "
            f"their licence at https://huggingface.co/{page}, download {CACHED_NAMES[1]} there, and give its path; "
            "`weights` none asks for random weights"
        )
    return found


def _of_hub(page: str, names: Iterable[str]) -> Path | None:
    """The first file of these names that the cache of Hugging Face has of a page."""
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        return None
    paths = (hub.try_to_load_from_cache(page, name) for name in names)
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def _there(file: Path, what: str, call: str) -> Path:
    if not file.is_file():
        raise ValueError(
            f"`weights`: {what} are not in the cache ({file.parent} has no {file.name}), and nothing is downloaded: "
            f"call {call} once where there is a network"
        )
    return file


FEW = 4
OPTIONAL = "num_batches_tracked"  # which older files do not have
Shapes = Mapping[str, tuple[int, ...]]


class Matching(NamedTuple):
    """Which value of a file each value of a model gets, and the names that were not matched.

    `dropped` is what names of the file begin with, `added` what those of the model do, where the others do not.
    `reshaped` are names of the model, with both shapes.
    """

    pairs: dict[str, str]
    missing: list[str]
    unmatched: list[str]
    reshaped: list[str]
    dropped: str = ""
    added: str = ""

    def remarks(self, origin: str) -> Iterator[str]:
        """Remarks, a line each."""
        renamed = f", without {self.dropped!r} in front of names" if self.dropped else ""
        renamed += f", for the names in {self.added.rstrip('.')}" if self.added else ""
        yield f"weights of {origin}: {counted(len(self.pairs), 'value', 'values')}{renamed}"
        yield from self.problems()

    def problems(self) -> Iterator[str]:
        if self.reshaped:
            yield f"initial values are kept, as shapes differ: {some(self.reshaped, FEW)}"
        if self.missing:
            yield f"initial values are kept, as the weights have no such names: {some(self.missing, FEW)}"
        if self.unmatched:
            yield f"not used, as the model has no such names: {some(self.unmatched, FEW)}"


def match(theirs: Shapes, ours: Shapes, ties: Mapping[str, str] | None = None) -> Matching:
    """Match the names of a file to those of a model, of which `ties` are those of the same value as another one.

    A prefix of all names of one side, such as "module." or "model.", is left out: the one by which most match.
    """
    ties = ties or {}
    dropped, by_dropping = _prefix(theirs, ours)
    added, by_adding = _prefix(ours, theirs)
    dropped, added = (dropped, "") if by_dropping >= by_adding else ("", added)
    seen = {added + name.removeprefix(dropped): name for name in theirs if name.startswith(dropped)}
    names: dict[str, list[str]] = {}
    for name in ours:
        names.setdefault(ties.get(name, name), []).append(name)
    found = Matching({}, [], [], [], dropped, added)
    for first, same in names.items():
        there = next((seen[name] for name in same if name in seen), None)
        if there is None:
            found.missing.extend([] if first.endswith(OPTIONAL) else [first])
        elif theirs[there] == ours[first]:
            found.pairs[first] = there
        else:
            found.reshaped.append(f"{first} {theirs[there]} for {ours[first]}")
    found.unmatched.extend(name for new, name in seen.items() if new not in ours)
    found.unmatched.extend(name for name in theirs if not name.startswith(dropped))
    return found


def _prefix(longer: Iterable[str], shorter: Shapes) -> tuple[str, int]:
    """The prefix of most names that differ otherwise, and their number; no prefix is preferred."""
    votes: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        votes.update(".".join(parts[:n]) for n in range(len(parts)) if ".".join(parts[n:]) in shorter)
    best = max(votes, key=lambda prefix: (votes[prefix], -len(prefix)), default="")
    return best and f"{best}.", votes[best]


class _Wanted(NamedTuple):
    """Elements of a value that a rank holds first: `runs` of the flattened whole."""

    name: str
    runs: list[tuple[int, int]]
    target: Tensor


def average_of(folder: Path) -> Path | None:
    """The file that has the average of the weights of a run, or of a checkpoint; None if there is no average.

    Raises OSError, and ValueError for what is no such file.
    """
    if (folder / AVERAGE).is_file():
        return folder / AVERAGE
    path = folder / OPTIMIZER
    has = path.is_file() and any(key.startswith(f"{SLOT}/") for key in _of_safetensors(path).shapes)
    return path if has else None


def with_average(stored: WeightSource, path: Path) -> WeightSource:
    """Weights of which parameters are averages, from the file that `average_of` found. Raises OSError, ValueError."""
    averages, prefix = _of_safetensors(path), "" if path.name == AVERAGE else f"{SLOT}/"

    def read(name: str) -> Tensor:
        for each in (name, stored.ties.get(name, name)):
            if f"{prefix}{each}" in averages.shapes:
                return averages.read(f"{prefix}{each}")
        return stored.read(name)

    return replace(stored, origin=f"{stored.origin} (averages)", read=read)


def has_adapters(names: Iterable[str]) -> bool:
    """Whether these names of values are of a training with `lora`."""
    return any(name.endswith(ADAPTER[-1]) for name in names)


def without_adapters(stored: WeightSource) -> WeightSource:
    """The weights of the plain model, W + alpha / r * B A, of a training with `lora`; others as they are."""
    if not has_adapters(stored.shapes):
        return stored

    def read(name: str) -> Tensor:
        """Raises Damaged."""
        value, beside = stored.read(name), [name.removesuffix(".weight") + end for end in ADAPTER]
        if beside[-1] not in stored.shapes:
            return value
        try:
            a, b, alpha = (stored.read(each).to(torch.float64) for each in beside)
            return value.to(torch.float64).add(b @ a * (alpha / len(a))).to(value.dtype)
        except (KeyError, RuntimeError, TypeError, SafetensorError) as error:
            raise Damaged(f"{stored.origin}: the adapter of {name} cannot be merged: {error}") from None

    shapes = {name: shape for name, shape in stored.shapes.items() if not name.endswith(ADAPTER)}
    return replace(stored, origin=f"{stored.origin} (with merged adapters)", shapes=shapes, read=read)


def load_weights(
    stages: LocalStages,
    source: str,
    *,
    model: str = "",
    strict: bool = False,
    complete: bool = False,
    average: Path | None = None,
) -> list[str]:
    """Load pretrained weights into a model that is distributed over ranks, before its engine is made. Collective.

    `source` is a file of torch.save or safetensors, a folder of a run, a checkpoint, a name such as
    "ResNet50_Weights.IMAGENET1K_V2", or "pretrained", for which `model` is the name that the model was made by. Values
    of equal name and shape are loaded. The rest, such as a head of another number of classes, keeps its initial values,
    unless the match is to be `strict`, or `complete`: all values of the model are there, perhaps among others.
    `average` is a file with averages of parameters, as `average_of` finds it; of a folder they are taken if there are
    any. Adapters of a training with `lora` are merged into the weights, unless a `strict` match has them. Returns what
    there is to say, alike on all ranks.

    Raises:
        Refusal: on all ranks: there are no such weights, none matches, or, if it is to be strict, not all do.
    """
    comm, stored, matching = stages.comm, None, None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            stored = open_weights(source, model)
            average = average_of(Path(stored.origin).parent) if Path(source).is_dir() else average
            if average is not None:
                stored = with_average(stored, average)
            if not (strict and has_adapters(stages.shapes)):
                stored = without_adapters(stored)
            matching = match(stored.shapes, {name: shape for name, (shape, _) in stages.shapes.items()}, stages.ties)
            _require(stored, matching, stages, strict, complete)
    origin, matching = comm.broadcast_object((stored and stored.origin, matching))
    assert matching is not None
    _hand_out(stages, matching.pairs, stored)
    stored = None  # nor the pages of its file
    parameters = {name for same in stages.names_of.values() for name in same}
    return [*matching.remarks(origin), *not_finite(comm, origin, stages.own_state().items(), parameters)]


def not_finite(
    comm: Communicator, origin: str, values: Iterable[tuple[str, Tensor]], parameters: Set[str]
) -> list[str]:
    """A remark about the first of these values of a model that has NaN, or, if it is a parameter, infinities.

    Each rank has its own values; the remark is the same on all. Masks in buffers may have infinities. Collective.
    """
    ends = [(name, torch.stack(x.aminmax())) for name, x in values if x.is_floating_point() and x.numel()]
    found = [name for name, x in ends if not (x.isfinite() if name in parameters else ~x.isnan()).all()]
    names = sorted({name for rank in comm.all_gather_object(found) for name in rank})
    if not names:
        return []
    more = f", and {len(names) - 1:,} more" if len(names) > 1 else ""
    return [
        f"warning: {origin} has values that are NaN or infinite, the first in {names[0]}{more}: outputs of the model "
        "are likely to be NaN; take an older checkpoint"
    ]


def _require(stored: WeightSource, matching: Matching, stages: LocalStages, strict: bool, complete: bool) -> None:
    if not matching.pairs:
        raise ValueError(
            f"`weights` {stored.origin} fits to nothing of the model: it has "
            f"{some([*stored.shapes], FEW) or 'no values'}, but the model has {some([*stages.shapes], FEW)}"
        )
    problems = "; ".join((matching._replace(unmatched=[]) if complete else matching).problems())
    if (strict or complete) and problems:
        raise ValueError(f"`weights` {stored.origin}: not all of it fits to the model: {problems}")


def _wanted(stages: LocalStages, pairs: Mapping[str, str]) -> Iterator[_Wanted]:
    """The values that this rank is the first to hold."""
    parameters = {name for same in stages.names_of.values() for name in same}
    for together in stages.together:
        for name, p in together.parameters if together.comm.rank == 0 else ():
            first = stages.ties.get(name, name)
            if first in pairs and p.numel():
                runs = [(run.start, run.stop) for run in stages.runs(name, 0, p.numel())]
                yield _Wanted(first, runs, p.data)
    for stage, module in stages.modules_of.items():
        for name, value in module.state_dict(keep_vars=True).items() if stages.groups[stage].rank == 0 else ():
            first = stages.ties.get(name, name)
            if name not in parameters and first in pairs:
                yield _Wanted(first, [(0, value.numel())], value)


@torch.no_grad()
def _hand_out(stages: LocalStages, pairs: Mapping[str, str], stored: WeightSource | None) -> None:
    comm, mine = stages.comm, [*_wanted(stages, pairs)]
    if stored is None:
        comm.isend_object([(name, runs, target.dtype) for name, runs, target in mine], 0).wait()
        for wanted in mine:
            length = sum(stop - start for start, stop in wanted.runs)
            part = comm.recv(torch.empty(length, dtype=wanted.target.dtype), 0)
            wanted.target.copy_(part.view(wanted.target.shape))
    else:

        def part_of(name: str, runs: list[tuple[int, int]]) -> Tensor:
            flat = stored.read(pairs[name]).reshape(-1)
            return torch.cat([flat[start:stop] for start, stop in runs]) if len(runs) != 1 else flat[slice(*runs[0])]

        for wanted in mine:
            wanted.target.copy_(part_of(wanted.name, wanted.runs).view(wanted.target.shape))
        for rank in range(1, comm.size):
            for name, runs, dtype in comm.recv_object(rank):
                comm.send(part_of(name, runs).to(dtype).contiguous(), rank)
    for together in stages.together:
        for _, p in together.parameters:
            together.comm.broadcast(p.data)
    for stage, module in stages.modules_of.items():
        for buffer in module.buffers():
            stages.groups[stage].broadcast(buffer.data)
