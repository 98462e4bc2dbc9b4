"""Checkpoints of engines: a run goes on to the last bit under its own plan, and to rounding under any other."""

import json
import re
import resource
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import _files as locking
from mpi4dl.checkpoints import Checkpoints, load, save_model, storage
from mpi4dl.checkpoints import checkpoints as checkpoint_face
from mpi4dl.checkpoints.manifest import MODEL, OPTIMIZER, STATE
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, on_ranks
from tests.support.faults import file_limit
from tests.support.short_runs import (
    BOTH,
    DATA_2,
    DEEP,
    DROPPING,
    EXACT,
    SMALL,
    UNUSED,
    Task,
    TILES_1x2,
    TILES_2x2,
    assert_close,
    batch_of,
    digest_of,
    model_of,
    optimizer_of,
    plain,
    tiles_of,
)

SAVED = 2  # steps before the checkpoint; one comes after it
STAGES = Plan(((1, 2), (1, 2)), zero=1)
GEMS = Plan(((1, 1), (1, 1)), bidirectional=1)


def engine_of(comm: Communicator, task: Task, plan: Plan, seed: int = 0, **options: Any) -> Engine:
    torch.manual_seed(seed)
    if plan.num_stages > 1:
        image = (task.batch, 3, *task.size)
        model = split(lambda: model_of(task), plan, comm, seed=seed, balance=task.balance, image=image)
    else:
        model = LocalStages.whole(model_of(task), plan, comm)
    optimizer = optimizer_of(task, model)
    engine = Engine(model, plan, optimizer, F.cross_entropy, comm=comm, **{**dict(task.engine_options), **options})
    for part in engine.stages.parts.values():
        part.grid.halo_prefetch.everywhere = True  # as on GPUs: what norms learn decides in which order sums are made
    return engine


def step(engine: Engine, task: Task) -> float:
    images, targets = batch_of(task, engine.num_steps)
    return engine.step(tiles_of(images, engine), targets, task.size).loss


def bits_of(engine: Engine) -> dict[str, str]:
    """Digests of all that this rank holds: values, and what the optimizer knows. With ZeRO 3, weights are shards."""
    held = engine.stages.own_state() if engine.plan.zero < 3 else dict(engine.stages.named_buffers())
    found = {name: digest_of({name: value}) for name, value in held.items()}
    for shard in engine.shards():
        values = {slot: value for slot, value in shard.state.items() if isinstance(value, Tensor)}
        found[f"{shard.name}[{shard.start}:{shard.stop}]"] = digest_of({"value": shard.value, **values})
    return found


def written(comm: Communicator, task: Task, plan: Plan, folder: Path) -> tuple[float, dict[str, str]]:
    """Save after two steps, and make the third while it is written: its loss, and what it led to."""
    engine = engine_of(comm, task, plan)
    torch.manual_seed(7)
    with Checkpoints(folder, comm) as checkpoints:
        for _ in range(SAVED):
            step(engine, task)
        checkpoints.save(engine, {"place": (3, float("inf"))})
        loss = step(engine, task)
    return loss, bits_of(engine)


def went_on(comm: Communicator, task: Task, plan: Plan, folder: Path) -> tuple[float, dict[str, str]]:
    engine = resumed(comm, task, plan, folder)
    return step(engine, task), bits_of(engine)


def resumed(comm: Communicator, task: Task, plan: Plan, folder: Path) -> Engine:
    engine = engine_of(comm, task, plan, seed=1)
    torch.manual_seed(99)
    with Checkpoints(folder, comm) as checkpoints:
        found = checkpoints.newest()
        assert found is not None
        assert checkpoints.load(engine, found) == {"place": (3, float("inf"))}
    assert engine.num_steps == SAVED
    return engine


def kept(engine: Engine, folder: Path) -> Path:
    """A checkpoint of this engine, on disk."""
    with Checkpoints(folder, engine.comm) as checkpoints:
        checkpoints.save(engine, {})
        checkpoints.wait()
        return checkpoints.newest() or folder


