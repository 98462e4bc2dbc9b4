"""Stages run one after the other are the model: outputs, gradients, buffers and names, wherever it is cut."""

import functools
import re
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.engine.precision import lower_precision
from mpi4dl.geometry import BATCH, Tiling
from mpi4dl.models import build
from mpi4dl.parallel.cut import choose_cut, partition, shared_out
from mpi4dl.parallel.pipeline.program import Slot, TensorSpec, pack
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype, materialize, outline, unfit
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import Grid, Layout, SpatialTensor
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator
from tests.parallel.pipeline.cutting import assert_cuts_like_the_model, problem_of, random_counts
from tests.support.counting import count_flops

MODELS: dict[str, Callable[[], nn.Module]] = {
    "amoebanetd": functools.partial(build, "amoebanetd", num_layers=3, num_filters=16, num_classes=4),
    "resnet_v1": functools.partial(build, "resnet_v1", depth=14),
    "resnet_v2": functools.partial(build, "resnet_v2", depth=20),
    "unet": functools.partial(build, "unet", num_filters=4, depth=2),
    "small_resnet": functools.partial(build, "small_resnet", num_filters=4),
    **{
        name: functools.partial(build, name, num_classes=5)
        for name in [
            "resnet18",
            "resnet50",
            "densenet121",
            "mobilenet_v3_small",
            "efficientnet_b0",
            "convnext_tiny",
            "regnet_y_400mf",
            "fcn_resnet50",
        ]
    },
}


IMAGE = torch.randn(2, 3, 33, 47, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=MODELS)
def cuttable(request: pytest.FixtureRequest) -> Cuttable:
    torch.manual_seed(0)
    return Cuttable(MODELS[request.param]())


@pytest.mark.sample(3)
def test_stages_train_as_the_model_does(cuttable: Cuttable) -> None:
    flops = count_flops(cuttable, tuple(IMAGE.shape))
    balanced = [partition(shared_out(flops, [1] * stages)) for stages in (2, 5)]
    by_chance = [random_counts(len(cuttable), stages) for stages in (3, 4)]
    assert_cuts_like_the_model(cuttable, balanced + by_chance, IMAGE)


@pytest.mark.sample(3)
def test_stages_evaluate_as_the_model_does(cuttable: Cuttable) -> None:
    cuttable.model.eval()
    with torch.no_grad():
        assert_cuts_like_the_model(cuttable, [random_counts(len(cuttable), 5, seed=1)], IMAGE)
    cuttable.model.train()


@pytest.mark.sample(3)
def test_stages_hold_the_models_tensors_under_its_names_in_its_order(cuttable: Cuttable) -> None:
    stages = cuttable.stages(random_counts(len(cuttable), 4, seed=2))
    held = {name: value for stage in stages for name, value in stage.state_dict(keep_vars=True).items()}
    model = cuttable.model.state_dict(keep_vars=True)
    assert held.keys() == model.keys()
    assert all(held[name] is model[name] for name in model)
    assert sum(len(stage.state_dict()) for stage in stages) == len(model)
    for stage in stages:
        names = [name for name, _ in stage.named_parameters()]
        assert names == [name for name, _ in cuttable.model.named_parameters() if name in set(names)]


@pytest.mark.parametrize("name", ["amoebanetd", "unet"])
def test_every_cut_is_possible(name: str) -> None:
    torch.manual_seed(0)
    cuttable = Cuttable(MODELS[name]())
    assert_cuts_like_the_model(
        cuttable, [(i, len(cuttable) - i) for i in range(1, len(cuttable))], IMAGE[:, :, :9, :14]
    )


