"""The public face: what scripts do with a few names of `mpi4dl`, and own parts by the command and by Python."""

import importlib.util
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mpi4dl
from mpi4dl import models
from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.comm import Communicator, world
from mpi4dl.datasets import Loader
from mpi4dl.geometry import Box, Interval
from mpi4dl.options.config import Config
from mpi4dl.options.data import build_views
from mpi4dl.options.parts import print_of
from mpi4dl.options.sources import source_of
from mpi4dl.runs.folder import RunFolder
from mpi4dl.train import train
from tests.pool.ranks import Ranks, on_ranks
from tests.pool.zygote import ROOT
from tests.support.commands import read_metrics, settled
from tests.support.short_runs import EXACT

OWN = '''
import numpy as np
import torch
from mpi4dl._torchvision import import_torchvision
from torch import nn
from torch.nn import functional as F

shufflenet = import_torchvision().models.shufflenetv2

class Double(nn.Module):
    """A torchvision model in float64."""
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 1)
        self.body = shufflenet.ShuffleNetV2([1, 2, 1], [4, 8, 16, 32, 32], num_classes)
        self.double()

    def forward(self, x):
        return self.body(self.stem(x.double()))

class Scan:
    size = (64, 72)
    def __init__(self, index):
        self.values = np.random.default_rng(index).random((64, 72, 2), dtype=np.float32)
    def read(self, rows, cols):
        return self.values[slice(*rows), slice(*cols)]

class Scans:
    classes, channels = ("a", "b", "c"), 2
    def __init__(self, split, count=12):
        self.first, self.count = (0, count) if split == "train" else (count, 5)
    def __len__(self):
        return self.count
    def label(self, index):
        return (self.first + index) % 3
    def image(self, index):
        return Scan(self.first + index)

def loss(outputs, labels):
    return F.cross_entropy(outputs, labels, label_smoothing=0.1)

class Steps:
    def on_step_end(self, run, result):
        if run.engine.num_steps == 2:
            run.stop()

def broken(num_classes):
    return nn.Linear(3, undefined)

number = 3
'''
FLAGS = (
    "--image-size 64x72 --batch-size 4 --optimizer SGD --lr 0.05 --optimizer-options momentum=0.9 "
    "--lr-schedule constant --num-workers 0 --mean 0 --std 1 --balance flops"
)
TILES = {"stages": 1, "tiles": ((1, 2),), "data": 1}


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of a user's, outside the repository."""
    path = tmp_path / "my_scans.py"
    path.write_text(OWN)
    return path


def flags_of(own: Path, folder: Path) -> list[str]:
    named = [f"--{name}={own}:{part}" for name, part in (("model", "Double"), ("dataset", "Scans"), ("loss", "loss"))]
    return [*FLAGS.split(), *named, "--epochs", "1", "--log-interval", "1", "--run-folder", str(folder)]


def by_script(comm: Communicator, own: Path, folder: Path) -> None:
    """What the command does, in Python, with objects for the names."""
    parts = module_at(own)
    options = {"model": parts.Double, "dataset": (parts.Scans("train"), parts.Scans("val")), "loss": parts.loss}
    options |= {"image_size": (64, 72), "batch_size": 4, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}
    options |= {"optimizer": "SGD", "lr_schedule": "constant", "balance": "flops"}
    options |= {"num_workers": 0, "mean": 0, "std": 1, "epochs": 1, "log_interval": 1, "run_folder": str(folder)}
    assert mpi4dl.Trainer(comm=comm, **options, **TILES).fit() is not None


