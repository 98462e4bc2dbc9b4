"""mpi4dl.train: a run that was killed, or could not write, goes on, and ends as if nothing had happened."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.train import train
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks
from tests.support.commands import read_metrics, refusal
from tests.support.interrupted import RUN, WEIGHTS, assert_the_same_run, flags_of

BETWEEN_SAVES = """
import os, signal, sys, time
from pathlib import Path
from mpi4dl import engine, train

rank, step = int(sys.argv.pop()), engine.Engine.step
saved = Path(sys.argv[sys.argv.index("--run-folder") + 1], "checkpoints", "step-00000008")

def tenth_is_fatal(self, *arguments):
    if self.num_steps == 9 and self.comm.rank == rank:
        while not saved.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)

engine.Engine.step = tenth_is_fatal
train.main()
"""
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from mpi4dl import train
from mpi4dl.comm import world
from mpi4dl.checkpoints import manifest, storage

moment, rank, during = int(sys.argv.pop()), int(sys.argv.pop()), sys.argv.pop()
left, run, saves = moment if world().rank == rank else -1, manifest.Writing._run, False

def counting(self):
    global saves
    saves = True
    run(self)

manifest.Writing._run = counting  # what a run writes before its first save does not count

def mortal(function):
    def call(*arguments, **options):
        global left
        left -= saves
        if left == 0 and saves:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

if during == "writes":
    storage.write_all = mortal(storage.write_all)
else:
    os.fsync, Path.rename, Path.unlink = mortal(os.fsync), mortal(Path.rename), mortal(Path.unlink)
    shutil.rmtree = mortal(shutil.rmtree)
train.main()
"""
FULL = """
import resource, signal, threading
from mpi4dl import engine, train
from mpi4dl.checkpoints import manifest

write, step, ended = manifest.Writing._run, engine.Engine.step, threading.Event()

def limited(self):
    if self.job.step == 9 and self.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
    write(self)
    if self.job.step == 9:
        ended.set()

def tenth_waits(self, *arguments):
    if self.num_steps == 9 and self.comm.rank == 1:
        ended.wait(30)
    return step(self, *arguments)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
engine.Engine.step = tenth_waits
manifest.Writing._run = limited
train.main()
"""


def test_a_run_saves_after_every_epoch_and_keeps_the_newest(uninterrupted: Path) -> None:
    assert [path.name for path in checkpoints_in(uninterrupted / "checkpoints")] == ["step-00000015", "step-00000010"]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--save-every 2 --keep 9", [15, 14, 12, 10, 8, 6, 4, 2]),
        ("--save-every 4 --keep 2", [15, 12]),
        ("--save-every 7 --max-steps 13 --keep 9", [13, 7]),
        ("--max-steps 13 --keep 9", [13, 10, 5]),
        ("--save-every none", []),
    ],
)
@pytest.mark.sample(1)
def test_checkpoints_are_made_when_they_were_asked_for(
    ranks: Ranks, tmp_path: Path, flags: str, steps: list[int]
) -> None:
    ranks(2).run(train, flags_of(tmp_path / "run", "--eval-every", "none", *flags.split()))
    found = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert [int(path.name[-8:]) for path in found] == steps


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, rank: int
) -> None:
    """Between two saves, with steps that were reported but not saved."""
    flags = flags_of(tmp_path / "run", "--save-every", "4", "--log-interval", "2")
    job = mpirun(2, "-c", BETWEEN_SAVES, *flags, str(rank))
    assert job.code != 0
    assert [m["step"] for m in read_metrics(tmp_path / "run")][-1] == 8
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[0].name == "step-00000008"
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", uninterrupted)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "config-step-00000008.toml", "versions-step-00000008.json"} <= names


MOMENTS = {("writes", 0): 100, ("writes", 1): 130, ("ends", 0): 13, ("ends", 1): 4}  # of one save, about


def killed_while_saving(
    ranks: Ranks, uninterrupted: Path, folder: Path, during: str, rank: int, moment: int
) -> list[str]:
    """Kill a rank before its so manieth write, or flush, rename and deletion; go on; what was there at that time."""
    job = mpirun(2, "-c", KILLED, *flags_of(folder, "--save-every", "2"), during, str(rank), str(moment))
    assert job.code != 0, "it was not killed"
    assert "mpi4dl: " not in job.stderr
    left = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != ".lock")
    ranks(2).run(train, flags_of(folder, "--save-every", "7", "--resume", "auto"))
    assert_the_same_run(folder, uninterrupted)
    found = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert found == [".lock", "step-00000014", "step-00000015"]
    return left


@pytest.mark.parametrize(("during", "rank"), [("ends", 0), ("writes", 1)])
@pytest.mark.sample(1)
def test_a_run_that_was_killed_while_it_saved_goes_on(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, during: str, rank: int
) -> None:
    moment = round(MOMENTS[during, rank] * 2.4)
    left = killed_while_saving(ranks, uninterrupted, tmp_path / "run", during, rank, moment)
    assert left == [".writing-step-00000006", "step-00000002", "step-00000004"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(10))
