"""mpi4dl.options.build: what a configuration names is what is built, and what cannot be is refused by name."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl.comm import Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.options import build
from mpi4dl.options.build import TrainingSpec
from mpi4dl.options.config import Config, ConfigError, parse
from mpi4dl.options.data import build_views
from mpi4dl.options.declare import options_of, require_effect, without_effect
from mpi4dl.options.models import build_model
from mpi4dl.options.optimizers import build_optimizer, build_schedule, state_bytes
from mpi4dl.options.presets import PRESETS
from mpi4dl.options.sources import source_of
from mpi4dl.runs.assembly import blaming_the_model
from mpi4dl.tasks.losses import classification_loss
from tests.support.commands import settled, write_images


def configured(flags: str) -> Config:
    return settled(flags.split())


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1, bias=False))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()


def test_the_model_is_the_one_that_is_named_with_its_options() -> None:
    model = build_model(configured("--model resnet_v2 --model-options depth=29,num_filters=4"), 7, 3)
    assert isinstance(model, nn.Sequential)
    assert len(model) == 1 + 9 + 1
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 7)


def test_the_models_values_depend_on_the_seed_alone() -> None:
    found = []
    for seed, before in ((0, 1), (0, 2), (5, 1)):
        torch.manual_seed(before)
        model = build_model(configured(f"--model small_resnet --seed {seed}"), 2, 3)
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(("asked", "built"), [("", 3), ("--num-classes 3", 3), ("--num-classes 5", 5)])
def test_as_many_classes_as_asked_or_else_as_the_images_have(asked: str, built: int) -> None:
    assert source_of(configured(asked)).number_of_classes(SimpleNamespace(classes=("a", "b", "c"))) == built


def test_fewer_classes_than_the_images_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^`num_classes` 2, but the images have 3: a, b, c$"):
        source_of(configured("--num-classes 2")).number_of_classes(SimpleNamespace(classes=("a", "b", "c")))


def test_synthetic_images_of_the_size_and_number_that_were_asked() -> None:
    config = configured("--num-samples 20 --val-fraction 0.25 --image-size 12x16 --num-classes 4")
    training, validation = source_of(config).open()
    assert (len(training), len(validation), len(training.classes)) == (20, 5, 4)
    assert training.image(0).size == (12, 16)


def test_a_folder_is_split_by_the_fraction_and_the_seed(tmp_path: Path) -> None:
    write_images(tmp_path / "images", count=8)
    sets = []
    for flags in ("--val-fraction 0.25", "--val-fraction 0.25 --seed 3", "--val-fraction 0.25 --seed 0"):
        training, validation = source_of(configured(f"--images {tmp_path / 'images'} {flags}")).open()
        assert (len(training) + len(validation), training.classes) == (16, ("dark", "light"))
        sets.append([training.name(i) for i in range(len(training))])
    assert sets[0] != sets[1]
    assert sets[0] == sets[2]


def test_validation_images_are_never_varied() -> None:
    flags = "--image-size 8x10 --fit crop --jitter 0.5 --random-crop --mean 0.25 --std 0.5 --seed 3"
    training, validation = build_views(configured(flags), channels=1, fit="crop")
    assert validation.augmentation is None
    assert training.augmentation is not None
    assert (training.augmentation.crop, training.augmentation.contrast, training.seed) == (0.8, 0.5, 3)
    for view in (training, validation):
        assert (view.size, view.fit, view.mean, view.std) == ((8, 10), "crop", (0.25,), (0.5,))
    plain = build_views(configured("--no-flip"), channels=3, fit="resize")[0].augmentation
    assert plain is not None
    assert plain.draw(0, 0, 0) == type(plain)(flip_cols=False).draw(0, 0, 0)


def test_quarter_turns_are_for_squares_and_patches() -> None:
    with pytest.raises(ConfigError, match="`image_size` 8x10 is not square: choose `rotate` half"):
        build_views(configured("--image-size 8x10 --rotate quarter"), channels=3, fit="crop")
    build_views(configured("--image-size 8x10 --rotate quarter"), channels=3, fit="own")  # swaps the sides of each
    for flags, turns in (("--image-size 8x10 --rotate half", 2), ("--image-size 8x12 --patches 4 --rotate", 4)):
        augmentation = build_views(configured(flags), channels=3, fit="crop")[0].augmentation
        assert augmentation is not None
        assert augmentation.turns == turns


def test_the_optimizer_is_the_one_that_is_named_with_its_options() -> None:
    model = small_model()
    config = configured("--optimizer AdamW --lr 0.5 --optimizer-options betas=[0.5,0.75],weight_decay=0.1")
    optimizer = build_optimizer(config, model.parameters())
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.5, (0.5, 0.75), 0.1)
    assert len(group["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("NAdam", {}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("ASGD", {}),
        ("AdamW", {"fused": True}),
    ],
)
def test_the_bytes_of_an_optimizers_state_are_those_of_a_real_step(name: str, options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    state = repr(optimizer.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    expected = state_bytes(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert repr(optimizer.state_dict()) == state
    step(model, optimizer)
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert expected == sum(value.nbytes for value in kept)


class OneForAll(torch.optim.SGD):
    """Has one state for all of a group's parameters, which it keeps with the first of them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, *_ = group["params"]
            self.state[first]["all"] = torch.cat([p.detach().flatten() for p in group["params"]])