def plainly(config: Config, own: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three steps of plain PyTorch, and the weights behind them."""
    parts = module_at(own)
    torch.manual_seed(config.training.seed)
    model = parts.Double(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    height, width = config.data.image_size
    box = lambda count: [Box(*(Interval(0, n) for n in (count, height, width)))]  # noqa: E731
    view = build_views(config, 2, "resize")[0]
    loader = Loader(source_of(config).open()[0], view, 4, box, shuffle=True, drop_last=True)
    losses = []
    for batch in loader.epoch(0):
        loss = parts.loss(model(batch.tiles[0]), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def log_of(folder: Path) -> str:
    return RunFolder(folder).log_path(0).read_text()


def test_own_model_data_and_loss_train_as_plain_pytorch_does(ranks: Ranks, own: Path, tmp_path: Path) -> None:
    flags = flags_of(own, tmp_path / "command")
    ranks(4).run(train, [*flags, "--stages", "2", "--tiles", "2x1,1x2", "--data", "1"])
    ranks(2).run(by_script, own, tmp_path / "script")
    losses, weights = plainly(settled(flags), own)
    for folder in (tmp_path / "command", tmp_path / "script"):
        found = [each["loss"] for each in read_metrics(folder) if each["phase"] == "train"]
        assert found == pytest.approx(losses, rel=EXACT)
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(saved[name], value, rtol=EXACT, atol=EXACT)


def test_a_callback_hears_of_steps_and_ends_a_run(ranks: Ranks, own: Path, tmp_path: Path) -> None:
    flags = [*flags_of(own, tmp_path / "run"), "--callbacks", f"{own}:Steps", "--epochs", "9"]
    for number, (num_ranks, plan) in enumerate(((1, ""), (2, "--tiles 1x2"))):
        folder = tmp_path / str(number)
        ranks(num_ranks).run(train, [*flags, *plan.split(), "--run-folder", str(folder)])
        assert [each["step"] for each in read_metrics(folder) if each["phase"] == "train"] == [1, 2]
        assert [path.name for path in checkpoints_in(folder / "checkpoints")] == ["step-00000002"]
        assert "stopped by run.stop() at step 2 of 27" in log_of(folder)


AT_A_PROMPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, num_classes))
    def forward(self, images):
        return self.layers(images)

class Images(torch.utils.data.Dataset):
    classes = ("a", "b")
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((3, 16, 16), index / 8), index % 2

class Optimizer(torch.optim.SGD):
    pass

class Metric:
    higher_is_better = True
    def __init__(self):
        self.values = []
    def update(self, predictions, targets):
        self.values.append(predictions.mean())
    def compute(self):
        return torch.stack(self.values).mean()

class Callback:
    steps = 0
    def on_step_end(self, run, result):
        Callback.steps += 1

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""


def test_parts_of_a_prompt_or_a_notebook_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their source is in no file, which Python's inspection calls an error for classes."""
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(AT_A_PROMPT, "<stdin>", "exec"), typed)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    parts: dict[str, Any] = {"model": typed["Model"], "dataset": (typed["Images"](), typed["Images"]())}
    parts |= {"optimizer": typed["Optimizer"], "loss": typed["loss"], "metrics": (typed["Metric"],)}
    trainer = mpi4dl.Trainer(
        comm=world(),
        **parts,
        callbacks=(typed["Callback"],),
        image_size=(16, 16),
        num_workers=0,
        batch_size=4,
        epochs=1,
        tensorboard=False,
        run_folder=str(tmp_path / "run"),
    )
    assert trainer.fit() is not None
    assert typed["Callback"].steps == 2
    model = typed["Model"]
    again: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(AT_A_PROMPT.replace("num_classes))", "num_classes + 0))"), "<stdin>", "exec"), again)
    assert print_of(typed["loss"]) == print_of(again["loss"]) is not None
    assert print_of(model) != print_of(again["Model"]) is not None
    found = mpi4dl.TrainedModel(tmp_path / "run", comm=world(), model=model)
    assert found.classes == ("a", "b")


@pytest.mark.parametrize("asked", [None, 2])
def test_threads_that_wait_for_cores_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(world().node, "threads", 2)
    monkeypatch.setattr("mpi4dl.training.run.core_wait_seconds", lambda: 0.5 * time.perf_counter())
    before = torch.get_num_threads()
    try:
        mpi4dl.Trainer(
            comm=world(),
            model="small_resnet",
            image_size=(16, 16),
            num_samples=8,
            num_workers=0,
            tensorboard=False,
            log_interval=1,
            max_steps=1,
            save_every="none",
            eval_every=None,
            threads=asked,
            run_folder=str(tmp_path / "run"),
        ).fit()
    finally:
        torch.set_num_threads(before)
    assert ("% of the time for a core" in log_of(tmp_path / "run")) is (asked is None)


REFUSED = [
    ("--model=no.py:f", "--model no.py:f: there is no file no.py"),
    ("--model={own}:Doubel", "has no Doubel; did you mean Double?"),
    ("--model={own}:number", "is a int, which cannot be called"),
    ("--model={own}:broken", "NameError: name 'undefined' is not defined (my_scans.py, line 48: return nn.Linear("),
    ("--model={own}:loss", "does not take these arguments: missing a required argument: 'outputs'"),
    ("--model={own}:Steps", "made a Steps, which is no torch.nn.Module"),
    ("--model-options=height=3", "does not take these arguments: got an unexpected keyword argument 'height'"),
    ("--dataset={own}:Scan", "does not take these arguments: missing a required argument: 'index'"),
    ("--dataset={own}:Steps", "the dataset Steps has no __len__, label, image, channels"),
    ("--optimizer={own}:loss", "does not take these arguments: missing a required argument: 'labels'"),
    ("--optimizer={own}:Steps", "does not take these arguments: too many positional arguments"),
    ("--loss={own}:number", "is a int, which cannot be called"),
    ("--callbacks=no.such:part", "there is no module no.such"),
]


