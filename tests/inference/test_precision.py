"""Precisions of inference: int8 is plain PyTorch with weights rounded alike; two precisions beside each other."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpi4dl
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.inference.quantization import round_weights, rounded, weights_of_layers
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.inference.cases import SIZE, shown, train_nothing, write_images
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
        pytest.param(1, {"stream": "2x2", "stream_until": "stem"}, marks=pytest.mark.exhaustive),
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
