"""Adapters of low rank by the command equal plain PyTorch, by any plan; merged weights; what is refused of them."""

import copy
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mpi4dl
from mpi4dl import models
from mpi4dl._numbers import Damaged
from mpi4dl._torchvision import import_torchvision
from mpi4dl.checkpoints.weights import open_weights, without_adapters
from mpi4dl.comm import Communicator
from mpi4dl.datasets import Loader
from mpi4dl.export import export
from mpi4dl.geometry import Box, Interval
from mpi4dl.models.int8 import Int8Matrix, hold_in_int8
from mpi4dl.models.lora import LoRALinear, add_lora
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import parse
from mpi4dl.options.data import build_views
from mpi4dl.options.models import build_model
from mpi4dl.options.sources import source_of
from mpi4dl.train import train
from tests.commands.test_face import OWN, module_at
from tests.pool.ranks import Ranks
from tests.support.commands import read_metrics, refused, settled, words
from tests.support.short_runs import EXACT

MODEL = """
from functools import partial
from mpi4dl.models import vit

class ViT(vit.ViT):
    def __init__(self, num_classes, size):
        super().__init__(num_classes, 2, size, 8, num_layers=2, hidden=8, num_heads=2)
        self.double()

    def forward(self, x):
        return super().forward(x.double())

class Timm(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        from timm.models.vision_transformer import VisionTransformer
        sizes = dict(embed_dim=12, depth=2, num_heads=2, num_classes=num_classes)
        self.net = VisionTransformer((64, 72), 8, 2, **sizes).double()

    def forward(self, x):
        return self.net(x.double())

class Virchow(Timm):
    def __init__(self, num_classes):
        nn.Module.__init__(self)
        from mpi4dl.models import build
        sizes = dict(in_channels=2, embed_dim=12, depth=2, num_heads=2, img_size=28)
        self.net = build("virchow2", num_classes, **sizes).double()

own, patch = partial(ViT, size=(64, 72)), partial(ViT, size=32)
"""
FLAGS = (
    "--image-size 64x72 --batch-size 4 --lr 0.05 --optimizer SGD --optimizer-options momentum=0.9,weight_decay=0.01 "
    "--num-workers 0 --mean 0 --std 1 --epochs 2 --log-interval 1 --seed 3 "
    "--lr-schedule constant --warmup 0"
)
EIGHT_BITS = ",base=int8"
QUERIES = "own --lora r=3,alpha=6,targets=query,attention.output,up"
FUSED = "Timm --lora r=3,alpha=6,targets=qkv,proj,train=net.norm"
OF_PATCHES = "patch --patches 32 --lora r=3,alpha=6,targets=query,value --aggregator mean"
OF_TILES = "Virchow --patches 28 --lora r=3,alpha=6,targets=qkv,fc1 --aggregator mean"
FEW = {
    "own by stages of tiles": (QUERIES, "--stages 2 --tiles 1x2,1x1 --balance flops --microbatches 2"),
    "patches on tiles": (OF_PATCHES, "--tiles 1x2"),
    "own in 8 bits by stages of tiles": (QUERIES + EIGHT_BITS, "--stages 2 --tiles 1x2,1x1 --microbatches 2"),
}
MORE = {
    "own on tiles": (QUERIES, "--tiles 1x2"),
    "published encoder on tiles": (OF_TILES, "--tiles 1x2"),
    "own on more tiles": (QUERIES, "--tiles 2x2"),
    "own by replicas": (QUERIES, "--data 2"),
    "own by zero 1": (QUERIES, "--data 2 --zero 1"),
    "own by zero 3": (QUERIES, "--data 2 --zero 3"),
    "timm by stages": (FUSED, "--stages 2 --balance flops"),
    "own by features": (QUERIES, "--tensor 2"),
    "own recomputed": (QUERIES, "--recompute"),
    "timm on tiles": (FUSED, "--tiles 1x2"),
    "timm by zero 3": (FUSED, "--data 2 --zero 3"),
    "published encoder by replicas": (OF_TILES, "--data 2 --zero 2"),
    "patches by replicas": (OF_PATCHES, "--data 2 --zero 2"),
    "patches on tiles of replicas": (OF_PATCHES, "--tiles 1x2 --data 2"),
    "patches in 8 bits on tiles": (OF_PATCHES.replace("value", "value" + EIGHT_BITS), "--tiles 1x2"),
    "timm in 8 bits by replicas": (FUSED + EIGHT_BITS, "--data 2 --zero 2"),
    "own in 8 bits recomputed": (QUERIES + EIGHT_BITS, "--recompute --tiles 1x2"),
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_adapted_scans.py"
    path.write_text(OWN + MODEL)
    return path


def flags_of(own: Path, model: str) -> list[str]:
    if model in (FUSED, OF_TILES) and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    return words(FLAGS, f"--dataset={own}:Scans", f"--loss={own}:loss", f"--model={own}:{model}")


class Adapted(nn.Module):
    """Adapters as the paper has them, in plain PyTorch."""

    def __init__(self, base: nn.Linear, first: Tensor) -> None:
        super().__init__()
        self.base, self.first = base.requires_grad_(False), nn.Parameter(first.clone())
        self.second = nn.Parameter(first.new_zeros(base.out_features, len(first)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 6 / 3 * (x @ self.first.T @ self.second.T)


def in_doubles(comm: Communicator, act: Callable[..., Any], argv: list[str]) -> None:
    """A body: a command whose aggregator is in float64 too."""
    torch.set_default_dtype(torch.float64)
    try:
        act(comm, argv)
    finally:
        torch.set_default_dtype(torch.float32)


def trained(ranks: Ranks, folder: Path, *parts: object) -> Path:
    argv = words(*parts, "--run-folder", folder)
    ranks(build_plan(parse(argv)).num_ranks).run(in_doubles, train, argv)
    return folder


def plainly(own: Path, model: str) -> tuple[nn.Module, list[float], dict[str, Tensor]]:
    """The plain model with adapters, trained; its losses, and its values by the names of checkpoints."""
    flags = flags_of(own, model)
    parts, config = module_at(own), settled(flags)
    torch.set_default_dtype(torch.float64)
    try:
        drawn = build_model(config, 3, 2)
        plain = build_model(settled([each for each in flags if each != "--lora" and "targets" not in each]), 3, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    begun = drawn.state_dict()
    for name, value in plain.state_dict().items():  # the model begins as the plain one, but for rounding
        if isinstance(begun[name], Int8Matrix):
            row = value.abs().amax(1, keepdim=True)
            assert ((begun[name] - value).abs() <= row / 127 * (1 + 1e-12)).all()  # half of a step, at most twice
            value.copy_(begun[name])
        assert torch.equal(begun[name], value)
    held = {name for name, value in begun.items() if isinstance(value, Int8Matrix)}
    assert bool(held) == (EIGHT_BITS in model)
    chosen = config.tuning.lora
    assert chosen is not None
    plain.requires_grad_(False)
    adapted: dict[str, Adapted] = {}
    for path, layer in list(plain.named_modules()):
        first = f"{path}.lora_A.weight"
        if first in begun:
            assert path.endswith(tuple(chosen["targets"]))
            home, _, leaf = path.rpartition(".")
            adapted[path] = Adapted(layer, begun[first])  # type: ignore[arg-type]
            setattr(plain.get_submodule(home), leaf, adapted[path])
    assert len(adapted) == 2 * (len(chosen["targets"]))
    for name, p in plain.named_parameters():
        whole = ("aggregator.",) if "aggregator.head.weight" in begun else ("head.", "net.head.", "net.norm.")
        p.requires_grad_(name.startswith(whole) or name.endswith((".first", ".second")))
    optimizer = torch.optim.SGD(
        [p for p in plain.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.01
    )
    box = lambda count: [Box(*(Interval(0, n) for n in (count, 64, 72)))]  # noqa: E731
    views, data, losses = build_views(config, 2, "resize"), source_of(config).open(), []
    for epoch in range(2):
        plain.train()
        for batch in Loader(data[0], views[0], 4, box, shuffle=True, drop_last=True, seed=3).epoch(epoch):
            optimizer.zero_grad()
            loss = parts.loss(plain(batch.tiles[0].double()), batch.labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = {}
    for name, value in plain.state_dict().items():
        for ours, stored in ((".base.", "."), (".first", ".lora_A.weight"), (".second", ".lora_B.weight")):
            name = name.replace(ours, stored)
        state[name] = value
    state |= {f"{path}.lora_alpha": torch.tensor(6.0, dtype=torch.float64) for path in adapted}
    return plain, losses, state


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in state.items() if ".lora_" not in name}
    for name in state:
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            found[f"{path}.weight"] += 2 * state[f"{path}.lora_B.weight"] @ state[name]
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=EXACT, atol=EXACT)


def assert_learnt(ranks: Ranks, own: Path, folder: Path, model: str, plan: str) -> dict[str, Tensor]:
    _, losses, state = plainly(own, model)
    run = trained(ranks, folder, *flags_of(own, model), plan)
    steps = [each["loss"] for each in read_metrics(run) if each["phase"] == "train"]
    assert steps == pytest.approx(losses, rel=EXACT)
    assert_close(load_file(run / "model.safetensors"), state)
    return state


@pytest.mark.parametrize("case", FEW)
def test_adapters_equal_plain_pytorch(ranks: Ranks, own: Path, tmp_path: Path, case: str) -> None:
    model, plan = FEW[case]
    state = assert_learnt(ranks, own, tmp_path / "run", model, plan)
    export(tmp_path / "run", tmp_path / "plain.pt")
    assert_close(torch.load(tmp_path / "plain.pt"), merged(state))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE)
def test_adapters_equal_plain_pytorch_by_more_plans(ranks: Ranks, own: Path, tmp_path: Path, case: str) -> None:
    assert_learnt(ranks, own, tmp_path / "run", *MORE[case])


def test_only_adapters_and_heads_have_state(ranks: Ranks, own: Path, tmp_path: Path) -> None:
    """What an optimizer keeps is of the parameters that are trained alone, in a checkpoint too."""
    run = trained(ranks, tmp_path / "run", *flags_of(own, QUERIES), "--data 2 --zero 1")
    (path,) = sorted(run.glob("checkpoints/*/optimizer.safetensors"))[-1:]
    names = {name.partition("/")[2] for name in load_file(path)}
    assert names == {"head.weight", "head.bias"} | {
        f"blocks.{n}.{layer}.lora_{each}.weight"
        for n in range(2)
        for layer in ("attention.query", "attention.output", "feed_forward.up")
        for each in "AB"
    }


def predicted(comm: Communicator, own: Path, source: Path) -> list[Any]:
    """A body: the probabilities of images, by the model of a run or a file, and what it is called."""
    model = mpi4dl.TrainedModel(source, comm=comm, trust_code=True)
    return [record["probabilities"] for record in model.predict(module_at(own).Scans("val"))]


def test_a_run_goes_on_predicts_and_is_merged(ranks: Ranks, own: Path, tmp_path: Path) -> None:
    """It stops after two steps, and goes on by another plan."""
    run, flags = tmp_path / "run", flags_of(own, QUERIES)
    plain, _, state = plainly(own, QUERIES)
    trained(ranks, run, *flags, f"--callbacks {own}:Steps")
    assert not (run / "model.safetensors").exists()
    other = flags_of(own, QUERIES.replace("alpha=6", "alpha=5"))
    (message,) = ranks(1).run(refused, train, words(*other, "--resume auto --run-folder", run))
    assert "--lora" in message
    trained(ranks, run, *flags, "--data 2 --resume auto")
    assert_close(load_file(run / "model.safetensors"), state)
    stored = without_adapters(open_weights(str(run)))  # as the encoder of features is, and a new training begins
    assert_close({name: stored.read(name) for name in stored.shapes}, merged(state))
    export(run, tmp_path / "plain.safetensors")
    assert "lora" not in (tmp_path / "plain.safetensors").read_bytes()[:4096].decode(errors="replace")
    (of_run,), (of_file,) = (ranks(1).run(predicted, own, path) for path in (run, tmp_path / "plain.safetensors"))
    with torch.no_grad():
        images = torch.stack([torch.from_numpy(module_at(own).Scan(12 + n).values).movedim(2, 0) for n in range(5)])
        expected = plain.eval()(images).softmax(1)
    for found in (of_run, of_file):
        torch.testing.assert_close(
            torch.tensor([[*each.values()] for each in found], dtype=torch.float64), expected, rtol=1e-6, atol=1e-6
        )


def test_weights_alone_say_what_they_are_merged_to(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    add_lora(nn.Sequential(model, nn.Linear(3, 2)), 2, 5, ["0.0"])
    nn.init.ones_(model[0].lora_B.weight)
    state = model.state_dict()
    save_file(state, tmp_path / "alone.safetensors")
    found = without_adapters(open_weights(str(tmp_path / "alone.safetensors")))
    assert {*found.shapes} == plain.keys()
    expected = plain["0.weight"] + 5 / 2 * torch.ones(3, 2) @ state["0.lora_A.weight"]
    torch.testing.assert_close(found.read("0.weight"), expected)
    del state["0.lora_A.weight"]
    save_file(state, tmp_path / "damaged.safetensors")
    with pytest.raises(Damaged, match=r"the adapter of 0\.weight cannot be merged: "):
        without_adapters(open_weights(str(tmp_path / "damaged.safetensors"))).read("0.weight")


def test_adapters_are_those_of_peft() -> None:
    """By the same values the same steps, to rounding; names in checkpoints are theirs."""
    import_torchvision()  # which peft imports by way of transformers
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ours = models.build("vit", 3, in_channels=2, image_size=16, num_layers=2, hidden=8, num_heads=2).double()
        x, labels = torch.randn(4, 2, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
        base = copy.deepcopy(ours)
        add_lora(ours, 3, 6, ["query", "up"])
        asked = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["query", "up"], modules_to_save=["head"])
        theirs = peft.get_peft_model(base, asked)
    learnt = {f"base_model.model.{name}": p for name, p in ours.named_parameters() if p.requires_grad}
    assert not peft.set_peft_model_state_dict(theirs, learnt).unexpected_keys
    for model in (ours, theirs):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
    torch.testing.assert_close(theirs(x), ours(x), rtol=EXACT, atol=EXACT)
    assert_close(peft.get_peft_model_state_dict(theirs), learnt)


class Home(nn.Module):
    """Layers of every kind that may, or may not, have an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.norm = nn.Linear(6, 4), nn.Conv2d(4, 4, 1), nn.LayerNorm(4)
        self.attention, self.mlp = nn.MultiheadAttention(4, 2), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.tied, self.table, self.qkv = nn.Linear(4, 9, bias=False), nn.Embedding(9, 4), nn.Linear(4, 4)
        self.table.weight = self.tied.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.embed(x), self.qkv.weight)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["query"], r"query matches no module; names to choose from are embed, out_proj, 0, 1, tied, qkv$"),
        (["mlp.*", "conv"], "conv: conv is a Conv2d, and adapters are of linear layers; names"),
        (["head"], "head matches no module"),  # it is trained whole
        (["out_proj"], "attention.out_proj: it is a NonDynamicallyQuantizableLinear, no plain"),
        (["qkv"], "qkv: Home reads its weight and never calls the layer"),
        (["tied"], "tied: it shares its weight with another layer"),
    ],
)
def test_a_target_that_cannot_be_is_refused(targets: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        add_lora(Home(), 2, 4, targets)


def test_matrices_in_8_bits_take_values_and_give_them() -> None:
    """Rounded values stay as they are when they are rounded again, in another type, a copy or a file."""
    layer = nn.Linear(300, 50).double()
    with torch.no_grad():
        layer.weight[:, 0] = torch.linspace(-1, 1, 50)  # the largest of rows, of any mantissa
    drawn = layer.weight.detach().clone()
    hold_in_int8(layer)
    values = layer.weight.detach() + 0
    assert layer.weight.nbytes == 50 * 300 + 50 * 8
    assert ((values - drawn).abs() <= drawn.abs().amax(1, keepdim=True) / 127 * (1 + 1e-12)).all()
    x = torch.randn(4, 300, dtype=torch.float64, requires_grad=True)
    ours, plain = (
        torch.autograd.grad(nn.functional.linear(x, w, layer.bias).square().sum(), x) for w in (layer.weight, values)
    )
    assert torch.equal(ours[0], plain[0])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x.reshape(2, 2, 300))
    assert [type(t) for t in kept if 300 in t.shape and 50 in t.shape] == [Int8Matrix]  # no values wait for backward
    layer.load_state_dict({"weight": drawn, "bias": layer.bias.detach()})
    for each in (layer, copy.deepcopy(layer), layer.float(), layer.bfloat16()):
        assert isinstance(each.weight, Int8Matrix)
        assert isinstance(each.weight, nn.Parameter)
        assert torch.equal(each.weight.detach().double() + 0, values)
    with torch.no_grad():
        layer.weight.mul_(math.nan)
        assert layer.weight.isnan().all()
        layer.weight.zero_()
        assert not layer.weight.any()


def test_what_is_trained_and_dropped_out() -> None:
    model = Home()
    add_lora(model, 2, 4, ["mlp.*"], dropout=0.5, train=["norm"])
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    adapters = {f"mlp.{n}.lora_{each}.weight" for n in range(2) for each in "AB"}
    assert names == adapters | {f"{home}.{leaf}" for home in ("norm", "head") for leaf in ("weight", "bias")}
    layer = model.mlp[0]
    assert isinstance(layer, LoRALinear)
    assert layer.lora_A.weight.abs().max() <= 1 / math.sqrt(4)  # sqrt(6 / ((1 + 5) inputs))
    nn.init.ones_(layer.lora_B.weight)
    x = torch.ones(1000, 4)
    assert len(layer(x).unique(dim=0)) > 2
    assert len(layer.eval()(x).unique(dim=0)) == 1


def test_all_classifiers_of_a_model_of_timm_are_trained() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    model = models.build("timm/deit_tiny_distilled_patch16_224", 3)
    add_lora(model, 2, 4, ["qkv"])
    names = {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name}
    assert names == {f"{home}.{leaf}" for home in ("head", "head_dist") for leaf in ("weight", "bias")}


def test_the_option_as_flags_and_files_have_it() -> None:
    found = parse(["--lora", "r=4,targets=qkv,attn.proj,alpha=2,train=norm"]).tuning.lora
    assert found == {"r": 4, "alpha": 2.0, "targets": ["qkv", "attn.proj"], "dropout": 0.0, "train": ["norm"]}
    assert parse(["--lora", "none"]).tuning.lora is None
    eight = parse(["--model", "vit", "--lora", "r=4,targets=query,base=int8", "--tensor", "2"])
    assert dict(eight.tuning.lora or {})["base"] == "int8"
    with pytest.raises(ValueError, match="`lora` base=int8 is for whole weights, but `tensor` cuts them"):
        build_model(eight, 3, 3)
    for wrong in (
        "r=4",
        "targets=a",
        "r=0,targets=a",
        "r=4,targets=",
        "r=4,targets=a,rank=2",
        "r=4,targets=a,dropout=1",
        "r=4,targets=a,base=int4",
    ):
        with pytest.raises(ValueError, match=r"--lora is .* but must be adapters such as r=16"):
            parse(["--lora", wrong])
