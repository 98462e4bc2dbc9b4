"""Where the ranks of a job speak of its end: plain MPI, without torch, on a communicator that nobody else uses."""

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, NamedTuple

from mpi4dl._wording import to_install
from mpi4dl.comm import Refusal

if TYPE_CHECKING:
    from socket import socket

    from mpi4py import MPI

TURN_SECONDS = 0.25
LAST_TURN_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1e-3, 0.05
# How many processes launchers say that they started, to libraries of their own MPI alone; and Slurm, to all.
PMI, OPEN_MPI, SLURM = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"
OPEN_MPI_LOCAL = "OMPI_COMM_WORLD_LOCAL"  # and _RANK or _SIZE
MAPS = Path("/proc/self/maps")
SPEAKING = 1  # the tag of "I say what went wrong"


class Meeting:
    """The ranks of a job, as they end."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE  # whether a thread beside the main one may use MPI
        self.exit_notifications: list[Callable[[], None]] = []  # what is called when this rank ends without an error
        self.closings: list[Callable[[], None]] = []  # what is called once all ranks have ended so
        self._arrival: MPI.Request | None = None
        self._key = comm.bcast(os.urandom(8).hex() if self.rank == 0 else "")
        self._floor: socket | None = None

    def close(self) -> None:
        """Shut MPI down: all ranks are at their end."""
        from mpi4py import MPI

        MPI.Finalize()

    def abort(self, code: int) -> None:
        """End all ranks, wherever they are."""
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)

    def name(self) -> str:
        """How this rank begins its last words."""
        return f"[rank {self.rank} of {self.size}] " if self.size > 1 else ""

    def alike(self, flag: bool) -> bool:
        """Whether all ranks say so. Collective."""
        return bool(self.comm.allreduce(int(flag)) == self.size)

    def gathers(self, seconds: float = float("inf")) -> bool:
        """Whether all ranks are at their end within `seconds`. This one is, and there is no way back from here."""
        if self._arrival is None:
            self._arrival = self.comm.Ibarrier()
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        while not self._arrival.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return True

    def speaks(self) -> bool:
        """Whether this rank is to say what went wrong: where all fail alike, the first does, and tells the others.

        Of those on one machine it is one; another machine's, if the first one's message does not come in time.
        """
        if self.size == 1:
            return True
        from mpi4py import MPI

        deadline = time.monotonic() + min(TURN_SECONDS * min(self.rank, 1) + 0.05 * self.rank, LAST_TURN_SECONDS)
        while True:
            if self.comm.Iprobe(tag=SPEAKING):
                return False
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        if not self._takes_the_floor():
            return False
        for other in range(self.size):
            if other != self.rank:
                self.comm.Isend([b"", MPI.BYTE], other, SPEAKING)
        return True

    def _takes_the_floor(self) -> bool:
        """Whether no other rank of this machine has it: Linux gives an abstract name of a socket to one process."""
        from socket import AF_UNIX, SOCK_DGRAM, socket

        if self._floor is None:
            self._floor = socket(AF_UNIX, SOCK_DGRAM)
            try:
                self._floor.bind(f"\0mpi4dl-{self._key}")
            except OSError as error:
                return error.errno != errno.EADDRINUSE
        return True


@cache
def meeting() -> Meeting:
    """The meeting of all ranks. The first call starts MPI, and is collective. Raises Refusal if there is no MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise Refusal(
            f"MPI cannot be used: {error}. Run {to_install('mpi4py', 'mpich')}, which brings an MPI library; on a "
            f"cluster that has its own: {to_install('mpi4py')}"
        ) from None
    except RuntimeError as error:  # mpi4py is there, and the library is not
        reason = " ".join(str(error).split())[:200]
        raise Refusal(
            f"mpi4py finds no MPI library: {reason}. Load the MPI of your cluster (module load), or run "
            f"{to_install('mpich')}"
        ) from None

    return Meeting(MPI.COMM_WORLD.Dup())


def met() -> Meeting | None:
    """The meeting, if there was one and MPI still runs."""
    return meeting() if meeting.cache_info().currsize and not mpi_is_over() else None


# What ranks of a node share.
#
#     MPICH       files in /dev/shm
#     Open MPI    a file of each rank, by its transport sm (vader in Open MPI 4), in /dev/shm, or below the directory of
#                 temporary files where /dev/shm cannot be written; it takes TCP where the file of a rank does not fit
#
# Both map the files without reserving them, and end by a bus error where all together do not fit.