SAME = [
    (DROPPING, TILES_2x2),
    (DROPPING, GEMS),
    (DEEP, BOTH),
    (DEEP, Plan(((1, 2), (1, 1)), data=1, microbatches=2)),
    (DEEP, Plan(data=2, zero=1)),
    (DEEP, Plan(((1, 2),), data=2, zero=3)),
    (replace(DEEP, optimizer="Adafactor"), Plan(data=2, zero=2)),  # whose state is by rows and columns
]


@pytest.mark.parametrize(("task", "plan"), SAME, ids=lambda one: one.describe() if isinstance(one, Plan) else str(one))
@pytest.mark.sample(2)
def test_the_same_plan_goes_on_to_the_last_bit(ranks: Ranks, tmp_path: Path, task: Task, plan: Plan) -> None:
    team = ranks(plan.num_ranks)
    uninterrupted = team.run(written, task, plan, tmp_path)
    assert team.run(went_on, task, plan, tmp_path) == uninterrupted
    assert all(len(bits) > 5 for _, bits in uninterrupted)


def state_after(comm: Communicator, task: Task, plan: Plan, folder: Path) -> Mapping[str, Tensor]:
    engine = resumed(comm, task, plan, folder)
    step(engine, task)
    return engine.gather_state() or {}


@pytest.fixture(scope="module")
def by_stages(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two stages on 1x2 tiles each, whose ranks share out the optimizer by ZeRO 1."""
    folder = tmp_path_factory.mktemp("stages")
    ranks(4).run(written, DEEP, STAGES, folder)
    return folder


OTHERS = [Plan(), Plan(data=4), Plan(((1, 2),), zero=3), Plan(((1, 2),), data=2, zero=2), Plan(data=2, zero=3)]


@pytest.mark.parametrize("plan", OTHERS, ids=lambda plan: plan.describe())
@pytest.mark.sample(2)
def test_another_plan_goes_on_as_plain_pytorch(ranks: Ranks, by_stages: Path, plan: Plan) -> None:
    assert_goes_on(ranks, plan, by_stages)


def test_two_directions_go_on_as_plain_pytorch_and_others_from_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(written, DEEP, GEMS, tmp_path)
    for plan in (Plan(microbatches=2), GEMS, Plan(((1, 2), (1, 1)), microbatches=2)):
        assert_goes_on(ranks, plan, tmp_path)


def assert_goes_on(ranks: Ranks, plan: Plan, folder: Path) -> None:
    found = ranks(plan.num_ranks).run(state_after, DEEP, plan, folder)[0]
    expected = plain(DEEP, plan.num_microbatches).state
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_close(found[name], value, EXACT, name)


def test_the_file_is_what_plain_pytorch_has(ranks: Ranks, by_stages: Path) -> None:
    path = by_stages / "step-00000002"
    optimizer, model = load_file(path / OPTIMIZER), load_file(path / MODEL)
    shapes = {name: value.shape for name, value in model_of(DEEP).state_dict().items()}
    assert {name: value.shape for name, value in model.items()} == shapes
    trained = {name: p.shape for name, p in model_of(DEEP).named_parameters()}
    for slot in ("exp_avg", "exp_avg_sq"):
        assert {n: optimizer[f"{slot}/{n}"].shape for n in trained} == trained
    assert {float(optimizer[f"step/{name}"]) for name in trained} == {2.0}
    assert len(optimizer) == 3 * len(trained)
    assert json.loads((path / STATE).read_text())["plan"] == STAGES.describe()


class _Tied(nn.Module):
    """The last weight is the first one, under a name that comes before it in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.again = nn.Conv2d(3, 3, 1)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.norm(self.first(x))).mean((2, 3)) * self.scale


def tied(comm: Communicator, folder: Path, plan: Plan) -> bool:
    def engine(seed: int) -> Engine:
        torch.manual_seed(seed)
        model = _Tied().double()
        return Engine(model, plan, torch.optim.Adam(model.parameters(), lr=0.1), F.cross_entropy, comm=comm)

    first, second = engine(0), engine(1)
    step(first, SMALL)
    save_model(first, folder / MODEL)
    load(second, kept(first, folder))
    return step(first, SMALL) == step(second, SMALL) and bits_of(first) == bits_of(second)


