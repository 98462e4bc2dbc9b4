"""Mistakes of first users: each is answered by one sentence that names the value, the rule, and what to do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest

from mpi4dl._wording import to_install
from mpi4dl.comm import Refusal, world
from mpi4dl.evaluate import evaluate
from mpi4dl.generate import generate
from mpi4dl.predict import predict
from mpi4dl.train import train
from tests.pool.zygote import ROOT
from tests.support.commands import TINY, write_images

COMMANDS = {"train": train, "predict": predict, "evaluate": evaluate, "generate": generate}
LONGEST = 420  # characters
OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, num_classes)

    def forward(self, x):
        return self.head(x)
"""
# A command line, and the words of the answer that carry its meaning: what is wrong, and what to do.
MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("train --learning-rate 0.1", ("--learning-rate", "use --lr 0.1")),
    ("train --batchsize 4", ("--batchsize", "did you mean --batch-size?")),
    ("train --gpus 4", ("--gpus", "mpirun -n 4")),
    ("train --lr", ("--lr has no value", "a number of at least 0")),
    ("train --image-size 512 512", ("'512'", "--image-size takes one value", "768x1024")),
    ("train --flip False", ("--flip is 'False'", "none, horizontal, all")),
    ("train --strict False", ("--strict takes no value", "--no-strict")),
    ("train --tiles 2,2", ("--tiles has 2 entries", "--stages 1", "an x, as in 2x2")),
    ("train --tiles 2x2", ("4 ranks", "mpirun started 1", "mpirun -n 4")),
    ("train --model resnet51", ("'resnet51' is unknown", "'resnet50'")),
    ("train --model mine.py", ("'mine.py' is a file", "mine.py:build")),
    ("train --model mine.py:Nett", ("mine.py has no Nett", "did you mean Net?")),
    ("train --model mine.py:Net", ("--model mine.py:Net: cannot take images of 3 x 32 x 32", "[3072, 10]")),
    ("train --model gpt2", ("gpt2 takes tokens", "give --text")),
    ("train --model unet", ("(4, 10, 32, 32)", "--task classify", "choose another --model, or the --task")),
    ("train --optimizer adam", ("--optimizer adam", "did you mean Adam?")),
    ("train --optimizer AdamW --optimizer-options momentum=0.9", ("no option momentum", "betas")),
    ("train --optimizer-options weight-decay=0.1", ("weight-decay=0.1", "_ for - in names")),
    ("train --scheduler cosine", ("--scheduler cosine", "CosineAnnealingLR", "--lr-schedule")),
    ("train --loss CrossEntropyLoss", ("'CrossEntropyLoss' is unknown", "did you mean cross_entropy?")),
    ("train --images nowhere", ("nowhere: no such file or folder", "expected")),
    ("train --images flat", ("flat: has no class folders", "move them into one sub-folder per class")),
    ("train --images one", ("only one class folder, 'only'", "two or more")),
    ("train --images photos --batch-size 64", ("batch of 64", "choose a smaller --batch-size")),
    ("train --images photos --num-classes 1", ("--num-classes 1", "2: dark, light")),
    ("train --images photos --task segment", ("not to segment", "masks/NAME.png")),
    ("train --images photos --mean 128", ("--mean 128", "range from 0 to 1", "choose 0.502")),
    ("train --images photos --mean imagenet --std 58.4,57.1,57.4", ("--std 58.4,57.1,57.4", "choose 0.229,0.224,")),
    ("train --weights nowhere.pt", ("--weights nowhere.pt", "no such file", "torchvision")),
    ("train --weights notes.txt", ("--weights notes.txt", "no file that torch.save wrote")),
    (
        "train --model small_resnet --weights pretrained",
        ("small_resnet has no trained weights", "name a file of weights", "timm"),
    ),
    ("train --resume true", ("--resume true: no such folder", "auto")),
    ("train --run-folder photos", ("photos holds files already", "--resume auto")),
    ("train --config wrong.toml", ("learning_rate in [training]", "use lr of [optimizer]: 0.1")),
    ("train --precision float16", ("'float16'", "fp32, bf16, fp16")),
    ("train --device cuda", ("PyTorch sees no GPU", "--device cpu")),
    ("train --memory-limit 4", ("--memory-limit is '4'", "4GiB")),
    ("train --stream auto", ("--stream auto needs --memory-limit", "6GiB")),
    ("train --freeze stem", ("'stem'", "write stem.*")),
    ("train --monitor accuracyy", ("--monitor accuracyy", "val_accuracy", "--metrics")),
    ("train --lr 1e30", ("the loss is not finite", "a smaller --lr")),
    ("predict --images flat", ("name the folder of a run", "RUN_OR_WEIGHTS --images FOLDER")),
    ("predict nowhere --images flat", ("nowhere", "no such file or folder")),
    ("evaluate photos", ("photos is neither a run", "--run-folder")),
    ("predict folds --images flat", ("folds is neither a run", "name the run of a fold, such as folds/fold_1")),
    ("generate --prompt x", ("name the folder of a run, or a checkpoint first", "RUN_OR_CHECKPOINT")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a first user has: photos by class, some without, notes, a model, and a configuration."""
    root = tmp_path_factory.mktemp("user")
    write_images(root / "photos", count=2)
    write_images(root / "one", classes=("only",), count=3)
    (root / "flat").mkdir()
    (root / "folds" / "fold_1").mkdir(parents=True)
    (root / "folds" / "fold_1" / "config.toml").touch()
    PIL.Image.new("RGB", (40, 40)).save(root / "flat" / "0.png")
    (root / "notes.txt").write_text("hello")
    (root / "mine.py").write_text(OWN)
    (root / "wrong.toml").write_text("[training]\nlearning_rate = 0.1\n")
    return root


def answer(line: str, folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command says that it refuses, in this process."""
    monkeypatch.chdir(folder)
    command, *flags = line.split()
    if command == "train":
        more = ["--run-folder", str(run)] if "--run-folder" not in flags else []
        flags = [*TINY, "--num-samples", "8", "--max-steps", "3", *more, *flags]
    with pytest.raises(Refusal) as caught:
        COMMANDS[command](world(), flags)
    return str(caught.value)


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
@pytest.mark.sample(8)
def test_a_mistake_is_answered_by_one_sentence(
    line: str, words: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = answer(line, folder, tmp_path / "run", monkeypatch)
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said
    assert "`" not in said, "options are named as flags"
    assert len(said) <= LONGEST


def advised() -> Iterator[tuple[str, str]]:
    """Each package that a message advises to install, and where."""
    for path in (ROOT / "mpi4dl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "to_install":
                yield from ((each.value, path.name) for each in node.args if isinstance(each, ast.Constant))


def test_advice_to_install_can_be_pasted() -> None:
    """Packages are those that the extras of the project name; the command is that of the Python that runs."""
    requirements = re.findall(r"^ {4}([\w-]+)(?:>=|$)", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    found = {*advised()}
    assert len(found) >= 12
    assert {(name, file) for name, file in found if name not in requirements} == set()
    assert re.fullmatch(r"(python|/\S+) -m pip install a 'b\[c\]'", to_install("a", "b[c]"))
    loose = [p.name for p in (ROOT / "mpi4dl").rglob("*.py") if "pip install" in p.read_text()]
    assert loose == []
