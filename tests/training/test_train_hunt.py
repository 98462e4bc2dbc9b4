"""mpi4dl.train: wherever a rank leaves, and however, the whole job ends, with one message and no code of success.

The time-out is an hour, but where it is tested: what ends a job is what saw the rank leave.
"""

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpi4dl.comm import Communicator, world
from mpi4dl.engine import Engine, StepResult
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, refused, wrapped, write_images
from tests.support.faults import ANOTHER, FAULTS, LUCK, NOT_REACHED
from tests.support.interrupted import program

LEAVING = """
import ctypes, os, signal, sys, threading
from mpi4dl import train
from mpi4dl.comm.shutdown import met
from {module} import {owner}

plain, calls = {owner}.{method}, []

def fatal(*arguments, **options):
    calls.append(1)
    if len(calls) == {call} and {rank} == met().rank:
        open({reached!r}, 'w').close()
        {way}
    return plain(*arguments, **options)

{owner}.{method} = fatal
train.main()
"""

PHASES = {
    "lists": ("mpi4dl.training", "setup", "open_images", 1),
    "builds": ("mpi4dl.runs", "assembly", "hold_model", 1),
    "reads": ("mpi4dl.datasets.loader", "Loader", "epoch", 1),
    "steps": ("mpi4dl.engine", "Engine", "step", 2),
    "updates": ("torch.optim", "SGD", "step", 4),
    "saves": ("mpi4dl.checkpoints", "Checkpoints", "save", 1),
    "validates": ("mpi4dl.engine", "Engine", "evaluate", 1),
    "ends": ("mpi4dl.runs.folder", "RunFolder", "unlock", 1),
}
WAYS = {
    "raises": "raise RuntimeError('no such luck')",
    "raises what is no Exception": "raise GeneratorExit('no such luck')",
    "exits": "sys.exit(3)",
    "exits well": "sys.exit(0)",
    "exits at once": "os._exit(3)",
    "exits at once well": "os._exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "ctypes.string_at(0)",
    "aborts": "os.abort()",
    "fails in a thread": "threading.Thread(target=lambda: 1 / 0).start(); threading.Event().wait()",
}


class Ending(NamedTuple):
    """How a job ended, and how long after its rank had left."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def leave(phase: str, way: str, rank: int, folder: Path) -> Ending:
    """What becomes of a job of two ranks, of which one leaves. Raises TimeoutError if it does not end."""
    module, owner, method, call = PHASES[phase]
    folder.mkdir(exist_ok=True)
    reached = folder / "reached"
    place = {"module": module, "owner": owner, "method": method, "call": call, "rank": rank, "reached": str(reached)}
    flags = (
        f"--tiles 1x2 --num-samples 16 --epochs 2 --no-tensorboard --run-folder {folder / 'run'} --hang-timeout 3600"
    )
    job = mpirun(2, "-c", LEAVING.format(way=WAYS[way], **place), *TINY, *flags.split())
    assert reached.exists(), job.stdout + job.stderr  # else it ended before, by another fault
    return Ending(job.code, job.stdout, job.stderr, time.time() - reached.stat().st_mtime)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("phase", "way", "rank"), [*itertools.product(PHASES, WAYS, (0, 1))])
def test_no_rank_waits_for_one_that_left(phase: str, way: str, rank: int, tmp_path: Path) -> None:
    job = leave(phase, way, rank, tmp_path)
    if phase == "ends" and "well" in way:
        return  # it had nothing left to do
    assert job.code != 0, job.stdout + job.stderr
    assert "Traceback" not in job.stdout
    assert job.stderr.count("Traceback") <= 1, job.stderr
    if way in ("raises", "raises what is no Exception", "fails in a thread"):
        assert f"rank {rank} of 2" in job.stderr, job.stderr  # it says so itself, or rank 0 says that it failed
        assert job.stderr.count("Traceback") == 1, job.stderr
        assert job.stderr.count("no such luck" if "raises" in way else "ZeroDivisionError") == 1, job.stderr
    elif way in ("is killed", "crashes", "aborts"):
        signals = {"is killed": signal.SIGKILL, "crashes": signal.SIGSEGV, "aborts": signal.SIGABRT}
        assert job.code in (signals[way], 128 + signals[way], signal.SIGKILL, signal.SIGTERM, 1), job.stderr


# What comes to calls of other ranks: a command and its flags; {run} is the folder of a run.
WORK = {
    "zero": "train --data 2 --zero 3 --ema 0.9 --clip-norm 1 --run-folder {run}",
    "both ways": "train --stages 2 --bidirectional 1 --run-folder {run}",
    "streamed": "train --stream 2x2 --stream-until stage1_block1 --tiles 1x2 --run-folder {run}",
    "stages": "train --stages 2 --microbatches 2 --balance auto --run-folder {run}",
    "tiles": "train --tiles 1x2 --run-folder {run}",
    "predicts": "predict {trained} --images {images} --tiles 1x2 --out {run}",
    "evaluates": "evaluate {trained} --data 2",
    "writes text": "generate {writer} --prompt x --max-tokens 4 --tensor 2",
}
WRITER = "--model gpt --model-options num_layers=1,hidden=8,num_heads=2 --context 16 --batch-size 4 --num-workers 0 "
WRITER += "--max-steps 2 --val-fraction 0.5 --no-tensorboard"
SMALL = (*TINY, *"--num-samples 16 --epochs 2 --no-tensorboard --hang-timeout 3600 --metrics auto".split())
SECONDS = 120.0  # of a job that takes ten at the most where nothing else runs


Places = Callable[[str], tuple[list[str], list[str]]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The arguments of some work, and the places in it where ranks call each other, of which rank 1 wrote a list."""
    folder = tmp_path_factory.mktemp("hunt")
    images, texts = write_images(folder / "images", count=2), folder / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("one two three four\n" * 9)

    @cache
    def listed(work: str) -> tuple[list[str], list[str]]:
        named = {"run": "{run}", "trained": folder / "tiles", "images": images, "writer": folder / "writer"}
        if "{trained}" in WORK[work]:
            listed("tiles")
        if "{writer}" in WORK[work]:
            train(world(), [*WRITER.split(), "--text", str(texts), "--run-folder", str(folder / "writer")])
        arguments = WORK[work].format(**named).split()
        arguments += SMALL if arguments[0] == "train" else ()
        file = folder / f"{work}.txt"
        found = [each.format(run=folder / work) for each in arguments]
        job = mpirun(2, "-m", "tests.support.faults", "list", str(file), *found)
        assert job.code == 0, job.stdout + job.stderr
        return arguments, file.read_text().splitlines()

    return listed


