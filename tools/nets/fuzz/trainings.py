"""Random trainings: a network by several plans, one after the other from checkpoints, against a plain loop.

Losses, norms of gradients, the last gradients, weights, buffers, averages of weights and evaluations agree up to
rounding; or all ranks refuse alike.
"""

import math
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from mpi4dl.checkpoints import Checkpoints
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.tensor import NoRule
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from mpi4dl.parallel.tables.schedules import SCHEDULES
from tests.parallel.spatial.comparing import all_arrive
from tests.pool.ranks import Ranks, RanksFailed
from tests.support.short_runs import Task, engine_of, evaluate, tiles_of
from tools.nets.fuzz.networks import BESIDE, CHANNELS, DRAWING, HEADS, KINDS, Loss, Network

EXACT = 1e-9
SECONDS = 120.0
WAITING = "other ranks wait for this one, which refused"  # a model that changes itself as it runs, for example
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "AdamW": ("AdamW", {"lr": 0.01, "eps": 1e-2, "amsgrad": True}),
    "Adam, fused": ("Adam", {"lr": 0.01, "eps": 1e-2, "fused": True}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "eps": 1e-2, "centered": True, "momentum": 0.5}),
    "Adagrad": ("Adagrad", {"lr": 0.01, "eps": 1e-2, "lr_decay": 0.1}),
    "NAdam": ("NAdam", {"lr": 0.01, "eps": 1e-2}),
    "Adafactor": ("Adafactor", {"lr": 0.01, "eps": (1e-2, 1e-3)}),
}


@dataclass(frozen=True)
class Part:
    """So many steps by a plan, and how."""

    plan: Plan
    steps: int = 1
    recompute: bool = False
    offload: str = "none"
    bucket_bytes: int = 300
    all_reduce: str = "auto"
    stream: tuple[int, ...] | None = None
    segments: int = 1
    keep: str = "device"


