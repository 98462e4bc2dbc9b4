"""A model whose leading part is streamed trains as plain PyTorch does, by every plan."""

import itertools
import math
import os
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import EACH_NORM, StreamOptions
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import Task, check, engine_of, model_of, step, train

import_torchvision()
from torchvision.ops import SqueezeExcitation  # noqa: E402

ONE = (1, 1)
SKIPPING = Task("skipping", (37, 43), batch=4, stream=StreamOptions((3, 2)), balance=(9, 8))

PLANS = {
    "one rank": Plan(),
    "microbatches": Plan(microbatches=2),
    "tiles": Plan(((1, 2),)),
    "tiles and ZeRO 2": Plan(((2, 2),), zero=2),
    "two stages": Plan((ONE, ONE), microbatches=2),
    "tiles, then one": Plan(((2, 1), ONE), microbatches=2),
    "replicas": Plan(((1, 2),), data=2),
    "ZeRO 3": Plan(((1, 2),), data=2, zero=3),
    "GEMS": Plan((ONE, ONE), microbatches=1, bidirectional=1),
    "zero-bubble": Plan((ONE, ONE), microbatches=4, schedule="zero-bubble"),
    "ways of the batch": Plan(((1, 2), ONE), (2, 1), microbatches=2),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sample(2)
def test_every_plan_equals_plain_pytorch(ranks: Ranks, name: str) -> None:
    check(ranks, SKIPPING, PLANS[name])


class _Mix(nn.Module):
    """Hands on two tensors, of what it was given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        first, second = x if isinstance(x, tuple) else (x, x[:, :1])
        found = self.norm(self.conv(first)).relu()
        return found + second, found


class _Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.last((x[0] * x[1]).mean((2, 3)))


class Paired(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(_Mix(3), _Mix(4), _Mix(4), _Mix(4), _Join())


@pytest.mark.parametrize("plan", ["tiles", "two stages"])
@pytest.mark.sample(1)
def test_values_that_are_nests(ranks: Ranks, plan: str) -> None:
    """A pair is handed on, from segment to segment and from stage to stage, as AmoebaNet's cells do."""
    task = Task(Paired, (24, 26), stream=StreamOptions((2, 2), "2", segments=3), balance=(4, 1))
    check(ranks, task, PLANS[plan])


class Exciting(nn.Sequential):
    """Squeeze-and-excite, and group and instance norms: means over the whole image within a block."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            SqueezeExcitation(8, 4),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 8, 3, 2, padding=1),
            SqueezeExcitation(8, 4),
            nn.InstanceNorm2d(8, affine=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )


class Writes(nn.Module):
    """A block that writes to its input, which is alive behind it, and to what its norm gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(self.relu(x)))  # x too is cut off at zero
        z = self.other(x)
        y += x
        return self.relu(y) * z


class Written(nn.Sequential):
    def __init__(self) -> None:
        first, pool = nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
        super().__init__(first, Writes(), nn.Sequential(Writes(), Writes()), pool, nn.Flatten(), nn.Linear(4, 3))


