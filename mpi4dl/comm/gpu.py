"""Whether this MPI reads and writes GPU memory itself: what it claims, and a test in a job of its own that proves it.

A tensor on a GPU goes straight to a CUDA-aware MPI ("direct") and through pinned host memory otherwise ("staged").
An MPI that is not CUDA-aware crashes when it is handed device memory, so the proof runs in other processes. It makes
the calls that "direct" makes, between two ranks: non-blocking messages, and nothing else. Collectives of MPI
always see the memory of the host, since Open MPI has no non-blocking ones for that of a GPU. Another way, past MPI, is
that of `nccl`, which is taken only where it is asked for.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

WIRES = ("auto", "direct", "staged", "nccl")
PROOF_SECONDS = 60.0
LAUNCHER_PREFIXES = ("PMI", "PMIX", "OMPI_", "MPIR_", "HYDRA", "MPI_LOCAL", "SLURM_")
LAUNCHER_SETTINGS = ("OMPI_ALLOW_", "OMPI_MCA_", "PRTE_MCA_")  # of the user, not of this job
LAUNCHERS = ("mpiexec", "mpirun")
CLAIMING_VARIABLES = ("MV2_USE_CUDA", "MVP_USE_CUDA", "MPICH_GPU_SUPPORT_ENABLED")

PROOF = """
import torch
from mpi4py import MPI
comm = MPI.COMM_WORLD
torch.cuda.set_device(comm.rank % torch.cuda.device_count())
memory = lambda t: [MPI.memory.fromaddress(t.data_ptr(), t.nbytes), MPI.BYTE]
for count in (8, 1 << 20):  # sent at once, and after the other side has answered
    ours = torch.arange(count, device="cuda", dtype=torch.int32) + comm.rank
    theirs = torch.zeros_like(ours)
    torch.cuda.synchronize()
    other = 1 - comm.rank
    requests = [comm.Irecv(memory(theirs), other), comm.Isend(memory(ours), other)]
    while not MPI.Request.Testall(requests):
        pass
    assert torch.equal(theirs, ours - comm.rank + other)
print("proved")
"""


def mpi_library() -> ctypes.CDLL:
    """The functions of the MPI that mpi4py uses, which Python loads for it alone: they are looked up from there."""
    from mpi4py import MPI

    return ctypes.CDLL(MPI.__file__)


def claims(comm: "MPI.Comm") -> str | None:
    """Where this MPI says that it is CUDA-aware (Open MPI, MPICH, Cray MPICH, MVAPICH), or None."""
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds and "cuda" in kinds:
        return "mpi_memory_alloc_kinds"
    library = mpi_library()
    if hasattr(library, "MPIX_Query_cuda_support") and library.MPIX_Query_cuda_support():
        return "MPIX_Query_cuda_support"
    if hasattr(library, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        cuda = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
        if library.MPIX_GPU_query_support(cuda, ctypes.byref(supported)) == 0 and supported.value:
            return "MPIX_GPU_query_support"
    return next((name for name in CLAIMING_VARIABLES if os.environ.get(name, "0") not in ("", "0")), None)


@cache
def failed_proof() -> str | None:
    """Send device memory from rank to rank, in a job of two ranks that may crash without harm; what went wrong."""
    launcher = next(filter(None, map(shutil.which, LAUNCHERS)), None)
    if launcher is None:
        return f"needs {' or '.join(LAUNCHERS)}, and neither is on the path: say --gpu-wire direct if it is right"
    kept = {k: v for k, v in os.environ.items() if k.startswith(LAUNCHER_SETTINGS)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)} | kept
    command, pipe = [launcher, "-n", "2", sys.executable, "-c", PROOF], subprocess.PIPE
    # In a session of its own, which ends with all its ranks.
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as child:
        try:
            told, errors = child.communicate(timeout=PROOF_SECONDS)
        except subprocess.TimeoutExpired:
            return f"did not end within {PROOF_SECONDS:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode == 0 and told.count("proved") == 2:
        return None
    last = errors.strip().rpartition("\n")[2]
    return f"failed with exit code {child.returncode}" + (f": {last}" if last else "")


def decide(comm: "MPI.Comm", local_rank: int, asked: str = "auto") -> tuple[str, str]:
    """Agree on "direct" or "staged" for GPU tensors, or whatever is asked for, and say why. Collective over `comm`."""
    if asked not in WIRES:
        raise ValueError(f"gpu wire is {asked!r}, but must be one of {', '.join(WIRES)}")
    if asked != "auto":
        return asked, "forced"
    if not all(comm.allgather(torch.cuda.is_available())):
        return "staged", "no GPU on every rank"
    claim = claims(comm)
    if not all(comm.allgather(claim is not None)):
        return "staged", "this MPI does not claim to be CUDA-aware"
    problem = failed_proof() if local_rank == 0 else None
    if not all(comm.allgather(problem is None)):
        return "staged", f"{claim} says CUDA-aware, but the self-test {problem or 'failed on another machine'}"
    return "direct", f"{claim} says CUDA-aware, and the self-test proved it"
