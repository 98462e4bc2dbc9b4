"""The training command: `mpirun -n 4 mpi4dl train --tiles 2x2 --images data/slides`.

`options.command` reads the options and starts MPI; `setup.set_up` builds what they name; `run.fit` goes through epochs.
"""

from typing import TYPE_CHECKING

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import DESCRIPTION, USAGE, Config, hang_timeout
from mpi4dl.options.sections.slides import ALL_FOLDS

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator


@command(Config, USAGE, DESCRIPTION, patience=hang_timeout)
def train(comm: "Communicator", asked: CommandLine[Config]) -> None:
    """Train, or with `--print-config` print the options. Collective."""
    if asked.config.run.print_config:
        from mpi4dl.training.resuming import options_before
        from mpi4dl.training.setup import as_it_began, to_print

        config = as_it_began(asked.config, options_before(comm, asked.config.run))
        with comm.together((ValueError,)):
            print(to_print(config) if comm.rank == 0 else "", end="")
        return

    if asked.config.slides.fold == ALL_FOLDS:
        from mpi4dl.inference.folds import summarise
        from mpi4dl.training.folds import train_folds

        folder = train_folds(comm, asked.config, asked.spell, asked.argv)
        if folder is not None:
            summarise(comm, folder, spell=asked.spell)
        return

    from mpi4dl.training.run import fit
    from mpi4dl.training.setup import set_up

    fit(set_up(asked.config, comm, asked.spell, asked.argv))


main = train.main

if __name__ == "__main__":
    main()
