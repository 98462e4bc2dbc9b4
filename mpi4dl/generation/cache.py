"""Keys and values of tokens seen, in pages; attention of a step's tokens to them.

keys, values of a layer   (K, pages x page_size, D)   of the heads that this rank has

Each request is attended to alone, by calls whose shapes depend on nothing but itself, so that it gets the same bits
whoever else is in the batch. Where its pages are neighbours, its keys and values are read where they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpi4dl.generation.packing import Packed, TokenPortion
from mpi4dl.parallel.spatial import SpatialTensor


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
    """What all layers need to know of the step under way: `positions` of its tokens, and how this rank's row looks."""

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
    """What queries (H, n, D) see of keys and values (K, length, D): (H, n, D). Heads that share keys ask together."""
    shape, groups = queries.shape, queries.shape[0] // keys.shape[0]
    together = queries.reshape(keys.shape[0], groups * shape[1], shape[2])
    mask = look.mask if look.mask is None or groups == 1 else look.mask.repeat(groups, 1)
    found = F.scaled_dot_product_attention(together[None], keys[None], values[None], mask)
    return found[0].reshape(shape)
