"""The tokens of all requests of a step, packed into one row for each data rank.

row 0    a3 b0 b1 b2 c9 .  .  .       the last tokens of those whose next token is wanted come first, then the others,
row 1    d4 e7 .  .  .  .  .  .       then padding
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
