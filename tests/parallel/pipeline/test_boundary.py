"""Boundaries between stages: every rank gets just the box that it needs, and gradients return by the adjoint."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mpi4dl.comm import Communicator, Pending
from mpi4dl.geometry import BATCH, Box, GridShape, Interval, Split, Tiling
from mpi4dl.parallel import spatial
from mpi4dl.parallel.pipeline.stage_communication import StageBoundary, StageMessage, crossing, layout_behind
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned
from tests.pool.ranks import on_ranks
from tests.support.brute_force import quick

IMAGE = (0, 2, 3)
SIZE = (4, 7, 6)
FIRST = StageMessage("kind", 0)


def cut(batch: tuple[int, ...], rows: tuple[int, ...], cols: tuple[int, ...]) -> Tiling:
    return Tiling((Split.at(batch), Split.at(rows), Split.at(cols)))


def box(*ends: tuple[int, int]) -> Box:
    return Box(*(Interval(*pair) for pair in ends))


def test_cuts_stay_along_an_axis_that_both_grids_cut_alike_and_are_even_along_others() -> None:
    place = layout_behind(
        cut((0, 4), (0, 1, 5), (0, 2, 7)), IMAGE, GridShape(1, 1, 2), 1, plain=False, tracks_batch=True
    )
    assert place.tiling == cut((0, 4), (0, 5), (0, 2, 7))
    assert place.dims == IMAGE
    assert place.needed == (box((0, 4), (0, 5), (0, 2)), box((0, 4), (0, 5), (2, 7)))


def test_a_plain_stage_needs_the_whole_and_knows_of_no_dims() -> None:
    place = layout_behind(
        cut((0, 4), (0, 1, 5), (0, 2, 7)), IMAGE, GridShape(1, 1, 1), 1, plain=True, tracks_batch=False
    )
    assert place.dims == (None, None, None)
    assert place.needed == (box((0, 4), (0, 5), (0, 7)),)


def test_a_batch_that_is_cut_no_more_becomes_an_ordinary_dim() -> None:
    place = layout_behind(cut((0, 4), (0, 5), (0, 2, 7)), IMAGE, GridShape(1, 1, 2), 1, plain=False, tracks_batch=False)
    assert place.tiling == cut((0, 1), (0, 5), (0, 2, 7))
    assert place.dims == (None, 2, 3)
    assert [needed.batch for needed in place.needed] == [(0, 4), (0, 4)]


def test_samples_stay_in_their_replica_when_ways_change() -> None:
    place = layout_behind(cut((0, 3, 7), (0, 5), (0, 7)), IMAGE, GridShape(4, 1, 1), 2, plain=False, tracks_batch=True)
    assert place.tiling.splits[BATCH].cuts == (0, 1, 3, 5, 7)
    back = layout_behind(place.tiling, IMAGE, GridShape(2, 1, 1), 2, plain=False, tracks_batch=True)
    assert back.tiling.splits[BATCH].cuts == (0, 3, 7)


def test_of_an_axis_that_is_gone_each_rank_takes_one_of_the_copies() -> None:
    place = layout_behind(
        cut((0, 4), (0, 1, 2), (0, 1)), (0, None, None), GridShape(1, 1, 2), 1, plain=False, tracks_batch=True
    )
    assert place.dims == (0, None, None)
    assert place.tiling == cut((0, 4), (0, 1), (0, 1, 2))
    assert place.needed == (box((0, 4), (0, 1), (0, 1)), box((0, 4), (0, 1), (0, 1)))


def test_what_crosses_from_four_tiles_to_two() -> None:
    tiling = Tiling.even(GridShape(1, 2, 2), (1, 4, 6))
    place = layout_behind(tiling, IMAGE, GridShape(1, 1, 2), 1, plain=False, tracks_batch=False)
    ends = (0, 1, 2, 3, 5, 4)  # the two targets are ranks 5 and 4
    plans = [crossing(tiling, place.needed, ends, i) for i in range(6)]
    assert [plan.sends for plan in plans] == [
        ((5, box((0, 1), (0, 2), (0, 3))),),
        ((4, box((0, 1), (0, 2), (3, 6))),),
        ((5, box((0, 1), (2, 4), (0, 3))),),
        ((4, box((0, 1), (2, 4), (3, 6))),),
        (),
        (),
    ]
    assert [[slab.peer for slab in plan.receives] for plan in plans] == [[], [], [], [], [0, 2], [1, 3]]


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Tiling, tuple[int | None, ...], GridShape, int]:
    """A tensor cut anywhere by some grid, the grid behind it, and the number of replicas of both."""
    replicas = draw(st.integers(1, 2))
    ways = st.integers(1, 3)
    shapes = [GridShape(replicas * draw(ways), draw(ways), draw(ways)) for _ in range(2)]
    dims = [draw(st.sampled_from([dim, dim, None])) for dim in IMAGE]
    splits = []
    for axis in range(3):
        parts = shapes[0][axis]
        if dims[axis] is None:
            splits.append(Split.at(range(parts + 1)))
            continue
        inner = draw(st.lists(st.integers(0, 9), min_size=parts - 1, max_size=parts - 1))
        splits.append(Split.at([0, *sorted(inner), 9]))
    return Tiling((splits[0], splits[1], splits[2])), tuple(dims), shapes[1], replicas


def pixels(where: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(*interval) for interval in where)))


@quick
@given(crossings(), st.booleans())
@pytest.mark.exhaustive
def test_all_that_a_rank_needs_comes_once_and_from_its_owners(
    case: tuple[Tiling, tuple[int | None, ...], GridShape, int], tracks_batch: bool
) -> None:
    tiling, dims, target, replicas = case
    tracks_batch = tracks_batch or target.batch > 1
    place = layout_behind(tiling, dims, target, replicas, plain=False, tracks_batch=tracks_batch)
    num_sources = tiling.grid.size
    ends = tuple(100 + i for i in range(num_sources + target.size))
    plans = [crossing(tiling, place.needed, ends, i) for i in range(len(ends))]
    for i, needed in enumerate(place.needed):
        plan = plans[num_sources + i]
        came = [pixel for slab in plan.receives for pixel in pixels(slab.box)]
        assert len(came) == len(set(came))
        assert set(came) == pixels(needed)
        assert (plan.needed, plan.sends) == (needed, ())
        for peer, part in plan.receives:
            assert tiling.all_owned[peer - 100].covers(part)
            assert (100 + num_sources + i, part) in plans[peer - 100].sends
        replica = i * replicas // target.size
        sources = tiling.all_owned[replica * num_sources // replicas : (replica + 1) * num_sources // replicas]
        if dims[BATCH] is not None:
            assert needed.batch.start >= min(source.batch.start for source in sources)
            assert needed.batch.empty or needed.batch.stop <= max(source.batch.stop for source in sources)
    assert sum(len(plan.sends) for plan in plans) == sum(len(plan.receives) for plan in plans)
    reached = set().union(*map(pixels, place.needed))
    present = [range(9) if dims[axis] is not None else {p[axis] for p in reached} for axis in range(3)]
    assert len(reached) == len(present[0]) * len(present[1]) * len(present[2])


def ends_of(comm: Communicator, plan: Plan) -> dict[str, tuple[StageBoundary, spatial.Grid]]:
    """This rank's end or ends of the boundary behind stage 0."""
    found = {}
    private = comm.split(0)
    for name, stage in (("sends", 0), ("receives", 1)):
        ranks, shape = plan.ranks(0, stage), plan.shape(stage)
        if comm.rank in ranks:
            grid = spatial.Grid.of(comm.subset(ranks), shape, plan.tracks_batch(stage))
            device = torch.device("cpu")
            found[name] = (StageBoundary(plan, private, 0, 0, grid=grid, device=device, sends=name == "sends"), grid)
    return found