def refusal(comm: Communicator, flags: list[str]) -> str:
    try:
        train(comm, flags)
    except mpi4dl.Refusal as problem:
        return str(problem)
    return ""


@on_ranks(1)
def test_an_own_part_that_cannot_be_is_refused_in_one_sentence(comm: Communicator, own: Path, tmp_path: Path) -> None:
    for flag, said in REFUSED:
        message = refusal(comm, [*flags_of(own, tmp_path / "run"), flag.format(own=own)])
        assert message.startswith(flag.split("=")[0].replace("-options", "")) or "dataset" in message
        assert said in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tile": "2x2"}, "^there is no option `tile`; did you mean tiles[?]$"),
        ({"tiles": "two"}, "^`tiles` is 'two', but must be grids such as 2x2"),
        ({"tiles": "2x2"}, "start with mpirun -n 4, or change `tiles` or `data`$"),
        ({"lr": -1}, "^`lr` is -1, but must be a number of at least 0, or auto$"),
    ],
    ids=str,
)
@on_ranks(1)
def test_python_hears_of_arguments_not_of_flags(comm: Communicator, options: dict[str, Any], said: str) -> None:
    with pytest.raises(mpi4dl.Refusal, match=said):
        mpi4dl.Trainer(comm=comm, **options)


def of_example(comm: Communicator, name: str, folder: Path) -> Any:
    """Run an example as a script, whose world are these ranks."""
    import os

    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpi4dl.world", lambda: comm)
        patch.setattr("mpi4dl.comm.communicator.world", lambda: comm)
        patch.setattr("mpi4dl.training.trainer.world", lambda: comm)
        patch.setattr("mpi4dl.parallel.own_loop.world", lambda: comm)
        patch.setattr(sys, "argv", [name])
        try:
            return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__").get(
                "loss" if name == "tiles.py" else ""
            )
        finally:
            os.chdir(ROOT)


def losses_of_own_loop(comm: Communicator, folder: Path) -> list[float]:
    """Of the example with a small model, whose gradients are soon added up."""
    from examples import own_loop

    torch.set_num_threads(1)
    build = models.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build", lambda _, num_classes: build("small_resnet", num_classes, num_filters=4))
        patch.setattr("mpi4dl.world", lambda: comm)
        patch.setattr("mpi4dl.parallel.own_loop.world", lambda: comm)
        patch.setattr(sys, "argv", ["own_loop", "--size", "64", "--out", str(folder / f"{comm.size}.pt")])
        torch.set_default_dtype(torch.float64)
        return own_loop.main()


def test_a_script_of_a_user_has_the_same_losses_on_tiles(ranks: Ranks, tmp_path: Path) -> None:
    """Three of its lines are none of plain PyTorch's."""
    source = (ROOT / "examples" / "own_loop.py").read_text()
    assert sum(line.endswith("# mpi4dl") for line in source.splitlines()) == 3
    alone, *tiles = *ranks(1).run(losses_of_own_loop, tmp_path), *ranks(4).run(losses_of_own_loop, tmp_path)
    assert len(alone) == 24
    for found in tiles:
        assert found == pytest.approx(alone, rel=EXACT)
    expected, saved = (torch.load(tmp_path / f"{number}.pt")["model"] for number in (1, 4))
    assert list(saved) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=EXACT, atol=EXACT)


@pytest.mark.exhaustive
def test_the_examples_do_what_they_say(ranks: Ranks, tmp_path: Path) -> None:
    alone = ranks(1).run(of_example, "tiles.py", tmp_path)[0]
    for found in (*ranks(4).run(of_example, "tiles.py", tmp_path), *ranks(5).run(of_example, "tiles.py", tmp_path)):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    for num_ranks in (1, 4, 5):
        (tmp_path / str(num_ranks)).mkdir()  # folders of runs are named by the second
        ranks(num_ranks).run(of_example, "own.py", tmp_path / str(num_ranks))
    accuracies = [
        each["accuracy"]
        for folder in tmp_path.glob("*/runs/*")
        for each in read_metrics(folder)
        if each["phase"] == "validation"
    ]
    assert len(accuracies) == 6
    assert accuracies.count(1.0) >= 3


def test_examples_are_as_short_as_they_say() -> None:
    lengths = {}
    for name in ("own.py", "tiles.py"):
        body = (ROOT / "examples" / name).read_text().partition('"""\n')[2]
        lengths[name] = sum(1 for line in body.splitlines() if line.strip())
    assert lengths["own.py"] <= 25


def test_the_face_says_what_it_has() -> None:
    assert all(getattr(mpi4dl, name) is not None for name in mpi4dl.__all__)
    assert set(mpi4dl.__all__) <= set(dir(mpi4dl))
    with pytest.raises(AttributeError, match="has no attribute 'trainer_of'"):
        mpi4dl.trainer_of  # noqa: B018
