"""Precisions of inference: int8 is plain PyTorch with weights rounded alike; two precisions beside each other."""

import copy
import csv
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import mpi4dl
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.evaluate import evaluate
from mpi4dl.inference.comparing import Comparison
from mpi4dl.inference.quantization import round_weights, rounded, weights_of_layers
from mpi4dl.inference.samples import Judging, Samples
from mpi4dl.inference.scoring import Scores, scores_of
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.task import TASKS
from tests.inference.cases import CLASSES, SIZE, shown, train_nothing, write_images
from tests.pool.ranks import Ranks

MOST = 127


def nearest(row: Tensor) -> Tensor:
    """The weights of one output, in multiples of its scale."""
    scale = float(row.abs().max()) / MOST
    return torch.tensor([round(float(w) / scale) * scale for w in row.flatten()]).view(row.shape)


def quantized(model: nn.Module) -> nn.Module:
    """The same model with its weights of 8 bits, output by output."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data = torch.stack([nearest(row) for row in module.weight.data])
    return model


def probabilities(comm: Communicator, run: Path, images: str, options: dict[str, Any]) -> dict[str, list[float]]:
    model = mpi4dl.TrainedModel(run, comm=comm, **options)
    return {record["image"]: [*record["probabilities"].values()] for record in model.predict(images)}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, {"stream": "2x2", "stream_until": "stem"}),
        pytest.param(2, {"tiles": "1x2"}, marks=pytest.mark.exhaustive),
        (2, {"tiles": "1x2", "stream": "2x2", "stream_until": "stem"}),
        (2, {"stages": 2}),
        pytest.param(2, {"data": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_int8_is_plain_pytorch_with_rounded_weights(
    ranks: Ranks, tmp_path: Path, count: int, options: dict[str, Any]
) -> None:
    model = train_nothing(tmp_path / "run")
    images = write_images(tmp_path / "new", 4)
    found, *_ = ranks(count).run(
        probabilities, tmp_path / "run", str(tmp_path / "new"), {**options, "precision": "int8"}
    )
    with torch.no_grad():
        for path in images:
            name = path.relative_to(tmp_path / "new").as_posix()
            whole, eight = (each(shown(path)).softmax(1)[0] for each in (model, quantized(model)))
            assert found[name] == pytest.approx(eight.tolist(), abs=1e-5)
            assert (whole - eight).abs().max() > 1e-3


def refused(comm: Communicator, run: Path, options: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as caught:
        mpi4dl.TrainedModel(run, comm=comm, precision="int8", **options)
    return str(caught.value)


def poolings(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten())


def test_what_int8_is_refused_for(ranks: Ranks, tmp_path: Path) -> None:
    vit = {"image_size": list(SIZE), "patch": 8, "hidden": 8, "num_layers": 1, "num_heads": 2}
    train_nothing(tmp_path / "vit", model="vit", model_options=vit)
    assert all("`tensor`" in each for each in ranks(2).run(refused, tmp_path / "vit", {"tensor": 2}))
    held = LocalStages.whole(poolings(3), Plan.of(tiles=((1, 1),)), world())
    with pytest.raises(Refusal, match="the model has none"):
        round_weights(held, poolings(3))


def test_weights_of_all_kinds_of_layers() -> None:
    """Also of transposed convolutions in groups, whose outputs are not in rows, and of attention; not of others."""
    model = nn.ModuleDict(
        {
            "up": nn.ConvTranspose2d(6, 4, 3, groups=2),
            "attention": nn.MultiheadAttention(8, 2),
            "line": nn.Conv1d(3, 5, 2),
            "norm": nn.GroupNorm(2, 4),
            "table": nn.Embedding(7, 8),
        }
    )
    layers = weights_of_layers(model)
    names = ["up.weight", "attention.in_proj_weight", "attention.out_proj.weight", "line.weight"]
    assert sorted(layers) == sorted(names)
    up = model["up"].weight.detach()
    found = rounded(up, layers["up.weight"])
    for group, output in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inputs = slice(3 * group, 3 * group + 3)
        assert torch.allclose(found[inputs, output], nearest(up[inputs, output]), atol=1e-7)
    line = model["line"].weight.detach()
    assert torch.allclose(rounded(line), torch.stack([nearest(row) for row in line]), atol=1e-7)
    assert torch.equal(rounded(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_two_precisions_by_slide_and_by_patient() -> None:
    """Two slides of one patient differ in opposite directions, and so the patient hardly does."""
    task, classes, patients = TASKS["classify"](2, None, {}), ("normal", "tumour"), ("p", "p", "q", "r")
    targets = torch.tensor([1, 1, 0, 0])

    def scores(*probabilities: float) -> Scores:
        outputs = torch.tensor([[1 - p, p] for p in probabilities], dtype=torch.float64)
        samples = Samples("slide", task, classes, ("a", "b", "c", "d"), patients, outputs, targets, True)
        kept: dict[str, Any] = {"records": (), "bad": {}, "count": 4, "remarks": ()}
        return scores_of(samples, Judging(), 0, 0.95, **kept)

    found = Comparison(("int8", "fp32"), scores(0.9, 0.42, 0.3, 0.6), scores(0.8, 0.5, 0.25, 0.6))
    told = found.as_json()
    assert told["largest_difference"] == {"slide": pytest.approx(0.1), "patient": pytest.approx(0.05)}
    assert told["changed_predictions"] == {"slide": 0, "patient": 0}
    for level, place in (("slide", [0.9, 0.42, 0.3, 0.6]), ("patient", [0.66, 0.3, 0.6])):
        true = [1, 1, 0, 0] if level == "slide" else [1, 0, 0]
        assert told["metrics"][level]["auc"]["int8"] == pytest.approx(roc_auc_score(true, place))
    lines = [*found.lines()]
    assert lines[0] == "by slide:"
    assert next(line for line in lines if line.startswith("probabilities")).startswith(
        "probabilities by slide differ by 0.1 at most (a), by 0.0575 on average"
    )
    rows = [*csv.DictReader(StringIO(found.table().decode()))]
    assert [float(row["probability tumour fp32"]) for row in rows] == [0.8, 0.5, 0.25, 0.6]


def told(comm: Communicator, *argv: str) -> str:
    with redirect_stdout(StringIO()) as out:
        evaluate(comm, argv)
    return out.getvalue()


def test_two_precisions_are_those_of_two_evaluations(ranks: Ranks, tmp_path: Path) -> None:
    train_nothing(tmp_path / "run")
    for name in CLASSES:
        write_images(tmp_path / "test" / name, 3)
    common = [str(tmp_path / "run"), "--images", str(tmp_path / "test"), "--resamples", "0"]
    alone = {}
    for precision in ("bf16", "fp32"):
        told(world(), *common, "--precision", precision, "--out", str(tmp_path / precision))
        with (tmp_path / precision / "evaluation.csv").open() as file:
            alone[precision] = {row["image"]: row for row in csv.DictReader(file)}
    out = tmp_path / "both"
    flags = ["--tiles", "1x2", "--precision", "bf16", "--compare-precision", "fp32", "--out", str(out)]
    said, *_ = ranks(2).run(told, *common, *flags)
    found = json.loads((out / "evaluation.json").read_text())
    metrics = json.loads((tmp_path / "fp32" / "evaluation.json").read_text())["metrics"]
    for name, values in found["comparison"]["metrics"]["image"].items():
        assert values["bf16"] == found["metrics"][name]["value"]
        assert values["fp32"] == pytest.approx(metrics[name]["value"], abs=1e-5)
    columns = [f"probability {name}" for name in CLASSES]
    most = 0.0
    with (out / "comparison.csv").open() as file:
        for row in csv.DictReader(file):
            one, two = (alone[precision][row["image"]] for precision in ("bf16", "fp32"))
            for column in columns:
                assert float(row[f"{column} fp32"]) == pytest.approx(float(two[column]), abs=1e-5)
                assert float(row[f"{column} bf16"]) == pytest.approx(float(one[column]), abs=0.02)
                most = max(most, abs(float(row[f"{column} bf16"]) - float(row[f"{column} fp32"])))
    assert 0 < most == pytest.approx(found["comparison"]["largest_difference"]["image"], abs=2e-6)
    assert f"differ by {found['comparison']['largest_difference']['image']:.3g} at most" in said
    with pytest.raises(Refusal, match="--compare-precision bf16 is --precision itself"):
        evaluate(world(), [*common, "--precision", "bf16", "--compare-precision", "bf16"])