class Skips(nn.Module):
    """A skip over three layers, a size, a pair, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.MaxPool2d(2)
        self.pair = Pair()
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.ones(1), persistent=False)
        self.never_used = nn.Linear(2, 2)

    def forward(self, x: Tensor, bias: Tensor, extra: Tensor | None = None) -> dict[str, Tensor]:
        size = x.shape[-2:]
        skip = self.first(x)
        y = self.relu(self.down(skip))
        left, right = self.pair(y)
        y = F.dropout(self.up(left), 0.5, self.training)
        y = F.interpolate(y + self.scale, size=size) + skip
        if extra is not None:
            y = y + extra
        return {"out": y + bias, "right": right * self.offset}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return x, x


def skips() -> tuple[Cuttable, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Cuttable(Skips()), (torch.randn(1, 3, 5, 7), torch.randn(1, 4, 1, 1))


def test_what_is_alive_at_each_cut() -> None:
    cuttable, _ = skips()
    assert {name: cuttable.live(i) for i, name in enumerate((*cuttable.names, "end"))} == {
        "first": ("x", "bias"),
        "down": ("bias", "getitem", "first"),
        "relu": ("bias", "getitem", "first", "down"),
        "pair": ("bias", "getitem", "first", "relu"),
        "up": ("bias", "getitem", "first", "getitem_1", "getitem_2"),
        "dropout": ("bias", "getitem", "first", "getitem_2", "up"),
        "add": ("bias", "getitem", "first", "getitem_2", "dropout"),
        "interpolate": ("bias", "getitem", "first", "getitem_2", "add"),
        "add_1": ("bias", "first", "getitem_2", "interpolate"),
        "add_2": ("bias", "getitem_2", "add_1"),
        "mul": ("getitem_2", "add_2"),
        "end": (),
    }


@pytest.mark.parametrize("mode", [True, False])
def test_every_cut_of_a_model_with_skips(mode: bool) -> None:
    cuttable, inputs = skips()
    cuttable.model.train(mode)
    every_cut = [(i, len(cuttable) - i) for i in range(1, len(cuttable))]
    assert_cuts_like_the_model(cuttable, [*every_cut, [1] * len(cuttable)], *inputs)


def test_what_no_forward_uses_stays_with_the_last_stage() -> None:
    cuttable, _ = skips()
    first, last = cuttable.stages((9, 2))
    assert "never_used.weight" in dict(last.named_parameters())
    assert [name for name, _ in first.named_parameters()][:2] == ["scale", "first.weight"]
    assert ([name for name, _ in last.named_buffers()], "offset" in last.state_dict()) == (["offset"], False)


def test_train_and_eval_reach_every_module() -> None:
    stage = copied = Cuttable(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.ReLU())).stage((2, 1), 0)
    assert not any(module.training for module in stage.eval().modules())
    assert all(module.training for module in copied.train().modules())


def test_a_pair_of_one_tensor_is_handed_once_and_a_size_in_the_header() -> None:
    stem = Cuttable(MODELS["amoebanetd"]()).stage((1, 8), 0)
    tensors, header = pack(stem(IMAGE))
    assert (len(tensors), header.template) == (1, ((Slot(0), Slot(0)),))

    fcn = Cuttable(outline(MODELS["fcn_resnet50"]))
    tensors, header = pack(fcn.stage((1, len(fcn) - 1), 0)(torch.empty(1, 3, 20, 30, device="meta")))
    assert header.template == (torch.Size([20, 30]), Slot(0))
    assert header.tensors == (TensorSpec((1, 64, 10, 15), torch.float32, True),)


def test_integers_are_marked_as_wanting_no_gradient() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return torch.gather(y, 1, y.argsort(dim=1)) * 2

    cuttable = Cuttable(Indexed())
    _, header = pack(cuttable.stage((2, 2), 0)(torch.randn(2, 3)))
    assert [(spec.dtype, spec.requires_grad) for spec in header.tensors] == [
        (torch.float32, True),
        (torch.int64, False),
    ]
    assert_cuts_like_the_model(cuttable, [(1, 3), (2, 2), (3, 1)], torch.randn(2, 3))


def test_a_stage_may_overwrite_what_it_receives_without_a_copy() -> None:
    stage = Cuttable(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))).stage((1, 1), 1)
    received = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    output = stage(received)
    assert output.data_ptr() == received.data_ptr()
    output.sum().backward()
    assert received.grad is not None
    assert received.grad.tolist() == [[0, 1]]


def test_a_value_is_let_go_after_its_last_use() -> None:
    results: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def note(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        alive.append(sum(ref() is not None for ref in results))
        results.append(weakref.ref(result))

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for layer in model:
        layer.register_forward_hook(note)
    with torch.no_grad():
        Cuttable(model).stage((4,), 0)(torch.randn(1, 2))
    assert alive == [0, 1, 1, 1]


def test_stages_run_on_tiles() -> None:
    """On tensors spread over ranks, of which none need exist here: shapes are those of the whole image."""
    cuttable = Cuttable(outline(MODELS["unet"]))
    grid = Grid(DryRunCommunicator(3, 4), 2, 2)
    layout = Layout(grid, Tiling.even(grid.shape, (1, 33, 47)).drop(BATCH), (None, 2, 3))
    values = (SpatialTensor(torch.empty(layout.local_shape((1, 3, 33, 47)), device="meta"), layout),)
    for stage in cuttable.stages([3] * 4 + [len(cuttable) - 12]):
        values = stage(*values)
    assert isinstance(values, SpatialTensor)
    assert values.shape == (1, 2, 33, 47)


@pytest.mark.parametrize("name", ["amoebanetd", "unet", "regnet_y_400mf", "mobilenet_v3_small"])
def test_a_stage_gets_the_values_that_the_whole_model_would_have(name: str) -> None:
    build_model = MODELS[name]
    torch.manual_seed(11)
    expected = build_model().state_dict()
    before = torch.get_rng_state()
    cuttable = Cuttable(outline(build_model))
    stages = [cuttable.stage(random_counts(len(cuttable), 3), i) for i in range(3)]
    assert all(value.is_meta for stage in stages for value in stage.state_dict().values())
    made = [materialize(stage, build_model, "cpu", seed=11) for stage in stages]
    assert torch.equal(before, torch.get_rng_state())
    got = {name: value for stage in made for name, value in stage.state_dict().items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_what_is_tied_stays_so_in_models_that_read_values_while_they_are_built() -> None:
    """As in models of Hugging Face that are drawn again: moved to the meta device, each name would have its own."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model if model[0].weight.any() else nn.Identity()

    model = outline(build)
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert model[1].weight is model[0].weight  # type: ignore[index]


