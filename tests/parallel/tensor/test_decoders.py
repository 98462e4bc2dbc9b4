"""Causal language models of transformers, tiny and random: exact in two stages however these are balanced, and on parts
of their parameters by the plans that they carry.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check, words_loss

import_torchvision()
transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.parallel.tensor.test_huggingface import precise  # noqa: E402

VOCABULARY = 23
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "sliding_window": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
PLAIN = (
    "apertus arcee bitnet bloom cohere cohere2 diffllama ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm glm4 "
    "gpt2 gpt_bigcode gpt_neox gpt_neox_japanese granite helium hunyuan_v1_dense llama mamba mistral nemotron olmo "
    "olmo2 olmo3 openai-gpt qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 vaultgemma"
)
SPARSE = "gpt_oss granitemoe mixtral olmoe qwen2_moe qwen3_moe"
DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    **{name: EXPERTS for name in SPARSE.split()},
    "phimoe": EXPERTS | {"router_jitter_noise": 0.0},  # which would choose among close experts at random
    **{name: {"pad_token_id": 0} for name in ("biogpt", "phi3")},
    "codegen": {"rotary_dim": 4, "n_ctx": 32},
    "ctrl": {"dff": 20},
    "dbrx": {
        "d_model": 24,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v3": EXPERTS
    | {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 6,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "falcon_mamba": {"state_size": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "num_heads": 4, "num_layers": 2},
    "gptj": {"rotary_dim": 4},
    "jetmoe": EXPERTS | {"kv_channels": 6},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 12, "state_size": 4, "n_groups": 1, "chunk_size": 4},
    "mpt": {"n_heads": 4},
    "opt": {"ffn_dim": 20, "word_embed_proj_dim": 24},
    **{name: {"partial_rotary_factor": 1.0} for name in ("persimmon", "phi")},  # of heads of 6
    "xglm": {"attention_heads": 4, "ffn_dim": 20, "num_layers": 2, "pad_token_id": 0},
}
TWO_STAGES = Plan(((1,), (1,)), microbatches=2)
TENSOR = replace(Plan(((1,),)), tensor=2)
WAYS = ("auto", "flops", "memory", "tensor")
CASES = [(name, way) for name in sorted(DECODERS) for way in WAYS]
OF_DEFAULT_TYPE = {"xglm"}  # whose attention makes a number of that type, and of the size of the largest float64


def build(name: str) -> nn.Module:
    kind = CONFIG_MAPPING[name]
    sizes = SIZES | DECODERS[name]
    config = kind(**{size: n for size, n in sizes.items() if not isinstance(getattr(kind, size, None), property)})
    for field in vars(config):
        if any(word in field for word in ("drop", "pdrop")) and isinstance(getattr(config, field), float):
            setattr(config, field, 0.0)
    model: nn.Module = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])(config).double()
    if EXPERTS.keys() <= sizes.keys():
        model.set_experts_implementation("eager")  # type: ignore[operator]  # the others have no float64
    for path, p in model.named_parameters():
        if path.endswith("bias") or not p.any():
            nn.init.normal_(p, std=0.1)
    return model


@contextmanager
def exact(name: str) -> Iterator[None]:
    """Within this context the model computes in float64 alone, and where it needs that, tensors are so by default."""
    with precise(partial(build, name)):
        torch.set_default_dtype(torch.float64 if name in OF_DEFAULT_TYPE else torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def parts_of(engine: Engine) -> Callable[[], bool]:
    return lambda: bool(engine.stages.cutting.parameters)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_decoders(ranks: Ranks, name: str, way: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    task = Task(partial(build, name), (7,), 4, "smooth AdamW", tokens=VOCABULARY, loss=words_loss, num_steps=2)
    task = replace(task, within=partial(exact, name), balance="auto" if way == "tensor" else way)
    outcomes = check(ranks, task, TENSOR if way == "tensor" else TWO_STAGES, parts_of)
    assert outcomes[0].watched == (way == "tensor")