@dataclass(frozen=True)
class Training:
    """A network is trained by one part after the other, from the checkpoint of the last one.

    `grouped`: parameters with one axis have another learning rate. `still` are the modules that are frozen, up to the
    step `thaws` if there is one. `styles` say how plans with `tensor` ranks cut parameters.
    """

    network: Any
    parts: tuple[Part, ...]
    batch: int = 4
    optimizer: str = "SGD"
    grouped: bool = False
    clip: tuple[str, float] | None = None
    ema: float | None = None
    still: tuple[str, ...] = ()
    thaws: int | None = None
    styles: tuple[tuple[str, str], ...] = ()
    seed: int = 0

    @property
    def patterns(self) -> list[str]:
        return [f"{path}.*" for path in self.still]

    def build(self, step: int = 0) -> nn.Module:
        model = self.network.build()
        if self.thaws is None or step < self.thaws:
            for path in self.still:
                model.get_submodule(path).requires_grad_(False)
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        name, options = OPTIMIZERS[self.optimizer]
        parameters: Any = list(model.parameters())
        if self.grouped:
            small = [p for p in parameters if p.dim() < 2]
            large = [p for p in parameters if p.dim() >= 2]
            parameters = [{"params": large}, {"params": small, "lr": 0.002}]
        return getattr(torch.optim, name)(parameters, **options)  # type: ignore[no-any-return]

    def batch_of(self, number: int, count: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        found: tuple[Tensor, Tensor] = self.network.batch(self.batch if count is None else count, generator)
        return found

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        return [self.batch_of(500), self.batch_of(501, 1)]

    def task(self, part: Part, step: int, folder: Path) -> Task:
        stream = None
        if part.stream is not None:
            keep = Keep(part.keep, folder if part.keep == "disk" else None)
            stream = StreamOptions(part.stream, segments=part.segments, keep=keep)
        options: dict[str, Any] = {"ema": self.ema, "recompute": part.recompute}
        options |= {"offload": part.offload, "bucket_bytes": part.bucket_bytes, "all_reduce": part.all_reduce}
        if part.offload == "disk":
            options["offload_folder"] = str(folder)
        if self.clip is not None:
            options[f"clip_{self.clip[0]}"] = self.clip[1]
        network = self.network
        task = Task(
            _Build(self, step), network.size, self.batch, self.optimizer_of, tokens=network.tokens, stream=stream
        )
        task = replace(task, loss=network.loss, styles=self.styles if part.plan.tensor > 1 else ())
        return task.with_engine(**options)


@dataclass(frozen=True)
class _Build:
    training: Training
    step: int

    def __call__(self) -> nn.Module:
        return self.training.build(self.step)


@dataclass
class Found:
    """What a part left behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[tuple[float, float | None, int]] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


REFUSALS = (Refusal, ValueError, NoRule)


def train_part(comm: Communicator, training: Training, number: int, folder: Path) -> Found | str:
    """A body: one part of a training; or why it is refused."""
    control = comm.split(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Found | str = _train_part(comm, training, number, folder)
    except REFUSALS as error:
        found = f"{type(error).__name__}: {error}"
    if not all_arrive(control, SECONDS / 8 if isinstance(found, str) else math.inf):
        raise AssertionError(f"{WAITING}: {found}")
    return found


def _train_part(comm: Communicator, training: Training, number: int, folder: Path) -> Found:
    part, begin = training.parts[number], sum(part.steps for part in training.parts[:number])
    engine, found = engine_of(comm, training.task(part, begin, folder), part.plan), Found()
    task = training.task(part, begin, folder)
    with Checkpoints(folder / "saved", comm) as checkpoints:
        newest = checkpoints.newest()
        assert (newest is None) == (number == 0)
        if newest is None:
            seed_all(7)
        else:
            checkpoints.load(engine, newest)
        for step in range(begin, begin + part.steps):
            if step == training.thaws and training.still and number_of_part_at(training, step) != step:
                engine.unfreeze(training.patterns)
            images, targets = training.batch_of(step)
            result = engine.step(tiles_of(images, engine), targets, task.size)
            found.losses.append(result.loss)
            found.norms.append(result.gradient_norm)
        held_out = [(tiles_of(images, engine, training=False), targets) for images, targets in training.held_out()]
        said = engine.evaluate(held_out, task.size)
        found.evaluations.append((said.loss, said.accuracy, said.count))
        if training.ema is not None:
            with engine.averaged():
                found.values |= {f"average of {name}": value for name, value in (engine.gather_state() or {}).items()}
                said = engine.evaluate(held_out, task.size)
            found.evaluations.append((said.loss, said.accuracy, said.count))
        engine.check_replicas()
        gradients = engine.gather_gradients() or {}
        found.values |= {f"{name}.grad": value for name, value in gradients.items() if value is not None}
        found.values |= engine.gather_state() or {}
        checkpoints.save(engine, {})
    return found


def number_of_part_at(training: Training, step: int) -> int:
    """The first step of the part in which a step lies."""
    begin = 0
    for part in training.parts:
        if step < begin + part.steps:
            return begin
        begin += part.steps
    return begin


class Plain:
    """The loop of any tutorial, over microbatches of even cuts."""

    def __init__(self, training: Training) -> None:
        self.training, self.step = training, 0
        torch.manual_seed(0)
        self.model = training.build()
        self.optimizer = training.optimizer_of(self.model)
        self.averages: dict[str, Tensor] = {}
        self.part = training.parts[0]
        seed_all(7)

    def train(self, part: Part) -> Found:
        training, model, found, self.part = self.training, self.model, Found(), part
        for _ in range(part.steps):
            if self.step == training.thaws:
                for path in training.still:
                    model.get_submodule(path).requires_grad_(True)
            images, targets = training.batch_of(self.step)
            many, total = part.plan.num_microbatches, 0.0
            self.optimizer.zero_grad()
            for some, wanted in microbatches(images, targets, many):
                loss = training.network.loss(model(some), wanted) * (len(some) / len(images))
                loss.backward()
                total += float(loss.detach())
            if training.clip is not None and training.clip[0] == "norm":
                norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip[1])
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            if training.clip is not None and training.clip[0] == "value":
                nn.utils.clip_grad_value_(model.parameters(), training.clip[1])
            self.optimizer.step()
            self._average()
            found.losses.append(total)
            found.norms.append(float(norm))
            self.step += 1
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.evaluations.append(self._evaluate())
        if training.ema is not None:
            with self._averaged():
                found.values = {f"average of {name}": value.clone() for name, value in model.state_dict().items()}
                found.evaluations.append(self._evaluate())
        found.values |= {name: value.detach().clone() for name, value in {**gradients, **model.state_dict()}.items()}
        return found

    def _evaluate(self) -> tuple[float, float | None, int]:
        """Over the same microbatches, too, which weigh as much as they have samples."""
        held_out = [
            each
            for images, targets in self.training.held_out()
            for each in microbatches(images, targets, min(self.part.plan.microbatches, len(images)))
        ]
        said = evaluate(self.model, held_out, self.training.network.loss)
        return said.loss, said.accuracy, said.count

    @torch.no_grad()
    def _average(self) -> None:
        """As torch.optim.swa_utils.get_ema_multi_avg_fn has it."""
        if self.training.ema is None:
            return
        for name, p in self.model.named_parameters():
            if name in self.averages:
                self.averages[name].lerp_(p, 1 - self.training.ema)
            else:
                self.averages[name] = p.clone()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for values in (self.averages, kept):
            for name, p in self.model.named_parameters():
                p.data.copy_(values[name])
            if values is self.averages:
                yield


def microbatches(images: Tensor, targets: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    cuts = [len(images) * i // count for i in range(1, count)]
    return zip(images.tensor_split(cuts), targets.tensor_split(cuts), strict=True)


def problem(ranks: Ranks, training: Training) -> str | None:
    """What is wrong; None if all is well; a text that begins with "refused: " if all ranks refused alike."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = Plain(training)
            for number, part in enumerate(training.parts):
                try:
                    expected = plain.train(part)
                except Exception as error:  # PyTorch itself cannot
                    return f"refused: by plain PyTorch: {error}"
                if not all(map(math.isfinite, expected.losses + expected.norms)):
                    return "refused: the plain loss is not finite"
                try:
                    found = ranks(part.plan.num_ranks, SECONDS).run(train_part, training, number, folder)
                except RanksFailed as error:
                    alone = re.search(rf"{WAITING}: (Refusal: .*)", str(error))
                    return f"refused: by some ranks: {alone[1]}" if alone else f"part {number}: {error}"
                if any(isinstance(each, str) for each in found):
                    alike = len({str(each) for each in found}) == 1
                    if str(found[0]).startswith("NotFinite"):  # plain PyTorch's step was finite
                        return f"part {number}: {found[0]}"
                    return f"refused: {found[0]}" if alike else f"part {number}: ranks refuse differently: {found}"
                wrong = list(differences(found, expected))
                if wrong:
                    return f"part {number}: " + "; ".join(wrong[:6])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def differences(found: list[Found], expected: Found) -> Iterator[str]:
    for what in ("losses", "norms", "evaluations"):
        if any(getattr(each, what) != getattr(found[0], what) for each in found):
            yield f"ranks have different {what}"
    ours = found[0]
    for what, one, other in (("loss", ours.losses, expected.losses), ("norm", ours.norms, expected.norms)):
        for step, (mine, plain) in enumerate(zip(one, other, strict=True)):
            if not math.isclose(mine, plain, rel_tol=EXACT, abs_tol=EXACT):
                yield f"{what} of step {step}: {mine}, but plain {plain}"
    for mine, plain in zip(ours.evaluations, expected.evaluations, strict=True):
        if mine[1:] != plain[1:] or not math.isclose(mine[0], plain[0], rel_tol=EXACT, abs_tol=EXACT):
            yield f"evaluation: {mine}, but plain {plain}"
    if set(ours.values) != set(expected.values):
        yield f"in one of both alone: {sorted(set(ours.values) ^ set(expected.values))}"
    for name in sorted(set(ours.values) & set(expected.values)):
        mine, plain = ours.values[name].double(), expected.values[name].double()
        if mine.shape != plain.shape:
            yield f"{name}: {tuple(mine.shape)}, but plain {tuple(plain.shape)}"
        elif plain.numel() and not float((mine - plain).abs().max()) <= EXACT * max(1.0, float(plain.abs().max())):
            yield f"{name} is off by {float((mine - plain).abs().max()):.1e} of {float(plain.abs().max()):.1e}"


# What is drawn

GRIDS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (2,), (3,), (4,)),
    2: ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (4, 1)),
    3: ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (3, 1, 1)),
}
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "convolution": {
        "kernel": st.sampled_from([3, 1, 2, 5]),
        "stride": st.sampled_from([1, 1, 2, 3]),
        "dilation": st.sampled_from([1, 1, 2]),
        "groups": st.sampled_from([1, 2, CHANNELS]),
        "mode": st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]),
        "how": st.sampled_from(["plain", "plain", "plain", "recomputed", "weight norm", "spectral norm"]),
    },
    "norm": {
        "kind": st.sampled_from(
            ["batch", "batch", "batch, plain", "batch, of now", "group", "instance", "layer", "image"]
        ),
        "still": st.sampled_from([False, False, True]),
    },
    "activation": {"kind": st.sampled_from(["gelu", "tanh", "relu in place", "prelu", "softmax"])},
    "pool": {
        "kind": st.sampled_from(["average", "max"]),
        "kernel": st.integers(2, 3),
        "stride": st.integers(1, 2),
        "padding": st.booleans(),
        "ceil": st.booleans(),
    },
    "up": {"mode": st.sampled_from(["nearest", "linear", "bicubic", "transposed", "shuffle"])},
    "positions": {
        "of": st.sampled_from(["place", "row", "column", "channel"]),
        "begin": st.sampled_from(["zeros", "ones", "randn"]),
        "how": st.sampled_from(["add", "multiply", "gain"]),
    },
    "mask": {"how": st.sampled_from(["multiply", "where", "fill"])},
    "coordinates": {},
    "gate": {"of": st.sampled_from(["means", "maxima", "places"])},
    "attention": {"heads": st.sampled_from([1, 2])},
    "dropout": {"kind": st.sampled_from(["pixels", "channels", "alpha"]), "p": st.sampled_from([0.0, 0.3])},
    "depth": {"p": st.sampled_from([0.0, 0.5])},
    "counter": {},
    "tracker": {},
    "moves": {"kind": st.sampled_from(["flip", "roll", "channels", "pad", "in place", "detached", "without gradient"])},
    "idle": {},
    "hooked": {
        "where": st.sampled_from(["activation", "parameter", "before", "behind", "backward", "before backward"])
    },
}  # fmt: skip
COMMON = ("convolution", "norm", "activation")


