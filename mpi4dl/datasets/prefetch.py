"""Compute the items of a sequence ahead of time in threads, and hand them out in order."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# How long leaving an iteration waits for readers in the middle of an item; a disk that hangs must not hang the program.
JOIN_SECONDS = 5.0


class _State(Generic[T]):
    """What the workers and the consumer share; `changed` guards every field."""

    def __init__(self, compute: Callable[[int], T], count: int, depth: int) -> None:
        self.compute, self.count, self.depth = compute, count, depth
        self.changed = threading.Condition()
        self.next_started = 0
        self.next_wanted = 0
        self.stopped = False
        self.results: dict[int, T] = {}
        self.failures: dict[int, BaseException] = {}

    def worker_may_go_on(self) -> bool:
        ended = self.stopped or self.next_started == self.count
        return ended or self.next_started < self.next_wanted + self.depth


class Prefetcher(Generic[T]):
    """Iterate over compute(0), compute(1), ..., compute(count - 1), up to `depth` of them ahead of the consumer.

    What `compute` raises is raised again in the consumer when that item's turn comes, and ends the iteration. Leave it
    early with `close`. The threads are daemons that do not keep this object alive: one that is forgotten stops them as
    well, and so does the interpreter's exit.
    """

    def __init__(self, compute: Callable[[int], T], count: int, num_workers: int, depth: int) -> None:
        self._state: _State[T] = _State(compute, count, depth)
        names = [f"mpi4dl-reader-{i}" for i in range(min(num_workers, count))]
        self._threads = [threading.Thread(target=_work, args=(self._state,), name=name, daemon=True) for name in names]
        # At exit as well, before the interpreter takes itself apart under a thread that is still decoding.
        self._stop = weakref.finalize(self, _stop, self._state, self._threads)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        state = self._state
        with state.changed:
            wanted = state.next_wanted
            if wanted >= state.count or state.stopped:
                raise StopIteration
            while wanted not in state.results and wanted not in state.failures:
                state.changed.wait()
            state.next_wanted += 1
            state.changed.notify_all()
            if wanted in state.results:
                return state.results.pop(wanted)
            failure = state.failures.pop(wanted)
        self.close()
        raise failure

    def close(self) -> None:
        """Let the workers finish what they are at, and end. Nothing is handed out afterwards."""
        self._stop()


def _work(state: _State[T]) -> None:
    while True:
        with state.changed:
            state.changed.wait_for(state.worker_may_go_on)
            if state.stopped or state.next_started == state.count:
                return
            position = state.next_started
            state.next_started += 1
        try:
            result = state.compute(position)
        except BaseException as error:
            with state.changed:
                state.failures[position] = error
                state.changed.notify_all()
            return
        with state.changed:
            state.results[position] = result
            state.changed.notify_all()
        del result


def _stop(state: _State[T], threads: list[threading.Thread]) -> None:
    with state.changed:
        state.stopped = True
        state.results.clear()
        state.changed.notify_all()
    if threading.current_thread() in threads:
        return  # the garbage collector ran in a worker: it may hold the lock that the others wait for
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
