"""A checkpoint that is there: whether it is whole, and what it holds, every field looked at before any is used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpi4dl._files import read_regular
from mpi4dl._numbers import MOST, Damaged, typed
from mpi4dl.checkpoints.json_values import LARGEST, SavedRandomness, Unreadable, decode, parse
from mpi4dl.checkpoints.manifest import MODEL, OPTIMIZER, STATE, read_manifest, step_of
from mpi4dl.checkpoints.storage import Reader, StorageLayout, verify
from mpi4dl.comm import Communicator
from mpi4dl.geometry import Split, Tiling
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import ReadShard, Shard

# The interface of an engine for checkpoints.


class Kept(Protocol):
    """The face of `mpi4dl.engine.Engine` that checkpoints see, who stand below it."""

    comm: Communicator
    plan: Plan
    stages: LocalStages
    optimizer: torch.optim.Optimizer
    executor: Executor
    num_steps: int
    is_averaged: bool

    @property
    def scaler(self) -> Any: ...

    def shards(self) -> Iterator[Shard]: ...

    def load_shards(self, read: ReadShard) -> None: ...

    def buffers(self) -> dict[str, Tensor]: ...


# The halo prefetches of the norms of a rank's stages, as JSON.
#
# It decides in which order sums are made, so that a run that goes on must know it to go on to the last bit.


class Learned(NamedTuple):
    """Of a norm in a stage of a direction: whether it waits for the next one; what ranks own, and what they hold."""

    part: tuple[int, int]
    name: str
    waits: bool
    held: list[tuple[tuple[Split, ...], tuple[Split, ...]]]


def learned(engine: Kept) -> list[Learned]:
    """The halo prefetches of this rank's norms, in `engine`."""
    found = []
    for place, part in engine.stages.parts.items():
        names = {id(value): name for name, value in part.module.named_parameters()}
        for norm, waits, known in part.grid.halo_prefetch.learned():
            if id(norm) in names:
                tilings = [(owned.splits, held.splits) for owned, held in known.items()]
                found.append(Learned(place, names[id(norm)], waits, tilings))
    return found


def learn(engine: Kept, norms: Sequence[Learned]) -> None:
    """Restore the halo prefetches of this rank's norms."""
    weights = {place: dict(part.module.named_parameters()) for place, part in engine.stages.parts.items()}
    for part, name, waits, held in norms:
        known = weights.get(part, {}).get(name)
        if known is not None:
            tilings = {Tiling(owned): Tiling(wide) for owned, wide in held}
            engine.stages.parts[part].grid.halo_prefetch.learn(known, waits, tilings)


# The content of state.json.


class _SavedScaler(NamedTuple):
    scale: Annotated[float, (0.0).__lt__, "a number greater than 0"]
    finite_steps: int


class _SavedOptimizer(NamedTuple):
    class_: str
    groups: list[Any]
    slots: dict[str, Any]


class _SavedNorms(NamedTuple):
    """Of a rank, beside its `SavedRandomness`."""

    norms: list[Learned]


class SavedState(NamedTuple):
    """All of a checkpoint but its values; `groups` and `extra` are encoded, and `ranks` are not yet looked into."""

    step: int
    plan: str
    seed: Annotated[int, range(-MOST - 1, LARGEST + 1).__contains__, "a seed"]
    num_runs: int
    scaler: _SavedScaler | None
    optimizer: _SavedOptimizer
    extra: Any
    ranks: list[Any]


