"""Values that follow from data: a resumed run has those that it began with, says that they differ, or is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi4dl.checkpoints.manifest import checkpoints_in
from mpi4dl.comm import Communicator
from mpi4dl.datasets.text.tokenizer import BPETokenizer
from mpi4dl.options.config import parse
from mpi4dl.runs.samples import FILE, RunSamples
from mpi4dl.train import train
from mpi4dl.training.resuming import CLASS_WEIGHTS, Progress
from mpi4dl.training.setup import set_up
from mpi4dl.training.texts import TOKENIZER
from tests.pool.ranks import Ranks
from tests.support.commands import TINY, refused, said, words, write_images

TEXT = (
    "--model gpt --model-options num_layers=1,hidden=16,num_heads=2 --context 8 --batch-size 8 --tokenizer bpe:270 "
    "--val-fraction 0.4 --lr 0.01 --lr-schedule constant --epochs 1 --num-workers 0 --no-tensorboard"
)
MORE = ("--epochs", "2")
OWN = """
from pathlib import Path

import torch

class Own:
    classes = ("dark", "light")
    targets = [0, 1] * 10

    def __len__(self):
        return 20

    def __getitem__(self, index):
        shade = float(Path(__file__).with_name("shade.txt").read_text())
        return torch.full((3, 32, 32), shade * index / 20), index % 2
"""


def flags_of(folder: Path, *more: object) -> list[str]:
    common = "--no-tensorboard --resume auto --run-folder"
    return words(*TINY, common, folder / "run", *more)


def newest(run: Path) -> dict[str, str]:
    """The options in the newest checkpoint."""
    return dict(Progress.at(checkpoints_in(run / "checkpoints")[0]).options)


def documents(root: Path, names: str, text: str) -> None:
    root.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        (root / f"{name}.txt").write_text(" ".join(f"{text}{(7 * number + i) % 13}" for i in range(60)))


def test_text_keeps_its_tokenizer_and_the_part_of_each_document(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    run, root = tmp_path / "run", tmp_path / "text"
    documents(root, "bcdefg", "word")
    argv = words(TEXT, "--text", root, "--resume auto --run-folder", run)
    ranks(1).run(said, train, argv)
    tokenizer, before = BPETokenizer.load(run / TOKENIZER), RunSamples.read(run / FILE).validating()
    assert sorted(before) == [f"{name}.txt" for name in "bcdefg"]
    assert sum(before.values()) == 2
    documents(root, "hijklmno", "entirely other text ")
    (root / "b.txt").write_text("much longer than it was " * 40)
    (root / "c.txt").unlink()
    (told,) = ranks(1).run(said, train, [*argv, *MORE])
    assert BPETokenizer.load(run / TOKENIZER).fingerprint == tokenizer.fingerprint
    after = RunSamples.read(run / FILE).validating()
    assert {name: after[name] for name in before if name != "c.txt"}.items() <= before.items()
    assert "of the samples, c.txt is gone since" in told
    assert "and 5 others is new" in told
    assert "of the samples, b.txt has other content" in told
    assert "--tokenizer bpe:270, but this is bytes: keep the value" in _refusal(ranks, [*argv, "--tokenizer", "bytes"])


def _refusal(ranks: Ranks, argv: list[str]) -> str:
    (message,) = ranks(1).run(refused, train, argv)
    return message


def test_other_classes_are_refused_also_where_outputs_are_as_many(ranks: Ranks, tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", count=6)
    argv = flags_of(tmp_path, "--num-classes 3 --images", root)
    ranks(1).run(said, train, argv)
    (root / "dark").rename(tmp_path / "dark")
    (root / "between").mkdir()
    for path in (tmp_path / "dark").iterdir():
        (root / "between" / path.name).write_bytes(path.read_bytes() + b"new")
    assert "the classes were dark, light when the run began, and are between, light" in _refusal(ranks, [*argv, *MORE])


def losses(comm: Communicator, argv: list[str]) -> Any:
    return set_up(parse(argv), comm).task.loss_options["class_weights"]


def test_balanced_weights_of_classes_are_those_of_the_start(ranks: Ranks, tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", count=8)
    argv = flags_of(tmp_path, "--class-weights balanced --images", root)
    ranks(1).run(said, train, argv)
    assert newest(tmp_path / "run")[CLASS_WEIGHTS] == "1.0,1.0"
    for number in range(8, 24):
        (root / "dark" / f"{number}.png").write_bytes((root / "dark" / "0.png").read_bytes())
    assert ranks(1).run(losses, [*argv, "--resume", "none"])[0] != (1.0, 1.0)
    for found in ranks(2).run(losses, [*argv, "--tiles", "1x2"]):
        assert found == (1.0, 1.0)
    (told,) = ranks(1).run(said, train, [*argv, *MORE])
    assert "the numbers of" not in told
    assert newest(tmp_path / "run")[CLASS_WEIGHTS] == "1.0,1.0"


def test_another_task_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A new row with a number that is neither 0 nor 1 makes columns amounts."""
    root = write_images(tmp_path / "images", count=6)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    table = "file,tumour,stroma\n" + "".join(f"{name},{i % 2},{i // 2 % 2}\n" for i, name in enumerate(names[:-1]))
    (root / "labels.csv").write_text(table)
    argv = flags_of(tmp_path, "--images", root)
    ranks(1).run(said, train, argv)
    (root / "labels.csv").write_text(f"{table}{names[-1]},0.5,0.25\n")
    assert "with --task multilabel, but this is regress: keep the value" in _refusal(ranks, [*argv, *MORE])


def test_other_arrays_that_validate_are_said(ranks: Ranks, tmp_path: Path) -> None:
    path, random = tmp_path / "all.npz", np.random.default_rng(0)
    arrays: dict[str, Any] = {"x_train": random.integers(0, 255, (8, 32, 32, 3), np.uint8), "y_train": np.arange(8) % 2}
    arrays |= {"x_test": arrays["x_train"][:4], "y_test": arrays["y_train"][:4]}
    np.savez(path, **arrays)
    argv = flags_of(tmp_path, "--images", path)
    ranks(1).run(said, train, argv)
    np.savez(path, **{**arrays, "x_test": arrays["x_test"] + 1})
    (told,) = ranks(1).run(said, train, [*argv, *MORE])
    assert "the file of --images that validate (4, 32, 32, 3)" in told
    assert "the file of --images (8" not in told


def test_other_samples_of_an_own_dataset_are_said(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "shade.txt").write_text("1")
    argv = flags_of(tmp_path, "--dataset", f"{tmp_path / 'own.py'}:Own")
    ranks(1).run(said, train, argv)
    told, again = "the content of some samples of --dataset", [*argv, *MORE]
    assert told not in ranks(1).run(said, train, again)[0]
    (tmp_path / "shade.txt").write_text("0.5")
    assert told in ranks(1).run(said, train, [*argv, "--epochs", "3"])[0]