def hunt(work: str, fault: str, place: str, arguments: list[str], run: Path) -> str | None:
    """What is wrong with how a job ends whose rank 1 fails at a place; empty if all is well, None if it never came."""
    found = [each.format(run=run) for each in arguments]
    try:
        job = mpirun(2, "-m", "tests.support.faults", fault, place, *found, timeout=SECONDS)
    except TimeoutError as error:
        return f"{work}, {place}, {fault}: it hangs: {error}"
    if NOT_REACHED in job.stdout:
        return None if job.code == 0 else f"{work}, {place}, {fault}: it failed before: {job}"
    if fault == ANOTHER:
        said = job.stderr.count("the ranks were started differently")
        return "" if (job.code, said) == (2, 1) else f"{work}, {place}, {fault}: {job}"
    ended_well = job.code == 0 and fault == "returns early"  # there was nothing left that others needed
    said_once = job.stderr.count(LUCK) == (fault != "returns early") and job.stderr.count("Traceback") <= 1
    if (job.code or ended_well) and said_once and "done" not in job.stdout * (fault != "returns early"):
        return ""
    return f"{work}, {place}, {fault}: {job}"


def hunt_all(
    work: str, places: Places, folder: Path, faults: Iterable[str], choose: Callable[[list[str]], list[str]]
) -> list[str | None]:
    """What is wrong at each place that is chosen, by one fault after the other."""
    arguments, found = places(work)
    assert len(found) > 10
    pairs = enumerate(zip(faults, choose(found), strict=False))
    wrong = [hunt(work, fault, place, arguments, folder / str(number)) for number, (fault, place) in pairs]
    assert not any(wrong), "\n\n".join(filter(None, wrong))
    assert "" in wrong, "no place was reached"
    return wrong


