"""The engine with parameters cut over ranks, alone and with all else, against plain PyTorch after some steps."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpi4dl import models
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.engine import Engine
from mpi4dl.models.lora import add_lora
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from tests.parallel.tensor.test_cut_parameters import FUSED, GROUPED, HEADS, VOCABULARY, build
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import NUM_CLASSES, Task, check, engine_of, label, step, words_loss

LENGTH = 7
LANGUAGE = Task(partial(build, HEADS), (LENGTH,), 4, "smooth AdamW", tokens=VOCABULARY, loss=words_loss)
LANGUAGE = replace(LANGUAGE, styles=tuple(FUSED.items()), balance=(4, 3))
IN_STAGES = replace(LANGUAGE, model=partial(build, HEADS, tied=False))
SHARING_KEYS = replace(LANGUAGE, model=partial(build, 3), styles=tuple(GROUPED.items()))
ONE, ONE_TILE = Plan(((1,),)), Plan()
PLANS = {
    "tensor 2": replace(ONE, tensor=2),
    "tensor 2, context 2": Plan(((2,),), tensor=2),
    "tensor 2, data 2, ZeRO 1": replace(ONE, tensor=2, data=2, zero=1),
    "tensor 2, data 2, ZeRO 3": replace(ONE, tensor=2, data=2, zero=3),
    "tensor 2, ZeRO 2": replace(ONE, tensor=2, zero=2),
    "tensor 3": replace(ONE, tensor=3),
    "tensor 4": replace(ONE, tensor=4),
    "context 2": Plan(((2,),)),
    "context 4": Plan(((4,),)),
    "tensor 2, two stages": Plan(((1,), (1,)), tensor=2, microbatches=2),
    "tensor 2, two stages, data 2, ZeRO 2": Plan(((1,), (1,)), tensor=2, data=2, zero=2),
}
WIDE = (
    "tensor 2",
    "tensor 2, ZeRO 2",
    "tensor 4",
    "context 2",
    "context 4",
    "tensor 2, data 2, ZeRO 1",
    "tensor 2, two stages, data 2, ZeRO 2",
)


def task_for(plan: Plan) -> Task:
    """Three ranks share three heads of keys, and stages no parameters."""
    task = SHARING_KEYS if plan.tensor == 3 else LANGUAGE if plan.num_stages == 1 else IN_STAGES
    return task if plan.tensor > 1 else replace(task, styles=())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in WIDE else name for name in PLANS]
)
@pytest.mark.sample(2)
def test_training_equals_plain_pytorch(ranks: Ranks, name: str) -> None:
    check(ranks, task_for(PLANS[name]), PLANS[name])


def test_grouped_queries_of_a_rank_without_samples(ranks: Ranks) -> None:
    """The validation ends with a batch of one sample."""
    check(ranks, replace(SHARING_KEYS, styles=(), num_steps=1), replace(ONE, data=2))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh().mean((2, 3)))


@pytest.mark.parametrize("plan", [replace(ONE_TILE, tensor=2), Plan(((1, 2),), tensor=2, data=2)], ids=label)
def test_accuracy_of_classes_that_ranks_share(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Task(Classifier, (8, 6), styles=(("head", "column"),)), plan)


def tokens_of_a_norm(engine: Engine) -> Callable[[], set[int]]:
    """How many tokens the norm between the layers of the first block sees of each microbatch."""
    seen = set()
    for norm in (module for name, module in engine.stages.named_modules() if name.endswith("blocks.0.between")):
        norm.register_forward_pre_hook(lambda _, args: seen.add(getattr(args[0], "local", args[0]).shape[1]))
    return lambda: seen


SEQUENCES: dict[str, tuple[Plan, int, list[int]]] = {  # with how many tokens there are, and each rank has of them
    "tensor 2": (replace(ONE, tensor=2), 7, [3, 4]),
    "tensor 3": (replace(ONE, tensor=3), 7, [2, 2, 3]),
    "tensor 4": (replace(ONE, tensor=4), 7, [1, 2, 2, 2]),
    "tensor 2, context 2": (Plan(((2,),), tensor=2), 8, [2, 2, 2, 2]),
    "tensor 2, context 2 of uneven pieces": (Plan(((2,),), tensor=2), 7, [3, 3, 4, 4]),
    "tensor 2, data 2, ZeRO 1": (replace(ONE, tensor=2, data=2, zero=1), 7, [3, 4, 3, 4]),
    "tensor 2, data 2, ZeRO 3": (replace(ONE, tensor=2, data=2, zero=3), 7, [3, 4, 3, 4]),
    "tensor 2, two stages": (Plan(((1,), (1,)), tensor=2, microbatches=2), 7, [0, 0, 3, 4]),
    "tensor 2, two stages, data 2": (Plan(((1,), (1,)), tensor=2, data=2), 7, [0, 0, 3, 4, 0, 0, 3, 4]),
}


@pytest.mark.parametrize(
    "name", [name if "context" in name else pytest.param(name, marks=pytest.mark.exhaustive) for name in SEQUENCES]
)
@pytest.mark.sample(1)
def test_sequence(ranks: Ranks, name: str) -> None:
    """Ranks that share parameters share the tokens of what is between, and learn the same."""
    plan, length, shares = SEQUENCES[name]
    task = replace(task_for(plan), size=(length,))
    outcomes = check(ranks, task, replace(plan, sequence=True), tokens_of_a_norm)
    assert [outcome.watched for outcome in outcomes] == [{share} - {0} for share in shares]


class Uneven(nn.Module):
    """Attention, a convolution along tokens, and norms of all tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.wide, self.norm = nn.Conv1d(8, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.narrow, self.each = nn.Conv1d(6, 8, 1), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.each(self.narrow(self.norm(self.wide(x.mT)).tanh())).mT
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(
    "cut",
    [{}, {"key": "heads", "value": "heads"}, {"wide": "column"}, {"wide": "row", "narrow": "row"}],
    ids=str,
)
def test_tokens_that_ranks_share_meet_parameters_that_they_share(ranks: Ranks, cut: dict[str, str]) -> None:
    styles = (("words", "vocabulary"), *cut.items())
    task = Task(Uneven, (LENGTH,), 4, tokens=VOCABULARY, loss=words_loss, styles=styles)
    check(ranks, task, replace(ONE, tensor=2, sequence=True))


READS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: model.parameters(),
    "names": lambda model: (model.get_parameter(f"{name}.weight") for name in ("up", "down")),
    "state": lambda model: model.state_dict().values(),
    "modules": lambda model: (p for module in model.modules() for p in module._parameters.values() if p is not None),
}