def whole(channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch, rows, cols = SIZE
    return torch.randn(batch, channels, rows, cols, generator=generator, dtype=torch.float64)


def spread(image: Tensor, plan: Plan, grid: spatial.Grid) -> Tensor:
    return image if plan.is_plain(0) else spatial.shard(image, grid)


def assert_is_part_of(found: Tensor, image: Tensor) -> None:
    if isinstance(found, SpatialTensor):
        for axis, dim in enumerate(found.layout.dims):
            if dim is not None:
                image = image.narrow(dim, found.layout.owned[axis].start, found.layout.owned[axis].length)
        found = found.local
    assert torch.equal(found, image)


PAIRS = [
    Plan(((1, 1), (1, 1))),
    Plan(((2, 2), (1, 1))),
    Plan(((1, 1), (2, 2))),
    Plan(((2, 1), (1, 2))),
    Plan(((1, 2), (1, 2))),
    Plan(((2, 2), (1, 2)), (1, 2)),
    Plan(((1, 2), (1, 1)), (1, 2), data=2),
    Plan(((1, 1), (1, 2)), (2, 1), data=2),
]


@pytest.mark.parametrize("plan", PAIRS, ids=str)
@pytest.mark.sample(3)
@on_ranks()
def test_gradients_return_by_the_adjoint(comm: Communicator, plan: Plan) -> None:
    """Hand on values of all kinds twice, and random gradients back: <A x, y> and <x, A' y> over all ranks."""
    torch.manual_seed(comm.rank)
    products = torch.zeros(2, dtype=torch.float64)
    ends = ends_of(comm, plan)
    for round_ in (0, 1):
        first, second, mask = whole(3, round_), whole(2, 10 + round_), whole(1, 20 + round_) > 0
        scalar = torch.tensor(2.5, dtype=torch.float64)
        pending: list[Pending] = []
        if "sends" in ends:
            boundary, grid = ends["sends"]
            x, z = (spread(image.requires_grad_(), plan, grid) for image in (first, second))
            values = ((x, z), 7, [spread(mask, plan, grid), scalar], {"again": x, "size": (7, 6)})
            sent, edges = boundary.send(StageMessage("kind", round_), values, ("pair", "number", "list", "dict"))
            pending.append(sent)
            assert len(edges) == 2
        if "receives" in ends:
            boundary, _ = ends["receives"]
            assert boundary.knows(StageMessage("kind", round_)) == (round_ > 0)
            arrival = boundary.receive(StageMessage("kind", round_))
            (x_there, z_there), number, (mask_there, scalar_there), more = arrival.values
            assert more["again"] is x_there
            assert (number, more["size"]) == (7, (7, 6))
            for found, image in ((x_there, first), (z_there, second), (mask_there, mask), (scalar_there, scalar)):
                assert_is_part_of(found.detach(), image.detach())
            assert len(arrival.leaves) == 2
            for leaf in arrival.leaves:
                leaf.grad = torch.randn_like(leaf)
                products[0] += (leaf.detach() * leaf.grad).sum()
            pending.append(boundary.send_back(StageMessage("kind", round_), arrival.leaves))
        if "sends" in ends:
            for tensor, gradient in zip(
                (x, z), ends["sends"][0].receive_back(StageMessage("kind", round_)), strict=True
            ):
                local = owned(tensor) if isinstance(tensor, SpatialTensor) else tensor
                assert gradient.shape == local.shape
                products[1] += (local.detach() * gradient).sum()
        for one in pending:
            one.wait()
    comm.all_reduce(products)
    assert abs(float(products[0])) > 1e-3
    assert float(products[0]) == pytest.approx(float(products[1]), rel=1e-12)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).mT


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens": tokens,
    "a class token": lambda x: torch.cat([torch.full((4, 2, 3), 0.5, dtype=x.dtype), tokens(x)], 1),
    "a token of each image": lambda x: torch.cat([x.new_ones(4, 1, 3) * 2, tokens(x)], 1),
    "the first tokens again": lambda x: torch.cat([tokens(x), tokens(x)[:, :3]], 1),
    "and a class token": lambda x: torch.cat([x.new_ones(4, 1, 3) * 2, tokens(x), tokens(x)[:, :3]], 1),
    "windows": lambda x: x[:, :, :6].unflatten(2, (3, 2)).unflatten(4, (3, 2)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2),
}


