"""Which parameters of a model are cut, along which dim: by styles, by a plan that it carries, or by names of layers."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.parallel.tensor.styles import Cut, Degrees, cutting_of, planned_styles, styles_of

HIDDEN, HEADS = 12, 6


class SelfAttention(nn.Module):
    """Four heads' worth of names that libraries give to the layers of an attention."""

    def __init__(self, fused: bool, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = heads
        names = ["qkv"] if fused else ["q_proj", "k_proj", "v_proj"]
        for name in names:
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN * (3 if fused else 1)))
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up_proj = nn.Linear(HIDDEN, HIDDEN)  # a name of feed-forward layers means nothing here


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 20), nn.Linear(20, HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)  # and one of attentions nothing there


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, FeedForward()


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.words, self.fc1 = nn.Embedding(23, HIDDEN), nn.Linear(HIDDEN, HIDDEN)  # the latter lies in no block
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, 23)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Planned(Model):
    """As models of transformers that carry a plan."""

    _tp_plan = MappingProxyType(
        {
            "layers.*.mlp.fc1": "colwise",
            "layers.*.mlp.fc2": "rowwise",
            "layers.*.attention.norm": "sequence_parallel",
        }
    )


VOCABULARY = {"words": "vocabulary", "head": "vocabulary"}
OF_FEED_FORWARD = {"layers.0.mlp.fc1": "column", "layers.0.mlp.fc2": "row"}


def test_layers_of_known_names_in_blocks_are_cut() -> None:
    queries = {f"layers.0.attention.{name}": "heads" for name in ("q_proj", "k_proj", "v_proj")}
    expected = {**queries, "layers.0.attention.dense": "heads-row", **OF_FEED_FORWARD, **VOCABULARY}
    assert planned_styles(Model(Block(SelfAttention(fused=False))), 2) == expected


def test_one_product_of_queries_keys_and_values_is_cut_between_their_heads() -> None:
    fused = {"layers.0.attention.qkv": "fused-heads", "layers.0.attention.dense": "heads-row"}
    assert planned_styles(Model(Block(SelfAttention(fused=True))), 2) == {**fused, **OF_FEED_FORWARD, **VOCABULARY}


def test_what_is_fused_otherwise_stays_whole() -> None:
    """With fewer heads of keys, or something more, in the product."""
    block = Block(SelfAttention(fused=True))
    block.attention.qkv = nn.Linear(HIDDEN, 4 * HIDDEN)
    assert "layers.0.attention.qkv" not in planned_styles(Model(block), 2)


def test_what_so_many_ranks_cannot_share_stays_whole() -> None:
    assert planned_styles(Model(Block(SelfAttention(fused=False))), 7) == {**OF_FEED_FORWARD, **VOCABULARY}


def test_without_a_number_of_heads_an_attention_stays_whole() -> None:
    block = Block(SelfAttention(fused=False))
    del block.attention.num_heads
    assert planned_styles(Model(block), 2) == {**OF_FEED_FORWARD, **VOCABULARY}
    model = Model(block)
    model.config = SimpleNamespace(num_key_value_heads=HEADS)
    assert planned_styles(model, 2)["layers.0.attention.dense"] == "heads-row"


def test_layers_beside_a_list_of_layers_are_left_alone() -> None:
    """As gates beside experts, whose names say nothing of what is between them."""
    block = Block(SelfAttention(fused=False))
    block.mlp.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])
    assert not {path for path in planned_styles(Model(block), 2) if "mlp" in path}


def test_a_plan_of_blocks_is_all_that_is_cut_in_them() -> None:
    assert planned_styles(Planned(Block(SelfAttention(fused=False))), 2) == {**OF_FEED_FORWARD, **VOCABULARY}


def test_layers_that_are_no_plain_products_stay_whole() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(20, HIDDEN))

    block = Block(SelfAttention(fused=False))
    block.mlp.fc1 = Own()
    assert planned_styles(Model(block), 2).keys() & OF_FEED_FORWARD == {"layers.0.mlp.fc2"}


