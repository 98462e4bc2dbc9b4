"""Communication in phases: each starts when the one before is complete, whoever drives it, and once only."""

import threading
from collections.abc import Iterator

from mpi4dl.comm import Pending
from mpi4dl.comm.node import Node


class Gate(Pending):
    """Complete when it is open; it notes what happens to it in `log`."""

    def __init__(self, node: Node, name: str, log: list[str]) -> None:
        super().__init__(node)
        self.open = False
        self.looks = 0
        log.append(f"{name} starts")
        self._deliveries = [lambda: log.append(f"{name} ends")]

    def test(self) -> bool:
        self.looks += 1
        return self.open


def fresh() -> tuple[Node, list[str], list[Gate]]:
    return Node(0, 1, 1, 1), [], []


def gates(node: Node, names: str, log: list[str], made: list[Gate]) -> Iterator[Pending]:
    for name in names:
        made.append(Gate(node, name, log))
        yield made[-1]
    log.append("all end")


def test_a_phase_starts_when_the_one_before_is_complete() -> None:
    node, log, made = fresh()
    pending = Pending.of_phases(node, gates(node, "ab", log, made))
    assert log == ["a starts"]
    assert not pending.test()
    assert len(node.underway) == 1
    made[0].open = True
    assert not pending.test()
    assert log == ["a starts", "a ends", "b starts"]
    made[1].open = True
    assert pending.test()
    assert pending.test()
    assert log == ["a starts", "a ends", "b starts", "b ends", "all end"]
    assert node.underway == []
    pending.wait()
    pending.wait()


def test_joined_phases_are_waited_for_together() -> None:
    node, log, made = fresh()
    joined = Pending.all(node, [Pending.of_phases(node, gates(node, name, log, made)) for name in "ab"])
    made[0].open = True
    assert not joined.test()
    made[1].open = True
    joined.wait()
    assert node.underway == []


def test_what_is_to_do_at_the_end_is_done_once_all_phases_are_complete() -> None:
    node, log, made = fresh()
    pending = Pending.of_phases(node, gates(node, "a", log, made))
    pending.then(lambda: log.append("delivered"))
    made[0].open = True
    assert pending.test()
    pending.wait()
    pending.wait()
    assert log == ["a starts", "a ends", "all end", "delivered"]


def test_one_thread_at_a_time_drives_a_phase() -> None:
    node, log, made = fresh()
    entered, leave = threading.Event(), threading.Event()

    def phases() -> Iterator[Pending]:
        yield from gates(node, "a", log, made)
        entered.set()
        leave.wait(10)

    pending = Pending.of_phases(node, phases())
    made[0].open = True
    thread = threading.Thread(target=pending.test)
    thread.start()
    assert entered.wait(10)
    looks = made[0].looks
    assert not pending.test()
    assert made[0].looks == looks
    leave.set()
    thread.join()
    assert pending.test()
