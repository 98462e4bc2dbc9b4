"""Replicas with images of their own sizes equal a plain PyTorch loop that takes one image after the other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, StepResult
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.inputs import Microbatch, OwnSizes
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT

SIZES = ((40, 24), (17, 33), (26, 50), (35, 31))
NUM_STEPS, CLASSES = 3, 3
DATA_2 = Plan(data=2, microbatches=2, local_batches=True)
MORE: tuple[tuple[Plan, str | None, tuple[int, ...]], ...] = (
    (replace(DATA_2, zero=1), None, (0,)),
    (replace(DATA_2, zero=2), None, (0,)),
    (replace(DATA_2, tiles=((1, 2),)), None, ()),
    (replace(DATA_2, tiles=((2, 1),), zero=2), "exact", ()),
    (Plan(((1, 1), (1, 1)), data=2, microbatches=2, local_batches=True), None, ()),
    (Plan(data=4, local_batches=True), "running", ()),
)


class _Norm(nn.BatchNorm2d):
    """Normalizes by the running statistics, and keeps the moments of each image until `update`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self.seen.append((x.detach().mean((0, 2, 3)), x.detach().transpose(0, 1).flatten(1).var(1)))
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def update(self) -> None:
        for mean, variance in self.seen:
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
            self.num_batches_tracked += 1
        self.seen = []


def model(norms: str = "exact") -> nn.Module:
    torch.manual_seed(2)
    layers = [
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, 1, 1), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, CLASSES),
    ]  # fmt: skip
    found = nn.Sequential(*layers).double()
    for norm in (found[1], found[4]):
        norm.running_mean += 0.1
        if norms == "running":
            norm.__class__, norm.seen = _Norm, []
        if norms == "frozen":
            norm.eval()
    return found


def batch(step: int, count: int = 4) -> tuple[list[Tensor], Tensor, tuple[tuple[int, ...], ...]]:
    """Images whose sizes change from step to step, and a class for each."""
    torch.manual_seed(step)
    sizes = tuple(SIZES[(step + i) % 4] for i in range(count))
    return [torch.randn(3, *size, dtype=torch.float64) for size in sizes], torch.randint(CLASSES, (count,)), sizes


def tiles(engine: Engine, images: list[Tensor], sizes: Any, training: bool = True) -> list[Tensor]:
    reads = engine.reads(len(images), OwnSizes(sizes), training)
    return [
        torch.stack([images[i][(..., *(slice(*side) for side in box.space))] for i in range(*box.batch)])
        for _, box in reads
    ]


def on_ranks(
    comm: Communicator, plan: Plan, stream: StreamOptions | None, lost: tuple[int, ...] = ()
) -> tuple[list[StepResult], dict[str, Tensor], list[Any], Any]:
    if stream is None and plan.num_stages == 1:
        stages = LocalStages.whole(model(), plan, comm)
    else:
        stages = split(model, plan, comm, image=(1, 3, 40, 24), balance="flops", stream=stream, seed=2)
        for (name, value), there in zip(stages.own_state().items(), [model().state_dict()] * 99, strict=False):
            value.copy_(there[name])
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(stages, plan, optimizer, F.cross_entropy, comm=comm)
    steps = []
    for number in range(NUM_STEPS):
        images, targets, sizes = batch(number)
        kept = [i for i in range(4) if i not in lost]
        microbatches: list[Microbatch] = [each.without(lost) for each in plan.divide(4)]
        microbatches = [each for each in microbatches if not each.samples.empty]
        read = tiles(engine, images, sizes)
        of_tiles = engine.reads(4, OwnSizes(sizes))
        own = [tile for tile, (of, _) in zip(read, of_tiles, strict=True) if not of.without(lost).samples.empty]
        steps.append(engine.step(own, targets[kept], OwnSizes(tuple(sizes[i] for i in kept)), microbatches))
    engine.check_replicas()
    evaluated, outputs = [], []
    for count in (4, 1):
        images, targets, sizes = batch(7, count)
        given = (tiles(engine, images, sizes, False), targets, OwnSizes(sizes))
        evaluated.append(engine.evaluate([given]))
        (found,) = engine.predict([(given[0], count, OwnSizes(sizes))])
        outputs.append(found.whole)
    return steps, engine.gather_state() or {}, evaluated, outputs


def plain(norms: str, lost: tuple[int, ...] = ()) -> tuple[list[float], nn.Module]:
    found, losses = model(norms), []
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1, momentum=0.9)
    for number in range(NUM_STEPS):
        images, targets, _ = batch(number)
        kept = [i for i in range(4) if i not in lost]
        optimizer.zero_grad()
        total = 0.0
        for i in kept:
            loss = F.cross_entropy(found(images[i][None]), targets[i : i + 1]) / len(kept)
            loss.backward()
            total += loss.item()
        optimizer.step()
        if norms == "running":
            found[1].update()
            found[4].update()
        losses.append(total)
    return losses, found


def stream(norms: str) -> StreamOptions:
    return StreamOptions((2, 2), "5", norms)


@pytest.mark.parametrize(
    ("plan", "streamed", "lost"),
    [
        (DATA_2, None, ()),
        (DATA_2, None, (1, 2, 3)),
        (DATA_2, "exact", ()),
        (DATA_2, "running", ()),
        (replace(DATA_2, zero=3), "frozen", ()),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE),
    ],
)
def test_steps_and_evaluations_are_those_of_a_plain_loop_over_images(
    ranks: Ranks, plan: Plan, streamed: str | None, lost: tuple[int, ...]
) -> None:
    """Running statistics are updated after a step, in the order of the images, and used from the next step on."""
    options = None if streamed is None else stream(streamed)
    (steps, state, evaluated, outputs), *_ = ranks(plan.num_ranks).run(on_ranks, plan, options, lost)
    losses, found = plain(streamed or "exact", lost)
    assert [each.loss for each in steps] == pytest.approx(losses, rel=EXACT)
    for name, value in found.state_dict().items():
        assert torch.allclose(state[name], value, rtol=0, atol=EXACT), name
    found.eval()
    for count, evaluation, predicted in zip((4, 1), evaluated, outputs, strict=True):
        images, targets, _ = batch(7, count)
        with torch.no_grad():
            logits = torch.cat([found(image[None]) for image in images])
        assert torch.allclose(predicted, logits, rtol=0, atol=EXACT)
        assert evaluation.count == count
        assert evaluation.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=EXACT)
        assert evaluation.accuracy == pytest.approx((logits.argmax(1) == targets).double().mean().item())