@pytest.mark.parametrize("plan", [TILES_1x2, Plan(data=2, zero=1), Plan(data=2, zero=3)], ids=Plan.describe)
def test_what_has_two_names_is_stored_under_one(ranks: Ranks, tmp_path: Path, plan: Plan) -> None:
    assert ranks(2).run(tied, tmp_path, plan) == [True, True]
    names = set(_Tied().state_dict()) - {"first.weight"}
    for path in (tmp_path, tmp_path / "step-00000001"):
        with safe_open(str(path / MODEL), "pt") as file:
            assert set(file.keys()) == names
            assert file.metadata() == {"first.weight": "again.weight"}
    optimizer = load_file(tmp_path / "step-00000001" / OPTIMIZER)
    assert optimizer["exp_avg/scale"].shape == optimizer["step/scale"].shape == ()


def settings(comm: Communicator, folder: Path) -> tuple[Any, ...]:
    """What a checkpoint brings back beside tensors, and what this rank draws then, under this plan and another."""
    options = {"precision": "fp16"}
    first, second = (engine_of(comm, UNUSED, DATA_2, **options) for _ in range(2))
    first.optimizer.param_groups[0]["lr"] = 0.125
    first.scaler.scale, first.scaler.finite_steps = 4.0, 17
    first.executor.num_runs = 5
    torch.manual_seed(comm.rank + 5)
    with Checkpoints(folder, comm) as checkpoints:
        checkpoints.save(first, {"lists": [1, 2]})
        draws = [float(torch.rand(()))]
        checkpoints.wait()
        for engine in (second, engine_of(comm, UNUSED, TILES_1x2)):
            load(engine, checkpoints.newest() or folder)
            draws.append(float(torch.rand(())))
    scaler, executor = second.scaler, second.executor
    return second.optimizer.param_groups[0]["lr"], scaler.scale, scaler.finite_steps, executor.num_runs, draws


def test_settings_and_random_numbers_come_back(ranks: Ranks, tmp_path: Path) -> None:
    (*zero, draws_0), (*one, draws_1) = ranks(2).run(settings, tmp_path)
    assert zero == one == [0.125, 4.0, 17, 5]
    assert draws_0[0] != draws_1[0]
    assert draws_0 == [draws_0[0]] * 3
    assert draws_1 == [draws_1[0], draws_1[0], draws_0[0]]


