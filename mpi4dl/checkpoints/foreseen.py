"""What the norms of a rank's stages have learned of what follows them, as JSON.

It decides in which order sums are made, so that a run that goes on must know it to go on to the last bit.
"""

from typing import Any, NamedTuple

from mpi4dl.checkpoints.kept import Kept
from mpi4dl.checkpoints.node import Machine
from mpi4dl.geometry import Interval, Split, Tiling
from mpi4dl.parallel.spatial.foresight import Holding


class Learned(NamedTuple):
    """Of a norm in a stage of a direction: whether it waits for the next one; what ranks hold, by what they own."""

    part: tuple[int, int]
    name: str
    waits: bool
    held: Holding


def learned(engine: Kept) -> list[Any]:
    """What this rank's norms have learned, in `engine`."""
    found = []
    for place, part in engine.held.parts.items():
        names = {id(value): name for name, value in part.module.named_parameters()}
        for norm, waits, known in part.grid.foresight.learned():
            if id(norm) in names:
                tilings = [[_encoded(owned), _encoded(held)] for owned, held in known.items()]
                found.append([list(place), names[id(norm)], waits, tilings])
    return found


def _encoded(tiling: Tiling) -> list[Any]:
    return [[list(split.cuts), [list(rows) for rows in split.held]] for split in tiling.splits]


class Foreseen:
    """What a rank's norms had learned; `set` tells those of an engine. Raises Damaged if `node` does not hold such."""

    def __init__(self, node: Machine) -> None:
        self.norms = [_read(*norm.items(4)) for norm in node.items()]

    def set(self, engine: Kept) -> None:
        weights = {place: dict(part.module.named_parameters()) for place, part in engine.held.parts.items()}
        for norm in self.norms:
            known = weights.get(norm.part, {}).get(norm.name)
            if known is not None:
                engine.held.parts[norm.part].grid.foresight.learn(known, norm.waits, norm.held)


def _read(part: Machine, name: Machine, waits: Machine, held: Machine) -> Learned:
    direction, stage = (number.integer() for number in part.items(2))
    tilings = [[_tiling(one, len(pair.items(2)[0].items())) for one in pair.items(2)] for pair in held.items()]
    return Learned((direction, stage), name.text(), waits.flag(), {owned: held for owned, held in tilings})


def _tiling(node: Machine, axes: int) -> Tiling:
    return Tiling(tuple(_split(split) for split in node.items(axes)))


def _split(node: Machine) -> Split:
    cuts, held = node.items(2)
    pairs = ([end.integer() for end in pair.items(2)] for pair in held.items(len(cuts.items()) - 1))
    return Split(tuple(cut.integer() for cut in cuts.items()), tuple(Interval(*pair) for pair in pairs))
