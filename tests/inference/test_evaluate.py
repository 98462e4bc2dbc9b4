"""Evaluating: metrics, intervals and records of every task are those of one process, by any plan."""

import csv
import json
import math
from contextlib import redirect_stdout
from datetime import datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

import mpi4dl
from mpi4dl.checkpoints.weights import load_weights
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.kinds import PICTURES, SLIDES, FileKind
from mpi4dl.datasets.samples import Sample
from mpi4dl.datasets.sources import open_files
from mpi4dl.datasets.split import Subset
from mpi4dl.evaluate import evaluate
from mpi4dl.export import export
from mpi4dl.inference.images import open_files_of_run, seen_before
from mpi4dl.inference.options import Inference, Inputs, Placing, placed
from mpi4dl.options.config import Config
from mpi4dl.options.declare import ConfigError, from_keywords
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.predict import predict
from mpi4dl.results.evaluations import file_of_evaluation
from mpi4dl.runs.samples import RunSamples
from mpi4dl.training.trained import ModelOptions
from tests.inference.cases import CLASSES, SIZE, Shown, shown, train_nothing, write_images
from tests.pool.ranks import Ranks

TOLERANCE = 1e-5


def said(comm: Communicator, *argv: str) -> str:
    with redirect_stdout(StringIO()) as out:
        evaluate(comm, argv)
    return out.getvalue()


def refused(*argv: str) -> str:
    with pytest.raises(Refusal) as caught:
        evaluate(world(), argv)
    return str(caught.value)


