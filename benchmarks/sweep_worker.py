"""A plan of a sweep, trained on made-up images: `mpirun -n 4 python -m benchmarks.sweep_worker MEASURED -- FLAGS`.

FLAGS are those of mpi4dl.train, and MEASURED what of it: the steps before and those that are timed, and the limit of
memory. Its last line is an answer: images/s, CPU seconds, bytes. Imports, building the model, and the first steps are
in none of these.
"""

import argparse
import json
import resource
import sys
from typing import TYPE_CHECKING

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

CHANNELS, CLASSES = 3, 10
NO_PRIMITIVE = "could not create a primitive"  # is what oneDNN says, beside other things, of memory that it cannot have


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_worker")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--memory", type=int, help="bytes that a rank may allocate from when all is imported")
    where = sys.argv.index("--")
    options, flags = parser.parse_args(sys.argv[1:where]), sys.argv[where + 1 :]

    def begin() -> None:
        from mpi4dl._memory import within_limits
        from mpi4dl.comm import world

        comm, limits = world(), resource.getrlimit(resource.RLIMIT_DATA)

        def within_memory() -> None:
            try:
                train(comm, options, flags)
            except RuntimeError as error:
                if options.memory is None or NO_PRIMITIVE not in str(error):
                    raise
                raise MemoryError(str(error)) from error
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, limits)  # to say why it ended takes a thread, and memory

        within_limits(within_memory, comm.rank)

    guard.run(begin, 0.0)  # the sweep has its own limit of time


def train(comm: "Communicator", options: argparse.Namespace, flags: list[str]) -> None:
    """Build what the flags name, as the training command does, train, and print the answer. Collective."""
    import torch

    from benchmarks.meter import Meter
    from mpi4dl._memory import ActivationMeter, keep_freed_memory
    from mpi4dl.engine import Engine
    from mpi4dl.options import build
    from mpi4dl.options.config import parse
    from mpi4dl.tasks.losses import classification_loss
    from mpi4dl.trainer.visiting import stream_of

    config = parse(flags)
    plan, size, batch_size = build.build_plan(config), config.data.image_size, config.data.batch_size
    comm.agree(plan.problem(comm.size, size, batch_size))
    comm.node.share_cores()
    keep_freed_memory(config.parallel.keep_freed_memory)
    with comm.together():
        device = comm.node.device(config.parallel.device)
    meter = Meter(device, comm)
    if options.memory is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + options.memory, most))
    num_classes = config.model.num_classes or CLASSES
    with comm.together((ValueError, TypeError)):
        stream = stream_of(config, plan, num_classes, CHANNELS, device)
        held = build.hold_model(config, plan, num_classes, CHANNELS, comm, device, stream).train()
    with comm.together((ValueError, TypeError)):
        optimizer = build.build_optimizer(config, held.parameters())
    with comm.together((ValueError, OSError)):
        how = build.engine_options(config)
    engine = Engine(held, plan, optimizer, classification_loss, comm=comm, **how)
    boxes = [[slab.length for slab in read.box] for read in engine.reads(batch_size, size)]
    tiles = [torch.randn(box[0], CHANNELS, *box[-len(size) :], device=device) for box in boxes]
    labels = torch.arange(batch_size) % num_classes

    def step() -> None:
        engine.step(tiles, labels, size)

    with build.without_rules(config), build.blaming_the_model(config, plan, num_classes, CHANNELS):
        for _ in range(options.warm_up):
            step()
        found = meter.measure(step, options.steps)
        kept = ActivationMeter()
        with kept.counting():  # which takes time, and is not measured
            step()
    found["activation_bytes_of_ranks"] = meter.of_ranks(kept.peak_bytes)
    found["images"] = batch_size * options.steps
    found["threads_of_a_rank"] = torch.get_num_threads()
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def data_bytes() -> int:
    """What RLIMIT_DATA counts: private memory that can be written."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


if __name__ == "__main__":
    main()
