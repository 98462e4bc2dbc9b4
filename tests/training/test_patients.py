"""Images, masks and volumes in tables have what slides have: patients, folds, split files, metrics by patient."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.datasets.sources import open_files
from mpi4dl.evaluate import evaluate
from mpi4dl.inference.trained_model import TrainedModel
from mpi4dl.options.config import parse
from mpi4dl.options.sources import source_of
from mpi4dl.runs.samples import FILE, RunSamples
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import read_rows, refused, said, words
from tests.support.short_runs import assert_close
from tests.support.tiny import TINY_RESNET

PATIENTS, EACH = 6, 3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures of each of six patients, of two classes, in a table that calls patients its own way."""
    root, random = tmp_path_factory.mktemp("clinic"), np.random.default_rng(0)
    (root / "masks").mkdir()
    lines = ["file;Subject No;label;site;mask"]
    for patient in range(PATIENTS):
        for number in range(EACH):
            name = f"p{patient}_{number}.png"
            pixels = random.integers(0, 100, (32, 32, 3), np.uint8) + np.uint8(100 * (patient % 2))
            PIL.Image.fromarray(pixels).save(root / name)
            PIL.Image.fromarray((pixels[..., 0] > 90).astype(np.uint8)).save(root / "masks" / name)
            lines.append(f"{name};patient {patient};{'benign tumour'.split()[patient % 2]};here;masks/{name}")
    (root / "labels.csv").write_text("\n".join(lines))
    return root


def flags_of(images: Path, folder: Path, more: str = "") -> list[str]:
    common = (
        f"--patient-column Subject_No --image-size 32 --batch-size 2 --epochs 1 --max-steps 2 --model {TINY_RESNET} "
        "--no-tensorboard --save-every none"
    )
    return words("--images", images, "--run-folder", folder, common, more)


def parts_of(argv: list[str]) -> dict[str, set[str]]:
    training, validation = source_of(parse(argv)).open()
    whole: Any = training.whole  # type: ignore[attr-defined]
    found = {"train": training.indices, "val": validation.indices}  # type: ignore[attr-defined]
    return {part: {whole.rows[i].patient for i in indices} for part, indices in found.items()}


def test_no_patient_trains_and_validates(images: Path, tmp_path: Path) -> None:
    parts = parts_of(flags_of(images, tmp_path, "--val-fraction 0.34"))
    assert len(parts["val"]) == 2
    assert parts["train"].isdisjoint(parts["val"])
    folds = [parts_of(flags_of(images, tmp_path, f"--folds 3 --fold {n}"))["val"] for n in range(3)]
    assert sorted(patient for fold in folds for patient in fold) == [f"patient {n}" for n in range(PATIENTS)]
    split = tmp_path / "split.csv"
    split.write_text("file,split\n" + "".join(f"p{n}_{i}.png,{'val' if n == 4 else 'train'}\n" for n in range(6) for i in range(3)))  # fmt: skip  # noqa: E501
    assert parts_of(flags_of(images, tmp_path, f"--split-file {split}"))["val"] == {"patient 4"}
    split.write_text(split.read_text().replace("p4_0.png,val", "p4_0.png,train"))
    with pytest.raises(ValueError, match=r"patient 'patient 4' is in val by 'p4_1\.png'"):
        parts_of(flags_of(images, tmp_path, f"--split-file {split}"))


MEAN = """
import torch

class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.ones_(self.last.weight)

    def forward(self, x):
        return self.last(x.mean((2, 3)))
"""


def test_weights_of_a_table_are_those_of_plain_pytorch(ranks: Ranks, images: Path, tmp_path: Path) -> None:
    """Two steps on all images but one that cannot be read; the run is evaluated without weights."""
    root, run = tmp_path / "images", tmp_path / "run"
    root.mkdir()
    lines, pixels, labels, weights = ["file,Loss Weight,split,stage"], [], [], []
    for number, path in enumerate(sorted(images.glob("*.png"))):
        weight, split = (0.0, 0.5, 3.0)[number % 3], "val" if number > 13 else "train"
        (root / path.name).write_bytes(path.read_bytes() if number != 5 else b"none")
        lines.append(f"{path.name},{weight},{split},{'ab'[number % 2]}")
        if split == "train" and number != 5:
            pixels.append((torch.from_numpy(np.array(PIL.Image.open(path))).double() / 255 - 0.5) / 0.25)
            labels.append(number % 2)
            weights.append(weight)
    (root / "labels.csv").write_text("\n".join(lines))
    (tmp_path / "mean.py").write_text(MEAN)
    flags = words(
        f"--images {root} --model {tmp_path / 'mean.py'}:Mean --image-size 32 --batch-size 7 --accumulate 2 --epochs 2",
        f"--weight-column loss_weight --optimizer SGD --lr 0.5 --lr-schedule constant --no-flip --run-folder {run}",
        "--on-bad-image skip --tiles 1x2 --microbatches 1 --label-columns stage --save-every none --no-tensorboard",
        "--deterministic",
    )
    told, *_ = ranks(2).run(said, train, flags)
    assert "weight = Loss Weight" in told
    plain = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        each = F.cross_entropy(torch.stack(pixels).mean((1, 2)) @ plain.T, torch.tensor(labels), reduction="none")
        (gradient,) = torch.autograd.grad((each * torch.tensor(weights)).mean(), plain)
        plain = plain - 0.5 * gradient
    (found,) = load_file(run / "model.safetensors").values()
    assert_close(found.double(), plain.detach(), 1e-5, "weight")
    evaluated, *_ = ranks(1).run(said, evaluate, [str(run)])
    assert "accuracy" in evaluated
    rows = read_rows(run / FILE)
    assert {float(row["loss_weight"]) for row in rows} == {0.0, 0.5, 3.0}