class VisionTransformer(Model):
    """As that of timm, which has torchvision's name, but other layers."""

    __module__ = "timm.models.vision_transformer"


def test_another_class_of_a_known_name_is_cut_by_names_of_layers() -> None:
    block = Block(SelfAttention(fused=True))
    block.attention.proj = block.attention.dense
    del block.attention.dense
    expected = {"layers.0.attention.qkv": "fused-heads", "layers.0.attention.proj": "heads-row"}
    assert styles_of(VisionTransformer(block)) == {**expected, **OF_FEED_FORWARD, **VOCABULARY}
    assert not cutting_of(VisionTransformer(block), None, Degrees())


@pytest.mark.parametrize(
    ("name", "cut"),
    [("resnet14t", {"conv1.0", "conv1.6", "layer2.0.downsample.1"}), ("skresnet18", {"layer2.0.downsample.0"})],
)
def test_convolutions_of_the_variants_of_a_resnet_are_cut(name: str, cut: set[str]) -> None:
    """With a deep stem, pooling beside a stride, and blocks of modules."""
    import_torchvision()
    pytest.importorskip("timm")
    found = cutting_of(models.build(f"timm/{name}", 3), None, Degrees(2)).parameters
    assert {f"{path}.weight" for path in (*cut, "fc")} <= found.keys()


def test_a_model_within_a_module_of_the_users_is_cut_as_it_is_alone() -> None:
    inner = VisionTransformer(Block(SelfAttention(fused=True)))
    expected = {f"0.model.{path}": style for path, style in styles_of(inner).items()}
    assert styles_of(nn.Sequential(nn.ModuleDict({"model": inner}), nn.Linear(HIDDEN, 2))) == expected


def test_models_of_nobody_have_no_styles() -> None:
    with pytest.raises(ValueError, match="there is no table of how parameters of Model are cut"):
        styles_of(Model())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.larger = nn.Conv2d(6, 8, 3), nn.ConvTranspose2d(6, 8, 3)
        self.grouped, self.grouped_larger = nn.Conv2d(6, 12, 3, groups=3), nn.ConvTranspose2d(6, 12, 3, groups=3)


@pytest.mark.parametrize(
    ("name", "style", "weight", "bias"),
    [
        ("plain", "column", Cut(0), Cut(0)),
        ("plain", "row", Cut(1), None),
        ("larger", "column", Cut(1), Cut(0)),
        ("larger", "row", Cut(0), None),
        ("grouped", "column", Cut(0, multiple=4), Cut(0, multiple=4)),
        ("grouped_larger", "column", Cut(0, multiple=2), Cut(0, multiple=4)),
    ],
)
def test_convolutions_are_cut_along_their_channels(name: str, style: str, weight: Cut, bias: Cut | None) -> None:
    """A weight is (out, in / groups, ..), or (in, out / groups, ..) if it is transposed."""
    found = cutting_of(Convolutions(), {name: style}, Degrees(2)).parameters
    assert found == {f"{name}.weight": (weight,), **({f"{name}.bias": (bias,)} if bias else {})}


@pytest.mark.parametrize(
    ("style", "weight", "bias"),
    [
        ("column", Cut(0), Cut(0)),
        ("row", Cut(1), None),
        ("vocabulary", Cut(0), Cut(0)),
        ("heads", Cut(0, multiple=2), Cut(0, multiple=2)),
        ("heads-row", Cut(1, multiple=2), None),
    ],
)
def test_products_are_cut_by_their_style(style: str, weight: Cut, bias: Cut | None) -> None:
    path = "layers.0.attention.q_proj"
    found = cutting_of(Model(Block(SelfAttention(fused=False))), {path: style}, Degrees(2)).parameters
    assert found == {f"{path}.weight": (weight,), **({f"{path}.bias": (bias,)} if bias else {})}