class Saved(AbstractContextManager["Saved"]):
    """A checkpoint, opened for reading; its values are read when they are wanted, all else is here.

    `ranks` are the random states of the ranks that wrote it, `norms` is what their norms had learned, `extra` what the
    training loop wanted to be kept, and `groups` are the options of the optimizer's groups. Raises OSError, and Damaged
    if it is not of one piece.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: SavedState = typed(SavedState, parse(read_regular(path / STATE), STATE), STATE)
        if step_of(path) not in (None, self.state.step):
            raise Damaged(f"{STATE} is of step {self.state.step}")
        groups = decode(self.state.optimizer.groups, f"{STATE}: 'optimizer': 'groups'")
        self.groups: list[dict[str, Any]] = typed(list[dict[str, Any]], groups, f"{STATE}: 'groups'")
        extra = decode(self.state.extra, f"{STATE}: 'extra'")
        self.extra: dict[str, Any] = typed(dict[str, Any], extra, f"{STATE}: 'extra'")
        ranks = [(f"{STATE}: 'ranks'[{number}]", rank) for number, rank in enumerate(self.state.ranks)]
        self.ranks = [typed(SavedRandomness, rank, where).states(where) for where, rank in ranks]
        self.norms: list[list[Learned]] = [typed(_SavedNorms, rank, where).norms for where, rank in ranks]
        for owned, held in (pair for norms in self.norms for norm in norms for pair in norm.held):
            if len(owned) != len(held) or any(len(each.cuts) != len(each.held) + 1 for each in (*owned, *held)):
                raise Damaged(f"{STATE}: a norm of 'ranks' holds no tiling")
        if not self.ranks:
            raise Damaged(f"{STATE}: 'ranks' has no random states")
        with ExitStack() as closing:
            self.model = closing.enter_context(Reader(path / MODEL))
            self.optimizer = closing.enter_context(Reader(path / OPTIMIZER))
            self._check_slots(self.state.optimizer.slots)
            self.close = closing.pop_all().close

    def _check_slots(self, written: Mapping[str, Any]) -> None:
        """The optimizer's values are those that were written, each of a value of the model."""
        there = self.optimizer.layout.specs
        for key in (*written, *there):
            if key not in there or key not in written:
                raise Damaged(f"{OPTIMIZER} has {'no ' if key in written else ''}{key!r}, unlike what {STATE} says")
            if written[key] != [there[key].name, *there[key].shape]:
                raise Damaged(f"{OPTIMIZER} has {key!r} as {there[key]}, unlike what {STATE} says")
            if key.partition("/")[2] not in self.model.layout.specs:
                raise Damaged(f"{OPTIMIZER} has {key!r}, which is of no value of the model")

    def __exit__(self, *_: object) -> None:
        self.close()


def slots_of(layout: StorageLayout) -> dict[str, list[Any]]:
    """Dtype and shape of each of the optimizer's values, from state.json."""
    return {key: [spec.name, *spec.shape] for key, spec in layout.specs.items()}


def check(path: Path, part: int = 0, parts: int = 1) -> None:
    """Look at all of a checkpoint but the checksums, and at part number `part` of those out of `parts`.

    Raises Damaged unless it is whole, and Unreadable where that cannot be seen.
    """
    try:
        manifest = read_manifest(path)
        for name, written in manifest.items():
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            size = (path / name).stat().st_size
            if size != written.size:
                raise Damaged(f"{name} has {size:,} bytes instead of {written.size:,}")
        for name, written in manifest.items():
            verify(path / name, written.ranges[part::parts])
        Saved(path).close()
    except OSError as error:
        if not path.is_dir():
            raise Damaged("it was removed meanwhile, as a run does with its oldest checkpoints (`keep`)") from None
        where = "" if error.filename is None else f"{Path(error.filename).name}: "
        raise Unreadable(f"{where}{error.strerror or error}") from None


def newest_whole(candidates: Sequence[Path], comm: Communicator | None = None) -> tuple[Path | None, list[str]]:
    """The first of these checkpoints that is whole, and what is wrong with those before it. Collective over `comm`.

    Each rank of `comm` verifies a share of every checkpoint; `candidates` of rank 0 count.

    Raises:
        Unreadable: the first of them that is not damaged cannot be read, which says nothing against it; on all ranks.
    """
    skipped: list[str] = []
    for path in candidates if comm is None else comm.broadcast_object(list(candidates)):
        try:
            require_whole(path, comm)
        except Damaged as damaged:
            skipped.append(str(damaged))
            continue
        return path, skipped
    return None, skipped


def require_whole(path: Path, comm: Communicator | None = None) -> None:
    """Raise Damaged unless a checkpoint is whole, or Unreadable, with its path, on all ranks alike. Collective."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    mine: ValueError | None = None
    try:
        check(path, rank, size)
    except (Damaged, Unreadable) as found:
        mine = found
    problems = [mine] if comm is None else comm.all_gather_object(mine)
    for kind, rule in ((Unreadable, "; nothing was changed: mend that, or name another checkpoint"), (Damaged, "")):
        for problem in problems:
            if isinstance(problem, kind):
                raise kind(f"{path}: {problem}{rule}")
