"""Models of Hugging Face's transformers as they are, from small configurations: exact on parts and in stages.

Norms of Llama and its kin, and routers, compute in float32 whatever the model's type, so they round where float64 does
not. For both sides alike they compute in float64 here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tensor.styles import Styles
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check, words_loss

import_torchvision()
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive
VOCABULARY = 23
WORDS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 24, "intermediate_size": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of(kind: str, head: str, **sizes: Any) -> nn.Module:
    """A model of this kind, by a configuration of these sizes."""
    model: nn.Module = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes))
    return model


def language(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: of(kind, "ForCausalLM", **sizes, **COMMON)


def sparse(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: of(kind, "ForCausalLM", **sizes, **SPARSE)


def masked(kind: str, padding: int | None = None) -> Callable[[], nn.Module]:
    return lambda: of(kind, "ForMaskedLM", **BERT_SIZES | {"pad_token_id": padding})


GPT2: dict[str, Any] = {"n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: of("GPT2", "LMHeadModel", **GPT2, **COMMON),
    "llama": language("Llama", num_key_value_heads=2, **SIZES),
    "roberta": masked("Roberta", 1),
    "xlm-roberta": masked("XLMRoberta", 1),
    "bert": masked("Bert"),
}
# Tied ones, whose last stage asks for the type of what is tied.
TIED = {"mamba": language("Mamba", hidden_size=24, num_hidden_layers=2, state_size=4)}
MODELS_OF_EXPERTS = {
    "mixtral": sparse("Mixtral", num_local_experts=4),
    "olmoe": sparse("Olmoe", num_experts=4),
    "granite": sparse("GraniteMoe", num_local_experts=4),
    "qwen2": sparse("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16),
    "qwen3": sparse("Qwen3Moe", num_experts=5, mlp_only_layers=[0]),
    "gpt-oss": sparse("GptOss", num_local_experts=4, head_dim=6, sliding_window=4),
}
COMMON = WORDS | {"use_cache": False}
BERT_SIZES: dict[str, Any] = SIZES | NO_DROPOUT | COMMON | {"max_position_embeddings": 16}
SPARSE: dict[str, Any] = SIZES | COMMON | {
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12
}  # fmt: skip
ATTENTION = {f"model.layers.*.self_attn.{name}_proj": "heads" for name in ("q", "k", "v")}
WHOLE_EXPERTS = ATTENTION | {
    "model.layers.*.self_attn.o_proj": "heads-row",
    "model.layers.*.mlp.experts": "experts",
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
}
STYLES: dict[str, Styles] = {"gpt-oss": WHOLE_EXPERTS}  # whose experts have no style in parts
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
    "experts 4": replace(ONE, experts=4),
    "experts 2, tensor 2": replace(ONE, experts=2, tensor=2),
    "experts 2, whole ones on tensor 2": replace(ONE, experts=2, tensor=2, moe="expert"),
    "experts 2, two stages": replace(TWO, experts=2),
    "experts 2, data 2, ZeRO 1": replace(ONE, experts=2, data=2, zero=1),
    "data 2": replace(ONE, data=2),
}


@contextmanager
def precise(build: Callable[[], nn.Module]) -> Iterator[None]:
    """Within this context what the code of a model calls float32 is float64."""

    class Precise:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(build()).__module__], "torch", Precise())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def build(name: str, balanced: bool = False) -> nn.Module:
    """`balanced`: the loss has a penalty of a batch's routing, which is another one of microbatches."""
    model = (MODELS | MODELS_OF_EXPERTS | TIED)[name]().double()
    if name in MODELS_OF_EXPERTS:
        model.set_experts_implementation("eager")  # the others have no float64
        model.config.output_router_logits = balanced and name == "mixtral"
    for path, p in model.named_parameters():  # biases begin as zeros, and routers may
        if path.endswith("bias") or not p.any():
            nn.init.normal_(p, std=0.1)
    return model


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    loss, penalty = words_loss(outputs, targets), getattr(outputs, "aux_loss", None)
    return loss if penalty is None else loss + 0.1 * penalty


def parts_of(engine: Engine) -> Callable[[], bool]:
    return lambda: bool(engine.stages.cutting)


def check_one(ranks: Ranks, name: str, plan: Plan) -> None:
    task = Task(partial(build, name, plan.num_stages == 1), (7,), 4, "smooth AdamW", tokens=VOCABULARY, loss=loss_of)
    task = replace(task, num_steps=5, within=partial(precise, partial(build, name)))
    task = replace(task, styles=tuple(STYLES.get(name, {}).items()))
    outcomes = check(ranks, task, plan, parts_of)
    assert outcomes[0].watched == (plan.cuts_parameters or name in MODELS_OF_EXPERTS)


@pytest.mark.parametrize("plan", PLANS | OF_EXPERTS)
@pytest.mark.parametrize("name", MODELS_OF_EXPERTS)
def test_five_steps_of_experts(ranks: Ranks, name: str, plan: str) -> None:
    chosen = (PLANS | OF_EXPERTS)[plan]
    if name in STYLES and chosen.tensor > 1:
        chosen = replace(chosen, moe="expert")
    check_one(ranks, name, chosen)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_five_steps(ranks: Ranks, name: str, plan: str) -> None:
    check_one(ranks, name, PLANS[plan])


@pytest.mark.parametrize("name", TIED)
def test_five_steps_of_words_that_are_tied_and_looked_at(ranks: Ranks, name: str) -> None:
    check_one(ranks, name, TWO)
