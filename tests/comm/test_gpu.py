"""How GPU tensors travel: decided from what MPI claims, what a test proves, and what the user asked for."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpi4dl.comm import Communicator, gpu
from mpi4dl.comm.allreduce import pick
from mpi4dl.comm.packing import Piece
from tests.pool.ranks import on_ranks


class OtherRanks:
    """A communicator on which the other ranks answer `others`, in the order in which they are asked."""

    def __init__(self, *others: bool) -> None:
        self.others = list(others)
        self.asked: list[bool] = []

    def allgather(self, mine: bool) -> list[bool]:
        self.asked.append(mine)
        return [mine, self.others[len(self.asked) - 1] if self.others else True]


CLAIM = "MPIX_Query_cuda_support"


@pytest.mark.parametrize(
    ("gpus", "claim", "proof", "local_rank", "asked", "expected", "num_proofs"),
    [
        (True, CLAIM, True, 0, "auto", ("direct", f"{CLAIM} says CUDA-aware, and the self-test proved it"), 1),
        (True, CLAIM, False, 0, "auto", ("staged", f"{CLAIM} says CUDA-aware, but the self-test failed"), 1),
        # One rank of a machine runs the proof for all.
        (True, CLAIM, True, 1, "auto", ("direct", f"{CLAIM} says CUDA-aware, and the self-test proved it"), 0),
        (True, None, True, 0, "auto", ("staged", "this MPI does not claim to be CUDA-aware"), 0),
        (False, CLAIM, True, 0, "auto", ("staged", "no GPU on every rank"), 0),
        (False, CLAIM, True, 0, "direct", ("direct", "forced"), 0),
        (False, CLAIM, True, 0, "staged", ("staged", "forced"), 0),
    ],
)
def test_a_claim_that_is_proved_is_direct(
    monkeypatch: pytest.MonkeyPatch,
    gpus: bool,
    claim: str | None,
    proof: bool,
    local_rank: int,
    asked: str,
    expected: tuple[str, str],
    num_proofs: int,
) -> None:
    proofs = on_a_machine(monkeypatch, gpus, claim, proof)
    assert gpu.decide(OtherRanks(), local_rank, asked) == expected  # type: ignore[arg-type]
    assert len(proofs) == num_proofs


def on_a_machine(monkeypatch: pytest.MonkeyPatch, gpus: bool, claim: str | None, proof: bool) -> list[bool]:
    """A machine with these answers; the proofs that are run there."""
    proofs: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(gpu, "claims", lambda comm: claim)
    monkeypatch.setattr(gpu, "failed_proof", lambda: proofs.append(proof) or (None if proof else "failed"))
    return proofs


@pytest.mark.parametrize("others", [(False,), (True, False), (True, True, False)])
def test_all_ranks_agree_on_staged_if_one_of_them_cannot_do_direct(
    monkeypatch: pytest.MonkeyPatch, others: tuple[bool, ...]
) -> None:
    on_a_machine(monkeypatch, True, CLAIM, True)
    ranks = OtherRanks(*others)
    assert gpu.decide(ranks, 0)[0] == "staged"  # type: ignore[arg-type]
    assert len(ranks.asked) == len(others)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="gpu wire is 'fast', but must be one of auto, direct, staged, nccl"):
        gpu.decide(OtherRanks(), 0, "fast")  # type: ignore[arg-type]


class Info(dict[str, str]):
    """MPI's information about a communicator."""

    Get = dict.get

    def Free(self) -> None:
        self["freed"] = "yes"


def claimed(monkeypatch: pytest.MonkeyPatch, library: Any, **kinds: str) -> str | None:
    monkeypatch.setattr(gpu, "mpi_library", lambda: library)
    info = Info(kinds)
    found = gpu.claims(SimpleNamespace(Get_info=lambda: info))  # type: ignore[arg-type]
    assert info["freed"] == "yes"
    return found


def gpu_query(answer: int, code: int = 0) -> Any:
    def query(kind: int, supported: Any) -> int:
        supported._obj.value = answer if kind == 0 else 0
        return code

    return SimpleNamespace(MPIX_GPU_query_support=query)


def test_claims_are_found_where_each_mpi_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in gpu.CLAIMING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    nothing = SimpleNamespace()
    assert claimed(monkeypatch, nothing) is None
    assert claimed(monkeypatch, nothing, mpi_memory_alloc_kinds="mpi,system") is None
    assert claimed(monkeypatch, nothing, mpi_memory_alloc_kinds="mpi,system,cuda:device") == "mpi_memory_alloc_kinds"
    assert claimed(monkeypatch, SimpleNamespace(MPIX_Query_cuda_support=lambda: 0)) is None
    assert claimed(monkeypatch, SimpleNamespace(MPIX_Query_cuda_support=lambda: 1)) == "MPIX_Query_cuda_support"
    assert claimed(monkeypatch, gpu_query(0)) is None
    assert claimed(monkeypatch, gpu_query(1, code=1)) is None
    assert claimed(monkeypatch, gpu_query(1)) == "MPIX_GPU_query_support"
    monkeypatch.setenv("MV2_USE_CUDA", "0")
    assert claimed(monkeypatch, nothing) is None
    monkeypatch.setenv("MV2_USE_CUDA", "1")
    assert claimed(monkeypatch, nothing) == "MV2_USE_CUDA"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@on_ranks(2)
