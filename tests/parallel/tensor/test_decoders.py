"""Causal language models of transformers, tiny and random: exact in two stages however these are balanced, and on parts
of their parameters by the plans that they carry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks, RanksFailed

import_torchvision()
transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.parallel.tensor.test_huggingface import (  # noqa: E402
    assert_trains_alike,
    optimizer_of,
    precise,
    train_plainly,
)

VOCABULARY, LENGTH, BATCH, STEPS = 23, 7, 4, 2
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
SPARSE = "gpt_oss granitemoe mixtral olmoe phimoe qwen2_moe qwen3_moe"
DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    **{name: EXPERTS for name in SPARSE.split()},
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
REFUSED = {("bloom", "tensor"): "autograd.Function"}  # whose GELU is a function of its own


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
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


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.reshape(-1, outputs.logits.shape[-1]), targets.reshape(-1))


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Within this context tensors have this type by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train(comm: Communicator, name: str, way: str) -> None:
    with precise(build(name)), by_default(torch.float64 if name in OF_DEFAULT_TYPE else torch.float32):
        expected = build(name)
        losses = train_plainly(expected, batches(), loss_of)
        if way == "tensor":
            plan = TENSOR
            held = LocalStages.whole(build(name), plan, comm)
            assert held.cutting.parameters
        else:
            plan = TWO_STAGES
            held = split(partial(build, name), plan, comm, balance=way, image=(BATCH // 2, LENGTH))
        assert_trains_alike(Engine(held, plan, optimizer_of(held), loss_of, comm=comm), batches(), losses, expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_decoders(ranks: Ranks, name: str, way: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    if (name, way) in REFUSED:
        with pytest.raises(RanksFailed, match=REFUSED[name, way]):
            ranks(2).run(train, name, way)
        return
    ranks(2).run(train, name, way)