@st.composite
def networks(draw: st.DrawFn, drawing: bool) -> Network:
    kinds = [kind for kind in (*KINDS, *BESIDE) if drawing or kind not in DRAWING]
    names = draw(st.lists(st.one_of(st.sampled_from(COMMON), st.sampled_from(kinds)), min_size=1, max_size=6))
    layers: list[tuple[str, dict[str, Any]]] = []
    for number, name in enumerate(names):
        options: dict[str, Any] = {}
        if name in ("skip", "average"):
            options = {"of": draw(st.integers(0, number))}
        elif name == "again":
            options = {"of": draw(st.integers(0, max(0, number - 1)))}
        elif name in KINDS:
            options = {key: draw(values) for key, values in OPTIONS[name].items()}
        layers.append((name, options))
    sides = draw(st.sampled_from([2, 2, 2, 1, 3]))
    size = tuple(draw(st.integers(6, (40, 17, 9)[sides - 1])) for _ in range(sides))
    head = draw(st.sampled_from(HEADS))
    ignores = head == "dense" and draw(st.booleans())
    loss = Loss(draw(st.sampled_from([0.0, 0.1])), draw(st.booleans()), ignores)
    network = Network(size, tuple(layers), head, loss)
    try:
        with torch.device("meta"):
            network.build()(torch.empty(2, 3, *size, dtype=torch.float64))
    except (ValueError, RuntimeError):
        assume(False)
    return network