class _Counting(torch.optim.SGD):
    """Counts its steps by a plain number, and has a state without a value."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                self.state[p]["nothing"] = None
        return super().step(closure)


@on_ranks(2)
def test_plain_numbers_of_an_optimizer_come_back(comm: Communicator, tmp_path: Path) -> None:
    def engine() -> Engine:
        torch.manual_seed(0)
        model = model_of(UNUSED)
        return Engine(model, DATA_2, _Counting(model.parameters(), lr=0.1), F.cross_entropy, comm=comm)

    first, second = engine(), engine()
    for _ in range(2):
        step(first, UNUSED)
    load(second, kept(first, tmp_path))
    step(second, UNUSED)
    assert {int(shard.state["count"]) for shard in second.shards() if "count" in shard.state} == {3}


def low_precision(comm: Communicator, folder: Path) -> tuple[float, dict[str, str]]:
    options: dict[str, Any] = {"precision": "bf16", "low_precision_weights": True}
    plan = Plan(data=2, zero=1)
    task = replace(SMALL, optimizer="AdamW")

    def engine() -> Engine:
        model = model_of(task).float()
        return Engine(model, plan, optimizer_of(task, model), F.cross_entropy, comm=comm, **options)

    def one(engine: Engine) -> float:
        images, targets = batch_of(task, engine.num_steps)
        return engine.step(tiles_of(images.float(), engine), targets, task.size).loss

    first, second = engine(), engine()
    one(first)
    load(second, kept(first, folder))
    assert one(first) == one(second)
    assert bits_of(first) == bits_of(second)
    return 1.0, bits_of(first)


def test_master_weights_are_what_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(low_precision, tmp_path)
    model = load_file(tmp_path / "step-00000001" / MODEL)
    trained = {name for name, _ in model_of(SMALL).named_parameters()}
    assert {model[name].dtype for name in trained} == {torch.float32}
    assert any(not torch.equal(model[name].bfloat16().float(), model[name]) for name in trained)


def refused(comm: Communicator, folder: Path) -> list[str]:
    """What is said where a checkpoint does not fit; the engine is as it was."""

    def message(engine: Engine) -> str:
        before = bits_of(engine)
        with pytest.raises(Refusal) as caught:
            load(engine, folder / "step-00000002")
        assert bits_of(engine) == before
        return str(caught.value)

    wide = replace(DEEP, model_options=(("depth", 11), ("num_filters", 6)))
    deep = replace(DEEP, model_options=(("depth", 20), ("num_filters", 4)))
    other = replace(DEEP, optimizer="SGD")
    grouped = model_of(DEEP)
    parameters = list(grouped.parameters())
    groups = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    engines = [engine_of(comm, task, Plan()) for task in (wide, deep, other)]
    return [message(e) for e in (*engines, Engine(grouped, Plan(), groups, F.cross_entropy, comm=comm))]


def test_what_does_not_fit_is_refused_before_anything_is_changed(ranks: Ranks, by_stages: Path) -> None:
    path = by_stages / "step-00000002"
    ((wide, deep, other, groups),) = ranks(1).run(refused, by_stages)
    assert wide.startswith(f"{path} is of another model: ")
    assert " has shape (4, 3, 3, 3) there, but shape (6, 3, 3, 3) here" in wide
    assert re.search(r": \S+ has no such value there, but shape \(.*\) here$", deep), deep
    assert other == f"{path} was written with the optimizer AdamW, but this is SGD"
    assert groups == f"{path} was written with 1 groups of parameters, but the optimizer has 2"


@on_ranks(2)
def test_training_goes_on_while_a_checkpoint_is_written(comm: Communicator, tmp_path: Path) -> None:
    """And a second save waits for the first."""
    go_on = threading.Event()
    original = storage.write

    def held_up(*args: Any, **options: Any) -> Any:
        assert go_on.wait(20)
        return original(*args, **options)

    engine = engine_of(comm, SMALL, TILES_1x2)
    with pytest.MonkeyPatch.context() as patch, Checkpoints(tmp_path, comm, keep=1) as checkpoints:
        patch.setattr(storage, "write", held_up)
        step(engine, SMALL)
        before = digest_of(engine.stages.own_state())
        checkpoints.save(engine, {})
        step(engine, SMALL)
        comm.barrier()
        assert list(tmp_path.glob("step-*")) == []
        assert digest_of(engine.stages.own_state()) != before
        go_on.set()
        checkpoints.save(engine, {})
        checkpoints.save(engine, {})  # which is the same step
        checkpoints.wait()
        again = engine_of(comm, SMALL, TILES_1x2, seed=3)
        load(again, checkpoints.newest() or tmp_path)
        assert digest_of(again.stages.own_state()) == digest_of(engine.stages.own_state())
    assert again.num_steps == 2
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def full_disk(comm: Communicator, folder: Path, failing: int) -> tuple[str, list[str], int]:
    """What all ranks raise where one cannot write; then there is room again."""
    engine = engine_of(comm, SMALL, TILES_1x2)
    with Checkpoints(folder, comm) as checkpoints:
        step(engine, SMALL)
        checkpoints.save(engine, {})
        checkpoints.wait()
        step(engine, SMALL)
        with file_limit(20000 if comm.rank == failing else resource.RLIM_INFINITY):
            checkpoints.save(engine, {})
            with pytest.raises(Refusal) as caught:
                checkpoints.wait()
        left = sorted(path.name for path in folder.iterdir())
        step(engine, SMALL)
        checkpoints.save(engine, {})
        checkpoints.wait()
        found = checkpoints.newest()
        assert found is not None
        return str(caught.value), left, int(found.name[-1])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_is_told_by_all_ranks_and_leaves_the_last_checkpoint(
    ranks: Ranks, tmp_path: Path, failing: int
) -> None:
    results = ranks(2).run(full_disk, tmp_path, failing)
    assert results[0] == results[1]
    message, left, newest = results[0]
    assert message == (
        f"{'rank 1: ' if failing else ''}step-00000002 cannot be written to {tmp_path}: File too large; "
        f"{tmp_path / 'step-00000001'} is the newest one, from which `resume` goes on once there is room"
    )
    assert left == [".lock", "step-00000001"]
    assert newest == 3


def broken(comm: Communicator, folder: Path, kind: type[BaseException], failing: int) -> tuple[str, str]:
    """How all ranks learn of an error that is no full disk."""
    engine = engine_of(comm, SMALL, TILES_1x2)
    write = storage.write

    def wrong(*arguments: Any, **options: Any) -> Any:
        if comm.rank == failing:
            raise kind("ours")
        return write(*arguments, **options)

    checkpoints = Checkpoints(folder, comm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write", wrong)
        checkpoints.save(engine, {})
        with pytest.raises((KeyError, MemoryError, RuntimeError)) as caught:
            checkpoints.wait()
    checkpoints.close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("kind", "raised"), [(KeyError, "KeyError"), (SystemExit, "RuntimeError")])
def test_an_error_that_is_no_full_disk_is_raised_by_all_ranks(
    ranks: Ranks, tmp_path: Path, kind: type[BaseException], raised: str, failing: int
) -> None:
    """Also one that ends a thread in silence: the run must not say that it is done."""
    found = ranks(2, timeout=60.0).run(broken, tmp_path, kind, failing)
    assert [name for name, _ in found] == [raised if rank == failing else "RankFailed" for rank in range(2)]
    assert all("ours" in text for _, text in found)


def damaged(comm: Communicator, folder: Path) -> tuple[str, list[str]]:
    with Checkpoints(folder, comm) as checkpoints:
        found = checkpoints.newest()
        return found.name if found else "", checkpoints.skipped


def test_what_is_damaged_is_put_aside_and_what_is_half_written_deleted(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(written, UNUSED, Plan(), tmp_path)
    whole = tmp_path / "step-00000002"
    worse = tmp_path / "step-00000009"
    worse.mkdir()
    (worse / MODEL).write_bytes(b"")
    (tmp_path / ".writing-step-00000004").mkdir()
    results = ranks(2).run(damaged, tmp_path)
    assert results == [(whole.name, [f"{worse}: it has no manifest.json"])] * 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == ".lock"
    assert names[1].startswith("damaged-step-00000009-")
    assert names[2:] == [whole.name]


@on_ranks(2)
def test_only_one_job_writes_into_a_folder(comm: Communicator, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, Checkpoints(tmp_path, comm):
        patch.setattr(locking, "LOCK_SECONDS", 0.1)
        with pytest.raises(Refusal) as caught:
            Checkpoints(tmp_path, comm)
    assert str(caught.value) == (
        f"another job is writing to {tmp_path}: wait for its end, or name another `run_folder`"
    )
    Checkpoints(tmp_path, comm).close()


@on_ranks(2)
def test_a_folder_that_not_all_ranks_see_is_refused(comm: Communicator, tmp_path: Path) -> None:
    """Rank 1 looks at a file system of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_face, "SIGHT_SECONDS", 0.1)
        with pytest.raises(Refusal) as caught:
            Checkpoints(tmp_path / "shared" if comm.rank == 0 else tmp_path / "own", comm)
    assert str(caught.value) == (
        f"rank 1: {tmp_path / 'own'}, which rank 0 made, is not there: all ranks write checkpoints, so the run folder "
        "must be on a file system that they share"
    )


@on_ranks(2)
def test_what_cannot_be_kept_is_refused(comm: Communicator, tmp_path: Path) -> None:
    engine = engine_of(comm, UNUSED, DATA_2)
    words = "cannot be kept in a checkpoint"
    with Checkpoints(tmp_path, comm) as checkpoints, pytest.raises(Refusal, match=words) as caught:
        checkpoints.save(engine, {"function": len})
    assert len(set(comm.all_gather_object(str(caught.value)))) == 1
