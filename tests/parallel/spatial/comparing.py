"""Any function on tiles against the same function on the whole image: values, gradients, shapes, dtypes, buffers.

A test module holds a table of cases, and `compare_table`, which runs on every rank of the pool, works through it. The
reference is plain PyTorch on the whole image, computed on each rank beside the tiles, in float64.
"""

import copy
import functools
import importlib
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import narrow
from mpi4dl.geometry import BATCH, GridShape, Split, Tiling
from mpi4dl.parallel import spatial
from mpi4dl.parallel.replicas.parameter_sums import summed
from mpi4dl.parallel.spatial.sharding import image_dims
from tests.pool.ranks import GRACE_SECONDS, Ranks
from tests.support.differences import first_difference

RELATIVE, ABSOLUTE = 1e-10, 1e-13
CPU = torch.device("cpu")
IN_CUSTOM_FUNCTION = torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION
SIZES = ((13, 17), (5, 9))
Shape = tuple[int, ...]
Function = Callable[[Tensor], Any]


class Arrangement(NamedTuple):
    """How an image is laid over the ranks; with a depth a volume, without columns a sequence along its "rows".

    "wide" tiles hold a halo; "uneven" leaves one of three or more tiles without pixels, "empty" all but the last along
    each axis. `turn`: every second case of a table, from this one on, on one of its shapes in turn; by default all.
    """

    rows: int
    cols: int | None = None
    batch: int = 1
    style: str = "even"
    depth: int | None = None
    turn: int | None = None

    @property
    def shape(self) -> GridShape:
        space = (self.depth, self.rows, self.cols)
        return GridShape(self.batch, *(parts for parts in space if parts is not None))

    @property
    def num_ranks(self) -> int:
        return self.shape.size

    def __str__(self) -> str:
        batch = f"batch{self.batch}-" if self.batch > 1 else ""
        style = "" if self.style == "even" else f"-{self.style}"
        turn = "" if self.turn is None else f"-turn{self.turn}"
        return f"{batch}{'x'.join(map(str, self.shape.space))}{style}{turn}"


def in_turns(*arrangements: Arrangement) -> list[Any]:
    """Each arrangement tries its share of a table's cases by default, the next one the rest; on demand, each all."""
    turns = [each._replace(turn=number % 2) for number, each in enumerate(arrangements)]
    return [*turns, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in arrangements)]


ARRANGEMENTS = [
    Arrangement(1, 2),
    Arrangement(2, 1),
    Arrangement(2, 2),
    Arrangement(1, 4),
    Arrangement(4, 1),
    Arrangement(1, 2, batch=2),
    Arrangement(2, 1, batch=2),
    Arrangement(4, 1, style="uneven"),
    Arrangement(2, 2, style="wide"),
]
CHOSEN = [
    Arrangement(4, 1, style="uneven"),
    Arrangement(2, 2, style="wide"),
]
# For tables of tokens.
OF_TOKENS = [
    Arrangement(1, 2),
    Arrangement(2, 2),
    Arrangement(3, 1),
    Arrangement(2, 1, batch=2),
    Arrangement(1, 2, batch=2),
    Arrangement(4, 1, style="uneven"),
    Arrangement(2, 2, style="wide"),
    Arrangement(1, 2, style="empty"),
]
# One of each kind, for tables of operators whose rules share what all arrangements try.
SOME_ARRANGEMENTS = [
    *in_turns(Arrangement(2, 1, batch=2), Arrangement(2, 2, style="wide")),
    pytest.param(Arrangement(2, 2), marks=pytest.mark.exhaustive),
    pytest.param(Arrangement(1, 3), marks=pytest.mark.exhaustive),
    pytest.param(Arrangement(4, 1, style="uneven"), marks=pytest.mark.exhaustive),
]


def chosen(arrangements: Sequence[Arrangement]) -> list[Any]:
    """All of them for a table of tests on demand; by default those in CHOSEN, in turns."""
    others = [each for each in arrangements if each not in CHOSEN]
    return [*in_turns(*CHOSEN), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in others)]


def as_drawn(image: Tensor) -> Tensor:
    return image