def test_a_run_may_be_killed_at_any_moment_of_a_save(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, number: int
) -> None:
    dice = random.Random(number)
    during, rank = ("writes", "ends")[number % 2], dice.randrange(2)
    moment = dice.randrange(1, 6 * MOMENTS[during, rank])
    left = killed_while_saving(ranks, uninterrupted, tmp_path / "run", during, rank, moment)
    print(f"rank {rank} was killed at number {moment} of its {during}: {left}")


@pytest.mark.exhaustive
def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    job = mpirun(2, "-c", FULL, *flags_of(tmp_path / "run", "--save-every", "3"))
    folder = tmp_path / "run" / "checkpoints"
    assert refusal(job._replace(seconds=0.0)) == (  # it is no refusal at the start: the run takes its time
        f"rank 1: step-00000009 cannot be written to {folder}: File too large; {folder / 'step-00000006'} is the "
        "newest one, from which --resume goes on once there is room"
    )
    assert [path.name for path in checkpoints_in(folder)] == ["step-00000006", "step-00000003"]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 10, "it went on up to the next save"
    ranks(2).run(train, flags_of(tmp_path / "run", "--save-every", "3", "--resume", "auto"))
    assert_the_same_run(tmp_path / "run", uninterrupted)


def test_a_damaged_checkpoint_is_passed_over_and_named(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    newest, before = checkpoints_in(folder / "checkpoints")
    data = bytearray((newest / WEIGHTS).read_bytes())
    data[-100] ^= 1
    (newest / WEIGHTS).write_bytes(data)
    ranks(2).run(train, flags_of(folder, "--resume", "auto"))
    assert_the_same_run(folder, uninterrupted)
    log = (folder / "log-rank0.txt").read_text()
    assert re.search(rf"skipped {newest}: {WEIGHTS}: bytes \d+ to \d+ are not those that were written\n", log)
    assert f"resumes from {before}: step 10, epoch 3\n" in log
    assert checkpoints_in(folder / "checkpoints") == [newest, before]


def test_a_run_that_is_complete_is_left_so_and_may_be_made_longer(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    ranks(2).run(train, flags_of(folder, "--resume", "auto"))
    assert_the_same_run(folder, uninterrupted)
    ranks(2).run(train, flags_of(folder, "--resume", "auto", "--epochs", "4"))
    assert [m["step"] for m in read_metrics(folder)][-2:] == [20, 20]
    longer = tmp_path / "longer"
    ranks(2).run(train, flags_of(longer, "--epochs", "4"))
    assert_the_same_run(folder, longer)


@pytest.mark.parametrize("max_steps", ["8", "10"])
@pytest.mark.exhaustive
def test_a_run_of_more_steps_is_the_run_of_all_of_them(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, max_steps: str
) -> None:
    ranks(2).run(train, flags_of(tmp_path / "run", "--max-steps", max_steps))
    ranks(2).run(train, flags_of(tmp_path / "run", "--resume", "auto"))
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (uninterrupted / WEIGHTS).read_bytes()


OTHER_PLANS = ["--tiles 1x1", "--stages 2", pytest.param("--data 2", marks=pytest.mark.exhaustive)]
OTHER_PLANS += [pytest.param("--tiles 1x2 --data 2", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("plan", OTHER_PLANS)
@pytest.mark.sample(1)
def test_another_plan_goes_on_in_a_folder_of_its_own(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, plan: str
) -> None:
    """It begins with the validation, which comes behind the save."""
    source = uninterrupted / "checkpoints" / "step-00000010"
    flags = flags_of(tmp_path / "run", "--resume", str(source), plan=tuple(plan.split()))
    ranks(build_plan(parse(plan.split())).num_ranks).run(train, flags)
    found, expected = read_metrics(tmp_path / "run"), read_metrics(uninterrupted)
    assert [(m["step"], m["phase"]) for m in found] == [(m["step"], m["phase"]) for m in expected[-5:]]
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in expected[-5:]], rel=1e-3)


@pytest.mark.parametrize("flags", ["--stages 2 --bidirectional 1", "--stages 2 --microbatches 2 --tiles 1x1,1x1"])
@pytest.mark.sample(1)
def test_stages_go_on_to_the_last_bit(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    plan = tuple(flags.split())
    ranks(2).run(train, flags_of(tmp_path / "whole", plan=plan))
    ranks(2).run(train, flags_of(tmp_path / "run", "--max-steps", "7", plan=plan))
    ranks(2).run(train, flags_of(tmp_path / "run", "--resume", "auto", plan=plan))
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_a_run_goes_on_as_it_was_cut(ranks: Ranks, tmp_path: Path) -> None:
    """Stages draw their own random numbers, and cuts by time may come out otherwise at the next start."""
    plan = ("--stages", "2", "--microbatches", "2")
    odd = ("--balance", "1,10")
    ranks(2).run(train, flags_of(tmp_path / "whole", *odd, plan=plan))
    ranks(2).run(train, flags_of(tmp_path / "run", "--max-steps", "7", *odd, plan=plan))
    ranks(2).run(train, flags_of(tmp_path / "run", "--resume", "auto", plan=plan))
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    state = checkpoints_in(tmp_path / "run" / "checkpoints")[0] / "state.json"
    options = json.loads(state.read_text())["extra"]["options"]["pairs"]  # one is called as a kind of value is
    assert dict(options)["balance"] == '"1,10"'


def refused(comm: Communicator, *flags: str) -> str:
    with pytest.raises(Refusal) as caught:
        train(comm, list(flags))
    return str(caught.value)


REFUSALS: list[tuple[str, str]] = [
    ("--seed 3", "was written with --seed 0, but this is 3"),
    ("--optimizer SGD --scheduler-options cycle_momentum=False,max_lr=0.01,total_steps=20", "--optimizer AdamW, but"),
    ("--model resnet_v2 --model-options depth=20", "was written with --model small_resnet, but this is resnet_v2"),
    ("--val-fraction 0.3", "was written with --val-fraction 0.4, but this is 0.3: keep the value of the checkpoint"),
    ("--mean 0.4", "was written with --mean 0.5, but this is 0.4: keep the value of the checkpoint"),
    ("--std 0.3", "was written with --std 0.25, but this is 0.3: keep the value of the checkpoint"),
    ("--num-classes 5", "is of another model: .* there, but shape .* here"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSALS)
@pytest.mark.sample(4)
def test_a_run_that_is_another_one_is_refused(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, flags: str, message: str
) -> None:
    more = ("--resume", str(uninterrupted), *flags.split())
    (said,) = set(ranks(2).run(refused, *flags_of(tmp_path / "run", *more)))
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()


def test_every_option_that_changed_is_named(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    source, folder = uninterrupted / "checkpoints" / "step-00000010", tmp_path / "run"
    changed = "--image-size 24 --precision bf16 --jitter 0.1 --no-random-crop --max-steps 11 --eval-every none"
    ranks(2).run(train, flags_of(folder, "--resume", str(source), *changed.split()))
    log = (folder / "log-rank0.txt").read_text()
    for name, now, was in [
        ("--image-size", "24x24", "20x20"),
        ("--precision", "bf16", "fp32"),
        ("--jitter", "0.1", "0.2"),
        ("--random-crop", "false", "true"),
        ("--max-steps", "11", "none"),
        ("--eval-every", "none", "1"),
    ]:
        assert f"{name} {now} is new: the checkpoint was written with {was}\n" in log
    assert log.count("is new: ") == 6


@pytest.mark.exhaustive
def test_values_that_are_not_used_are_not_stored(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks(2).run(train, flags_of(folder, "--max-steps", "5"))
    ranks(2).run(train, flags_of(folder, "--max-steps", "10", "--resume", "auto", "--lr", "5"))
    log = folder / "log-rank0.txt"
    assert log.read_text().count("--lr 5.0 is not used: the run continues with 0.001\n") == 1
    assert "\nlr = 0.001\n" in (folder / "config-step-00000005.toml").read_text()
    ranks(2).run(train, flags_of(folder, "--resume", "auto"))
    assert log.read_text().count("is not used") == 1
    assert_the_same_run(folder, uninterrupted)


def test_batches_may_not_change_within_an_epoch(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks(2).run(train, flags_of(folder, "--max-steps", "3", "--eval-every", "none"))
    (said,) = set(ranks(2).run(refused, *flags_of(folder, "--resume", "auto", "--batch-size", "5")))
    assert said.endswith("was written with --batch-size 4, but this is 5, which must not change within an epoch")


def test_a_schedule_that_was_for_one_step_is_for_no_more(ranks: Ranks, tmp_path: Path) -> None:
    """It has no warm-up, and so another form than one for more steps."""
    flags = [*RUN[: RUN.index("--scheduler")], "--lr-schedule", "cosine", "--warmup", "0.3", "--save-every", "1"]
    flags += ["--run-folder", str(tmp_path / "run")]
    ranks(1).run(train, [*flags, "--max-steps", "1"])
    (said,) = ranks(1).run(refused, *flags, "--resume", "auto")
    assert said.startswith("--lr-schedule is for 1 step, but there will be 15: to train longer, start a new run")


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    for path in checkpoints_in(folder / "checkpoints"):
        (path / "manifest.json").unlink()
    (said,) = set(ranks(2).run(refused, *flags_of(folder, "--resume", "auto")))
    assert said.startswith("no checkpoint is whole: ")
    assert said.endswith("it has no manifest.json; start anew in another --run-folder")
    assert said.count("it has no manifest.json") == 2