FLAT_PAIRS = [
    Plan(((2, 2), (2, 2))),
    Plan(((2, 2), (1, 3))),
    Plan(((1, 2), (2, 1))),
    Plan(((1, 2), (1, 2)), data=2),
    Plan(((1, 2), (1, 2)), (1, 2)),
    Plan(((2, 2), (1, 1))),
]


@pytest.mark.parametrize("plan", FLAT_PAIRS, ids=str)
@on_ranks()
def test_dims_that_several_axes_became_land_spread(comm: Communicator, plan: Plan) -> None:
    """Tensors in which several axes are one dim land spread, and what the next stage makes of them has its gradient."""
    ends, image = ends_of(comm, plan), whole(3, 0).requires_grad_()
    made = {name: function(image) for name, function in FLAT.items()}
    weights = [torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).double() for value in made.values()]
    gradient = torch.zeros_like(image)
    cut = any(before > 1 < behind for before, behind in zip(*plan.tiles, strict=True))  # an axis, by both stages
    for round_ in (0, 1):
        message = StageMessage("kind", round_)
        if "receives" in ends:
            boundary, grid = ends["receives"]
            arrival = boundary.receive(message)
            loss = torch.zeros((), dtype=torch.float64)
            for (name, expected), found, weight in zip(made.items(), arrival.values, weights, strict=True):
                local = found.local if isinstance(found, SpatialTensor) else found
                assert not cut or local.numel() < 0.8 * expected.numel(), name
                assert torch.equal(spatial.gather(found), expected), name
                loss = loss + (spatial.gather(found) * weight).sum() / grid.size
            loss.backward()
            boundary.send_back(message, arrival.leaves).wait()
        else:
            boundary, grid = ends["sends"]
            ours = image.detach().clone().requires_grad_()
            pending, edges = boundary.send(message, [f(spread(ours, plan, grid)) for f in FLAT.values()], list(FLAT))
            torch.autograd.backward(edges, boundary.receive_back(message))
            pending.wait()
            assert ours.grad is not None
            gradient += ours.grad
    comm.all_reduce(gradient)
    (expected,) = torch.autograd.grad(sum((made[name] * w).sum() for name, w in zip(made, weights, strict=True)), image)
    torch.testing.assert_close(gradient, 2 * expected, rtol=1e-12, atol=1e-12)


