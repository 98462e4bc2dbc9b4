"""Models of Hugging Face's transformers as they are, from small configurations: exact on parts and in stages.

Norms of Llama and Mixtral, and its router, compute in float32 whatever the model's type, so they round where float64
does not. For both sides alike they compute in float64 here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.held import Held, split
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.training import EXACT, assert_close

import_torchvision()
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.mixtral import modeling_mixtral  # noqa: E402

pytestmark = pytest.mark.exhaustive
VOCABULARY, LENGTH, BATCH, STEPS = 23, 7, 4, 5
WORDS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 24, "intermediate_size": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **COMMON
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES, **COMMON)),
    "bert": lambda: BertForMaskedLM(BertConfig(max_position_embeddings=16, **SIZES, **NO_DROPOUT, **COMMON)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SIZES, **COMMON)),
}
COMMON = WORDS | {"use_cache": False}
BLOCKS = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "bert": "bert.encoder.layer.1"}
BLOCKS["mixtral"] = BLOCKS["llama"]
ONE, TWO = Plan(((1,),)), Plan(((1,), (1,)), microbatches=2)
PLANS = {
    "tensor 2": replace(ONE, tensor=2),
    "tensor 2, data 2, ZeRO 3": replace(ONE, tensor=2, data=2, zero=3),
    "tensor 2, context 2": Plan(((2,),), tensor=2),
    "two stages": TWO,
    "two stages, tensor 2": replace(TWO, tensor=2),
    "two stages, data 2, ZeRO 2": replace(TWO, data=2, zero=2),
}
OF_EXPERTS = {
    "experts 2": replace(ONE, experts=2),
    "experts 4, pieces": replace(ONE, experts=4, moe_pieces=2),
    "experts 2, tensor 2": replace(ONE, experts=2, tensor=2),
    "experts 2, whole ones on tensor 2": replace(ONE, experts=2, tensor=2, moe="expert"),
    "experts 2, two stages": replace(TWO, experts=2),
    "experts 2, data 2, ZeRO 1": replace(ONE, experts=2, data=2, zero=1),
    "data 2": replace(ONE, data=2),
}


@contextmanager
def precise() -> Iterator[None]:
    """Within this context what Llama's code calls float32 is float64."""

    class Precise:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "torch", Precise())
        patch.setattr(modeling_mixtral, "torch", Precise())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def build(name: str, balanced: bool = False) -> nn.Module:
    """`balanced`: the loss has a penalty of a batch's routing, which is another one of microbatches."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    if name == "mixtral":
        model.set_experts_implementation("eager")  # the others have no float64
        model.config.output_router_logits = balanced
    for module in model.modules():  # biases begin as zeros
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(module.bias, std=0.1)
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs.logits.reshape(-1, VOCABULARY), targets.reshape(-1))
    penalty = getattr(outputs, "aux_loss", None)
    return loss if penalty is None else loss + 0.1 * penalty


def train(comm: Communicator, name: str, plan: Plan) -> None:
    with precise():
        compare(comm, name, plan)


def compare(comm: Communicator, name: str, plan: Plan) -> None:
    balanced = plan.num_stages == 1
    expected = build(name, balanced)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, eps=1e-2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(expected(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if plan.num_stages == 1:
        held = Held.whole(build(name, balanced), plan, comm)
    else:
        atoms = Cuttable(build(name)).names
        counts = (atoms.index(BLOCKS[name]), len(atoms) - atoms.index(BLOCKS[name]))
        held = split(lambda: build(name), plan, comm, balance=counts, image=(BATCH, LENGTH))
    assert bool(held.cutting) == (plan.cuts_parameters or name == "mixtral")
    engine = Engine(held, plan, torch.optim.AdamW(held.parameters(), lr=0.01, eps=1e-2), loss_of, comm=comm)
    for batch, loss in zip(batches(), losses, strict=True):
        boxes = [each.box for each in engine.reads(BATCH, (LENGTH,))]
        tiles = [batch[:, :-1][slice(*box.batch), slice(*box.space[0])] for box in boxes]
        assert engine.step(tiles, batch[:, 1:], (LENGTH,)).loss == pytest.approx(loss, rel=EXACT)
    gradients, state = engine.gather_gradients(), engine.gather_state()
    engine.check_replicas()
    if gradients is not None and state is not None:
        for key, p in expected.named_parameters():
            assert_close(state[key], p.detach(), EXACT, key)
            found = gradients[key]
            assert found is not None
            assert p.grad is not None
            assert_close(found, p.grad, EXACT, f"{key}.grad")


@pytest.mark.parametrize("plan", OF_EXPERTS)
def test_five_steps_of_experts(ranks: Ranks, plan: str) -> None:
    ranks(OF_EXPERTS[plan].num_ranks).run(train, "mixtral", OF_EXPERTS[plan])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_five_steps(ranks: Ranks, name: str, plan: str) -> None:
    ranks(PLANS[plan].num_ranks).run(train, name, PLANS[plan])
