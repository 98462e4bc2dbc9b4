"""Patches that ranks share and run a few at a time train as one batch of all of them does in plain PyTorch."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.models.patches import AGGREGATORS, PatchModel, headless
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import EACH_NORM
from mpi4dl.parallel.streaming.patches import PatchOptions, stream_patches
from mpi4dl.parallel.streaming.stream_tiles import Pixels
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import EXACT, assert_close

SIZE = (70, 101)
CLASSES = 3
STEPS = 3


class Slides(Pixels):
    """Images in memory, of which some can be taken, as an engine does for each microbatch."""

    def __getitem__(self, positions: Any) -> "Slides":
        return Slides(self.values[positions])


@dataclass(frozen=True)
class Case:
    encoder: str = "small"
    aggregator: str = "gated-attention"
    patch: int = 16
    min_tissue: float = 0.0
    options: PatchOptions = field(default_factory=lambda: PatchOptions(3))
    plan: Plan = field(default_factory=lambda: Plan(((1, 2),)))
    batch: int = 2
    recompute: bool = False
    norm: bool = False
    hooked: bool = False


class Summed(nn.Conv2d):
    """Its weight is the sum of two parameters, which get one gradient."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.change = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight + self.change, None, self.stride, self.padding)


class Small(nn.Sequential):
    """Batch norm, and dropout of channels, whose mask is that of all patches."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, 2, 1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            Summed(6, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


def build(case: Case) -> PatchModel:
    torch.manual_seed(0)
    if case.encoder == "small":
        encoder: nn.Module = Small()
        features = 8
    else:
        options: Any = {"image_size": case.patch} if case.encoder.startswith("vit") else {}
        encoder = (
            import_torchvision().models.VisionTransformer(case.patch, 8, 2, 2, 12, 24, num_classes=7)
            if case.encoder == "vit"
            else models.build(case.encoder, 7, **options)
        )
        features = headless(encoder, 7)
    norm = nn.BatchNorm1d(features, affine=False) if case.norm else None
    aggregator = AGGREGATORS[case.aggregator](features, CLASSES)
    model = PatchModel(encoder, aggregator, case.patch, case.min_tissue, 0.5, norm).double()
    for p in model.parameters() if case.hooked else ():
        p.register_hook(lambda gradient: torch.tanh(30 * gradient))
    return model


def batch_of(case: Case, number: int) -> tuple[Tensor, Tensor]:
    """Noise on grey glass: the second image has none, and the first a corner that is bare."""
    generator = torch.Generator().manual_seed(number)
    images = torch.rand((case.batch, 3, *SIZE), generator=generator, dtype=torch.float64)
    if case.min_tissue:
        images[0, :, :30, :50] = 0.5
        images[1] = images[1, :1]
    return images, torch.randint(CLASSES, (case.batch,), generator=generator)


def plain(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(7)
    for number in range(STEPS):
        images, targets = batch_of(case, number)
        optimizer.zero_grad()
        losses.append(0.0)
        for some, wanted in zip(
            images.chunk(case.plan.microbatches), targets.chunk(case.plan.microbatches), strict=True
        ):
            loss = F.cross_entropy(model(some), wanted) / case.plan.microbatches
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    images, targets = batch_of(case, STEPS)
    with torch.no_grad():
        evaluated = F.cross_entropy(model(images), targets).item()
    return losses, gradients, model.state_dict(), evaluated


def train(comm: Communicator, case: Case) -> Any:
    torch.manual_seed(0)
    model = build(case)
    stream_patches(model, case.options)
    held = LocalStages.whole(model, case.plan, comm, stream=case.options)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
    engine = Engine(held, case.plan, optimizer, F.cross_entropy, comm=comm, recompute=case.recompute)
    torch.manual_seed(7)
    losses = []
    for number in range(STEPS):
        images, targets = batch_of(case, number)
        tiles = [Slides(images[slice(*read.box.batch)]) for read in engine.reads(len(images), SIZE)]
        losses.append(engine.step(tiles, targets, SIZE).loss)
    gradients, state = engine.gather_gradients(), engine.gather_state()
    images, targets = batch_of(case, STEPS)
    tiles = [Slides(images[slice(*read.box.batch)]) for read in engine.reads(len(images), SIZE, training=False)]
    return losses, gradients, state, engine.evaluate([(tiles, targets)], SIZE).loss


def progress_of(comm: Communicator, case: Case) -> list[str]:
    model = build(case)
    stream_patches(model, case.options)
    held = LocalStages.whole(model, case.plan, comm, stream=case.options)
    engine = Engine(held, case.plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    heard: list[str] = []
    engine.executor.progress = heard.append
    images, targets = batch_of(case, 0)
    engine.step([Slides(images)], targets, SIZE)
    return [each for each in heard if each]


class Scaled(Small):
    """What it returns depends on its own number, and on one within."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self[2] = Shifted()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) * self.factor
        return found


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = 0.5
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + self.shift).relu()
        return found