def found_in(folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    with (folder / "evaluation.csv").open() as file:
        return json.loads((folder / "evaluation.json").read_text()), list(csv.DictReader(file))


def close(a: Any, b: Any) -> bool:
    return a == b or abs(float(a) - float(b)) <= TOLERANCE


def test_classes_of_folders(ranks: Ranks, tmp_path: Path) -> None:
    model = train_nothing(tmp_path / "run")
    true = []
    for label, (name, count) in enumerate(zip(CLASSES, (4, 1, 2), strict=True)):
        true += [(path, label) for path in write_images(tmp_path / "test" / name, count)]
    bad = tmp_path / "test" / "tumour" / "bad.png"
    bad.write_bytes(b"")
    argv = [str(tmp_path / "run"), "--images", str(tmp_path), "--resamples", "50"]
    told = [said(world(), *argv, "--out", str(tmp_path / "1"))]
    told += ranks(4).run(said, *argv, "--out", str(tmp_path / "4"), "--tiles", "2x2")[:1]
    (one, first), (four, second) = (found_in(tmp_path / n) for n in "14")
    for a, b in zip(first, second, strict=True):
        assert all(close(a[column], b[column]) for column in a)
    for name in CLASSES:  # otherwise rounding decides who comes first, and so the AUC
        scores = sorted(float(row[f"probability {name}"]) for row in first if not row["error"])
        assert min(b - a for a, b in pairwise(scores)) > 10 * TOLERANCE
    for name, measured in one["metrics"].items():
        assert all(close(value, four["metrics"][name][key]) for key, value in measured.items())
        assert measured["low"] == measured["high"] == "nan"  # of 7 images there is no interval
    assert all("-: an interval takes 10 images or more" in each for each in told)
    assert one["count"] == 7
    assert one["bad"] == four["bad"] == {"tumour/bad.png": f"{bad}: is empty (0 bytes)"}
    with torch.no_grad():
        predicted = [int(model(shown(path)).argmax()) for path, _ in true]
    confusion = [[0] * 3 for _ in CLASSES]
    for (_, label), guess in zip(true, predicted, strict=True):
        confusion[label][guess] += 1
    assert one["confusion"] == confusion
    assert one["metrics"]["accuracy"]["value"] == sum(confusion[i][i] for i in range(3)) / 7
    assert all("7 images evaluated, 1 could not be read" in each for each in told)
    by_name = {row["image"]: row for row in first}
    assert by_name["benign/0.png"]["label"] == "benign"
    assert math.isclose(sum(float(by_name["benign/0.png"][f"probability {name}"]) for name in CLASSES), 1, abs_tol=1e-6)


def test_masks_and_overlap(ranks: Ranks, tmp_path: Path) -> None:
    model = train_nothing(tmp_path / "run", "segment", model="unet", model_options={"num_filters": 4, "depth": 2})
    (tmp_path / "test" / "masks").mkdir(parents=True)
    paths, drawn = write_images(tmp_path / "test" / "images", 10), np.random.default_rng(2)
    confusion = np.zeros((3, 3), int)
    for path in paths:
        mask = drawn.integers(0, 4, SIZE).astype(np.uint8)
        mask[mask == 3] = 255  # which counts for nothing
        name = path.relative_to(tmp_path / "test" / "images")
        (tmp_path / "test" / "masks" / name).parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(mask).save(tmp_path / "test" / "masks" / name)
        with torch.no_grad():
            predicted = model(shown(path)).argmax(1)[0].numpy()
        np.add.at(confusion, (mask[mask < 3], predicted[mask < 3]), 1)
    argv = [str(tmp_path / "run"), "--images", str(tmp_path / "test"), "--out", str(tmp_path / "out")]
    ranks(4).run(said, *argv, "--tiles", "1x2", "--data", "2", "--resamples", "20")
    found, rows = found_in(tmp_path / "out")
    assert found["confusion"] == confusion.tolist()
    both, total = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    assert math.isclose(found["metrics"]["dice"]["value"], float((2 * both / total).mean()), rel_tol=1e-12)
    assert len(rows) == 10
    assert found["metrics"]["dice"]["low"] < found["metrics"]["dice"]["high"]


@pytest.mark.parametrize(
    ("task", "columns", "lines", "metric"),
    [
        ("regress", ("age", "size"), ("1,2.5", "3,0", "2,2", "7,1"), "mae"),
        ("multilabel", ("a", "b"), ("1,0", "0,0", "1,1", "0,1"), "auc"),
        ("survival", ("time", "event"), ("1,0", "2,1", "3,1", "4,0"), "concordance"),
        ("classify", ("class",), ("tumour", "benign", "benign", "tumour"), "accuracy"),
    ],
)
def test_labels_of_tables(tmp_path: Path, task: str, columns: Any, lines: Any, metric: str) -> None:
    known = {"survival": ("risk",), "classify": CLASSES}.get(task, columns)
    train_nothing(tmp_path / "run", task, known)
    paths = write_images(tmp_path / "test", 4)
    table = [",".join(("file", *columns)), *(f"{path.name},{line}" for path, line in zip(paths, lines, strict=True))]
    (tmp_path / "test" / "labels.csv").write_text("\n".join(table))
    export(tmp_path / "run", tmp_path / "weights.pt")
    scores = mpi4dl.TrainedModel(tmp_path / "weights.pt").evaluate(tmp_path / "test", tmp_path / "out", resamples=30)
    found, rows = found_in(tmp_path / "out")
    assert found["metrics"][metric]["value"] == scores.metrics[metric].value
    assert metric in str(scores)
    assert not any(path.name in str(scores) for path in paths)  # one line, however many images there are
    assert [row["image"] for row in rows] == [path.relative_to(tmp_path / "test").as_posix() for path in paths]
    told = [[row[f"label {name}"] for name in columns] for row in rows] if task in ("regress", "multilabel") else None
    if told is not None:
        assert [list(map(float, each)) for each in told] == [list(map(float, line.split(","))) for line in lines]
        predicted = np.array([[float(row[f"prediction {name}"]) for name in columns] for row in rows])
        true = np.array([list(map(float, line.split(","))) for line in lines])
        if task == "regress":
            assert math.isclose(scores.metrics["mae"].value, np.abs(predicted - true).mean(), rel_tol=1e-9)
    if task == "classify":
        right = sum(row["prediction"] == row["label"] for row in rows)
        assert scores.metrics["accuracy"].value == right / 4


@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_large_images_are_not_cropped_unasked(tmp_path: Path, fit: str) -> None:
    """Training cropped them because they are large, which nobody asked for."""
    train_nothing(tmp_path / "run", images=Shown("crop"))
    run, images, out = str(tmp_path / "run"), tmp_path / "test", str(tmp_path / "out")
    for number, size in enumerate((SIZE, SIZE, SIZE, (48, 128))):
        path = images / CLASSES[number % 2 * 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.full((*size, 3), 50 * number, np.uint8)).save(path)
    asked = (run, "--images", str(images))
    for command in (evaluate, predict):
        with pytest.raises(Refusal, match=r"12\.5 % of an image: --fit auto cropped .* --fit crop .* --fit resize"):
            command(world(), asked)
    told = said(world(), *asked, "--fit", fit, "--out", out, "--resamples", "0")
    assert "95 % from" not in told
    crops = fit == "crop"
    assert ("saw 78.1 % of the pixels of images on average, 12.5 % at least" in told) is crops
    shares = [row.get("seen", "") for row in found_in(tmp_path / "out")[1]]
    assert shares == (["1.0", "1.0", "1.0", "0.125"] if crops else [""] * 4)
    for record in mpi4dl.TrainedModel(run, fit=fit).predict(images, tmp_path / "new"):
        share = 0.125 if record["image"].endswith("3.png") else 1
        assert record.get("seen") == (share if crops else None)


def test_outputs_that_are_not_numbers_have_no_metrics(tmp_path: Path) -> None:
    train_nothing(tmp_path / "run")
    for name in CLASSES[:1]:
        write_images(tmp_path / "test" / name, 3)
    state = load_file(tmp_path / "run" / "model.safetensors")
    *_, last = (name for name in state if name.endswith("bias"))
    state[last][0] = torch.nan
    save_file(state, tmp_path / "run" / "model.safetensors", {"mpi4dl": (tmp_path / "run" / "model.json").read_text()})
    told = said(world(), str(tmp_path / "run"), "--images", str(tmp_path / "test"), "--out", str(tmp_path / "out"))
    assert "outputs of 3 images are not numbers (NaN)" in told
    found, _ = found_in(tmp_path / "out")
    assert all(measured["value"] == "nan" for measured in found["metrics"].values())
    with pytest.raises(Refusal, match=r"none of 3 images can be read: benign/0\.png: the model's outputs are not"):
        predict(world(), (str(tmp_path / "run"), "--images", str(tmp_path / "test")))


class Halves:
    """Images whose class is their brightness."""

    channels, classes = 3, ("dark", "light")

    def __len__(self) -> int:
        return 8

    def label(self, index: int) -> int:
        return index % 2

    def image(self, index: int) -> Any:
        noise = np.random.default_rng(index).random((8, 8, 3), dtype=np.float32)
        return WholeImage(noise * 0.5 + np.float32(0.5 * (index % 2)))


def flat(num_classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, num_classes))