@on_ranks(5)
def test_only_what_wants_a_gradient_gets_one(comm: Communicator) -> None:
    """A leaf that took no part in the loss returns None; what wants no gradient returns nothing."""
    plan = PAIRS[1]
    ends = ends_of(comm, plan)
    if "sends" in ends:
        boundary, grid = ends["sends"]
        values = (spread(whole(2, 0), plan, grid), spread(whole(1, 1).requires_grad_(), plan, grid))
        pending, edges = boundary.send(FIRST, values, ("a", "b"))
        assert len(edges) == 1
        assert boundary.receive_back(FIRST) == [None]
    else:
        boundary, _ = ends["receives"]
        arrival = boundary.receive(FIRST)
        assert [value.requires_grad for value in arrival.values] == [False, True]
        pending = boundary.send_back(FIRST, arrival.leaves)
    pending.wait()


@on_ranks(2)
def test_values_that_change_from_microbatch_to_microbatch_are_explained(comm: Communicator) -> None:
    """Other values than before, of the same kind."""
    plan = PAIRS[0]
    ends = ends_of(comm, plan)
    if "receives" in ends:
        assert ends["receives"][0].receive(FIRST).values[1] == 1
        return
    boundary, _ = ends["sends"]
    pending, _ = boundary.send(FIRST, (whole(1, 0), 1), ("x", "number"))
    words = (
        "^stage 0 hands on other values than it did for an earlier microbatch of the same shape.*cannot be cut there$"
    )
    with pytest.raises(ValueError, match=words):
        boundary.send(StageMessage("kind", 1), (whole(1, 0), 2), ("x", "number"))
    pending.wait()


@on_ranks(2)
def test_receives_may_be_posted_in_any_order(comm: Communicator) -> None:
    """Microbatches of which the later ones are expected first; what comes is their number."""
    plan = PAIRS[0]
    ends = ends_of(comm, plan)
    messages = [StageMessage("kind", number) for number in range(4)]
    pending, found = [], []
    for number, message in enumerate(messages):
        if "sends" in ends:
            value = torch.full((1, 1, 2, 2), float(number), requires_grad=True)
            pending.append(ends["sends"][0].send(message, (value,), ("x",))[0])
    if "sends" in ends:
        for message in reversed(messages):
            ends["sends"][0].expect(message, back=True)
        found = [float(ends["sends"][0].receive_back(message)[0][0, 0, 0, 0]) for message in messages]
    else:
        boundary = ends["receives"][0]
        arrivals = [boundary.receive(messages[0])]
        for message in reversed(messages[1:]):
            boundary.expect(message)
        arrivals += [boundary.receive(message) for message in messages[1:]]
        found = [float(arrival.values[0].detach()[0, 0, 0, 0]) for arrival in arrivals]
        for message, arrival in zip(messages, arrivals, strict=True):
            arrival.leaves[0].grad = arrival.leaves[0].detach() * 10
            pending.append(boundary.send_back(message, arrival.leaves))
    for one in pending:
        one.wait()
    assert found == [[0.0, 10.0, 20.0, 30.0], [0.0, 1.0, 2.0, 3.0]][comm.rank]