class Case(NamedTuple):
    """What makes the function, the shapes of image to try it on, and whether its result must stay spread over ranks.

    `image` makes the image out of one of normal random numbers: one of equal pixels, or with infinities.
    """

    make: Callable[[], Function]
    shapes: tuple[Shape, ...]
    spread: bool = True
    image: Callable[[Tensor], Tensor] = as_drawn

    def shapes_of(self, number: int, turn: int | None) -> tuple[Shape, ...]:
        """The shapes on which the case of this number in its table is tried in a turn."""
        if turn is None:
            return self.shapes
        return (self.shapes[number // 2 % len(self.shapes)],) if number % 2 == turn else ()


def modules(
    *makes: Callable[[], nn.Module], channels: int = 4, sizes: Iterable[Shape] = SIZES, spread: bool = True
) -> dict[str, Case]:
    """Cases that are modules, each under the name that it prints."""
    shapes = tuple((3, channels, *size) for size in sizes)
    return {repr(make()): Case(make, shapes, spread) for make in makes}


def functions(
    named: dict[str, Function], channels: int = 4, sizes: Iterable[Shape] = SIZES, spread: bool = True
) -> dict[str, Case]:
    """Cases that are functions, under names of the test's own."""
    shapes = tuple((3, channels, *size) for size in sizes)
    return {name: Case(lambda function=function: function, shapes, spread) for name, function in named.items()}


def tiled(x: Tensor, grid: spatial.Grid) -> spatial.SpatialTensor:
    """This rank's part of an image of any size; where it has fewer pixels than the grid has tiles, some have none."""
    dims = image_dims(grid, x.dim())
    tiling = Tiling.even(grid.shape, (x.shape[0], *x.shape[-len(grid.space) :]))
    layout = spatial.Layout(grid, tiling if dims[BATCH] is not None else tiling.drop(BATCH), dims)
    return spatial.SpatialTensor(narrow(x, dims, tiling.whole, layout.owned), layout)


def grid_of(comm: Communicator, arrangement: Arrangement) -> spatial.Grid:
    return spatial.Grid.of(comm, arrangement.shape)


def arrange(
    x: Tensor, comm: Communicator, arrangement: Arrangement, grid: spatial.Grid | None = None
) -> spatial.SpatialTensor:
    """Spread an image as the arrangement says."""
    grid = grid_of(comm, arrangement) if grid is None else grid
    tiles = tiled(x, grid)
    if arrangement.style == "wide":
        return spatial.widen(tiles, 2)
    if arrangement.style == "even":
        return tiles
    batch, *space = tiles.layout.tiling.splits
    recut = uneven if arrangement.style == "uneven" else empty
    return spatial.retile(tiles, Tiling((batch, *map(recut, space))))


def uneven(split: Split) -> Split:
    """A first part with most of the pixels, a second one with none."""
    size, parts = split.size, split.parts
    inner = [min(size, 2 * size // 3 + max(0, i - 1)) for i in range(parts - 1)]
    return Split.at([0, *inner, size])


def empty(split: Split) -> Split:
    """All pixels in the last part."""
    return Split.at([0] * split.parts + [split.size])


def difference(name: str, ours: Tensor, plain: Tensor, scale: float = 1.0) -> list[str]:
    """What is wrong with `ours`, in words; nothing if it equals `plain` up to rounding, of `scale` at least."""
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return [f"{name}: {tuple(ours.shape)} {ours.dtype}, but plain {tuple(plain.shape)} {plain.dtype}"]
    if plain.numel() == 0:
        return []
    if not plain.is_floating_point() and not plain.is_complex():
        return [] if torch.equal(ours, plain) else [f"{name}: {first_difference(ours, plain, ours != plain)}"]
    if not torch.equal(ours.isfinite(), plain.isfinite()):
        others = first_difference(ours, plain, ours.isfinite() != plain.isfinite())
        return [f"{name}: not finite at other places than plain: {others}"]
    finite = plain.isfinite()
    if not torch.equal(ours[~finite].nan_to_num(0.5), plain[~finite].nan_to_num(0.5)):
        return [f"{name}: other infinities than plain"]
    if not finite.any():
        return []
    errors, size = (ours - plain).abs(), plain[finite].abs().max()
    error, allowed = errors[finite].max(), RELATIVE * size + ABSOLUTE * scale
    if error <= allowed:
        return []
    return [f"{name}: off by {error:.1e} of {size:.1e}; {first_difference(ours, plain, finite & (errors > allowed))}"]


def rehearse(comm: Communicator, model: nn.Module, image: Tensor, arrangement: Arrangement, grid: spatial.Grid) -> None:
    """A forward and a backward pass, after which the model's norms know what follows them, and nothing else is new."""
    grid.halo_prefetch.everywhere = True
    state = copy.deepcopy(model.state_dict())
    outputs = pytree.tree_leaves(model(arrange(image, comm, arrangement, grid)))
    sum(spatial.gather(y).sum() for y in outputs).backward()
    model.load_state_dict(state)
    model.zero_grad()
    grid.halo_prefetch.commit()


def compare_results(
    comm: Communicator, ours: Any, plain: Any, spread: bool = False, finite: bool = False, scale: float = 1.0
) -> tuple[list[str], Tensor, Tensor]:
    """What is wrong with a result; and a weighted sum of each of both, whose gradients are to be compared.

    `finite`: what is infinite or no number counts as nothing in the sums. `scale` is that of `difference`.
    """
    plain_leaves, plain_structure = pytree.tree_flatten(plain)
    our_leaves, our_structure = pytree.tree_flatten(ours)
    sums = [torch.zeros(()), torch.zeros(())]
    if our_structure != plain_structure:
        return [f"the result is {our_structure}, but plain {plain_structure}"], *sums
    wrong = []
    for i, (mine, whole) in enumerate(zip(our_leaves, plain_leaves, strict=True)):
        if not isinstance(whole, Tensor):
            wrong += [] if mine == whole else [f"result {i}: {mine}, but plain {whole}"]
            continue
        if spread and not isinstance(mine, spatial.SpatialTensor):
            wrong.append(f"result {i} is not spread over ranks")
        if mine.requires_grad != whole.requires_grad:
            wrong.append(f"result {i}: requires_grad is {mine.requires_grad}, but plain {whole.requires_grad}")
        if isinstance(mine, spatial.SpatialTensor):
            if mine.shape != whole.shape:
                wrong.append(f"result {i}: shape {tuple(mine.shape)}, but plain {tuple(whole.shape)}")
            if tuple(mine.local.shape) != mine.layout.local_shape(tuple(mine.shape)):
                wrong.append(f"result {i}: local shape {tuple(mine.local.shape)} in {mine.layout.held}")
            if mine.local._is_view() and torch._C._autograd._get_creation_meta(mine.local) == IN_CUSTOM_FUNCTION:
                wrong.append(f"result {i}: PyTorch would let nobody write to it")
        gathered = spatial.gather(mine)
        wrong += difference(f"result {i}", gathered.detach(), whole.detach(), scale)
        if whole.is_floating_point() and whole.shape == gathered.shape:
            weight = torch.randn_like(whole.detach())
            products = [gathered * weight / comm.size, whole * weight]
            sums = [
                total.to(each.device) + (each.nan_to_num(0, 0, 0) if finite else each).sum()
                for total, each in zip(sums, products, strict=True)
            ]
    return wrong, *sums


def compare(
    comm: Communicator,
    case: Case,
    shape: Shape,
    arrangement: Arrangement,
    rehearsed: bool = False,
    device: torch.device = CPU,
) -> list[str]:
    """Everything that differs between the function on tiles and on the whole image; perhaps after a rehearsal."""
    torch.manual_seed(1)
    function = case.make()
    function = function.to(device) if isinstance(function, nn.Module) else function
    plain_function = copy.deepcopy(function) if isinstance(function, nn.Module) else function
    image = case.image(torch.randn(shape)).to(device)
    plain_image, our_image = image.clone().requires_grad_(), image.clone().requires_grad_()
    grid = grid_of(comm, arrangement)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as PyTorch's of what padding="same" costs
        plain_result = plain_function(plain_image)
        if rehearsed and isinstance(function, nn.Module):
            rehearse(comm, function, image.clone().requires_grad_(), arrangement, grid)
        our_result = function(arrange(our_image, comm, arrangement, grid))
    wrong, our_loss, plain_loss = compare_results(comm, our_result, plain_result, case.spread)
    (plain_loss + plain_image.sum() * 0).backward()
    (our_loss + our_image.sum() * 0).backward()
    wrong += difference("gradient of the image", comm.all_reduce(our_image.grad), plain_image.grad)
    if isinstance(function, nn.Module) and isinstance(plain_function, nn.Module):
        wrong += compare_models(comm, function, plain_function)
    return wrong


def compare_models(comm: Communicator, ours: nn.Module, plain: nn.Module) -> list[str]:
    """The gradients of the parameters, summed over ranks, and the buffers; all ranks have the same bits of them."""
    grid = spatial.Grid(comm, rows=comm.size)
    sum_gradients(ours, grid.comm)
    found = [*(p.grad for p in ours.parameters() if p.grad is not None), *ours.buffers()]
    comm.agree(None, found=[float(value.double().nan_to_num().sum()) for value in found])
    wrong = []
    scale = max(
        [float(p.grad.nan_to_num(0.0, 0.0, 0.0).abs().max()) for p in plain.parameters() if p.grad is not None],
        default=0.0,
    )
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if a.requires_grad:
            if a.grad is None or b.grad is None:
                wrong += [] if a.grad is b.grad else [f"gradient of {name}: one of {a.grad} and plain {b.grad} is None"]
            else:
                wrong += difference(f"gradient of {name}", a.grad, b.grad, scale)
    for (name, a), b in zip(ours.named_buffers(), plain.buffers(), strict=True):
        wrong += difference(f"buffer {name}", a, b)
    return wrong


def sum_gradients(model: nn.Module, comm: Communicator) -> None:
    """Sum the gradients that a backward pass without `parallelize` left on each rank."""
    parameters = [*model.parameters()]
    wholes = summed(parameters, [p.grad for p in parameters], comm)
    for p, whole in zip(parameters, wholes, strict=True):
        p.grad = whole


def all_arrive(comm: Communicator, seconds: float) -> bool:
    """A barrier that gives up: a rank that failed alone must not wait for those that wait for it."""
    request, deadline = comm.mpi.Ibarrier(), time.monotonic() + seconds
    while not (arrived := request.Test()) and time.monotonic() < deadline:
        time.sleep(20e-6)
    return arrived


def compare_table(
    comm: Communicator,
    module: str,
    table: str,
    arrangement: Arrangement,
    device: torch.device = CPU,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, str]:
    """What is wrong with each case of a test module's table on this rank; nothing for those that are right.

    It may be one table for each number of axes of space. Each case is compared in a context that `within` makes.
    """
    torch.set_default_dtype(torch.float64)
    failures = {}
    control = comm.split(0)  # so that its barrier is not taken for a collective of the case
    cases = getattr(importlib.import_module(module), table)
    cases = cases.get(len(arrangement.shape.space), cases)
    for number, (name, case) in enumerate(cases.items()):
        for shape in case.shapes_of(number, arrangement.turn):
            error = ""
            try:
                with within():
                    wrong = compare(comm, case, shape, arrangement, device=device)
            except Exception:
                error = traceback.format_exc(limit=-5)
                wrong = [error]
            if not all_arrive(control, GRACE_SECONDS if error else math.inf):
                raise AssertionError(f"{name} on {shape}, while other ranks wait: {error}")
            if wrong:
                failures[f"{name} on {shape}"] = "\n    ".join(wrong)
    return failures


def table_test(module: str, arrangements: Sequence[Any], table: str = "CASES") -> Any:
    """The test of a module's table: each case is that of the whole image, on each of these arrangements."""

    @pytest.mark.parametrize("arrangement", arrangements, ids=str)
    def test(ranks: Ranks, arrangement: Arrangement) -> None:
        results = ranks(arrangement.num_ranks).run(compare_table, module, table, arrangement)
        found: dict[str, list[int]] = {}
        for rank, failures in enumerate(results):
            for name, text in failures.items():
                found.setdefault(f"{name}:\n    {text}", []).append(rank)
        assert not found, f"{len(found)} cases differ on {arrangement.num_ranks} ranks, {arrangement!r}\n" + "\n".join(
            f"ranks {ranks}: {text}" for text, ranks in found.items()
        )

    return test


class Traffic:
    """What a communicator passes on from now on.

    `rounds`: how often ranks had to wait for each other. Of what went to others `pieces`, their `pixels` and `bytes`.
    """

    def __init__(self, comm: Any) -> None:
        self.clear()
        self._rank = comm.rank
        for name in ("iexchange", "all_gather", "all_reduce"):
            setattr(comm, name, functools.partial(self._pass_on, name, getattr(comm, name)))

    def clear(self) -> None:
        self.rounds = self.pieces = self.pixels = self.bytes = 0

    def _pass_on(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.rounds += name != "iexchange" or any(args[:2])  # where the image ends, padding is all there is
        for peer, tensor in args[0] if name == "iexchange" else ():
            if peer != self._rank:
                self.pieces, self.pixels = self.pieces + 1, self.pixels + tensor.numel()
                self.bytes += tensor.nbytes
        return call(*args, **kwargs)