@pytest.mark.parametrize("save_every", ["epoch", "none"])
def test_the_average_that_validations_measured_is_taken(tmp_path: Path, save_every: str) -> None:
    options: dict[str, Any] = {"model": flat, "dataset": (Halves(), Halves()), "image_size": (8, 8), "batch_size": 4}
    options |= {"epochs": 2, "lr": 0.1, "ema": 0.9, "num_workers": 0, "tensorboard": False, "save_every": save_every}
    run = tmp_path / "run"
    validated = mpi4dl.Trainer(run_folder=str(run), metrics="auc", **options).fit()
    assert validated is not None
    files = {average: load_file(run / f"{name}.safetensors") for average, name in ((True, "ema"), (False, "model"))}
    for average, expected in files.items():
        model = mpi4dl.TrainedModel(run if average else run / "model.safetensors", model=flat)
        (module,) = model.runner.stages.modules_of.values()
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
        assert any("averages of the weights (ema)" in remark for remark in model.remarks) is average
        assert any("weights of the last step" in remark for remark in model.remarks)
        # Training that begins with a run begins with what its validations measured, and with a file with what is in it.
        begun = LocalStages.whole(flat(2), Plan(), world())
        load_weights(begun, str(run if average else run / "model.safetensors"), strict=True)
        own = begun.own_state()
        assert sorted(own) == sorted(expected)
        assert all(torch.equal(value, expected[name]) for name, value in own.items())
        if average:
            export(run, tmp_path / "weights.safetensors")
            exported = load_file(tmp_path / "weights.safetensors")
            assert all(torch.equal(exported[name], value) for name, value in expected.items())
            assert model.evaluate(Halves(), resamples=0).metrics["accuracy"].value == validated.accuracy
    assert any(not torch.equal(files[True][name], files[False][name]) for name in files[True])