# Modules of layers whose channels ranks may share.
CUT = {"convolution": "inner", "coordinates": "mix", "gate": "inner", "depth": "inner", "hooked": "inner"}


@st.composite
def styles(draw: st.DrawFn, network: Network) -> tuple[tuple[str, str], ...]:
    """How the parameters of a network are cut over ranks that share features."""
    found = {"stem": draw(st.sampled_from(["column", "whole"])), "last": draw(st.sampled_from(["row", "whole"]))}
    for number, (kind, options) in enumerate(network.layers):
        path = f"layers.{number}"
        if kind in CUT or options.get("mode") == "transposed":
            found[f"{path}.{CUT.get(kind, 'inner')}"] = draw(st.sampled_from(["column", "column", "row", "whole"]))
        elif kind == "attention" and draw(st.booleans()):
            found |= {f"{path}.inner.linear1": "column", f"{path}.inner.linear2": "row"}
    return tuple((path, style) for path, style in found.items() if style != "whole")


@st.composite
def plans(draw: st.DrawFn, most_stages: int, sides: int = 2, tensors: bool = False, most_ranks: int = 4) -> Plan:
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    places = draw(st.integers(1, most_stages))
    chunks = 2 if schedule == "interleaved" else 1
    assume(places * chunks <= most_stages)
    tensor = draw(st.sampled_from([1, 2, 2])) if tensors else 1
    mirrors = schedule != "interleaved" and places > 1 and tensor == 1
    plan = Plan(
        tiles=tuple(draw(st.sampled_from(GRIDS[sides])) for _ in range(places)),
        batch_ways=tuple(draw(st.sampled_from([1, 1, 1, 2])) for _ in range(places)),
        data=draw(st.sampled_from([1, 1, 2])),
        microbatches=draw(st.integers(1, 3)),
        schedule=schedule,
        bidirectional=draw(st.integers(0, 1)) if mirrors else 0,
        chunks=chunks,
        zero=draw(st.sampled_from([0, 0, 1, 2, 3])),
        tensor=tensor,
    )
    assume(plan.num_ranks <= most_ranks)
    return plan


