"""The meaning of --resume: where a run is recorded, its checkpoint, and options that must not change."""

import shlex
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Evaluation
from mpi4dl.options.config import Config, ConfigError, parse, shared_options
from mpi4dl.training.resuming import (
    FROM_CHECKPOINT,
    NUM_IMAGES,
    OF_THIS_START,
    SAME_ALWAYS,
    SAME_WITHIN_AN_EPOCH,
    Progress,
    compare,
    find_origin,
    options_before,
    options_to_compare,
    require_fit,
)
from mpi4dl.training.setup import as_it_began, command_to_go_on, with_its_own
from tests.checkpoints.made import write
from tests.pool.ranks import Ranks
from tests.support.commands import settled


def found(flags: list[str]) -> tuple[Path, bool, list[str]] | str:
    """The folder, whether the run is in it already, and the names of checkpoints; or the refusal."""
    try:
        origin = find_origin((config := parse(flags)).run, config.model_name, datetime.now())
    except ConfigError as refusal:
        return str(refusal)
    return origin.folder.path, origin.in_place, [path.name for path in origin.candidates]


NEW, OLD = "--run-folder {root}/new ", "--run-folder {root}/old "
BOTH = ["step-00000010", "step-00000008"]
ORIGINS: dict[str, tuple[str, bool, list[str]] | str] = {
    OLD: ("old", False, []),  # a run begins anew unless it is asked to go on
    f"{NEW}--resume auto": ("new", False, []),
    f"{OLD}--resume auto": ("old", True, BOTH),
    "--run-folder {root}/bare --resume auto": ("bare", True, []),
    "--run-folder {root}/thesis --resume auto": ("thesis", False, []),
    f"{NEW}--resume {{root}}/old": ("new", False, BOTH),
    f"{NEW}--resume {{root}}/old/checkpoints/step-00000008": ("new", False, BOTH[1:]),
    f"{OLD}--resume {{root}}/old": ("old", True, BOTH),
    "--resume auto": "`resume` auto continues the run in `run_folder`: add `run_folder`",
    "--resume {root}/nowhere": "`resume` {root}/nowhere: no such folder; name a run, one of its checkpoints, or auto",
    "--resume {root}/thesis": "`resume` {root}/thesis: there is no checkpoint in this folder",
}


