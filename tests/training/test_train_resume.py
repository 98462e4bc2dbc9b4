"""mpi4dl.train: a run that was killed, stopped, refused or could not write goes on, and ends as if it had not been."""

import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from signal import SIGTERM, SIGUSR1, Signals
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation, NotFinite, StepResult
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.train import train
from mpi4dl.training.input_pipeline import UnreadableImages
from tests.pool.job import mpirun
from tests.pool.ranks import Ranks, on_ranks
from tests.support.commands import read_metrics, refusal, refused, run_train, wrapped
from tests.support.interrupted import (
    NUM_STEPS,
    RUN,
    WEIGHTS,
    assert_goes_on,
    assert_the_same_run,
    flags_of,
    program,
    saved_steps,
)

STEPS_IN_AN_EPOCH = 5
KILLED = program(
    """
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
""",
    "",
)
FULL = program(
    """
from mpi4dl.checkpoints import manifest

write, ended = manifest.Writing._run, threading.Event()

def limited(self):
    if self.job.step == 9 and self.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    write(self)
    if self.job.step == 9:
        ended.set()

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
manifest.Writing._run = limited
""",
    """
if engine.num_steps == 9 and engine.comm.rank == 1:
    ended.wait(30)
""",
)
HEARS = program(
    """
from mpi4dl.runs.stopping import StopSignals

heard, remember = [], StopSignals._remember

def remember_and_tell(self, number, frame):
    remember(self, number, frame)
    heard.append(number)

StopSignals._remember = remember_and_tell
""",
    """
deadline = time.monotonic() + 30
while engine.num_steps == 6 and not heard and time.monotonic() < deadline:
    time.sleep(0.01)
""",
)


def test_a_run_saves_after_every_epoch_and_keeps_the_newest(uninterrupted: Path) -> None:
    assert saved_steps(uninterrupted) == [15, 10]


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
    assert saved_steps(tmp_path / "run") == steps


# What happens to a run within its process: a body that trains, and returns what is known of it.


def failing_validation(comm: Communicator, flags: list[str], kind: type[Exception]) -> None:
    """The second validation fails on all ranks, after its first batch."""
    num_calls = 0

    def second_fails(evaluate: Any, engine: Engine, batches: Iterable[Any], *how: Any) -> Evaluation:
        nonlocal num_calls
        num_calls += 1
        found: Evaluation = evaluate(engine, [next(iter(batches))] if num_calls > 1 else batches, *how)
        if num_calls > 1:
            raise kind("no such image")
        return found

    with wrapped(Engine, "evaluate", second_fails), pytest.raises(kind, match="no such image"):
        train(comm, flags)


def refused_step(comm: Communicator, flags: list[str]) -> None:
    """The loss of the fourth step is not finite."""

    def fourth_is_refused(step: Any, engine: Engine, *arguments: Any) -> StepResult:
        if engine.num_steps == 3:
            raise NotFinite("the loss is not finite")
        return step(engine, *arguments)  # type: ignore[no-any-return]

    with wrapped(Engine, "step", fourth_is_refused), pytest.raises(NotFinite):
        train(comm, flags)


def signalled(comm: Communicator, flags: list[str]) -> int:
    """The last rank gets a signal at its sixth step: after how many steps this one stops."""
    steps: list[StepResult] = []

    def sixth_is_signalled(step: Any, engine: Engine, *arguments: Any) -> StepResult:
        if len(steps) == 5 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), SIGUSR1)
        steps.append(step(engine, *arguments))
        return steps[-1]

    with wrapped(Engine, "step", sixth_is_signalled):
        train(comm, flags)
    return len(steps)


def signalled_in_validation(comm: Communicator, flags: list[str]) -> list[int]:
    """The last rank gets two signals in its second validation: the batches of each of them."""
    used: list[int] = []

    def second_is_signalled(evaluate: Any, engine: Engine, batches: Iterable[Any], *how: Any) -> Evaluation:
        def counted() -> Iterator[Any]:
            for batch in batches:
                used[-1] += 1
                if len(used) == 2 and comm.rank == comm.size - 1:
                    os.kill(os.getpid(), SIGUSR1)
                    os.kill(os.getpid(), SIGTERM)
                yield batch

        used.append(0)
        return evaluate(engine, counted(), *how)  # type: ignore[no-any-return]

    with wrapped(Engine, "evaluate", second_is_signalled):
        train(comm, flags)
    return used