def test_evaluations_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    now, found = datetime(2026, 1, 31, 12), []
    for number in range(3):
        found.append(file_of_evaluation(tmp_path, None, now))
        found[-1].with_suffix((".json", ".csv")[number % 2]).write_text(
            ""
        )  # a writer may have come no further than to one of both
    assert len(set(found)) == 3
    assert file_of_evaluation(tmp_path, tmp_path / "out", now) == tmp_path / "out" / "evaluation.json"


def test_labels_of_another_kind_are_refused(tmp_path: Path) -> None:
    train_nothing(tmp_path / "run")
    write_images(tmp_path / "test" / "benign", 1)
    write_images(tmp_path / "test" / "other", 1)
    run, images = str(tmp_path / "run"), str(tmp_path / "test")
    assert "has the class 'other', but the training set has only benign" in refused(run, "--images", images)
    (tmp_path / "test" / "labels.csv").write_text("file,class\nbenign/0.png,unheard of\n")
    assert "'class' is 'unheard of', but the classes of training are benign" in refused(run, "--images", images)
    for path in (tmp_path / "test").rglob("*.png"):
        path.write_bytes(b"")
    (tmp_path / "test" / "labels.csv").write_text("file,class\nbenign/0.png,benign\n")
    assert "none of 1 images can be read: " in refused(run, "--images", images)


def test_a_plan_is_chosen_by_the_size_of_images() -> None:
    def chosen(side: int, num_ranks: int, **placing: Any) -> tuple[Any, int, int]:
        config = ModelOptions(from_keywords(Config, {"image_size": (side, side), "batch_size": 2}))
        inputs = Inputs(batch_size=placing.pop("batch_size", None))
        found, _ = placed(config, Inference(inputs, Placing(**placing)), num_ranks)
        return found["tiles"], found["data"], found["batch_size"]

    assert chosen(512, 4) == (((1, 1),), 4, 4)
    assert chosen(4096, 4) == (((2, 2),), 1, 2)
    assert chosen(512, 4, batch_size=1) == (((2, 2),), 1, 1)
    assert chosen(512, 4, tiles=((1, 2),)) == (((1, 2),), 2, 2)
    assert chosen(512, 5, stages=2) == (((1, 1),), 2, 2)


def test_images_of_their_own_sizes_come_one_at_a_time() -> None:
    asked = {"image_size": (64, 64), "fit": "own", "batch_size": 1, "slides": "slides"}
    config = ModelOptions(from_keywords(Config, asked))
    for batch_size in (None, 2):
        found, why = placed(config, Inference(Inputs(batch_size=batch_size), Placing(data=2)), 2)
        assert (found["batch_size"], why) == (2, "")
    assert "each slide" in placed(config, Inference(), 2)[1]
    with pytest.raises(ConfigError, match=r"`batch_size` 4: .* slides .* a batch has 2: leave it out"):
        placed(config, Inference(Inputs(batch_size=4), Placing(data=2)), 2)


class Table(NamedTuple):
    rows: list[Sample]
    kind: FileKind = SLIDES

    def __len__(self) -> int:
        return len(self.rows)


def test_slides_of_training_are_known_by_their_patients_or_else_by_their_names(tmp_path: Path) -> None:
    lines = ["file,slide_id,case_id,label,split,fold,mpp,annotation,mask_print,bytes,crc32"]
    for name, patient, split in (
        ("a1", "ann", "train"),
        ("a2", "ann", "train"),
        ("b1", "bob", "val"),
        ("c1", "cid", "test"),
    ):
        lines.append(f"{name}.svs,{name},{patient},0,{split},,,,,,")
    (tmp_path / "samples.csv").write_text("\n".join(lines))
    by_patient = Table([Sample(0, "a9", "a9.svs", "ann"), Sample(0, "c1", "c1.svs", "cid")])
    assert seen_before(by_patient, tmp_path) == ["warning: 1 patient was trained on: ann"]
    alone = Table([Sample(0, each, f"{each}.svs", each) for each in ("a1", "a2", "b1", "c1", "d1")])
    assert seen_before(alone, tmp_path) == [
        "warning: 2 slides were trained on: a1, a2",
        "warning: 1 slide was used for validation: b1",
    ]
    assert seen_before(alone, tmp_path / "elsewhere") == []