@st.composite
def parts(draw: st.DrawFn, most_stages: int, streams: bool, sides: int = 2, tensors: bool = False) -> Part:
    plan = draw(plans(most_stages, sides, tensors))
    streamed = streams and draw(st.sampled_from([False, False, True]))
    return Part(
        plan,
        draw(st.integers(1, 2)),
        recompute=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "none", "cpu", "disk"])),
        bucket_bytes=draw(st.sampled_from([40, 300, 1 << 20])),
        all_reduce=draw(st.sampled_from(["auto", "ring", "two-level"])),
        stream=draw(st.tuples(*[st.integers(1, 3)] * sides)) if streamed else None,
        segments=draw(st.integers(1, 2)) if streamed else 1,
        keep=draw(st.sampled_from(["device", "host", "disk"])) if streamed else "device",
    )


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    most_stages = draw(st.integers(1, 3))
    network = draw(networks(drawing=most_stages == 1))
    shared = draw(styles(network)) if draw(st.sampled_from([False, False, True])) else ()
    drawn = parts(most_stages, True, len(network.size), bool(shared))
    made = tuple(draw(st.lists(drawn, min_size=1, max_size=3)))
    if network.changes:  # which is refused, by a rank alone, and so takes long
        assume(not any(part.recompute or part.plan.bidirectional for part in made))
    still = draw(st.sampled_from([(), (), (f"layers.{draw(st.integers(0, len(network.layers) - 1))}",)]))
    return replace(training_of(draw, network, made, still), styles=shared)


def training_of(draw: st.DrawFn, network: Any, made: tuple[Part, ...], still: tuple[str, ...]) -> Training:
    """How it is trained; a batch is large enough for all parts."""
    cut = any(part.plan.cuts_parameters for part in made)
    optimizers = [name for name in sorted(OPTIMIZERS) if name != "Adafactor" or not cut]  # which works on whole ones
    needed = max(p.plan.num_microbatches * p.plan.replicas * max(p.plan.batch_ways) for p in made)
    many = sum(part.steps for part in made)
    return Training(
        network,
        made,
        batch=max(2, needed) + draw(st.integers(0, 2)),
        optimizer=draw(st.sampled_from(optimizers)),
        grouped=draw(st.booleans()),
        clip=draw(st.sampled_from([None, ("norm", 0.5), ("value", 0.01)])),
        ema=draw(st.sampled_from([None, None, 0.8])),
        still=still,
        thaws=draw(st.one_of(st.none(), st.integers(1, many))) if still else None,
        seed=draw(st.integers(0, 9)),
    )