MORE = pytest.mark.exhaustive
INTERRUPTIONS = [
    pytest.param(signalled, "none", 6, [6], id="a signal to one rank"),
    pytest.param(refused_step, "epoch", None, [3], id="a step that all ranks refuse"),
    pytest.param(signalled_in_validation, "none", [2, 1], [10], id="a signal in validation", marks=MORE),
    pytest.param(signalled_in_validation, "epoch", [2, 1], [10, 5], id="a signal in validation, epochs are saved"),
]
for kind, every, steps, marks in (
    (KeyError, "epoch", [10, 5], [MORE]),
    (UnreadableImages, "epoch", [10, 5], [MORE]),
    (UnreadableImages, "7", [10, 7], []),
    (KeyError, "7", [7], [MORE]),
):
    body = partial(failing_validation, kind=kind)
    name = f"{kind.__name__} in validation, saved by {every}"
    INTERRUPTIONS.append(pytest.param(body, every, None, steps, id=name, marks=marks))


@pytest.mark.parametrize(("body", "save_every", "found", "saved"), INTERRUPTIONS)
def test_an_interruption_costs_no_step_that_was_to_be_saved(
    ranks: Ranks,
    uninterrupted: Path,
    tmp_path: Path,
    body: Callable[..., Any],
    save_every: str,
    found: Any,
    saved: list[int],
) -> None:
    flags = flags_of(tmp_path / "run", "--save-every", save_every)
    assert ranks(2).run(body, flags) == [found] * 2
    assert saved_steps(tmp_path / "run") == saved
    log = (tmp_path / "run" / "log-rank0.txt").read_text()
    resume = f"saved at step 3 of 15; resume with: mpirun -n 2 python -m mpi4dl.train {flags[0]} "
    assert (resume in log) == (body is refused_step)
    assert_goes_on(ranks, tmp_path / "run", uninterrupted, "--save-every", save_every)


def dropping(num_classes: int) -> nn.Sequential:
    layers = [nn.Conv2d(3, 4, 3, 2), nn.Dropout(0.5), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


DROPOUT = (
    f"--model {__file__}:dropping --image-size 32 --batch-size 2 --num-samples 6 --val-fraction 0.7 "
    "--epochs 3 --no-tensorboard --stages 2 --balance flops --save-every none"
).split()


def test_a_validation_that_was_given_up_draws_no_random_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """In stages, the masks of dropout depend on how many batches there were."""
    run_train(ranks, tmp_path / "whole", *DROPOUT)
    flags = [*DROPOUT, "--run-folder", str(tmp_path / "run")]
    assert ranks(2).run(signalled_in_validation, flags) == [[2, 1]] * 2
    ranks(2).run(train, [*flags, "--resume", "auto"])
    assert_the_same_run(tmp_path / "run", tmp_path / "whole")


ROUNDS = ("ireduce", "all_gather", "ibroadcast", "ibarrier", "all_gather_object", "broadcast_object")


@pytest.mark.parametrize("plan", ["--tiles 1x2", "--stages 2 --microbatches 2", "--data 2 --zero 2"])
@pytest.mark.sample(1)
@on_ranks(2)
def test_a_step_has_one_round_over_all_ranks(comm: Communicator, tmp_path: Path, plan: str) -> None:
    """Beside its exchanges and sums of gradients; an epoch begins with one more."""
    flags = flags_of(tmp_path, "--epochs", "2", "--eval-every", "none", plan=tuple(plan.split()))
    flags += ["--log-interval", "100", "--save-every", "none"]
    found, rounds, step = [], [0], Engine.step

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Communicator, *arguments: Any, **options: Any) -> Any:
            rounds[0] += self is comm
            return function(self, *arguments, **options)

        return call

    def counting_step(engine: Engine, *arguments: Any) -> StepResult:
        found.append(rounds[0])
        return step(engine, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in ROUNDS:
            patch.setattr(Communicator, name, counted(getattr(Communicator, name)))
        patch.setattr(Engine, "step", counting_step)
        train(comm, flags)
    between = [after - before for before, after in pairwise(found)]
    within = [count for number, count in enumerate(between, 1) if number % STEPS_IN_AN_EPOCH]
    assert within == [1] * 2 * (STEPS_IN_AN_EPOCH - 1)


# Jobs that are told to stop, or are killed.


COUNTS = """
import torch

class Counts:
    def __init__(self):
        self.seen, self.losses = 0, torch.zeros(3)
    def on_step_end(self, run, result):
        self.seen, self.losses = self.seen + 1, self.losses.roll(1)
        self.losses[0] = self.seen
        if self.seen == 7:
            run.stop()
    def on_fit_end(self, run):
        run.say(f"seen {self.seen}: {self.losses.tolist()}")
    def state_dict(self):
        return {"seen": self.seen, "losses": self.losses}
    def load_state_dict(self, state):
        self.seen, self.losses = state["seen"], state["losses"]
"""


def test_a_callback_goes_on_with_its_state(ranks: Ranks, uninterrupted: Path, tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    folder, own = tmp_path / "run", ("--callbacks", f"{tmp_path}/counts.py:Counts")
    ranks(2).run(train, flags_of(folder, *own))
    assert_goes_on(ranks, folder, uninterrupted, *own)
    assert "seen 15: [15.0, 14.0, 13.0]" in (folder / "log-rank0.txt").read_text()


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGUSR1, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_go_on(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, number: Signals
) -> None:
    job = mpirun(2, "-c", HEARS, *flags_of(tmp_path / "run"), sends=("step 6 ", number))
    assert (job.code, job.stderr) == (0, "")
    last = job.stdout.splitlines()[-1]
    said = re.fullmatch(
        rf"stopped by {number.name} at step ([67]) of 15; resume with: mpirun -n 2 python -m (.*)", last
    )
    assert said is not None, last
    assert saved_steps(tmp_path / "run")[0] == int(said[1])
    assert not (tmp_path / "run" / WEIGHTS).exists()
    ranks(2).run(train, shlex.split(said[2])[1:])
    assert_the_same_run(tmp_path / "run", uninterrupted)


MOMENTS = {("writes", 0): 58, ("writes", 1): 15, ("ends", 0): 13, ("ends", 1): 4}  # of one save, about


def killed_while_saving(
    ranks: Ranks, uninterrupted: Path, folder: Path, during: str, rank: int, moment: int
) -> list[str]:
    """Kill a rank before its so manieth write, or flush, rename and deletion; go on; what was there at that time."""
    job = mpirun(2, "-c", KILLED, *flags_of(folder, "--save-every", "2"), during, str(rank), str(moment))
    assert job.code != 0, "it was not killed"
    assert "mpi4dl: " not in job.stderr
    left = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != ".lock")
    assert_goes_on(ranks, folder, uninterrupted, "--save-every", "7")
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
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "config-step-00000004.toml", "versions-step-00000004.json"} <= names


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
    assert saved_steps(tmp_path / "run") == [6, 3]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 10, "it went on up to the next save"
    assert_goes_on(ranks, tmp_path / "run", uninterrupted, "--save-every", "3")


