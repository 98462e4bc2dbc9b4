"""A model over ranks that gives the next tokens of many sequences, with their cache of keys and values in pages."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine.runner import spread
from mpi4dl.models.experts import Experts, Router
from mpi4dl.models.transformer import Attention, TokenEmbedding
from mpi4dl.parallel import spatial
from mpi4dl.parallel.inputs import Microbatch
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages, Part
from mpi4dl.parallel.spatial import SpatialTensor

# The tokens of all requests of a step, packed into one row for each data rank.
#
# row 0    a3 b0 b1 b2 c9 .  .  .       the last tokens of those whose next token is wanted come first, then the others,
# row 1    d4 e7 .  .  .  .  .  .       then padding

# On CPUs a product of a few rows is computed in another order than one of many, so that a request alone would get other
# last bits than in a batch. From 8 rows on each row is computed alike, however many there are.
ROWS_OF_PRODUCTS = 8


class TokenPortion(NamedTuple):
    """The next tokens of one request: those from position `start` on.

    `pages` are those of the request, in order; `wants` whether the token after the last of these is to be sampled.
    `seen_from` is of each token the first position that it sees, where that is not 0 for all.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    wants: bool
    seen_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packed:
    """`tokens` and `positions` (rows, T); of each portion its columns, in order; `num_wanted` in any row at most."""

    tokens: Tensor
    positions: Tensor
    columns: tuple[tuple[int, ...], ...]
    num_wanted: int


