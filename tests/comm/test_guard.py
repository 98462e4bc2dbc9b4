"""A rank that fails, or leaves before the others, ends the whole job with one message; what ends well is left alone.

Without the guard most of these jobs hang, since the other ranks wait in MPI for the one that left.
"""

import os
import signal
import subprocess
import sys

import pytest

from tests.comm.endings import HOOKS, RUN, ended
from tests.pool.job import mpirun

FAILING_TOGETHER = """
import torch
from mpi4dl.comm import watchdog, failure, world

failure.LATE_SECONDS, watchdog.STUCK_SECONDS, watchdog.LOOK_SECONDS, comm = {late}, {stuck}, 0.2, world()
with comm.together():
    if comm.rank == 1:
        message = "the failing line"
        raise {failure}(message)
    {call}
"""
EITHER = pytest.mark.parametrize("how", [HOOKS, RUN])


@EITHER
@pytest.mark.sample(1)
def test_an_uncaught_exception_on_one_rank_ends_all(how: str) -> None:
    job = ended(3, "if comm.rank == 1:\n    raise KeyError('the failing line')\nwait_for_next()", how)
    assert job.code == 1
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert job.stderr.startswith("[rank 1 of 3] Traceback (most recent call last)")
    assert job.stderr.count("Traceback (most recent call last)") == 1


def test_the_same_exception_on_all_ranks_is_shown_once() -> None:
    job = ended(3, "raise KeyError('the failing line')")
    assert job.code != 0
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert job.stderr.count(" of 3] Traceback (most recent call last)") == 1


def test_an_error_where_all_were_to_agree_is_shown_once_with_the_traceback_of_its_rank() -> None:
    """The others have raised `RankFailed`, which says what that rank says, and nothing of their own frames."""
    theirs = "rank 1 of 2 failed:\\nTraceback (most recent call last)\\nKeyError: 'the failing line'\\n"
    raised = f'if comm.rank == 0:\n    raise RankFailed("{theirs}")\nraise KeyError("the failing line")'
    job = ended(2, f"from mpi4dl.comm import RankFailed\n{raised}", RUN)
    assert job.code == 1
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(("failure", "code", "said"), [("KeyError", 1, "rank 1 of 2"), ("ValueError", 2, "mpi4dl: ")])
@pytest.mark.parametrize(
    ("call", "late", "stuck"),
    [
        ("comm.recv(torch.empty(1), 1)", 600.0, 0.5),
        ("comm.broadcast_object(0, 1)", 600.0, 600.0),
        ("comm.recv(torch.empty(1), 1)", 1.0, 600.0),
    ],
)
@pytest.mark.sample(2)
def test_a_rank_that_fails_where_others_wait_for_it_elsewhere_ends_all(
    call: str, late: float, stuck: float, failure: str, code: int, said: str
) -> None:
    """All are to come together after it, but the others wait for its part of what it failed to do: they hear of it in
    a collective of objects, and otherwise those who look for ranks that wait in vain end the job.
    """
    job = mpirun(2, "-c", FAILING_TOGETHER.format(failure=failure, call=call, late=late, stuck=stuck))
    assert job.code == code
    assert said in job.stderr.splitlines()[0]
    assert job.stderr.count("the failing line") == 1


DIFFERENT_CALLS = """
import torch
from mpi4dl.comm import watchdog, world

watchdog.DEADLOCK_SECONDS = watchdog.DEADLOCK_SECONDS_OF_NEAR = watchdog.STUCK_SECONDS = 0.5
watchdog.LOOK_SECONDS, comm = 0.2, world()
{calls}
"""


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("comm.recv(torch.empty(1), 1 - comm.rank)", "all ranks waited for each other"),
        ("comm.agree() if comm.rank else comm.all_gather_object(1)", "rank 0 is in all_gather_object at <string>:7"),
    ],
)
@pytest.mark.sample(1)
def test_ranks_in_different_calls_do_not_wait_for_ever(calls: str, said: str) -> None:
    job = mpirun(2, "-c", DIFFERENT_CALLS.format(calls=calls))
    assert job.code == 1
    assert job.stderr.count(said) == 1
    assert "/comm/pending.py" not in job.stderr  # lines of the wait would hide those of the user


LETTING_GO = """
import sys, time
from mpi4dl.comm import failure, world

def say(what):  # when, as mpirun may pass on the lines of two ranks in another order; at once, so that they do not mix
    sys.stdout.write(f"{time.monotonic():.6f} {comm.rank} {what}\\n")
    sys.stdout.flush()

def let_go():
    say("lets go")

def end():
    if comm.rank == 0:
        comm.isend_object("on my way", 1).wait()

comm = world()
failure.meeting().closings.append(let_go)
failure.meeting().exit_notifications.append(end)
if comm.rank == 1:
    comm.recv_object(0)
    say("is there")
"""