SHARED_MEMORY = Path("/dev/shm")
MPICH_BYTES = 6 << 20  # of each rank, measured with up to 8 ranks
OPEN_MPI_BYTES = 4 << 20  # its default of btl_sm_segment_size
TRANSPORTS = "OMPI_MCA_btl"  # its setting of which transports it uses, and the beginning of those of each
LOCAL_RANKS = (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), (f"{OPEN_MPI_LOCAL}_RANK", f"{OPEN_MPI_LOCAL}_SIZE"))


class SharedMemory(NamedTuple):
    """The folder of the files that ranks of a node share, and how large they get for each rank; 0: there are none."""

    folder: Path
    bytes_each: int
    falls_back: bool = False  # where the file of one rank does not fit


def shared_memory() -> SharedMemory:
    """That of the MPI whose launcher started this process, as its variables say."""
    if OPEN_MPI not in os.environ or LOCAL_RANKS[0][1] in os.environ:
        return SharedMemory(SHARED_MEMORY, MPICH_BYTES)
    transports, asked = {"sm", "vader"}, os.environ.get(TRANSPORTS, "")
    if asked and transports.isdisjoint(asked.removeprefix("^").split(",")) != asked.startswith("^"):
        return SharedMemory(SHARED_MEMORY, 0)
    found: dict[str, str] = {}
    for name, one in product(("backing_directory", "segment_size"), transports):
        found[name] = os.environ.get(f"{TRANSPORTS}_{one}_{name}") or found.get(name, "")
    default = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else gettempdir()
    size = int(found["segment_size"]) if found["segment_size"].isdecimal() else OPEN_MPI_BYTES
    return SharedMemory(Path(found["backing_directory"] or default), size, falls_back=True)


def little_shared_memory(num_ranks: int) -> str | None:
    """What to do where so many ranks of a node have too little shared memory; None if it is enough, or unknown."""
    folder, each, falls_back = shared_memory()
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    there, needed = found.f_blocks * found.f_frsize, each * num_ranks
    if there >= needed or there == 0 or (falls_back and there < each):  # 0: of a file system that does not say
        return None
    return (
        f"{folder} has {there / 2**20:.3g} MiB, and MPI takes up to {needed >> 20} MiB there for {num_ranks} ranks, or "
        "dies of a bus error: start the container with --shm-size=1g, or make it larger by mount -o remount,size=1g "
        f"{folder}"
    )


def mpi_has_started() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized()


def own_launcher() -> str:
    """The mpirun of the MPI library that mpi4py uses: its path where it lies beside the library, or in words."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    said = f"the mpirun of {vendor} {'.'.join(map(str, version))}"
    with suppress(OSError):
        loaded = {Path(line.split(maxsplit=5)[5]) for line in MAPS.read_text().splitlines() if "/libmpi" in line}
        libraries = sorted(path for path in loaded if path.name.startswith("libmpi"))
        for folder in (folder for library in libraries for folder in library.parents[:3]):
            of_vendor = f"mpirun.{vendor.replace(' ', '').lower()}"  # as Debian calls them
            # In /usr/bin mpirun is that of any library.
            for name in (of_vendor,) if folder == Path("/usr") else (of_vendor, "mpirun"):
                if (folder / "bin" / name).exists():
                    return f"{folder / 'bin' / name}, {said}"
    return said


def alone_of_several() -> str | None:
    """What to say where a launcher started several processes, and MPI sees one; None if there is no sign of that.

    This happens where mpirun belongs to another MPI library than mpi4py, or srun speaks no PMI that the library knows:
    each process is alone then. A process that the library's own mpirun started alone, within whatever job, is no
    stranger; nor is one at a terminal in an allocation of Slurm.
    """
    from mpi4py import MPI

    own = OPEN_MPI if MPI.get_vendor()[0] == "Open MPI" else PMI
    if MPI.COMM_WORLD.size > 1 or os.environ.get(own) == "1":
        return None
    at_a_terminal = sys.stdin is not None and sys.stdin.isatty()
    found = [(int(os.environ.get(name, "") or 0), name) for name in (PMI, OPEN_MPI, *((SLURM,) * (not at_a_terminal)))]
    found.append((1 + int(os.environ.get("PMIX_RANK", "") or 0), "PMIX_RANK"))
    number, name = max(found)
    if number < 2:
        return None
    return (
        f"each of the {number} processes of this job is alone ({name} {os.environ[name]}): start with "
        f"{own_launcher()}, or by srun with the --mpi that it speaks; to let processes be alone, use env -u {name}"
    )


def mpi_is_over() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_finalized()
