"""A backend of torch.distributed over MPI: `import mpi4dl.torch_backend`, then `init_process_group("mpi4dl")`.

Ranks find each other through MPI: `mpirun -n 4 python program.py` needs no address, no port and no variables.
DistributedDataParallel, DTensor, `fully_shard`, pipelining and checkpoints then run on the same wire as mpi4dl.
"""

import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

from mpi4dl.comm.communicator import Communicator, world
from mpi4dl.comm.nccl import open_store
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls
from mpi4dl.comm.shutdown import meeting
from mpi4dl.torch_backend.departure import Channel, Departed, Departures, Mismatch, TimedOut, departures, within
from mpi4dl.torch_backend.group import (
    MpiGroup,
    devices,
    gather_into_given_tensors,
    hand_on_monitored_barriers,
    keep_what_ddp_waits_for,
)
from mpi4dl.torch_backend.messages import Wire

__all__ = ["Departed", "Mismatch", "MpiGroup", "TimedOut"]

ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
FIRST_TAG, NUM_TAGS = 16, 32752  # every MPI has as many; those below are the guard's
Meeting = Callable[..., Iterator[tuple[dist.Store, int, int]]]


def meet_through_mpi() -> None:
    """Make `init_process_group` ask MPI wherever the environment does not say who and where the ranks are.

    The one place for that is the handler of "env://", the default of `init_process_group`.
    """
    by_environment: Meeting = handlers["env"]

    def handler(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        if all(name in os.environ for name in ENVIRONMENT):
            return by_environment(url, **options)
        return _meet(url)

    handlers["env"] = handler


def _meet(url: str) -> Iterator[tuple[dist.Store, int, int]]:
    comm = world()
    asked = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    _check_place(comm, asked.get("rank", comm.rank), asked.get("world_size", comm.size))
    yield shared_store(comm), comm.rank, comm.size


def _check_place(comm: Communicator, rank: int, size: int) -> None:
    """Refuse, on all ranks together, what contradicts MPI."""
    comm.agree(_contradiction(comm, rank, size))


def _contradiction(comm: Communicator, rank: int, size: int) -> str | None:
    if (rank, size) == (comm.rank, comm.size):
        return None
    return (
        f"init_process_group was called for rank {rank} of {size}, but MPI started it as rank {comm.rank} "
        f"of {comm.size}: leave out rank and world_size (and the variables RANK and WORLD_SIZE), and start the "
        f"program with mpirun -n {size}"
    )


def create_group(options: Any, backend_options: Any = None) -> MpiGroup:
    """The process group of the ranks that torch.distributed names, or of all; collective over them alone."""
    comm = world()
    ranks: Sequence[int] = options.global_ranks_in_group
    if not ranks:
        _check_place(comm, options.group_rank, options.group_size)
        ranks = range(comm.size)
    elif contradiction := _contradiction(comm, dist.get_rank(), dist.get_world_size()):
        raise ValueError(contradiction)  # the ranks of a group are counted in the default group, whatever made that
    base: Any = comm.mpi
    group = base.Get_group().Incl(list(ranks))
    known = departures()
    # Ranks may create several groups in orders of their own: the tag keeps these apart.
    tag = FIRST_TAG + zlib.crc32(",".join(map(str, ranks)).encode()) % NUM_TAGS
    _await_all(comm, ranks, tag, known, max(options.timeout, dist.default_pg_timeout))
    made: list[Any] = []
    try:
        made += [base.Create_group(group, tag), base.Create_group(group, tag)]
    except RuntimeError as error:  # MPI.Exception is one
        raise RuntimeError(
            f"MPI has no communicator left for another group: this rank is in {known.num_groups} groups of "
            "torch.distributed, each takes two, and MPI libraries have some two thousand for a job: call "
            f"torch.distributed.destroy_process_group(group) for those that are done, or make fewer ({error})"
        ) from error
    finally:
        group.Free()
    collectives, messages = (Wire(one, comm.node, comm.gpu_wire) for one in made)
    return MpiGroup(collectives, messages, ranks, known, options.timeout, options.store)


def _await_all(comm: Communicator, ranks: Sequence[int], tag: int, known: Departures, limit: timedelta) -> None:
    """Return when all come to create their group, which MPI itself would wait for without an end.

    Raises:
        TimedOut: some did not come in time.
        Departed: some have left.
    """
    others = [rank for rank in ranks if rank != comm.rank]
    channel = Channel(known, range(comm.size), lambda: f"creations of groups of {list(ranks)}")
    here = Pending(comm.node, [Calls([meeting().comm.Isend(b"", rank, tag) for rank in others])])
    for rank in others:
        channel.wrote(rank)
    arriving = {rank: Pending(comm.node, [Calls([meeting().comm.Irecv(bytearray(), rank, tag)])]) for rank in others}

    def missing() -> list[int]:
        return [rank for rank in others if not arriving[rank].test()]

    def alarm() -> None:
        if absent := [rank for rank in missing() if channel.is_closed(rank)]:
            raise Departed(f"the group of ranks {list(ranks)} cannot be created: ranks {absent} have left")

    def complaint() -> str:
        return f"the group of ranks {list(ranks)} was not created in {limit}: ranks {missing()} have not come to it"

    comm.node.wait(Pending.all(comm.node, [here, *arriving.values()]), within(limit, complaint, alarm))
    for rank in others:
        channel.read(rank)


def shared_store(comm: Communicator) -> dist.Store:
    """Keys and values that all ranks share.

    Our groups do not need it, but groups of other backends and `new_group(use_local_synchronization=True)` do. So
    where the ranks cannot reach rank 0 by TCP, nothing else is lost: every rank then has a store of its own.
    """
    store, complaint = open_store(comm)
    if store is None:
        warnings.warn(f"only groups of the backend mpi4dl will work: {complaint}", stacklevel=2)
        return dist.HashStore()
    return store


# PyTorch 2.15's flight recorder asks C++ for the names of groups, which ours keep in Python: they go unrecorded.
vars(distributed_c10d).get("_FR_SELF_RECORDING_BACKENDS", {""}).add("mpi4dl")
dist.Backend.register_backend("mpi4dl", create_group, extended_api=True, devices=devices())
meet_through_mpi()
_LIBRARY = gather_into_given_tensors()
hand_on_monitored_barriers()
keep_what_ddp_waits_for()
