"""Rows rolled, flipped, repeated, chosen and written by indices, on tiles as on the whole image."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.tensor import SpatialTensor
from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, functions, table_test
from tests.pool.zygote import ROOT

SPREAD = {
    "roll rows": lambda x: x.roll(3, 2),
    "roll rows and columns": lambda x: torch.roll(x, shifts=(-2, 40), dims=(2, -1)),
    "roll twice along one dim": lambda x: x.roll((1, 2), (3, 3)),
    "roll channels": lambda x: x.roll(1, 1),
    "roll the batch": lambda x: x.roll(1, 0),
    "roll channels last": lambda x: x.permute(0, 2, 3, 1).roll((-2, -2), (1, 2)),
    "flip rows": lambda x: x.flip(2),
    "flip all": lambda x: torch.flip(x, (0, 1, 2, 3)),
    "flip, its dims by name": lambda x: x.flip(dims=(-1,)),
    "flip nothing": lambda x: x.flip(()),
    "fliplr": lambda x: torch.fliplr(x),
    "flipud of an image": lambda x: x[0].flipud(),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "rot90 thrice": lambda x: torch.rot90(x, -1, (3, 2)),
    "repeat": lambda x: x.repeat(1, 2, 3, 2),
    "repeat, a new dim": lambda x: x.repeat(2, 1, 1, 1, 2),
    "repeat many times": lambda x: x[:, :1].repeat(1, 1, 7, 1),
    "tile": lambda x: x.tile(2, 3),
    "repeat_interleave channels": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave rows": lambda x: torch.repeat_interleave(x, 3, dim=2),
    "repeat_interleave, each otherwise": lambda x: x.repeat_interleave(torch.arange(x.shape[3]) % 3, 3),
    "hstack": lambda x: torch.hstack((x, 2 * x)),
    "vstack": lambda x: torch.vstack((x, 2 * x)),
    "dstack": lambda x: torch.dstack((x, x.detach())),
    "column_stack": lambda x: torch.column_stack((x, x)),
    "cat of rows": lambda x: torch.cat((x[:, :, 1:], x, 2 * x[:, :, :3]), 2),
    "cat of columns with a plain tensor": lambda x: torch.cat((torch.ones(*x.shape[:3], 2), x), -1),
    "rows by a list": lambda x: x[:, :, [0, 3, 1, -1, 3]],
    "columns by index_select": lambda x: x.index_select(3, torch.tensor([2, 0, 4, 4])),
    "differences": lambda x: x.diff(dim=2),
    "differences of columns, twice": lambda x: torch.diff(x, 2, append=torch.zeros(*x.shape[:3], 1)),
    "broadcast_to": lambda x: x[:, :1].broadcast_to(x.shape),
    "a row": lambda x: x[:, :, 3],
    "a column from the end": lambda x: x.select(3, -2),
    "rows apart": lambda x: torch.stack(x.unbind(2)[::-1], 2),
    "channels by a list": lambda x: x[:, [2, 0, 2]],
    "channels by a tensor": lambda x: x[:, torch.tensor([[3, 1], [0, 0]])],
    "channels by a mask": lambda x: x[:, torch.tensor([True, False, False, True]), 1:],
    "channels and rows": lambda x: x[:, [1, 3], :, 2:4],
    "two dims by lists": lambda x: x.unflatten(1, (2, 2))[:, [0, 1, 1], [1, 0, 1]],
    "a list of slices": lambda x: x[[slice(None), slice(1, 3), None]],
    "two dims by a list of lists": lambda x: x.transpose(0, 1).unflatten(0, (2, 2))[[[0, 1, 1], [1, 0, 1]]],
    "the batch, and a new dim": lambda x: x[[2, 0, 1], ..., None, :],
    "rows and columns, each apart": lambda x: x[:, :, torch.tensor([[3], [0], [1]]), [2, 0]],
    "columns, rows and a channel apart": lambda x: x[:, [-1], torch.tensor([[4, 0, 2]]), torch.tensor([1, 3])[:, None]],
    "the batch and columns apart": lambda x: x[torch.arange(3).view(-1, 1, 1, 1), :, :, torch.tensor([[[4, 0]]])],
}
WHOLE = {
    "roll all of an image": lambda x: x[0, 0].roll((1, -1), (0, 1)).sum(0),
    "roll all": lambda x: x.roll(5),
    "a pixel": lambda x: x[:, :, 2, 3].sum(0),
    "repeat_interleave of all": lambda x: x.repeat_interleave(2),
}
CASES = functions(SPREAD) | functions(WHOLE, spread=False)

test_rearranged_rows_equal_those_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS)


def written(index: Any, value: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def write(x: Tensor) -> Tensor:
        y = x * 2
        y[index] = value(x)
        return y

    return write


EVERY = slice(None)
MASK = torch.tensor([True, False, False, True])
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=torch.float64)


def labels(x: Tensor) -> Tensor:
    """A class for each pixel, the same on every rank."""
    return torch.randint(4, (x.shape[0], *x.shape[2:]), generator=torch.Generator().manual_seed(5))


def rows(x: Tensor) -> Tensor:
    """A row for each pixel, the same on every rank."""
    return torch.randint(x.shape[2], x.shape, generator=torch.Generator().manual_seed(7))


def target(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(6))


def by_the_example(x: Tensor) -> Tensor:
    """`tril` by the rule that CONTRIBUTING.md explains, which is not registered here."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = text.partition("```python\n")[2].partition("```")[0]
    program = block.replace("import SpatialTensor, named, register\n", "import SpatialTensor\n")
    names: dict[str, Any] = {"named": lambda _: (), "register": lambda *_: lambda rule: rule}
    exec(compile(program, "CONTRIBUTING.md", "exec"), names)
    rule = names["tril"] if isinstance(x, SpatialTensor) else torch.tril
    return rule(x * 2, 1)


