"""Which modules are opened, what their calls are grouped to, and what is refused with a reason."""

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.models import build
from mpi4dl.parallel.pipeline.decisions import fingerprint
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.pipeline.trace import trace


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in trace(model).units]


class Forward(nn.Module):
    """A model that is nothing but its forward pass."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if x.sum() > 0 else x


class Encoder(nn.Module):
    """Holds blocks, so it is opened, unless it asks what the data are."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.blocks = nn.Sequential(Block(), Block())
        self.position = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and x.mean() > 0:
            x = -x
        return self.blocks(x + self.position)


def test_sequentials_are_opened_and_blocks_are_not():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Block(), nn.ModuleDict({"0": Block()})["0"])
    assert names(model) == ["0.0", "0.1", "1", "2"]


def test_a_module_that_holds_blocks_is_opened():
    model = nn.Sequential(Encoder(asks=False), nn.Linear(2, 2))
    assert names(model) == ["0.add", "0.blocks.0", "0.blocks.1", "1"]
    assert [unit.name for unit in trace(model, whole=["0"]).units] == ["0", "1"]


def test_what_cannot_be_opened_is_kept_whole_and_named_when_units_are_too_few():
    cuttable = Cuttable(nn.Sequential(Encoder(asks=True), nn.Linear(2, 2)))
    assert cuttable.names == ("0", "1")
    message = r"Sequential has 2, .* at least one; kept whole: 0 \(.*control flow \(line \d+ of test_trace.py: `if self"
    with pytest.raises(ValueError, match=message):
        cuttable.stages((1, 1, 1))


def test_sizes_and_members_belong_to_the_unit_before_them():
    units = trace(build("unet", num_filters=2, depth=1)).units
    by_name = {unit.name: [call.name for call in unit.calls] for unit in units}
    assert list(by_name)[-11:] == [
        "bottom.5",
        "upsample.0",
        "pad",
        "cat",
        *(f"decoder.0.{i}" for i in range(6)),
        "classifier",
    ]
    assert len(by_name["upsample.0"]) == 11
    assert all(len(calls) == 1 for name, calls in by_name.items() if name != "upsample.0")


def test_the_model_is_left_in_its_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    trace(model)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert not [name for name in vars(model) if "constant" in name]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda self, x: self.layer(x) if x.sum() > 0 else x, r"control flow \(line \d+ of test_trace.py: `"),
        (lambda self, x: self.layer(x) + torch.ones(2), r"makes a tensor of shape \(2,\) that does not depend on"),
        (lambda self, x: self.layer(x) if self.layer.training else x, "makes other calls in training than in evaluat"),
        (lambda self, x: (F.relu(x), 1 if self.layer.training else 2), r"it returns \(Value\(name='relu'\), 1\) in tr"),
        (lambda self, x: x, "it calls no module and computes nothing"),
        (lambda self, x: nn.Linear(2, 2)(x), "module is not installed as a submodule"),
    ],
)
def test_a_forward_that_cannot_be_traced_is_refused_with_the_reason(function: Callable, reason: str):
    with pytest.raises(ValueError, match=rf"cannot split Forward: its forward cannot be traced, because .*{reason}"):
        trace(Forward(function))
    with pytest.raises(ValueError, match=r"Make the model an nn.Sequential of its parts, or move what stands in the w"):
        trace(Forward(function))
    if "computes nothing" not in reason:
        assert names(nn.Sequential(Forward(function), nn.ReLU())) == ["0", "1"]


def test_the_first_call_that_differs_between_the_modes_is_named():
    with pytest.raises(ValueError, match=r"\(first layer in training, relu in evaluation\)"):
        trace(Forward(lambda self, x: F.relu(self.layer(x) if self.layer.training else x)))


def test_inputs_must_be_known():
    class Many(nn.Module):
        def forward(self, *images: Tensor) -> Tensor:
            return images[0] * 2

    class Keyword(nn.Module):
        def forward(self, *, image: Tensor) -> Tensor:
            return image * 2

    with pytest.raises(ValueError, match=r"it takes \*images: .*, so that nobody knows how many inputs there are"):
        trace(Many())
    with pytest.raises(ValueError, match="its input image can only be passed by keyword"):
        trace(Keyword())


