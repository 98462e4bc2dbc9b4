"""Writing a checkpoint in the background: threads stand for ranks, since nothing here speaks MPI."""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpi4dl.checkpoints import manifest, storage
from mpi4dl.checkpoints.json_values import Unreadable
from mpi4dl.checkpoints.manifest import MANIFEST, MODEL, OPTIMIZER, STATE, Writing, candidates_at, checkpoints_in, clean
from mpi4dl.checkpoints.saved import newest_whole
from tests.checkpoints.made import NUM_RANKS, WEIGHT, another_format, flip, job, pipe, write


def test_a_checkpoint_is_what_one_process_would_have_written(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    assert sorted(os.listdir(path)) == [MANIFEST, MODEL, OPTIMIZER, STATE]
    model = load_file(path / MODEL)
    assert torch.equal(model["weight"], (WEIGHT + 7).reshape(3, 4))
    assert int(model["count"]) == 7
    assert torch.equal(load_file(path / OPTIMIZER)["momentum/weight"], -WEIGHT.reshape(3, 4))
    state = json.loads((path / STATE).read_text())
    assert (state["step"], len(state["ranks"])) == (7, NUM_RANKS)
    assert newest_whole([path]) == (path, [])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 300000000):
        write(tmp_path, step)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-300000000", "step-00000010"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-300000000"]


def test_the_one_just_written_is_kept_whatever_its_number(tmp_path: Path) -> None:
    for step in (50, 100, 2):
        write(tmp_path, step)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000100", "step-00000002"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    (MODEL, cut, "model.safetensors has 183 bytes instead of 184"),
    (OPTIMIZER, cut, "optimizer.safetensors has 127 bytes instead of 128"),
    (MODEL, flip, r"model.safetensors: bytes \d+ to 184 are not those that were written"),
    (OPTIMIZER, flip, r"optimizer.safetensors: bytes \d+ to 128 are not those that were written"),
    (STATE, flip, r"state.json: bytes 0 to \d+ are not those that were written"),
    (MODEL, Path.unlink, "model.safetensors is missing"),
    (STATE, Path.unlink, "state.json is missing"),
    (MANIFEST, Path.unlink, "it has no manifest.json"),
    (MANIFEST, cut, "manifest.json cannot be read: .*"),
    (
        MANIFEST,
        lambda path: path.write_text(path.read_text().replace("184", "185")),
        "manifest.json is not as it was written",
    ),
    (MANIFEST, lambda path: path.write_text("[]"), r"manifest.json is \[\], but must be an object, or a list of 3"),
    (STATE, lambda path: (path.unlink(), path.mkdir()), "state.json is missing"),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    write(folder, 1)
    write(folder, 2)
    return folder


@pytest.mark.parametrize(("file", "damage", "complaint"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(
    two: Path, tmp_path: Path, file: str, damage: Callable[[Path], Any], complaint: str
) -> None:
    shutil.copytree(two, tmp_path / "copy")
    newer, older = checkpoints_in(tmp_path / "copy")
    damage(newer / file)
    found, (why,) = newest_whole([newer, older])
    assert found == older
    problem = why.removeprefix(f"{newer}: ")
    assert re.fullmatch(complaint, problem), problem
    damage(older / file)
    assert newest_whole([newer, older])[0] is None


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


UNREADABLE: list[tuple[Callable[[Path], Any], str]] = [
    (another_format, "its format is 3, but this version of mpi4dl reads 2: use the version that wrote it"),
    (pipe, "manifest.json: it is no regular file, but a pipe, a device or a folder"),
    (endless, "manifest.json: Too many levels of symbolic links"),
]


@pytest.mark.parametrize(("change", "complaint"), UNREADABLE, ids=["format", "pipe", "endless"])
def test_what_may_be_whole_but_cannot_be_read_is_not_passed_over(
    two: Path, tmp_path: Path, change: Callable[[Path], Any], complaint: str
) -> None:
    shutil.copytree(two, tmp_path / "copy")
    newer, older = checkpoints_in(tmp_path / "copy")
    change(newer / MANIFEST)
    with pytest.raises(Unreadable) as caught:
        newest_whole([newer, older])
    assert str(caught.value) == f"{newer}: {complaint}; nothing was changed: mend that, or name another checkpoint"
    assert newest_whole([older, newer]) == (older, [])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_read_error_is_no_damage(two: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    newer, older = checkpoints_in(two)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(Unreadable, match=f"{os.strerror(number)}; nothing was changed"):
        newest_whole([newer, older])


def test_a_path_stands_for_a_checkpoint_a_folder_of_them_or_a_run(two: Path, tmp_path: Path) -> None:
    newer, older = checkpoints_in(two)
    assert candidates_at(newer) == [newer]
    assert candidates_at(two) == [newer, older]
    shutil.copytree(two, tmp_path / "run" / "checkpoints")
    assert [path.name for path in candidates_at(tmp_path / "run")] == [newer.name, older.name]
    shutil.copytree(newer, tmp_path / "renamed")
    assert candidates_at(tmp_path / "renamed") == [tmp_path / "renamed"]
    assert candidates_at(tmp_path / "nowhere") == []


def test_nothing_has_the_final_name_before_all_ranks_have_written(tmp_path: Path) -> None:
    first = Writing(tmp_path, job(5, 0), 0, NUM_RANKS, 2)
    assert first.written.wait(10)
    second = Writing(tmp_path, job(5, 1), 1, NUM_RANKS, 2)
    second.finish()
    assert checkpoints_in(tmp_path) == []
    third = Writing(tmp_path, job(5, 2), 2, NUM_RANKS, 2)
    third.finish()
    first.finish()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000005"]


def full(path: Path, *_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device", str(path))


def test_rank_0_does_not_wait_for_a_rank_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    first = Writing(tmp_path, job(2, 0), 0, 2, 2)
    assert first.written.wait(10)
    monkeypatch.setattr(storage, "write", full)
    second = Writing(tmp_path, job(2, 1), 1, 2, 2)
    assert second.written.wait(10)
    assert isinstance(second.error, OSError)
    assert second.error.strerror == "No space left on device"
    first.cancel()
    assert first.error is None
    first.remove()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_part_that_rank_0_never_sees_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LAST_SECONDS", 0.05)
    alone = Writing(tmp_path, job(2, 0), 0, 2, 2)
    alone.finish()
    assert isinstance(alone.error, OSError)
    assert str(alone.error).endswith("part-1.json, which rank 1 has written, is not seen by rank 0")
    assert checkpoints_in(tmp_path) == []


def test_bytes_that_nobody_wrote_are_an_error_of_ours(tmp_path: Path) -> None:
    ranks = [Writing(tmp_path, job(3, rank, num_ranks=4), rank, 3, 2) for rank in range(3)]
    for rank in reversed(ranks):
        rank.finish()
    assert isinstance(ranks[0].error, RuntimeError)
    assert str(ranks[0].error) == "model.safetensors: byte 172 of 184 was not written"


def test_an_interpreter_may_end_while_it_is_written(tmp_path: Path) -> None:
    writing = Writing(tmp_path, job(2, 0), 0, 2, 2)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "mpi4dl-step-00000002")
    writing.cancel()


def test_what_killed_runs_left_is_deleted(tmp_path: Path) -> None:
    write(tmp_path, 1)
    killed = Writing(tmp_path, job(2, 0), 0, 2, 2)
    assert killed.written.wait(10)
    killed.cancel()
    (tmp_path / ".removed-step-00000000").mkdir()
    (tmp_path / "notes").mkdir()
    assert len(os.listdir(tmp_path)) == 4
    clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-00000001"]
