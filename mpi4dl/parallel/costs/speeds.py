"""What decides about wide halos, measured once between the ranks of a job and alike on all of them: `Speeds`.

A convolution and an operator that only reads and writes are timed, forward and backward, on all ranks at once; of all
ranks the slowest counts. An exchange of a row of pixels, forward and backward, says what one takes beside its bytes:
the link's latency, and what ranks do for it. All is remembered on this machine, so that the same job decides alike.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl._randomness import forked
from mpi4dl.comm import Communicator
from mpi4dl.parallel.costs.prices import Clockwork
from mpi4dl.parallel.costs.remembered import machine, versions
from mpi4dl.parallel.costs.timing import Clock, clock_on
from mpi4dl.parallel.costs.widening import Speeds
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import widen
from mpi4dl.parallel.spatial.sharding import from_tile

CHANNELS, SIDE = 32, 160
REPEATS, NUM_EXCHANGES = 5, 20
ROWS = 8
EXCHANGE_SECONDS = 200e-6  # with more ranks than cores, where a message waits for one


def measured_speeds(
    comm: Communicator, device: torch.device, dtype: torch.dtype, clockwork: Clockwork | None = None
) -> Speeds:
    """The speeds of these ranks. Collective; alike on all of them."""
    clockwork = clockwork or Clockwork.of_user()
    link = clockwork.link_of(comm, device)
    facts = {"what": "speeds", "type": str(dtype), "ranks": comm.size, **machine(device), **versions()}
    known = comm.broadcast_object(clockwork.remembered.get(facts) if comm.rank == 0 else None)
    if known is None:
        crowded = comm.all_reduce(torch.tensor([comm.node.oversubscribed]).int(), "max")
        waits = EXCHANGE_SECONDS if crowded else exchange_seconds(comm, device, dtype)
        mine = torch.tensor([waits, *compute_seconds(device, dtype, clock_on(device))], dtype=torch.float64)
        known = comm.all_reduce(mine, "max").tolist()
        if comm.rank == 0:
            clockwork.remembered.put(facts, known)
    latency, *of_ranks = known
    return Speeds(link._replace(latency_seconds=latency), *of_ranks)


def exchange_seconds(comm: Communicator, device: torch.device, dtype: torch.dtype) -> float:
    """The seconds of an exchange, one way, beside its bytes and between ranks that wait for each other. Collective."""
    clock = time.perf_counter if device.type == "cpu" else clock_on(device)
    grid = Grid(comm, rows=comm.size)
    tile = torch.rand(1, 1, ROWS, ROWS, dtype=dtype, device=device, requires_grad=True)
    x = from_tile(tile, grid, (ROWS * comm.size, ROWS))

    return _least(clock, lambda: widen(x, 1).local, NUM_EXCHANGES) / 2


def compute_seconds(device: torch.device, dtype: torch.dtype, clock: Clock) -> tuple[float, ...]:
    """The seconds of a FLOP of a convolution, of a byte that is touched, and of an operator, forward and backward."""
    with torch.enable_grad(), forked((device,)):
        x = torch.rand(1, CHANNELS, SIDE, SIDE, dtype=dtype, device=device, requires_grad=True)
        weight = torch.rand(CHANNELS, CHANNELS, 3, 3, dtype=dtype, device=device, requires_grad=True)
        flops = 2 * x.numel() * weight[0].numel()
        of_flops = _least(clock, lambda: F.conv2d(x, weight, padding=1)) / flops
        of_bytes = _least(clock, lambda: x * 2.0) / (2 * x.nbytes)
        tiny = torch.rand(1, dtype=dtype, device=device, requires_grad=True)
        of_operators = _least(clock, lambda: tiny * 2.0)
    return of_flops, of_bytes, of_operators


def _least(clock: Clock, run: Callable[[], Tensor], repeats: int = REPEATS) -> float:
    """The least seconds of a forward and a backward pass."""
    seconds, gradient = [], torch.ones_like(run())
    for _ in range(repeats):
        start = clock()
        run().backward(gradient)
        seconds.append(clock() - start)
    return min(seconds)
