"""Fine-tuning by the command equals plain PyTorch, stopped and gone on by another plan too; what is refused of it."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpi4dl
from mpi4dl.comm import Communicator
from mpi4dl.datasets import Loader
from mpi4dl.geometry import Box, Interval
from mpi4dl.options.config import parse
from mpi4dl.options.data import build_views
from mpi4dl.options.sources import source_of
from mpi4dl.train import train
from tests.commands.test_face import OWN, module_at
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, read_metrics, refused, run_train, said, settled, words, write_images
from tests.support.short_runs import EXACT

MODEL = """
class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()

class Double(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, 2), nn.BatchNorm2d(4)
        self.layer1, self.layer4 = Block(4, 6, 2), nn.Sequential(Block(6, 8, 2), nn.Dropout(0.0), Block(8, 8, 1))
        self.fc = nn.Linear(8, num_classes)
        self.double()

    def forward(self, x):
        x = self.layer4(self.layer1(self.norm(self.conv1(x.double())).relu()))
        return self.fc(x.mean((2, 3)))
"""
FLAGS = (
    "--image-size 64x72 --batch-size 2 --accumulate 2 --lr 0.05 "
    "--optimizer SGD --optimizer-options momentum=0.9,weight_decay=0.01 "
    "--num-workers 0 --mean 0 --std 1 --epochs 2 --log-interval 1 --freeze conv1.*,layer1.*,*bn* "
    "--eval-mode *bn* --unfreeze 2:layer1.* --lr-of fc.*=0.1,layer4.*=0.02 --weight-decay-of *.bias=0 "
    "--ema 0.8 --lr-schedule cosine --warmup 2"
)
STAGES = "--stages 2 --tiles 2x2,1x1 --balance flops"
ZERO = "--data 2 --zero 3"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's file, and beside it weights of a model with another head, as Lightning keeps them."""
    path = tmp_path / "my_tuned_scans.py"
    path.write_text(OWN + MODEL)
    torch.manual_seed(9)
    state = module_at(path).Double(7).state_dict()
    torch.save({"state_dict": {f"model.{name}": value for name, value in state.items()}}, tmp_path / "last.ckpt")
    return path


def flags_of(own: Path) -> list[str]:
    parts = (f"--{name}={own}:{part}" for name, part in (("model", "Double"), ("dataset", "Scans"), ("loss", "loss")))
    return words(FLAGS, *parts, "--weights", own.parent / "last.ckpt")


class Learnt(NamedTuple):
    losses: list[float]
    validation: list[float]
    state: dict[str, Tensor]
    average: dict[str, Tensor]


def matching(model: nn.Module, *parts: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if any(part in name for part in parts)]


def plainly(own: Path, flags: list[str]) -> Learnt:
    """Written as a fine-tuning in plain PyTorch is, step by step."""
    parts, config = module_at(own), settled(flags)
    torch.manual_seed(0)
    model = parts.Double(3)
    stored = torch.load(own.parent / "last.ckpt")["state_dict"]
    stored = {name.removeprefix("model."): value for name, value in stored.items()}
    model.load_state_dict({name: value for name, value in stored.items() if "fc." not in name}, strict=False)
    for p in matching(model, "conv1", "layer1", "bn"):
        p.requires_grad_(False)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad or "layer1" in name:
            rate = 0.1 if "fc" in name else 0.02 if "layer4" in name else 0.05
            groups.setdefault((rate, 0.0 if name.endswith(".bias") else 0.01), []).append(p)
    optimizer = torch.optim.SGD(
        [{"params": some, "lr": rate, "weight_decay": decay} for (rate, decay), some in groups.items()], momentum=0.9
    )
    rise = lr_scheduler.LinearLR(optimizer, 0.01, total_iters=2)
    schedule = lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    box = lambda count: [Box(*(Interval(0, n) for n in (count, 64, 72)))]  # noqa: E731
    views, data = build_views(config, 2, "resize"), source_of(config).open()
    batches = Loader(data[0], views[0], 2, box, shuffle=True, drop_last=True)
    found = Learnt([], [], {}, {})
    for epoch in range(2):
        model.train()
        for name, module in model.named_modules():
            if "bn" in name:
                module.eval()
        if epoch == 1:
            for p in matching(model, "layer1"):
                p.requires_grad_()
        for number, batch in enumerate(batches.epoch(epoch)):
            if number % 2 == 0:
                optimizer.zero_grad()
                total = 0.0
            loss = parts.loss(model(batch.tiles[0]), batch.labels) / 2
            loss.backward()
            total += loss.item()
            if number % 2:
                optimizer.step()
                schedule.step()
                ema.update_parameters(model)
                found.losses.append(total)
        average = deepcopy(ema.module).eval()
        with torch.no_grad():
            some = [(b, len(b.labels)) for b in Loader(data[1], views[1], 2, box).epoch(0)]
            losses = [parts.loss(average(batch.tiles[0]), batch.labels).item() * count for batch, count in some]
        found.validation.append(sum(losses) / sum(count for _, count in some))
    return found._replace(state=dict(model.state_dict()), average=dict(ema.module.state_dict()))