class Again(nn.Module):
    """The image itself is read again: behind a norm, and by what is not streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.first(x)) + x)
        return self.head(self.pool(self.other(self.second(y)) * x).flatten(1))


ALONE = {
    "images again": Task(Again, (24, 26), stream=StreamOptions((2, 2), "other"), balance=(6, 4)),
    "skipping": SKIPPING,
    "in place": Task(Written, (24, 26), stream=StreamOptions((2, 2), "2"), balance=(4, 3)),
    "pairs": Task(Paired, (24, 26), stream=StreamOptions((2, 2), "2"), balance=(4, 1)),
    "exciting": Task(Exciting, (24, 26), stream=StreamOptions((2, 3), "6"), balance=(7, 3)),
}


ALWAYS = [("disk", "in place", "one rank"), ("device", "images again", "tiles, then one")]


@pytest.mark.parametrize(
    ("where", "task", "name"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.exhaustive)
        for each in itertools.product(
            ("device", "disk"), ALONE, ("one rank", "tiles and ZeRO 2", "tiles, then one", "GEMS", "microbatches")
        )
    ],
)
def test_each_norm_is_a_segment(ranks: Ranks, where: str, task: str, name: str) -> None:
    """Blocks are cut before and behind their norms, also where they write in place; outputs are kept in files."""
    chosen = ALONE[task]
    assert chosen.stream is not None
    stream = replace(chosen.stream, segments=EACH_NORM, keep=Keep(where))
    check(ranks, replace(chosen, stream=stream), PLANS[name])


class Scaled(Writes):
    """A block whose forward reads a number of Python's."""

    scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ScaledBlocks(nn.Sequential):
    def __init__(self) -> None:
        first, pool = nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
        super().__init__(first, Scaled(), Scaled(), pool, nn.Flatten(), nn.Linear(4, 3))


@on_ranks(1)
def test_what_a_cut_block_reads_may_not_change(comm: Communicator) -> None:
    task = Task(ScaledBlocks, (24, 26), stream=StreamOptions((2, 2), "2", segments=EACH_NORM), balance=(6,))
    engine = engine_of(comm, task, Plan())
    step(engine, task, 0)
    engine.stages.modules_of[0].get_submodule("1").scale = 2.0
    words = r"^the attribute 1\.scale of ScaledBlocks has changed since the model was cut"
    with pytest.raises(Refusal, match=words):
        step(engine, task, 1)


SEEN: list[int] = []


def _see(module: Any, x: Tensor) -> Tensor:
    SEEN.append(1)
    module.seen.append(2)
    module.factor = module.factor.lerp(x.detach().mean(), 0.5)
    return x * len(SEEN) * len(module.seen) * (2 + module.factor)


def _replace(module: Any, x: Tensor) -> Tensor:
    if module.training:
        module.mean = 0.9 * module.mean + 0.1 * x.detach().mean((0, 2, 3), keepdim=True)
    return x - module.mean


def _cache(module: Any, x: Tensor) -> Tensor:
    if module.cache is None:
        module.cache = torch.full((4, 1, 1), 2, dtype=x.dtype)
    module.scale = math.nan  # as a clock, not the same twice
    return x * module.cache


