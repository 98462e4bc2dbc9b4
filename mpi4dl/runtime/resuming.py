"""Where a run of the training command is recorded, and what it goes on from: the meaning of --resume."""

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.runtime.checkpoint import Checkpoints
from mpi4dl.runtime.checkpoint.manifest import STATE, candidates_at, newest_whole
from mpi4dl.runtime.config import Config, ConfigError, shared_options, to_toml
from mpi4dl.runtime.folder import RunFolder, default_path

SAME_ALWAYS = ("--model", "--model-options", "--optimizer", "--scheduler", "--seed")
SAME_WITHIN_AN_EPOCH = ("--batch-size", "the number of training images")
FROM_CHECKPOINT = ("--lr", "--optimizer-options", "--scheduler-options")


class Origin(NamedTuple):
    """The run's folder; whether it holds this run already; and checkpoints to go on from, the best first."""

    folder: RunFolder
    in_place: bool
    candidates: Sequence[Path]


def find_origin(comm: Communicator, config: Config) -> Origin:
    """What --resume and --run-folder of rank 0 ask for. Collective. Raises Refusal for what is not there."""
    found = None
    with comm.together((ConfigError, OSError)):
        found = _find(config, datetime.now()) if comm.rank == 0 else None
    return comm.broadcast_object(found)


def _find(config: Config, now: datetime) -> Origin:
    asked, named = config.run.resume, config.run.run_folder
    folder = Path(named or default_path(config.model.model, now))
    if asked == "none":
        return Origin(RunFolder(folder), False, ())
    if asked == "auto":
        if named is None:
            raise ConfigError("--resume auto goes on in the folder that --run-folder names: add --run-folder")
        in_place = (folder / "config.toml").is_file()
        return Origin(RunFolder(folder), in_place, candidates_at(folder) if in_place else ())
    path = Path(asked)
    if not path.is_dir():
        raise ConfigError(f"--resume {asked}: no such folder; name a run, one of its checkpoints, or auto")
    candidates = candidates_at(path)
    if not candidates:
        raise ConfigError(f"--resume {asked}: there is no checkpoint in this folder")
    return Origin(RunFolder(folder), folder.is_dir() and path.resolve() == folder.resolve(), candidates)


def lock(comm: Communicator, origin: Origin) -> None:
    """Keep other jobs from writing into the run's folder. Collective. Raises Refusal if one does already."""
    with comm.together():
        if comm.rank == 0:
            origin.folder.lock()


def choose(comm: Communicator, origin: Origin, checkpoints: Checkpoints | None) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, if there is any, and what to say of newer ones that are not it. Collective.

    Raises Refusal on all ranks if there are checkpoints, but none is whole.
    """
    if checkpoints is not None:
        found, skipped = checkpoints.newest(), checkpoints.skipped
    else:
        found, skipped = newest_whole(origin.candidates, comm)
    if found is None and skipped:
        raise Refusal(f"no checkpoint is whole: {'; '.join(skipped)}; start anew in another --run-folder")
    return found, [f"skipped {one}" for one in skipped]


def record(origin: Origin, step: int, config: Config, comm: Communicator, argv: Sequence[str]) -> None:
    """Write into the run's folder how the run was started, or went on from `step`. Collective.

    Raises Refusal on all ranks if the folder cannot be made, holds other files, or another job writes into it.
    """
    with comm.together():
        if comm.rank == 0:
            folder = origin.folder
            if not origin.in_place:
                folder.claim()
            since = step if origin.in_place else 0
            folder.write_config(to_toml(config), since)
            folder.write_versions(comm.mpi_library, ["python", "-m", "mpi4dl.train", *argv], since)


def options_to_compare(config: Config, num_images: int) -> dict[str, str]:
    """What a checkpoint remembers of the command line."""
    names = (*SAME_ALWAYS, *SAME_WITHIN_AN_EPOCH, *FROM_CHECKPOINT)
    found = {**shared_options(config), "the number of training images": str(num_images)}
    return {name: found[name].strip('"') for name in names}


def compare(checkpoint: Path, options: Mapping[str, str]) -> list[str]:
    """What to say of options that are not used, since the checkpoint has others.

    Raises Refusal, alike on all ranks, where the run could not go on as it was begun.
    """
    extra = json.loads((checkpoint / STATE).read_bytes())["extra"]
    if "options" not in extra:
        raise Refusal(f"{checkpoint} was not written by mpi4dl.train: load it with mpi4dl.runtime.checkpoint.load")
    there: Mapping[str, str] = extra["options"]
    for name in (*SAME_ALWAYS, *(SAME_WITHIN_AN_EPOCH if extra["batch"] else ())):
        if options[name] != there[name]:
            why = "" if name in SAME_ALWAYS else ", which must not change within an epoch"
            raise Refusal(f"{checkpoint} was written with {name} {there[name]}, but this is {options[name]}{why}")
    return [
        f"{name} {options[name]} is not used: the checkpoint goes on with {there[name]}"
        for name in FROM_CHECKPOINT
        if options[name] != there[name]
    ]


def command_to_go_on(num_ranks: int, argv: Sequence[str], folder: Path) -> str:
    """The command that continues this run."""
    words, position = [], 0
    while position < len(argv):
        name, equals, _ = argv[position].partition("=")
        if name in ("--resume", "--run-folder"):
            position += 1 if equals else 2
            continue
        words.append(argv[position])
        position += 1
    words += ["--run-folder", str(folder), "--resume", "auto"]
    return shlex.join(["mpirun", "-n", str(num_ranks), "python", "-m", "mpi4dl.train", *words])