class Penalized(nn.Module):
    """A penalty on weights, two of them tied, by another way than their attributes; `last` is the newest model."""

    last: "Penalized"

    def __init__(self, read: str, by_loss: bool) -> None:
        super().__init__()
        self.up, self.again, self.down, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.again.weight = self.up.weight
        self.read, self.by_loss, Penalized.last = read, by_loss, self

    def penalty(self) -> Tensor:
        return 0.1 * torch.stack([p.square().sum() for p in READS[self.read](self)]).sum()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x = x + self.down((self.up(x) + self.again(x)).tanh())
        return (
            self.head(x)
            if self.by_loss
            else checkpoint(lambda y: self.head(y) * self.penalty(), x, use_reentrant=False)
        )


def penalized_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    model = Penalized.last
    return F.cross_entropy(outputs, targets) + (model.penalty() if model.by_loss and model.training else 0.0)


@pytest.mark.parametrize("plan", [replace(ONE_TILE, tensor=2), replace(ONE_TILE, tensor=2, data=2, zero=3)], ids=label)
@pytest.mark.parametrize(("read", "by_loss"), [(read, False) for read in READS] + [("parameters", True)])
def test_parameters_that_a_model_or_a_loss_reads_are_whole(ranks: Ranks, read: str, by_loss: bool, plan: Plan) -> None:
    styles = (("up", "column"), ("again", "column"), ("down", "row"))
    task = Task(partial(Penalized, read, by_loss), (2, 1), loss=penalized_loss, styles=styles)
    check(ranks, task, plan)


class Student(nn.Module):
    """What `use` does with weights in the forward pass; `teacher` follows those of `up`."""

    def __init__(self, use: "Callable[[Student, Tensor], Any]") -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, NUM_CLASSES)
        self.teacher = copy.deepcopy(self.up).requires_grad_(False)
        self.register_buffer("average", self.up.weight.detach().clone())
        self.use = use

    def student(self, x: Tensor) -> Tensor:
        return self.head(x + self.down((self.up(x) * self.teacher(x)).tanh()))

    def forward(self, x: Tensor) -> Tensor:
        used = self.use(self, x.flatten(1))
        y = self.student(x.flatten(1))
        return y if used is None else y * used


def follow(model: Student, x: Tensor) -> None:
    """As in MoCo (He et al. 2020)."""
    for old, new in zip(model.teacher.parameters(), model.up.parameters(), strict=True):
        old.data = old.data * 0.9 + new.data * 0.1


def assign(model: Student, x: Tensor) -> None:
    model.down.weight.data = model.down.weight.data / model.down.weight.data.norm()


def to_device(model: Student, x: Tensor) -> None:
    model.up.to(x.device, x.dtype)
    model.down.weight.requires_grad = True


def call(model: Student, x: Tensor) -> Tensor:
    half = nn.Parameter(model.up.weight.detach() / 2), model.up.weight / 2
    return sum(torch.func.functional_call(model.up, {"weight": each}, (x,)).square().sum() for each in half)


