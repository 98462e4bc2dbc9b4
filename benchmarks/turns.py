"""Contestants that take turns: each is a job of its own, which works when told to and otherwise uses no core.

driver (no MPI)      round 1            round 2
  plain PyTorch      [====]             [====]            one job per contestant, all alive at once;
  mpirun -n 2              [====]             [====]      a turn is a few steps, timed by the contestant
  mpirun -n 4                    [====]             [====]
"""

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mpi4dl._wording import to_install

IDLE_SECONDS = 0.02
ANSWER_SECONDS = 1800.0
STOP_SECONDS = 60.0


def launcher(ranks: int) -> list[str]:
    """The words that start so many ranks of what follows."""
    mpirun = Path(sys.executable).with_name("mpirun")
    found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if found is None:
        raise SystemExit(f"benchmarks need mpirun on the PATH; run {to_install('mpich')}")
    return [found, "-n", str(ranks)]


@dataclass
class Contestant:
    """A job of `ranks` processes that answers each line on its standard input with a line of JSON.

    `launch` are the words that start it, where it is not mpirun; `environment` is added to this process's. `allocator`
    is named where contestants run with several (`benchmarks.allocators`).
    """

    name: str
    ranks: int
    arguments: list[str]
    answers: list[dict[str, Any]] = field(default_factory=list)
    launch: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    allocator: str = ""
    _process: "subprocess.Popen[str] | None" = None

    @property
    def label(self) -> str:
        return f"{self.name}, {self.allocator}" if self.allocator else self.name

    def start(self) -> None:
        command = [*self.launch, sys.executable, *self.arguments]
        if self.ranks > 1 and not self.launch:
            command = [*launcher(self.ranks), *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | self.environment
        )

    def turn(self) -> dict[str, Any]:
        """Let it work, and return its answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(self._ended()) from None
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
            self._process.terminate()
            raise SystemExit(f"{self.label} hangs: no answer for {ANSWER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._ended())
        answer: dict[str, Any] = json.loads(line)
        self.answers.append(answer)
        return answer

    def _ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        hint = ": out of memory? fewer contestants at once need less" if code in (9, -9, 137) else ""
        return f"{self.label} ended: exit code {code}{hint}"

    def stop(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=STOP_SECONDS)
            except BrokenPipeError:
                self._process.wait()
            except subprocess.TimeoutExpired:
                self._process.terminate()
            self._process = None


def grid_shape(grid: str) -> tuple[int, int]:
    """Rows and columns of a grid that is written as 1x2."""
    rows, cols = map(int, grid.split("x"))
    return rows, cols


def sides(text: str) -> tuple[int, ...]:
    """Numbers such as 2x2, one for each axis. Raises ValueError for anything else, and for what is less than 1."""
    found = tuple(map(int, text.split("x")))
    if min(found) < 1:
        raise ValueError(f"{text}: each side is at least 1")
    return found


def on_grids(grids: str, arguments: list[str]) -> list[Contestant]:
    """A contestant for each of these grids, such as 1x2,2x2: a job of as many ranks, told its grid as last argument."""
    return [Contestant(grid, prod(sides(grid)), [*arguments, grid]) for grid in grids.split(",")]


def numbers(text: str) -> list[int]:
    """Whole numbers such as 1,2,4. Raises ValueError for anything else."""
    return [int(number) for number in text.split(",")]


def on_ranks(ranks: str, arguments: list[str]) -> list[Contestant]:
    """A contestant for each of these numbers of ranks, such as 1,2: told its number as last argument."""
    return [Contestant(str(number), number, [*arguments, str(number)]) for number in numbers(ranks)]


def take_turns(contestants: list[Contestant], rounds: int) -> None:
    """One turn to warm up, which is not counted, then `rounds` turns each, one after the other."""
    try:
        for contestant in contestants:
            contestant.start()
            contestant.turn()
            contestant.answers.clear()
        for number in range(rounds):
            for contestant in contestants:
                contestant.turn()
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for contestant in contestants:
            contestant.stop()


def measure_once(contestant: Contestant) -> dict[str, Any]:
    """Its one answer, in a job that ends then."""
    try:
        contestant.start()
        return contestant.turn()
    finally:
        contestant.stop()


def answer_turns(work: Callable[[], dict[str, Any]], comm: Any = None) -> None:
    """The contestant's side: work at each line of standard input, and print what `work` returns on rank 0.

    Ranks that wait for their turn sleep: a waiting MPI would take the cores from the one whose turn it is.
    """
    while _told(comm):
        answer = work()
        if comm is None or comm.rank == 0:
            print(json.dumps(answer), flush=True)


def _told(comm: Any) -> bool:
    """Whether there is another turn."""
    import torch

    if comm is None or comm.size == 1:
        return bool(sys.stdin.readline())
    word = torch.zeros(1, dtype=torch.int64)
    if comm.rank == 0:
        word += len(sys.stdin.readline())
        for rank in range(1, comm.size):
            comm.send(word, rank)
    else:
        arrival = comm.irecv(word, 0)
        while not arrival.test():
            time.sleep(IDLE_SECONDS)
        arrival.wait()
    return bool(word)


def ratios(ours: Contestant, theirs: Contestant, key: str) -> list[float]:
    """Ours over theirs, round by round."""
    return [a[key] / b[key] for a, b in zip(ours.answers, theirs.answers, strict=True)]


def plain_for(contestant: Contestant, contestants: list[Contestant]) -> Contestant:
    """Plain PyTorch, which comes first, with the same allocator."""
    return next(each for each in contestants if each.allocator == contestant.allocator)


def median(values: list[float]) -> float:
    return statistics.median(values)