def test_a_model_may_read_its_values_as_it_is_built() -> None:
    """By numpy too, for which tensors without values are of a wrong type."""
    model = outline(lambda: nn.Linear(2, int(torch.tensor([3.0]).numpy().sum())))
    assert [(tuple(p.shape), p.is_meta) for p in model.parameters()] == [((3, 2), True), ((3,), True)]


def test_a_model_that_is_there_already_is_cut_with_its_values() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    shapes = outline(lambda: model)
    assert all(p.is_meta for p in shapes.parameters())
    made = materialize(Cuttable(shapes).stage((1, 1), 0), lambda: model, "cpu", seed=0)
    assert torch.equal(made.state_dict()["0.weight"], model[0].weight)


def test_another_model_is_not_materialized() -> None:
    stage = Cuttable(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).stage((1, 1), 0)
    message = r"build\(\) made 0.bias of shape \(4,\), but the model that was split has \(3,\)"
    with pytest.raises(ValueError, match=message):
        materialize(stage, lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU()), "cpu", seed=0)


def test_stages_that_share_parameters_are_known() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    cuttable = Cuttable(model)
    assert cuttable.shared((2, 1, 1)) == {"0.weight": (0, 1)}
    assert cuttable.shared((3, 1)) == {}


class Hidden(nn.Module):
    """Uses a layer that is no submodule of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[0].weight.mean()


class Uses(nn.Module):
    """A function makes a second use of something behind a layer, where it is cut."""

    def __init__(self, second: Callable[["Uses", Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight
        self.hidden, self.second = Hidden(self.attention.out_proj), second

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.norm(self.attention(x, x, x, need_weights=False)[0])
        return self.second(self, self.middle(x))


WORDS = {"words.weight": (0, 1)}
USES: dict[str, tuple[Callable[[Uses, Tensor], Tensor], dict[str, tuple[int, ...]] | str]] = {
    "tied": (lambda self, x: self.head(x), WORDS),
    "tied, and looked at": (lambda self, x: self.head(x.to(self.head.weight.dtype)), WORDS),
    "by hand": (lambda self, x: F.linear(x, self.words.weight), WORDS),
    "transposed": (lambda self, x: x @ self.words.weight.t(), WORDS),
    "penalty": (lambda self, x: x + self.words.weight.square().mean(), WORDS),
    "by another name": (lambda self, x: x + self.head.weight.square().mean(), WORDS),
    "child": (
        lambda self, x: self.attention.out_proj(x),
        {"attention.out_proj.weight": (0, 1), "attention.out_proj.bias": (0, 1)},
    ),
    "weight of a child": (
        lambda self, x: x * self.attention.out_proj.bias,
        {"attention.out_proj.bias": (0, 1)},
    ),
    "looked at": (lambda self, x: x.to(self.words.weight.dtype) * self.words.weight.shape[1], {}),
    "buffer looked at": (lambda self, x: x * self.norm.running_mean.size(0), {}),
    "buffer": (lambda self, x: x * self.norm.running_mean.mean(), "a buffer can only be in one stage"),
}
PARTED: dict[str, tuple[Callable[[Uses, Tensor], Tensor], str]] = {
    "hidden": (
        lambda self, x: self.hidden(x),
        r"the gradient of attention.out_proj.\w+ differs .* register shared weigh",
    ),
    "written": (
        lambda self, x: x + self.words.weight.data.mul_(0.5).mean(),
        "the parameter words.weight differs .* change none of them in place",
    ),
}


@pytest.mark.parametrize("name", USES)
def test_whatever_way_stages_use_one_tensor_it_is_known(name: str) -> None:
    second, wanted = USES[name]
    cuttable = Cuttable(outline(lambda: Uses(second)))
    middle = cuttable.names.index("middle")
    counts = (middle, len(cuttable) - middle)
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            cuttable.shared(counts)
        return
    assert cuttable.shared(counts) == wanted
    if name.startswith("tied"):  # each stage has its own name for it, as `cutting` does not expect
        return
    model = Uses(second)
    assert_cuts_like_the_model(Cuttable(model), [counts], torch.tensor([[1, 2, 3], [4, 0, 1]]))


@pytest.mark.parametrize("name", [name for name, (_, wanted) in USES.items() if not isinstance(wanted, str)])
def test_what_stages_share_is_no_difference_to_the_plain_model(name: str) -> None:
    assert problem_of(lambda: Uses(USES[name][0]), "middle", (2, 3)) == ""


@pytest.mark.parametrize("name", PARTED)
def test_a_weight_of_several_stages_of_which_they_have_copies_is_refused_by_its_name(name: str) -> None:
    second, wanted = PARTED[name]
    assert re.search(wanted, problem_of(lambda: Uses(second), "middle", (2, 3)))


def test_what_is_looked_at_has_the_type_of_the_stage() -> None:
    cuttable = Cuttable(Uses(lambda self, x: x.to(self.words.weight.dtype)))
    stage = cuttable.stage((cuttable.names.index("middle"), 2), 1)
    assert "words.weight" not in stage.state_dict()
    assert stage.double()(torch.ones(2, 3, 4).double()).dtype is torch.float64
    lower_precision(stage.float(), torch.bfloat16)
    assert stage(torch.ones(2, 3, 4).bfloat16()).dtype is torch.bfloat16


class Within(nn.Module):
    """What it does within contexts, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.layers[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layers[1](x)
        if self.training:
            self.count += 1
        same = y = y.float() + teacher
        y += 1
        return self.layers[2](y + same) * self.count


def test_contexts_and_changes_in_place_are_kept() -> None:
    cuttable = Cuttable(Within())
    assert cuttable.model.get_buffer("count") == 0
    x = torch.randn(2, 4)
    for mode in (True, False):
        cuttable.model.train(mode)
        together = range(cuttable.names.index("iadd") + 1)  # the buffer is in one stage with all that reads it by name
        assert_cuts_like_the_model(cuttable, [(i, len(cuttable) - i) for i in together if i], x)


class Parted(nn.Module):
    """Changes in place what another value is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x.view(-1, 2, 2)
        z = self.middle(x.tanh())
        return y.flatten(1) + self.relu(x) + z


def test_a_view_is_not_parted_from_what_is_changed_in_place() -> None:
    problem = problem_of(Parted, "middle", (2, 4))
    assert re.search(r"an output differs .*first and view are in the same memory before middle.*: clone one", problem)
    cuttable = Cuttable(Parted())
    assert_cuts_like_the_model(cuttable, [(len(cuttable) - 1, 1)], torch.randn(2, 4))


class Counting(nn.Linear):
    """Counts in Python, and does what it does but once in a thousand calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls % 1000 == 0 else 1)


