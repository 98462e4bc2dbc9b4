"""The warm pool of MPI ranks that test bodies run on: importing torch takes seconds, so it is done once.

    def body(comm: Communicator, n: int) -> float:         # at the top level of a test module; runs on every rank
        return float(comm.all_reduce(torch.ones(n)).sum())

    def test_sum(ranks: Ranks) -> None:
        assert ranks(3).run(body, 5) == [15.0, 15.0, 15.0]

    @on_ranks(3)
    def test_sum(comm: Communicator) -> None:              # the same, where each rank can tell what is right
        assert float(comm.all_reduce(torch.ones(5)).sum()) == 15.0

A body finds a communicator of its own, torch.manual_seed(0), float32 as the default dtype, and warnings as errors. An
exception on any rank fails the test with that rank's traceback. A body that hangs fails it with every rank's stack, and
the next test gets a new pool.
"""

import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.pool.zygote import ROOT, launcher, python

SIZES = (4, 8)
START_SECONDS = 600.0
BODY_SECONDS = 600.0  # a body that has not returned by then hangs, however busy the machine
GRACE_SECONDS = 5.0  # for the others, once a rank has failed
DUMP_SECONDS = 5.0  # at the most, for all stacks to be written
STOP_SECONDS = 10.0


class Request(NamedTuple):
    """A body for the first `num_ranks` ranks. `call` is the pickled pair of the function and its arguments."""

    num_ranks: int
    call: bytes
    timeout: float


class Report(NamedTuple):
    """What became of it on one rank: the pickled result, or a traceback."""

    result: bytes | None
    error: str | None


class RanksFailed(AssertionError):
    """A body failed, or hung, on some rank."""


class Pool:
    """`size` ranks under one mpirun, which is started when it is first needed and again after a hang."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}

    def run(
        self, num_ranks: int, body: Callable[..., Any], args: tuple[Any, ...], timeout: float = BODY_SECONDS
    ) -> list[Any]:
        """What `body(comm, *args)` returns on each of the first `num_ranks` ranks."""
        if self._process is not None and self._process.poll() is not None:  # a rank was killed between two bodies
            self.stop(kill=True)
        if self._process is None:
            self._start()
        request = pickle.dumps(Request(num_ranks, pickle.dumps((body, args)), timeout))
        for rank in range(num_ranks):
            self._connections[rank].send_bytes(request)
        reports = self._collect(num_ranks, timeout)
        silent = [rank for rank in range(num_ranks) if rank not in reports]
        failed = {rank: report.error for rank, report in reports.items() if report.error is not None}
        message = _explain(failed, num_ranks)
        if silent:
            message += f"\n{_names(silent)} of {num_ranks} did not return. The stacks:\n{self._stacks()}"
        if silent or len(self._connections) < self.size:
            message += f"\nThe pool was restarted. It had printed:\n{self._printed()}"
            self.stop(kill=True)
        if failed or silent:
            raise RanksFailed(message)
        return [pickle.loads(reports[rank].result or b"") for rank in range(num_ranks)]

    def _collect(self, num_ranks: int, timeout: float) -> dict[int, Report]:
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout
        while len(reports) < num_ranks:
            missing = {self._connections[rank]: rank for rank in range(num_ranks) if rank not in reports}
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = missing[connection]
                try:
                    reports[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    reports[rank] = Report(None, "the process ended")
                    del self._connections[rank]
                if reports[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if len(self._connections) < self.size:
                break
        return reports

    def _start(self) -> None:
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        with socket.socket(socket.AF_UNIX) as server:
            address = str(self._folder / "socket")
            server.bind(address)
            server.listen(self.size)
            server.settimeout(1.0)
            command = [launcher(), "-n", str(self.size), python(), "-m", "tests.pool.rank", address]
            with (self._folder / "output.txt").open("wb") as output:
                self._process = subprocess.Popen(
                    [*command, str(self._folder)],
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            deadline = time.monotonic() + START_SECONDS
            while len(self._connections) < self.size:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    printed = self._printed()
                    self.stop(kill=True)
                    raise RuntimeError(f"{' '.join(command)} did not start {self.size} ranks:\n{printed}")
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    continue
                connection = Connection(accepted.detach())
                rank, self._pids[rank] = pickle.loads(connection.recv_bytes())
                self._connections[rank] = connection

    @property
    def running(self) -> bool:
        return self._process is not None

    def _printed(self) -> str:
        return (self._folder / "output.txt").read_text(errors="replace")[-4000:]

    def _stacks(self) -> str:
        """Where every rank stands: their handlers of SIGUSR1 write it, also while they are blocked inside MPI."""
        asked, deadline = self._signal(signal.SIGUSR1), time.monotonic() + DUMP_SECONDS
        paths, before = sorted(self._folder.glob("stack*.txt")), [0]
        while time.monotonic() < deadline:
            time.sleep(0.2)
            sizes = [path.stat().st_size for path in paths]
            if sizes == before and sum(size > 0 for size in sizes) >= asked:
                break
            before = sizes
        return "\n".join(f"{path.stem.replace('stack', 'rank ')}:\n{path.read_text()}" for path in paths)

    def stop(self, kill: bool = False) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        if self._process is None:
            return
        if kill:
            self._signal(signal.SIGKILL)  # then mpirun and its proxy end by themselves
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._process, self._pids = None, {}

    def _signal(self, number: signal.Signals) -> int:
        """Send a signal to all ranks; returns how many are alive."""
        alive = 0
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                alive += 1
        return alive


class Ranks:
    """`ranks(n).run(body, *args)`: per rank what `body(comm, *args)` returns, on n ranks of a pool that is shared."""

    def __init__(self) -> None:
        self.pools = {size: Pool(size) for size in SIZES}

    def __call__(self, num_ranks: int, timeout: float = BODY_SECONDS) -> "Team":
        size = next(size for size in SIZES if num_ranks <= size)
        return Team(self.pools[size], num_ranks, timeout)

    def stop(self) -> None:
        for pool in self.pools.values():
            pool.stop(kill=True)


class Team:
    """The first `num_ranks` ranks of a pool."""

    def __init__(self, pool: Pool, num_ranks: int, timeout: float) -> None:
        self.pool = pool
        self.num_ranks = num_ranks
        self.timeout = timeout

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(self.num_ranks, body, args, self.timeout)


def run_body(comm: Any, test: Any, arguments: dict[str, Any]) -> None:
    test.body(comm, **arguments)


def on_ranks(num_ranks: int | None = None) -> Callable[[Callable[..., None]], Any]:
    """Make a function of a communicator a test on so many ranks; or on `num_ranks`, or those of `plan`, of its own."""

    def make(body: Callable[..., None]) -> Any:
        def test(ranks: Ranks, **arguments: Any) -> None:
            sizes = [arguments[name] for name in ("num_ranks", "arrangement", "plan") if name in arguments]
            size = num_ranks or (sizes[0] if isinstance(sizes[0], int) else sizes[0].num_ranks)
            ranks(size).run(run_body, test, arguments)  # whose module is imported before the seed is set

        comm, *others = inspect.signature(body).parameters.values()
        signature = inspect.Signature([comm.replace(name="ranks"), *others])
        test.__dict__.update(body=body, __signature__=signature)
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        return test

    return make


def _names(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def _explain(failed: dict[int, str | None], num_ranks: int) -> str:
    """The tracebacks, each once with the ranks that it came from."""
    alike: dict[str | None, list[int]] = {}
    for rank in sorted(failed):
        alike.setdefault(failed[rank], []).append(rank)
    return "\n".join(f"{_names(ranks)} of {num_ranks}:\n{error}" for error, ranks in alike.items())
