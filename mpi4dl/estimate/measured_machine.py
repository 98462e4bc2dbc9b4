"""The description of the machine that a job runs on, measured by its ranks: links by level, sums, memory.

level        ranks with the same ...     measured between one pair, and between all pairs of two groups at once
socket       node and package            if ranks are bound to the cores of one package each
node         host
network      -
"""

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mpi4dl._memory import memory_of_node
from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.allreduce import ALGORITHMS, pick
from mpi4dl.comm.packing import Piece
from mpi4dl.parallel.costs.cost_model import LARGE_BYTES, measure_link, one_way
from mpi4dl.parallel.costs.machine import CollectiveCost, LinkLevel, Machine

SUMMED_BYTES = 4 << 20
TOUCHED_NUMBERS = 1 << 24  # more than caches hold
SUM_REPEATS = 8
TAG = 11


def measure_machine(comm: Communicator, device: torch.device, name: str) -> Machine:
    """The machine as the ranks of `comm`, at least 2, measure it; the same on all. Collective.

    Raises:
        Refusal: nodes have different numbers of ranks, or ranks of a node are not neighbours.
    """
    places = comm.all_gather_object((os.uname().nodename, _package()))
    hosts = [host for host, _ in places]
    per_node = _length(hosts)
    if per_node is None:
        comm.agree("--save needs neighbouring ranks on each node, and as many on all: start the job so")
    assert per_node is not None
    sizes = {"node": per_node, "network": comm.size}
    per_socket = _length(places)
    if None not in [package for _, package in places] and per_socket is not None and per_socket < per_node:
        sizes = {"socket": per_socket, **sizes}
    links, inside = [], 1
    for level, ranks in sizes.items():
        if ranks > inside:
            links.append(_link(comm, level, inside, ranks, device))
            inside = ranks
    memory, called = memory_of_node() // comm.node.local_size, "CPU"
    if device.type == "cuda":
        memory, called = torch.cuda.get_device_properties(device).total_memory, torch.cuda.get_device_name(device)
    found = Machine(
        name,
        comm.size // per_node,
        per_node,
        tuple(links),
        min(comm.all_gather_object(memory)),
        called,
        bytes_per_second=min(comm.all_gather_object(_touched_rate(comm, device))),
        message_seconds=max(comm.all_gather_object(_post_seconds(comm))),
        source=f"measured by mpi4dl doctor on {datetime.date.today()}, with {comm.size} ranks",
    )
    groups = np.arange(comm.size)[None]
    factors = {}
    for algorithm in ALGORITHMS:
        expected = CollectiveCost(found, groups).all_reduce_seconds(SUMMED_BYTES, algorithm)
        factors[algorithm] = max(0.001, round(_sum_seconds(comm, algorithm, device) / expected, 3))
    return comm.broadcast_object(replace(found, collectives=factors))


def _length(places: Sequence[object]) -> int | None:
    """How many neighbours are at the same place, if these are as many everywhere."""
    count = next((i for i, place in enumerate(places) if place != places[0]), len(places))
    groups = [places[i : i + count] for i in range(0, len(places), count)]
    alike = all(len(group) == count and len(set(group)) == 1 for group in groups)
    return count if alike and len({group[0] for group in groups}) == len(groups) else None


def _package() -> int | None:
    """The package of the cores that this process is bound to; None if they are of several, or nobody says."""
    try:
        found = {
            int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/physical_package_id").read_text())
            for core in os.sched_getaffinity(0)
        }
    except (OSError, ValueError):
        return None
    return found.pop() if len(found) == 1 else None


def _link(comm: Communicator, level: str, inside: int, ranks: int, device: torch.device) -> LinkLevel:
    """The link between neighbouring groups of `inside` ranks: by one pair of ranks, and by all pairs at once."""
    alone = measure_link(comm, device, apart=inside)
    together = one_way(comm, LARGE_BYTES, inside, inside, device)
    sharing = min(inside, max(1, round(together / (alone.latency_seconds + LARGE_BYTES * alone.byte_seconds))))
    while inside % sharing:
        sharing -= 1
    joined = 0 if level == "network" else ranks  # further nodes are not joined by what is within one
    return LinkLevel(level, round(alone.latency_seconds, 9), round(1 / alone.byte_seconds), joined, sharing)


def _sum_seconds(comm: Communicator, algorithm: str, device: torch.device) -> float:
    """Seconds of an all-reduce of a large buffer over all ranks, the median. Collective."""
    add_up, times = pick(comm, algorithm, device=device), []
    for _ in range(SUM_REPEATS + 1):
        buffer = torch.ones(SUMMED_BYTES // 4, device=device)
        comm.barrier()
        start = time.perf_counter()
        add_up(buffer).wait()
        times.append(time.perf_counter() - start)
    return max(comm.all_gather_object(float(np.median(times[1:]))))


def _touched_rate(comm: Communicator, device: torch.device) -> float:
    """Bytes a second of an operator that reads and writes, while all ranks do the same. Collective."""
    (x, y), times = (torch.ones(TOUCHED_NUMBERS, device=device) for _ in range(2)), []
    comm.barrier()
    for _ in range(5):
        start = time.perf_counter()
        x.add_(y)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return round(3 * x.nbytes / min(times))


def _post_seconds(comm: Communicator) -> float:
    """Seconds in which this rank hands over one small message, and takes one. Collective."""
    count, before, behind = 100, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    pending: list[Pending] = []
    comm.barrier()
    start = time.thread_time()
    for _ in range(count):
        sends, receives = (Piece(peer, torch.zeros(8, dtype=torch.uint8)) for peer in (behind, before))
        pending.append(comm.iexchange([sends], [receives], TAG))
    seconds = (time.thread_time() - start) / count
    for each in pending:
        each.wait()
    return round(seconds, 9)
