"""Before the first step of a run: whether it fits into the memory of its nodes, and what makes its steps slow.

Rank 0 counts what each rank needs, on shapes. Each node adds up its own ranks, and compares the sum with what it has.

    need > REFUSED x memory    the run is refused, with what fits
    need > memory              the run warns, with what fits

A run that is small by a generous guess is not counted, and imports nothing that counts.
"""

from math import prod

from mpi4dl._memory import place_of
from mpi4dl.comm import Refusal
from mpi4dl.engine import Engine
from mpi4dl.options.build import batch_of
from mpi4dl.options.config import Config
from mpi4dl.parallel.inputs import of_tokens

SMALL = 0.25  # of the memory: a run that needs no more by a generous guess is not looked at
GUESSED_PER_VALUE, GUESSED_PER_WEIGHT = 2000, 20  # bytes of a value of an image, and of a weight, are four times that


def told_before(config: Config, engine: Engine, num_classes: int, channels: int) -> list[str]:
    """The lines about a run before it starts. Collective.

    Raises:
        Refusal: the run clearly does not fit into the memory of a node; on all ranks. A dry run only warns.
    """
    comm = engine.comm
    told: tuple[list[str], str | None] = ([], None)
    places = comm.all_gather_object(place_of(engine.device))
    if comm.rank == 0:
        least = min(place.num_bytes for place in places)
        counts = config.parallel.memory_check != "none" and not is_small(config, engine, channels, least)
        if counts or config.streams_images:
            from mpi4dl.estimate.dry_run import looked_at

            told = looked_at(config, engine, num_classes, channels, places if counts else ())
    remarks, refusal = comm.broadcast_object(told)
    if refusal is not None:
        raise Refusal(refusal)
    return list(remarks)


def is_small(config: Config, engine: Engine, channels: int, num_bytes: int) -> bool:
    """Whether all ranks together need less than a share of so many bytes, by a guess that is far too high."""
    batch, weights = batch_of(config, channels), engine.stages.num_parameters
    each = weights if of_tokens(batch) else GUESSED_PER_VALUE
    return 4 * (prod(batch) * each + engine.comm.size * weights * GUESSED_PER_WEIGHT) < SMALL * num_bytes
