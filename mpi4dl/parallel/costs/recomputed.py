"""What atoms take if blocks of them keep only their inputs, and are run again in the backward pass.

atoms        0   1 [2  3] [4  5] 6       groups (2, 4) and (4, 6): of each its inputs are kept, and nothing of what is
kept         k0  k1 in  -  in  - k6      within it, but while it is run again, when all of that is there
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from mpi4dl.parallel.blocks import blocks
from mpi4dl.parallel.costs.memory import AtomBytes
from mpi4dl.parallel.costs.timing import Column, Site
from mpi4dl.parallel.inputs import input_dtype, of_tokens
from mpi4dl.parallel.pipeline.split import Cuttable

Group = tuple[int, int]


def groups_of(cuttable: Cuttable) -> tuple[Group, ...]:
    """The first atom of each block of a model, and the one behind its last."""
    chosen = {id(block) for block in blocks(cuttable.model)}
    paths = [path for path, module in cuttable.model.named_modules() if id(module) in chosen]
    found = []
    for path in paths:
        own = [i for i, name in enumerate(cuttable.names) if name == path or name.startswith(f"{path}.")]
        if own and own[-1] - own[0] + 1 == len(own):
            found.append((own[0], own[-1] + 1))
    return tuple(sorted(found))


def groups_in(cuttable: Cuttable, counts: Sequence[int]) -> tuple[Group, ...]:
    """What is run again as a whole, of stages of so many atoms: the blocks of a single stage, or each stage."""
    return groups_of(cuttable) if len(counts) == 1 else tuple(pairwise(accumulate(counts, initial=0)))


def image_bytes(cuttable: Cuttable, site: Site) -> int:
    """The bytes of a rank's part of the images, or tokens, of a microbatch."""
    channels = 1 if of_tokens(site.image) else site.image[1]
    return site.pixels * channels * input_dtype(cuttable.model, site.image).itemsize


def bytes_recomputed(column: Sequence[AtomBytes], groups: Sequence[Group], image_bytes: int) -> tuple[AtomBytes, ...]:
    """The bytes of atoms on a rank whose part of the images has so many."""
    found = list(column)
    for first, end in groups:
        given = column[first - 1].handed if first else image_bytes
        again = sum(atom.kept for atom in column[first:end])
        for i in range(first, end):
            atom = column[i]
            kept, back = (given if i == first else 0), (again if i == end - 1 else 0)
            found[i] = AtomBytes(
                kept, atom.handed, atom.handed, atom.forward, atom.backward + back, atom.largest, atom.summed
            )
    return tuple(found)


def seconds_recomputed(column: Column, groups: Sequence[Group]) -> Column:
    """The seconds of atoms on a rank, that of the forward pass which comes again among those of the backward pass."""
    found = list(column)
    for first, end in groups:
        for i in range(first, end):
            found[i] = column[i]._replace(backward=column[i].backward + column[i].forward)
    return tuple(found)
