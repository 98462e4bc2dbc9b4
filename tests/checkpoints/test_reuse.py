"""A folder of checkpoints that is used again: nothing of another run is lost, or gone on from without being asked."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.checkpoints import Checkpoints, load
from mpi4dl.checkpoints.manifest import MANIFEST, MODEL, OPTIMIZER, STATE, checkpoints_in
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from tests.checkpoints.made import another_format, flip, pipe
from tests.pool.ranks import Ranks
from tests.support.short_runs import DATA_2, SMALL, batch_of, build, digest_of, tiles_of


def engine_of(comm: Communicator, seed: int = 0) -> Engine:
    model, optimizer = build(SMALL, seed)
    return Engine(model, DATA_2, optimizer, F.cross_entropy, comm=comm)


def train(comm: Communicator, folder: Path, steps: int, go_on_from: str | None = None, keep: int = 2) -> list[str]:
    """A loop that saves after every step; what rank 0 warned of."""
    engine, warned = engine_of(comm), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mpi4dl").addHandler(handler)
    with Checkpoints(folder, comm, keep) as checkpoints:
        if go_on_from is not None:
            checkpoints.load(engine, folder / go_on_from)
        for _ in range(steps):
            images, targets = batch_of(SMALL, engine.num_steps)
            engine.step(tiles_of(images, engine), targets, SMALL.size)
            checkpoints.save(engine, {})
    logging.getLogger("mpi4dl").removeHandler(handler)
    return warned


def names(folder: Path) -> list[str]:
    return sorted(
        path.name.partition("-")[0] if path.name.startswith("earlier") else path.name for path in folder.iterdir()
    )


def test_what_another_run_left_is_kept_and_not_the_newest(ranks: Ranks, tmp_path: Path) -> None:
    team = ranks(2)
    assert team.run(train, tmp_path, 4) == [[], []]
    bits = (tmp_path / "step-00000004" / MODEL).read_bytes()
    (warned,), others = team.run(train, tmp_path, 2)
    assert names(tmp_path) == [".lock", "earlier", "step-00000001", "step-00000002"]
    (aside,) = tmp_path.glob("earlier-*")
    assert names(aside) == ["step-00000003", "step-00000004"]
    assert (aside / "step-00000004" / MODEL).read_bytes() == bits
    assert warned == (
        f"{tmp_path} held checkpoints from which this run does not go on, the newest step-00000004: they are in "
        f"{aside.name} now"
    )
    assert others == []
    team.run(train, tmp_path, 1)
    assert names(tmp_path) == [".lock", "earlier", "earlier", "step-00000001"]


@pytest.mark.parametrize(("origin", "left"), [("step-00000004", False), ("step-00000003", True)])
def test_a_run_that_goes_on_counts_what_is_behind_it_as_its_own(
    ranks: Ranks, tmp_path: Path, origin: str, left: bool
) -> None:
    ranks(2).run(train, tmp_path, 4)
    ranks(2).run(train, tmp_path, 1, origin)
    last = int(origin[-1])
    assert names(tmp_path) == [".lock", *["earlier"] * left, f"step-0000000{last}", f"step-0000000{last + 1}"]
    for aside in tmp_path.glob("earlier-*"):
        assert names(aside) == ["step-00000004"]


def test_looking_at_checkpoints_moves_none(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(train, tmp_path, 2)
    ranks(2).run(train, tmp_path, 0)
    ranks(2).run(train, tmp_path, 0, "step-00000001")
    assert names(tmp_path) == [".lock", "step-00000001", "step-00000002"]


def loaded(comm: Communicator, path: Path, of_folder: bool) -> str:
    """What is said of a checkpoint that cannot be loaded; the engine is as it was."""
    engine = engine_of(comm, seed=3)
    before, drawn = digest_of(engine.stages.own_state()), torch.get_rng_state()
    with ExitStack() as closing:
        go_on = closing.enter_context(Checkpoints(path.parent, comm)).load if of_folder else load
        with pytest.raises(Refusal) as caught:
            go_on(engine, path)
    assert digest_of(engine.stages.own_state()) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert engine.num_steps == 0
    return str(caught.value)


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, STATE])
@pytest.mark.parametrize("of_folder", [True, False])
def test_flipped_bytes_are_not_loaded(ranks: Ranks, tmp_path: Path, file: str, of_folder: bool) -> None:
    ranks(2).run(train, tmp_path, 1)
    path = tmp_path / "step-00000001"
    flip(path / file, -9)
    (said,) = set(ranks(2).run(loaded, path, of_folder))
    assert said.startswith(f"{path}: {file}: bytes ")
    assert said.endswith(" are not those that were written")


def newest(comm: Communicator, folder: Path) -> str:
    with Checkpoints(folder, comm) as checkpoints, pytest.raises(Refusal) as caught:
        checkpoints.newest()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"), [(another_format, "its format is 3"), (pipe, f"{MANIFEST}: it is no")]
)
def test_what_cannot_be_read_now_is_not_put_aside_as_damaged(
    ranks: Ranks, tmp_path: Path, change: Any, complaint: str
) -> None:
    ranks(2).run(train, tmp_path, 2)
    path = checkpoints_in(tmp_path)[0]
    change(path / MANIFEST)
    for said in (ranks(2).run(newest, tmp_path), ranks(2).run(loaded, path, False)):
        assert said == [said[0]] * 2
        assert said[0].startswith(f"{path}: {complaint}")
        assert said[0].endswith("; nothing was changed: mend that, or name another checkpoint")
    assert names(tmp_path) == [".lock", "step-00000001", "step-00000002"]
