"""Random models in stages: ties, buffers, counters, random branches; they train as in plain PyTorch, or are refused."""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
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
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, ROUNDING, assert_close

WIDTH, VOCABULARY, LENGTH, BATCH, STEPS = 4, 9, 3, 8, 3
NUM_CALLS = 0


class Block(nn.Module):
    """A layer that is kept whole; `last` is the child that others call, or whose weight they use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Scaled(Block):
    """With a buffer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Tracking(Scaled):
    """With a buffer that counts."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale += 0.01
        return super().forward(x)


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Attending(Block):
    """With weights that a layer of PyTorch uses by name, as MultiheadAttention does those of `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = self.first.out_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, x, x, need_weights=False)[0]


class Counting(Block):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 3)


class Dropping(Block):
    """Leaves out some of its blocks by chance, and would be opened, since it holds several."""

    probability = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(1).item() + random.random() + np.random.rand() < 3 * self.probability:
                continue
            x = x + block(x)
        return self.last(x)


class Idle(Dropping):
    """Draws as many do whose probability is zero by default."""

    probability = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = x + block(x)
        return self.last(x)


LAYERS: dict[str, type[Block]] = {
    each.__name__.lower(): each for each in (Block, Scaled, Tracking, Normalized, Attending, Counting, Dropping, Idle)
}
OF_LAYER = ("call", "child", "weight", "transposed", "look", "frozen", "scale")
OF_MODEL = ("in place", "penalty", "temperature", "counter", "draws", "counts", "global")
REFUSED = {"draws", "counts", "global"}
HEADS = ("own", "attribute", "by hand", "transposed")


@dataclass(frozen=True)
class Spec:
    """What a model is made of, and does, one after the other: an operation and the number of a layer."""

    head: str
    layers: tuple[str, ...]
    operations: tuple[tuple[str, int], ...]

    @classmethod
    def drawn(cls, seed: int, plan: Plan) -> "Spec":
        dice = random.Random(seed)
        kinds = [kind for kind in LAYERS if not (plan.bidirectional and kind in ("dropping", "counting", "tracking"))]
        layers = tuple(dice.choice(kinds) for _ in range(dice.randint(2, 4)))
        operations = [("call", i) for i in range(len(layers))]
        for _ in range(dice.randint(1, 4)):
            operation, i = dice.choice(OF_LAYER), dice.randrange(len(layers))
            if not (plan.bidirectional and operation == "call" and layers[i] == "normalized"):  # one use on an image
                operations.append((operation, i))
        for name in OF_MODEL:
            if dice.random() < (0.06 if name in REFUSED else 0.25) and not (plan.bidirectional and name == "counter"):
                operations += [(name, 0)]
        dice.shuffle(operations)
        return cls(dice.choice(HEADS), layers, tuple(operations))

    @property
    def must_be_refused(self) -> bool:
        return any(name in REFUSED for name, _ in self.operations)

    @property
    def may_be_refused(self) -> bool:
        """Whether a buffer, or a counter, is used in several places, of which stages would have copies."""
        places = [i for name, i in self.operations if name in ("call", "scale") and self._has_state(name, i)]
        return self.must_be_refused or len(places) > len(set(places))

    def _has_state(self, name: str, i: int) -> bool:
        return self.layers[i] in ("scaled", "tracking", "normalized", *(("counting",) if name == "call" else ()))


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.operations, self.head_kind = spec.operations, spec.head
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LAYERS[kind]() for kind in spec.layers)
        if spec.head in ("own", "attribute"):
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if spec.head == "attribute":
            self.head.weight = self.words.weight
        self.register_buffer("count", torch.tensor(0.0))
        self.temperature, self.calls = 0.9, 0

    def forward(self, tokens: Tensor) -> Tensor:
        global NUM_CALLS
        x = self.words(tokens)
        for name, i in self.operations:
            layer = self.layers[i]
            if name == "call":
                x = x + layer(x).tanh()
            elif name == "child":
                x = x + layer.last(x).tanh()
            elif name == "weight":
                x = x + F.linear(x, layer.last.weight).tanh()
            elif name == "transposed":
                x = x + (x @ layer.last.weight.t()).tanh()
            elif name == "look":
                weight = layer.last.weight
                x = x.to(weight.device, weight.dtype) * (weight.shape[0] / weight.size(1))
            elif name == "frozen":
                with torch.no_grad():
                    beside = layer.last(x)
                x = x + beside.tanh()
            elif name == "scale" and hasattr(layer, "scale"):
                x = x * layer.scale
            elif name == "in place":
                same = x = x * 1.0
                x += 0.1
                x = x + same
            elif name == "penalty":
                x = x + self.words.weight.square().mean()
            elif name == "temperature":
                x = x * self.temperature
            elif name == "counter" and self.training:
                self.count += 1
                x = x * (1 + self.count / 10)
            elif name == "draws" and self.training and random.random() < 0.5:
                x = x * 1.1
            elif name == "counts":
                self.calls += 1
                x = x * (1 + self.calls % 2)
            elif name == "global":
                NUM_CALLS += 1
                x = x * (1 + NUM_CALLS % 2)
        if self.head_kind in ("own", "attribute"):
            return self.head(x)
        return F.linear(x, self.words.weight) if self.head_kind == "by hand" else x @ self.words.weight.t()


def build(spec: Spec) -> nn.Module:
    return Model(spec).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return batch[:, :-1], batch[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


class Streams:
    """Lets layers that draw in a plain model draw from the streams of the stages that they would be in."""

    def __init__(self, model: nn.Module, stages: LocalStages, seed: int) -> None:
        bounds = [sum(stages.counts[:k]) for k in range(len(stages.counts) + 1)]
        self.seed, self.states, self.when = seed, {}, (0, 0)
        for path, module in model.named_modules():
            if type(module) is Dropping:
                places = [i for i, name in enumerate(stages.names) if name.partition(":")[0] == path]
                used = [next(k for k, (low, high) in enumerate(pairwise(bounds)) if low <= i < high) for i in places]
                module.forward = partial(self._drawing, module.forward, used)

    @contextmanager
    def microbatch(self, step: int, number: int) -> Iterator[None]:
        self.when, self.states = (step, number), {}
        self.calls: dict[int, int] = {}
        yield

    def _drawing(self, forward: Any, stages: Sequence[int], x: Tensor) -> Tensor:
        number = self.calls.get(id(stages), 0)
        self.calls[id(stages)] = number + 1
        stage = stages[number]
        if stage in self.states:
            ours, python, numpy = self.states[stage]
            torch.set_rng_state(ours)
            random.setstate(python)
            np.random.set_state(numpy)
        else:
            seed = hash((self.seed, self.when[0], (0, stage, self.when[1]))) & (2**63 - 1)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
        found: Tensor = forward(x)
        self.states[stage] = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return found


def plainly(spec: Spec, plan: Plan, stages: LocalStages, seed: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model, losses, many = build(spec), [], plan.num_microbatches
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    streams = Streams(model, stages, seed)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number, (some, wanted) in enumerate(zip(*(each.chunk(many) for each in batch_of(step)), strict=True)):
            with streams.microbatch(step, number):
                loss = loss_of(model(some), wanted) / many
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, model


def problem_of(comm: Communicator, spec: Spec, plan: Plan, dice: random.Random) -> str | None:
    """What is wrong of one model by one plan; None if it trains as it should, or is refused and should be."""
    try:
        units = len(Cuttable(outline(partial(build, spec)), image=(BATCH, LENGTH)))
        cuts = sorted(dice.sample(range(1, units), plan.num_stages - 1))
        counts = [high - low for low, high in pairwise([0, *cuts, units])]
        with warnings.catch_warnings():  # some models fail in plain PyTorch, and so in the comparison with it
            warnings.filterwarnings("ignore", ".* was not compared with the plain model: the model itself fails")
            stages = split(partial(build, spec), plan, comm, balance=counts, image=(BATCH, LENGTH))
    except ValueError as error:
        return None if spec.may_be_refused else f"refused: {error}"
    if spec.must_be_refused:
        return "not refused"
    optimizer = torch.optim.AdamW(stages.parameters(), lr=0.01, eps=1e-2)
    engine = Engine(stages, plan, optimizer, loss_of, comm=comm, bucket_bytes=300)
    try:
        losses, model = plainly(spec, plan, stages, engine.executor.seed)
    except RuntimeError as error:  # a counter that was used is changed before the backward pass
        return None if "modified by an inplace operation" in str(error) else str(error)
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        tiles = [tokens[slice(*read.box.batch)] for read in engine.reads(BATCH, (LENGTH,))]
        loss = engine.step(tiles, targets, (LENGTH,)).loss
        if loss != pytest.approx(losses[step], rel=EXACT):
            return f"the loss of step {step} is {loss}, not {losses[step]}"
    gradients, state = engine.gather_gradients(), engine.gather_state()
    engine.check_replicas()
    if gradients is None or state is None:
        return None
    try:
        assert list(state) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert_close(state[name], value, EXACT, name)
        norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
        for name, p in model.named_parameters():
            found = gradients[name]
            assert (found is None) == (p.grad is None), f"{name}.grad is None in one alone"
            if found is not None and p.grad is not None:
                assert_close(found, p.grad, EXACT, f"{name}.grad", 10 * ROUNDING * max(1.0, norm))
    except AssertionError as error:
        return str(error)
    return None


def problem_by_seed(comm: Communicator, plan: Plan, seed: int) -> str | None:
    spec = Spec.drawn(seed, plan)
    found = problem_of(comm, spec, plan, random.Random(seed))
    return None if found is None else f"{spec}: {found}"


TWO = Plan(((1,), (1,)), microbatches=2)
PLANS = {
    "two": TWO,
    "three": Plan(((1,),) * 3, microbatches=2),
    "ZeRO 1": replace(TWO, data=2, zero=1),
    "GEMS": replace(TWO, microbatches=1, bidirectional=1),
    "zero bubble": replace(TWO, schedule="zero-bubble"),
    "interleaved": Plan(((1,), (1,)), microbatches=2, schedule="interleaved", chunks=2),
    "ZeRO 3": replace(TWO, data=2, zero=3),
}


def cases() -> st.SearchStrategy[tuple[str, int]]:
    """A plan, and the seed of a model and its cuts."""
    return st.tuples(st.sampled_from([*PLANS]), st.integers(0, 10**6))


def problem(ranks: Ranks, case: tuple[str, int]) -> str | None:
    """What is wrong with a random model in stages."""
    plan, seed = PLANS[case[0]], case[1]
    return ranks(plan.num_ranks).run(problem_by_seed, plan, seed)[0]
