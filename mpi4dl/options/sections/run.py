"""The folder of a run, checkpoints, reports and callbacks."""

from dataclasses import dataclass
from typing import Any

from mpi4dl.options.declare import instead, neutral, option, same_as
from mpi4dl.options.kinds import BOOLEAN, COUNT, NAME, PARTS, either, optional


@dataclass(frozen=True)
class Run:
    """The folder of a run, checkpoints, reports and callbacks."""

    run_folder: str | None = neutral(
        None,
        "folder of the run; none: runs/MODEL-DATE-TIME",
        optional(NAME),
        per_rank=True,
        brief="folder of the run",
        known_as=same_as(
            "output-dir output out out-dir results-dir save-dir log-dir logdir default-root-dir work-dir exp-dir"
        ),
    )
    save_every: str | int = neutral(
        "epoch",
        "when to save a checkpoint: after every epoch, after this number of steps, or never",
        either(COUNT, "epoch", "none"),
        known_as=same_as("save-steps checkpoint-interval every-n-train-steps")
        | instead("use {option} epoch, a number of steps, or none", "save-strategy save-freq"),
    )
    keep: int = neutral(
        2,
        "number of newest checkpoints to keep",
        COUNT,
        known_as=same_as("save-total-limit checkpoint-hist save-top-k"),
    )
    resume: str = neutral(
        "none",
        "resume: the run in --run-folder, if there is one (auto), or a run or checkpoint at this path",
        NAME,
        brief="auto, or the run or checkpoint to resume",
        known_as=same_as("resume-from resume-from-checkpoint ckpt-path")
        | instead("use {option} auto", "auto-resume")
        | instead(
            "use {option} {value} to resume a run, or --weights {value} to begin with its weights",
            "checkpoint ckpt",
        ),
    )
    callbacks: tuple[Any, ...] = option(
        (),
        "your objects with methods that the run calls, such as my_code.py:Notify",
        PARTS,
        per_rank=True,
        known_as=instead(
            "use {option} my_code.py:Logger with a callback that logs there",
            "wandb use-wandb log-wandb logger report-to",
        ),
    )
    log_interval: int = neutral(
        10,
        "number of steps between two reports",
        COUNT,
        known_as=same_as("log-every-n-steps print-freq logging-steps log-freq"),
    )
    verbose: bool = neutral(
        False,
        "say behind the first step how many seconds each part of the start took",
        BOOLEAN,
        flag_only=True,
        known_as=same_as("v"),
    )
    tensorboard: bool = neutral(True, "write TensorBoard event files into the run folder", BOOLEAN, per_rank=True)
    dry_run: bool = neutral(
        False,
        "build everything, print the plan, and stop before the first step",
        BOOLEAN,
        brief="build everything, print the plan, and stop",
    )
    print_config: bool = neutral(False, "print all options as a TOML file, and stop", BOOLEAN, flag_only=True)