def test_what_others_may_need_is_let_go_when_all_have_ended() -> None:
    """Rank 0 is at its end before rank 1 is."""
    job = mpirun(2, "-c", LETTING_GO)
    lines = sorted((float(when), said) for when, said in (line.split(" ", 1) for line in job.stdout.splitlines()))
    first, *others = (said for _, said in lines)
    assert first == "1 is there"
    assert sorted(others) == ["0 lets go", "1 lets go"]


@pytest.mark.parametrize(
    ("how", "leave", "code", "said"),
    [
        (HOOKS, "sys.exit(3)", 3, "[rank 1 of 2] ended by sys.exit(3)\n"),
        (RUN, "raise SystemExit(3)", 3, "[rank 1 of 2] ended by sys.exit(3)\n"),
        (HOOKS, "sys.exit('no more data')", 1, "[rank 1 of 2] no more data\n"),
        (HOOKS, "os._exit(3)", 3, "[rank 1 of 2] ended by os._exit(3)\n"),
        (HOOKS, "os._exit(0)", 1, "[rank 1 of 2] ended by os._exit(0)\n"),
        (HOOKS, "os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL, ""),
        (HOOKS, "open('/dev/full', 'wb', 0).write(b'x')", 2, "mpi4dl: rank 1 cannot write: No space left on device:"),
    ],
)
@pytest.mark.sample(3)
def test_a_rank_that_leaves_by_whatever_way_ends_all(how: str, leave: str, code: int, said: str) -> None:
    job = ended(2, f"if comm.rank == 1:\n    {leave}\nwait_for_next()", how)
    assert job.code == code
    assert job.stderr.startswith(said)
    assert job.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("how", "leave"), [(HOOKS, "sys.exit(0)"), (RUN, "sys.exit(0)"), (HOOKS, "return"), (HOOKS, "raise SystemExit(3)")]
)
@pytest.mark.sample(1)
def test_a_rank_that_leaves_in_peace_ends_all_once_they_wait_in_vain(how: str, leave: str) -> None:
    """In one of our waits, or in one of MPI's own, which does not return to Python."""
    job = ended(3, f"if comm.rank == 1:\n    {leave}\nwait_for_next() if comm.rank else wait(comm.Barrier)", how)
    assert job.code != 0
    assert job.stderr.startswith("mpi4dl: rank 1 ended, but ranks 0, 2 still waited, and so would have for ever: ")
    assert "rank 0 waited here:\n" in job.stderr
    assert "comm.Barrier" in job.stderr or ", in wait" in job.stderr


def test_rank_0_may_be_the_one_that_leaves() -> None:
    job = ended(2, "if comm.rank:\n    wait_for_next()")
    assert job.code != 0
    assert job.stderr.startswith("mpi4dl: rank 0 ended, but rank 1 still waited, ")


def test_ranks_that_end_one_after_the_other_are_left_alone() -> None:
    """Rank 2 ends at once, rank 1 when it has its message, for which it waits for longer than is suspicious."""
    main = """
if comm.rank == 0:
    time.sleep(1.5)
    comm.send("late", 1)
    time.sleep(1)
elif comm.rank == 1:
    wait(lambda: print(comm.recv(source=0)))
"""
    assert ended(3, main) == (0, "late\n", "")


@EITHER
def test_who_catches_an_exit_goes_on_and_may_end_well(how: str) -> None:
    main = """
def caught(leave):
    try:
        leave(3)
    except SystemExit as stop:
        assert stop.code == 3
        return stop
kept = caught(sys.exit)
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, since Python 3.12
if os.fork() == 0:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
wait(comm.Barrier)
if comm.rank:
    sys.exit(0)
print(kept.code)
"""
    assert ended(2, main, how) == (0, "3\n", "")


def test_ranks_that_leave_at_once_together_end_well() -> None:
    assert ended(2, "sys.stdout.write('done\\n')\nsys.stdout.flush()\nos._exit(0)") == (0, "done\n" * 2, "")


def test_an_exception_in_a_thread_of_one_rank_ends_all_whatever_other_threads_do() -> None:
    main = """
def work():
    time.sleep(0.1)
    raise KeyError('the failing line')
threading.Thread(target=time.sleep, args=(1000,)).start()
if comm.rank == 0:
    threading.Thread(target=work).start()
wait(comm.Barrier) if comm.rank else time.sleep(1000)
"""
    job = ended(2, main)
    assert job.code == 1
    assert job.stderr.count("KeyError: 'the failing line'") == 1
    assert "in work" in job.stderr