# Runs that go on from what is there, by other plans, and with other options.


@pytest.fixture
def copied(uninterrupted: Path, tmp_path: Path) -> Path:
    """A copy of the uninterrupted run."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "copied"))


def test_a_damaged_checkpoint_is_passed_over_and_named(ranks: Ranks, uninterrupted: Path, copied: Path) -> None:
    newest, before = checkpoints_in(copied / "checkpoints")
    data = bytearray((newest / WEIGHTS).read_bytes())
    data[-100] ^= 1
    (newest / WEIGHTS).write_bytes(data)
    assert_goes_on(ranks, copied, uninterrupted)
    log = (copied / "log-rank0.txt").read_text()
    assert re.search(rf"skipped {newest}: {WEIGHTS}: bytes \d+ to \d+ are not those that were written\n", log)
    assert f"resumes from {before}: step 10, epoch 3\n" in log
    assert checkpoints_in(copied / "checkpoints") == [newest, before]


LOST = {
    "best.safetensors": r"the best weights, of step 5, are not in this run, so the next ones count as best: ",
    "metrics.jsonl": r"lacks reports that it had at this step: [\d,]+ of [\d,]+ bytes",
}


@pytest.mark.parametrize(("name", "left"), [(name, left) for name in LOST for left in (None, 0, 100)])
@pytest.mark.sample(3)
def test_a_run_that_lost_a_file_says_so_and_ends_with_a_whole_one(
    ranks: Ranks, tmp_path: Path, name: str, left: int | None
) -> None:
    run = tmp_path / "run"
    flags = flags_of(run, "--monitor", "val_loss", "--resume", "auto")
    ranks(2).run(train, [*flags, "--max-steps", "10"])
    content = (run / name).read_bytes()
    (run / name).unlink()
    if left is not None:
        (run / name).write_bytes(content[:left])
    ranks(2).run(train, flags)
    assert len(re.findall(LOST[name], (run / "log-rank0.txt").read_text())) == 1
    assert load_file(run / "best.safetensors")
    steps = [m["step"] for m in read_metrics(run) if m["phase"] == "validation"]
    assert steps[-2:] == [10, NUM_STEPS]
    assert len(set(steps)) == len(steps)


def test_a_run_that_is_complete_is_left_so_and_may_be_made_longer(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks(2).run(train, flags_of(run, "--epochs", "2"))
    before = Path(shutil.copytree(run, tmp_path / "before"))
    assert_goes_on(ranks, run, before, "--epochs", "2")
    assert_goes_on(ranks, run, uninterrupted)
    assert [m["step"] for m in read_metrics(run)][-2:] == [15, 15]


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


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        pytest.param("--stages 2 --bidirectional 1", "", marks=pytest.mark.exhaustive),
        pytest.param("--stages 2 --microbatches 2 --tiles 1x1,1x1", "", marks=pytest.mark.exhaustive),
        ("--stages 2 --microbatches 2", "--balance 1,5"),
    ],
)
def test_stages_go_on_as_they_were_cut_to_the_last_bit(ranks: Ranks, tmp_path: Path, plan: str, first: str) -> None:
    """They draw their own random numbers, and cuts by time may come out otherwise at the next start.

    Batches may not change where the run goes on within an epoch.
    """

    def flags(folder: str, *more: str) -> list[str]:
        return flags_of(tmp_path / folder, "--epochs", "2", *more, plan=tuple(plan.split()))

    ranks(2).run(train, flags("whole", *first.split()))
    ranks(2).run(train, flags("run", "--max-steps", "7", *first.split()))
    (said,) = set(ranks(2).run(refused, train, flags("run", "--resume", "auto", "--batch-size", "5")))
    assert said.endswith("was written with --batch-size 4, but this is 5, which must not change within an epoch")
    ranks(2).run(train, flags("run", "--resume", "auto"))
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    if first:
        state = checkpoints_in(tmp_path / "run" / "checkpoints")[0] / "state.json"
        options = json.loads(state.read_text())["extra"]["options"]["pairs"]  # one is called as a kind of value is
        assert dict(options)["balance"] == '"1,5"'


REFUSALS: list[tuple[str, str]] = [
    ("--seed 3", "was written with --seed 0, but this is 3"),
    ("--optimizer SGD --scheduler-options cycle_momentum=False,max_lr=0.01,total_steps=20", "--optimizer AdamW, but"),
    ("--model resnet_v2 --model-options depth=20", "was written with --model .*:tiny_resnet, but this is resnet_v2"),
    ("--val-fraction 0.3", "was written with --val-fraction 0.4, but this is 0.3: keep the value of the checkpoint"),
    ("--mean 0.4", "was written with --mean 0.5, but this is 0.4: keep the value of the checkpoint"),
    ("--std 0.3", "was written with --std 0.25, but this is 0.3: keep the value of the checkpoint"),
    ("--num-classes 5", "the classes were class 0, .* and are class 0"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSALS)
@pytest.mark.sample(4)
def test_a_run_that_is_another_one_is_refused(
    ranks: Ranks, uninterrupted: Path, tmp_path: Path, flags: str, message: str
) -> None:
    more = ("--resume", str(uninterrupted), *flags.split())
    (said,) = set(ranks(2).run(refused, train, flags_of(tmp_path / "run", *more)))
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
    assert_goes_on(ranks, folder, uninterrupted)
    assert log.read_text().count("is not used") == 1


def test_a_schedule_that_was_for_one_step_is_for_no_more(ranks: Ranks, tmp_path: Path) -> None:
    """It has no warm-up, and so another form than one for more steps."""
    flags = [*RUN[: RUN.index("--scheduler")], "--lr-schedule", "cosine", "--warmup", "0.3", "--save-every", "1"]
    flags += ["--run-folder", str(tmp_path / "run")]
    ranks(1).run(train, [*flags, "--max-steps", "1"])
    (said,) = ranks(1).run(refused, train, [*flags, "--resume", "auto"])
    assert said.startswith(f"--lr-schedule is for 1 step, but there will be {NUM_STEPS}: to train longer, start a new")


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(ranks: Ranks, copied: Path) -> None:
    for path in checkpoints_in(copied / "checkpoints"):
        (path / "manifest.json").unlink()
    (said,) = set(ranks(2).run(refused, train, flags_of(copied, "--resume", "auto")))
    assert said.startswith("no checkpoint is whole: ")
    assert said.endswith("it has no manifest.json; start anew in another --run-folder")
    assert said.count("it has no manifest.json") == 2