@pytest.mark.parametrize(("path", "name"), [("", "factor"), ("2", "shift")])
@pytest.mark.parametrize("segments", [1, 3, EACH_NORM])
@on_ranks(1)
def test_a_change_of_what_segments_depend_on_is_refused(
    comm: Communicator, path: str, name: str, segments: int
) -> None:
    """A single segment runs the encoder's own code. So does one that has a block as a whole."""
    torch.manual_seed(0)
    case = Case(plan=Plan(), options=PatchOptions(5, segments=segments))
    model = PatchModel(Scaled(), AGGREGATORS["mean"](8, CLASSES), case.patch, 0.0, 0.5, None).double()
    stream_patches(model, case.options)
    held = LocalStages.whole(model, case.plan, comm, stream=case.options)
    engine = Engine(held, case.plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    images, targets = batch_of(case, 0)
    engine.step([Slides(images)], targets, SIZE)
    setattr(model.encoder.get_submodule(path), name, 3.0)
    follows = segments == 1 or (segments == 3 and path != "")
    words = f"{name} of.* has changed since the model was cut"
    with nullcontext() if follows else pytest.raises(Refusal, match=words):
        engine.step([Slides(images)], targets, SIZE)


def check(ranks: Ranks, case: Case) -> None:
    losses, gradients, state, evaluated = ranks(case.plan.num_ranks).run(train, case)[0]
    expected_losses, expected_gradients, expected_state, expected = plain(case)
    assert losses == pytest.approx(expected_losses, rel=EXACT)
    assert gradients.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        assert_close(gradients[name], value, EXACT, name)
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        assert_close(state[name], value, EXACT, name)
    assert evaluated == pytest.approx(expected, rel=EXACT)


SMALL = Case()
CASES = {
    "one rank": replace(SMALL, plan=Plan()),
    "two ranks": SMALL,
    "mean": replace(SMALL, aggregator="mean"),
    "max": replace(SMALL, aggregator="max"),
    "transformer": replace(SMALL, aggregator="transformer"),
    "tissue": replace(SMALL, min_tissue=0.6),
    "segments": replace(SMALL, options=PatchOptions(5, segments=3)),
    "each norm": replace(SMALL, options=PatchOptions(5, segments=EACH_NORM)),
    "each norm of ResNet-18, on disk": replace(
        SMALL, encoder="resnet18", patch=48, options=PatchOptions(2, segments=EACH_NORM, keep=Keep("disk"))
    ),
    "replicas, ZeRO 3": replace(SMALL, plan=Plan(((1, 2),), data=2, zero=3), batch=4),
    "ResNet-18": replace(SMALL, encoder="resnet18", patch=48, options=PatchOptions(2, segments=5)),
    "recomputed": replace(SMALL, encoder="small_resnet", patch=48, options=PatchOptions(4, segments=2), recompute=True),
    "uneven replicas, tissue": replace(SMALL, plan=Plan(((1, 2),), data=2), batch=3, min_tissue=0.6),
    "ways and microbatches": replace(SMALL, plan=Plan(((1, 1),), (2,), microbatches=2), batch=4),
    "fewer patches than ranks": replace(SMALL, plan=Plan(((1, 4),)), patch=64, batch=1),
    "ViT": replace(SMALL, encoder="vit", patch=32),
    "hooks on parameters": replace(SMALL, plan=Plan(), hooked=True),
    "features normalized, replicas": replace(SMALL, norm=True, plan=Plan(((1, 2),), data=2), batch=4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name == "recomputed" else name for name in CASES]
)
@pytest.mark.sample(2)
def test_patches_equal_one_batch_of_all(ranks: Ranks, name: str) -> None:
    check(ranks, CASES[name])


def test_every_tile_is_reported(ranks: Ranks) -> None:
    """24 patches a slide, 5 at once on each of two ranks; two batch norms, each a statistics pass in each direction."""
    heard = ranks(2).run(progress_of, replace(SMALL, options=PatchOptions(5)))[0]
    assert len(heard) == 5 * (3 + 3)
    assert heard[0] == "forward, pass 1 of 3, tile 1 of 5"
    assert heard[-1] == "backward, pass 3, tile 5 of 5"
    heard = ranks(2).run(progress_of, replace(SMALL, options=PatchOptions(5, "frozen")))[0]
    assert heard[4:6] == ["forward, pass 1 of 1, tile 5 of 5", "backward, pass 1, tile 1 of 5"]
