"""Products by packed weights: a row's bits in any number of rows, alone and in company."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator, world
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.models.experts import Mixture
from mpi4dl.models.gpt import GPT
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.text import products
from mpi4dl.text.batcher import Batcher, Event
from mpi4dl.text.loading import Precision, lower_weights
from mpi4dl.text.options import Sampling
from mpi4dl.text.products import BLOCK, MULTIPLES, PackedWeight, fewest_rows, pack_weights, row_multiple
from tests.pool.ranks import Ranks

HERE = torch.backends.mkldnn.is_available() and fewest_rows(PackedWeight(torch.randn(64, 64))) is not None
needs_packing = pytest.mark.skipif(not HERE, reason="this machine's oneDNN has no such products")


@pytest.fixture(autouse=True)
def _tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "TABLE_BYTES", 0)


def hold(comm: Communicator | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> LocalStages:
    torch.manual_seed(0)
    options = {"hidden": 64, "num_heads": 2, **options}
    model = GPT(257, 64, 2, **options).to(dtype)
    comm = world() if comm is None else comm
    return LocalStages.whole(model, Plan.of(tiles=((1,),), tensor=comm.size), comm).requires_grad_(False)


def packed(shape: tuple[int, int]) -> tuple[Tensor, PackedWeight]:
    torch.manual_seed(0)
    weight = torch.randn(shape) / shape[1] ** 0.5
    found = PackedWeight(weight)
    rows = fewest_rows(found)
    assert rows is not None
    found.fewest_rows = rows
    return weight, found


@needs_packing
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (257, 48), (96, 1536), (1536, 96), (17, 24)])
def test_rows_have_the_same_bits_in_any_number(shape: tuple[int, int], biased: bool) -> None:
    weight, same = packed(shape)
    x, bias = torch.randn(77, shape[1]), torch.randn(shape[0]) if biased else None
    expected = F.linear(x, same, bias)
    torch.testing.assert_close(
        expected, F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
    )
    for number in (0, *range(1, BLOCK + 3), 32, 33, 77):
        assert torch.equal(F.linear(x[:number], same, bias), expected[:number])
    assert torch.equal(F.linear(x[5:6], same, bias), expected[5:6])
    assert torch.equal(F.linear(x.view(7, 11, -1), same, bias), expected.view(7, 11, -1))


@needs_packing
def test_a_table_in_parts_that_are_let_go() -> None:
    """Also of layers that see the same memory by another parameter, which stays."""
    torch.manual_seed(0)
    weight = torch.randn(2500, 48)
    whole, indices = weight.clone(), torch.randint(0, 2500, (7, 30))
    same = PackedWeight(weight, 1024, True)
    assert len(same.parts) == 3
    assert not weight[50:950].any()  # a page that two parts share stays
    assert torch.equal(same.plain(), whole)
    assert torch.equal(F.embedding(indices, same), F.embedding(indices, whole))
    assert F.embedding(indices[:0], same).shape == (0, 30, 48)
    same.fewest_rows = BLOCK
    torch.testing.assert_close(F.linear(whole[:20], same, whole[:, 0]), F.linear(whole[:20], whole, whole[:, 0]))
    for wrong in (-1, 2500):
        with pytest.raises(IndexError, match="range"):
            F.embedding(torch.tensor([3, wrong]), same)
    held = hold(tied=False)
    tokens, last = (held.modules_of[0].get_parameter(n) for n in ("embedding.tokens.weight", "lm_head.weight"))
    last.data = tokens.data
    whole = tokens.clone()
    pack_weights(held)
    assert torch.equal(tokens, whole)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=needs_packing), "int8"])
def test_matrices_that_others_replace_are_let_go(precision: Precision) -> None:
    held = hold()
    before = {name: weakref.ref(p) for name, p in held.named_parameters()}
    lower_weights(held, precision)
    gc.collect()
    there = {name for name, parameter in before.items() if parameter() is not None}
    gone = {f"stages.0.{n}.weight" for n, m in held.modules_of[0].named_modules() if isinstance(m, nn.Linear)}
    table = "stages.0.embedding.tokens.weight"  # tied to the last layer
    assert there == set(before) - gone - ({table} if precision == "fp32" else set())
    weights = dict(held.named_parameters())
    assert isinstance(weights[table], PackedWeight) == (precision == "fp32")
    present = {id(parameter) for parameter in held.parameters()}
    assert {id(parameter) for group in held.together for _, parameter in group.parameters} <= present


def heard(held: LocalStages, prompts: list[tuple[int, ...]], **batching: Any) -> list[list[Event]]:
    batcher = Batcher(held, held.comm, ByteTokenizer(), 64, **batching)
    found: list[list[Event]] = [[] for _ in prompts]
    if held.comm.rank:
        batcher.follow()
    else:
        for prompt, events in zip(prompts, found, strict=True):
            batcher.submit(prompt, Sampling(max_tokens=9, temperature=0), events.append)
        batcher.stop(drain=True)
        batcher.run()
    batcher.close()
    return found


PROMPTS = [(5, 17, 200), (9,) * 21, (1, 2, 3, 4), (250,), (8,) * 6]


def alone_and_in_company(comm: Communicator, options: dict[str, Any]) -> tuple[int, list[Any], list[Any]]:
    """Of each request its tokens and their probabilities, which show the logits to the bit."""
    held = hold(comm, **options)
    lower_weights(held, "fp32")
    together, alone = heard(held, PROMPTS), [heard(held, [prompt])[0] for prompt in PROMPTS]
    both = ([[(event.token, event.logprob) for event in events] for events in each] for each in (alone, together))
    return row_multiple(held), *both


@pytest.mark.parametrize(
    ("options", "multiples"),
    [
        pytest.param({}, (1,), marks=needs_packing),
        pytest.param(
            {"positions": "rotary", "activation": "swiglu", "tied": False, "ff_dim": 96}, (1,), marks=needs_packing
        ),
        pytest.param({"ff_dim": 72}, (1,), marks=needs_packing),  # activations of a row are no multiple of 32
        ({"mixture": Mixture(4)}, MULTIPLES),
        ({"dtype": torch.float64}, MULTIPLES),
    ],
)
def test_a_text_alone_and_in_company(options: dict[str, Any], multiples: tuple[int, ...]) -> None:
    rows, alone, together = alone_and_in_company(world(), options)
    assert rows in multiples
    assert alone == together


@pytest.mark.parametrize(
    ("changes_at", "expected"), [(0, 8), (5, 8), (8, 16), (10, 16), (33, 64), (100, None), (511, None)]
)
def test_the_number_of_rows_is_found_by_trying(
    monkeypatch: pytest.MonkeyPatch, changes_at: int, expected: int | None
) -> None:
    """Of a product that adds in another order for up to `changes_at` rows, or of none that holds."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T + (1e-3 if len(x) <= changes_at else 0.0)

    monkeypatch.setattr(products.F, "linear", product)
    products.rows_of_product.cache_clear()
    try:
        assert products.rows_of_product(torch.Size((6, 4)), torch.float64, torch.device("cpu"), 1) == expected
    finally:
        products.rows_of_product.cache_clear()