def test_pictures_of_training_are_known_by_their_bytes(tmp_path: Path) -> None:
    """Another picture may have the same name, and the same picture another."""
    paths = write_images(tmp_path / "images", 3)
    table = tmp_path / "images" / "labels.csv"
    table.write_text("file,label\n0,x\n1,y\n")
    trained = open_files(table, PICTURES)
    lines = ["file,slide_id,case_id,label,split,fold,mpp,annotation,mask_print,bytes,crc32"]
    for index, split in enumerate(("train", "val")):
        name, marks = trained.name(index), f"{trained.files[index].num_bytes},{trained.fingerprint(index)}"
        lines.append(f"{name},{name},{name},0,{split},,,,,{marks}")
    (tmp_path / "samples.csv").write_text("\n".join(lines))
    for path, name in zip(paths, ("a.png", "b.png", "0.png"), strict=True):
        path.rename(tmp_path / "images" / name)
    table.write_text("file,label\n0.png,x\na.png,x\nb.png,y\n")
    found = open_files(table, PICTURES)
    assert seen_before(Subset(found, range(3)), tmp_path) == [
        "warning: 1 image was trained on: a.png",
        "warning: 1 image was used for validation: b.png",
    ]


def test_files_of_a_run_that_changed_since_are_named(tmp_path: Path) -> None:
    for part in ("train", "val"):
        paths = [path for name in CLASSES for path in write_images(tmp_path / "images" / part / name, 2)]
    found = open_files(tmp_path / "images")
    about = SimpleNamespace(task="classify", channels=3, classes=found.classes, options={}, values=found.values)
    about.input_values = None
    trained: Any = SimpleNamespace(files=lambda: open_files(tmp_path / "images", classes=found.classes), about=about)
    RunSamples.of(*found.split(fraction=0.5, seed=0)).write(tmp_path)
    assert open_files_of_run(world(), trained, tmp_path, "val")[1] == "the 6 val images of the run"
    paths[-1].write_bytes(paths[0].read_bytes())
    told = "the 6 val images of the run, of which 1 has other content since: val/tumour/more/1.png"
    assert open_files_of_run(world(), trained, tmp_path, "val")[1] == told


def test_files_of_two_parts_are_known_by_their_bytes(tmp_path: Path) -> None:
    """Whatever they are called; of Zarr, whose chunks nobody compares, nothing is known."""
    columns = ["file", "slide_id", "case_id", "label", "split", "fold", "mpp", "annotation", "mask_print"]
    lines = [",".join([*columns, "bytes", "crc32"])]
    for number, (name, split, marks) in enumerate(
        [
            ("a.png", "train", "9,1"),
            ("b.png", "train", "9,1"),
            ("c.png", "val", "9,1"),
            ("d.png", "val", "8,1"),
            ("e.zarr", "train", "7,7"),
            ("f.zarr", "val", "7,7"),
            ("g.png", "train", ","),
            ("h.png", "val", ","),
        ]
    ):
        lines.append(f"{name},{number},{number},0,{split},,,,,{marks}")
    (tmp_path / "samples.csv").write_text("\n".join(lines))
    kept = RunSamples.read(tmp_path / "samples.csv")
    assert [*kept.in_doubt()] == ["warning: 1 file is in two parts, under two names: a.png (train) and c.png (val)"]
    (tmp_path / "samples.csv").write_text("\n".join(lines).replace("b.png,1,1,0,train", "b.png,1,1,1,train"))
    _, labels = RunSamples.read(tmp_path / "samples.csv").in_doubt()
    assert labels == "warning: 1 file is of two labels, under two names: a.png (0) and b.png (1)"
    assert kept.split_of()[2] == {(9, 1): "train", (8, 1): "val"}
