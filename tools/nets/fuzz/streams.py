"""Random parts of models, streamed over images of bare background, train and evaluate as plain PyTorch does.

Layers know places (parameters that begin as zeros, ones or numbers; masks; coordinates), draw random numbers from all
three generators, count, pad, or normalise.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from tests.parallel.streaming.test_norms import by_running_statistics
from tests.parallel.streaming.test_patches import Slides
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, assert_close
from tools.nets.fuzz.networks import CHANNELS, Coordinates, Dropout, Mask, Norm, Positions
from tools.nets.fuzz.trainings import seed_all

SIZE = (36, 60)
TILES = (4, 6)
Size = tuple[int, int]


def _positions(draws: random.Random, size: Size) -> nn.Module:
    of, begin = draws.choice(("row", "column", "channel", "place")), draws.choice(("zeros", "ones", "randn"))
    return Positions(size, of, begin, draws.choice(("add", "multiply", "gain")))


def _mask(draws: random.Random, size: Size) -> nn.Module:
    return Mask(size, draws.choice(("where", "fill", "multiply")))


def _coordinates(draws: random.Random, size: Size) -> nn.Module:
    """Beside the channels one of the rows' places, often with weights that begin as zero."""
    found = Coordinates(size)
    if draws.random() < 0.5:
        nn.init.zeros_(found.mix.weight.data[:, CHANNELS:])
    return found


class Noise(nn.Module):
    """A random number for all of the image, by some generator; or a branch that only it decides."""

    def __init__(self, draws: random.Random, size: Size) -> None:
        super().__init__()
        self.by = draws.choice(("python", "numpy", "torch", "own", "branch"))
        self.own = np.random.default_rng(3)
        self.weight = nn.Parameter(torch.zeros(1, 1, size[0], 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "branch":
            return x + self.weight if random.random() < 0.5 else x
        numbers: dict[str, Callable[[], Any]] = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand((), dtype=x.dtype, device=x.device),
            "own": self.own.random,
        }
        return x * (0.5 + numbers[self.by]())


class Counter(nn.Module):
    """Does something else from its second call on."""

    def __init__(self, draws: random.Random, size: Size) -> None:
        super().__init__()
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.scale / self.calls if self.calls > 1 else x


class LastNorm(nn.Module):
    """A layer norm over the channels, as ConvNeXt has it, and means of the whole image for a gate."""

    def __init__(self, draws: random.Random, size: Size) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.pad(y, (1, 1, 1, 1), value=0.5)[..., 1:-1, 1:-1] * self.gate(x.mean((2, 3))).sigmoid()[..., None, None]


class Rows(nn.Module):
    """Prefixes and flips along channels, which know no place; or, more rarely, what does."""

    def __init__(self, draws: random.Random, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size[0], 1))
        self.bias = nn.Parameter(torch.zeros(1, CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([second, first.sigmoid() + self.weight.cumsum(0)], 1).add_(self.bias)


def _norm(draws: random.Random, size: Size) -> nn.Module:
    return Norm(size, draws.choice(("batch", "group", "instance")), False)


def _dropout(draws: random.Random, size: Size) -> nn.Module:
    return Dropout(size, draws.choice(("pixels", "channels")), draws.choice((0.0, 0.3)))


LAYERS: tuple[Callable[[random.Random, Size], nn.Module], ...]
LAYERS = (_positions, _mask, _coordinates, Noise, Counter, LastNorm, Rows, _norm, _dropout)


class Block(nn.Sequential):
    """A convolution with a layer of some kind, and another one."""


def build(seed: int) -> nn.Module:
    draws, size = random.Random(seed), SIZE
    blocks = []
    for i in range(2):
        stride = draws.choice((1, 1, 2)) if i else 1
        conv = nn.Conv2d(CHANNELS if i else 3, CHANNELS, 3, stride, 1)
        size = (-(-size[0] // stride), -(-size[1] // stride))
        kinds = [LAYERS[(seed + i) % len(LAYERS)], draws.choice(LAYERS)]
        layers = [kind(draws, size) for kind in kinds[: 1 + draws.randrange(2)]]
        blocks.append(Block(conv, *layers, nn.GELU()))
    last = nn.Linear(4 * CHANNELS, 3)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), last).double()


def glass(number: int) -> Tensor:
    """Two slides of bare glass, in some colours or black, with a bit of tissue at an edge."""
    generator = torch.Generator().manual_seed(number)
    images = torch.zeros(2, 3, *SIZE, dtype=torch.float64) + torch.tensor((0.0, 0.7, 0.2)[number % 3]).double()
    images[:, :, :4, 40:45] = torch.rand((2, 3, 4, 5), generator=generator, dtype=torch.float64)
    return images


TARGETS = torch.tensor([1, 2])


def train(comm: Communicator, seed: int, norms: str, recompute: bool) -> Any:
    """Two steps and an evaluation: losses, and the last gradients and values."""
    plan, counts = Plan(((1, comm.size),)), (TILES[0], TILES[1] // comm.size)
    stream = StreamOptions(counts, "1", norms)
    held = split(lambda: build(seed), plan, comm, image=(2, 3, *SIZE), stream=stream, whole=("0", "1"))
    engine = Engine(
        held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm, recompute=recompute
    )
    seed_all(seed)
    losses = [engine.step([Slides(glass(i))], TARGETS, SIZE).loss for i in range(2)]
    gradients, state = engine.gather_gradients(), engine.gather_state()
    losses.append(engine.evaluate([([Slides(glass(2))], TARGETS)], SIZE).loss)
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
    return [*losses, *drawn], {key: g for key, g in (gradients or {}).items() if g is not None}, state


def plain(seed: int, norms: str) -> Any:
    seed_all(0)
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_all(seed)
    losses = []
    for i in range(2):
        optimizer.zero_grad()
        y, merge = by_running_statistics(model, glass(i)) if norms == "running" else (model(glass(i)), lambda: None)
        loss = F.cross_entropy(y, TARGETS)
        loss.backward()
        merge()
        optimizer.step()
        losses.append(loss.item())
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        losses.append(F.cross_entropy(model.eval()(glass(2)), TARGETS).item())
    return [*losses, float(torch.rand(())), random.random(), float(np.random.rand())], gradients, model.state_dict()


def cases() -> st.SearchStrategy[int]:
    """The seed of a model; the ranks, its norms and recomputation follow from it."""
    return st.integers(0, 10**6)


def problem(ranks: Ranks, seed: int) -> str | None:
    """What is wrong with a model of which two blocks are streamed."""
    num_ranks, norms, recompute = 1 + seed % 2, ("exact", "running")[seed // 2 % 2], bool(seed // 4 % 2)
    losses, gradients, state = ranks(num_ranks).run(train, seed, norms, recompute)[0]
    expected, theirs, values = plain(seed, norms)
    rounding = EXACT * max(float(gradient.abs().max()) for gradient in theirs.values())  # some cancel out
    try:
        assert losses == pytest.approx(expected, rel=EXACT, abs=EXACT)
        for key, value in theirs.items():
            assert_close(gradients.get(key, torch.zeros_like(value)), value, EXACT, key, rounding)
        for key, value in values.items():
            assert_close(state[key], value, EXACT, key, rounding)
    except AssertionError as error:
        return str(error)
    return None
