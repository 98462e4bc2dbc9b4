"""The meaning of --resume: where a run is recorded, what it goes on from, and what must be as it was."""

import json
import shlex
from pathlib import Path

import pytest

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.runtime.checkpoint.manifest import STATE
from mpi4dl.runtime.config import parse
from mpi4dl.runtime.resuming import (
    FROM_CHECKPOINT,
    SAME_ALWAYS,
    SAME_WITHIN_AN_EPOCH,
    Origin,
    command_to_go_on,
    compare,
    find_origin,
    options_to_compare,
)
from tests.pool.ranks import Ranks


def make_run(path: Path, *steps: int) -> Path:
    for step in steps:
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    path.mkdir(exist_ok=True)
    (path / "config.toml").touch()
    return path


def origin(comm: Communicator, flags: list[str]) -> Origin | str:
    try:
        return find_origin(comm, parse(flags))
    except Refusal as refusal:
        return str(refusal)


def found(ranks: Ranks, *flags: str) -> tuple[Path, bool, list[str]]:
    """The folder, whether the run is in it already, and the names of checkpoints: the same on all ranks."""
    one, other = ranks(2).run(origin, list(flags))
    assert (one.folder.path, one.in_place, one.candidates) == (other.folder.path, other.in_place, other.candidates)
    return one.folder.path, one.in_place, [path.name for path in one.candidates]


def said(ranks: Ranks, *flags: str) -> str:
    one, other = ranks(2).run(origin, list(flags))
    assert one == other
    return one


def test_a_run_begins_anew_unless_it_is_asked_to_go_on(ranks: Ranks, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    assert found(ranks, "--run-folder", str(run)) == (run, False, [])


def test_auto_goes_on_where_there_is_a_run(ranks: Ranks, tmp_path: Path) -> None:
    folder = ("--run-folder", str(tmp_path / "run"))
    assert found(ranks, *folder, "--resume", "auto") == (tmp_path / "run", False, [])
    make_run(tmp_path / "run")
    assert found(ranks, *folder, "--resume", "auto") == (tmp_path / "run", True, [])
    make_run(tmp_path / "run", 8, 10)
    assert found(ranks, *folder, "--resume", "auto") == (tmp_path / "run", True, ["step-00000010", "step-00000008"])


def test_auto_needs_a_name_and_leaves_other_folders_alone(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert found(ranks, "--run-folder", str(tmp_path), "--resume", "auto") == (tmp_path, False, [])
    assert said(ranks, "--resume", "auto") == (
        "--resume auto goes on in the folder that --run-folder names: add --run-folder"
    )


def test_a_path_is_a_run_or_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "old", 1, 2), tmp_path / "new"
    folder = ("--run-folder", str(new))
    assert found(ranks, *folder, "--resume", str(old)) == (new, False, ["step-00000002", "step-00000001"])
    one = old / "checkpoints" / "step-00000001"
    assert found(ranks, *folder, "--resume", str(one)) == (new, False, ["step-00000001"])
    assert found(ranks, "--run-folder", str(old), "--resume", str(old))[:2] == (old, True)
    nameless, in_place, _ = found(ranks, "--resume", str(old))
    assert (nameless.parent, in_place) == (Path("runs"), False)


def test_a_path_without_a_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert said(ranks, "--resume", str(missing)) == (
        f"--resume {missing}: no such folder; name a run, one of its checkpoints, or auto"
    )
    assert said(ranks, "--resume", str(tmp_path)) == f"--resume {tmp_path}: there is no checkpoint in this folder"


OPTIONS = options_to_compare(parse([]), num_images=100)


def checkpoint(path: Path, batch: int) -> Path:
    (path / STATE).write_text(json.dumps({"extra": {"options": OPTIONS, "batch": batch}}))
    return path


def test_what_a_checkpoint_remembers_is_written_as_on_the_command_line() -> None:
    assert set(OPTIONS) == {*SAME_ALWAYS, *SAME_WITHIN_AN_EPOCH, *FROM_CHECKPOINT}
    assert (OPTIONS["--lr"], OPTIONS["--seed"], OPTIONS["the number of training images"]) == ("0.01", "0", "100")


@pytest.mark.parametrize("name", SAME_ALWAYS)
@pytest.mark.parametrize("batch", [0, 3])
def test_some_options_must_be_as_they_were(tmp_path: Path, name: str, batch: int) -> None:
    with pytest.raises(Refusal) as caught:
        compare(checkpoint(tmp_path, batch), {**OPTIONS, name: "other"})
    assert str(caught.value) == f"{tmp_path} was written with {name} {OPTIONS[name]}, but this is other"


@pytest.mark.parametrize("name", SAME_WITHIN_AN_EPOCH)
def test_images_and_batches_may_only_change_between_epochs(tmp_path: Path, name: str) -> None:
    assert compare(checkpoint(tmp_path, 0), {**OPTIONS, name: "7"}) == []
    with pytest.raises(Refusal, match=r", but this is 7, which must not change within an epoch$"):
        compare(checkpoint(tmp_path, 3), {**OPTIONS, name: "7"})


def test_what_the_checkpoint_knows_better_is_said(tmp_path: Path) -> None:
    (line,) = compare(checkpoint(tmp_path, 0), {**OPTIONS, "--lr": "0.5"})
    assert line == "--lr 0.5 is not used: the checkpoint goes on with 0.01"


def test_a_checkpoint_of_a_script_is_not_one_of_the_command(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(json.dumps({"extra": {"epoch": 1}}))
    with pytest.raises(Refusal, match=r"was not written by mpi4dl.train: load it with mpi4dl.runtime.checkpoint.load$"):
        compare(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ("--lr 0.1", "--lr 0.1"),
        ("--resume none --lr 0.1 --run-folder old", "--lr 0.1"),
        ("--run-folder=old --lr 0.1 --resume=some/path", "--lr 0.1"),
        ("--images 'two words'", "--images 'two words'"),
    ],
)
def test_the_command_to_go_on_is_the_same_with_two_flags(argv: str, flags: str) -> None:
    command = command_to_go_on(4, shlex.split(argv), Path("runs/a b"))
    assert command == f"mpirun -n 4 python -m mpi4dl.train {flags} --run-folder 'runs/a b' --resume auto"
