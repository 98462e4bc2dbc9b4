"""Text from a trained model: `mpirun -n 2 python -m mpi4dl.generate runs/mine --prompt "def " --tensor 2`.

It reads top to bottom: `main` starts MPI, `generate` builds the model, and rank 0 asks for what is wanted.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl.generation.options import Batching, Choosing, Prompts, Ranks
from mpi4dl.options.declare import ConfigError, facts, parse_options
from mpi4dl.options.words import speaking, spelling
from mpi4dl.trainer.stopping import die_by_ctrl_c

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

USAGE = "mpirun -n RANKS python -m mpi4dl.generate RUN_OR_CHECKPOINT [--prompt TEXT] [--FLAG VALUE ...]"
DESCRIPTION = "Let a trained model go on with text."


@dataclass(frozen=True)
class GenerateConfig:
    prompts: Prompts = field(default_factory=Prompts)
    choosing: Choosing = field(default_factory=Choosing)
    ranks: Ranks = field(default_factory=Ranks)
    batching: Batching = field(default_factory=Batching)


def main(argv: Sequence[str] | None = None) -> None:
    """Generate by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse_options(GenerateConfig, ["--help"], USAGE, DESCRIPTION)
    die_by_ctrl_c()

    def begin() -> None:
        from mpi4dl.comm import world

        generate(world(), arguments)

    guard.run(begin)


@speaking(spelling(GenerateConfig))
def generate(comm: "Communicator", argv: Sequence[str]) -> None:
    """Load the model, each rank its part, and write what is asked for to standard output, from rank 0."""
    with comm.together((ValueError,)):
        source = argv[0] if argv and not argv[0].startswith("-") else None
        if source is None:
            raise ConfigError(f"name the folder of a run, or a checkpoint, first: {USAGE}")
        config = parse_options(GenerateConfig, argv[1:], USAGE, DESCRIPTION)
        config.choosing.sampling(config.prompts.num_samples - 1)
    comm.agree(None, source=source, **facts(config))

    from mpi4dl.generation.asking import read_prompts, submit_all
    from mpi4dl.generation.loading import find_trained, open_batcher

    with comm.together((ValueError, OSError)):
        prompts = read_prompts(config.prompts) if comm.rank == 0 else []
    comm.node.share_cores()
    trained = find_trained(comm, Path(source))
    batcher = open_batcher(comm, trained, config.ranks, config.batching)
    for remark in trained.remarks if comm.rank == 0 else ():
        print(f"mpi4dl: {remark}", file=sys.stderr)
    with comm.together((ValueError,)):
        if comm.rank == 0:
            submit_all(batcher, prompts, config.prompts, config.choosing)
    if comm.rank == 0:
        batcher.stop(drain=True)
        batcher.run()
    else:
        batcher.follow()


if __name__ == "__main__":
    main()
