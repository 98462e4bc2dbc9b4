"""Contestants that take turns: each is a job of its own, which works in its turn and otherwise uses no core.

driver (no MPI)      round 1            round 2
  plain PyTorch      [====]             [====]            one job per contestant, all alive at once;
  mpirun -n 2              [====]             [====]      a turn is a few steps, timed by the contestant
  mpirun -n 4                    [====]             [====]
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.results import spread
from mpi4dl.training.measured import launcher

IDLE_SECONDS = 0.02
ANSWER_SECONDS = 1800.0
STOP_SECONDS = 60.0


@dataclass
class Contestant:
    """A job of `ranks` processes that answers each line on its standard input with a line of JSON.

    `launch` starts it, where that is not mpirun.
    """

    name: str
    ranks: int
    arguments: list[str]
    answers: list[dict[str, Any]] = field(default_factory=list)
    launch: list[str] = field(default_factory=list)
    _process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        command = [*self.launch, sys.executable, *self.arguments]
        if self.ranks > 1 and not self.launch:
            command = [*launcher(self.ranks), *command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

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
            raise SystemExit(f"{self.name} hangs: no answer for {ANSWER_SECONDS:.0f} s")
        line = next((line for line in self._process.stdout if line.startswith("{")), "")  # libraries print there, too
        if not line:
            raise SystemExit(self._ended())
        answer: dict[str, Any] = json.loads(line)
        self.answers.append(answer)
        return answer

    def _ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        hint = ": out of memory? fewer contestants at once need less" if code in (9, -9, 137) else ""
        return f"{self.name} ended: exit code {code}{hint}"

    def stop(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=STOP_SECONDS)
            except BrokenPipeError:
                self._process.wait()
            except subprocess.TimeoutExpired:
                self._process.terminate()
            self._process = None

    def of(self, key: str) -> list[Any]:
        """This value of each turn."""
        return [answer[key] for answer in self.answers]

    def spreads(self, *keys: str) -> dict[str, float]:
        """Of each value its median over the turns, and its ends."""
        return {name: value for key in keys for name, value in spread(key, self.of(key)).items()}

    def over(self, other: "Contestant", **keys: str) -> dict[str, float]:
        """By their names the spreads of ratios to another contestant, turn by turn."""
        found: dict[str, float] = {}
        for name, key in keys.items():
            found |= spread(name, [a / b for a, b in zip(self.of(key), other.of(key), strict=True)])
        return found


def take_turns(contestants: Sequence[Contestant], rounds: int) -> None:
    """One turn to warm up, which does not count, then `rounds` turns each, one after the other."""
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
    while _hears_of_a_turn(comm):
        answer = work()
        if comm is None or comm.rank == 0:
            print(json.dumps(answer), flush=True)


def _hears_of_a_turn(comm: Any) -> bool:
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


def beside_plain(contestant: Contestant, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Speed, work and memory of images beside those of plain PyTorch, which comes first, in the same rounds."""
    keys = ("images_per_second", "cpu_seconds_per_image", "work_seconds_per_image", "peak_bytes")
    return {
        "name": contestant.name,
        "ranks": contestant.ranks,
        **contestant.spreads(*keys),
        **contestant.over(contestants[0], speed_ratio="images_per_second", memory_ratio="peak_bytes"),
    }