CALLS = 0
SEEN: list[int] = []


def count_calls(self: nn.Module, x: Tensor) -> bool:
    global CALLS
    CALLS += 1
    return CALLS % 2 == 0


def count_own(self: nn.Module, x: Tensor) -> bool:
    self.calls = getattr(self, "calls", 0) + 1
    return self.calls % 2 == 0


def see(self: nn.Module, x: Tensor) -> bool:
    SEEN.append(1)
    return len(SEEN) % 2 == 0


DECISIONS: dict[str, Callable[[nn.Module, Tensor], bool]] = {
    "torch.rand": lambda self, x: torch.rand(1).item() < 0.3,
    "rand([])": lambda self, x: bool(torch.rand([]) < 0.3),
    "uniform_": lambda self, x: torch.empty(1).uniform_().item() < 0.3,
    "random": lambda self, x: random.random() < 0.3,
    "uniform": lambda self, x: random.uniform(0, 2) < 0.3,
    "randint": lambda self, x: np.random.randint(9) < 3,
    "np.random.rand": lambda self, x: np.random.rand() < 0.3,
    "an attribute": count_own,
    "a global": count_calls,
    "a list": see,
}


class Deciding(nn.Module):
    """Holds blocks, so it is opened, and decides by a function whether to leave out the first."""

    def __init__(self, decide: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.blocks, self.decide = nn.ModuleList(Block() for _ in range(2)), decide

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.decide(self, x):
            return self.blocks[1](x)
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_decided_in_python_is_kept_live_or_refused_whatever_is_drawn(name: str, seed: int) -> None:
    for module in (torch, random, np.random):
        getattr(module, "manual_seed" if module is torch else "seed")(seed)
    inside, alone = nn.Sequential(Deciding(DECISIONS[name]), nn.Linear(2, 2)), Deciding(DECISIONS[name])
    states = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    assert names(inside) == ["0", "1"]
    with pytest.raises(ValueError, match=r"cannot split Deciding: .*(random numbers|it changes)"):
        trace(alone)
    assert states == (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    assert "calls" not in vars(inside[0])


@pytest.mark.parametrize("name", ["a global", "an attribute", "torch.rand"])
def test_two_that_decide_in_python_are_both_kept_whole(name: str) -> None:
    decide = DECISIONS[name]
    assert names(nn.Sequential(Deciding(decide), nn.ReLU(), Deciding(decide))) == ["0", "1", "2"]


def test_draws_that_decide_nothing_are_no_obstacle() -> None:
    for draw in (lambda: torch.rand([]), lambda: random.uniform(0, 1), lambda: random.random()):
        model = nn.Sequential(Deciding(lambda self, x, draw=draw: bool(draw() < 0)), nn.Linear(2, 2))
        assert names(model) == ["0.blocks.0", "0.blocks.1", "1"]


TEMPERATURE = 0.5


class Scheduled(nn.Module):
    """What it reads may be changed by others between steps."""

    share = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.temperature, self.unread = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x) * self.temperature) * TEMPERATURE + self.share


def test_a_change_of_what_was_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for outer in (Scheduled(), nn.Sequential(nn.Sequential(Scheduled(), nn.ReLU()), nn.ReLU())):
        model = outer if isinstance(outer, Scheduled) else outer[0][0]  # type: ignore[index]
        stages = Cuttable(outer).stages((1, len(Cuttable(outer)) - 1))
        assert [copied.stage_program for copied in deepcopy(stages)] == [stage.stage_program for stage in stages]
        model.unread = 2.0
        assert not [change for stage in stages for change in stage.changes()]
        if isinstance(outer, nn.Sequential):
            continue  # kept whole: it is live
        for place, name in ((model, "temperature"), (Scheduled, "share"), (sys.modules[__name__], "TEMPERATURE")):
            with monkeypatch.context() as context:
                context.setattr(place, name, 0.7)
                for stage in stages:
                    (change,) = stage.changes()
                    assert name in change
        assert not [change for stage in stages for change in stage.changes()]


