"""Options of all commands that run a trained text model: the plan, the size of the batch, and how tokens are chosen."""

import json
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from mpi4dl.options.config import Parallel
from mpi4dl.options.declare import instead, like, option, same_as
from mpi4dl.options.kinds import (
    BOOLEAN,
    COUNT,
    COUNT_OR_ZERO,
    NAME,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    TEXT,
    Kind,
    choice,
    number,
    optional,
)

if TYPE_CHECKING:
    from mpi4dl.training.trained import ModelOptions


def _stop_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return tuple(texts)


PROBABILITY = number("a number greater than 0 and at most 1", lambda x: 0 < x <= 1)
STOP = Kind(
    r'a text, in which \n is a line\'s end, or several, as in ["\n\n", "class "]',
    "TEXT",
    _stop_texts,
    read=lambda text: json.loads(text) if text.startswith("[") else text.replace("\\n", "\n").replace("\\t", "\t"),
    raw=list,
)


@dataclass(frozen=True)
class Prompts:
    """Prompts, and the number of continuations of each."""

    prompt: str = option(
        "",
        "the text that the model continues; empty: it begins a document",
        TEXT,
        brief="the text that the model continues",
        known_as=same_as("text input"),
    )
    prompts: str | None = option(
        None,
        'a file with a prompt in each line, as JSON: "def " or {"prompt": "def "}; none: --prompt',
        optional(NAME),
        brief="a file with a prompt in each line, as JSON",
        known_as=same_as("input-file"),
    )
    num_samples: int = option(
        1,
        "number of texts for each prompt, with seeds from --seed on",
        COUNT,
        brief="texts for each prompt",
        known_as=same_as("num-return-sequences"),
    )
    json: bool = option(False, "print a JSON object for each text, on one line", BOOLEAN, brief="print JSON lines")


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and where they end.

    Raises ValueError for what an option cannot be. Repetition penalty: Keskar et al. 2019, arXiv:1909.05858.
    """

    max_tokens: int = option(
        128,
        "largest number of generated tokens",
        COUNT,
        brief="tokens to generate at most",
        known_as=same_as("max-new-tokens max-length length"),
    )
    temperature: float = option(
        1.0,
        "divisor of logits; 0: always the most probable token",
        NOT_NEGATIVE,
        brief="0: always the most probable token",
        known_as=instead("use {option} 1; {option} 0 always takes the most probable token", "do-sample")
        | instead("use {option} 0", "greedy"),
    )
    top_k: int = option(
        0,
        "sample among this number of most probable tokens; 0: all",
        COUNT_OR_ZERO,
        brief="sample among this number of tokens; 0: all",
    )
    top_p: float = option(
        1.0,
        "sample among the most probable tokens with this total probability",
        PROBABILITY,
        brief="sample among tokens with this total probability",
    )
    repetition_penalty: float = option(1.0, "divisor of logits of tokens that occurred", POSITIVE)
    seed: int | None = option(
        None,
        "seed of sampling; none: another one each time",
        optional(SEED),
        brief="of the random numbers",
        known_as=same_as("random-seed"),
    )
    stop: tuple[str, ...] = option((), "text at which generation stops", STOP)

    def __post_init__(self) -> None:
        for each in fields(self):
            kind, value = each.metadata["kind"], getattr(self, each.name)
            try:
                kind.check(kind.raw(value))
            except ValueError:
                raise ValueError(f"{each.name}={value!r} is not possible: it must be {kind.wanted}") from None

    def of_sample(self, number: int) -> "Sampling":
        """Of sample `number` of a prompt. Raises ValueError."""
        return self if self.seed is None else replace(self, seed=self.seed + number)


@dataclass(frozen=True)
class Ranks:
    """How ranks share the model and the requests."""

    stages: int = like(Parallel, "stages", brief="stages of layers, one behind the other")
    tensor: int = like(Parallel, "tensor", brief="ranks that share each layer")
    data: int = option(
        1,
        "number of copies of the model that share the requests",
        COUNT,
        brief="copies of the model that share the requests",
        called="replicas",
        known_as=same_as("data-parallel-size dp"),
    )
    experts: int = option(
        1, "number of ranks that share experts; they split the requests as those of --replicas do", COUNT
    )
    precision: Literal["fp32", "bf16", "int8", "int4"] = option(
        "fp32",
        "type of weights; fp32: as trained; int8 and int4: for linear layers, bf16 for others",
        choice("fp32", "bf16", "int8", "int4"),
        brief="fp32, bf16, int8 or int4",
        known_as=same_as("dtype quantization")
        | instead("use {option} int8", "load-in-8bit")
        | instead("use {option} int4", "load-in-4bit")
        | instead("use {option} bf16", "fp16 bf16"),
    )
    device: str = like(Parallel, "device")
    trust_code: bool = option(
        False, "load code that the run names as its model, even if your training did not sign it", BOOLEAN
    )

    def instead_of(self, trained: "ModelOptions", threads: int | None = None) -> dict[str, Any]:
        """The options by which these ranks hold a model, instead of those that trained it, for any batches."""
        asked = {each.name: getattr(self, each.name) for each in fields(Parallel) if hasattr(self, each.name)}
        as_trained = {name: trained.value(name) for name in ("tensor_styles", "moe")}
        usual = {"tiles": ((1,),), "balance": "flops", "threads": threads, "accumulate": 1, "keep_freed_memory": False}
        return {**vars(Parallel()), **usual, **as_trained, **asked}


@dataclass(frozen=True)
class Batching:
    """How many requests run at once, and their memory."""

    max_batch: int = option(
        16,
        "largest number of requests in the batch",
        COUNT,
        brief="requests that run at once",
        known_as=same_as("max-num-seqs batch-size max-batch-size"),
    )
    pages: int | None = option(
        None,
        "number of pages of each copy of the model; none: enough for its share of --max-batch requests of half the "
        "context",
        optional(COUNT),
        known_as=same_as("num-gpu-blocks")
        | instead("use {option} N, which counts pages of the KV cache", "gpu-memory-utilization"),
    )
