"""A model over ranks that gives the next tokens of many sequences, with their cache of keys and values in pages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine.runner import spread
from mpi4dl.geometry import ceil_div
from mpi4dl.models.experts import Experts, Router
from mpi4dl.models.transformer import Attention, TokenEmbedding
from mpi4dl.parallel import spatial
from mpi4dl.parallel.inputs import Microbatch
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.local_stages import LocalStages, Part
from mpi4dl.parallel.spatial import SpatialTensor
from mpi4dl.text.products import LOGITS_LAYER, RowsApart, row_multiple, rows_alike

# The tokens of all requests of a step, packed into one row for each data rank.
#
# row 0    a3 b0 b1 b2 c9 .  .  .       the last tokens of those whose next token is wanted come first, then the others,
# row 1    d4 e7 .  .  .  .  .  .       then padding


class TokenPortion(NamedTuple):
    """The next tokens of one request, by its number: those from position `start` on.

    `most` is how many tokens its cache may come to hold; `wants` whether the token after the last of these is to be
    sampled. `seen_from` is of each token the first position that it sees, where that is not 0 for all.
    """

    row: int
    request: int
    start: int
    tokens: tuple[int, ...]
    most: int
    wants: bool
    seen_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packed:
    """`tokens` and `positions` (rows, T); of each portion its columns, in order; `num_wanted` in any row at most."""

    tokens: Tensor
    positions: Tensor
    columns: tuple[tuple[int, ...], ...]
    num_wanted: int


def pack(portions: Sequence[TokenPortion], num_rows: int, multiple: int) -> Packed:
    """The portions in `num_rows` rows, which are as long as the longest needs, in a `multiple` of tokens."""
    wanted, filled = [0] * num_rows, [0] * num_rows
    for portion in portions:
        filled[portion.row] += portion.wants
    columns: list[tuple[int, ...]] = []
    for row, _, _, tokens, _, wants, _ in portions:
        others = len(tokens) - wants
        mine = tuple(range(filled[row], filled[row] + others))
        filled[row] += others
        if wants:
            mine += (wanted[row],)
            wanted[row] += 1
        columns.append(mine)
    length = max(1, -(-max(filled) // multiple)) * multiple
    packed, positions = torch.zeros(2, num_rows, length, dtype=torch.int64)
    for portion, mine in zip(portions, columns, strict=True):
        places = torch.tensor(mine)
        packed[portion.row, places] = torch.tensor(portion.tokens)
        positions[portion.row, places] = torch.arange(portion.start, portion.start + len(mine))
    return Packed(packed, positions, tuple(columns), max(wanted))


# Keys and values of tokens seen; attention of a step's tokens to them.
#
# memory of a request in a layer   (2, K, pages x page_size, D)   keys and values, of the heads that this rank has
#
# It grows with the request: to the pages that its tokens need, and at least to twice the pages of before, but never to
# more than it may come to need. Each request is attended to alone, by calls whose shapes depend on nothing but itself,
# so that it gets the same bits whatever else is in the batch.


class Look(NamedTuple):
    """How one portion looks at what its request has in the cache.

    `columns` are its tokens', whose keys come to `start` to `stop`. `mask` (queries, keys) says which of the keys up to
    there they see, if not all.
    """

    request: int
    columns: slice | Tensor
    start: int
    stop: int
    most: int
    mask: Tensor | None


class CacheStep:
    """The data of the current step for all layers: `positions` of its tokens, and how this rank's row looks."""

    def __init__(self, page_size: int, row: int, device: torch.device) -> None:
        self.page_size, self.row, self.device = page_size, row, device
        self.positions = torch.empty(0)
        self.looks: list[Look] = []

    def begin(self, portions: Sequence[TokenPortion], packed: Packed) -> None:
        self.positions = packed.positions.to(self.device)
        self.looks = [
            self._look(portion, columns)
            for portion, columns in zip(portions, packed.columns, strict=True)
            if portion.row == self.row
        ]

    def _look(self, portion: TokenPortion, columns: tuple[int, ...]) -> Look:
        num_queries = len(columns)
        stop = portion.start + num_queries
        asked = slice(columns[0], columns[0] + 1) if num_queries == 1 else torch.tensor(columns, device=self.device)
        mask = None
        if num_queries > 1 or portion.seen_from:
            keys = torch.arange(stop)
            mask = keys <= torch.arange(portion.start, stop)[:, None]
            if portion.seen_from:
                mask &= keys >= torch.tensor(portion.seen_from)[:, None]
            mask = mask.to(self.device)
        return Look(portion.request, asked, portion.start, stop, portion.most, mask)