def _write(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.weight.mul_(0.5)
    return x * module.weight.detach()


def _hook(module: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: setattr(module, "scale", 0.5))
    return x * module.scale


class Changes(nn.Module):
    """Changes something as it runs."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.weight, self.scale, self.how = nn.Parameter(torch.ones(())), 1.0, how
        self.seen, self.factor = list[int](), torch.ones((), dtype=torch.float64)
        SEEN.clear()
        self.register_buffer("mean", torch.zeros(1, 4, 1, 1))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def changes(how: Any) -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), Changes(how), nn.Conv2d(4, 4, 3, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def changing(how: Any) -> Task:
    return Task(partial(changes, how), (24, 26), stream=StreamOptions((2, 2), "1"), balance=(2, 4))


@pytest.mark.parametrize(
    ("how", "plan"), [*itertools.product((_replace, _cache), ("tiles", "two stages")), (_see, "tiles")]
)
def test_what_is_replaced_or_noted_is_as_before_for_the_next_tile(ranks: Ranks, how: Any, plan: str) -> None:
    check(ranks, changing(how), PLANS[plan])


@pytest.mark.parametrize("how", [_write, _hook])
def test_what_a_tile_changes_for_the_next_is_refused(ranks: Ranks, how: Any) -> None:
    task = replace(changing(how), balance=(6,))
    for said in ranks(2).run(refused, task, PLANS["tiles"]):
        assert said.startswith("the streamed part of the model does not do the same when a tile")


def refused(comm: Communicator, task: Task, plan: Plan) -> str:
    with pytest.raises(Refusal) as found:
        train(comm, task, plan)
    return str(found.value)


class _Full:
    """`posix_fallocate` of a disk on which so many files more have room."""

    def __init__(self, room: int) -> None:
        self.room, self.reserve = room, os.posix_fallocate

    def __call__(self, *file: int) -> None:
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")
        self.reserve(*file)


@pytest.mark.parametrize("room", [0, 4, *(pytest.param(room, marks=pytest.mark.exhaustive) for room in (1, 40))])
@on_ranks(2)
def test_all_ranks_learn_that_the_disk_of_one_is_full(comm: Communicator, room: int) -> None:
    """In forward, for a halo of the other rank, and in backward."""
    stream = StreamOptions((2, 2), "2", segments=EACH_NORM, keep=Keep("disk"))
    task = Task(Written, (24, 26), stream=stream, balance=(4, 3))
    full = _Full(room if comm.rank == 1 else 10_000)
    with patch.object(os, "posix_fallocate", full), pytest.raises(Refusal) as refused:
        train(comm, task, PLANS["tiles"])
    said = str(refused.value)
    assert "there is no room for" in said
    assert "name another folder by the variable TMPDIR" in said


AMOEBANET = Task("amoebanetd", (96, 96), num_steps=2, model_options=(("num_layers", 3), ("num_filters", 16)))


@pytest.mark.parametrize("plan", ["one rank", pytest.param("two stages", marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_reductions_that_drop_their_first_row(ranks: Ranks, plan: str) -> None:
    """AmoebaNet pads, and slices a row off, beside branches that do not."""
    stream = StreamOptions((1, 2), "reduction1", segments=3)
    check(ranks, replace(AMOEBANET, stream=stream, balance=(6, 3)), PLANS[plan])


ODD = (301, 314)
MODELS = {
    "resnet18": (Task("resnet18", ODD), "layer3", 9),
    "resnet_v2": (Task("resnet_v2", ODD, model_options=(("depth", 20),)), "stage2_block2", 6),
    "amoebanetd": (
        Task("amoebanetd", ODD, model_options=(("num_layers", 3), ("num_filters", 16))),
        "reduction1",
        6,
    ),
    "densenet121": (Task("densenet121", ODD), "features.transition1", 16),
    "unet": (Task("unet", ODD, dense=True, model_options=(("num_filters", 4), ("depth", 2))), "decoder.0", 31),
    "convnext_tiny": (Task("convnext_tiny", ODD, model_options=(("stochastic_depth_prob", 0.0),)), "features.5", 23),
    "resnet3d": (Task("resnet3d", (37, 42, 45)), "stage2_block3", 10),
}
WIDE_PLANS = {
    "one rank": ("one rank", (2, 2), 1),
    "one rank, 5x7": ("one rank", (5, 7), 4),
    "1x2": ("tiles", (3, 2), 3),
    "2x2 and ZeRO 2": ("tiles and ZeRO 2", (2, 2), 4),
    "two stages": ("two stages", (2, 3), 2),
    "norms alone": ("tiles", (2, 2), EACH_NORM),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", WIDE_PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_models(ranks: Ranks, name: str, plan: str) -> None:
    """At sizes that nothing divides; one step, as more would multiply what float64 rounds."""
    task, until, first = MODELS[name]
    of_plan, counts, segments = WIDE_PLANS[plan]
    chosen, volumes = PLANS[of_plan], len(task.size) == 3
    if volumes:
        chosen = replace(chosen, tiles=tuple((1, *grid) for grid in chosen.tiles))
    units = len(Cuttable(outline(lambda: model_of(task))))
    stream = StreamOptions(
        (2, *counts) if volumes else counts, until, segments=5 if volumes and segments < EACH_NORM else segments
    )
    task = replace(task, batch=2, num_steps=1, stream=stream, balance=(first, units - first))
    check(ranks, task, chosen)
