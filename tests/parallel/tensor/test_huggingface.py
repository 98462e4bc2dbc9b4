"""Models of Hugging Face's transformers as they are, from small configurations: exact on parts and in stages.

Norms of Llama and its kin, and routers, compute in float32 whatever the model's type, so they round where float64 does
not. For both sides alike they compute in float64 here.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
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
from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tensor.styles import LLAMA, Styles
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_learnt_alike

import_torchvision()
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

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
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**BERT_SIZES | {"pad_token_id": 1})),
    "xlm-roberta": lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**BERT_SIZES | {"pad_token_id": 1})),
    "bert": lambda: BertForMaskedLM(BertConfig(**BERT_SIZES)),
}
TIED: dict[str, Callable[[], nn.Module]] = {  # and their last stage asks for the type of what is tied
    "mamba": lambda: MambaForCausalLM(MambaConfig(hidden_size=24, num_hidden_layers=2, state_size=4, **COMMON)),
}
MODELS_OF_EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SPARSE)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(num_experts=4, **SPARSE)),
    "granite": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(num_local_experts=4, **SPARSE)),
    "qwen2": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(num_experts=4, shared_expert_intermediate_size=16, **SPARSE)),
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=5, mlp_only_layers=[0], **SPARSE)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(num_local_experts=4, head_dim=6, sliding_window=4, **SPARSE)),
}
COMMON = WORDS | {"use_cache": False}
BERT_SIZES: dict[str, Any] = SIZES | NO_DROPOUT | COMMON | {"max_position_embeddings": 16}
SPARSE: dict[str, Any] = SIZES | COMMON | {
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12
}  # fmt: skip
WHOLE_EXPERTS = {"model.layers.*.mlp.experts": "experts"}  # of gpt-oss, whose experts have no style in parts
STYLES: dict[str, Styles] = {"gpt-oss": WHOLE_EXPERTS | {k: v for k, v in LLAMA.items() if ".mlp." not in k}}
BLOCKS = {
    "gpt2": "transformer.h.1",
    "mamba": "backbone.layers.1",
    "bert": "bert.encoder.layer.1",
    "roberta": "roberta.encoder.layer.1",
    "xlm-roberta": "roberta.encoder.layer.1",
}
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
def precise(model: nn.Module) -> Iterator[None]:
    """Within this context what the code of this model calls float32 is float64."""

    class Precise:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(model).__module__], "torch", Precise())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def build(name: str, balanced: bool = False) -> nn.Module:
    """`balanced`: the loss has a penalty of a batch's routing, which is another one of microbatches."""
    torch.manual_seed(0)
    model = (MODELS | MODELS_OF_EXPERTS | TIED)[name]().double()
    if name in MODELS_OF_EXPERTS:
        model.set_experts_implementation("eager")  # the others have no float64
        model.config.output_router_logits = balanced and name == "mixtral"
    for path, p in model.named_parameters():  # biases begin as zeros, and routers may
        if path.endswith("bias") or not p.any():
            nn.init.normal_(p, std=0.1)
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs.logits.reshape(-1, VOCABULARY), targets.reshape(-1))
    penalty = getattr(outputs, "aux_loss", None)
    return loss if penalty is None else loss + 0.1 * penalty


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def train_plainly(model: nn.Module, batches: Sequence[Tensor], loss_of: Callable[[Any, Tensor], Tensor]) -> list[float]:
    """The loss of each step of plain PyTorch. Tokens of each batch are (N, T + 1)."""
    optimizer, losses = optimizer_of(model), []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_trains_alike(
    engine: Engine, batches: Sequence[Tensor], losses: Sequence[float], expected: nn.Module
) -> None:
    """The engine has these losses and learns what the trained plain model has learnt. Collective."""
    for batch, loss in zip(batches, losses, strict=True):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        boxes = [each.box for each in engine.reads(len(tokens), (tokens.shape[1],))]
        tiles = [tokens[slice(*box.batch), slice(*box.space[0])] for box in boxes]
        assert engine.step(tiles, targets, (tokens.shape[1],)).loss == pytest.approx(loss, rel=EXACT)
    assert_learnt_alike(engine, expected)


def train(comm: Communicator, name: str, plan: Plan) -> None:
    with precise(build(name)):
        compare(comm, name, plan)


def compare(comm: Communicator, name: str, plan: Plan) -> None:
    balanced = plan.num_stages == 1
    expected = build(name, balanced)
    losses = train_plainly(expected, batches(), loss_of)
    styles = STYLES.get(name)
    if plan.num_stages == 1:
        held = LocalStages.whole(build(name, balanced), plan, comm, styles=styles)
    else:
        atoms = Cuttable(build(name)).names
        counts = (first := atoms.index(BLOCKS.get(name, "model.layers.1")), len(atoms) - first)
        held = split(lambda: build(name), plan, comm, balance=counts, image=(BATCH, LENGTH), styles=styles)
    assert bool(held.cutting) == (plan.cuts_parameters or name in MODELS_OF_EXPERTS)
    assert_trains_alike(Engine(held, plan, optimizer_of(held), loss_of, comm=comm), batches(), losses, expected)


@pytest.mark.parametrize("plan", PLANS | OF_EXPERTS)
@pytest.mark.parametrize("name", MODELS_OF_EXPERTS)
def test_five_steps_of_experts(ranks: Ranks, name: str, plan: str) -> None:
    chosen = (PLANS | OF_EXPERTS)[plan]
    if name in STYLES and chosen.tensor > 1:
        chosen = replace(chosen, moe="expert")
    ranks(chosen.num_ranks).run(train, name, chosen)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_five_steps(ranks: Ranks, name: str, plan: str) -> None:
    ranks(PLANS[plan].num_ranks).run(train, name, PLANS[plan])


@pytest.mark.parametrize("name", TIED)
def test_five_steps_of_words_that_are_tied_and_looked_at(ranks: Ranks, name: str) -> None:
    ranks(2).run(train, name, TWO)
