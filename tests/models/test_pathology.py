"""Published encoders of tiles have the shapes and names of their files, their features, and options beside them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.checkpoints.weights import match, open_weights
from mpi4dl.comm import Communicator
from mpi4dl.embed import EmbedConfig
from mpi4dl.models.patches import headless
from mpi4dl.models.registry import OWN_MODELS, page_of, with_defaults
from mpi4dl.options.config import parse
from mpi4dl.options.declare import from_keywords, value_of
from mpi4dl.options.presets import ENCODERS
from mpi4dl.options.sources import source_of
from tests.pool.ranks import Ranks

# Of the published files: parameters, blocks, features, and shapes of positions, registers, patches and of the MLP.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "uni": (303_350_784, 24, 1024, (197, 1024), None, 16, 4096, 4096),
    "uni2": (681_394_176, 24, 1536, (256, 1536), 8, 14, 8192, 4096),
    "virchow": (631_229_184, 32, 2560, (257, 1280), None, 14, 6832, 3416),
    "virchow2": (631_239_424, 32, 2560, (261, 1280), 4, 14, 6832, 3416),
    "gigapath": (1_134_953_984, 40, 1536, (197, 1536), None, 16, 8192, 4096),
    "hoptimus0": (1_134_774_272, 40, 1536, (256, 1536), 4, 14, 8192, 4096),
    "hoptimus1": (1_134_774_272, 40, 1536, (256, 1536), 4, 14, 8192, 4096),
    "conch": (87_567_104, 12, 512, (785, 768), None, 16, 3072, 3072),
}
BLOCK = "norm1 attn.qkv attn.proj norm2 mlp.fc1 mlp.fc2"
POOLER = {
    "query": (1, 512),
    **{f"attn.{kind}_proj_weight": (512, width) for kind, width in (("q", 512), ("k", 768), ("v", 768))},
    "attn.in_proj_bias": (1536,),
    "attn.out_proj.weight": (512, 512),
    "attn.out_proj.bias": (512,),
    **{f"ln_{kind}.{end}": (n,) for kind, n in (("q", 512), ("k", 768)) for end in ("weight", "bias")},
}
OF_CONCH = {f"attn_pool_contrast.{name}": shape for name, shape in POOLER.items()} | {
    f"ln_contrast.{end}": (512,) for end in ("weight", "bias")
}
SMALL: dict[str, Any] = {"embed_dim": 12, "depth": 2, "num_heads": 2, "img_size": 56}


@pytest.fixture(autouse=True)
def _timm() -> None:
    import_torchvision()
    pytest.importorskip("timm")


def without_head(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("head.")}


def test_each_has_a_page_and_options() -> None:
    assert {name for name in OWN_MODELS if page_of(name)} == ENCODERS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_and_names_are_those_of_the_file(name: str) -> None:
    parameters, depth, num_features, positions, registers, patch, up, down = PUBLISHED[name]
    assert with_defaults(name, {})["depth"] == depth
    with torch.device("meta"):
        one, two = (models.build(name, 2, depth=blocks) for blocks in (1, 2))
    counts = [sum(torch.Size(shape).numel() for shape in without_head(each).values()) for each in (one, two)]
    assert counts[0] + (depth - 1) * (counts[1] - counts[0]) == parameters
    found, width = without_head(two), positions[1]
    if name == "conch":
        assert {key: found.pop(key) for key in OF_CONCH} == OF_CONCH
        found = {key.removeprefix("trunk."): shape for key, shape in found.items()}
    assert found.get("reg_token") == (None if registers is None else (1, registers, width))
    assert (found["pos_embed"], found["patch_embed.proj.weight"]) == ((1, *positions), (width, 3, patch, patch))
    assert (found["blocks.1.mlp.fc1.weight"], found["blocks.1.mlp.fc2.weight"]) == ((up, width), (width, down))
    layers = [f"blocks.{n}.{layer}" for n in (0, 1) for layer in BLOCK.split()]
    ends = {f"{layer}.{end}" for layer in ("patch_embed.proj", "norm", *layers) for end in ("weight", "bias")}
    scales = {f"blocks.{n}.ls{k}.gamma" for n in (0, 1) for k in (1, 2) if name != "conch"}
    assert found.keys() == {"cls_token", "pos_embed", *scales, *ends} | ({"reg_token"} if registers else set())
    assert headless(two, 2) == num_features


@pytest.mark.parametrize("name", ["uni", "uni2", "virchow", "virchow2", "gigapath"])
def test_features_are_the_class_token_or_the_mean_of_patches_too(name: str) -> None:
    torch.manual_seed(0)
    patch = PUBLISHED[name][5]
    model: Any = models.build(name, 3, **{**SMALL, "img_size": 4 * patch}).double().eval()
    nn.init.normal_(model.blocks[0].ls1.gamma)
    tiles = torch.randn(2, 3, 4 * patch, 4 * patch, dtype=torch.float64)
    with torch.no_grad():
        tokens: Tensor = model.forward_features(tiles)
        prefix = 1 + (PUBLISHED[name][4] or 0)
        assert tokens.shape == (2, prefix + 16, 12)
        expected = tokens[:, 0]
        if name.startswith("virchow"):
            expected = torch.cat([expected, tokens[:, prefix:].mean(1)], dim=1)
        last = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
        torch.testing.assert_close(model(tiles), last(expected), rtol=1e-12, atol=1e-12)
        headless(model, 3)
        torch.testing.assert_close(model(tiles), expected, rtol=0, atol=0)


def test_features_of_conch_are_tokens_pooled_by_attention(ranks: Ranks, tmp_path: Path) -> None:
    """Also of a file with the names of all of CONCH, and on tiles, with gradients."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({**{f"visual.{k}": v for k, v in small_conch(7).state_dict().items()}, "text.a": torch.ones(2)}, file)
    ranks(2).run(_of_conch, str(file))


