"""How GPU tensors travel is decided by what MPI claims and a child process proves; on a GPU, both ways are tried."""

import time
from typing import Any

import pytest
import torch

from mpi4dl.comm import Communicator, gpu
from tests.comm.values import DTYPES, layouts, whole_numbers
from tests.pool.ranks import Ranks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Ranked:
    """The answers of several ranks to the calls of `decide`, in order, for a rank that answers like the first."""

    def __init__(self, *others: list[bool]) -> None:
        self.others = list(others)
        self.asked: list[bool] = []

    def allgather(self, mine: bool) -> list[bool]:
        self.asked.append(mine)
        return [mine, *(self.others.pop(0) if self.others else [True])]


class Machine:
    """A machine with or without GPUs, an MPI that claims something, and a proof that succeeds or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, available: bool, claim: str | None, proved: bool) -> None:
        self.num_proofs = 0
        self.proved = proved
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(gpu, "claims", lambda comm: claim)
        monkeypatch.setattr(gpu, "proves", self.proves)

    def proves(self) -> bool:
        self.num_proofs += 1
        return self.proved


@pytest.mark.parametrize(
    ("available", "claim", "proved", "decision", "num_proofs"),
    [
        (False, "an MPI", True, ("staged", "no GPU on every rank"), 0),
        (True, None, True, ("staged", "this MPI does not claim to be CUDA-aware"), 0),
        (True, "an MPI", False, ("staged", "an MPI says CUDA-aware, but the self-test failed"), 1),
        (True, "an MPI", True, ("direct", "an MPI says CUDA-aware, and the self-test proved it"), 1),
    ],
)
def test_direct_needs_a_gpu_a_claim_and_a_proof(
    monkeypatch: pytest.MonkeyPatch,
    available: bool,
    claim: str | None,
    proved: bool,
    decision: tuple[str, str],
    num_proofs: int,
) -> None:
    machine = Machine(monkeypatch, available, claim, proved)
    comm: Any = Ranked()
    assert gpu.decide(comm, 0) == decision
    assert machine.num_proofs == num_proofs


@pytest.mark.parametrize("asked", ["direct", "staged"])
def test_a_forced_way_is_taken_without_a_look(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    machine = Machine(monkeypatch, False, None, False)
    comm: Any = Ranked()
    assert gpu.decide(comm, 0, asked) == (asked, "forced")
    assert (comm.asked, machine.num_proofs) == ([], 0)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        (([False],), "no GPU on every rank"),
        (([True], [False]), "this MPI does not claim to be CUDA-aware"),
        (([True], [True], [False]), "an MPI says CUDA-aware, but the self-test failed"),
    ],
)
def test_one_rank_that_cannot_decides_for_all(
    monkeypatch: pytest.MonkeyPatch, others: tuple[list[bool], ...], why: str
) -> None:
    Machine(monkeypatch, True, "an MPI", True)
    comm: Any = Ranked(*others)
    assert gpu.decide(comm, 0) == ("staged", why)


def test_one_rank_of_each_machine_runs_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, True, "an MPI", False)
    comm: Any = Ranked()
    assert gpu.decide(comm, local_rank=1)[0] == "direct"
    assert machine.num_proofs == 0


def test_an_unknown_way_is_refused() -> None:
    comm: Any = Ranked()
    with pytest.raises(ValueError, match=r"gpu wire is 'fast', but must be one of auto, direct, staged"):
        gpu.decide(comm, 0, "fast")


@pytest.mark.parametrize(
    ("program", "proved"),
    [
        ("print('proved')", True),
        ("print('something else')", False),
        ("raise SystemExit('no device')", False),
        ("print('proved', flush=True); import os; os.abort()", False),
    ],
)
def test_only_a_child_that_ends_well_proves_it(monkeypatch: pytest.MonkeyPatch, program: str, proved: bool) -> None:
    monkeypatch.setattr(gpu, "PROOF", program)
    assert gpu.proves() is proved


def test_a_child_that_hangs_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PROOF", "print('proved', flush=True); import time; time.sleep(60)")
    monkeypatch.setattr(gpu, "PROOF_SECONDS", 0.5)
    begin = time.monotonic()
    assert gpu.proves() is False
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("name", ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID"])
def test_the_child_does_not_take_itself_for_a_rank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(
        gpu, "PROOF", f"import os; assert {name!r} not in os.environ; print(os.environ['KEPT'] + ' proved')"
    )
    assert gpu.proves() is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_proof_fails_without_a_gpu() -> None:
    assert gpu.proves() is False


class Info:
    """What an MPI library says of its communicators."""

    def __init__(self, kinds: str | None) -> None:
        self.kinds = kinds

    def Get(self, key: str) -> str | None:
        assert key == "mpi_memory_alloc_kinds"
        return self.kinds

    def Free(self) -> None:
        pass


class Informed:
    """A communicator with that information."""

    def __init__(self, kinds: str | None) -> None:
        self.kinds = kinds

    def Get_info(self) -> Info:
        return Info(self.kinds)


class Library:
    """An MPI library with none of the functions that tell of CUDA."""

    def __init__(self, name: None) -> None:
        pass


class OpenMPI(Library):
    """One that tells."""

    def MPIX_Query_cuda_support(self) -> int:
        return 1


class UnawareOpenMPI(Library):
    """One that tells that it is not."""

    def MPIX_Query_cuda_support(self) -> int:
        return 0


class MPICH(Library):
    """One that tells by writing to its argument."""

    def MPIX_GPU_query_support(self, kind: int, supported: Any) -> int:
        assert kind == 0
        supported._obj.value = 1
        return 0


@pytest.mark.parametrize(
    ("kinds", "library", "variables", "claim"),
    [
        (None, Library, {}, None),
        ("system", UnawareOpenMPI, {}, None),
        ("system,mpi,cuda:host", Library, {}, "mpi_memory_alloc_kinds"),
        (None, OpenMPI, {}, "MPIX_Query_cuda_support"),
        (None, MPICH, {}, "MPIX_GPU_query_support"),
        (None, Library, {"MV2_USE_CUDA": "1"}, "MV2_USE_CUDA"),
        (None, Library, {"MPICH_GPU_SUPPORT_ENABLED": "1", "MV2_USE_CUDA": "0"}, "MPICH_GPU_SUPPORT_ENABLED"),
        (None, Library, {"MVP_USE_CUDA": ""}, None),
    ],
)
def test_every_library_claims_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
    kinds: str | None,
    library: type[Library],
    variables: dict[str, str],
    claim: str | None,
) -> None:
    for name in gpu.CLAIMING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu.ctypes, "CDLL", library)
    comm: Any = Informed(kinds)
    assert gpu.claims(comm) == claim


def choose(comm: Communicator) -> tuple[tuple[str, str], str, str]:
    decision = comm.choose_gpu_wire("direct")
    return decision, comm.gpu_wire, comm.split(0).gpu_wire


def test_a_communicator_keeps_the_choice_and_hands_it_on(ranks: Ranks) -> None:
    assert ranks(2).run(choose) == [(("direct", "forced"), "direct", "direct")] * 2


def round_trip(comm: Communicator, wire: str) -> str:
    if wire == "direct" and comm.choose_gpu_wire()[0] != "direct":
        return comm.choose_gpu_wire()[1]
    comm.choose_gpu_wire(wire)
    device, other = comm.node.device("cuda"), 1 - comm.rank
    for dtype in DTYPES:
        shape = (4, 2, 3, 2)
        expected = whole_numbers(other, dtype, shape).to(device)
        for name, mine in layouts(whole_numbers(comm.rank, dtype, shape).to(device)):
            target = torch.zeros(shape, dtype=dtype, device=device).transpose(0, 3).contiguous().transpose(0, 3)
            receiving = comm.irecv(target, other)
            comm.isend(mine, other).wait()
            receiving.wait()
            assert torch.equal(target, expected), (dtype, name)
            gathered = comm.all_gather(mine)
            assert gathered.device == device
            assert torch.equal(gathered[other], expected), (dtype, name)
            comm.broadcast(mine, 1)
            comm.all_reduce(mine, "sum")
            twice = whole_numbers(1, dtype, shape).to(device)
            assert torch.equal(mine, twice if dtype is torch.bool else twice + twice), (dtype, name)
    return ""


@needs_gpu
@pytest.mark.parametrize("wire", ["staged", "direct"])
def test_gpu_tensors_arrive_as_they_were_sent(ranks: Ranks, wire: str) -> None:
    for why in ranks(2).run(round_trip, wire):
        if why:
            pytest.skip(why)