SPREAD_CHOICES = {
    "tril": lambda x: x.tril(),
    "tril below": lambda x: torch.tril(x, diagonal=-2),
    "triu": lambda x: x.triu(1),
    "tril by the example": by_the_example,
}
SPREAD_CHOICES_2 = {
    "gather": lambda x: x.gather(1, labels(x).unsqueeze(1)),
    "gather by spread indices": lambda x: x.gather(1, x.detach().argsort(1)),
    "gather, sizes differ": lambda x: torch.gather(x, 1, labels(x)[:, None, :4, 1:5]),
    "gather from a plain tensor": lambda x: target(x).gather(1, x.argmax(1, keepdim=True)) * x,
    "gather along rows": lambda x: x.gather(2, rows(x)),
    "gather along rows by spread indices": lambda x: x.gather(2, (x.detach() > 0) * 3),
    "gather along columns, sizes differ": lambda x: x.gather(3, rows(x)[:, :2, :3, :7]),
    "take_along_dim": lambda x: x.take_along_dim(x.detach().argmax(1, keepdim=True), 1),
    "take_along_dim that broadcasts": lambda x: torch.take_along_dim(x, torch.tensor([2, 1]).view(1, 2, 1, 1), 1),
    "scatter a value": lambda x: torch.zeros_like(x).scatter(1, labels(x).unsqueeze(1), 1.5) * x,
    "scatter_ spread": lambda x: torch.zeros_like(x).scatter_(1, x.detach().argmin(1, keepdim=True), x[:, :1]),
    "scatter into a plain tensor": lambda x: torch.zeros(x.shape).scatter(
        1, x.detach().argmin(1, keepdim=True), x[:, :1]
    ),
    "scatter_add": lambda x: x.scatter_add(1, labels(x).unsqueeze(1), x[:, 1:2]),
    "scatter_reduce": lambda x: x.scatter_reduce(1, labels(x).unsqueeze(1), x[:, 1:2], "amax"),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 2]), 1.5),
    "index_add": lambda x: x.index_add(1, torch.tensor([3, 3]), x[:, :2], alpha=2),
    "index_copy_": lambda x: (x * 1).index_copy_(1, torch.tensor([1, 0]), target(x)[:, :2]),
    "write by a list": written((EVERY, [0, 2]), lambda x: x[:, 1:3] * x[:, :1]),
    "write plain values by a list": written((EVERY, [3, 0]), lambda x: target(x)[:, :2]),
    "write values that broadcast": written((EVERY, [3, 0], slice(1, 4)), lambda x: x.mean((0, 2), True)[0, :2]),
    "write a number by a list": written((EVERY, [1, 2]), lambda x: 3.0),
    "write by a mask of channels": written((..., MASK, EVERY, EVERY), lambda x: x[:, :2]),
    "write by a list, and a row": written((EVERY, [1, 2], 2), lambda x: 1.5),
    "write by a list behind a row": lambda x: written((EVERY, 2, EVERY, [1, 2]), lambda _: 1.5)(x.movedim(1, -1)),
    "write by two lists": lambda x: written((EVERY, [0, 1], [1, 0]), lambda _: x[:, :2])(x.unflatten(1, (2, 2))),
    "write a list of lists": written((EVERY, torch.tensor([[0, 1], [2, 3]])), lambda x: x.unflatten(1, (2, 2))),
    "one_hot": lambda x: F.one_hot(x.detach().argmax(1), 6).permute(0, 3, 1, 2) * x[:, :1],
    "one_hot, classes counted": lambda x: F.one_hot(x.detach().argmax(1)),
    "weights of classes": lambda x: WEIGHT[x.detach().argmax(1)] * x[:, 0],
    "embedding": lambda x: F.embedding(x.detach().argmax(1), torch.eye(4, 3), 1) * x[:, 0, ..., None],
}
WHOLE_CHOICES = {
    "scatter_ into a plain tensor": lambda x: torch.zeros(x.shape).scatter_(
        1, x.detach().argmin(1, keepdim=True), x[:, :1]
    ),
}
CHOICES = functions(SPREAD_CHOICES) | functions(SPREAD_CHOICES_2) | functions(WHOLE_CHOICES, spread=False)

test_what_indices_choose_is_that_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS, "CHOICES")
