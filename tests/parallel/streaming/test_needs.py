"""What streaming is said to take, against what the tensors of a real training step come to."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.comm import Communicator, world
from mpi4dl.engine import Engine
from mpi4dl.estimate.plan_estimate import Estimator
from mpi4dl.geometry import Box
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.meter import OperatorMeter, UnitCosts
from mpi4dl.parallel.costs.sites import Site
from mpi4dl.parallel.costs.units import StageBytes, count_units
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions, choose_leading_part
from mpi4dl.parallel.streaming.margins import CannotStream
from mpi4dl.parallel.streaming.memory_limit import (
    SegmentNeeds,
    StreamConstraints,
    StreamNeeds,
    choose_tiles,
    needs_of,
)
from mpi4dl.parallel.streaming.stream import TOUCHED_BYTES
from tests.pool.ranks import Ranks
from tests.support.counting import count_flops

IMAGE = (1, 3, 640, 640)
CASES = (
    pytest.param(StreamOptions((4, 4), "stage2_block2", "exact", 1), (1, 1), marks=pytest.mark.exhaustive),
    (StreamOptions((4, 2), "stage3_block2", "exact", 5), (1, 2)),
    pytest.param(StreamOptions((2, 4), "stage2_block2", "running", 1), (2, 1), marks=pytest.mark.exhaustive),
    (StreamOptions((3, 3), "stage2_block1", "frozen", 2), (1, 1)),
)


def build() -> nn.Module:
    return models.build("small_resnet", 10)


class Zeros:
    """Images that are read by another thread, of which the meter does not know."""

    shape, dtype, draws = torch.Size(IMAGE), torch.float32, False

    def read(self, box: Box) -> Tensor:
        return torch.zeros(box.shape[0], 3, *box.shape[1:])


def foreseen(options: StreamOptions, plan: Plan) -> tuple[StreamNeeds, Cuttable]:
    cuttable = Cuttable(outline(build).train())
    opening = choose_leading_part(cuttable, len(cuttable), options, plan.shape(0), IMAGE)
    return needs_of(opening, cuttable.model, plan.shape(0), IMAGE), cuttable


def peak_of_training(comm: Communicator, options: StreamOptions, plan: Plan) -> int:
    """The most bytes of tensors in a step, that of the parameters not among them."""
    torch.manual_seed(0)
    held = split(build, plan, comm, image=IMAGE, stream=options)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    meter, targets = OperatorMeter(), torch.zeros(1, dtype=torch.int64)
    engine.step([Zeros()], targets, IMAGE[2:])  # rehearses, on shapes
    for parameter in held.parameters():
        parameter.grad = None
    with meter:
        engine.step([Zeros()], targets, IMAGE[2:])
    return meter.peak_bytes


@pytest.mark.parametrize(("options", "tiles"), CASES)
@pytest.mark.exhaustive
def test_it_is_what_a_step_takes(ranks: Ranks, options: StreamOptions, tiles: tuple[int, int]) -> None:
    plan = Plan((tiles,))
    needs, cuttable = foreseen(options, plan)
    without_reading = replace(needs, segments=tuple(segment._replace(read_bytes=0) for segment in needs.segments))
    found = max(ranks(plan.num_ranks).run(peak_of_training, options, plan))
    stage = without_reading.stage(count_units(cuttable, Site.of(plan, 0, IMAGE)), len(cuttable))
    gradients = sum(p.nbytes for p in cuttable.model.parameters())  # of which some are there when a step begins
    activations = stage.kept + stage.working
    assert 0.9 * activations < found < 1.1 * (activations + gradients)


def test_smaller_tiles_take_less_and_repeat_more() -> None:
    few, many = (foreseen(StreamOptions(counts, "stage1_block2"), Plan())[0] for counts in ((2, 2), (8, 8)))
    assert few.margin == pytest.approx(many.margin, abs=8)
    assert many.segments[0].tile_bytes < few.segments[0].tile_bytes / 3
    assert many.work() > few.work()
    assert many.segments[0].output_bytes == few.segments[0].output_bytes


@pytest.mark.parametrize(("limit", "expected"), [(100, (1, 1)), (60, (2, 2)), (45, (3, 3)), (44, None)])
def test_tiles_that_need_more_again_as_they_get_smaller(limit: int, expected: tuple[int, int] | None) -> None:
    """Beside small tiles margins are large, so that fewer layers are streamed: those that fit lie before these."""
    needs = StreamNeeds((SegmentNeeds(9, 0, 0, 0, 0, 0, 0, 8.0),), ((0, 2),), StreamOptions((1, 1)), spread=False)
    taken = {1: 99, 2: 60, 3: 45}
    tried: list[tuple[int, ...]] = []

    def needs_for(options: StreamOptions) -> StreamNeeds:
        tried.append(options.counts)
        return needs

    def bytes_of(_: StreamNeeds) -> int:
        return taken.get(tried[-1][0], 80) if _ is needs else 0

    constraints = StreamConstraints(segments=1)
    if expected is None:
        with pytest.raises(CannotStream, match="no tiles keep a rank within"):
            choose_tiles((1024, 1024), constraints, needs_for, bytes_of, limit)
    else:
        assert choose_tiles((1024, 1024), constraints, needs_for, bytes_of, limit).options.counts == expected


@pytest.mark.parametrize("until", ["0", "1"])
def test_outputs_are_those_of_the_rank_with_most_of_what_is_streamed(until: str) -> None:
    """Of 50 rows three ranks have 16, 17 and 17."""

    def build() -> nn.Module:
        body = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, 2, 1)
        return nn.Sequential(*body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))

    cuttable, shape, image = Cuttable(outline(build)), Plan(((3, 1),)).shape(0), (1, 3, 50, 20)
    part = choose_leading_part(cuttable, len(cuttable), StreamOptions((2, 1), until, "exact", 1), shape, image)
    (segment,) = needs_of(part, cuttable.model, shape, image).segments
    assert segment.output_bytes == (4 * 17 * 20 if until == "0" else 6 * 9 * 10) * torch.float32.itemsize


def test_statistics_are_those_of_the_norms() -> None:
    """The stem, and two blocks of two norms each: five in a row."""
    (segment,) = foreseen(StreamOptions((2, 2), "stage1_block2", "exact"), Plan())[0].segments
    assert (segment.forward_statistics, segment.backward_statistics) == (5, 5)
    (segment,) = foreseen(StreamOptions((2, 2), "stage1_block2", "running"), Plan())[0].segments
    assert (segment.forward_statistics, segment.backward_statistics) == (0, 0)


def test_what_tiles_are_chosen_by_is_what_they_take() -> None:
    """Of four images: gradients of parameters, which are large here beside a tile, do not grow with them."""
    cuttable, image = Cuttable(outline(partial(models.build, "resnet_v2", 10, depth=11))), (4, 3, 64, 64)
    sgd, one = partial(torch.optim.SGD, lr=0.1), StreamConstraints(segments=1)
    estimator = Estimator(cuttable, image, Profiler(), torch.device("cpu"), sgd, constraints=one)
    chosen = estimator.choose_tiles(Plan(), (len(cuttable),), float("inf"))
    part = choose_leading_part(cuttable, len(cuttable), chosen.options, Plan().shape(0), image)
    assert chosen.needs == needs_of(part, cuttable.model, Plan().shape(0), image)


def test_phases_of_a_step_are_not_added_up() -> None:
    one, other = SegmentNeeds(9, 40, 60, 0, 10, 0, 0, 8.0), SegmentNeeds(3, 0, 50, 12, 4, 2, 4, 4.0)
    needs = StreamNeeds((one, other), ((0, 2), (2, 3)), StreamOptions((2, 2)), spread=False)
    assert needs.stage((), 3) == StageBytes(12, 12 + 10 + 100 - 12)
    rest = UnitCosts(kept_bytes=200, forward_bytes=30)  # of the unit behind
    assert needs.stage((*[UnitCosts(output_bytes=4)] * 3, rest), 4) == StageBytes(212, 30)


def test_seconds_grow_by_margins_and_passes() -> None:
    one, other = SegmentNeeds(9, 0, 0, 0, 0, 0, 0, 8.0), SegmentNeeds(3, 0, 0, 0, 0, 2, 4, 4.0)
    needs = StreamNeeds((one, other), ((0, 2), (2, 3)), StreamOptions((2, 2)), spread=True)
    flops = [3.0, 1.0, 4.0, 9.0]  # of both ranks together
    unit = UnitCosts(output_bytes=7, forward_seconds=1.0, backward_seconds=2.0)
    column = needs.column(tuple(unit._replace(flops=each / 2) for each in flops), 2)
    assert [each.forward_seconds for each in column] == [2.0, 2.0, 2.0, 1.0]
    assert [each.backward_seconds for each in column] == [2.0 + 4.0, 2.0 + 4.0, 5.0 + 3 * 2.0, 2.0]
    assert {each.output_bytes for each in column} == {7}


def test_segments_within_a_unit_share_its_seconds() -> None:
    """Three quarters of a unit's FLOPs are without statistics; a norm of a quarter makes two passes more."""
    layers, norm = SegmentNeeds(0, 0, 0, 0, 0, 0, 0, 6.0), SegmentNeeds(0, 0, 0, 0, 0, 2, 2, 2.0)
    needs = StreamNeeds((layers, norm), ((0, 1), (0, 1)), StreamOptions((2, 2)), spread=False)
    (unit,) = needs.column((UnitCosts(flops=8.0, forward_seconds=1.0, backward_seconds=2.0),), 1)
    forward = 0.75 + 0.25 * 2
    assert (unit.forward_seconds, unit.backward_seconds) == (forward, 0.75 + 0.25 * 3 + 2.0 * forward)


