"""Weights from elsewhere for a model that lies over ranks: rank 0 reads, and each rank gets its part.

rank 0      file -> names matched to those of the model -> values, one after the other
the first holder of each stage, or part      its elements, which the others that hold them then have from it
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl._wording import counted
from mpi4dl.checkpoints.manifest import AVERAGE, OPTIMIZER
from mpi4dl.checkpoints.storage import Reader
from mpi4dl.checkpoints.weight_files import WeightSource, open_weights
from mpi4dl.comm import Communicator
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.parallel.replicas.average import SLOT

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
        """What there is to say, a line each."""
        renamed = f", without {self.dropped!r} in front of names" if self.dropped else ""
        renamed += f", for what is in {self.added.rstrip('.')}" if self.added else ""
        yield f"weights of {origin}: {counted(len(self.pairs), 'value', 'values')}{renamed}"
        yield from self.problems()

    def problems(self) -> Iterator[str]:
        if self.reshaped:
            yield f"left as drawn, as they have other shapes: {few(self.reshaped)}"
        if self.missing:
            yield f"left as drawn, as there are none for them: {few(self.missing)}"
        if self.unmatched:
            yield f"not used, as the model has no such names: {few(self.unmatched)}"


def few(names: list[str]) -> str:
    rest = len(names) - FEW
    return ", ".join(names[:FEW]) + (f" and {rest} more" if rest > 0 else "")


def match(theirs: Shapes, ours: Shapes, ties: Mapping[str, str] | None = None) -> Matching:
    """Match the names of a file to those of a model, of which `ties` are those of the same value as another one.

    What all names of one side have in front, such as "module." or "model.", is left out: that by which most match.
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
    """What stands in front of most names that are others otherwise, and of how many; nothing is preferred."""
    votes: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        votes.update(".".join(parts[:n]) for n in range(len(parts)) if ".".join(parts[n:]) in shorter)
    best = max(votes, key=lambda prefix: (votes[prefix], -len(prefix)), default="")
    return best and f"{best}.", votes[best]


@dataclass
class _Wanted:
    """Elements of a value that a rank holds first: `runs` of the flattened whole."""

    name: str
    runs: list[tuple[int, int]]
    target: Tensor = field(repr=False)

    def told(self) -> tuple[str, list[tuple[int, int]], torch.dtype]:
        return self.name, self.runs, self.target.dtype


def average_of(folder: Path) -> Path | None:
    """The file that has the average of the weights of a run, or of a checkpoint; None if there is no average.

    Raises OSError, and ValueError for what is no such file.
    """
    if (folder / AVERAGE).is_file():
        return folder / AVERAGE
    if not (folder / OPTIMIZER).is_file():
        return None
    with Reader(folder / OPTIMIZER) as reader:
        has = any(key.startswith(f"{SLOT}/") for key in reader.layout.specs)
    return folder / OPTIMIZER if has else None


def with_average(stored: WeightSource, path: Path) -> WeightSource:
    """Weights of which parameters are those that a checkpoint keeps as their average. Raises OSError, ValueError."""
    reader = Reader(path)
    ties = {name: first for name, first in stored.metadata.items() if first in stored.shapes}

    def read(name: str) -> Tensor:
        for each in (name, ties.get(name, name)):
            if f"{SLOT}/{each}" in reader.layout.specs:
                return reader.whole(f"{SLOT}/{each}")
        return stored.read(name)

    return WeightSource(f"{stored.origin} (averages)", stored.shapes, read, stored.metadata)


def load_weights(
    held: Held, source: str, *, model: str = "", strict: bool = False, average: Path | None = None
) -> list[str]:
    """Give a model that lies over ranks weights from elsewhere, before its engine is made. Collective.

    `source` is a file of torch.save or safetensors, a folder of a run, a checkpoint, a name such as
    "ResNet50_Weights.IMAGENET1K_V2", or "pretrained", for which `model` is the name that the model was made by. What
    matches by name and shape is taken; the rest, such as a head of another number of classes, stays as it is, unless
    the match is to be `strict`. `average` is a file with averages of parameters, as `average_of` finds it; of a folder
    they are taken if there are any. Returns what there is to say, alike on all ranks.

    Raises:
        Refusal: on all ranks: there are no such weights, none matches, or, if it is to be strict, not all do.
    """
    comm, stored, matching = held.comm, None, None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            stored = open_weights(source, model)
            average = average_of(Path(stored.origin).parent) if Path(source).is_dir() else average
            if average is not None:
                stored = open_weights(str(average)) if average.name == AVERAGE else with_average(stored, average)
            matching = match(stored.shapes, {name: shape for name, (shape, _) in held.shapes.items()}, held.ties)
            _require(stored, matching, held, strict)
    origin, matching = comm.broadcast_object((stored and stored.origin, matching))
    assert matching is not None
    _hand_out(held, matching.pairs, stored)
    parameters = {name for same in held.names_of.values() for name in same}
    return [*matching.remarks(origin), *not_finite(comm, origin, held.own_state().items(), parameters)]


def not_finite(
    comm: Communicator, origin: str, values: Iterable[tuple[str, Tensor]], parameters: Set[str]
) -> list[str]:
    """A remark about the first of these values of a model that has NaN, or, if it is a parameter, infinities.

    Each rank has its own values; the remark is the same on all. Masks in buffers may have infinities. Collective.
    """
    found = [
        name
        for name, value in values
        if value.is_floating_point() and not (value.isfinite() if name in parameters else ~value.isnan()).all()
    ]
    names = sorted({name for rank in comm.all_gather_object(found) for name in rank})
    if not names:
        return []
    more = f", and {len(names) - 1:,} more" if len(names) > 1 else ""
    return [
        f"warning: {origin} has values that are NaN or infinite, the first in {names[0]}{more}: outputs of the model "
        "are likely to be NaN; take an older checkpoint"
    ]


def _require(stored: WeightSource, matching: Matching, held: Held, strict: bool) -> None:
    if not matching.pairs:
        raise ValueError(
            f"`weights` {stored.origin} fits to nothing of the model: it has {few(list(stored.shapes)) or 'no values'},"
            f" but the model has {few(list(held.shapes))}"
        )
    problems = "; ".join(matching.problems())
    if strict and problems:
        raise ValueError(f"`weights` {stored.origin}: not all of it fits to the model: {problems}")


def _wanted(held: Held, pairs: Mapping[str, str]) -> Iterator[_Wanted]:
    """What this rank is the first to hold."""
    parameters = {name for same in held.names_of.values() for name in same}
    for together in held.together:
        for name, p in together.parameters if together.comm.rank == 0 else ():
            first = held.ties.get(name, name)
            if first in pairs and p.numel():
                runs = [(run.start, run.stop) for run in held.runs(name, 0, p.numel())]
                yield _Wanted(first, runs, p.data)
    for stage, module in held.modules_of.items():
        for name, value in module.state_dict().items() if held.groups[stage].rank == 0 else ():
            first = held.ties.get(name, name)
            if name not in parameters and first in pairs:
                yield _Wanted(first, [(0, value.numel())], value)


@torch.no_grad()
def _hand_out(held: Held, pairs: Mapping[str, str], stored: WeightSource | None) -> None:
    comm, mine = held.comm, [*_wanted(held, pairs)]
    if stored is None:
        comm.isend_object([wanted.told() for wanted in mine], 0).wait()
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
    for together in held.together:
        for _, p in together.parameters:
            together.comm.broadcast(p.data)
    for stage, module in held.modules_of.items():
        for buffer in module.buffers():
            held.groups[stage].broadcast(buffer.data)