@needs_packing
def test_ranks_of_a_layer_alone_and_in_company(ranks: Ranks) -> None:
    rows, alone, together = ranks(2).run(alone_and_in_company, {})[0]
    assert rows == 1
    assert alone == together


@pytest.mark.parametrize("width", [1536, 1000])
@pytest.mark.parametrize("threads", [1, 5])
def test_activations_of_rows_apart(width: int, threads: int) -> None:
    before = torch.get_num_threads()
    row = torch.randn(1, 1, width)
    try:
        torch.set_num_threads(threads)
        for function in (lambda x: F.gelu(x, approximate="tanh"), F.silu, torch.sigmoid, Tensor.cos):
            expected = function(row)
            torch.testing.assert_close(expected, function(row.double()).float())
            with products.RowsApart():
                for number in (1, 2, 3, 71):
                    assert torch.equal(function(row.expand(1, number, -1).contiguous()), expected.expand(1, number, -1))
    finally:
        torch.set_num_threads(before)


@needs_packing
def test_machines_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices stay plain, and those that were packed with another number of threads become so again."""
    held, plain = hold(), hold()
    pack_weights(held)
    for parameter in held.parameters():
        if isinstance(parameter, PackedWeight):
            parameter.threads += 1
    assert row_multiple(held) == 1
    monkeypatch.setattr(products, "fewest_rows", lambda weight, biased: None)
    for parameter in held.parameters():
        if isinstance(parameter, PackedWeight):
            parameter.threads += 1
    for each in (held, plain):
        pack_weights(each)
        assert row_multiple(each) in MULTIPLES
        assert not any(isinstance(parameter, PackedWeight) for parameter in each.parameters())
    for name, value in plain.state_dict().items():
        assert torch.equal(held.state_dict()[name], value)
