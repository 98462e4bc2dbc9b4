"""What our backend of torch.distributed refuses, and how a job over it ends: not in a wrong number, not in a hang."""

import subprocess
from pathlib import Path

import pytest

from tests.pool.job import PATIENCE_SECONDS, Finished, mpirun
from tests.pool.zygote import ROOT, python

START = """import torch, torch.distributed as dist, mpi4dl.torch_backend
from tests.comm.single import all_gather_single, reduce_scatter_single
"""

REFUSALS = """
import datetime
dist.init_process_group("mpi4dl", rank=-1, world_size=2)
rank = dist.get_rank()
def told(kind, call):
    try:
        call()
    except kind as error:
        if rank == 1:
            print(f"{type(error).__name__}: {error}")
        return
    raise AssertionError("not refused")
sum_, avg, band, least = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.BAND, dist.ReduceOp.MIN
told(TypeError, lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), avg))
told(TypeError, lambda: dist.all_reduce(torch.ones(2), band))
told(TypeError, lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)))
told(TypeError, lambda: dist.reduce_scatter(torch.ones(1, dtype=torch.complex64), [torch.ones(1) * 1j] * 2, least))
told(TypeError, lambda: dist.broadcast(torch.eye(2).to_sparse(), 0))
told(ValueError, lambda: all_gather_single(torch.zeros(5), torch.zeros(2)))
told(ValueError, lambda: all_gather_single(torch.zeros(4, 2).t(), torch.zeros(4)))
told(ValueError, lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)))
told(ValueError, lambda: dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(3)))
told(ValueError, lambda: reduce_scatter_single(torch.zeros(2), torch.zeros(5)))
told(ValueError, lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2]))
told(ValueError, lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)))
told(ValueError, lambda: dist.isend(torch.zeros(2), 1 - rank, tag=-3))
if rank == 0:
    dist.send(torch.ones(3), 1)
    dist.send(torch.ones(3), 1)
    dist.all_reduce(torch.ones(2))
else:
    told(ValueError, lambda: dist.recv(torch.zeros(5), 0))
    work = dist.irecv(torch.zeros(2), 0)
    dist.all_reduce(torch.ones(2))  # the error is not its own
    told(ValueError, work.wait)
    told(ValueError, work.wait)
if rank == 0:
    dist.send(torch.ones(3), 1, tag=7)
else:
    told(ValueError, lambda: dist.recv(torch.zeros(3, dtype=torch.int32), 0, tag=7))
    told(ValueError, lambda: dist.recv(torch.zeros(3, dtype=torch.int32), tag=7))
store = dist.group.WORLD.get_group_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
def listening():
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{store.port:04X}")}
found = set()
while not found:  # while others open and close sockets, a line may be missing, or there twice
    found = listening()
assert found == {f"0100007F:{store.port:04X}"}, f"the store listens beyond this machine: {found}"
hurried = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
x = torch.ones(2)
if rank == 1:
    late = dist.all_reduce(x, group=hurried, async_op=True)
    told(TimeoutError, late.wait)
    told(RuntimeError, late.wait)
    dist.barrier()
    late.wait(datetime.timedelta(hours=1))
else:
    dist.barrier()
    dist.all_reduce(x, group=hurried)
def different(*calls):
    group = dist.new_group()
    told(RuntimeError, lambda: calls[rank](group))
different(lambda g: dist.all_reduce(torch.ones(5), group=g), lambda g: dist.all_reduce(torch.ones(7), group=g))
different(lambda g: dist.all_reduce(torch.ones(5), group=g), lambda g: dist.all_reduce(torch.ones(5).int(), group=g))
different(lambda g: dist.all_reduce(torch.ones(5), least, g), lambda g: dist.all_reduce(torch.ones(5), group=g))
different(lambda g: dist.broadcast(torch.ones(5), 0, g), lambda g: dist.broadcast(torch.ones(5), 1, g))
different(lambda g: dist.barrier(g), lambda g: dist.all_gather([torch.ones(1)] * 2, torch.ones(1), g))
dist.destroy_process_group()
dist.init_process_group("mpi4dl")
dist.all_reduce(x)
if rank == 1:
    print(f"late but right: {x.tolist()}")
"""

EXPECTED = [
    "TypeError: truths have no average: reduce them with MIN or MAX",
    "TypeError: the reduction BAND works on integers and bool, but the tensor is torch.float32",
    "TypeError: torch.float8_e4m3fn cannot be reduced: convert it",
    "TypeError: complex numbers have no order, so torch.complex64 has no MIN",
    "TypeError: the backend mpi4dl moves dense tensors, not torch.sparse_coo: pass tensor.to_dense()",
    "ValueError: output has 5 elements, which must be divisible by the number of ranks (=2)",
    "ValueError: output has strides (1, 2), but must be contiguous: pass output.contiguous()",
    "ValueError: outputs has 1 tensors, but the group has 2 ranks: pass one each",
    "ValueError: this rank gives 3 elements, but its place in the output has 2",
    "ValueError: input has 5 elements, which must be divisible by the number of ranks (=2)",
    "ValueError: output_split_sizes is [1, 1], but must be 2 numbers (one a rank) whose sum is 4",
    "ValueError: output has 3 rows, which must be divisible by the number of ranks (=2): pass output_split_sizes",
    "ValueError: tag is -3, but must be from 0 to",
    "Mismatch: rank 1 receives 20 bytes from rank 0, which sent 12: the tensors must have the same size",
    *["Mismatch: rank 1 receives 8 bytes from rank 0, which sent more: the tensors must have the same size"] * 2,
    *["Mismatch: rank 1 receives torch.int32 with tag 7, but torch.float32 was sent: the tensors must be the same"] * 2,
    *["TimedOut: all_reduce of MpiGroup(1, rank 1 of 2) was not complete in the timeout of 0:00:00.300000: rank 0"] * 2,
    "Mismatch: rank 0 calls all_reduce(SUM) of 5 x torch.float32, but rank 1 calls all_reduce(SUM) of 7 x",
    "Mismatch: rank 0 calls all_reduce(SUM) of 5 x torch.float32, but rank 1 calls all_reduce(SUM) of 5 x torch.int32",
    "Mismatch: rank 0 calls all_reduce(MIN) of 5 x torch.float32, but rank 1 calls all_reduce(SUM) of 5 x",
    "Mismatch: rank 0 calls broadcast(root 0) of 5 x torch.float32, but rank 1 calls broadcast(root 1) of 5 x",
    "Mismatch: rank 0 calls barrier(), but rank 1 calls all_gather() of torch.float32: all ranks of a group must make",
    "late but right: [4.0, 4.0]",
]