def sizes(model: Student, x: Tensor) -> Tensor:
    return 1 + sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("use", [follow, assign, to_device, call, sizes])
def test_what_a_model_does_with_weights_that_ranks_share(
    ranks: Ranks, use: Callable[[Student, Tensor], Any], followed: bool
) -> None:
    styles = (("up", "column"), ("down", "row"), *[("teacher", "column")] * followed)
    check(ranks, Task(partial(Student, use), (2, 1), styles=styles), replace(ONE_TILE, tensor=2))


def hook(model: Student, x: Tensor) -> None:
    model.up.weight.register_hook(lambda gradient: gradient / gradient.norm())


def differentiate(model: Student, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model.student(x).sum(), x)[0].norm()


def keep(model: Student, x: Tensor) -> None:
    model.average = model.average * 0.9 + model.up.weight.detach() * 0.1


REFUSED = {
    hook: "pass gradient_hook to the engine",
    differentiate: "within its own forward",
    keep: "the buffer average",
}


@pytest.mark.parametrize("use", REFUSED)
@on_ranks(2)
def test_what_a_model_cannot_do_with_weights_that_ranks_share(comm: Communicator, use: Any) -> None:
    task = Task(partial(Student, use), (2, 1), styles=(("up", "column"), ("down", "row")))
    engine = engine_of(comm, task, replace(ONE_TILE, tensor=2))
    if use is keep:  # a buffer shows after the step
        step(engine, task, 0)
    with pytest.raises(Refusal, match=REFUSED[use]):
        step(engine, task, 1)


@on_ranks(4)
def test_a_weight_that_a_model_assigns_is_not_lost_under_zero_3(comm: Communicator) -> None:
    task = Task(partial(Student, assign), (2, 1), styles=(("up", "column"), ("down", "row")))
    engine = engine_of(comm, task, replace(ONE_TILE, tensor=2, data=2, zero=3))
    with pytest.raises(Refusal, match="a parameter was changed while the model ran"):
        step(engine, task, 0)


