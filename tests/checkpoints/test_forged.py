"""Checkpoints that were edited and sealed with the right checksums: each is refused by one error, or loads."""

import copy
import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mpi4dl._numbers import Damaged
from mpi4dl.checkpoints import Checkpoints, load
from mpi4dl.checkpoints.manifest import MANIFEST, MODEL, OPTIMIZER, STATE
from mpi4dl.checkpoints.saved import check
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.checkpoints.made import edit_header, header_of, seal, write
from tests.pool.ranks import Ranks
from tests.support.short_runs import UNUSED, batch_of, model_of, tiles_of

Edit = Callable[[Path], Any]
Step = tuple[Any, ...]  # the way to a value: keys of objects, numbers of items

DEEP = "nested far too deep"
VALUES: list[Any] = [None, True, -1, 0, 1, 7, 2**63, 2**64, 10**4000, -0.5, 1e300, float("nan"), float("inf")]
VALUES += ["", "x", "../x", "F32", "\ud800", "0" * 40, [], [0], [[1, 2]], {}, {"x": 1}, {"float": "nan"}, DEEP]
VALUES += [{"tensor": {"dtype": "nn", "values": []}}, {"tuple": [0.9]}, {"pairs": [[[], 1]]}, [0, 2**40], ["F32", 3]]


def ways(plain: Any, way: Step = ()) -> Iterator[Step]:
    """The ways to all values in some JSON."""
    yield way
    inner = enumerate(plain) if isinstance(plain, list) else plain.items() if isinstance(plain, dict) else ()
    for key, value in inner:
        yield from ways(value, (*way, key))


def changed(plain: Any, way: Step, change: Callable[[Any, Any], None]) -> Any:
    """A copy, in which `change(parent, key)` was made to the value at the end of the way."""
    root = [copy.deepcopy(plain)]
    parent: Any = root
    *before, last = (0, *way)
    for key in before:
        parent = parent[key]
    change(parent, last)
    return root[0] if root else None


def remove(parent: Any, key: Any) -> None:
    del parent[key]


def double(parent: Any, key: Any) -> None:
    if isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[f"{key}x"] = parent[key]


def rename(parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent["../../elsewhere"] = parent.pop(key)
    else:
        parent.reverse()


def replace_by(value: Any) -> Callable[[Any, Any], None]:
    return lambda parent, key: parent.__setitem__(key, value)


CHANGES = [remove, double, rename, *map(replace_by, VALUES)]


def text_of(plain: Any) -> bytes:
    return json.dumps(plain).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000).encode()


def edited(path: Path, file: str, way: Step, change: Callable[[Any, Any], None]) -> None:
    """Edit one value in the JSON of a checkpoint's file, and seal it."""
    if file == MANIFEST:
        plain = changed(json.loads((path / file).read_bytes()), way, change)
        if isinstance(plain, dict) and "files" in plain and way and way[0] == "files":
            plain["crc32"] = zlib.crc32(json.dumps(plain["files"]).encode())
        (path / file).write_bytes(text_of(plain))
        return
    if file == STATE:
        (path / file).write_bytes(text_of(changed(json.loads((path / file).read_bytes()), way, change)))
    else:
        edit_header(path / file, lambda header: text_of(changed(header, way, change)))
    seal(path)


def forgeries(path: Path) -> list[tuple[str, Step, Callable[[Any, Any], None]]]:
    """Every change of every value in every JSON of a checkpoint."""
    plains = {MANIFEST: json.loads((path / MANIFEST).read_bytes()), STATE: json.loads((path / STATE).read_bytes())}
    plains |= {name: header_of(path / name) for name in (MODEL, OPTIMIZER)}
    return [(file, way, change) for file, plain in plains.items() for way in ways(plain) for change in CHANGES]


def trained(comm: Communicator, seed: int) -> Engine:
    torch.manual_seed(seed)
    model = model_of(UNUSED)
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters()), "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return Engine(model, Plan(), optimizer, F.cross_entropy, comm=comm, precision="fp16")