def test_hooks_on_the_model_itself_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.raises(ValueError, match="it has forward hooks"):
        trace(model)


class Settings:
    """Something that a function asks for what it does."""

    most = 3


def clipped(settings: Settings, x: Tensor, width: int) -> Tensor:
    """What no placeholder can go through."""
    return x[:, : settings.most] if x.shape[1] > settings.most and width > 1 else x


class Hiding(nn.Module):
    """Gives a function an object with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        settings = Settings()
        settings.layer = self.layer  # type: ignore[attr-defined]
        return self.layer(clipped(settings, x, 2))


def test_an_object_with_layers_is_not_given_to_a_function() -> None:
    with pytest.raises(ValueError, match=r"argument of type: .*Settings"):
        trace(Hiding())


class Clipping(nn.Module):
    """All its inputs have defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor | None = None, width: int = 2, **more: object) -> Tensor:
        assert x is not None
        assert not more
        return clipped(self.settings, F.relu(x), width=width) * 2


def test_a_function_that_cannot_be_looked_through_is_one_call() -> None:
    cuttable = Cuttable(Clipping())
    assert cuttable.names == ("relu", "clipped", "mul")
    assert "test_trace.clipped (symbolically traced" in cuttable.hint()
    assert cuttable.program.inputs == ("x",)
    for width in (2, 4):
        x = torch.randn(2, width)
        first, second = cuttable.stages((1, 2))
        assert torch.equal(second(*first(x)), Clipping()(x))
    assert clipped(Settings(), x, 2).shape == (2, 3)  # all is as it was


@pytest.mark.parametrize("path", ["nowhere", ""])
def test_a_path_of_no_module_is_refused(path: str):
    with pytest.raises(ValueError, match=f"whole='{path}' is not the path of a module in Sequential"):
        trace(nn.Sequential(nn.ReLU()), whole=[path])