def adapted() -> nn.Module:
    model = build(HEADS, tied=False)
    add_lora(model, 3, 4.0, ("qkv", "out", "up", "down"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def names_of_parts(engine: Engine) -> Callable[[], set[str]]:
    return lambda: set(engine.stages.layouts)


def test_adapters_are_cut_as_their_layers(ranks: Ranks) -> None:
    """With a product of packed or quantized weights, which has no part of a whole one, they generate, too."""
    outcomes = check(ranks, replace(LANGUAGE, model=adapted), PLANS["tensor 2"], names_of_parts)
    layers = ("attention.qkv.lora_B", "attention.out.lora_A", "up.lora_B", "down.lora_A")
    assert {f"blocks.1.{name}.weight" for name in layers} <= outcomes[0].watched


class Aside(Student):
    """Has a weight in a function, too."""

    def __init__(self) -> None:
        super().__init__(call)
        self.project = partial(F.linear, weight=self.up.weight)


def test_a_weight_that_ranks_share_is_nowhere_else_in_the_model(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"parts of up\.weight, but the model has it also in an attribute"):
        check(ranks, Task(Aside, (2, 1), styles=(("up", "column"),)), replace(ONE_TILE, tensor=2))


class Normed(Classifier):
    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.first, self.head = weight_norm(self.first, dim=dim), weight_norm(self.head, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(ranks: Ranks, dim: int | None) -> None:
    styles = (("first.parametrizations.*.original1", "column"), ("head.parametrizations.*.original1", "row"))
    check(ranks, Task(partial(Normed, dim), (8, 6), styles=styles), replace(ONE_TILE, tensor=2))


class Moves(TorchDispatchMode):
    """Which shapes are moved to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("meta"):
            self.shapes.add(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def move(comm: Communicator, plan: Plan) -> None:
    with Moves() as moves:
        split(lambda: build(HEADS), plan, comm, balance=(5, 2), image=(4, LENGTH), styles=FUSED, device="meta")
    sizes = {tuple(p.shape) for name, p in build(HEADS).named_parameters() if "attention.qkv" in name}
    assert moves.shapes
    assert not sizes & moves.shapes
    assert {(size[0] // 2, *size[1:]) for size in sizes} <= moves.shapes


@pytest.mark.parametrize("name", ["tensor 2", "tensor 2, two stages"])
def test_no_device_has_the_whole_of_what_is_cut(ranks: Ranks, name: str) -> None:
    ranks(PLANS[name].num_ranks).run(move, PLANS[name])


SIZES = {"hidden": 24, "num_heads": 4, "num_layers": 1}
OF_WORDS = {"vocabulary": VOCABULARY, "context": LENGTH}
GROUPED_GPT = {"num_kv_heads": 2, "activation": "swiglu", "positions": "rotary"}


def of_ours(kind: str, **options: Any) -> Task:
    """A model of the package, by the styles that it carries, whose dropout draws as in plain PyTorch."""
    if kind == "vit":
        return Task("vit", (8, 8), model_options=tuple((SIZES | {"image_size": 8} | options).items()))
    model = partial(models.build, kind, None, **SIZES, **OF_WORDS, **options)
    return Task(model, (LENGTH,), tokens=VOCABULARY, loss=words_loss)


OF_OURS: dict[str, tuple[Task, Plan]] = {
    "GPT": (of_ours("gpt", dropout=0.2, **GROUPED_GPT), PLANS["tensor 2, data 2, ZeRO 3"]),
    "BERT": (of_ours("bert", dropout=0.2), PLANS["tensor 2"]),
    "ViT": (of_ours("vit", dropout=0.2), Plan(((1, 1),), tensor=2)),
    **{f"GPT on context {n}": (of_ours("gpt", dropout=0.2, **GROUPED_GPT), Plan(((n,),))) for n in (2, 4)},
    **{f"BERT on context {n}": (of_ours("bert"), Plan(((n,),))) for n in (2, 4)},
}
QUICK = ("GPT", "BERT", "ViT", "BERT on context 4")


@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        pytest.param(name, sequence, marks=[] if name in QUICK and not sequence else pytest.mark.exhaustive)
        for name in OF_OURS
        for sequence in ((False,) if "context" in name else (False, True))
    ],
)
def test_our_models(ranks: Ranks, name: str, sequence: bool) -> None:
    task, plan = OF_OURS[name]
    check(ranks, task, replace(plan, sequence=sequence))


@on_ranks(2)
def test_what_parts_cannot_be_trained_with(comm: Communicator) -> None:
    with pytest.raises(Refusal, match="Adafactor works on whole ones"):
        engine_of(comm, replace(LANGUAGE, optimizer="Adafactor"), PLANS["tensor 2"])
    unknown = replace(LANGUAGE, optimizer=lambda model: type("Own", (AdamW,), {"own": 1})(model.parameters()))
    with pytest.raises(Refusal, match=r"under tensor\(2\) ranks have parts of parameters: train without"):
        engine_of(comm, unknown, PLANS["tensor 2"])
    with pytest.raises(ValueError, match="mirrored copy of GEMS has whole parameters"):
        Plan(((1,), (1,)), tensor=2, bidirectional=1)
    with pytest.raises(ValueError, match="`sequence` shares tokens among the ranks of `tensor`"):
        replace(ONE, sequence=True)


@on_ranks(2)
def test_a_step_hook_reads_weights_that_ranks_share_and_changes_none(comm: Communicator) -> None:
    """Each rank would divide its part by the norm of that."""
    engine, average = engine_of(comm, LANGUAGE, PLANS["tensor 2"]), list[Tensor]()
    parameters = list(engine.stages.parameters())
    engine.optimizer.register_step_post_hook(lambda *_: average.extend(p.detach() / 2 for p in parameters))
    step(engine, LANGUAGE, 0)
    assert len(average) == len(parameters)
    engine.optimizer.register_step_post_hook(lambda *_: [p.data.div_(p.data.norm()) for p in parameters] and None)
    with pytest.raises(Refusal, match="a step post-hook changes weights of which ranks have parts"):
        step(engine, LANGUAGE, 1)


@on_ranks(2)
def test_ranks_that_share_layers_draw_alike(comm: Communicator) -> None:
    """Ranks that share layers are refused if they would drop other values of what each of them has whole."""
    engine = engine_of(comm, OF_OURS["ViT"][0], Plan(((1, 1),), tensor=2))
    torch.manual_seed(comm.rank)
    with pytest.raises(Refusal, match="with the same seed on all ranks") as caught:
        step(engine, OF_OURS["ViT"][0], 0)
    comm.agree(None, said=str(caught.value))


def tensors_in(objects: list[Any]) -> list[Tensor]:
    """By type alone: `isinstance` asks for `__class__`, at which deprecated objects of PyTorch's raise warnings."""
    return [each for each in objects if issubclass(type(each), Tensor)]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.sample(1)
@on_ranks(2)
def test_nothing_waits_for_the_garbage_collector(comm: Communicator, sequence: bool) -> None:
    """Logits that did, a step's after the other's, made a rank's memory grow by a third."""
    engine = engine_of(comm, LANGUAGE, replace(ONE, tensor=2, sequence=sequence))
    for number in range(2):
        step(engine, LANGUAGE, number)
    gc.collect()
    gc.disable()
    before = {id(each) for each in tensors_in(gc.get_objects())}  # of tests that ran here before
    try:
        for number in range(2):
            step(engine, LANGUAGE, number)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in tensors_in(gc.garbage) if id(each) not in before]
        assert [tuple(each.shape) for each in left if each.numel() >= LENGTH * LANGUAGE.batch] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