def test_a_module_that_counts_in_python_stays_in_one_stage() -> None:
    def repeated() -> nn.Module:
        counting = Counting(2, 2)
        return nn.Sequential(nn.Linear(2, 2), counting, nn.ReLU(), counting)

    problem = problem_of(repeated, 2, (3, 2))
    assert re.search(r"stage 0 changes 1.calls as it runs, which another stage uses.*keep count in a buf", problem)
    assert problem_of(repeated, 1, (3, 2)) == ""


STEPS = 0
SCALES: dict[int, float] = {}  # a cache, of which each process may have its own


class Stepping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        return super().forward(x) * SCALES.setdefault(x.shape[-1], 2.0)


class Stepped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALES.setdefault(x.shape[-1], 2.0) * (2 if STEPS > 1000 else 1)


def test_a_global_that_a_stage_writes_and_another_one_reads_is_refused() -> None:
    def both() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Stepping(2, 2), Stepped(2, 2))

    problem = problem_of(both, 2, (3, 2))
    assert re.search(r"stage 0 changes STEPS, which forward \(line \d+ of test_split.py\) reads, as it runs", problem)
    assert problem_of(both, 1, (3, 2)) == ""
    assert (STEPS, SCALES) == (0, {})


class Overlapping(nn.Module):
    """Two parameters in the same memory, each of which a stage trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.data[:])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def test_parameters_in_the_same_memory_stay_in_one_stage() -> None:
    assert "the parameter first.weight differs" in problem_of(Overlapping, 1, (3, 2))


class Placed(nn.Module):
    """Reads a table, which it may change."""

    def __init__(self, table: Tensor, by: float) -> None:
        super().__init__()
        self.by = by
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.by:
            self.table.add_(self.by)
        return x * self.table


def placed(by: float) -> nn.Module:
    table = torch.ones(2)
    return nn.Sequential(nn.Linear(2, 2), Placed(table, by), nn.Linear(2, 2), Placed(table, 0.0))


def test_a_buffer_of_two_stages_may_not_change() -> None:
    assert problem_of(functools.partial(placed, 0.0), 2, (3, 2)) == ""
    assert problem_of(functools.partial(placed, 1.0), 2, (3, 2)).startswith("in stages it does not compute what")


def test_a_buffer_stays_in_one_stage() -> None:
    norm = nn.BatchNorm1d(3)
    cuttable = Cuttable(nn.Sequential(norm, nn.ReLU(), norm))
    assert cuttable.names == ("0", "1", "0:2")
    message = (
        r"0.running_mean = 2.running_mean is used by 0 \(stage 0\), 0:2 \(stage 1\), but a buffer can only be in one "
        r"stage: put units 0 to 2 \(counted from 0\) into the same stage"
    )
    with pytest.raises(ValueError, match=message):
        cuttable.stages((1, 2))


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (0, 3), ()])
def test_counts_must_add_up(counts: tuple[int, ...]) -> None:
    cuttable = Cuttable(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    message = f"balance {','.join(map(str, counts))} puts {sum(counts)} units into {len(counts)} stages, but Sequential"
    with pytest.raises(ValueError, match=rf"{message} has 3, and every stage needs at least one"):
        cuttable.stage(counts, 0)


def test_a_stage_says_what_it_takes() -> None:
    stage = Cuttable(Skips()).stage((4, 7), 1)
    with pytest.raises(ValueError, match="stage 1 of 2 got 1 values, but takes 5: bias, getitem, first, getitem_1, ge"):
        stage(torch.zeros(1))
    assert "1 of 2: bias, getitem, first, getitem_1, getitem_2 -> out" in repr(stage)


class Heads(nn.Module):
    """A head for training alone, work for evaluation alone, and an input that only the mode chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.auxiliary = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Dropout(0.5), nn.ReLU())
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int] | dict[str, Tensor]:
        x = F.relu(self.first(x))
        if self.training:
            other = F.relu(self.auxiliary(x)) * 2
        x = F.relu(self.second(x) if self.training else self.second(x.clamp(max=1)) * 2)
        x = F.dropout(self.last(x), 0.5, self.training)
        return (x, other, 1) if self.training else {"out": x.softmax(1)}


