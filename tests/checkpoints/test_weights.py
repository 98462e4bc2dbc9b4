"""Weights that others wrote: what matches is taken, on every rank its part, and the rest is named."""

import os
import tracemalloc
import zipfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.checkpoints.checkpoints import Checkpoints
from mpi4dl.checkpoints.weights import load_weights, match, not_finite, open_weights
from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.base import BadImage
from mpi4dl.datasets.slides.features import open_bag
from mpi4dl.engine import Engine
from mpi4dl.models import build
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks

SIZES: dict[str, Any] = {"image_size": 8, "in_channels": 1, "hidden": 24, "num_heads": 4, "num_layers": 2}
PLANS = [Plan(((1, 1),), tensor=2, data=2, zero=3), Plan(((1, 2), (1, 1)), microbatches=2)]


def vit(num_classes: int = 3) -> nn.Module:
    return build("vit", num_classes, **SIZES).double()


def given() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn_like(value) for name, value in vit(7).state_dict().items()}


def lightning(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "epoch": 3,
        "hyper_parameters": Namespace(lr=0.1),
        "state_dict": {f"model.{name}": value for name, value in state.items()} | {"loss.weight": torch.ones(3)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}}],
        "callbacks": {"ModelCheckpoint": {"best": torch.tensor(0.1)}},
    }


def load(comm: Communicator, plan: Plan, source: str, strict: bool) -> tuple[list[str], dict[str, torch.Tensor] | None]:
    """The state of a model of 3 classes that took what it could of one of 7."""
    torch.manual_seed(0)
    staged = plan.num_stages > 1
    held = split(vit, plan, comm, image=(4, 1, 8, 8), seed=0) if staged else LocalStages.whole(vit(), plan, comm)
    remarks = load_weights(held, source, strict=strict)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    return remarks, engine.gather_state()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_fits_of_a_checkpoint_of_lightning(ranks: Ranks, tmp_path: Path, plan: Plan) -> None:
    path, wanted = tmp_path / "last.ckpt", given()
    torch.save(lightning(wanted), path)
    found = ranks(plan.num_ranks).run(load, plan, str(path), False)
    assert all(remarks == found[0][0] for remarks, _ in found)
    assert found[0][0] == [
        f"weights of {path}: {len(wanted) - 2} values, without 'model.' in front of names",
        "initial values are kept, as shapes differ: head.weight (7, 24) for (3, 24), head.bias (7,) for (3,)",
        "not used, as the model has no such names: loss.weight",
    ]
    torch.manual_seed(0)
    drawn, state = vit().state_dict(), found[0][1]
    assert state is not None
    for name, value in state.items():
        assert torch.equal(value, drawn[name] if name.startswith("head.") else wanted[name]), name


def refuse(comm: Communicator, source: str, strict: bool) -> str:
    with pytest.raises(Refusal) as refused:
        load(comm, Plan(((1, 1), (1, 1))), source, strict)
    return str(refused.value)


def test_what_is_refused_is_so_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"module." + name: value for name, value in given().items()}, path)
    for said in ranks(2).run(refuse, str(path), True):
        assert said.startswith(f"`weights` {path}: not all of it fits to the model: initial values are kept, as ")
        assert "shapes differ: head.weight (7, 24)" in said
    torch.save({"some": torch.ones(2)}, path)
    for said in ranks(2).run(refuse, str(path), False):
        assert said.startswith(f"`weights` {path} fits to nothing of the model: it has some, but the model has ")


class Own:
    """What pickles of strangers hold."""


def test_files_without_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for value, said in (
        ({"state_dict": {}, "model": Own()}, "holds objects of tests.checkpoints.test_weights.Own beside weights"),
        ({"epoch": 3}, "has epoch, but must be a state_dict"),
        ([torch.ones(1)], "is a list, but must be a state_dict"),
    ):
        torch.save(value, path)
        with pytest.raises(ValueError, match=said):
            open_weights(str(path))
    path.write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match="is no file of weights that torch"):
        open_weights(str(path))
    (tmp_path / "weights.safetensors").write_bytes(b"nor here")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        open_weights(str(tmp_path / "weights.safetensors"))
    with pytest.raises(ValueError, match="is neither a run with weights nor a checkpoint"):
        open_weights(str(tmp_path))
    with pytest.raises(ValueError, match="there is no such file or folder"):
        open_weights(str(tmp_path / "nowhere.pt"))