@EITHER
def test_a_refusal_of_all_is_one_message_and_exit_code_2(how: str) -> None:
    main = "threading.Thread(target=time.sleep, args=(1000,)).start()\nraise Refusal('there is no such file')"
    assert ended(3, main, how) == (2, "", "mpi4dl: there is no such file\n")


@pytest.mark.parametrize("ranks", ["1", "12"])
@pytest.mark.sample(1)
def test_a_refusal_that_some_ranks_raise_alone_still_ends_all_with_one_message(ranks: str) -> None:
    job = ended(4, f"if str(comm.rank) in '{ranks}':\n    raise Refusal('only here')\nwait_for_next()")
    assert (job.code, job.stderr) == (2, "mpi4dl: only here\n")


OUTPUT = {
    "full": "out = os.open('/dev/full', os.O_WRONLY)",
    "broken": "gone, out = os.pipe()\nos.close(gone)",
    "blocked": "kept, out = os.pipe()\nos.set_blocking(out, False)\n"
    "while True:\n    try: os.write(out, bytes(4096))\n    except BlockingIOError: break\nos.set_blocking(out, True)",
}


@pytest.mark.parametrize(
    ("output", "what", "code", "said"),
    [
        (
            "full",
            "print('lost', flush=True)",
            2,
            "mpi4dl: rank 0 cannot write to standard output: No space left on device",
        ),
        (
            "full",
            "print('lost at the end')",
            2,
            "mpi4dl: rank 0 cannot write to standard output: No space left on device",
        ),
        ("broken", "print('lost', flush=True)", 141, ""),
        ("broken", "raise KeyError('the failing line')", 1, "[rank 0 of 2] Traceback"),
        ("blocked", "sys.stdout = os.fdopen(1, 'w')\nprint('kept back')\nraise KeyError('the failing line')", 1, ""),
    ],
)
@pytest.mark.sample(1)
def test_output_that_nobody_takes_ends_all_with_one_message_at_most(
    output: str, what: str, code: int, said: str
) -> None:
    lines = f"{OUTPUT[output]}\nos.dup2(out, 1)\n{what}".splitlines()
    job = ended(2, "if comm.rank == 0:\n" + "\n".join(f"    {line}" for line in lines), RUN)
    assert job.code in (code, signal.SIGKILL)  # the launcher reports whom it saw go first
    assert job.stderr.startswith(said)
    assert job.stderr.count("Traceback") == said.count("Traceback")
    assert "Exception ignored" not in job.stderr


def test_a_command_wants_an_output() -> None:
    job = ended(2, "wait_for_next()", RUN, before="os.close(1); sys.stdout = None")
    assert job.code != 0
    assert "standard output is closed" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        ("raise ImportError('no such library')", 2, "mpi4dl: MPI cannot be used: no such library. "),
        ("sys.exit(0)", 1, "ended by sys.exit(0)\n"),
    ],
)
def test_a_rank_that_never_comes_to_mpi_ends_all(failure: str, code: int, said: str) -> None:
    """By one message alone: the launcher adds none to it."""
    before = f"""
    class Finder:
        def find_spec(self, name, *more):
            if name == "mpi4py.MPI" and os.environ["PMI_RANK"] == "1":
                {failure}
    sys.meta_path.insert(0, Finder())
"""
    job = ended(2, "pass", RUN, before=before)
    assert (job.code, job.stdout, job.stderr.count("\n")) == (code, "", 1)
    assert job.stderr.startswith(said)


def test_one_process_without_others_ends_as_python_does() -> None:
    """No error of a thread ends it, and its own last steps are made."""
    program = """
import atexit, os, sys, threading
from mpi4dl.comm import failure
failure.start()
atexit.register(print, "last steps")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
print("goes on")
"""
    job = mpirun(1, "-c", program + "raise KeyError('the failing line')")
    assert (job.code, job.stdout) == (1, "goes on\nlast steps\n")
    assert job.stderr.count("ZeroDivisionError") == 1
    assert job.stderr.endswith("KeyError: 'the failing line'\n")
    job = mpirun(1, "-c", program + "sys.exit(3)")
    assert (job.code, job.stdout) == (3, "goes on\nlast steps\n")


