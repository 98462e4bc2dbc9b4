"""Windows as columns, folded back: spread all the while, and added up as by plain PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.spatial.comparing import CHOSEN, Arrangement, Case, Function, check_table, functions
from tests.pool.ranks import Ranks

SIZE = (13, 17)
UNFOLDED = {
    "overlapping": {"kernel_size": 3, "padding": 1},
    "apart": {"kernel_size": 2, "stride": 3},
    "side by side": {"kernel_size": (3, 2), "stride": (3, 2)},
    "dilated": {"kernel_size": (2, 3), "dilation": (3, 2), "stride": 2, "padding": (1, 0)},
    "large": {"kernel_size": (9, 7), "padding": 4, "stride": (1, 2)},
    "in the padding": {"kernel_size": 1, "padding": 2, "stride": (1, 3)},
}


class Around(nn.Module):
    """A layer on columns, between modules that unfold an image and fold it."""

    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.fold = nn.Unfold(5, stride=2, padding=2), nn.Fold(SIZE, 5, stride=2, padding=2)
        self.layer = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.unfold(x)
        folded = self.fold(self.layer(columns.mT).tanh().mT) / self.fold(torch.ones_like(columns))
        return F.avg_pool2d(folded.relu_(), 3, 1, 1) + x


def there_and_back(options: dict[str, Any]) -> Function:
    return lambda x: F.fold(F.unfold(x, **options).square(), x.shape[-2:], **options)


SPREAD: dict[str, Function] = {
    **{name: there_and_back(options) for name, options in UNFOLDED.items()},
    "columns": lambda x: F.unfold(x, 3, padding=1) * 2,
    "one image": lambda x: F.fold(F.unfold(x[0], (2, 3)), (13, 17), (2, 3)),
    "pixels become patches": lambda x: F.fold(x.flatten(2), (26, 34), 2, stride=2).relu_(),
    "pixels of a square": lambda x: F.fold(x[:, :, :12, :12].flatten(2), 25, 2, 1, 0, 2),
}
WHOLE: dict[str, Function] = {
    "rows alone": lambda x: F.fold(x.mean(3).unsqueeze(3).expand(-1, -1, -1, 5).flatten(2), (14, 6), 2),
    "one row of windows": lambda x: F.fold(F.unfold(x, (13, 2)), SIZE, (13, 2)),
    "other windows": lambda x: F.fold(F.unfold(x, (1, 2)), (17, 13), (2, 1)),
    "behind a token": lambda x: F.fold(torch.cat([x.new_ones(3, 4, 1), x.flatten(2)], 2), (3, 112), 2),
}
CASES: dict[str, Case] = {
    "layer on columns": Case(Around, ((3, 4, *SIZE),)),
    **functions(SPREAD, sizes=[SIZE]),
    **functions(WHOLE, sizes=[SIZE], spread=False),
}


@pytest.mark.parametrize(
    "arrangement",
    [*CHOSEN, Arrangement(1, 3), Arrangement(2, 1, batch=2), Arrangement(1, 2, style="empty")],
    ids=str,
)
@pytest.mark.sample(3)
def test_folded_columns_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