def assert_learnt(folder: Path, expected: Learnt) -> None:
    metrics = read_metrics(folder)
    assert [each["loss"] for each in metrics if each["phase"] == "train"] == pytest.approx(expected.losses, rel=EXACT)
    validation = [each["loss"] for each in metrics if each["phase"] != "train"]
    assert validation == pytest.approx(expected.validation, rel=EXACT)
    for file, values in (("model", expected.state), ("ema", expected.average)):
        saved = load_file(folder / f"{file}.safetensors")
        assert saved.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(saved[name], value, rtol=EXACT, atol=EXACT)


def test_fine_tuning_equals_plain_pytorch_by_stages_of_tiles_and_by_zero(
    ranks: Ranks, own: Path, tmp_path: Path
) -> None:
    """The second run stops within the second epoch, and goes on by another plan."""
    flags, zero = flags_of(own), tmp_path / "zero"
    expected = plainly(own, flags)
    assert_learnt(run_train(ranks, tmp_path / "stages", *flags, STAGES), expected)
    own.write_text(OWN.replace("num_steps == 2", "num_steps == 4") + MODEL)
    run_train(ranks, zero, *flags, ZERO, f"--callbacks {own}:Steps")
    assert not (zero / "model.safetensors").exists()
    run_train(ranks, zero, *flags, "--stages 2 --zero 1 --balance flops --resume auto")
    assert_learnt(zero, expected)


REFUSED = [
    ("--freeze=layer9.*", "--freeze layer9.*: no parameter has a name like 'layer9.*'; the nearest are"),
    ("--freeze=*", "--freeze *: all parameters are frozen: nothing is trained"),
    ("--eval-mode=nrm*", "--eval-mode nrm*: no module has a name like 'nrm*'"),
    ("--unfreeze=2:fc.*", "--unfreeze 2:fc.*: fc.weight is not frozen; add it to --freeze"),
    ("--unfreeze=2:fcc.*", "--unfreeze 2:fcc.*: no parameter has a name like 'fcc.*'; the nearest are fc."),
    ("--unfreeze=*", "--unfreeze"),
    ("--lr-of=head=0.1", "--lr-of head: no parameter has a name like 'head'"),
    ("--lr-of=head=much", "--lr-of"),
    ("--optimizer=Rprop", "--optimizer Rprop has no option momentum"),
    ("--warmup=6", "--warmup 6 takes all of the 6 steps that there will be: choose fewer"),
    ("--scheduler=StepLR", "--lr-schedule and --warmup are a schedule, and so is --scheduler StepLR"),
    ("--weights=nowhere.pt", "--weights nowhere.pt: there is no such file or folder"),
    ("--strict", "initial values are kept, as shapes differ: fc.weight (7, 8) for (3, 8)"),
    ("--ema=1", "--ema"),
    ("--accumulate=0", "--accumulate"),
]


def refusals(comm: Communicator, own: Path, folder: Path) -> list[str]:
    found = []
    for flag, _ in REFUSED:
        flags = [*flags_of(own), "--run-folder", str(folder)]
        if flag == "--freeze=*":
            place = flags.index("--unfreeze")
            del flags[place : place + 2]
        found.append(refused(comm, train, [*flags, flag]))
    return found


def test_each_option_says_in_one_sentence_what_cannot_be(ranks: Ranks, own: Path, tmp_path: Path) -> None:
    (found,) = ranks(1).run(refusals, own, tmp_path / "run")
    for (_, what), message in zip(REFUSED, found, strict=True):
        assert what in message
        assert "\n" not in message


def by_keywords(comm: Communicator, own: Path, folder: Path) -> Any:
    """The same options as Python has them."""
    parts = module_at(own)
    options: dict[str, Any] = {"freeze": ["conv1.*", "layer1.*", "*bn*"], "eval_mode": "*bn*"}
    options |= {"unfreeze": {2: "layer1.*"}, "lr_of": {"fc.*": 0.1, "layer4.*": 0.02}}
    options |= {"weight_decay_of": {"*.bias": 0}, "ema": 0.8, "weights": str(own.parent / "last.ckpt")}
    options |= {"model": parts.Double, "dataset": (parts.Scans("train"), parts.Scans("val")), "num_workers": 0}
    return mpi4dl.Trainer(comm=comm, run_folder=str(folder), image_size=(64, 72), **options).config.tuning


def test_options_as_python_has_them(ranks: Ranks, own: Path, tmp_path: Path) -> None:
    (tuning,) = ranks(1).run(by_keywords, own, tmp_path)
    assert tuning == parse(flags_of(own)).tuning


def test_weights_of_as_many_other_classes_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """Of a run, whose checkpoint does not name them, and of its file of weights."""
    first = run_train(ranks, tmp_path / "first", *TINY, "--images", write_images(tmp_path / "a"))
    images = write_images(tmp_path / "b", ("benign", "malignant"))
    for weights, root in ((first, images), (first / "model.safetensors", images), (first, tmp_path / "a")):
        argv = words(*TINY, "--images", root, "--weights", weights, "--run-folder", tmp_path / "b", "--dry-run")
        told = ranks(1).run(said, train, argv)[0]
        warning = "warning: the weights are of the classes dark, light, and the samples here of benign, malignant"
        assert (warning in told) == (root == images)