def evaluated(comm: Communicator, run: Path, images: Path, options: dict[str, Any]) -> Any:
    return TrainedModel(run, comm=comm).evaluate(images, **options).records


def test_a_run_keeps_its_table_and_is_evaluated_on_it_by_patient(ranks: Ranks, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told, *_ = ranks(2).run(said, train, flags_of(images, run, "--tiles 1x2 --val-fraction 0.34"))
    assert "columns of the images: slide = file, patient = Subject No, annotation = mask, label = label" in told
    assert "4 patients to train on + 2 to validate with" in told
    kept = RunSamples.read(run / FILE)
    held = {each.file for each in kept.samples if each.split == "val"}
    rows = read_rows(run / FILE)
    assert {row["case_id"] for row in rows if row["split"] == "val"}.isdisjoint(
        {row["case_id"] for row in rows if row["split"] == "train"}
    )
    assert {row["label"] for row in rows} == {"benign", "tumour"}
    assert all(int(row["bytes"]) == (images / row["file"]).stat().st_size for row in rows)
    out = tmp_path / "out"
    told, *_ = ranks(1).run(said, evaluate, [str(run), "--out", str(out), "--resamples", "0"])
    assert "by image, 6 of 2 patients:" in told
    assert "by patient, 2:" in told
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["count"], found["patients"]["count"]) == (6, 2)
    assert {row["image"] for row in read_rows(out / "evaluation.csv")} == held
    ranks(2).run(said, train, flags_of(images, run, "--tiles 1x2 --val-fraction 0.34 --resume auto"))
    assert RunSamples.read(run / FILE) == kept
    other = images / "elsewhere.csv"  # a table whose columns have other names
    other.write_text(
        "Bild;Who;Diagnosis;size\n" + "".join(f"{r['file']};{r['case_id']};{r['label']};3\n" for r in rows)
    )
    columns = "--slide-column Bild --patient-column Who --label-columns Diagnosis --resamples 0"
    told, *_ = ranks(2).run(said, evaluate, words(run, "--images", other, columns))
    assert "by image, 18 of 6 patients:" in told
    assert "warning: 4 patients were trained on" in told
    assert "is for a table of other" in ranks(1).run(refused, evaluate, words(run, columns))[0]
    of = {"slide_column": "Bild", "patient_column": "Who", "label_columns": ("Diagnosis",), "resamples": 0}
    assert len(ranks(1).run(evaluated, run, other, of)[0]) == PATIENTS * EACH


def refused_train(comm: Communicator, argv: list[str]) -> None:
    assert "start with mpirun -n 1" in refused(comm, train, argv)


def test_all_folds_of_images_are_trained_and_summarised(ranks: Ranks, images: Path, tmp_path: Path) -> None:
    run, images = tmp_path / "cv", shutil.copytree(images, tmp_path / "clinic")
    flags = flags_of(images, run, "--folds 2 --fold all --eval-every none")
    assert ranks(2).run(said, refused_train, flags) == ["", ""]
    told, *_ = ranks(1).run(said, train, flags)
    assert "predictions of all folds together" in told
    (table,) = run.glob("evaluation-*.csv")
    rows = read_rows(table)
    assert len(rows) == PATIENTS * EACH
    of = {row["patient"]: {other["fold"] for other in rows if other["patient"] == row["patient"]} for row in rows}
    assert all(len(folds) == 1 for folds in of.values())
    again = flags_of(images, run, "--folds 2 --fold all --eval-every none --resume auto")
    text, line = (images / "labels.csv").read_text(), "p9_0.png;patient 0;benign;here;"
    (images / "p9_0.png").write_bytes((images / "p0_0.png").read_bytes())
    (images / "labels.csv").write_text(f"{text}\n{line}")
    assert "without 1 sample that the table has now: p9_0.png" in ranks(1).run(refused, train, again)[0]
    (images / "labels.csv").write_text(text.replace("patient 3;tumour", "patient 3;benign"))
    assert "3 samples with another label than when the run began: p3_0.png" in ranks(1).run(refused, train, again)[0]
    (images / "labels.csv").write_text(text.replace("p3_0.png;patient 3", "p3_0.png;patient 1"))
    assert (
        "1 sample of another patient than when the run began: p3_0.png (patient 3, now patient 1)"
        in ranks(1).run(refused, train, again)[0]
    )


def test_masks_may_be_named_in_a_table(images: Path, tmp_path: Path) -> None:
    files = open_files(images, task="segment", columns={"patient": "Subject No"})
    assert (files.task, len(files), files.tells_patients) == ("segment", PATIENTS * EACH, True)
    parts = parts_of(flags_of(images, tmp_path, "--task segment --model unet --val-fraction 0.34"))
    assert len(parts["val"]) == 2
    (images / "labels.csv").write_text((images / "labels.csv").read_text().replace(";masks/p0_0.png", ";"))
    with pytest.raises(ValueError, match=r"labels.csv, line 2: p0_0.png has no mask"):
        open_files(images, task="segment", columns={"patient": "Subject No"})
