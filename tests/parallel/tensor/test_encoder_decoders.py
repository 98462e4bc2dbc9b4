"""Encoders and decoders of transformers in a module of the user's, with padding: exact on parts and in stages."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.parallel.plan import Plan
from tests.parallel.tensor.test_huggingface import NO_DROPOUT, ONE, PLANS, TWO, VOCABULARY, of, precise
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check

transformers = pytest.importorskip("transformers")

SOURCE, TARGET, PADDING = 7, 5, 3  # tokens; tokens up to PADDING are masked
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "dropout": 0.0}
NO_WORDS = dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 2)
HALVES: dict[str, Any] = {
    f"{half}_{name}": size
    for half in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 20))
}
T5: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5, tied": ("T5", T5),
    "t5, gated": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", HALVES | {"d_model": 24, "max_position_embeddings": 16}),
    "whisper": (
        "Whisper",
        HALVES | {"d_model": 24, "num_mel_bins": 3, "max_source_positions": 11, "pad_token_id": 1} | NO_WORDS,
    ),
}


class Translator(nn.Module):
    """Its input are the tokens of the source, then those of the target; or a sound, of which it tells the class."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind, sizes = MODELS[name]
        self.model = of(kind, "ForConditionalGeneration", **WORDS, **NO_DROPOUT, **sizes).double()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            start = torch.arange(4, 4 + TARGET, device=x.device).expand(x.shape[0], -1)
            return self.model(input_features=x, decoder_input_ids=start).logits.mean(1)
        source, target = x[:, :SOURCE], x[:, SOURCE:]
        return self.model(input_ids=source, attention_mask=source > PADDING, decoder_input_ids=target).logits


def inner(name: str) -> nn.Module:
    return Translator(name).model


def smooth_loss(logits: Tensor, targets: Tensor) -> Tensor:
    logits, targets = (logits, targets) if logits.dim() == 2 else (logits.flatten(0, 1), targets[:, -TARGET:].flatten())
    return F.cross_entropy(logits, targets, label_smoothing=0.1)


CHOSEN = {name: PLANS[name] for name in ("tensor 2", "two stages", "two stages, tensor 2")} | {
    "context 2": Plan(((2,),)),
    "data 2, ZeRO 3": replace(ONE, data=2, zero=3),
    "two stages, zero bubble": replace(TWO, schedule="zero-bubble"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("plan", CHOSEN)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps(ranks: Ranks, name: str, plan: str) -> None:
    import_torchvision()
    size, tokens = ((22,), 0) if name == "whisper" else ((SOURCE + TARGET,), VOCABULARY)
    task = Task(partial(Translator, name), size, 4, "smooth AdamW", tokens=tokens, loss=smooth_loss)
    task = replace(task, within=partial(precise, partial(inner, name)))
    check(ranks, task, CHOSEN[plan])