@pytest.mark.parametrize("flags", ORIGINS)
def test_where_a_run_is_recorded_and_from_which_checkpoints_it_goes_on(tmp_path: Path, flags: str) -> None:
    """Auto goes on where there is a run, a path is a run or a checkpoint."""
    for folder in ("old/checkpoints/step-00000008", "old/checkpoints/step-00000010", "bare", "thesis"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("old/config.toml", "bare/config.toml", "thesis/thesis.tex"):
        (tmp_path / file).touch()
    expected = ORIGINS[flags]
    told = expected.format(root=tmp_path) if isinstance(expected, str) else (tmp_path / expected[0], *expected[1:])
    assert found(flags.format(root=tmp_path).split()) == told


def test_a_run_that_goes_on_without_a_name_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    place, in_place, _ = found(["--resume", str(tmp_path)])
    assert (place.parent, in_place) == (Path("runs"), False)  # type: ignore[union-attr]


CONFIG = settled([])
OPTIONS = options_to_compare(shared_options(CONFIG), num_images=100)
PROGRESS = Progress(1, 0, [0.5], [], Evaluation(0.5, None, 3), None, 10, OPTIONS)
EXTRA = {**PROGRESS._asdict(), "evaluation": {"loss": 0.5, "accuracy": None, "count": 3}}
PLACE = Path("run/checkpoints/step-00000007")


def shown(name: str) -> str:
    return OPTIONS[name].strip('"')


def called(name: str) -> str:
    return name if name == NUM_IMAGES else f"`{name}`"


def test_a_checkpoint_remembers_every_option() -> None:
    assert {*SAME_ALWAYS, *SAME_WITHIN_AN_EPOCH, *FROM_CHECKPOINT, *OF_THIS_START} < set(OPTIONS)
    assert set(OPTIONS) == {NUM_IMAGES, *shared_options(CONFIG)}
    assert (OPTIONS["lr"], OPTIONS["seed"], OPTIONS[NUM_IMAGES]) == ("0.001", "0", "100")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("batch", [0, 3])
def test_every_option_that_changed_is_refused_or_said(name: str, batch: int) -> None:
    assert compare(PLACE, PROGRESS, OPTIONS) == []
    there, here = PROGRESS._replace(batch=batch), {**OPTIONS, name: '"other"'}
    was = f"{PLACE} was written with {called(name)} {shown(name)}, but this is other"
    if name in SAME_ALWAYS or (batch and name in SAME_WITHIN_AN_EPOCH):
        with pytest.raises(Refusal) as caught:
            compare(PLACE, there, here)
        rule = (
            ": keep the value of the checkpoint" if name in SAME_ALWAYS else ", which must not change within an epoch"
        )
        assert str(caught.value) == was + rule
    elif name in FROM_CHECKPOINT:
        said = f"{called(name)} other is not used: the run continues with {shown(name)}"
        assert compare(PLACE, there, here) == [said]
    elif name in OF_THIS_START:
        assert compare(PLACE, there, here) == []
    else:
        said = f"{called(name)} other is new: the checkpoint was written with {shown(name)}"
        assert compare(PLACE, there, here) == [said]


def test_a_step_of_as_many_images_goes_on_within_an_epoch() -> None:
    """Replicas with slides of their own need a batch of as many: fewer of them accumulate more."""
    there = PROGRESS._replace(batch=3, options={**OPTIONS, "batch_size": "4", "accumulate": "2"})
    assert len(compare(PLACE, there, {**OPTIONS, "batch_size": "2", "accumulate": "4"})) == 2
    with pytest.raises(Refusal, match="`batch_size` 4, but this is 2"):
        compare(PLACE, there, {**OPTIONS, "batch_size": "2", "accumulate": "2"})


def test_an_option_that_the_checkpoint_does_not_know_was_at_its_default_but_there_is_none_of_the_images() -> None:
    def known(without: str) -> Progress:
        return PROGRESS._replace(options={name: value for name, value in OPTIONS.items() if name != without})

    assert compare(PLACE, known("mean"), OPTIONS) == []
    with pytest.raises(Refusal, match=r"with `mean` 0.5, but this is 0.25: keep the value of the checkpoint$"):
        compare(PLACE, known("mean"), {**OPTIONS, "mean": "0.25"})
    with pytest.raises(Refusal, match=r"7: state.json does not say what the number of training images was$"):
        compare(PLACE, known(NUM_IMAGES), OPTIONS)


def test_what_the_checkpoint_knows_better_is_the_configuration_that_goes_on() -> None:
    options = {**OPTIONS, "lr": "0.5", "optimizer_options": "{ betas = [0.8, 0.9] }", "mean": "0.25"}
    found = with_its_own(CONFIG, options, PLACE)
    assert found.optimizer == replace(CONFIG.optimizer, lr=0.5, optimizer_options={"betas": [0.8, 0.9]})
    assert replace(found, optimizer=CONFIG.optimizer) == CONFIG
    with pytest.raises(
        ConfigError, match=r"step-00000007: state.json: `lr` is 'fast', but must be a number of at least 0"
    ):
        with_its_own(CONFIG, {**OPTIONS, "lr": "fast"}, PLACE)


def began(comm: Communicator, flags: list[str]) -> Config | str:
    try:
        return as_it_began(config := parse(flags), options_before(comm, config.run))
    except Refusal as refusal:
        return str(refusal)


def test_what_nobody_gives_is_as_the_checkpoint_has_it(ranks: Ranks, tmp_path: Path) -> None:
    """And another run does not get the schedule of the one in its folder."""
    were = {**OPTIONS, "optimizer": '"SGD"', "lr": "0.3", "lr_schedule": '"constant"', "epochs": "4", "flip": '"all"'}
    were["warmup"] = "0"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write(tmp_path / "run" / "checkpoints", 1, extra={**EXTRA, "options": were})
    (tmp_path / "run" / "config.toml").touch()
    there = ["--run-folder", str(tmp_path / "run"), "--resume", "auto"]
    for flags in (there, ["--resume", str(tmp_path / "run")]):
        for config in ranks(2).run(began, [*flags, "--epochs", "9"]):
            chosen = config.optimizer
            assert (chosen.optimizer, chosen.lr, chosen.lr_schedule, chosen.warmup) == ("SGD", 0.3, "constant", 0)
            assert (config.training.epochs, config.data.flip) == (9, "all")
    assert ranks(2).run(began, ["--run-folder", str(tmp_path / "other"), "--resume", "auto"])[0].optimizer.lr == "auto"
    for told in ranks(2).run(began, [*there, "--scheduler", "CosineAnnealingLR"]):
        assert [word for word in ("`scheduler`", "CosineAnnealingLR", "`run_folder`") if word not in told] == []


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("epoch", -1, "'epoch' is -1, but must be a whole number"),
        ("losses", [0.5, "x"], r"'losses'\[1\] is 'x', but must be a number"),
        ("skipped", "x", "'skipped' is 'x', but must be a list"),
        ("evaluation", {"loss": 1.0, "count": 3}, "'evaluation' has no 'accuracy'"),
        ("scheduler", 3, "'scheduler' is 3, but must be an object"),
        ("options", {"lr": 0.1}, "'options': 'lr' is 0.1, but must be text"),
    ],
)
def test_progress_that_no_run_made_is_refused(tmp_path: Path, field: str, value: Any, complaint: str) -> None:
    path = write(tmp_path, 1, extra={**EXTRA, field: value})
    with pytest.raises(Refusal, match=f"^{path}: state.json: 'extra': {complaint}"):
        Progress.at(path)