def pack(portions: Sequence[TokenPortion], num_rows: int) -> Packed:
    """The portions in `num_rows` rows, which are as long as the longest needs, in multiples of 8."""
    wanted, filled = [0] * num_rows, [0] * num_rows
    for portion in portions:
        filled[portion.row] += portion.wants
    columns: list[tuple[int, ...]] = []
    for row, _, tokens, _, wants, _ in portions:
        others = len(tokens) - wants
        mine = tuple(range(filled[row], filled[row] + others))
        filled[row] += others
        if wants:
            mine += (wanted[row],)
            wanted[row] += 1
        columns.append(mine)
    length = max(1, -(-max(filled) // ROWS_OF_PRODUCTS)) * ROWS_OF_PRODUCTS
    packed, positions = torch.zeros(2, num_rows, length, dtype=torch.int64)
    for portion, mine in zip(portions, columns, strict=True):
        places = torch.tensor(mine)
        packed[portion.row, places] = torch.tensor(portion.tokens)
        positions[portion.row, places] = torch.arange(portion.start, portion.start + len(mine))
    return Packed(packed, positions, tuple(columns), max(wanted))


# Keys and values of tokens seen, in pages; attention of a step's tokens to them.
#
# keys, values of a layer   (K, pages x page_size, D)   of the heads that this rank has
#
# Each request is attended to alone, by calls whose shapes depend on nothing but itself, so that it gets the same bits
# whatever else is in the batch. Where its pages are neighbours, its keys and values are read where they are.


class PageSizes(NamedTuple):
    """How many pages there are, of how many tokens."""

    num_pages: int
    page_size: int


class Look(NamedTuple):
    """How one portion looks at what its request has in the cache.

    `columns` are its queries', `cells` where its `length` keys are: a slice, or the number of each cell. `mask`
    (queries, keys) says which it sees, if not all.
    """

    columns: slice | Tensor
    cells: slice | Tensor
    mask: Tensor | None


class PagedStep:
    """The data of the current step for all layers: `positions` of its tokens, and how this rank's row looks."""

    def __init__(self, sizes: PageSizes, row: int, device: torch.device) -> None:
        self.sizes, self.row, self.device = sizes, row, device
        self.positions = torch.empty(0)
        self.written = torch.empty(0)
        self.sources = torch.empty(0)
        self.looks: list[Look] = []

    def begin(self, portions: Sequence[TokenPortion], packed: Packed) -> None:
        """A step with these portions begins."""
        self.positions = packed.positions.to(self.device)
        self.looks = []
        written: list[int] = []
        sources: list[int] = []
        for portion, columns in zip(portions, packed.columns, strict=True):
            if portion.row == self.row:
                stop = portion.start + len(columns)
                written += [self._cell(portion, position) for position in range(portion.start, stop)]
                sources += columns
                self.looks.append(self._look(portion, columns, stop))
        self.written = torch.tensor(written, dtype=torch.int64, device=self.device)
        self.sources = torch.tensor(sources, dtype=torch.int64, device=self.device)

    def _cell(self, portion: TokenPortion, position: int) -> int:
        page, offset = divmod(position, self.sizes.page_size)
        return portion.pages[page] * self.sizes.page_size + offset

    def _look(self, portion: TokenPortion, columns: tuple[int, ...], stop: int) -> Look:
        num_queries, size = len(columns), self.sizes.page_size
        asked = slice(columns[0], columns[0] + 1) if num_queries == 1 else torch.tensor(columns, device=self.device)
        used = portion.pages[: -(-stop // size)]
        cells: slice | Tensor = slice(used[0] * size, used[0] * size + stop)
        if used[-1] - used[0] != len(used) - 1 or list(used) != sorted(used):
            cells = (torch.tensor(used)[:, None] * size + torch.arange(size)).flatten()[:stop].to(self.device)
        mask = None
        if num_queries > 1 or portion.seen_from:
            keys = torch.arange(stop)
            mask = keys <= torch.arange(portion.start, stop)[:, None]
            if portion.seen_from:
                mask &= keys >= torch.tensor(portion.seen_from)[:, None]
            mask = mask.to(self.device)
        return Look(asked, cells, mask)


class LayerCache:
    """The `Past` of one layer of attention. Its memory is taken when it sees the first keys."""

    def __init__(self, step: PagedStep) -> None:
        self._step = step
        self._memory: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        return self._step.positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Remember keys and values (1, K, T, D), this rank's part, and let queries (1, H, T, D) look at them."""
        queries, new_keys, new_values = (
            x.local[0] if isinstance(x, SpatialTensor) else x[0] for x in (query, key, value)
        )
        step = self._step
        if self._memory is None:
            heads, _, size = new_keys.shape
            cells = step.sizes.num_pages * step.sizes.page_size
            self._memory = new_keys.new_zeros(2, heads, cells, size)
        keys, values = self._memory
        for memory, new in ((keys, new_keys), (values, new_values)):
            memory.index_copy_(1, step.written, new[:, step.sources])
        # Each token's heads lie together, as the layer that takes them has them.
        seen = queries.new_zeros(queries.shape[1], queries.shape[0], queries.shape[2]).transpose(0, 1)
        for look in step.looks:
            seen[:, look.columns] = attended(queries[:, look.columns], keys[:, look.cells], values[:, look.cells], look)
        return query.like(seen[None]) if isinstance(query, SpatialTensor) else seen[None]


def attended(queries: Tensor, keys: Tensor, values: Tensor, look: Look) -> Tensor:
    """Attention of queries (H, n, D) to keys, values (K, length, D): (H, n, D). Heads that share keys run together."""
    shape, groups = queries.shape, queries.shape[0] // keys.shape[0]
    together = queries.reshape(keys.shape[0], groups * shape[1], shape[2])
    mask = look.mask if look.mask is None or groups == 1 else look.mask.repeat(groups, 1)
    found = F.scaled_dot_product_attention(together[None], keys[None], values[None], mask)
    return found[0].reshape(shape)


class PagedModel:
    """The model that `stages` lays over ranks, with a cache of keys and values in pages, for each data rank its own.

    All ranks `run` the same steps. Until `close` the model is for this alone. Collective.

    Raises:
        Refusal: on all ranks: the plan cuts sequences, or the model is none that looks back only.
    """

    def __init__(self, stages: LocalStages, comm: Communicator, sizes: PageSizes) -> None:
        self.stages, self.comm, self.sizes = stages, comm, sizes
        plan = stages.plan
        if any(tiles != (1,) for tiles in plan.tiles) or set(plan.batch_ways) != {1} or plan.sequence:
            raise Refusal(
                f"{plan.describe()} cuts sequences, but text is generated by stages, tensor and data ranks alone"
            )
        if plan.bidirectional or plan.chunks > 1:
            raise Refusal(f"{plan.describe()}: text is generated in one direction, by one stage on each rank")
        self.num_rows = plan.replicas
        row = comm.rank // plan.ranks_per_replica
        self._step = PagedStep(sizes, row, stages.device)
        self._layers = [m for m in stages.modules() if isinstance(m, Attention | TokenEmbedding)]
        kinds = [m.causal for m in self._layers if isinstance(m, Attention)]
        everywhere = [kind for each in comm.all_gather_object(kinds) for kind in each]
        if not everywhere or not all(everywhere):
            raise Refusal("text is generated by mpi4dl's GPT, whose attention looks back only; this model is none")
        for layer in self._layers:
            layer.past = LayerCache(self._step)
        # An expert has no capacity that a token's neighbours could fill, and no product of fewer rows than others.
        routers = [m for m in stages.modules() if isinstance(m, Router)]
        self._experts = [(experts, experts.fewest_rows) for experts in stages.modules() if isinstance(experts, Experts)]
        self._capacities = [(router, router.capacity_factor) for router in routers]
        for router in routers:
            router.capacity_factor = None
        for experts, _ in self._experts:
            experts.fewest_rows = ROWS_OF_PRODUCTS
        self._modes = stages.training
        stages.eval()
        self._executor = Executor(stages, comm, nullcontext, 0)
        self._table = plan.evaluation_table(1)
        self._speaker = plan.ranks(0, plan.num_stages - 1)[0]  # who has the logits
        self._like: Tensor | None = None

    def close(self) -> None:
        """Leave the model as it was."""
        for layer in self._layers:
            layer.past = None
        for router, capacity in self._capacities:
            router.capacity_factor = capacity
        for experts, fewest in self._experts:
            experts.fewest_rows = fewest
        self.stages.train(self._modes)

    def run(self, portions: Sequence[TokenPortion]) -> Tensor | None:
        """Take these tokens into the cache; on rank 0 the logits after those that want them, (number, vocabulary)."""
        packed = pack(portions, self.num_rows)
        self._step.begin(portions, packed)
        feed = _Feed(packed, self._step, self.stages.device)
        self._executor.run(self._table, feed)
        if not packed.num_wanted:
            return None
        logits = self._on_first_rank(feed.logits, packed.num_wanted)
        if logits is None:
            return None
        wanting = [(p.row, mine[-1]) for p, mine in zip(portions, packed.columns, strict=True) if p.wants]
        return logits[tuple(torch.tensor(wanting).T)]

    def _on_first_rank(self, logits: Tensor | None, num_wanted: int) -> Tensor | None:
        """The logits (rows, wanted, vocabulary) on rank 0, on the host."""
        rank = self.comm.rank
        if self._speaker == 0:
            return logits.cpu() if rank == 0 and logits is not None else None
        if rank == self._speaker:
            assert logits is not None
            if self._like is None:
                self._like = logits.new_empty(0, device="cpu")
                self.comm.isend_object((logits.shape[-1], logits.dtype), 0).wait()
            self.comm.send(logits.cpu().contiguous(), 0)
        if rank == 0:
            if self._like is None:
                vocabulary, dtype = self.comm.recv_object(self._speaker)
                self._like = torch.empty(vocabulary, dtype=dtype)
            buffer = self._like.new_empty(self.num_rows, num_wanted, len(self._like))
            return self.comm.recv(buffer, self._speaker)
        return None


class _Feed:
    """The packed tokens on their way through the stages; `logits` (rows, wanted, vocabulary) where they come out."""

    def __init__(self, packed: Packed, step: PagedStep, device: torch.device) -> None:
        self.packed, self.step, self.device = packed, step, device
        self.microbatches = (Microbatch(0, 0, tuple(range(len(packed.tokens) + 1))),)
        self.logits: Tensor | None = None

    def kind(self, microbatch: Microbatch) -> Any:
        return self.packed.tokens.shape

    def images(self, part: Part, microbatch: Microbatch) -> Tensor:
        own = self.packed.tokens[self.step.row : self.step.row + 1]
        return spread(part, own, microbatch, tuple(self.packed.tokens.shape[1:]), self.device)

    def loss(self, part: Part, microbatch: Microbatch, outputs: Any) -> Tensor | None:
        if self.packed.num_wanted:
            wanted = outputs[:, : self.packed.num_wanted]
            self.logits = spatial.gather(wanted) if isinstance(wanted, spatial.SpatialTensor) else wanted
        return None


# Which pages of the cache are whose: integers only.
#
#     page     0  1  2  3  4  5  6  7  8 ...      each holds keys and values of `page_size` tokens, of every layer
#     owner    A  A  A  .  B  B  .  .  C ...
#
# A request has all the pages that it may ever need from its admission on, so that those that run never wait for each
# other, and gives them back at its end. They are neighbours where possible: keys and values are then read in place.


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold so many tokens."""
    return -(-num_tokens // page_size)


class PagePool:
    """Pages 0 to `num_pages` - 1, those that are free and those that are not."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = set(range(num_pages))

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many pages: the shortest run of free neighbours that has them, or else any; None if there are not so
        many.
        """
        if count > len(self._free):
            return None
        runs: list[list[int]] = []
        for page in sorted(self._free):
            if runs and runs[-1][-1] == page - 1:
                runs[-1].append(page)
            else:
                runs.append([page])
        fitting = [run for run in runs if len(run) >= count]
        longest_first = [page for run in sorted(runs, key=len, reverse=True) for page in run]
        pages = tuple((min(fitting, key=len) if fitting else longest_first)[:count])
        self._free.difference_update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """These pages are free again."""
        assert self._free.isdisjoint(pages), "a page was given back twice"
        self._free.update(pages)
