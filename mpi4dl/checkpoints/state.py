"""What a checkpoint knows of an engine, taken from it and put back, whatever plan it had and has.

Every rank contributes the shards of parameters that it holds, and what else of the model it is the first to hold.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.checkpoints.foreseen import learned
from mpi4dl.checkpoints.kept import Kept
from mpi4dl.checkpoints.likeness import unlike
from mpi4dl.checkpoints.manifest import MODEL, OPTIMIZER
from mpi4dl.checkpoints.plain import encode
from mpi4dl.checkpoints.randomness import random_state
from mpi4dl.checkpoints.saved import Saved, slots_of
from mpi4dl.checkpoints.storage import Spec, StorageLayout
from mpi4dl.checkpoints.writer import Job
from mpi4dl.comm import Refusal
from mpi4dl.parallel.replicas.update import options_of
from mpi4dl.parallel.replicas.whole import Shard

Values = tuple[StorageLayout, list[Shard]]


class _Known(NamedTuple):
    """What the rank that holds the beginning of a value tells the others; of a parameter, with the optimizer's slots.

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
    return Job(
        engine.num_steps, {MODEL: model, OPTIMIZER: optimizer}, state, random_state() | {"norms": learned(engine)}
    )


def model_values(engine: Kept) -> Values:
    """The file of the model's values, and this rank's pieces of it, on the host. Collective."""
    return _values(engine, [shard._replace(state={}) for shard in engine.shards()])[0]


def _values(engine: Kept, mine: Sequence[Any]) -> tuple[Values, Values]:
    """The files of the model and of the optimizer."""
    held, rest = engine.held, engine.buffers()
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
    specs = {name: known[name].spec for name in held.shapes if name not in held.ties}
    slots = {f"{slot}/{name}": spec for name, one in known.items() for slot, spec in one.slots.items()}
    return (StorageLayout.of(specs, held.ties), model), (StorageLayout.of(slots), optimizer)


def _firsts(engine: Kept, mine: Sequence[Any], rest: Mapping[str, Tensor]) -> dict[str, _Known]:
    found = {name: _Known(Spec(tuple(value.shape), value.dtype), {}, ()) for name, value in rest.items()}
    for shard in mine:
        if shard.start == 0:
            name = _own_name(engine, shard.name)
            shape = engine.held.shapes[name][0]
            state = {slot: _as_tensor(value) for slot, value in shard.state.items() if value is not None}
            whole = tuple(slot for slot, value in state.items() if value.shape != shard.value.shape)
            slots = {
                slot: Spec(tuple(value.shape) if slot in whole else shape, value.dtype) for slot, value in state.items()
            }
            found[name] = _Known(Spec(shape, shard.value.dtype), slots, whole)
    return found


def _own_name(engine: Kept, name: str) -> str:
    """The one under which a value is stored that has several names."""
    return engine.held.ties.get(name, name)


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
    held, optimizer = engine.held, engine.optimizer
    for group, known in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update(known)
    parameters = {name for same in held.names_of.values() for name in same}
    for module in held.modules_of.values():
        buffers = {name: _own_name(engine, name) for name in module.state_dict() if name not in parameters}
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
    engine.num_steps = saved.step
    engine.executor.seed, engine.executor.num_runs = saved.seed, saved.num_runs
    if engine.scaler.enabled and saved.scaler is not None:
        engine.scaler.scale, engine.scaler.finite_steps = saved.scaler
    same_plan = engine.plan.is_told_by(saved.plan) and len(saved.ranks) == engine.comm.size
    saved.ranks[engine.comm.rank if same_plan else 0].set()
    engine.executor.draw_alike()  # a checkpoint may be of ranks that did not
    if same_plan:
        saved.foreseen[engine.comm.rank].set(engine)
    return saved.extra


def _fits(engine: Kept, saved: Saved) -> None:
    held, path, optimizer = engine.held, saved.path, engine.optimizer
    there = saved.model.layout.specs
    here = {name: Spec(*spec) for name, spec in held.shapes.items() if name not in held.ties}
    for name in [*here, *there]:
        shapes = [f"shape {specs[name].shape}" if name in specs else "no such value" for specs in (there, here)]
        if shapes[0] != shapes[1]:
            raise Refusal(f"{path} is of another model: {name} has {shapes[0]} there, but {shapes[1]} here")
        kinds = [specs[name].dtype for specs in (there, here)]
        if kinds[0] != kinds[1] and not all(kind.is_floating_point for kind in kinds):  # masters may be wider
            raise Refusal(f"{path} is of another model: {name} is {kinds[0]} there, but {kinds[1]} here")
    if saved.optimizer_class != type(optimizer).__name__:
        known = saved.optimizer_class
        raise Refusal(f"{path} was written with the optimizer {known}, but this is {type(optimizer).__name__}")
    if len(saved.groups) != len(optimizer.param_groups):
        has, wants = len(saved.groups), len(optimizer.param_groups)
        raise Refusal(f"{path} was written with {has} groups of parameters, but the optimizer has {wants}")
    for known_options, group in zip(saved.groups, optimizer.param_groups, strict=True):
        problem = unlike(known_options, options_of(group), optional=set(group) - set(optimizer.defaults))
        if problem is not None:
            raise Refusal(f"{path} does not fit: of the options of {type(optimizer).__name__}, {problem}")
