"""The lock of a folder: one process has it at a time, whatever becomes of that process."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpi4dl import _files as locking
from mpi4dl._files import lock
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.runs.folder import ConfigError, RunFolder
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.pool.zygote import ROOT
from tests.support.interrupted import flags_of

HOLDER = """
import sys
from pathlib import Path
from mpi4dl._files import lock

lock(Path(sys.argv[1]))
print(flush=True)
input()
"""


def in_use(folder: Path) -> str:
    return f"another job is writing to {folder}: wait for its end, or name another `run_folder`"


def test_a_folder_is_locked_until_it_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "LOCK_SECONDS", 0.1)
    held = lock(tmp_path)
    with pytest.raises(ValueError, match="another job is writing to") as caught:
        lock(tmp_path)
    assert str(caught.value) == in_use(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


def test_a_process_that_is_killed_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "\n"
    monkeypatch.setattr(locking, "LOCK_SECONDS", 0.0)
    with pytest.raises(ValueError, match="another job"):
        lock(tmp_path)
    holder.kill()
    holder.communicate()
    os.close(lock(tmp_path))


def failing(number: int) -> Callable[..., None]:
    def flock(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_counts_as_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    assert lock(tmp_path) is None
    (said,) = caplog.messages
    assert said == (
        f"{tmp_path} is on a file system without locks ({os.strerror(number)}): see to it that no other job writes "
        "there"
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF])
def test_a_lock_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        lock(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / ".lock"))


def test_of_two_runs_that_begin_at_once_in_a_folder_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    take = second.lock

    def first_is_faster() -> None:
        first.claim()
        first.write_config("x = 1\n")
        first.unlock()
        take()

    monkeypatch.setattr(second, "lock", first_is_faster)
    with pytest.raises(ConfigError, match="holds files already"):
        second.claim()
    second.unlock()


def start(comm: Communicator, folder: Path, *flags: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locking, "LOCK_SECONDS", 0.1)
        with pytest.raises(Refusal) as caught:
            train(comm, flags_of(folder, *flags))
    return str(caught.value)


def test_a_run_that_goes_on_is_left_alone_also_without_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    flags = ("--resume", "auto", "--save-every", "none")
    other = RunFolder(tmp_path / "run").claim()
    assert ranks(2).run(start, other.path, *flags) == [in_use(other.path).replace("`run_folder`", "--run-folder")] * 2
    other.write_config("")
    assert ranks(2).run(start, other.path, *flags) == [in_use(other.path).replace("`run_folder`", "--run-folder")] * 2
    other.unlock()
    assert sorted(path.name for path in other.path.iterdir()) == [".lock", "config.toml"]
    ranks(2).run(train, flags_of(other.path, *flags, "--max-steps", "1", "--eval-every", "none"))
    other.lock()
    other.unlock()