@pytest.fixture(scope="module")
def refusals() -> Finished:
    done = mpirun(2, "-c", START + REFUSALS)
    assert done.code == 0, done.stderr
    return done


def test_what_is_refused_says_why(refusals: Finished) -> None:
    told = refusals.stdout.splitlines()
    assert len(told) == len(EXPECTED), refusals.stdout
    for line, beginning in zip(told, EXPECTED, strict=True):
        assert line.startswith(beginning)


def test_a_world_that_mpi_does_not_know_is_refused_by_all_ranks_with_one_message() -> None:
    done = mpirun(2, "-c", START + 'dist.init_process_group("mpi4dl", rank=1, world_size=4)')
    assert done.code == 2
    assert done.stderr.strip() == (
        "mpi4dl: init_process_group was called for rank 1 of 4, but MPI started it as rank 0 of 2: leave out "
        "rank and world_size (and the variables RANK and WORLD_SIZE), and start the program with mpirun -n 4"
    )


def test_an_error_of_one_rank_ends_the_job_and_is_seen() -> None:
    program = 'dist.init_process_group("mpi4dl")\nif dist.get_rank() == 1: raise KeyError("tile 7")\ndist.barrier()'
    done = mpirun(2, "-c", START + program)
    assert done.code != 0
    assert "[rank 1 of 2] Traceback" in done.stderr
    assert "KeyError: 'tile 7'" in done.stderr


def run_alone(program: str) -> str:
    command = [python(), "-c", START + program]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT, check=True
    ).stdout


def test_importing_it_starts_no_mpi() -> None:
    assert run_alone("import sys; print('mpi4py.MPI' in sys.modules)").strip() == "False"


def test_one_process_without_mpirun_is_a_world_of_one() -> None:
    program = """
dist.init_process_group("mpi4dl")
x = torch.arange(3.0)
dist.all_reduce(x)
reduce_scatter_single(y := torch.zeros(3), x, dist.ReduceOp.AVG)
all_gather_single(z := torch.zeros(3), y)
dist.broadcast(z, 0)
dist.barrier()
assert torch.cuda.is_available() or dist.Backend.backend_capability["mpi4dl"] == ["cpu"]
print(dist.get_world_size(), dist.get_backend(), z.tolist())
dist.destroy_process_group()
"""
    assert run_alone(program).strip() == "1 mpi4dl [0.0, 1.0, 2.0]"


def test_a_group_beside_one_that_counts_its_ranks_in_another_way_is_refused(tmp_path: Path) -> None:
    program = f"store = dist.FileStore({str(tmp_path / 'store')!r}, 2)"
    program += """
from mpi4dl.comm import world
comm = world()
dist.init_process_group("gloo", store=store, rank=1 - comm.rank, world_size=2)
try:
    dist.new_group([0, 1], backend="mpi4dl")
except ValueError as error:
    if comm.rank == 0:
        print(error)
"""
    done = mpirun(2, "-c", START + program)
    assert done.code == 0, done.stderr
    # Lines of gloo's own, of both ranks, may stand before it, and in it.
    assert "init_process_group was called for rank 1 of 2, but MPI started it as rank 0" in done.stdout


def test_in_detail_all_ranks_hear_of_other_shapes_before_data_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks: the one between two that agree hears nothing of the third otherwise."""
    program = """
dist.set_debug_level_from_env()  # which PyTorch reads when it is imported, and a forked rank finds it imported
dist.init_process_group("mpi4dl")
rank = dist.get_rank()
def told(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
x = torch.ones(2, 3) if rank < 2 else torch.ones(3, 2)
complaint = told(lambda: dist.all_reduce(x))
assert x.sum() == 6
assert "rank 2 calls all_reduce(SUM) of torch.float32 of shape (3, 2)" in complaint, complaint
if rank == 0:
    dist.send(torch.ones(3), 1, tag=4)
    dist.send(torch.ones(3), 1)
elif rank == 1:
    dist.recv(y := torch.zeros(3), 0, tag=4)
    assert y.sum() == 3
    complaint = told(lambda: dist.recv(torch.zeros(3, dtype=torch.int32), 0))
    assert "receives torch.int32 of shape (3,) from rank 0, which sent torch.float32 of shape (3,)" in complaint
found = [None] * 3
dist.all_gather_object(found, {"rank": rank})
assert [each["rank"] for each in found] == [0, 1, 2]
"""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    done = mpirun(3, "-c", START + program)
    assert done.code == 0, done.stderr