@pytest.mark.parametrize("frozen", [[], ["auxiliary"], ["first", "auxiliary.1"]], ids=str)
@pytest.mark.parametrize("mode", [True, False])
def test_what_one_mode_alone_makes_is_made_in_that_mode_alone(mode: bool, frozen: list[str]) -> None:
    torch.manual_seed(0)
    model = Heads()
    cuttable = Cuttable(model)
    assert [name for name in cuttable.names if "auxiliary" in name] == ["auxiliary.0", "auxiliary.1", "auxiliary.2"]
    model.train(mode)
    for path in frozen:
        model.get_submodule(path).train(not mode)
    every_cut = [(i, len(cuttable) - i) for i in range(1, len(cuttable))]
    assert_cuts_like_the_model(cuttable, [*every_cut, [1] * len(cuttable)], IMAGE[:, :, :6, :7])


def test_two_modes_that_call_the_same_in_another_order() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x)) if self.training else self.one(self.other(x)) + 1

    cuttable = Cuttable(Turned())
    for mode in (True, False):
        cuttable.model.train(mode)
        assert_cuts_like_the_model(cuttable, [(1, len(cuttable) - 1), (len(cuttable),)], torch.randn(2, 2))


class Particular(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[2] == 8, "8 rows\nwanted")
        return x.mean((2, 3))


