"""The commands, each a public module at the top of the package, and how commands without MPI end."""

import contextlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SCRIPT = "mpi4dl"
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # set by launchers before MPI starts


def is_first() -> bool:
    """Whether this is the only process of a job, or the first one, which says what all would say alike."""
    return all(os.environ.get(variable, "0") == "0" for variable in RANK_VARIABLES)


def command_names() -> list[str]:
    """The names of all commands, without importing them."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name for module in modules if not module.ispkg and not module.name.startswith("_")]


def run_command(name: str, argv: Sequence[str]) -> None:
    """Do what this command line asks the command of this name for."""
    importlib.import_module(f"mpi4dl.{name}").main(argv)


REMOVED = {"sweep": "plan --ranks 4 --measure 3"}  # commands of before, and what to write now


def front_door() -> str | None:
    """How the user started the one command that runs all others; None if it was not started."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == SCRIPT:
        return f"python -m {SCRIPT}"
    return SCRIPT if started.stem == SCRIPT else None


def typed(command: str) -> str:
    """How the user starts a command: `mpi4dl train`, or `python -m mpi4dl.train`."""
    door = front_door()
    return f"python -m {SCRIPT}.{command}" if door is None else f"{door} {command}"


def runs(module: str) -> bool:
    """Whether this process was started to run the command in a module of this `__name__`."""
    return module == "__main__" or (front_door() is not None and sys.argv[1:2] == [module.removeprefix(f"{SCRIPT}.")])


# How a command ends that runs without MPI: with one message, and in silence if nobody reads its output any more.

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as shells count Ctrl-C and a reader that left


@contextlib.contextmanager
def one_message(spell: Callable[[str], str] = str) -> Iterator[None]:
    """Run a command in this context. A ValueError or OSError becomes one line, formatted by `spell`, and exit code 2.

    A reader that closes the pipe early, such as `head`, ends the command without a message. `sys.exit` would let the
    guard of an MPI job speak, but nothing that runs in here has started MPI.
    """
    try:
        try:
            yield
        finally:  # also where argparse leaves after printing its help
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, OSError) as problem:
        if isinstance(problem, BrokenPipeError) and problem.filename is None:
            _let_go_of_stdout()
            raise SystemExit(BROKEN_PIPE) from None
        print(f"mpi4dl: {spell(str(problem))}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from None


def _let_go_of_stdout() -> None:
    """Send the rest of the output nowhere, so that Python does not complain when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