@pytest.mark.parametrize("name", ["pipe.pt", "pipe.safetensors"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be read: it is no regular file"):
        open_weights(str(tmp_path / name))


@pytest.mark.parametrize("old", [False, True])
def test_forms_of_files(tmp_path: Path, old: bool) -> None:
    """Torchvision's own layout of names, plain, in safetensors, wrapped, and by the writer before zip files."""
    state = import_torchvision().models.resnet18(num_classes=4).state_dict()
    paths = [tmp_path / name for name in ("a.pth", "b.safetensors", "c.pt")]
    torch.save(state, paths[0], _use_new_zipfile_serialization=not old)
    safetensors.torch.save_file(state, paths[1])
    torch.save({"model": nn.ParameterDict({}).state_dict() | state, "counter": Counter(a=1)}, paths[2])
    for path in paths:
        stored = open_weights(str(path))
        found = match(stored.shapes, {name: tuple(value.shape) for name, value in state.items()})
        assert found.pairs == {name: name for name in state}
        assert not [*found.problems()]
        assert all(torch.equal(stored.read(name), value) for name, value in state.items())


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path, stored = tmp_path / "w.pt", tmp_path / "stored.pt"
    torch.save({"a": torch.ones(3)}, stored)
    with zipfile.ZipFile(stored) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name) + bytes(1 << 26) * name.endswith("data.pkl"))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"w\.pt is compressed, .* MiB that unpack to 64\.0 MiB"):
        open_weights(str(path))
    with pytest.raises(BadImage, match=r"w\.pt: is compressed"):
        open_bag(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
    stored.write_bytes(stored.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"stored\.pt is damaged or cut off"):
        open_weights(str(stored))


def test_names_that_begin_otherwise() -> None:
    theirs = {"net.module.conv.weight": (2,), "net.module.head.weight": (4,), "step": ()}
    found = match(theirs, {"conv.weight": (2,), "head.weight": (3,), "norm.num_batches_tracked": ()})
    assert found.pairs == {"conv.weight": "net.module.conv.weight"}
    assert (found.missing, found.unmatched) == ([], ["step"])
    assert found.reshaped == ["head.weight (4,) for (3,)"]
    encoder = match({"conv.weight": (2,), "fc.weight": (1,)}, {"encoder.conv.weight": (2,), "pool.weight": (5,)})
    assert encoder.pairs == {"encoder.conv.weight": "conv.weight"}
    assert (encoder.missing, encoder.unmatched) == (["pool.weight"], ["fc.weight"])
    tied = match({"head.weight": (2,)}, {"embed.weight": (2,), "head.weight": (2,)}, {"head.weight": "embed.weight"})
    assert tied.pairs == {"embed.weight": "head.weight"}


def test_weights_that_packages_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ValueError, match=r"has no resnet18-f37072fd.pth\), and nothing is downloaded: call torch.hub"):
        open_weights("ResNet18_Weights.IMAGENET1K_V1")
    (tmp_path / "checkpoints").mkdir()
    torch.save({"fc.weight": torch.ones(2)}, tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    for name in ("ResNet18_Weights.IMAGENET1K_V1", "ResNet18_Weights.DEFAULT", "pretrained"):
        assert open_weights(name, "resnet18").shapes == {"fc.weight": (2,)}
    with pytest.raises(ValueError, match=r"no weights ResNet18_Weights.V9 in torchvision; of resnet18 it has"):
        open_weights("ResNet18_Weights.V9", "resnet18")
    with pytest.raises(ValueError, match="small_resnet has no trained weights in torchvision"):
        open_weights("pretrained", "small_resnet")
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=r"timm/resnet18 are not in the cache .* timm.create_model\('resnet18'"):
        open_weights("pretrained", "timm/resnet18")


def save_run(comm: Communicator, folder: Path) -> None:
    torch.manual_seed(1)
    held = LocalStages.whole(vit(), Plan(data=comm.size), comm)
    engine = Engine(held, held.plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    with Checkpoints(folder / "checkpoints", comm) as checkpoints:
        checkpoints.save(engine, {})


def test_a_checkpoint_of_ours(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save_run, tmp_path)
    torch.manual_seed(1)
    wanted = vit().state_dict()
    remarks, state = ranks(2).run(load, Plan(((1, 1), (1, 1))), str(tmp_path), True)[0]
    assert [line.partition(":")[2] for line in remarks] == [f" {len(wanted)} values"]
    assert state is not None
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_weights_that_are_no_numbers_are_told(ranks: Ranks, tmp_path: Path, plan: Plan) -> None:
    state = vit().state_dict()
    first, second = sorted(state)[1:3]
    state[first].view(-1)[-1], state[second].view(-1)[0] = float("nan"), float("inf")
    torch.save(state, tmp_path / "weights.pt")
    told = [remarks for remarks, _ in ranks(plan.num_ranks).run(load, plan, str(tmp_path / "weights.pt"), True)]
    assert all(len(remarks) == 2 and f"first in {first}, and 1 more" in remarks[1] for remarks in told)


def test_masks_may_have_infinities() -> None:
    values = [("mask", torch.tensor([float("-inf")])), ("weight", torch.ones(1)), ("counter", torch.ones(1).long())]
    assert not_finite(world(), "w", values, {"weight"}) == []
    assert "mask" in not_finite(world(), "w", [("mask", torch.tensor([float("nan")]))], set())[0]
