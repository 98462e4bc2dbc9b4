"""Columns of patients beside the embedding of slides, by the commands: equal to plain PyTorch, kept with weights."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.datasets import transformed
from mpi4dl.datasets.loader import shuffled
from mpi4dl.datasets.transformed import LazyImages, TransformedImages
from mpi4dl.evaluate import evaluate
from mpi4dl.export import export
from mpi4dl.geometry import Box, Interval
from mpi4dl.models.patches import PatchModel, cut
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import ConfigError, parse
from mpi4dl.options.data import build_views
from mpi4dl.options.declare import with_options
from mpi4dl.options.models import build_model
from mpi4dl.options.sources import source_of, with_frame
from mpi4dl.predict import predict
from mpi4dl.runs.description import Description
from mpi4dl.runs.samples import RunSamples
from mpi4dl.train import train
from tests.pool.ranks import Ranks
from tests.support.commands import plain_steps, read_lines, read_metrics, read_rows, refused, run_train, said, words
from tests.support.short_runs import EXACT
from tests.support.tiny import TINY_RESNET

PATIENTS, EACH, WIDTH, PATCH = 10, 2, 5, 32
TRAINING = (
    "--batch-size 2 --num-workers 0 --optimizer SGD --optimizer-options momentum=0.9 --lr 0.05 --lr-schedule constant "
    "--warmup 0 --epochs 2 --log-interval 1 --no-tensorboard --seed 3 --covariates age,sex,site:class"
)
VIT = """
from functools import partial
from mpi4dl.models import vit

