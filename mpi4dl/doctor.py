"""The machine of a job: `mpirun -n 2 mpi4dl doctor` shows what mpi4dl found, and the time of messages."""

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl import __version__
from mpi4dl._commands import typed
from mpi4dl._files import unwritable, write_durably
from mpi4dl._wording import counted
from mpi4dl.comm import shutdown
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import Parallel
from mpi4dl.options.declare import like, option, saying
from mpi4dl.options.kinds import NAME, optional

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

DESCRIPTION = "Show what a job runs on: nodes, cores, GPUs, the MPI library, and how fast messages are."
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
SAVED = "the description of this machine, for `mpi4dl plan --machine`"


@dataclass(frozen=True)
class Examining:
    """The wire that is measured, and the file that describes the machine."""

    gpu_wire: str = like(Parallel, "gpu_wire")
    save: str | None = option(None, f"a TOML file for {SAVED}; its name is that of the machine", optional(NAME))


@dataclass(frozen=True)
class DoctorConfig:
    examining: Examining = field(default_factory=Examining)


@command(DoctorConfig, "[--FLAG VALUE ...]", DESCRIPTION)
def doctor(comm: "Communicator", asked: CommandLine[DoctorConfig]) -> None:
    """Examine the machine, and save its description. Collective."""
    chosen = asked.config.examining
    if chosen.save is not None:
        comm.agree("--save measures messages: start at least 2 ranks" if comm.size == 1 else None)
        comm.agree(unwritable("--save", chosen.save) if comm.rank == 0 else None)
    examine(comm, chosen.gpu_wire)
    if chosen.save is not None:
        save(comm, chosen.save)


def examine(comm: "Communicator", gpu_wire: str) -> None:
    """Print, on rank 0, what all ranks found. Collective."""
    import torch

    from mpi4dl.parallel.costs.cost_model import one_way

    comm.node.share_cores()
    node = comm.node
    device = node.device()
    wire, why = comm.choose_gpu_wire(gpu_wire)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    places = comm.all_gather_object(
        (platform.node(), node.local_rank, node.cores, torch.get_num_threads(), str(device), name)
    )
    sizes = MESSAGE_BYTES if comm.size > 1 else ()
    measured = [one_way(comm, size, 1, 1, device, collective=True) for size in sizes]
    if comm.rank:
        return
    print(f"mpi4dl {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"MPI: {' '.join(comm.mpi_library.splitlines()[0].split())}")
    print(f"start jobs with {shutdown.own_launcher()}")
    for rank, (host, local, cores, threads, where, gpu) in enumerate(places):
        has = f"{counted(cores, 'core')} on the node, {counted(threads, 'thread')}"
        print(f"rank {rank}: {host}, local rank {local}, {has}, {where} ({gpu})")
    print(shared_memory(node.local_size))
    first = "yield, since there are more ranks than cores," if node.oversubscribed else "spin a moment, then yield,"
    print(f"waiting ranks {first} and then sleep")
    print(f"GPU tensors go {wire}: {why}")
    if comm.size == 1:
        print(f"wire: start at least 2 ranks to measure it, as in: mpirun -n 2 {typed('doctor')}")
        return
    print(f"wire, rank 0 to rank 1, tensors on {device.type}:")
    for size, seconds in zip(MESSAGE_BYTES, measured, strict=True):
        print(f"  {size >> 10:>6} KiB  {1e6 * seconds:>9.1f} us one way  {size / seconds / 1e9:>7.2f} GB/s")


def shared_memory(num_ranks: int) -> str:
    """The line on the memory that ranks of a machine share."""
    folder, each, _ = shutdown.shared_memory()
    if each == 0:
        return f"shared memory: this MPI uses none, as {shutdown.TRANSPORTS} asks"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"shared memory: {folder} cannot be looked at: {error.strerror}"
    there, free = (number * found.f_frsize / 2**20 for number in (found.f_blocks, found.f_bavail))
    told = f"shared memory: {folder} has {there:,.0f} MiB, {free:,.0f} free"
    problem = shutdown.little_shared_memory(max(2, num_ranks))
    return f"{told}; {problem}" if problem else f"{told}, enough for {there * 2**20 // each:,.0f} ranks"


def save(comm: "Communicator", path: str) -> None:
    """Measure the machine, and write its description on rank 0. Collective; raises Refusal if it cannot be written."""
    from mpi4dl.estimate.machine_file import machine_toml
    from mpi4dl.estimate.measured_machine import measure_machine

    machine = measure_machine(comm, comm.node.device(), Path(path).stem)
    with comm.together(), saying(f"--save {path}", OSError):
        if comm.rank == 0:
            write_durably(Path(path), machine_toml(machine).encode())
    if comm.rank == 0:
        print(f"{machine.describe()}\n{SAVED}: {path}")


main = doctor.main

if __name__ == "__main__":
    main()