def values_of(engine: Engine) -> list[Any]:
    """All that a load replaces."""
    state = [{k: v.tolist() for k, v in shard.state.items()} for shard in engine.shards()]
    weights = [value.tolist() for value in engine.stages.own_state().values()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    rest = (engine.num_steps, engine.executor.seed, engine.executor.num_runs, engine.scaler.scale)
    return [state, weights, repr(groups), rest, torch.get_rng_state().tolist(), random.getstate()]


def forged(comm: Communicator, folder: Path, number: int | None, first: int = 0, stride: int = 1) -> tuple[int, int]:
    """How many forgeries were refused, with the engine as it was, and how many loaded; of so many, or all."""
    engine = trained(comm, 0)
    images, targets = batch_of(UNUSED, 0)
    engine.step(tiles_of(images, engine), targets, UNUSED.size)
    with Checkpoints(folder / "whole", comm) as checkpoints:
        checkpoints.save(engine, {"place": (3, float("inf")), "rates": {1: torch.ones(2)}})
    (whole,) = (folder / "whole").glob("step-*")
    other = trained(comm, 1)
    before, refusals, loads = values_of(other), 0, 0
    some = forgeries(whole)[first::stride]
    for file, way, change in some if number is None else random.Random(number).sample(some, number):
        path = folder / "copy" / whole.name
        shutil.copytree(whole, path)
        edited(path, file, way, change)
        try:
            load(other, path)
        except Refusal:
            refusals += 1
            assert values_of(other) == before, (file, way, change)
        except Exception as error:
            raise AssertionError(f"{file} {way} {change.__name__} {change.__closure__}") from error
        else:
            loads += 1
            other = trained(comm, 1)
            before = values_of(other)
        shutil.rmtree(folder / "copy")
    return refusals, loads


def test_an_edited_checkpoint_is_refused_or_loads(ranks: Ranks, tmp_path: Path) -> None:
    ((refusals, loads),) = ranks(1).run(forged, tmp_path, 300)
    assert refusals > 200
    assert loads > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(16))
def test_every_edit_of_every_field_is_refused_or_loads(ranks: Ranks, tmp_path: Path, first: int) -> None:
    print(ranks(1).run(forged, tmp_path, None, first, 16))


def header(file: str, *way: Any, to: Any) -> Edit:
    return lambda path: edited(path, file, way, replace_by(to))


CASES: list[tuple[Edit, str]] = [
    (header(MODEL, "weight", "data_offsets", to=[8, 48]), "'weight' has bytes 8 to 48, but F32 [3, 4] has 48 of them"),
    (header(MODEL, "weight", "data_offsets", to=[0, 48]), "begins at byte 0, but the value before it ends at 8"),
    (header(MODEL, "weight", "data_offsets", to=[16, 64]), "begins at byte 16, but the value before it ends at 8"),
    (header(MODEL, "weight", "data_offsets", to=[48, 0]), "has bytes 48 to 0, but F32 [3, 4] has 48 of them"),
    (header(MODEL, "weight", "data_offsets", to=[0, 2**63]), "'data_offsets'[1] is 9223372036854775808, but must be"),
    (header(MODEL, "weight", "shape", to=[3, 2**60, 0]), "is [3, 1152921504606846976, 0], but must be the shape"),
    (header(MODEL, "weight", "shape", to=[3, -4]), "'shape'[1] is -4, but must be a whole number from 0 to"),
    (header(MODEL, "weight", "dtype", to="F8_E4M3"), "'dtype' is 'F8_E4M3', but must be one of F64, F32"),
    (header(MODEL, "more", to={"dtype": "I64", "shape": [], "data_offsets": [56, 64]}), "but its header tells of"),
    (lambda path: edited(path, OPTIMIZER, ("momentum/weight",), remove), "but its header tells of"),
    (lambda path: edited(path, OPTIMIZER, ("momentum/weight",), rename), "has no 'momentum/weight', unlike what state"),
    (header(OPTIMIZER, "momentum/weight", "shape", to=[12]), "as F32 [12], unlike what state.json says"),
    (header(STATE, "optimizer", "slots", "momentum/weight", to=[]), "as F32 [3, 4], unlike what state.json says"),
    (header(STATE, "optimizer", "slots", to={}), "has 'momentum/weight', unlike what state.json says"),
    (header(STATE, "extra", to=DEEP), "state.json cannot be read: maximum recursion depth exceeded"),
    (header(STATE, "seed", to=10**4000), "state.json cannot be read: a number of 4001 digits is too large"),
    (header(STATE, "scaler", "scale", to=float("nan")), "state.json cannot be read: NaN is no number of JSON"),
    (header(STATE, "step", to=8), "state.json is of step 8"),
    (header(STATE, "ranks", 0, "numpy", 2, to=10**6), "'numpy'[2] is 1000000, but must be a place"),
    (header(STATE, "ranks", 1, "numpy", 1, to=""), "'ranks'[1]: no generator of random"),
    (
        header(STATE, "ranks", 1, "numpy", 1, to="AAAA" * 900),
        "'ranks'[1]: no generator of random",
    ),
    (header(STATE, "ranks", 2, "torch", to="AAAA"), "'ranks'[2]: no generator of random"),
    (header(MANIFEST, "files", "../../x", to=[0, []]), "manifest.json names '../../x'"),
    (header(MANIFEST, "files", MODEL, 1, to=[]), "has no checksum of all of model.safetensors: byte 0 of"),
]


@pytest.mark.parametrize(("edit", "complaint"), CASES, ids=[complaint[:40] for _, complaint in CASES])
def test_what_is_wrong_is_said(tmp_path: Path, edit: Edit, complaint: str) -> None:
    path = write(tmp_path, 7)
    check(path)
    edit(path)
    with pytest.raises(Damaged) as caught:
        check(path)
    assert complaint in str(caught.value)