def test_progress_comes_back_and_a_checkpoint_of_a_script_has_none(tmp_path: Path) -> None:
    assert Progress.at(write(tmp_path, 1, extra=EXTRA)) == PROGRESS
    with pytest.raises(Refusal, match=r"was not written by mpi4dl train: load it with mpi4dl.checkpoints.load$"):
        Progress.at(write(tmp_path, 2, extra={"epoch": 1}))


def test_a_schedule_and_an_epoch_of_another_run_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    good = PROGRESS._replace(batch=5, scheduler=scheduler.state_dict())
    require_fit(PLACE, good, scheduler, num_batches=5)
    require_fit(PLACE, good, None, num_batches=5)
    with pytest.raises(Refusal, match="its epoch has 5 batches behind it"):
        require_fit(PLACE, good, scheduler, num_batches=4)
    for wrong in ({"last_epoch": "x"}, {"base_lrs": []}, {"base_lrs": [None]}, {"_last_lr": 3}):
        (name,) = wrong
        with pytest.raises(Refusal, match=f"does not fit: '{name}' is .*, which cannot stand for "):
            require_fit(PLACE, good._replace(scheduler={**scheduler.state_dict(), **wrong}), scheduler, 5)
    with pytest.raises(Refusal, match=r"is missing$"):
        require_fit(PLACE, good._replace(scheduler=None), scheduler, 5)


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ("--lr 0.1", "--lr 0.1"),
        ("--resume none --lr 0.1 --run-folder old", "--lr 0.1"),
        ("--run-folder=old --lr 0.1 --resume=some/path", "--lr 0.1"),
        ("--images 'two words'", "--images 'two words'"),
    ],
)
def test_the_command_to_go_on_is_the_same_with_two_flags(argv: str, flags: str) -> None:
    command = command_to_go_on(4, shlex.split(argv), Path("runs/a b"))
    assert command == f"mpirun -n 4 python -m mpi4dl.train {flags} --run-folder 'runs/a b' --resume auto"