def test_an_error_at_the_prompt_is_shown_and_the_prompt_stays() -> None:
    lines = "from mpi4dl.comm import failure", "_ = failure.start()", "foo", "import sys, threading"
    lines += "thread = threading.Thread(target=lambda: 1 / 0)", "thread.start()", "thread.join()", "print('still here')"
    typed = "; ".join(f"console.push({line!r})" for line in lines)
    typed = f"console = code.InteractiveConsole(); {typed}"
    for num_ranks, flags, program in ((2, (), f"sys.ps1 = '>>> '; {typed}"), (1, ("-i",), typed)):
        job = mpirun(num_ranks, *flags, "-c", f"import code, sys; {program}")
        assert job.code == 0
        assert job.stdout.count("still here") == num_ranks
        assert job.stderr.count("NameError: name 'foo' is not defined") == num_ranks
        assert job.stderr.count("ZeroDivisionError") == num_ranks


@pytest.mark.parametrize("command", ["train", "predict", "doctor"])
def test_without_mpi4py_there_is_one_message(command: str) -> None:
    program = f"import sys; sys.modules['mpi4py'] = None; sys.argv[1:] = []; from mpi4dl.{command} import main; main()"
    job = mpirun(1, "-c", program)
    assert job.code != 0
    assert len(job.stderr.strip().splitlines()) == 1
    assert "-m pip install mpi4py mpich" in job.stderr


def test_a_user_interrupt_is_no_traceback() -> None:
    job = mpirun(1, "-c", "from mpi4dl.comm import failure; failure.start(); raise KeyboardInterrupt")
    assert (job.code, job.stderr) == (130, "")


SMALL = """
import os, types
os.statvfs = lambda path: types.SimpleNamespace(f_blocks={blocks}, f_frsize=4096, f_bavail={blocks})
from mpi4dl.comm import failure
failure.MEETING_SECONDS = 0.0  # there is no other rank
failure.run(lambda: print("started"))
"""


@pytest.mark.parametrize(
    ("num_mib", "num_ranks", "code"), [(0.0625, 2, 2), (4, 2, 2), (64, 8, 0), (64, 16, 2), (4, 1, 0), (0, 8, 0)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_little_shared_memory_is_refused_before_mpi_dies_of_it(
    num_mib: float, num_ranks: int, code: int, rank: int
) -> None:
    """By the first rank of a machine, as its launcher says."""
    program = SMALL.format(blocks=int(num_mib * 256))
    told = {"MPI_LOCALNRANKS": str(num_ranks), "MPI_LOCALRANKID": str(rank)}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | told, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code else "started\n")
    assert done.stderr.count("--shm-size") == (code == 2 and rank == 0)


OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("num_mib", "settings", "code"),
    [
        (9, {}, 2),
        (16, {}, 0),
        (3, {}, 0),  # Open MPI says it, and takes TCP
        (16, {"OMPI_MCA_btl_vader_segment_size": "16000000"}, 2),
        (9, {"OMPI_MCA_btl": "self,tcp"}, 0),
        (9, {"OMPI_MCA_btl": "^vader"}, 0),
        (9, {"OMPI_MCA_btl": "^openib"}, 2),
        (9, {"OMPI_MCA_btl_sm_backing_directory": "/tmp"}, 2),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_little_shared_memory_is_refused_for_open_mpi_too(
    num_mib: int, settings: dict[str, str], code: int, rank: int
) -> None:
    """In the window in which its file of each rank fits, but not all of them do."""
    program = SMALL.format(blocks=int(num_mib * 256))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MPI_LOCAL")}
    told = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} | settings
    # That this MPI is another one, whose processes are alone, is not what is asked here.
    program = program.replace("failure.run(", "failure.start = failure._require_shared_memory\nfailure.run(")
    done = subprocess.run([sys.executable, "-c", program], env=kept | told, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    folder = settings.get("OMPI_MCA_btl_sm_backing_directory", "/dev/shm")
    assert done.stderr.count(f"mpi4dl: {folder} has {num_mib} MiB") == (code == 2 and rank == 0)


ASKED = """
import time
from mpi4dl.comm import failure
def main():
    from mpi4dl.comm.shutdown import meeting
    if meeting().rank == 0:
        print("here", flush=True)
    while True:
        time.sleep(0.1)
failure.run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_outside_of_steps_ends_the_job_with_one_message(number: signal.Signals) -> None:
    """As in the start of a training, or just after its last line."""
    job = mpirun(2, "-c", ASKED, sends=("here", number))
    assert job.code != 0
    assert job.stderr.count(f"ended by {number.name}") == 1
    assert "Traceback" not in job.stderr