@pytest.mark.parametrize("kind", [OneForAll, torch.optim.Adam, torch.optim.Adafactor])
def test_the_bytes_of_the_state_of_many_parameters_some_of_them_alike(kind: type[torch.optim.Optimizer]) -> None:
    layers = [nn.Conv2d(4, 4, 3) for _ in range(5)] + [nn.Conv2d(4, 4, 1) for _ in range(3)]
    first, *others = [p for layer in layers for p in layer.parameters()]
    optimizer = kind([{"params": [first]}, {"params": others, "lr": 0.5}], lr=0.1)  # type: ignore[call-arg]
    expected = state_bytes(optimizer)
    for p in (first, *others):
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert expected == sum(value.nbytes for value in kept)


@pytest.mark.parametrize("flags", ["Adafactor", "ASGD", "AdamW --optimizer-options fused=true"])
def test_optimizers_that_need_values_are_built(flags: str) -> None:
    model = small_model()
    step(model, build_optimizer(configured(f"--optimizer {flags}"), model.parameters()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer adamw", "`optimizer` adamw: torch.optim has no such class; did you mean AdamW?"),
        ("--optimizer Optimizer", "`optimizer` Optimizer: torch.optim has no such class"),
        (
            "--optimizer SGD --optimizer-options momentun=0.9",
            "`optimizer` SGD has no option momentun; did you mean momentum?",
        ),
        ("--optimizer SGD --optimizer-options params=3", "`optimizer` SGD has no option params"),
        ("--optimizer SGD --optimizer-options momentum=-1", "`optimizer` SGD does not take these options"),
        ("--optimizer LBFGS", "`optimizer` LBFGS cannot make a step here"),
        ("--optimizer SparseAdam", "`optimizer` SparseAdam cannot make a step here"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        build_optimizer(configured(flags), small_model().parameters())


def learning_rates(flags: str, epochs: int, steps: int, validation_losses: list[float | None]) -> list[float]:
    """The rate of every step of a run."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedule = build_schedule(configured(flags), optimizer)
    rates = []
    for epoch in range(epochs):
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            step(model, optimizer)
            schedule.after_step()
        schedule.after_epoch(validation_losses[epoch])
    return rates


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ("--lr-schedule constant", [1.0] * 6),
        ("--scheduler StepLR --scheduler-options step_size=2,gamma=0.1", [1.0, 1.0, 1.0, 1.0, 0.1, 0.1]),
        ("--scheduler ExponentialLR --scheduler-options gamma=0.5", [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        (
            "--scheduler CyclicLR --scheduler-options base_lr=1,max_lr=3,step_size_up=2,cycle_momentum=false",
            [1.0, 2.0, 3.0, 2.0, 1.0, 2.0],
        ),
        (
            "--scheduler ReduceLROnPlateau --scheduler-options patience=0,factor=0.5,threshold=0",
            [1.0, 1.0, 1.0, 1.0, 0.5, 0.5],
        ),
    ],
)
def test_schedules_count_epochs_steps_or_losses(flags: str, rates: list[float]) -> None:
    assert learning_rates(flags, 3, 2, [1.0, 2.0, 3.0]) == pytest.approx(rates)


def test_a_plateau_is_not_seen_where_nothing_was_validated() -> None:
    flags = "--scheduler ReduceLROnPlateau --scheduler-options patience=0,factor=0.5"
    assert learning_rates(flags, 3, 1, [None, None, None]) == [1.0] * 3


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^`low_precision_weights` are kept in the type of `precision`: choose bf16"):
        build.engine_options(configured("--low-precision-weights"))


def test_a_schedule_for_a_number_of_steps_says_so() -> None:
    optimizer = torch.optim.SGD(small_model().parameters(), lr=1.0, momentum=0.9)
    one_cycle = configured("--scheduler OneCycleLR --scheduler-options max_lr=2,total_steps=7")
    assert build_schedule(one_cycle, optimizer).num_steps == 7
    assert build_schedule(configured("--lr-schedule constant"), optimizer).num_steps is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("StepL --scheduler-options step_size=1", "`scheduler` StepL: torch.optim.lr_scheduler has no such class; did"),
        ("StepLR", "`scheduler` StepLR does not take these options {}"),
        ("StepLR --scheduler-options stepsize=1", "`scheduler` StepLR has no option stepsize; did you mean step_size?"),
        ("StepLR --scheduler-options step_size=a", "`scheduler` StepLR fails with {'step_size': 'a'}"),
        ("LambdaLR --scheduler-options lr_lambda=a", "`scheduler` LambdaLR does not take"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(flags: str, message: str) -> None:
    optimizer = torch.optim.SGD(small_model().parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        build_schedule(configured(f"--scheduler {flags}"), optimizer)


def test_trying_a_schedule_leaves_the_optimizer_alone() -> None:
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    build_schedule(configured("--scheduler StepLR --scheduler-options step_size=1"), optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_loss_of_a_classifier_is_cross_entropy_and_a_share_of_auxiliary_ones() -> None:
    logits, other, labels = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    expected = F.cross_entropy(logits, labels)
    assert torch.equal(classification_loss(logits, labels), expected)
    assert torch.equal(classification_loss((logits, None), labels), expected)
    with_other = expected + 0.3 * F.cross_entropy(other, labels)
    assert torch.equal(classification_loss((logits, None, other), labels), with_other)


@pytest.mark.parametrize(
    ("outputs", "found"),
    [(torch.zeros(4, 3, 8, 8), r"shape \(4, 3, 8, 8\)"), ({"out": "mask"}, "type str")],
)
def test_outputs_that_are_no_logits_are_refused(outputs: Any, found: str) -> None:
    with pytest.raises(Refusal, match=rf"^the model's output has {found}, but .* needs \(batch, classes\)"):
        classification_loss(outputs, torch.zeros(4, dtype=torch.int64))


def test_what_goes_wrong_in_training_is_blamed_on_the_model_only_if_it_is_the_models_fault() -> None:
    config = configured("--model small_resnet --image-size 8")

    def said(error: Exception) -> str:
        blaming = blaming_the_model(TrainingSpec(config, 2, 3), build.build_plan(config))
        with pytest.raises(Exception) as caught, blaming:  # noqa: PT011 - its kind is said with its message
            raise error
        return f"{type(caught.value).__name__}: {caught.value}"

    assert said(ValueError("too small")) == "Refusal: `model` small_resnet: too small"
    assert said(DatasetError("no tifffile")) == "Refusal: no tifffile"
    assert said(Refusal("as it is")) == "Refusal: as it is"
    assert said(RuntimeError("out of luck")) == "RuntimeError: out of luck"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--folds 3", "`folds` 3 is for samples in files"),
        ("--text words.txt --patient-column who", "`patient_column` who is for samples in files"),
        ("--images arrays.npz --split-file a.csv", "`split_file` a.csv is for samples in files"),
        ("--images scans --text stdlib", "`text` and `images` were both given"),
        ("--dataset my_code.py:Scans --text stdlib", "`dataset` and `text` were both given"),
        ("--features bags --images scans", "`slides` and `images` were both given"),
    ],
)
def test_options_of_another_kind_of_data_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source_of(configured(flags)).prepared()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--stain-norm macenko", "`stain_norm` macenko has no effect without `slides` or `features`"),
        ("--slides a --stain-reference b", "`stain_reference` b has no effect without `stain_norm`"),
        ("--images scans --leave-out pen,blur", "`leave_out` pen,blur has no effect without"),
        ("--images scans --patch-size 64 --most-patches 9", "`most_patches` 9 has no effect without"),
        ("--text stdlib --jitter 0.1", "`jitter` 0.1 has no effect beside `text`"),
        ("--text stdlib --sampling balanced", "`sampling` balanced has no effect beside `text`"),
        ("--document-mask", "`document_mask` has no effect without `text`"),
        ("--aggregator mean", "`aggregator` mean has no effect without `patches` or `features`"),
        ("--scheduler-options gamma=0.5", "`scheduler_options` gamma=0.5 has no effect without `scheduler`"),
        ("--stream-norm frozen", "`stream_norm` frozen has no effect without `stream`"),
    ],
)
def test_options_that_would_change_nothing_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_effect(parse(flags.split()))


def test_options_that_change_no_results_are_named_where_they_do_nothing() -> None:
    idle = parse("--balance memory --schedule gpipe --stream-keep disk".split())
    named = ["`schedule`", "`balance`", "`stream_keep`"]
    assert [line.split()[0] for line in without_effect(idle, changes_results=False)] == named
    of_use = parse("--stages 2 --balance memory --schedule gpipe --patch-size 8 --stream-keep disk".split())
    assert not [*without_effect(of_use, changes_results=False)]
    require_effect(of_use)


def test_options_name_others_that_there_are_and_no_preset_has_one_without_effect() -> None:
    options = options_of(Config)
    assert {name for item in options.values() for name in (*item.needs, *item.not_with)} <= options.keys()
    for name in PRESETS:
        require_effect(parse(["--preset", name]))
