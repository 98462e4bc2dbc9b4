"""mpi4dl.datasets.loader: in order, bounded, and no thread outlives the iteration."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from mpi4dl.datasets.loader import prefetched


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpi4dl-reader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    assert not readers()
    yield
    assert not readers()


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 3, 50])
def test_items_come_in_order_whichever_is_ready_first(num_workers, depth):
    def compute(i):
        time.sleep(0.002 * (i % 3 == 0))
        return i * i

    assert list(prefetched(compute, 20, num_workers, depth)) == [i * i for i in range(20)]


def test_nothing_to_do():
    assert list(prefetched(lambda i: i, 0, 3, 2)) == []


def test_no_more_than_depth_items_are_computed_ahead():
    started = []
    prefetcher = prefetched(lambda i: started.append(i), 100, 4, 3)

    def wait_for(count):
        deadline = time.monotonic() + 20
        while len(started) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.03)  # in which there could be more

    wait_for(3)
    assert sorted(started) == [0, 1, 2]
    next(prefetcher)
    wait_for(4)
    assert sorted(started) == [0, 1, 2, 3]
    prefetcher.close()


def test_items_are_computed_while_the_consumer_is_busy_and_by_several_threads():
    together = threading.Barrier(3)
    prefetcher = prefetched(lambda i: together.wait(timeout=600), 3, 3, 3)
    assert sorted(prefetcher) == [0, 1, 2]


def test_a_failure_surfaces_at_its_turn_and_ends_the_iteration():
    def compute(i):
        if i == 2:
            raise RuntimeError("the disk is on fire")
        return i

    prefetcher = prefetched(compute, 10, 2, 4)
    assert [next(prefetcher), next(prefetcher)] == [0, 1]
    with pytest.raises(RuntimeError, match="the disk is on fire"):
        next(prefetcher)
    assert list(prefetcher) == []


def test_closing_early_ends_the_threads_even_when_they_wait_for_room():
    prefetcher = prefetched(lambda i: i, 1000, 4, 2)
    assert next(prefetcher) == 0
    prefetcher.close()
    prefetcher.close()
    assert list(prefetcher) == []


def test_a_forgotten_prefetcher_ends_its_threads():
    prefetcher = prefetched(lambda i: i, 1000, 4, 2)
    next(prefetcher)
    del prefetcher
    gc.collect()


def test_a_thread_that_waits_keeps_no_item():
    prefetcher = prefetched(lambda i: threading.Event(), 1, 1, 1)
    found, deadline = weakref.ref(next(prefetcher)), time.monotonic() + 20
    while found() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert found() is None
    prefetcher.close()


@pytest.mark.parametrize("item", ["time.sleep(0.01)", "time.sleep(1000)"])
@pytest.mark.exhaustive
def test_the_interpreter_exits_although_an_iteration_is_not_over(item):
    program = (
        "import time, mpi4dl.datasets.loader as p\n"
        "p.JOIN_SECONDS = 0.2\n"
        f"it = p.prefetched(lambda i: i and {item}, 10**9, 2, 8)\n"
        "def batches():\n"
        "    try:\n"
        "        yield from it\n"
        "    finally:\n"
        "        it.close()\n"
        "kept = batches()\n"
        "print(next(kept))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=600, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")
