"""GPT, BERT and ViT: published sizes, who sees whom, positions, traces, gradients, and what is refused."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.models import BERT, GPT, ViT
from mpi4dl.models.transformer import (
    Attention,
    FeedForward,
    TokenEmbedding,
    TransformerBlock,
    default_ff_dim,
    positions_of,
    rotate,
)
from tests.models.counting import num_parameters, parameters_without_gradient

VOCABULARY, CONTEXT = 11, 12
TINY: Mapping[str, Any] = {"vocabulary": VOCABULARY, "context": CONTEXT, "num_layers": 2, "num_heads": 4, "hidden": 16}
GPTS: Mapping[str, Mapping[str, Any]] = {
    "learned": {},
    "rotary": {"positions": "rotary"},
    "grouped": {"num_kv_heads": 2},
    "one key for all heads": {"num_kv_heads": 1, "positions": "rotary"},
    "swiglu": {"activation": "swiglu"},
    "untied": {"tied": False, "ff_dim": 24},
}


def tiny_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**TINY, **options).double().eval()


def tiny_bert() -> BERT:
    torch.manual_seed(0)
    return BERT(**TINY).double().eval()


def tiny_vit(**options: Any) -> ViT:
    torch.manual_seed(0)
    return ViT(5, 2, (8, 12), 4, num_layers=2, hidden=16, num_heads=4, **options).double().eval()


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def changed(tokens: Tensor, place: int) -> Tensor:
    other = tokens.clone()
    other[:, place] = (other[:, place] + 1) % VOCABULARY
    return other


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
        # BertForMaskedLM of transformers has 109,514,298, of which two vectors of 768 are those of its segments.
        ("bert_base", 109_514_298 - 2 * 768),
    ],
)
def test_models_have_the_published_numbers_of_parameters(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(models.build(name)) == expected


def test_vit_has_the_size_of_torchvisions_without_a_class_token() -> None:
    with torch.device("meta"):
        ours = ViT(1000, image_size=224, patch=16, num_layers=12, hidden=768, num_heads=12)
        assert num_parameters(ours) == num_parameters(models.build("vit_b_16")) - 2 * 768


def test_the_defaults_are_as_large_as_they_say() -> None:
    with torch.device("meta"):
        found = {name: num_parameters(models.build(name)) for name in ("gpt", "bert", "vit", "bert_2_5b")}
    expected = {"gpt": 10.8e6, "bert": 11.0e6, "vit": 2.7e6, "bert_2_5b": 2.45e9}
    assert found == pytest.approx(expected, rel=0.01)


def test_initial_weights_are_those_of_gpt2() -> None:
    model = GPT(num_layers=4)
    for name, parameter in model.named_parameters():
        std = 0.02 / 8**0.5 if name.endswith("output.weight") else 0.02
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name
    assert model.lm_head.weight is model.embedding.tokens.weight


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_later_token_changes_no_earlier_logit(options: Mapping[str, Any], packed: bool) -> None:
    model, tokens = tiny_gpt(**options), tokens_of(3, 9)
    documents = torch.zeros_like(tokens) if packed else None
    before, after = model(tokens, documents), model(changed(tokens, 5), documents)
    assert before.shape == (3, 9, VOCABULARY)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_bert_looks_both_ways() -> None:
    model, tokens = tiny_bert(), tokens_of(3, 9)
    assert (model(tokens) != model(changed(tokens, 5))).any(-1).all()


@pytest.mark.parametrize("build", [tiny_bert, *(lambda o=o: tiny_gpt(**o) for o in GPTS.values())])
def test_no_token_sees_another_document(build: Callable[[], nn.Module]) -> None:
    model, tokens = build(), tokens_of(2, 9)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    before, after = model(tokens, documents), model(changed(tokens, 3), documents)
    same = (before == after).all(-1)
    assert same[0].tolist() == [True] * 3 + [isinstance(model, GPT) and place < 3 for place in range(3, 7)] + [True] * 2
    assert not same[1, 3:].any()


def test_one_document_is_no_mask() -> None:
    for model in (tiny_gpt(), tiny_bert()):
        tokens = tokens_of(2, 9)
        torch.testing.assert_close(model(tokens, torch.full_like(tokens, 3)), model(tokens), rtol=0, atol=1e-12)


def test_positions_count_from_the_start_of_each_sequence() -> None:
    assert (
        positions_of(tokens_of(2, 5)).tolist() == positions_of(torch.randn(2, 5, 3)).tolist() == [[0, 1, 2, 3, 4]] * 2
    )
    layer, tokens = TokenEmbedding(VOCABULARY, CONTEXT, 8), tokens_of(2, 5)
    assert layer.positions is not None
    assert torch.equal(layer(tokens), layer.tokens.weight[tokens] + layer.positions.weight[:5])


def test_rotary_products_depend_on_distances_alone() -> None:
    query, key = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)
    places = torch.arange(20)[None]
    queries, keys = (rotate(x.expand(1, 20, 3, 8), places) for x in (query, key))
    products = torch.einsum("nqhd,nkhd->hqk", queries, keys)
    for distance in range(20):
        along = products.diagonal(distance, 1, 2)
        torch.testing.assert_close(along, along[:, :1].expand_as(along), rtol=0, atol=1e-12)
    assert products[0, 0].unique().numel() == 20
    far = [rotate(x.expand(1, 20, 3, 8), places + 1000) for x in (query, key)]
    torch.testing.assert_close(torch.einsum("nqhd,nkhd->hqk", *far), products, rtol=0, atol=1e-11)


def test_rotary_angles_are_those_of_the_paper() -> None:
    x = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    x[..., :2] = 1
    turned = rotate(x, torch.tensor([[3]])).flatten()
    angles = torch.tensor([3.0, 3.0 / 100], dtype=torch.float64)
    torch.testing.assert_close(turned, torch.cat([angles.cos(), angles.sin()]))


def test_rotary_models_have_no_positions_of_their_own_and_are_precise_in_bfloat16() -> None:
    assert not any("positions" in name for name, _ in tiny_gpt(positions="rotary").named_parameters())
    x = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    exact = rotate(x.double(), torch.tensor([[1001]]))
    torch.testing.assert_close(rotate(x, torch.tensor([[1001]])).double(), exact, rtol=0, atol=2**-7)


def attended_one_by_one(layer: Attention, x: Tensor) -> Tensor:
    """Causal attention from its formula, head by head."""
    heads, per_kv = layer.query.out_features // layer.head_dim, layer.query.out_features // layer.key.out_features
    q, k, v = (part(x).unflatten(-1, (-1, layer.head_dim)) for part in (layer.query, layer.key, layer.value))
    found = []
    for head in range(heads):
        scores = q[:, :, head] @ k[:, :, head // per_kv].mT / layer.head_dim**0.5
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        found.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, :, head // per_kv])
    return layer.output(torch.cat(found, -1))


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
def test_attention_is_its_formula(num_kv_heads: int | None) -> None:
    layer = Attention(16, 4, num_kv_heads, causal=True).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attended_one_by_one(layer, x), rtol=0, atol=1e-12)


def test_grouped_queries_are_plain_ones_whose_keys_and_values_are_repeated() -> None:
    grouped, plain = (Attention(16, 4, kv, causal=True, rotary=True).double() for kv in (2, 4))
    weights = grouped.state_dict()
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        weights[name] = weights[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    plain.load_state_dict(weights)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), plain(x), rtol=0, atol=1e-12)


def test_as_many_keys_as_heads_are_plain_attention() -> None:
    tokens = tokens_of(2, 7)
    assert torch.equal(tiny_gpt(num_kv_heads=4)(tokens), tiny_gpt()(tokens))


def test_swiglu_is_its_formula_and_weighs_as_much_as_gelu() -> None:
    layer = FeedForward(6, activation="swiglu").double()
    assert layer.gate is not None
    x = torch.randn(3, 6, dtype=torch.float64)
    gate = layer.gate(x)
    torch.testing.assert_close(layer(x), layer.output(gate * gate.sigmoid() * layer.up(x)))
    assert [default_ff_dim(hidden, "swiglu") for hidden in (6, 768, 1024)] == [16, 2048, 2736]
    assert default_ff_dim(768, "gelu") == 3072


def traced(model: nn.Module, **concrete: None) -> fx.GraphModule:
    return fx.symbolic_trace(model, concrete_args=concrete or None)


@pytest.mark.parametrize("build", [tiny_bert, *(lambda o=o: tiny_gpt(**o) for o in GPTS.values())])
def test_a_trace_of_a_model_of_tokens_gives_the_same(build: Callable[[], nn.Module]) -> None:
    model, tokens = build(), tokens_of(2, 9)
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    without = traced(model, documents=None)
    assert torch.equal(without(tokens, None), model(tokens))
    # A shape is not remembered.
    assert torch.equal(without(tokens[:1, :5], None), model(tokens[:1, :5]))
    assert torch.equal(traced(model)(tokens, documents), model(tokens, documents))
    with pytest.raises(ValueError, match="13 tokens are too long"):
        without(tokens_of(1, 13), None)


def test_a_trace_of_vit_gives_the_same() -> None:
    model, images = tiny_vit(), torch.randn(3, 2, 8, 12, dtype=torch.float64)
    assert model(images).shape == (3, 5)
    assert torch.equal(traced(model)(images), model(images))


def test_places_of_patches_matter() -> None:
    images = torch.randn(1, 2, 8, 12, dtype=torch.float64)
    assert not torch.allclose(tiny_vit()(images), tiny_vit()(images.flip(3).roll(4, 3)))


@pytest.mark.parametrize("build", [tiny_bert, *(lambda o=o: tiny_gpt(**o) for o in GPTS.values())])
def test_every_parameter_of_a_model_of_tokens_learns(build: Callable[[], nn.Module]) -> None:
    model, tokens = build().train(), tokens_of(4, CONTEXT)
    model(tokens).square().sum().backward()
    # Softmax does not notice what is added to all keys alike, unless positions turn it.
    assert {name for name in parameters_without_gradient(model) if not name.endswith("key.bias")} == set()


@pytest.mark.parametrize("options", [*GPTS.values(), {"positions": "rotary", "activation": "swiglu"}])
def test_gradients_of_gpt_are_those_of_finite_differences(options: Mapping[str, Any]) -> None:
    model, tokens, step = tiny_gpt(**options), tokens_of(2, 7), 1e-6
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1], documents[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(direction, alpha=step)
            above = loss()
            parameter.sub_(direction, alpha=2 * step)
            slope = (above - loss()) / (2 * step)
            parameter.add_(direction, alpha=step)
            torch.testing.assert_close((parameter.grad * direction).sum(), slope, rtol=1e-5, atol=1e-8, msg=name)


def test_dropout_is_for_training_alone() -> None:
    model, tokens = tiny_gpt(dropout=0.5), tokens_of(2, 7)
    assert torch.equal(model(tokens), tiny_gpt()(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (GPT, {"hidden": 30, "num_heads": 4}, "hidden=30 must be divisible by num_heads=4"),
        (GPT, {"num_kv_heads": 4}, "num_heads=6 must be divisible by num_kv_heads=4"),
        (
            GPT,
            {"hidden": 18, "positions": "rotary"},
            "rotary positions need heads of an even size, but hidden=18 / num_heads=6 is 3",
        ),
        (GPT, {"positions": "sinus"}, "positions='sinus' is unknown: choose 'learned' or 'rotary'"),
        (GPT, {"activation": "relu"}, "activation='relu' is unknown: choose 'gelu' or 'swiglu'"),
        (GPT, {"num_layers": 0}, "num_layers=0 is not possible: it must be at least 1"),
        (GPT, {"num_kv_heads": 0}, "num_kv_heads=0 is not possible: it must be at least 1"),
        (GPT, {"vocabulary": 0}, "vocabulary=0 is not possible: it must be at least 1"),
        (BERT, {"hidden": 30, "num_heads": 4}, "hidden=30 must be divisible by num_heads=4"),
        (BERT, {"context": 0}, "context=0 is not possible: it must be at least 1"),
        (ViT, {"image_size": (32, 30)}, r"image_size=\(32, 30\) must be divisible by patch=4"),
        (ViT, {"image_size": 0}, "image_size=0 is not possible: it must be at least 1"),
        (ViT, {"hidden": 32}, "hidden=32 must be divisible by num_heads=3"),
    ],
)
def test_options_that_cannot_be_are_refused(build: type[nn.Module], options: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=f"^{message}$"):
        build(**options)


@pytest.mark.parametrize("build", [tiny_gpt, tiny_bert, lambda: tiny_gpt(positions="rotary")])
def test_sequences_longer_than_the_context_are_refused(build: Callable[[], nn.Module]) -> None:
    message = "^sequences of 13 tokens are too long for a model with context=12: cut them shorter, or build it with a"
    with pytest.raises(ValueError, match=message):
        build()(tokens_of(1, 13))


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^images of 8 x 8 px do not fit a model with image_size=\(8, 12\): resize"):
        tiny_vit()(torch.randn(1, 2, 8, 8, dtype=torch.float64))


def test_a_block_is_one_call_after_the_other() -> None:
    block, x = TransformerBlock(16, 4).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    middle = x + block.attention(block.norm1(x))
    assert torch.equal(block(x), middle + block.feed_forward(block.norm2(middle)))
