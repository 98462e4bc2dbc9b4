"""Text from a trained model: `mpirun -n 2 mpi4dl generate runs/mine --prompt "def " --tensor 2`.

`generate` builds the model on all ranks, and rank 0 submits the prompts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import Parallel
from mpi4dl.options.declare import like
from mpi4dl.text.options import Batching, Choosing, Prompts, Ranks

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

USAGE = "RUN_OR_CHECKPOINT [--prompt TEXT] [--FLAG VALUE ...]"
DESCRIPTION = "Let a trained model continue text."


@dataclass(frozen=True)
class Cores:
    """The CPU threads of a rank."""

    threads: int | None = like(Parallel, "threads")


@dataclass(frozen=True)
class GenerateConfig:
    prompts: Prompts = field(default_factory=Prompts)
    choosing: Choosing = field(default_factory=Choosing)
    ranks: Ranks = field(default_factory=Ranks)
    batching: Batching = field(default_factory=Batching)
    cores: Cores = field(default_factory=Cores)


@command(GenerateConfig, USAGE, DESCRIPTION, source="the folder of a run, or a checkpoint")
def generate(comm: "Communicator", asked: CommandLine[GenerateConfig]) -> None:
    """Load the model, each rank its part, and write what is asked for to standard output, from rank 0."""
    config = asked.config
    with comm.together((ValueError,)):
        config.choosing.sampling(config.prompts.num_samples - 1)

    from mpi4dl.text.loading import find_trained, open_batcher
    from mpi4dl.text.prompts import read_prompts, submit_all

    with comm.together((ValueError, OSError)):
        prompts = read_prompts(config.prompts) if comm.rank == 0 else []
    trained = find_trained(comm, Path(asked.source), config.ranks.average, config.ranks.trust_code)
    batcher = open_batcher(comm, trained, config.ranks, config.batching, config.cores.threads)
    with comm.together((ValueError,)):
        if comm.rank == 0:
            submit_all(batcher, prompts, config.prompts, config.choosing)
    if comm.rank == 0:
        batcher.stop(drain=True)
        batcher.run()
    else:
        batcher.follow()


main = generate.main

if __name__ == "__main__":
    main()