def small_conch(seed: int) -> Any:
    torch.manual_seed(seed)
    return models.build("conch", 5, **{**SMALL, "img_size": 64}, pool_dim=8, pool_heads=4).double()


def _of_conch(comm: Communicator, file: str) -> None:
    import_torchvision()
    model, plain = small_conch(0), small_conch(7)
    stored = open_weights(file)
    matching = match(stored.shapes, {name: tuple(x.shape) for name, x in model.state_dict().items()})
    assert (matching.missing, matching.dropped, matching.unmatched) == ([], "visual.", ["text.a"])
    model.load_state_dict({name: stored.read(there) for name, there in matching.pairs.items()})
    pool, tiles = plain.attn_pool_contrast, torch.randn(2, 3, 64, 64, dtype=torch.float64)
    tokens = pool.ln_k(plain.trunk.forward_features(tiles))
    attn, parts = pool.attn, pool.attn.in_proj_bias.chunk(3)
    query = F.linear(pool.ln_q(pool.query), attn.q_proj_weight, parts[0]).view(4, 1, 2)
    keys, values = (
        F.linear(tokens, weight, bias).unflatten(2, (4, 2)).transpose(1, 2)
        for weight, bias in ((attn.k_proj_weight, parts[1]), (attn.v_proj_weight, parts[2]))
    )
    pooled = attn.out_proj(((query @ keys.mT / 2**0.5).softmax(-1) @ values).flatten(1))
    expected = plain.head(plain.ln_contrast(pooled))
    found = mpi4dl.parallelize(model, "1x2", comm=comm)(tiles)
    for outputs in (found, expected):
        outputs.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_options_that_an_encoder_implies() -> None:
    config = parse("--model hoptimus0 --slides slides.csv --preset mil --patch-size 448".split())
    assert (config.data.mean, config.data.std) == ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))
    assert (config.model.patches, config.slides.mpp, config.tuning.weights) == (448, 0.5, "pretrained")
    of_tiles = parse("--model uni --images tiles --weights none --mean 0.5".split())
    assert (of_tiles.model.patches, of_tiles.slides.mpp, of_tiles.tuning.weights) == (None, None, None)
    assert (of_tiles.data.mean, of_tiles.data.std) == ((0.5,), (0.25,))
    for option in ("magnification", "level"):
        coarse = from_keywords(type(config), {"model": "uni2", "slides": "slides.csv", option: 10})
        assert (coarse.slides.mpp, coarse.model.patches, coarse.data.mean) == (None, 224, "imagenet")
    of_features = parse("--model uni2 --slides slides.csv --features features".split())
    assert (of_features.slides.mpp, of_features.tuning.weights) == (None, None)
    embedding = from_keywords(EmbedConfig, {"model": "virchow2", "slides": "slides"})
    assert [value_of(embedding, name) for name in ("patches", "mpp", "mean")] == [224, 0.5, "auto"]
    assert value_of(from_keywords(EmbedConfig, {"model": "resnet18", "slides": "slides"}), "patches") == 256


def test_a_run_records_all_options_and_they_can_be_overridden() -> None:
    config = source_of(parse("--model virchow2 --images synthetic --model-options depth=3".split())).prepared()
    recorded = config.model.model_options
    assert (recorded["depth"], recorded["mlp_layer"], recorded["reg_tokens"]) == (3, "SwiGLUPacked", 4)
    assert models.registry.described("virchow2", recorded)[0].startswith("virchow2: the architecture of paige-ai/V")
    assert models.registry.described("vit", {}) == []


WRONG = {
    "features=mean": "features=mean is not possible: choose class or class",
    "mlp_layer=Nothing": "mlp_layer=Nothing is not possible: timm.layers has no layer Nothing",
    "act_layer=functional": "act_layer=functional is not possible",
    "depths=3": "has no option 'depths'",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_that_are_not_possible(options: str) -> None:
    name, _, value = options.partition("=")
    with pytest.raises(ValueError, match=WRONG[options]), torch.device("meta"):
        models.build("uni2", 2, **{name: value})


def test_where_weights_are_and_what_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"huggingface.co/prov-gigapath/prov-gigapath, download pytorch_model.bin"):
        open_weights("pretrained", "gigapath")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"model uni2 needs the package timm; run .* -m pip install timm"):
        source_of(parse("--model uni2 --images synthetic".split())).prepared()