class LayerCache:
    """The `Past` of one layer of attention: keys and values of each request that has some, by its number."""

    def __init__(self, step: CacheStep) -> None:
        self._step = step
        self._memory: dict[int, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        return self._step.positions

    @property
    def num_pages(self) -> int:
        return sum(memory.shape[2] for memory in self._memory.values()) // self._step.page_size

    def forget(self, request: int) -> None:
        """Free the memory of this request, if it has any."""
        self._memory.pop(request, None)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Remember keys and values (1, K, T, D), this rank's part, and let queries (1, H, T, D) look at them."""
        queries, new_keys, new_values = (
            x.local[0] if isinstance(x, SpatialTensor) else x[0] for x in (query, key, value)
        )
        # Each token's heads lie together, as the layer that takes them has them.
        seen = queries.new_zeros(queries.shape[1], queries.shape[0], queries.shape[2]).transpose(0, 1)
        for look in self._step.looks:
            keys, values = self._room(look, new_keys)[:, :, : look.stop]
            keys[:, look.start :] = new_keys[:, look.columns]
            values[:, look.start :] = new_values[:, look.columns]
            seen[:, look.columns] = attended(queries[:, look.columns], keys, values, look)
        return query.like(seen[None]) if isinstance(query, SpatialTensor) else seen[None]

    def _room(self, look: Look, like: Tensor) -> Tensor:
        """The memory of a request, with room for its tokens up to the last of this step."""
        size, memory = self._step.page_size, self._memory.get(look.request)
        held = 0 if memory is None else memory.shape[2]
        if memory is None or held < look.stop:
            num_pages = min(max(ceil_div(look.stop, size), 2 * held // size), ceil_div(look.most, size))
            grown = like.new_empty(2, like.shape[0], num_pages * size, like.shape[2])
            if memory is not None:
                grown[:, :, : look.start] = memory[:, :, : look.start]
            memory = self._memory[look.request] = grown
        return memory


def attended(queries: Tensor, keys: Tensor, values: Tensor, look: Look) -> Tensor:
    """Attention of queries (H, n, D) to keys, values (K, length, D): (H, n, D). Heads that share keys run together."""
    shape, groups = queries.shape, queries.shape[0] // keys.shape[0]
    together = queries.reshape(keys.shape[0], groups * shape[1], shape[2])
    mask = look.mask if look.mask is None or groups == 1 else look.mask.repeat(groups, 1)
    found = F.scaled_dot_product_attention(together[None], keys[None], values[None], mask)
    return found[0].reshape(shape)


class PagedModel:
    """The model that `stages` lays over ranks, with a cache of keys and values in pages of `page_size` tokens.

    Each data rank has the cache of its own requests. All ranks `run` the same steps. Until `close` the model is for
    this alone. Collective.

    Raises:
        Refusal: on all ranks: the plan cuts sequences, or the model is none that looks back only.
    """

    def __init__(self, stages: LocalStages, comm: Communicator, page_size: int) -> None:
        self.stages, self.comm = stages, comm
        plan = stages.plan
        if any(tiles != (1,) for tiles in plan.tiles) or set(plan.batch_ways) != {1} or plan.sequence:
            raise Refusal(
                f"{plan.describe()} cuts sequences, but text is generated by stages, tensor and data ranks alone"
            )
        if plan.bidirectional or plan.chunks > 1:
            raise Refusal(f"{plan.describe()}: text is generated in one direction, by one stage on each rank")
        self.num_rows = plan.replicas
        row = comm.rank // plan.ranks_per_replica
        self._step = CacheStep(page_size, row, stages.device)
        self._layers = [m for m in stages.modules() if isinstance(m, Attention | TokenEmbedding)]
        kinds = [m.causal for m in self._layers if isinstance(m, Attention)]
        found = comm.all_gather_object((kinds, row_multiple(stages)))
        everywhere = [kind for each, _ in found for kind in each]
        if not everywhere or not all(everywhere):
            raise Refusal("text is generated by mpi4dl's GPT, whose attention looks back only; this model is none")
        self._row_multiple = max(multiple for _, multiple in found)
        self._caches = [LayerCache(self._step) for _ in self._layers]
        for layer, cache in zip(self._layers, self._caches, strict=True):
            layer.past = cache
        self._num_logits = 0  # of how many tokens of a row they are wanted, in whole multiples
        heads = [m for path, m in stages.named_modules() if path.endswith(LOGITS_LAYER) and isinstance(m, nn.Linear)]
        self._hooks = [head.register_forward_pre_hook(self._wanted) for head in heads]
        # An expert has no capacity that a token's neighbours could fill, and products of as many rows as others.
        routers = [m for m in stages.modules() if isinstance(m, Router)]
        self._experts = [
            (experts, experts.row_multiple) for experts in stages.modules() if isinstance(experts, Experts)
        ]
        self._capacities = [(router, router.capacity_factor) for router in routers]
        for router in routers:
            router.capacity_factor = None
        for experts, _ in self._experts:
            experts.row_multiple = self._row_multiple
        self._modes = stages.training
        stages.eval()
        self._rows_alike, self._num_tokens = rows_alike(stages), 0
        self._executor = Executor(stages, comm, self._context, 0)
        self._table = plan.evaluation_table(1)
        self._speaker = plan.ranks(0, plan.num_stages - 1)[0]  # who has the logits
        self._like: Tensor | None = None

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.past = None
        for router, capacity in self._capacities:
            router.capacity_factor = capacity
        for experts, multiple in self._experts:
            experts.row_multiple = multiple
        self.stages.train(self._modes)

    @property
    def num_pages(self) -> int:
        """How many pages of memory the layer with most of them has on this rank now."""
        return max(cache.num_pages for cache in self._caches) if self._caches else 0

    def run(self, portions: Sequence[TokenPortion], ended: Sequence[int] = ()) -> Tensor | None:
        """Take these tokens into the cache; on rank 0 the logits after those that want them, (number, vocabulary).

        First the memory of requests that have `ended` is freed.
        """
        for cache in self._caches:
            for request in ended:
                cache.forget(request)
        if not portions:
            return None
        packed = pack(portions, self.num_rows, self._row_multiple)
        self._step.begin(portions, packed)
        self._num_logits = max(1, ceil_div(packed.num_wanted, self._row_multiple)) * self._row_multiple
        self._num_tokens = packed.tokens.shape[1]
        feed = _Feed(packed, self._step, self.stages.device)
        self._executor.run(self._table, feed)
        if not packed.num_wanted:
            return None
        logits = self._on_first_rank(feed.logits, packed.num_wanted)
        if logits is None:
            return None
        wanting = [(p.row, mine[-1]) for p, mine in zip(portions, packed.columns, strict=True) if p.wants]
        return logits[tuple(torch.tensor(wanting).T)]

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._num_tokens <= self._rows_alike else RowsApart()

    def _wanted(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs (1, T, C) of the layer that makes logits, of the first tokens alone: others are not wanted."""
        return (inputs[0][:, : self._num_logits],)

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

    def __init__(self, packed: Packed, step: CacheStep, device: torch.device) -> None:
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
