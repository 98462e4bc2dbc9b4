"""A checkpoint that is there: whether it is whole, and what it holds, every field looked at before any is used."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpi4dl._files import read_regular
from mpi4dl.checkpoints.json_values import LARGEST, MOST, Damaged, JsonValue, Randomness, Unreadable, decode, parse
from mpi4dl.checkpoints.manifest import MODEL, OPTIMIZER, STATE, read_manifest, step_of
from mpi4dl.checkpoints.storage import Reader, StorageLayout, verify
from mpi4dl.comm import Communicator
from mpi4dl.geometry import Interval, Split, Tiling
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import ReadShard, Shard
from mpi4dl.parallel.spatial.halo_prefetch import Holding

# The interface of an engine for checkpoints.


class Scaler(Protocol):
    """The state of loss scaling under fp16."""

    enabled: bool
    scale: float
    finite_steps: int


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
    def scaler(self) -> Scaler: ...

    def shards(self) -> Iterator[Shard]: ...

    def load_shards(self, read: ReadShard) -> None: ...

    def buffers(self) -> dict[str, Tensor]: ...


# The halo prefetches of the norms of a rank's stages, as JSON.
#
# It decides in which order sums are made, so that a run that goes on must know it to go on to the last bit.


class Learned(NamedTuple):
    """Of a norm in a stage of a direction: whether it waits for the next one; what ranks hold, by what they own."""

    part: tuple[int, int]
    name: str
    waits: bool
    held: Holding


def learned(engine: Kept) -> list[Any]:
    """The halo prefetches of this rank's norms, in `engine`."""
    found = []
    for place, part in engine.stages.parts.items():
        names = {id(value): name for name, value in part.module.named_parameters()}
        for norm, waits, known in part.grid.halo_prefetch.learned():
            if id(norm) in names:
                tilings = [[_encoded(owned), _encoded(held)] for owned, held in known.items()]
                found.append([list(place), names[id(norm)], waits, tilings])
    return found


def _encoded(tiling: Tiling) -> list[Any]:
    return [[list(split.cuts), [list(rows) for rows in split.held]] for split in tiling.splits]


class LearnedHalos:
    """Saved halo prefetches of a rank's norms; `set` restores them. Raises Damaged if `node` does not hold such."""

    def __init__(self, node: JsonValue) -> None:
        self.norms = [_read(*norm.items(4)) for norm in node.items()]

    def set(self, engine: Kept) -> None:
        weights = {place: dict(part.module.named_parameters()) for place, part in engine.stages.parts.items()}
        for norm in self.norms:
            known = weights.get(norm.part, {}).get(norm.name)
            if known is not None:
                engine.stages.parts[norm.part].grid.halo_prefetch.learn(known, norm.waits, norm.held)


def _read(part: JsonValue, name: JsonValue, waits: JsonValue, held: JsonValue) -> Learned:
    direction, stage = (number.integer() for number in part.items(2))
    tilings = [[_tiling(one, len(pair.items(2)[0].items())) for one in pair.items(2)] for pair in held.items()]
    return Learned((direction, stage), name.text(), waits.flag(), {owned: held for owned, held in tilings})


def _tiling(node: JsonValue, axes: int) -> Tiling:
    return Tiling(tuple(_split(split) for split in node.items(axes)))


def _split(node: JsonValue) -> Split:
    cuts, held = node.items(2)
    pairs = ([end.integer() for end in pair.items(2)] for pair in held.items(len(cuts.items()) - 1))
    return Split(tuple(cut.integer() for cut in cuts.items()), tuple(Interval(*pair) for pair in pairs))


class Saved:
    """A checkpoint, opened for reading; its values are read when they are wanted, all else is here.

    `ranks` are the random states of the ranks that wrote it, `learned_halos` is what their norms had learned, `extra`
    what the training loop wanted to be kept, and `groups` are the options of the optimizer's groups. Raises OSError,
    and Damaged if it is not of one piece.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        state = parse(read_regular(path / STATE), STATE)
        self.step = state.at("step").integer()
        if step_of(path) not in (None, self.step):
            raise Damaged(f"{STATE} is of step {self.step}")
        self.plan = state.at("plan").text()
        self.seed = state.at("seed").integer(-MOST - 1, LARGEST)
        self.num_runs = state.at("num_runs").integer()
        self.scaler = state.at("scaler").optional(_scaler)
        optimizer = state.at("optimizer")
        self.optimizer_class = optimizer.at("class").text()
        self.groups = [_options(group) for group in optimizer.at("groups").items()]
        self.extra = _options(state.at("extra"))
        self.ranks = [Randomness(rank) for rank in state.at("ranks").items()]
        self.learned_halos = [LearnedHalos(rank.at("norms")) for rank in state.at("ranks").items()]
        if not self.ranks:
            raise state.at("ranks").wrong("the random states of at least one rank")
        with ExitStack() as closing:
            self.model = closing.enter_context(Reader(path / MODEL))
            self.optimizer = closing.enter_context(Reader(path / OPTIMIZER))
            self._check_slots(optimizer.at("slots"))
            self.close = closing.pop_all().close

    def _check_slots(self, slots: JsonValue) -> None:
        """The optimizer's values are those that were written, each of a value of the model."""
        there, written = self.optimizer.layout.specs, slots.entries()
        for key in (*written, *there):
            if key not in there or key not in written:
                raise Damaged(f"{OPTIMIZER} has {'no ' if key in written else ''}{key!r}, unlike what {STATE} says")
            if written[key].plain != [there[key].name, *there[key].shape]:
                raise Damaged(f"{OPTIMIZER} has {key!r} as {there[key]}, unlike what {STATE} says")
            if key.partition("/")[2] not in self.model.layout.specs:
                raise Damaged(f"{OPTIMIZER} has {key!r}, which is of no value of the model")

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slots_of(layout: StorageLayout) -> dict[str, list[Any]]:
    """Dtype and shape of each of the optimizer's values, from state.json."""
    return {key: [spec.name, *spec.shape] for key, spec in layout.specs.items()}


def _scaler(node: JsonValue) -> tuple[float, int]:
    """The scale of an fp16 loss, and the steps since it was changed."""
    scale = node.at("scale").number()
    if not scale > 0:
        raise node.at("scale").wrong("a number greater than 0")
    return scale, node.at("finite_steps").integer()


def _options(node: JsonValue) -> dict[str, Any]:
    found = decode(node)
    if not isinstance(found, dict):
        raise node.wrong("a dict")
    return found


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
