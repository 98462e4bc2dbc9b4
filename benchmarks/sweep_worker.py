"""A plan of a sweep, trained on one batch: `mpirun -n 4 python -m benchmarks.sweep_worker HOW -- FLAGS`.

FLAGS are those of mpi4dl train; before them stands how it is measured: the steps before and those that are timed, and
the limit of memory. The last line is an answer: images/s, CPU seconds, bytes. Imports, building the model, reading
images, and the first steps are in none of these.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from mpi4dl.comm import failure

if __name__ == "__main__":
    failure.arm()  # before anything else that may fail on one rank alone

if TYPE_CHECKING:
    from benchmarks.meter import Meter
    from mpi4dl.comm import Communicator


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_worker")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--memory", type=int, help="bytes that a rank may use above its imports")
    where = sys.argv.index("--")
    options, flags = parser.parse_args(sys.argv[1:where]), sys.argv[where + 1 :]

    def begin() -> None:
        from mpi4dl._memory import within_limits
        from mpi4dl.comm import world

        comm = world()
        within_limits(lambda: train(comm, options, flags), comm.rank)

    failure.run(begin, 0.0)  # the sweep has its own limit of time


def train(comm: "Communicator", options: argparse.Namespace, flags: list[str]) -> None:
    """Build what the flags name, as the training command does; train on the first batch, and print the answer."""
    import torch

    from benchmarks.meter import Meter
    from mpi4dl._memory import ActivationMeter
    from mpi4dl.options.config import Config, parse
    from mpi4dl.options.declare import speaking, spelling
    from mpi4dl.options.models import blaming_the_model, without_rules
    from mpi4dl.training.trainer import Trainer

    spell = spelling(Config)
    with speaking(spell):
        with comm.together((ValueError,)):
            config = parse(flags)
            meter = Meter(comm.node.device(config.parallel.device), comm)
        trainer = Trainer.of_command(config, comm, spell, flags)
        run, engine, size = trainer._run, trainer.engine, config.data.image_size
        batch = next(iter(run.training.epoch(0, 0)))

        def step() -> None:
            engine.step(batch.tiles, batch.labels, size)

        with (
            without_rules(trainer.config),
            blaming_the_model(trainer.config, engine.plan, run.num_classes, run.channels),
        ):
            for _ in range(options.warm_up):
                step()
                require_room(meter, options.memory)
            found = meter.measure(step, options.steps)
            require_room(meter, options.memory)
            kept = ActivationMeter()
            with kept.counting():  # which takes time, and is not measured
                step()
    trainer._patience.stop()
    found["activation_bytes_of_ranks"] = meter.of_ranks(kept.peak_bytes)
    found["images"] = len(batch.labels) * options.steps
    found["threads_of_a_rank"] = torch.get_num_threads()
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def require_room(meter: "Meter", most_bytes: int | None) -> None:
    """Raise Refusal, on all ranks, if one of them has used more than it may. Collective."""
    from mpi4dl.comm import Refusal

    peaks = meter.of_ranks(meter.memory.peak_bytes())
    if most_bytes is not None and max(peaks) > most_bytes:
        rank, shown = peaks.index(max(peaks)), f"{max(peaks) / 2**20:.0f} MiB"
        raise Refusal(f"out of memory: rank {rank} takes {shown}, and may have {most_bytes / 2**20:.0f} MiB (--memory)")


if __name__ == "__main__":
    main()
