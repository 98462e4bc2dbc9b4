"""The commands: each public module at the top of the package is one, with `main()` and a `DESCRIPTION` of one line."""

import pkgutil
import sys
from pathlib import Path

SCRIPT = "mpi4dl"
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # set by launchers before MPI starts


def command_names() -> list[str]:
    """The names of all commands, without importing them."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name for module in modules if not module.ispkg and not module.name.startswith("_")]


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