@pytest.mark.parametrize("work", WORK)
@pytest.mark.sample(1)
def test_a_rank_that_fails_alone_at_some_calls_of_others_ends_the_job(
    work: str, places: Places, tmp_path: Path
) -> None:
    hunt_all(work, places, tmp_path, FAULTS, lambda found: [found[number * len(found) // 6] for number in (1, 4)])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("work", "first"), [*itertools.product(WORK, range(len(FAULTS)))])
def test_a_rank_that_fails_alone_at_any_call_of_others_ends_the_job(
    work: str, first: int, places: Places, tmp_path: Path
) -> None:
    """Every fifth place, from the first on, by one fault after the other: all cases together come to every place."""
    faults = itertools.cycle([*FAULTS][first:] + [*FAULTS][:first])
    wrong = hunt_all(work, places, tmp_path, faults, lambda found: found[first :: len(FAULTS)])
    assert wrong.count(None) <= len(wrong) // 4, "too few places were reached"


@pytest.mark.exhaustive
@pytest.mark.parametrize("work", WORK)
def test_a_rank_that_has_another_value_than_others_ends_the_job(work: str, places: Places, tmp_path: Path) -> None:
    """At each place where ranks make sure that they have the same."""
    agreeing = lambda found: [place for place in found if place.endswith(" agree")]  # noqa: E731
    hunt_all(work, places, tmp_path, itertools.repeat(ANOTHER), agreeing)


# Ends of a run within its steps, of jobs and on ranks that stay.

# The first optimizer imports for seconds, for which watchdogs have no patience.
WARM = "import torch; torch.optim.SGD([torch.zeros(1)])"
FATES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", None),
    "raises": ("raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
    "stuck": ("time.sleep(1000)", None),
    # All ranks make of a ValueError what the user did wrong, and stop together: this one stops without the others.
    "value error": ("raise ValueError('an odd value')", "ValueError: an odd value"),
}


@pytest.mark.parametrize(
    "fate", [pytest.param(fate, marks=[pytest.mark.exhaustive] * (fate == "raises")) for fate in FATES]
)
def test_a_job_ends_whose_rank_1_meets_its_fate_at_the_third_step(tmp_path: Path, fate: str) -> None:
    action, error = FATES[fate]
    watched = program(WARM, f"if engine.num_steps == 2 and engine.comm.rank == 1:\n    {action}")
    flags = ["--tiles", "1x2", "--no-tensorboard", "--run-folder", str(tmp_path), "--log-interval", "1"]
    flags += ["--max-steps", "100", *(("--hang-timeout", "3") if fate == "stuck" else ())]
    job = mpirun(2, "-c", watched, *TINY, *flags)
    assert job.code != 0
    assert re.findall(r"^step (\d+) of \d+  epoch 1  loss", job.stdout, re.MULTILINE) == ["1", "2"]
    if error is not None:
        assert job.stderr.count(error.partition(": ")[2]) == 1
        log = (tmp_path / "log-rank1.txt").read_text()
        assert error in log
        assert "in watched" in log
    if fate == "raises":
        assert job.code in (1, signal.SIGKILL)  # the launcher reports whom it saw go first
        assert job.stderr.count("[rank 1 of 2] Traceback (most recent call last)") == 1
        assert job.stderr.count("Traceback") == 1
        assert "in watched" in job.stderr
    if fate == "stuck":
        late = r"came no further for [0-9.]+ s, and a job waits no longer than that \(the hang timeout\)"
        assert re.search(late, job.stderr)
        assert "in watched" in job.stderr or "in wait" in job.stderr


def slowly(comm: Communicator, *flags: str) -> int:
    """Train with steps that take half a second each."""
    steps = []

    def slow_step(step: Any, *arguments: Any) -> StepResult:
        steps.append(time.sleep(0.5))
        return step(*arguments)  # type: ignore[no-any-return]

    with wrapped(Engine, "step", slow_step):
        train(comm, [*TINY, *flags])
    return len(steps)


@pytest.mark.exhaustive
def test_a_run_may_take_longer_than_a_step_may(ranks: Ranks, tmp_path: Path) -> None:
    flags = ("--tiles", "1x2", "--hang-timeout", "3", "--max-steps", "8", "--eval-every", "none", "--no-tensorboard")
    ranks(2).run(train, [*TINY, "--tiles", "1x2", "--max-steps", "1", "--run-folder", str(tmp_path / "warm")])
    assert ranks(2).run(slowly, *flags, "--run-folder", str(tmp_path / "run")) == [8, 8]


def bereft(comm: Communicator, flags: list[str], gone: Path) -> str:
    """What a run says whose images disappear after its second step."""

    def second_is_the_last(step: Any, engine: Engine, *arguments: Any) -> StepResult:
        result: StepResult = step(engine, *arguments)
        if engine.num_steps == 2 and comm.rank == 0:
            gone.rename(gone.with_name("elsewhere"))
        return result

    with wrapped(Engine, "step", second_is_the_last):
        return refused(comm, train, flags)


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.sample(1)
def test_a_run_whose_images_disappear_ends_and_names_one(ranks: Ranks, tmp_path: Path, policy: str) -> None:
    images = write_images(tmp_path / "images")
    flags = [*TINY, "--tiles", "1x2", "--images", str(images), "--on-bad-image", policy, "--epochs", "5"]
    (said,) = set(ranks(2).run(bereft, [*flags, "--run-folder", str(tmp_path / "run"), "--no-tensorboard"], images))
    listed = r"\.png: is not there on rank \d \(.*\), but was listed: all ranks must see the same files, and .*"
    assert re.fullmatch(rf"{re.escape(str(images))}/\w+/\d{listed}", said), said