def test_the_installed_mpi_claims_nothing_and_is_staged(comm: Communicator) -> None:
    assert hasattr(gpu.mpi_library(), "MPI_Init")
    assert not hasattr(gpu.mpi_library(), "MPI_Unheard_of")
    assert (gpu.claims(comm.mpi), comm.choose_gpu_wire()) == (None, ("staged", "no GPU on every rank"))


@on_ranks(2)
def test_communicators_split_off_inherit_the_choice(comm: Communicator) -> None:
    comm.choose_gpu_wire("direct")
    assert (comm.gpu_wire, comm.split(0).gpu_wire) == ("direct", "direct")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('proved'); print('proved')", None),
        ("print('proved')", "failed with exit code 0"),
        ("import sys; print('proved'); print('proved'); sys.exit('no kernel image')", "exit code 1: no kernel image"),
        ("import time; time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_proof_that_fails_says_why_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, problem: str | None
) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text(
        f'#!/bin/sh\nenv > {tmp_path}/environment\necho $$ > {tmp_path}/group\n{sys.executable} -c "$5"\n'
    )
    launcher.chmod(0o755)
    for name in ("PMI_RANK", "HOME", "OMPI_COMM_WORLD_RANK", "OMPI_ALLOW_RUN_AS_ROOT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(shutil, "which", lambda name: str(launcher))
    monkeypatch.setattr(gpu, "PROOF", program)
    monkeypatch.setattr(gpu, "PROOF_SECONDS", 1.0)
    found = gpu.failed_proof.__wrapped__()
    assert found is problem if problem is None else problem in (found or "")
    names = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines()}
    assert {"HOME", "OMPI_ALLOW_RUN_AS_ROOT"} <= names
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & names
    deadline = time.monotonic() + 60
    while running(int((tmp_path / "group").read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(int((tmp_path / "group").read_text()))


def running(group: int) -> bool:
    """Whether a process of this group is no zombie."""
    told = subprocess.run(["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(int(of) == group and state[0] not in "ZX" for of, state in map(str.split, told.splitlines()))


def test_a_proof_without_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "neither is on the path" in (gpu.failed_proof.__wrapped__() or "")


@pytest.mark.exhaustive
def test_the_proof_runs_where_the_memory_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls, between the same two ranks, on tensors of the CPU: there is nothing wrong with the program."""
    host = gpu.PROOF.replace('device="cuda", ', "")
    for line in ("set_device(comm.rank % torch.cuda.device_count())", "synchronize()"):
        assert f"torch.cuda.{line}" in host
        host = host.replace(f"torch.cuda.{line}", "pass")
    monkeypatch.setattr(gpu, "PROOF", host)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert gpu.failed_proof.__wrapped__() is None
    monkeypatch.setattr(gpu, "PROOF", host.replace("+ other", "+ other + 1"))
    assert gpu.failed_proof.__wrapped__() is not None


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="no NCCL, or no two GPUs here"
)
@on_ranks(2)
def test_gpu_tensors_arrive_by_nccl(comm: Communicator) -> None:
    comm.choose_gpu_wire("nccl")
    x = torch.full((300, 200), float(comm.rank), device="cuda").mT
    into, other = torch.zeros(200, 300, device="cuda"), 1 - comm.rank
    pending = comm.iexchange([Piece(other, x)], [Piece(other, into)], collective=True)
    summed = x.clone()
    pick(comm, device="cuda")(summed).wait()
    pending.wait()
    small = comm.all_reduce(torch.ones(8, device="cuda"))
    assert [float(values.mean()) for values in (into, summed, small, comm.all_gather(x))] == [
        [1.0, 1.0, 2.0, 0.5],
        [0.0, 1.0, 2.0, 0.5],
    ][comm.rank]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("wire", ["auto", "staged"])
@on_ranks(2)
def test_gpu_tensors_arrive(comm: Communicator, wire: str) -> None:
    comm.choose_gpu_wire(wire)
    device = torch.device("cuda", 0)
    x = torch.full((300, 200), float(comm.rank), device=device).mT
    into = torch.zeros(200, 300, device=device)
    pending = comm.irecv(into, 1 - comm.rank)
    comm.send(x, 1 - comm.rank)
    pending.wait()
    assert [float(into.mean()), float(comm.all_reduce(x.clone()).mean()), float(comm.all_gather(x).mean())] == [
        [1.0, 1.0, 0.5],
        [0.0, 1.0, 0.5],
    ][comm.rank]
