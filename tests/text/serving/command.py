"""The serving command as a job of its own, before a tiny model that was hardly trained."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai

from tests.pool import zygote
from tests.pool.job import start
from tests.pool.ranks import Ranks
from tests.pool.zygote import launcher

CONTEXT = 2048
PATIENCE_SECONDS = 600.0
MODEL = f"num_layers=2,hidden=16,num_heads=2,context={CONTEXT}"
TRAINING = (
    f"--model gpt --model-options {MODEL} --context 32 --batch-size 4 --num-workers 0 --val-fraction 0.5 "
    "--optimizer AdamW --max-steps 1 --no-tensorboard"
).split()

FLAGS = ("--port", "0", "--threads", "1")  # tests have but a part of a core


def make_run(ranks: Ranks, folder: Path) -> Path:
    """The folder of a run of one step: its model writes noise, another one after each prompt."""
    from mpi4dl.train import train

    (folder / "corpus").mkdir()
    for i in range(8):
        (folder / "corpus" / f"{i}.txt").write_text("for word in words: print(word)\n" * 5)
    flags = ["--text", str(folder / "corpus")]
    ranks(1).run(train, [*TRAINING, *flags, "--run-folder", str(folder / "tiny")])
    return folder / "tiny"


def children(pid: int) -> list[int]:
    """The processes that this one has begotten, and those of theirs."""
    begot: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            number, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            begot.setdefault(parent, []).append(number)
    found = [pid]
    for one in found:
        found += begot.get(one, [])
    return sorted(found[1:])


def words_of(pid: int) -> list[bytes]:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


class Server:
    """A job of the command. `said` is what it has printed, complete once it has ended.

    Its ranks are forked from a process that has imported much already, or are processes of their own from the start.
    """

    def __init__(self, num_ranks: int, run: Path, *flags: str, forked: bool = True) -> None:
        python = zygote.python() if forked else sys.executable
        command = [launcher(), "-n", str(num_ranks), python, "-m", "mpi4dl.serve", str(run), *FLAGS, *flags]
        self.job = start(command)
        self.said, self.complained = "", ""
        self.url = ""
        self._greeted = threading.Event()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._listen, self._hear_complaints)]
        for reader in self._readers:
            reader.start()
        assert self._greeted.wait(PATIENCE_SECONDS)
        assert self.url, self.complained

    def _listen(self) -> None:
        assert self.job.stdout is not None
        for line in self.job.stdout:
            self.said += line
            greeting = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+)/v1\n", line)
            if greeting is not None:
                self.url = greeting[1]
                self._greeted.set()
        self._greeted.set()

    def _hear_complaints(self) -> None:
        assert self.job.stderr is not None
        self.complained = self.job.stderr.read()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)

    def metrics(self) -> dict[str, float]:
        """All values that have no labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_SECONDS).text.splitlines()
        plain = [line.split() for line in lines if line[0] != "#" and "{" not in line]
        return {name: float(value) for name, value in plain}

    def pids(self) -> list[int]:
        """The processes of the ranks, which must not be forked."""
        return [pid for pid in children(self.job.pid) if b"mpi4dl.serve" in words_of(pid) and not children(pid)]

    def ended(self) -> int:
        """The exit code of the job, when it has ended by itself."""
        code = self.job.wait(PATIENCE_SECONDS)
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
        for pipe in (self.job.stdout, self.job.stderr):
            if pipe is not None:
                pipe.close()
        return code


@contextmanager
def server(num_ranks: int, run: Path, *flags: str, forked: bool = True) -> Iterator[Server]:
    """A server, which is killed at the end if it has not ended by then."""
    one = Server(num_ranks, run, *flags, forked=forked)
    try:
        yield one
    finally:
        if one.job.poll() is None:
            os.killpg(one.job.pid, signal.SIGTERM)
        one.ended()
