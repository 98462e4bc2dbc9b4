"""The training command: `mpirun -n 4 python -m mpi4dl.train --tiles 2x2 --images data/slides`.

It reads top to bottom: `main` starts MPI, `train` builds what the configuration names; run.py goes through the epochs.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl._memory import within_limits
from mpi4dl.options.config import Config, ConfigError, hang_timeout, parse, shared_options, to_toml
from mpi4dl.trainer.stopping import die_by_ctrl_c

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator


def main(argv: Sequence[str] | None = None) -> None:
    """Train by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse(["--help"])
    die_by_ctrl_c()

    def begin() -> None:
        from mpi4dl.comm import world

        comm = world()
        within_limits(lambda: train(comm, arguments), comm.rank)

    guard.run(begin, hang_timeout(arguments))


def configure(comm: "Communicator", argv: Sequence[str]) -> Config:
    """The configuration, which all ranks were started with; else all raise the same Refusal."""
    with comm.together((ConfigError,)):
        config = parse(argv)
    comm.agree(None, **shared_options(config))
    return config


def train(comm: "Communicator", argv: Sequence[str]) -> None:
    """Build everything that the configuration names, each rank its part, and train."""
    config = configure(comm, argv)
    if config.run.print_config:
        print(to_toml(config) if comm.rank == 0 else "", end="")
        return

    from mpi4dl._memory import MemoryMeter, keep_freed_memory, load_libraries
    from mpi4dl.engine import Engine
    from mpi4dl.options import build
    from mpi4dl.tasks.losses import classification_loss, token_loss
    from mpi4dl.trainer.images import open_images
    from mpi4dl.trainer.patience import Patience
    from mpi4dl.trainer.resuming import as_it_was_cut
    from mpi4dl.trainer.run import TrainingRun
    from mpi4dl.trainer.texts import open_texts
    from mpi4dl.trainer.visiting import stream_of

    with comm.together((ValueError,)):
        plan = build.build_plan(config)
    comm.agree(plan.problem(comm.size, config.data.image_size, config.data.batch_size))
    comm.node.share_cores()
    keep_freed_memory(config.parallel.keep_freed_memory)
    patience = Patience(config.parallel.hang_timeout)
    with comm.together():
        device = comm.node.device(config.parallel.device)
    if device.type == "cuda" or config.parallel.gpu_wire == "nccl":
        comm.choose_gpu_wire(config.parallel.gpu_wire)
    load_libraries(device)
    meter = MemoryMeter(device)
    images = open_images(comm, config) if config.data.text is None else open_texts(comm, config)
    patience.feed()
    with comm.together((ValueError, TypeError)):
        num_classes = images.number_of_classes(config)
        cut = as_it_was_cut(comm, config, plan)
        channels = images.channels
        stream = stream_of(config, plan, num_classes, channels, device)
        model = build.hold_model(cut, plan, num_classes, channels, comm, device, stream).train()
    patience.feed()
    with comm.together((ValueError, TypeError)):
        optimizer = build.build_optimizer(config, model.parameters())
        schedule = build.build_schedule(config, optimizer)
    with comm.together((ConfigError, OSError)):
        options = build.engine_options(config)
    loss = classification_loss if config.data.text is None else token_loss
    engine = Engine(model, plan, optimizer, loss, comm=comm, **options)
    engine.executor.progress = patience.feed
    with comm.together((ValueError,)):
        run = TrainingRun(config, engine, schedule, images, num_classes, patience, meter)
    with build.without_rules(config), ExitStack() as closing:
        closing.callback(patience.stop)
        if config.run.dry_run:
            run.explain()
            return
        run.open(closing, argv)
        with build.blaming_the_model(config, plan, num_classes, channels):
            run.all_epochs()


if __name__ == "__main__":
    main()
