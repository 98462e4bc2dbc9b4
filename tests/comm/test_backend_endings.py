"""How a job over torch.distributed ends when its ranks do not end together: at once, with a message, and never well."""

import pytest

from tests.pool.job import Finished, mpirun

PROGRAM = """
import os, sys, datetime, torch, torch.distributed as dist, mpi4dl.torch_backend
dist.init_process_group("mpi4dl", timeout=datetime.timedelta(hours=2))
rank, x = dist.get_rank(), torch.ones(2)
dist.all_reduce(x)
{body}
print(f"rank {{rank}} ends well\\n", end="", flush=True)
"""


def run(body: str) -> Finished:
    return mpirun(2, "-c", PROGRAM.format(body=body))


@pytest.mark.parametrize(
    ("leave", "call"),
    [
        ("os._exit(0)", "dist.all_reduce(x)"),
        pytest.param("sys.exit(0)", "dist.recv(x, 1)", marks=pytest.mark.exhaustive),
        pytest.param("raise SystemExit", "dist.all_gather([x, x], x)", marks=pytest.mark.exhaustive),
        pytest.param("raise SystemExit(3)", "dist.recv(x)", marks=pytest.mark.exhaustive),
        pytest.param("dist.destroy_process_group(); sys.exit()", "dist.barrier()", marks=pytest.mark.exhaustive),
        pytest.param("sys.exit()", "dist.new_group()", marks=pytest.mark.exhaustive),
        pytest.param("sys.exit()", "dist.monitored_barrier()", marks=pytest.mark.exhaustive),
        pytest.param("sys.exit()", "dist.send(torch.ones(3_000_000), 1)", marks=pytest.mark.exhaustive),
    ],
)
def test_who_waits_for_a_rank_that_has_left_learns_it_and_the_job_fails(leave: str, call: str) -> None:
    done = run(f"if rank == 1:\n    {leave}\n{call}")
    assert done.code != 0
    assert "Departed: " in done.stderr
    assert "left" in done.stderr
    assert "ends well" not in done.stdout


UNANSWERED = """
import time
left = dist.new_group()
spare = torch.empty(2)
late = dist.irecv(spare, 1 - rank, group=left, tag={tag})
big = torch.full((3_000_000,), float(rank))
coming = dist.irecv(big, 0, group=left) if rank else dist.isend(big, 1, group=left)
begin = time.monotonic()
dist.destroy_process_group(left)
dist.destroy_process_group()
print(f"{{time.monotonic() - begin < 60}} {{big.mean().item()}}\\n", end="")
try:
    late.wait()
except RuntimeError as error:
    print(f"{{'the group was destroyed' in str(error)}}\\n", end="")
"""


@pytest.mark.parametrize("tag", [5, pytest.param(2**31 - 1, marks=pytest.mark.exhaustive)])
def test_a_receive_that_nobody_answers_keeps_no_group_from_being_destroyed(tag: int) -> None:
    """What was sent still arrives. The time-out of the group is two hours."""
    done = run(UNANSWERED.format(tag=tag))
    assert (done.code, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if line.startswith("True")]
    assert sorted(said) == ["True", "True", "True 0.0", "True 0.0"], done.stdout


@pytest.mark.exhaustive
def test_more_groups_than_mpi_has_room_for_are_refused_in_words_and_destroyed_ones_give_theirs_back() -> None:
    body = """
for number in range(1500):
    dist.destroy_process_group(dist.new_group())
try:
    groups = [dist.new_group() for number in range(1500)]
except RuntimeError as error:
    print("no communicator left" in str(error) and "destroy_process_group" in str(error))
"""
    done = run(body)
    assert done.code == 0, done.stderr
    assert done.stdout.count("True") == 2


def test_what_a_rank_has_sent_before_it_leaves_still_arrives() -> None:
    """Also large messages, and sums that it has begun; and a call that was given up is not waited for again."""
    body = """
late = dist.new_group(timeout=datetime.timedelta(seconds=0.1))
big = torch.full((3_000_000,), float(rank))
if rank == 1:
    dist.isend(big, 0)
    dist.all_reduce(x, async_op=True)
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1), group=late)
except RuntimeError as error:
    assert isinstance(error, TimeoutError | ConnectionError)
    late.set_timeout(datetime.timedelta(hours=2))
dist.recv(big, 1)
dist.all_reduce(x)
print(big.mean().item(), x.tolist())
dist.destroy_process_group()
"""
    done = run(body)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1.0 [4.0, 4.0]", "rank 0 ends well"]


@pytest.mark.exhaustive
def test_a_message_may_take_its_time_though_who_wrote_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the rank stops it, as it leaves, for longer than any pause that could be a rule."""
    body = """
import signal, time
big = torch.full((3_000_000,), float(rank))
if rank == 1:
    leaving = os.getpid()
    if os.fork() == 0:
        time.sleep(2)
        os.kill(leaving, signal.SIGSTOP)
        time.sleep(15)
        os.kill(leaving, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.isend(big, 0)
    os._exit(0)
time.sleep(4)
dist.recv(big, 1)
print(big.mean().item())
try:
    dist.recv(x, 1)
except ConnectionError as error:
    print("Departed" in type(error).__name__)
"""
    monkeypatch.setenv("MPIR_CVAR_CH4_CMA_ENABLE", "0")  # or the reader would need no help of who wrote
    done = run(body)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1.0", "True", "rank 0 ends well"]