class Padding(nn.Module):
    """Pads images of odd sizes before it halves them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % 2 or width % 2:
            x = F.pad(x, (0, width % 2, 0, height % 2))
        y = self.second(self.first(x))
        if y.shape[-2:] != (height, width):
            y = y[:, :, :height, :width]
        return y


def test_a_model_may_ask_for_sizes_which_must_stay_what_they_are():
    odd, even = torch.randn(2, 3, 7, 6), torch.randn(2, 3, 8, 6)
    with torch.device("meta"):
        outline = Padding()
    with pytest.raises(ValueError, match=r"control flow \(line \d+ of test_trace.py: `if height % 2"):
        trace(outline)
    for image, other, units in ((odd, even, ["pad", "first", "second"]), (even, odd, ["first", "second"])):
        cuttable, model = Cuttable(outline, image=tuple(image.shape)), Padding()
        assert [name for name in cuttable.names if name != "getitem"][: len(units)] == units
        counts = (len(cuttable) - 1, 1)
        stages = [Stage(cuttable.stage(counts, i).stage_program, model) for i in range(2)]
        assert torch.equal(stages[1](*stages[0](image)), model(image))
        assert torch.equal(stages[1](*stages[0](image[:1])), model(image[:1]))  # fewer images are another matter
        with pytest.raises(ValueError, match=r"was (True|False) there, and is .* here \(line \d+ of .*`if height % 2"):
            stages[1](*stages[0](other))


def test_an_image_that_a_model_cannot_take_is_refused_in_the_words_of_the_model():
    def check(self, x):
        if x.shape[-1] % 32:
            raise RuntimeError(f"a width of {x.shape[-1]} is no multiple of 32")
        return self.layer(x)

    with pytest.raises(ValueError, match=r"cannot take images of .*: a width of 5 is no multiple of 32"):
        Cuttable(Forward(check).to("meta"), image=(1, 1, 4, 5))


def test_sets_are_alike_whatever_came_first() -> None:
    first, second = {0, 8}, {8, 0}
    assert list(first) != list(second)
    assert fingerprint((first,)) == fingerprint((second,)) != fingerprint(({0, 9},))


SCALES: dict[str, Tensor] = {}


def of_object(module: nn.Module) -> dict[str, Any]:
    return vars(vars(module).setdefault("settings", SimpleNamespace()))


def of_nested_list(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = vars(module).setdefault("caches", [{}])[0]
    return found


def of_global(module: nn.Module) -> dict[str, Any]:
    return SCALES


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Keeping(nn.Module):
    """Holds blocks, so it is opened, and keeps a tensor that its first call computes for all later ones."""

    def __init__(self, place: Callable[[nn.Module], dict[str, Any]]) -> None:
        super().__init__()
        self.blocks, self.place = nn.ModuleList(Residual() for _ in range(2)), place
        place(self)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.place(self)
        if kept.get("scale") is None:
            kept["scale"] = x.detach()[:1].exp()
        return self.blocks[1](self.blocks[0](x) * kept["scale"])


class Asking(nn.Module):
    """Asks for sizes behind what keeps a tensor, so that it is traced again and again."""

    def __init__(self, place: Callable[[nn.Module], dict[str, Any]]) -> None:
        super().__init__()
        self.keeping, self.last = Keeping(place), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.keeping(x))
        if y.shape[0] == 1:
            y = y[0]
        return y if y.shape[1] == 2 else y[:, :2]


@pytest.mark.parametrize("place", [vars, of_object, of_nested_list, of_global])
def test_a_tensor_that_a_module_keeps_for_later_calls_is_the_one_of_real_batches(place: Any) -> None:
    SCALES.clear()
    with torch.device("meta"):
        cuttable = Cuttable(Asking(place), image=(4, 2))
    SCALES.clear()  # answers to what the model asks are found by a call on the meta device
    assert cuttable.names[:2] == ("keeping", "last")
    assert "it changes" in cuttable.program.kept_whole["keeping"]
    model = Asking(place)
    plain, stages = (
        deepcopy(model),
        [Stage(cuttable.stage((1, len(cuttable) - 1), i).stage_program, model) for i in range(2)],
    )
    batches = [torch.randn(4, 2) for _ in range(2)]
    expected = [plain(x) for x in batches]
    SCALES.clear()
    for x, y in zip(batches, expected, strict=True):
        assert torch.equal(stages[1](*stages[0](x)), y)
    SCALES.clear()
    with pytest.raises(ValueError, match=r"cannot split Keeping: .*it changes"):
        trace(Keeping(place))
    assert not SCALES


def test_a_tensor_that_is_kept_where_nothing_finds_it_is_refused() -> None:
    def of_default(module: nn.Module, kept: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006
        return kept

    with pytest.raises(ValueError, match=r"earlier call kept .*line \d+ of test_trace.py"):
        trace(Keeping(of_default))


class Totals(nn.Module):
    """Sums up, in a buffer, what it has seen."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.layer = change, nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("other", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.total = self.change(self, x)
        return x * 2


def added(self: Any, x: Tensor) -> Tensor:
    self.total += x.sum(0)
    return self.total


IN_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an operator": added,
    "a method": lambda self, x: self.total.add_(x.sum(0)),
    "methods": lambda self, x: self.total.mul_(0.5).add_(x.sum(0)),
}
ANEW: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a sum": lambda self, x: self.total + x.sum(0),
    "a method": lambda self, x: self.total.add(x.sum(0)),
    "a method of a method": lambda self, x: self.total.mul(0.5).add_(x.sum(0)),
    "another buffer": lambda self, x: self.other.add_(x.sum(0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_buffer_may_be_changed_in_place(name: str) -> None:
    assert trace(Totals(IN_PLACE[name])).units


@pytest.mark.parametrize("name", ANEW)
def test_a_buffer_that_is_made_anew_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"changes the attribute total as it runs, .*add to a buffer in place"):
        trace(Totals(ANEW[name]))
