"""Checkpoints of a training run: written by all ranks in parallel while training goes on, read under any plan.

    checkpoints = Checkpoints("runs/mine/checkpoints", comm)
    found = checkpoints.newest()
    position = checkpoints.load(engine, found) if found else {"epoch": 0}
    ...
    checkpoints.save(engine, {"epoch": 1})      # now and then
    checkpoints.close()

A checkpoint is what one process would have written, whatever plan its ranks had. A folder is for one run: checkpoints
from which this one did not go on by `load` are moved out of its way, and stay.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl._files import LOCK, POLL_SECONDS, Replacement, lock, naming
from mpi4dl._numbers import Damaged
from mpi4dl.checkpoints import storage
from mpi4dl.checkpoints.json_values import SavedRandomness, Unreadable, encode, unlike
from mpi4dl.checkpoints.manifest import CLASSES, MODEL, OPTIMIZER, Job, Writing, checkpoints_in, clean, name_of, step_of
from mpi4dl.checkpoints.saved import Kept, Saved, learn, learned, newest_whole, require_whole, slots_of
from mpi4dl.checkpoints.storage import Spec, StorageLayout
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.replicas.buckets import Shard
from mpi4dl.parallel.replicas.update import options_of

# The values of an engine in a checkpoint, taken from it and put back, under any plan.
#
# Every rank contributes the shards of parameters that it holds, and what else of the model it is the first to hold.

Values = tuple[StorageLayout, list[Shard]]


class _Known(NamedTuple):
    """The description of a value by the rank that holds its beginning; of a parameter, with the optimizer's slots.

    `whole` are the slots that are not one number for each element.
    """

    spec: Spec
    slots: dict[str, Spec]
    whole: tuple[str, ...]


def capture(engine: Kept, extra: Mapping[str, Any]) -> Job:
    """A copy on the host of all that this rank writes. Collective. Raises ValueError for what cannot be kept."""
    if engine.is_averaged:
        raise ValueError("a checkpoint was asked for while the weights are their average: leave `averaged()` before it")
    scaler = engine.scaler
    model, optimizer = _values(engine, list(engine.shards()))
    state = {
        "step": engine.num_steps,
        "plan": engine.plan.describe(),
        "seed": engine.executor.seed,
        "num_runs": engine.executor.num_runs,
        "scaler": {"scale": scaler.scale, "finite_steps": scaler.finite_steps} if scaler.enabled else None,
        "optimizer": {
            "class": type(engine.optimizer).__name__,
            "groups": [encode(options_of(group)) for group in engine.optimizer.param_groups],
            "slots": slots_of(optimizer[0]),
        },
        "extra": encode(extra),
    }
    mine = SavedRandomness.now()._asdict() | {"norms": learned(engine)}
    return Job(engine.num_steps, {MODEL: model, OPTIMIZER: optimizer}, state, mine)


def _values(engine: Kept, mine: Sequence[Any]) -> tuple[Values, Values]:
    """The files of the model and of the optimizer."""
    stages, rest = engine.stages, engine.buffers()
    known: dict[str, _Known] = {}
    for found in engine.comm.all_gather_object(_firsts(engine, mine, rest)):
        known |= found
    model = [Shard(name, 0, _on_host(value)) for name, value in rest.items()]
    optimizer = []
    for shard in mine:
        name = _own_name(engine, shard.name)
        model.append(Shard(name, shard.start, _on_host(shard.value)))
        for slot in known[name].slots:
            if slot not in known[name].whole or shard.start == 0:
                start = 0 if slot in known[name].whole else shard.start
                optimizer.append(Shard(f"{slot}/{name}", start, _on_host(_as_tensor(shard.state[slot]))))
    specs = {name: known[name].spec for name in stages.shapes if name not in stages.ties}
    slots = {f"{slot}/{name}": spec for name, one in known.items() for slot, spec in one.slots.items()}
    return (StorageLayout.of(specs, stages.ties), model), (StorageLayout.of(slots), optimizer)


def _firsts(engine: Kept, mine: Sequence[Any], rest: Mapping[str, Tensor]) -> dict[str, _Known]:
    found = {name: _Known(Spec(tuple(value.shape), value.dtype), {}, ()) for name, value in rest.items()}
    for shard in mine:
        if shard.start == 0:
            name = _own_name(engine, shard.name)
            shape = engine.stages.shapes[name][0]
            state = {slot: _as_tensor(value) for slot, value in shard.state.items() if value is not None}
            whole = tuple(slot for slot, value in state.items() if value.shape != shard.value.shape)
            slots = {
                slot: Spec(tuple(value.shape) if slot in whole else shape, value.dtype) for slot, value in state.items()
            }
            found[name] = _Known(Spec(shape, shard.value.dtype), slots, whole)
    return found


def _own_name(engine: Kept, name: str) -> str:
    """The one under which a value is stored that has several names."""
    return engine.stages.ties.get(name, name)


def _as_tensor(value: Any) -> Tensor:
    """Some optimizers count steps as plain numbers."""
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous().reshape(-1)


def restore(engine: Kept, saved: Saved) -> dict[str, Any]:
    """Go on from a checkpoint; returns what was passed to `capture` as `extra`. Collective.

    Under the plan that wrote it, every rank takes its own random state, and what its norms had learned; under another
    one, all take the random state of rank 0.
    Raises Refusal on all ranks, before anything is changed, if the checkpoint is of another model or optimizer.
    """
    with engine.comm.together((ValueError,)):
        _fits(engine, saved)
    stages, optimizer, state = engine.stages, engine.optimizer, saved.state
    for group, known in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update(known)
    parameters = {name for same in stages.names_of.values() for name in same}
    for module in stages.modules_of.values():
        buffers = {
            name: _own_name(engine, name) for name in module.state_dict(keep_vars=True) if name not in parameters
        }
        module.load_state_dict({name: saved.model.whole(own) for name, own in buffers.items()}, strict=False)
    slots: dict[str, list[str]] = {}
    for key in saved.optimizer.layout.specs:
        slot, _, name = key.partition("/")
        slots.setdefault(name, []).append(slot)

    def read(name: str, start: int, stop: int) -> tuple[Tensor, dict[str, Tensor]]:
        own = _own_name(engine, name)
        shape, found = saved.model.layout.specs[own].shape, {}
        for slot in slots.get(own, ()):
            key = f"{slot}/{own}"
            like = shape != () and saved.optimizer.layout.specs[key].shape == shape
            found[slot] = saved.optimizer.read(key, start, stop) if like else saved.optimizer.whole(key)
        return saved.model.read(own, start, stop), found

    engine.load_shards(read)
    engine.num_steps = state.step
    engine.executor.seed, engine.executor.num_runs = state.seed, state.num_runs
    if engine.scaler.enabled and state.scaler is not None:
        engine.scaler.scale, engine.scaler.finite_steps = state.scaler
    same_plan = engine.plan.is_told_by(state.plan) and len(saved.ranks) == engine.comm.size
    saved.ranks[engine.comm.rank if same_plan else 0].put()
    engine.executor.draw_alike()  # a checkpoint may be of ranks that did not
    if same_plan:
        learn(engine, saved.norms[engine.comm.rank])
    return saved.extra


def _fits(engine: Kept, saved: Saved) -> None:
    stages, path, optimizer = engine.stages, saved.path, engine.optimizer
    there = saved.model.layout.specs
    here = {name: Spec(*spec) for name, spec in stages.shapes.items() if name not in stages.ties}
    for name in [*here, *there]:
        shapes = [f"shape {specs[name].shape}" if name in specs else "no such value" for specs in (there, here)]
        if shapes[0] != shapes[1]:
            raise Refusal(f"{path} is of another model: {name} has {shapes[0]} there, but {shapes[1]} here")
        kinds = [specs[name].dtype for specs in (there, here)]
        if kinds[0] != kinds[1] and not all(kind.is_floating_point for kind in kinds):  # masters may be wider
            raise Refusal(f"{path} is of another model: {name} is {kinds[0]} there, but {kinds[1]} here")
    known = saved.state.optimizer.class_
    if known != type(optimizer).__name__:
        raise Refusal(f"{path} was written with the optimizer {known}, but this is {type(optimizer).__name__}")
    if len(saved.groups) != len(optimizer.param_groups):
        has, wants = len(saved.groups), len(optimizer.param_groups)
        raise Refusal(f"{path} was written with {has} groups of parameters, but the optimizer has {wants}")
    for known_options, group in zip(saved.groups, optimizer.param_groups, strict=True):
        problem = unlike(known_options, options_of(group), optional=set(group) - set(optimizer.defaults))
        if problem is not None:
            raise Refusal(f"{path} does not fit: of the options of {type(optimizer).__name__}, {problem}")


SIGHT_SECONDS = 10.0  # for what rank 0 made to be seen through a shared file system


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in one folder, of which the newest `keep` stay. Every method is collective but `failed`.

    `skipped` says what was wrong with those that `newest` passed over. Only one job at a time may use a folder. Before
    its first `save`, a run that did not `load` from this folder moves older checkpoints into a folder earlier-...,
    where nothing deletes them. A run that did moves those that are newer than its own.

    Raises:
        Refusal: on all ranks: another job uses the folder, it cannot be made, or not all ranks see it.
    """

    def __init__(self, folder: str | Path, comm: Communicator, keep: int = 2) -> None:
        self.folder, self.comm, self.keep = Path(folder), comm, keep
        self.skipped: list[str] = []
        self._lock: int | None = None
        self._writing: Writing | None = None
        self._saved: int | None = None
        self._began_at = -1  # the step of the checkpoint of this folder from which the run goes on
        self._alone = False  # what was of other runs is out of the way
        with comm.together():
            if comm.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = lock(self.folder)
                clean(self.folder)
        with comm.together():
            self._see()

    def _see(self) -> None:
        deadline = time.monotonic() + SIGHT_SECONDS
        while not (self.folder / LOCK).exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self.folder}, which rank 0 made, is not there: all ranks write checkpoints, so the run "
                    "folder must be on a file system that they share"
                )
            time.sleep(POLL_SECONDS)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole. Those that are damaged, and newer, are put aside for good.

        Raises:
            Refusal: on all ranks: the newest that is not damaged cannot be read. Nothing is put aside then.
        """
        with refusing():
            found, self.skipped = newest_whole(checkpoints_in(self.folder), self.comm)
        with self.comm.together():
            for path in checkpoints_in(self.folder) if self.comm.rank == 0 and found else ():
                if path == found:
                    break
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
        return found

    def save(self, engine: Kept, extra: Mapping[str, Any]) -> None:
        """Keep the state of `engine`, and what is to be known beside it, while training goes on.

        `extra` is numbers, text, tensors and nests of them; that of rank 0 counts. Waits if the last one is still being
        written. A step that was saved already is not saved again.

        Raises:
            Refusal: on all ranks: the last checkpoint could not be written.
        """
        self.wait()
        if not self._alone:
            self.comm.from_first(self._put_aside)
            self._alone = True
        if engine.num_steps != self._saved:
            with self.comm.together((ValueError,)):
                job = capture(engine, extra)
            self._writing = Writing(self.folder, job, self.comm.rank, self.comm.size, self.keep)
            self._saved = engine.num_steps

    def _put_aside(self) -> None:
        others = [path for path in checkpoints_in(self.folder) if (step_of(path) or 0) > self._began_at]
        if not others:
            return
        aside = self.folder / f"earlier-{time.time_ns()}"
        aside.mkdir()
        for path in others:
            path.rename(aside / path.name)
        logging.getLogger(__name__).warning(
            "%s held checkpoints from which this run does not go on, the newest %s: they are in %s now",
            self.folder,
            others[0].name,
            aside.name,
        )

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the checkpoint under way cannot be written: then all ranks should `wait`."""
        return self._writing is not None and self._writing.error is not None

    def wait(self) -> None:
        """Return when no checkpoint is being written. Raises Refusal on all ranks if it could not be."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.written.wait()
        self._agree(writing)
        writing.finish()
        self._agree(writing)

    def _agree(self, writing: Writing) -> None:
        """Raise on all ranks if one of them could not write, or was kept from it."""
        error, name = writing.error, name_of(writing.job.step)
        try:
            with self.comm.together((Refusal,)):
                if isinstance(error, OSError):
                    raise Refusal(f"{name} cannot be written to {self.folder}: {error.strerror or error}") from error
                if isinstance(error, Exception):
                    raise error
                if error is not None:  # SystemExit, at which the main thread would end well
                    raise RuntimeError(f"{name} was not written to {self.folder}: {error!r}") from error
        except Refusal as refusal:
            self._saved = None
            writing.cancel()
            self.comm.barrier()
            if self.comm.rank == 0:
                writing.remove()
            self.comm.barrier()
            left = checkpoints_in(self.folder)
            stays = f"{left[0]} is the newest one" if left else "there is none yet"
            raise Refusal(f"{refusal}; {stays}, from which `resume` goes on once there is room") from error

    def load(self, engine: Kept, path: Path) -> dict[str, Any]:
        """Go on from one of these checkpoints; returns the `extra` it was saved with. Raises Refusal as `load` does."""
        extra = load(engine, path)
        if path.resolve().parent == self.folder.resolve():
            self._saved = self._began_at = engine.num_steps
            self._alone = False
        return extra

    def close(self) -> None:
        """Stop, on this rank, without waiting; call `wait` before it at a good end."""
        if self._writing is not None:
            self._writing.cancel()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        self.close()


@contextmanager
def refusing() -> Iterator[None]:
    """An error of a checkpoint that all ranks find becomes a Refusal."""
    try:
        yield
    except (Damaged, Unreadable) as problem:
        raise Refusal(str(problem)) from problem


def load(engine: Kept, path: Path) -> dict[str, Any]:
    """Go on from the checkpoint in `path`; returns the `extra` it was saved with. Collective.

    Raises:
        Refusal: on all ranks, with the engine as it was, if the checkpoint is damaged, cannot be read, or is of
            another model or optimizer.
    """
    with refusing():
        require_whole(path, engine.comm)
    with engine.comm.together():
        saved = Saved(path)
    with saved:
        return restore(engine, saved)


def save_model(engine: Kept, path: Path, classes: Sequence[str] = (), about: Mapping[str, str] | None = None) -> None:
    """Write the weights alone, as a safetensors file that names what is tied in its metadata. Collective.

    `classes`, the names of what the outputs stand for, are there as JSON, and so is what else there is to say `about`
    the model.

    Raises Refusal on all ranks if it cannot be written; then nothing is there, or the old file is.
    """
    (layout, pieces), _ = _values(engine, [shard._replace(state={}) for shard in engine.shards()])
    told = {CLASSES: json.dumps(list(classes))} if classes else {}
    layout = storage.StorageLayout.of(layout.specs, {**layout.metadata, **told, **(about or {})})
    new, comm = Replacement(path), engine.comm
    try:
        with comm.together((OSError,)), naming(path):
            storage.write(new.temporary, layout, pieces, header=comm.rank == 0)
    except Refusal:
        if comm.rank == 0:
            new.drop()
        raise
    with comm.together((OSError,)):
        if comm.rank == 0:
            new.keep()
            storage.flush_folder(path.parent)