build = partial(vit.ViT, in_channels=3, image_size=32, patch=16, num_layers=1, hidden=8, num_heads=2)
"""

WIDE = '[["age", 0.0, 1.0], ["sex", "f", "m"], ["site:class", "1", "2", "3"]]'  # as many numbers as in training


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of slides, features of them, and a table: old patients relapse, and nothing else tells it."""
    root, random = tmp_path_factory.mktemp("clinic"), np.random.default_rng(0)
    (root / "features").mkdir()
    lines = ["case_id,slide_id,label,age,sex,site,split"]
    for number in range(PATIENTS * EACH):
        patient, name = number // EACH, f"s{number:02}"
        count, sides = 1 + number % 3, (PATCH * (1 + number % 2), PATCH * 2)
        with h5py.File(root / "features" / f"{name}.h5", "w") as file:
            file["features"] = random.normal(size=(count, WIDTH)).astype(np.float32)
        pixels = random.integers(0, 256, (*sides, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(root / f"{name}.png")
        old = patient % 2 == 1
        age = "NA" if number == 2 else str(70 + patient if old else 40 - patient)
        line = (
            f"p{patient}",
            f"{name}.png",
            "relapse" if old else "none",
            age,
            "fm"[patient // 2 % 2],
            patient % 3 + 1,
        )
        lines.append(",".join(map(str, (*line, "val" if patient > 6 else "train"))))
    (root / "slides.csv").write_text("\n".join(lines))
    (root / "vit.py").write_text(VIT)
    return root


def flags_of(cohort: Path, more: str = "") -> list[str]:
    """Of training on features, or with `--patches` on slides."""
    features = "" if "--patches" in more else f"--features {cohort / 'features'}"
    return words("--slides", cohort / "slides.csv", features, TRAINING, more.format(cohort=cohort))


def beside(row: dict[str, str], mean: float, deviation: float) -> list[float]:
    """The numbers of a slide, by hand."""
    age = 0.0 if row["age"] == "NA" else (float(row["age"]) - mean) / deviation
    return [age, *(float(row["sex"] == each) for each in "fm"), *(float(row["site"] == each) for each in "123")]


def standard(rows: list[dict[str, str]]) -> tuple[float, float]:
    """The mean and the deviation of the ages of patients."""
    ages = [*{row["case_id"]: float(row["age"]) for row in rows if row["age"] != "NA"}.values()]
    return float(np.mean(ages)), float(np.std(ages))


def in_doubles(comm: Communicator, act: Callable[..., Any], argv: list[str]) -> None:
    """A body: a command with weights and images in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformed, "LazyImages", partial(LazyImages, dtype=torch.float64))
            act(comm, argv)
    finally:
        torch.set_default_dtype(torch.float32)


def plainly(cohort: Path, flags: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a plain loop over slides, whose logits are of embeddings and numbers by hand; and the weights."""
    config = with_options(with_frame(parse(flags)), {"covariates": WIDE})
    training, _ = source_of(config).open()
    torch.set_default_dtype(torch.float64)
    try:
        model = build_model(config, 2, training.channels)
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(model, PatchModel)
    aggregator: Any = model.aggregator
    head, aggregator.head = aggregator.head, nn.Identity()
    lines = read_rows(cohort / "slides.csv")
    mean, deviation = standard([row for row in lines if row["split"] == "train"])
    of = {row["slide_id"].removesuffix(".png"): row for row in lines}
    view = build_views(config, training.channels, config.data.fit)[1]  # type: ignore[arg-type]
    images = TransformedImages(training, view, lazy=True)

    def bag(index: int) -> Tensor:
        rows, cols = config.data.image_size
        whole = Box(Interval(0, 1), Interval(0, rows), Interval(0, cols))
        (tile,) = images.read((index,), 0, [whole]).tiles
        assert isinstance(tile, LazyImages)
        places = tile.tissue_patches(0, model.patch)
        assert places is not None
        pixels = cut(LazyImages(**{**vars(tile), "dtype": torch.float64}).read(whole), model.patch)
        chosen = [row * (cols // model.patch) + col for row, col in places]
        return pixels[chosen]

    def logits(batch: Sequence[int]) -> Tensor:
        bags = [bag(index) for index in batch]
        features = model.encoder(torch.cat(bags)).flatten(1)
        features = features if model.norm is None else model.norm(features)
        embeddings = [aggregator(each) for each in features.split([*map(len, bags)])]
        numbers = [beside(of[Path(training.name(index)).stem], mean, deviation) for index in batch]
        joined = torch.cat([torch.stack(embeddings), torch.tensor(numbers, dtype=torch.float64)], 1)
        return F.linear(joined, head.weight, head.bias)

    learnt = [p for p in (*model.parameters(), *head.parameters()) if p.requires_grad]
    step, count = config.samples_per_step, len(training)
    orders = [shuffled(count, 3, epoch) for epoch in range(2)]
    batches = [order[first : first + step] for order in orders for first in range(0, count - step + 1, step)]
    labels = (torch.tensor([training.label(index) for index in batch]) for batch in batches)
    each = (F.cross_entropy(logits(batch), label) for batch, label in zip(batches, labels, strict=True))
    losses = plain_steps(torch.optim.SGD(learnt, lr=0.05, momentum=0.9), each)
    aggregator.head = head
    return losses, model.state_dict()


PATCHES = "--patches 32 --level 0 --assume-mpp 1 --tissue 0.05 --flip none --patches-at-once 2 --feature-norm batch"
TINY = f"{PATCHES} --model {TINY_RESNET} --model-options num_filters=4 --aggregator mean"
ADAPTED = f"{PATCHES} --model {{cohort}}/vit.py:build --lora r=2,alpha=4,targets=up,query"
FEW = (
    "--tiles 1x2 --feature-norm batch",
    "--data 2 --zero 1 --batch-size 4 --microbatches 2 --aggregator transformer",
    f"--tiles 1x2 {ADAPTED}",
)
MORE = (
    "--aggregator max",
    "--data 2 --zero 3 --aggregator mean",
    "--tiles 1x2 --data 2 --aggregator gated-attention",
    "--accumulate 2 --batch-size 1 --aggregator transformer",
    TINY,
    f"--tiles 1x2 {TINY}",
    f"--data 2 --zero 2 {TINY}",
    f"--tiles 1x2 --data 2 --zero 1 {TINY}",
    f"--tiles 1x2 --stream-segments norms {TINY}",
    f"{ADAPTED} --aggregator max",
    f"--data 2 {ADAPTED}",
)


@pytest.mark.parametrize("plan", [*FEW, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MORE)])
def test_training_equals_a_plain_loop(ranks: Ranks, cohort: Path, tmp_path: Path, plan: str) -> None:
    """Every weight and every loss of two epochs, in float64."""
    flags = [*flags_of(cohort, f"{plan} --eval-every none"), "--run-folder", str(tmp_path / "run")]
    ranks(build_plan(parse(flags)).num_ranks).run(in_doubles, train, flags)
    losses, state = plainly(cohort, flags)
    steps = [each["loss"] for each in read_metrics(tmp_path / "run") if each["phase"] == "train"]
    assert steps == pytest.approx(losses, rel=EXACT)
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=EXACT, atol=EXACT)


def changed(cohort: Path, name: str, change: Callable[[dict[str, str]], dict[str, str]]) -> Path:
    """The table with other lines."""
    rows = [change(row) for row in read_rows(cohort / "slides.csv")]
    path = cohort / name
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
    return path


@pytest.fixture(scope="module")
def run(cohort: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_train(ranks, tmp_path_factory.mktemp("runs") / "run", *flags_of(cohort, "--aggregator mean"))


def fit_of(run: Path) -> list[list[Any]]:
    """The columns that a run keeps with its weights, and what they were fitted to."""
    text = Description.read((run / "model.json").read_text(), "model.json").options["covariates"]
    found: list[list[Any]] = json.loads(text)
    return found


def probabilities(folder: Path) -> dict[str, list[float]]:
    found = read_lines(folder / "predictions.jsonl")
    return {Path(line["image"]).stem: [*line["probabilities"].values()] for line in found}


def test_weights_alone_know_what_columns_were_fitted_to(ranks: Ranks, cohort: Path, run: Path, tmp_path: Path) -> None:
    """Of other patients, with classes and gaps that training did not have; a changed cell is predicted again."""
    export(run, tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt")
    outlier = {"age": "1000", "sex": "x", "site": "7.0"}
    table = changed(cohort, "others.csv", lambda row: row | outlier if row["slide_id"] == "s03.png" else row)
    mean, deviation = standard([row for row in read_rows(cohort / "slides.csv") if row["split"] == "train"])
    expected = {}
    for row in read_rows(table):
        name = Path(row["slide_id"]).stem
        with h5py.File(cohort / "features" / f"{name}.h5") as file:
            embedding = torch.from_numpy(file["features"][:]).mean(0)
        joined = torch.cat([embedding, torch.tensor(beside(row, mean, deviation))])
        logits = F.linear(joined, state["aggregator.head.weight"], state["aggregator.head.bias"])
        expected[name] = pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
    out = tmp_path / "out"
    for weights, count in ((run, 2), (tmp_path / "weights.pt", 1)):
        flags = words(weights, "--features", cohort / "features", "--slides", table, "--out", out / str(count))
        told = ranks(count).run(said, predict, [*flags, "--no-maps"])[0]
        assert "warning: covariate site: 1 slide of classes that training did not have" in told
        assert "covariate age: no value of 1 slide, taken for its mean: s02.png" in told
        assert probabilities(out / str(count)) == expected
    changed(cohort, "others.csv", dict)
    assert "19 slides done before" in ranks(1).run(said, predict, [*flags, "--no-maps"])[0]
    assert probabilities(out / "1") != expected
    told = ranks(2).run(said, evaluate, words(run, "--resamples 0 --out", tmp_path / "evaluated"))[0]
    assert "accuracy" in told


def test_weights_of_as_many_other_columns_are_told(ranks: Ranks, cohort: Path, run: Path, tmp_path: Path) -> None:
    flags = flags_of(cohort, f"--aggregator mean --weights {run} --dry-run --run-folder {tmp_path}")
    warning = "the weights are of the covariates age, sex f, sex m, site 1, site 2, ... and 1 more"
    for columns, told in (("age,sex,site:class", False), ("age,site:class,sex", True)):
        assert (warning in ranks(1).run(said, train, [*flags, "--covariates", columns])[0]) == told


LACKING = {
    "no-sex.csv": (lambda row: {name: each for name, each in row.items() if name != "sex"}, "no column 'sex'"),
    "old.csv": (lambda row: row | {"age": "old"}, "'age' is 'old', but training had numbers"),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_table_without_a_column_is_refused(ranks: Ranks, cohort: Path, run: Path, tmp_path: Path, name: str) -> None:
    change, message = LACKING[name]
    table = changed(cohort, name, change)
    for act in (predict, evaluate):
        argv = words(run, "--features", cohort / "features", "--slides", table, "--out", tmp_path / "out")
        assert all(message in each for each in ranks(2).run(refused, act, argv))
    assert "has no columns" in ranks(1).run(refused, predict, words(run, "--features", cohort / "features"))[0]


def test_a_run_goes_on_with_the_same_columns_and_cells(ranks: Ranks, cohort: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun = run_train(ranks, folder, *flags_of(cohort, "--max-steps 2"))
    before, kept = fit_of(begun), RunSamples.at(begun)
    assert kept is not None
    assert kept.samples[2].covariates == "age=, sex=f, site=2"
    goes_on = [*flags_of(cohort, "--resume auto"), "--run-folder", str(folder)]
    table = changed(cohort, "aged.csv", lambda row: row | {"age": "41"} if row["slide_id"] == "s00.png" else row)
    for flags, message in (
        (["--slides", str(table)], "s00.h5 (age=40, sex=f, site=1, now age=41, sex=f, site=1)"),
        (["--covariates", "age,sex"], "now age=40, sex=f)"),
        (["--covariates", "age,sex,site"], "was written with --covariates"),
    ):
        assert message in ranks(1).run(refused, train, [*goes_on, *flags])[0]
    ranks(1).run(train, goes_on)
    assert RunSamples.at(begun) == kept
    after = fit_of(begun)
    assert after == before
    assert [each[0] for each in after] == ["age", "sex", "site:class"]
    train_rows = [row for row in read_rows(cohort / "slides.csv") if row["split"] == "train"]
    assert after[0][1:] == pytest.approx(standard(train_rows))


def test_each_fold_has_the_mean_of_its_own_patients(ranks: Ranks, cohort: Path, tmp_path: Path) -> None:
    """Columns tell what features do not; finished folds are found again, and a changed cell is refused."""
    table, folder = tmp_path / "slides.csv", tmp_path / "cv"
    table.write_text("\n".join(line.rpartition(",")[0] for line in (cohort / "slides.csv").read_text().splitlines()))
    flags = flags_of(
        cohort, "--folds 3 --fold all --lr 0.5 --epochs 8 --eval-every none --save-every none --aggregator max"
    )
    flags = [*flags, "--slides", str(table), "--run-folder", str(folder)]
    told = ranks(1).run(said, train, flags)[0]
    (summary,) = folder.glob("evaluation-*.csv")
    rows = {Path(row["image"]).stem: row for row in read_rows(summary)}
    assert len(rows) == PATIENTS * EACH
    assert sum(row["prediction"] == row["label"] for row in rows.values()) >= PATIENTS * EACH - 1
    for fold in range(3):
        kept = read_rows(folder / f"fold_{fold}" / "samples.csv")
        own = {row["slide_id"] for row in kept if row["split"] == "train"}
        own_rows = [row for row in read_rows(table) if row["slide_id"] in own]
        assert fit_of(folder / f"fold_{fold}")[0][1:] == pytest.approx(standard(own_rows))
    told = ranks(1).run(said, train, [*flags, "--resume", "auto"])[0]
    assert told.count("is finished") == 3
    table.write_text(table.read_text().replace(",71,", ",75,"))
    assert "s03.h5 (age=71" in ranks(1).run(refused, train, [*flags, "--resume", "auto"])[0]


@pytest.mark.parametrize(
    "more",
    [
        "--slides {cohort}/slides.csv --level 0",
        "--slides {cohort}/slides.csv --level 0 --task segment",
        "--images {cohort}",
        "--images {cohort} --patches 32",
        "--images {cohort} --task image",
        "--text {cohort}/vit.py",
        "--dataset {cohort}/vit.py:build --patches 32",
    ],
)
def test_covariates_need_the_embedding_of_a_slide(cohort: Path, more: str) -> None:
    with pytest.raises(ConfigError, match="`covariates` age,site:class stand beside the embedding of a slide"):
        with_frame(parse(words("--covariates age,site:class", more.format(cohort=cohort))))
