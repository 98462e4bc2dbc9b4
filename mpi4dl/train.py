"""The training command: `mpirun -n 4 python -m mpi4dl.train --tiles 2x2 --images data/slides`.

`main` starts MPI and reads the options; `trainer.Trainer` builds what they name, and goes through the epochs.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl._memory import within_limits
from mpi4dl.options.config import Config, ConfigError, facts, hang_timeout, parse, to_toml
from mpi4dl.options.words import speaking, spelling
from mpi4dl.trainer.stopping import die_by_ctrl_c

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator


spell = spelling(Config)


def main(argv: Sequence[str] | None = None) -> None:
    """Train by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse(["--help"])
    die_by_ctrl_c()

    def begin() -> None:
        from mpi4dl.comm import world

        comm = world()
        with speaking(spell):
            within_limits(lambda: train(comm, arguments), comm.rank)

    guard.run(begin, hang_timeout(arguments))


def train(comm: "Communicator", argv: Sequence[str]) -> None:
    """Train as the command line says. Collective; raises Refusal on all ranks, in the words of the command."""
    with speaking(spell):
        with comm.together((ConfigError,)):
            config = parse(argv)
        comm.agree(None, **facts(config))
        if config.run.print_config:
            print(to_toml(config) if comm.rank == 0 else "", end="")
            return

        from mpi4dl.trainer.trainer import Trainer

        Trainer.of_command(config, comm, spell, argv).fit()


if __name__ == "__main__":
    main()
