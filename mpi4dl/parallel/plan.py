"""A plan: stages, tiles, replicas, microbatches and schedule. Data, from which all else is derived.

                     stage 0 on 2x2 tiles       stage 1 on 1x2     stage 2 on 1x1
    replica 0        ranks  0  1  2  3          4  5               6
    replica 1        ranks  7  8  9 10          11 12              13

Ranks of a stage are neighbours, so that halos stay within a node, and replicas are far apart. A mirrored copy of the
model (GEMS) lies over the ranks of each replica in the opposite order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, pairwise, zip_longest
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

from mpi4dl.comm import Communicator
from mpi4dl.geometry import SPACE, Box, FeatureGridShape, GridShape, Interval, Tiling, even_cuts
from mpi4dl.parallel.inputs import Microbatch, Read, Sizes, nested_cuts, size_of
from mpi4dl.parallel.spatial.grid import Arrangement, Grid
from mpi4dl.parallel.tables.schedules import (
    SCHEDULES,
    SPLITTING,
    Placement,
    Table,
    forward_only,
    table_for,
    undivided,
)
from mpi4dl.parallel.tensor.styles import Degrees

ZERO_STAGES = (0, 1, 2, 3)
Part = Mapping[str, int]  # the number of a rank along the axes over which a parameter is cut
NO_PART: Part = MappingProxyType({})
MOE = ("tensor", "expert")
MOST_ALIKE = 4  # neighbouring stages on the same tiles that are named one by one

T = TypeVar("T")


def _declared(
    default: Any, *, searched: bool = False, titled: bool = False, added: bool = False, derived: bool = False
) -> Any:
    """A field of a plan, which the command has an option for, of the same name and default, unless it is `derived`.

    `searched`: the search for a plan decides it, and leaves no value to the user. `titled`: `Plan.describe` has words
    of its own for it; of others it appends the name and the value. `added`: older checkpoints do not tell it.
    """
    return field(default=default, metadata={"searched": searched, "titled": titled, "added": added, "derived": derived})


def _one_for_all(values: tuple[T, ...]) -> tuple[T, ...]:
    return values[:1] if len(set(values)) == 1 else values


def grid_name(tiles: Sequence[int]) -> str:
    """A grid of tiles as one writes it: 2x2."""
    return "x".join(map(str, tiles))


@dataclass(frozen=True)
class Plan:
    """Stage s works on `tiles[s]`, (rows, columns) of every image, and splits its batch in `batch_ways[s]` ways.

    Tiles of volumes are (depth, rows, columns), of sequences (tokens,). Volumes that are cut along rows and columns
    alone may do with the two of them.

    Each of `data` replicas takes a share of every microbatch. A batch is cut into `microbatches`, which go through the
    stages by `schedule`. With `bidirectional` pairs of waves (GEMS), a mirrored copy of the model takes turns with the
    model, and a batch is cut into 2 x `bidirectional` x `microbatches`. With `chunks`, the stages are dealt out over
    `tiles` so many times (interleaved schedule), and there are len(tiles) x `chunks` of them. `zero` is the ZeRO stage:
    what the ranks that hold the same parameters share out, instead of each having all of it. Each place of a grid has
    `tensor` ranks, neighbours, which share the layers' parameters and features; with `sequence` also the tokens of what
    each of them would have whole between such layers. `data` x `experts` replicas share the batch, and `experts` of
    them the experts of each layer; ranks of `tensor` have parts of experts, or whole ones (`moe` is "tensor" or
    "expert").

    With `local_batches` replicas share no microbatch: each has its own, which may differ in size from those of others.
    Batch norms then see one microbatch of one replica, as in a plain loop over all of them.

    Raises ValueError where these cannot be together.
    """

    tiles: tuple[tuple[int, ...], ...] = _declared(((1, 1),), searched=True, titled=True)
    batch_ways: tuple[int, ...] = _declared((), searched=True, titled=True)
    data: int = _declared(1, searched=True, titled=True)
    microbatches: int = _declared(1, searched=True, titled=True)
    schedule: str = _declared("1f1b", searched=True, titled=True)
    bidirectional: int = _declared(0, searched=True, titled=True)
    chunks: int = _declared(1, searched=True, titled=True)
    zero: int = _declared(0, searched=True)
    tensor: int = _declared(1, searched=True, titled=True)
    sequence: bool = _declared(False)
    experts: int = _declared(1, searched=True, titled=True)
    moe: str = _declared("tensor", added=True)
    local_batches: bool = _declared(False, searched=True, titled=True, added=True, derived=True)

    @classmethod
    def of(
        cls,
        stages: int = 1,
        tiles: Sequence[tuple[int, ...]] = ((1, 1),),
        batch_ways: Sequence[int] = (1,),
        data: int = 1,
        *,
        chunks: int = 1,
        **others: Any,
    ) -> "Plan":
        """The plan that flags ask for: one grid, or one number of ways, may stand for all stages.

        `others` are the other fields of a plan. `asked` is the inverse.
        """
        if stages % chunks:
            raise ValueError(f"`stages` {stages} cannot be dealt out {chunks} times: `chunks` must divide it")
        places = stages // chunks
        for flag, number in (("`tiles`", len(tiles)), ("`batch_ways`", len(batch_ways))):
            if number not in (1, places):
                dealt = f" ({stages} stages in {chunks} chunks)" if chunks > 1 else ""
                needed = f"1 for all, or {places}{dealt}" if places > 1 else "1: a grid has an x, as in 2x2"
                raise ValueError(f"{flag} has {number} entries, but `stages` {stages} needs {needed}")
        ways = tuple(batch_ways) * (places // len(batch_ways))
        return cls(tuple(tiles) * (places // len(tiles)), ways, data, chunks=chunks, **others)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of all arguments of `of`. The command has an option of the same name for each."""
        return ("stages", *(each.name for each in fields(cls) if not each.metadata["derived"]))

    @classmethod
    def not_searched(cls) -> tuple[str, ...]:
        """The names of the fields that a search leaves to the user."""
        return tuple(each.name for each in fields(cls) if not each.metadata["searched"])

    def asked(self) -> dict[str, Any]:
        """The arguments with which `of` makes this plan: one grid, or one number of ways, where all stages agree."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if not each.metadata["derived"]}
        shared = {"tiles": _one_for_all(self.tiles), "batch_ways": _one_for_all(self.batch_ways)}
        return {"stages": self.num_stages, **values, **shared}

    def __post_init__(self) -> None:
        if not self.batch_ways:
            object.__setattr__(self, "batch_ways", (1,) * len(self.tiles))
        counts = [each.name for each in fields(self) if each.default == 1 and type(each.default) is int]
        numbers = [*self.batch_ways, *(getattr(self, name) for name in counts)]
        numbers += [n for tiles in self.tiles for n in tiles]
        if not self.tiles or min(numbers) < 1 or self.bidirectional < 0 or len(self.batch_ways) != len(self.tiles):
            raise ValueError(f"{self!r}: every number must be at least 1, with one number of batch ways a stage")
        if len({len(tiles) for tiles in self.tiles}) > 1 or len(self.tiles[0]) not in SPACE:
            raise ValueError(
                f"`tiles` {','.join(map(grid_name, self.tiles))}: all stages cut along the same axes, written as 2x2 "
                "for images, 2x2x1 for volumes (depth first) and 4 for sequences"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule {self.schedule!r}: choose one of {', '.join(SCHEDULES)}")
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"`zero` {self.zero}: the ZeRO stages are 0 (none), 1, 2 and 3")
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"`schedule` {self.schedule} with `chunks` {self.chunks}: the interleaved schedule needs 2 chunks or "
                "more, and no other schedule can have them"
            )
        if self.moe not in MOE:
            raise ValueError(f"`moe` {self.moe}: it must be tensor (ranks of `tensor` have parts of experts) or expert")
        if self.sequence and self.tensor == 1:
            raise ValueError("`sequence` shares tokens among the ranks of `tensor`: it needs 2 or more of them")
        if self.bidirectional and self.tensor > 1:
            raise ValueError(
                f"`tensor` {self.tensor} with `bidirectional` {self.bidirectional}: the "
                "mirrored copy of GEMS has whole parameters"
            )
        if self.bidirectional and (self.num_stages == 1 or self.chunks > 1):
            raise ValueError(
                f"`bidirectional` {self.bidirectional} lays a mirrored copy over the ranks: it needs at least 2 stages "
                f"of one chunk each, but `stages` is {self.num_stages} and `chunks` {self.chunks}"
            )

        if self.local_batches and (self.experts * max(self.batch_ways) > 1 or self.bidirectional):
            raise ValueError(
                f"{self} shares out the samples of a microbatch, but replicas with local batches have microbatches of "
                "their own: leave out `experts`, `batch_ways` and `bidirectional`"
            )

    @property
    def num_stages(self) -> int:
        return len(self.tiles) * self.chunks

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def num_microbatches(self) -> int:
        """Into how many microbatches a training batch is cut, over both directions."""
        return self.microbatches * 2 * self.bidirectional if self.bidirectional else self.microbatches

    @property
    def num_microbatches_of_all(self) -> int:
        """Into how many microbatches all replicas together cut a training batch."""
        return self.num_microbatches * (self.replicas if self.local_batches else 1)

    def microbatch(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a microbatch, over all replicas that share it, and ways, of a batch (N, ...) of all replicas."""
        return max(1, batch[0] // self.num_microbatches_of_all), *batch[1:]

    @property
    def replicas_together(self) -> int:
        """How many replicas share a microbatch."""
        return 1 if self.local_batches else self.replicas

    @cached_property
    def ranks_per_place(self) -> tuple[int, ...]:
        return tuple(prod(tiles) * ways * self.tensor for tiles, ways in zip(self.tiles, self.batch_ways, strict=True))

    @cached_property
    def ranks_per_replica(self) -> int:
        return sum(self.ranks_per_place)

    @property
    def replicas(self) -> int:
        """How many sets of ranks share the batch, each with the whole model but for experts."""
        return self.data * self.experts

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_replica * self.replicas

    @property
    def degrees(self) -> Degrees:
        """How many ranks have different parts of a parameter."""
        return Degrees(self.tensor, self.experts, self.moe == "expert")

    @property
    def cuts_parameters(self) -> bool:
        """Whether there are ranks with parts of parameters."""
        return self.tensor * self.experts > 1

    def __str__(self) -> str:
        def place(i: int) -> str:
            return grid_name(self.tiles[i]) + (f" x {self.batch_ways[i]} ways" if self.batch_ways[i] > 1 else "")

        places, tensor = [], f"tensor({self.tensor}) x " if self.tensor > 1 else ""
        tensor += f"experts({self.experts}) x " if self.experts > 1 else ""
        for name, alike in groupby(place(i) for i in range(len(self.tiles))):
            number = len(list(alike))
            places += [f"{number} of {name}"] if number > MOST_ALIKE else [name] * number
        if self.num_stages == 1:
            ways = f"batch-ways({self.batch_ways[0]}) x " if self.batch_ways[0] > 1 else ""
            return f"tiles({grid_name(self.tiles[0])}) x {ways}{tensor}data({self.data})"
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        return f"stages({self.num_stages}{chunks}: {' + '.join(places)} tiles) x {tensor}data({self.data})"

    def describe(self) -> str:
        """The plan with its microbatches and schedule, for a title."""
        others = [each for each in fields(self) if not each.metadata["titled"]]
        others.sort(key=lambda each: type(each.default) is not bool)
        given = [(each.name.replace("_", "-"), getattr(self, each.name), each.default) for each in others]
        rest = "".join(
            f", {name}" + (f"({value})" if value is not True else "") for name, value, usual in given if value != usual
        )
        if self.num_stages == 1 and self.num_microbatches == 1:
            return f"{self}{rest}"
        both = f", bidirectional({self.bidirectional})" if self.bidirectional else ""
        return f"{self}, microbatches({self.num_microbatches}), {self.schedule}{both}{rest}"

    def is_told_by(self, text: str) -> bool:
        """Whether `describe` gives this text, or did: older checkpoints lack fields, or have one that is no more."""
        added: dict[str, Any] = {each.name: each.default for each in fields(self) if each.metadata["added"]}
        known = re.sub(r", moe-pieces\(\d+\)", "", text)
        return known in (self.describe(), replace(self, **added).describe())

    def wrong_world(self, num_ranks: int) -> str | None:
        """The error if mpirun started this number of ranks; None if it fits."""
        if self.num_ranks == num_ranks:
            return None
        flags = "`tiles` or `data`" if self.num_stages == 1 else "`stages`, `tiles`, `batch_ways` or `data`"
        flags = f"`tensor`, {flags}" if self.tensor > 1 else flags
        shared = "; ranks of `experts` share the batch, as those of `data` do" if self.experts > 1 else ""
        return (
            f"{self} = {self.num_ranks} ranks, but mpirun started {num_ranks}: "
            f"start with mpirun -n {self.num_ranks}, or change {flags}{shared}"
        )

    def problem(self, num_ranks: int, image_size: Sequence[int], batch_size: int) -> str | None:
        """The error of this plan for a number of ranks and such images, in one sentence; None if it fits."""
        if self.num_ranks != num_ranks:
            return self.wrong_world(num_ranks)
        tiles = self.tiles[0]
        if len(tiles) != len(image_size) and (len(tiles), len(image_size)) != (2, 3):
            size = "x".join(map(str, image_size))
            names = ", ".join(SPACE[len(tiles)])
            return f"`tiles` {grid_name(tiles)} cuts along {names}, but what is trained on has the size {size}"
        for name, parts, pixels in zip(SPACE[len(tiles)], tiles, image_size[-len(tiles) :], strict=True):
            if parts > pixels:
                asked = f"`tiles` {grid_name(tiles)}"
                what = "sequences" if len(tiles) == 1 else "images"
                return f"{asked} cuts {what} into {parts} tiles along their {name}, of which they have only {pixels}"
        if self.num_microbatches > batch_size:
            times = f" x {2 * self.bidirectional} (both directions)" if self.bidirectional else ""
            return (
                f"`microbatches` {self.microbatches}{times} cannot share a batch of {batch_size}: "
                f"raise `batch_size` to {self.num_microbatches}"
            )
        sharing = self.replicas * max(self.batch_ways)
        if sharing > batch_size // self.num_microbatches:
            if self.num_microbatches == self.experts == max(self.batch_ways) == 1:
                return f"`data` {self.data} replicas cannot share a batch of {batch_size}: raise `batch_size`"
            needed, experts = sharing * self.num_microbatches, f"experts({self.experts}) x " * (self.experts > 1)
            return (
                f"{experts}data({self.data}) x batch-ways({max(self.batch_ways)}) cannot share a microbatch of "
                f"{batch_size // self.num_microbatches}: raise `batch_size` to {needed}"
            )
        return None

    @cached_property
    def placement(self) -> Placement:
        """Which ranks of one replica, numbered from 0, hold which stage."""
        return Placement.row(self.ranks_per_place, self.num_directions, self.chunks)

    def table(self) -> Table:
        """The actions of each rank of a replica in a training step."""
        return table_for(self.schedule, self.placement, self.microbatches, max(self.bidirectional, 1))

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages whose gradients of weights come later than those of their inputs."""
        if self.schedule not in SPLITTING:
            return frozenset()
        rows = map(undivided, self.merged_table())
        return frozenset(action.stage for row in rows for action in row if action.kind == "weight")

    def merged_table(self) -> Table:
        """The actions of each group of ranks of a replica that are `Placement.alike`."""
        return table_for(self.schedule, self.placement.merged, self.microbatches, max(self.bidirectional, 1))

    def evaluation_table(self, num_microbatches: int) -> Table:
        """Each rank's actions for a number of microbatches without training: forward, in one direction."""
        return forward_only(self.placement.only(0), num_microbatches)

    def shape(self, stage: int) -> GridShape:
        """The grid of a stage: its batch axis has the ways of all replicas that share a microbatch."""
        place = stage % len(self.tiles)
        shape = self.replicas_together * self.batch_ways[place], *self.tiles[place]
        return GridShape(*shape) if self.tensor == 1 else FeatureGridShape(*shape, self.tensor)

    @property
    def sharing(self) -> tuple[int, ...]:
        """How many ranks of one replica share the work of each stage."""
        return tuple(self.shape(stage).size // self.replicas_together for stage in range(self.num_stages))

    def ranks(self, direction: int, stage: int) -> tuple[int, ...]:
        """All ranks that work on a stage, over all replicas, in the order of its grid."""
        holders, many = self.placement.holders[direction][stage], self.ranks_per_replica
        return tuple(d * many + rank for d in range(self.replicas) for rank in holders)

    def replica_of(self, rank: int) -> int:
        """The replica whose microbatches a rank works on; 0 where all replicas share them."""
        return rank // self.ranks_per_replica if self.local_batches else 0

    def partners(self, rank: int, direction: int, stage: int) -> tuple[int, ...]:
        """The ranks that work on a stage together with the replica of this rank, in the order of its grid."""
        return tuple(each for each in self.ranks(direction, stage) if self.replica_of(each) == self.replica_of(rank))

    def holders(self, *stages: int, part: Part = NO_PART) -> tuple[int, ...]:
        """All ranks that have the parameters of a stage, or those that several stages share, in turn.

        That is over tiles, ways, replicas and both directions. `part`: those with this number along each axis.
        """
        key = "holders", *stages, *part.items()
        if key not in self._known:
            every = zip_longest(*self._copies(stages, part))
            self._known[key] = tuple(dict.fromkeys(rank for alike in every for rank in alike if rank is not None))
        return self._known[key]

    def _copies(self, stages: Sequence[int], part: Part = NO_PART) -> list[tuple[int, ...]]:
        """The ranks of each copy of these stages' parameters."""
        key = "copies", *stages, *part.items()
        if key not in self._known:
            copies = [self.ranks(direction, stage) for stage in stages for direction in range(self.num_directions)]
            if part:
                copies = [tuple(x for i, x in enumerate(all_) if self._has(i, len(all_), part)) for all_ in copies]
            self._known[key] = copies
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    def with_zero(self, zero: int) -> "Plan":
        """The plan with another ZeRO stage, which knows what this one has found of its ranks."""
        if zero == self.zero:
            return self
        found = replace(self, zero=zero)
        for name in ("placement", "ranks_per_place", "ranks_per_replica", "_known"):
            found.__dict__[name] = getattr(self, name)
        return found

    def _has(self, number: int, size: int, part: Part) -> bool:
        """Whether one of the ranks of a stage, of which there are so many, has this part of parameters."""
        own = {"features": number % self.tensor, "experts": number * self.replicas // size % self.experts}
        return all(own[axis] == index for axis, index in part.items())

    def zero_at(self, *stages: int, part: Part = NO_PART) -> tuple[int, int]:
        """The ZeRO stage that is possible there, and into how many sets its holders fall: rank r is in r % that.

        Each direction of GEMS is a set that gathers parameters on its own, and so is each of several stages that share
        parameters. Where some ranks are in several sets and others in one, they make different numbers of backward
        passes, and where sets differ in size, they cannot have parts of each other: stage 1, which gathers nothing.
        """
        copies = [set(ranks) for ranks in self._copies(stages, part)]
        everyone = set().union(*copies)
        if len(everyone) == 1:
            return 0, 1
        if all(ranks == everyone for ranks in copies):
            return self.zero, 1
        if len(everyone) < sum(map(len, copies)) or len(set(map(len, copies))) > 1:
            return min(self.zero, 1), 1
        return self.zero if len(copies[0]) > 1 else min(self.zero, 2), len(copies)

    def held_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (direction, stage) pairs that a rank works on."""
        return self.placement.held_by(rank % self.ranks_per_replica)

    def is_plain(self, stage: int) -> bool:
        """Whether a stage works on plain tensors, since neither it nor a later one shares anything out."""
        return all(self.shape(later).size == 1 for later in range(stage, self.num_stages))

    def tracks_batch(self, stage: int) -> bool:
        """Whether a stage must know which dim is the batch, since it or a later one cuts it."""
        return any(self.shape(later).batch > 1 for later in range(stage, self.num_stages))

    def grid(self, comm: Communicator) -> Grid:
        """The grid of a plan of one stage."""
        return self.grid_of(0, comm)

    def grid_of(self, stage: int, comm: Communicator) -> Grid:
        """The grid of a stage, of which `comm` are all ranks."""
        grid = Grid.of(comm, self.shape(stage), self.tracks_batch(stage))
        grid.arrangement = self.arrangement(stage)
        return grid

    def arrangement(self, stage: int) -> Arrangement:
        """The axes that ranks of a stage share besides tensors."""
        return Arrangement(self.sequence, self.experts, self.batch_ways[stage % len(self.tiles)])

    def divide(self, num_samples: int, training: bool = True) -> tuple[Microbatch, ...]:
        """Cut a batch into microbatches, in the order in which a plain loop would take them.

        Both directions of GEMS take turns, wave by wave. Without training there is one direction, and never a
        microbatch without samples. With local batches, replica by replica.

        Raises:
            ValueError: there are fewer samples to train on than microbatches.
        """
        if training and num_samples < self.num_microbatches_of_all:
            raise ValueError(
                f"{self.describe()} cuts a batch into {self.num_microbatches_of_all} microbatches, but this one has "
                f"{num_samples} samples: leave it out, or plan fewer microbatches"
            )
        if self.local_batches:
            return self._divide_locally(num_samples, training)
        if training:
            waves = [
                (direction, pair * self.microbatches)
                for pair in range(max(self.bidirectional, 1))
                for direction in range(self.num_directions)
            ]
            places = [(direction, first + i) for direction, first in waves for i in range(self.microbatches)]
        else:
            places = [(0, i) for i in range(max(1, min(self.microbatches, num_samples)))]
        cuts = even_cuts(num_samples, len(places))
        return tuple(
            Microbatch(direction, number, self._shares(Interval(cuts[i], cuts[i + 1])))
            for i, (direction, number) in enumerate(places)
        )

    def _divide_locally(self, num_samples: int, training: bool) -> tuple[Microbatch, ...]:
        found = []
        for replica, (start, stop) in enumerate(pairwise(even_cuts(num_samples, self.replicas))):
            count = self.microbatches if training else min(self.microbatches, stop - start)
            cuts = [start + cut for cut in even_cuts(stop - start, count)] if count else []
            found += [Microbatch(0, number, cut, replica) for number, cut in enumerate(pairwise(cuts))]
        return tuple(found) or (Microbatch(0, 0, (0, 0)),)

    def _shares(self, samples: Interval) -> tuple[int, ...]:
        replicas = [samples.start + cut for cut in even_cuts(samples.length, self.replicas)]
        return nested_cuts(replicas, self.batch_ways[0])

    def reads(self, rank: int, microbatches: Sequence[Microbatch], sizes: Sizes) -> tuple[Read, ...]:
        """Which boxes of a batch of images of `sizes`, such as (H, W), a rank reads: those that it works on first."""
        found = []
        for microbatch in microbatches:
            ranks = self.partners(rank, microbatch.direction, 0)
            if rank in ranks and microbatch.replica == self.replica_of(rank):
                place = ranks.index(rank)
                shape, size = self.shape(0), size_of(sizes, microbatch)
                where = Tiling.even(shape, (1, *size[-len(shape.space) :])).owned(place)
                way = shape.coordinates(place)[0]
                space = where.space[: len(shape.space)]
                found.append(Read(microbatch, Box(Interval(*microbatch.cuts[way : way + 2]), *space)))
        return tuple(found)
