"""Random trainings of small language models: stages, tensor and expert parallelism, context in parts, ZeRO."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import token_loss
from tests.parallel.experts.test_training import with_uneven_scores
from tools.nets.fuzz.trainings import Part, Training, problem, training_of

__all__ = ["Part", "Plan", "Text", "Training", "problem", "trainings"]
VOCABULARY = 19


@dataclass(frozen=True)
class Text:
    """A language model of these options, which learns to say the next one of `length` tokens."""

    length: int
    options: tuple[tuple[str, Any], ...]

    tokens = VOCABULARY
    loss = staticmethod(token_loss)

    @property
    def size(self) -> tuple[int, ...]:
        return (self.length,)

    def build(self) -> nn.Module:
        model = models.build("gpt", vocabulary=VOCABULARY, context=16, **dict(self.options))
        return with_uneven_scores(model.double())

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(1, VOCABULARY, (count, self.length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


@st.composite
def texts(draw: st.DrawFn) -> Text:
    heads = draw(st.sampled_from([2, 4]))
    options: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3)),
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from([None, 2, 1 if heads == 2 else 4])),
        "hidden": 4 * heads,
        "ff_dim": draw(st.sampled_from([None, 10, 12])),
        "positions": draw(st.sampled_from(["learned", "rotary"])),
        "activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "tied": draw(st.booleans()),
        "separator": draw(st.sampled_from([None, None, 3])),
    }
    if draw(st.booleans()):
        options |= {
            "num_experts": draw(st.integers(2, 5)),
            "top_k": draw(st.integers(1, 2)),
            "every": draw(st.integers(1, 2)),
            "scoring": draw(st.sampled_from(["softmax", "sigmoid"])),
            "shared_experts": draw(st.integers(0, 1)),
            "capacity_factor": draw(st.sampled_from([None, None, 0.7])),
            "balance": draw(st.sampled_from([0.0, 0.01])),
            "z": draw(st.sampled_from([0.0, 0.01])),
            "bias_rate": draw(st.sampled_from([0.0, 0.0, 0.01])),
            "balance_over": draw(st.sampled_from(["sequence", "batch"])),
        }
    text = Text(draw(st.integers(1, 9)), tuple(options.items()))
    try:
        with torch.device("meta"):
            text.build()
    except (ValueError, TypeError):
        assume(False)
    return text


@st.composite
def parts(draw: st.DrawFn, text: Text) -> Part:
    options = dict(text.options)
    every = options.get("every", 1)
    experts = options.get("num_experts", 0) if options["num_layers"] >= every else 0
    places = draw(st.integers(1, min(2, options["num_layers"])))
    sequences = draw(st.sampled_from([1, 1, 2, 3]))
    tensor = draw(st.sampled_from([1, 1, 2]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble", "layer"]))
    plan = Plan(
        ((sequences,),) * places,
        data=draw(st.sampled_from([1, 1, 2])),
        microbatches=draw(st.integers(1, 2)),
        schedule=schedule,
        bidirectional=draw(st.integers(0, 1)) if places > 1 and tensor == 1 else 0,
        zero=draw(st.sampled_from([0, 0, 1, 2, 3])),
        tensor=tensor,
        sequence=tensor > 1 and draw(st.booleans()),
        experts=draw(st.sampled_from([1, 2])) if experts else 1,
        moe=draw(st.sampled_from(["tensor", "expert"])) if tensor > 1 and experts else "tensor",
    )
    assume(plan.num_ranks <= 4 and sequences <= text.length)
    return Part(
        plan,
        draw(st.integers(1, 2)),
        recompute=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "none", "cpu", "disk"])),
        bucket_bytes=draw(st.sampled_from([40, 300, 1 << 20])),
    )


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    text = draw(texts())
    made = tuple(draw(st.lists(parts(text), min_size=1, max_size=3)))
    still = draw(st.sampled_from([(), (), ("blocks.0",), ("embedding",)]))
    return training_of(draw, text, made, still)