class Looking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else x.view(7)


def test_images_that_the_plain_model_refuses_are_told_from_other_errors() -> None:
    assert unfit(Particular(), (2, 3, 9, 8)) == "cannot take images of 3 x 9 x 8 (channels, height, width): 8 rows"
    assert unfit(Particular(), (2, 3, 8, 9)) is None
    assert unfit(Looking(), (2, 3, 8, 8)) is None  # that there are no values to look at is no fault of the images
    batch_norm = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)).eval()
    assert "more than 1 value per channel" in (unfit(batch_norm, (1, 3, 8, 8)) or "")  # in training


class Large(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[2] == 300, "300 rows wanted")
        return super().forward(x)


def test_units_that_take_no_small_images_are_timed_on_their_own() -> None:
    cuttable, plan = Cuttable(Large(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 3)).to("meta")), Plan.of(stages=2)
    counts, costs = choose_cut(cuttable, plan, None, "auto", (1, 1, 300, 300))
    assert sum(counts) == len(cuttable)
    assert costs is not None
    assert costs.timed
    with pytest.raises(ValueError, match=r"cannot take images of 1 x 299 x 10 .*: 300 rows wanted"):
        choose_cut(cuttable, plan, None, "auto", (1, 1, 299, 10))


class Rotated(nn.Module):
    """Its first parameter is complex, but its images are not."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex128))
        self.layers = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.turn.real


def test_images_are_of_the_first_real_type_of_the_parameters() -> None:
    model = outline(Rotated)
    assert image_dtype(model) is torch.float64
    assert image_dtype(nn.ReLU()) is torch.float32
    assert unfit(model, (1, 3, 8, 8)) is None
    assert "cannot take images of 4 x 8 x 8" in str(unfit(model, (1, 4, 8, 8)))


def test_samples_of_one_dim_are_tokens_where_they_are_looked_up() -> None:
    model = outline(lambda: build("gpt", vocabulary=9, context=8, num_layers=1, hidden=8, num_heads=2))
    assert unfit(model, (2, 8)) is None
    assert "cannot take samples of 9 tokens" in str(unfit(model, (2, 9)))


class Aside(nn.Module):
    """What its second layer computes goes through the third, and then nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        y = first(x)
        third(second(y))
        return fourth(y)


def test_what_nothing_comes_of_hands_no_gradient_back():
    cuttable = Cuttable(Aside())
    y, beside = cuttable.stage((2, 2), 0)(torch.randn(1, 2))
    assert (y.requires_grad, beside.requires_grad) == (True, False)