def test_outputs_in_files_take_no_memory() -> None:
    segments = (SegmentNeeds(9, 40, 60, 0, 1000, 0, 0, 8.0), SegmentNeeds(3, 0, 50, 1200, 4, 2, 4, 4.0))
    in_memory, in_files = (
        StreamNeeds(segments, ((0, 2), (2, 3)), StreamOptions((2, 2), keep=Keep(where)), spread=False)
        for where in ("device", "disk")
    )
    assert in_memory.stage((), 3) == StageBytes(1200, 1200 + 4 + 50)  # the gradient of what is between, too
    assert in_files.stage((), 3) == StageBytes(0, 100 + TOUCHED_BYTES)
    assert in_files.kept_bytes == 1200


def test_without_a_margin_tiles_compute_what_the_model_computes() -> None:
    options = StreamOptions((1, 1), "stage1_block2")
    needs, cuttable = foreseen(options, Plan())
    flops = count_flops(cuttable, IMAGE)
    assert needs.segments[0].flops == pytest.approx(sum(flops[: needs.num_units]), rel=1e-3)


class Tokens(nn.Module):
    """Patches in one dim, as the embeddings of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).flatten(2).transpose(1, 2)


def test_a_model_whose_first_unit_makes_tokens_is_refused() -> None:
    """There is no end before it: the refusal comes as the part is chosen, not from a tile."""

    def build() -> nn.Module:
        return nn.Sequential(Tokens(), nn.Linear(4, 4), nn.Linear(4, 2))

    with pytest.raises(CannotStream, match="would end with 0, where several axes"):
        split(build, Plan(), world(), image=(2, 3, 32, 32), stream=StreamOptions((2, 2)))
