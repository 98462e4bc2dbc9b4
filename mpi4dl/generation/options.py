"""Options that commands have in common which run a trained model: how it lies over ranks, and how much runs at once."""

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from mpi4dl.generation.requests import Sampling
from mpi4dl.options.declare import option
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
    optional,
)

if TYPE_CHECKING:
    from mpi4dl.parallel.plan import Plan


def _stop_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return tuple(texts)


def _read_stop_texts(text: str) -> Any:
    return json.loads(text) if text.startswith("[") else text.replace("\\n", "\n").replace("\\t", "\t")


STOP = Kind(
    r'a text, in which \n is a line\'s end, or several, as in ["\n\n", "class "]',
    "TEXT",
    _stop_texts,
    read=_read_stop_texts,
    raw=list,
)


@dataclass(frozen=True)
class Prompts:
    prompt: str = option("", "what the model goes on with; empty: it begins a document", TEXT)
    prompt_file: str | None = option(None, "a file of UTF-8 that is the prompt; none: --prompt", optional(NAME))
    prompts: str | None = option(
        None, 'a file with a prompt in each line, as JSON: "def " or {"prompt": "def "}; none: --prompt', optional(NAME)
    )
    num_samples: int = option(1, "how many texts for each prompt, with seeds from --seed on", COUNT)
    json: bool = option(False, "print a JSON object for each text, on one line", BOOLEAN)


@dataclass(frozen=True)
class Choosing:
    max_tokens: int = option(128, "how many tokens are generated at most", COUNT)
    temperature: float = option(1.0, "what logits are divided by; 0: always the most probable token", NOT_NEGATIVE)
    top_k: int = option(0, "only so many of the most probable tokens are possible; 0: all", COUNT_OR_ZERO)
    top_p: float = option(1.0, "only the most probable tokens that have this probability together", POSITIVE)
    repetition_penalty: float = option(1.0, "what logits of tokens that occurred are divided by", POSITIVE)
    seed: int | None = option(None, "of the random numbers; none: others each time", optional(SEED))
    stop: tuple[str, ...] = option((), "text before which generation ends", STOP)

    def sampling(self, number: int = 0) -> Sampling:
        """Of sample `number` of a prompt. Raises ValueError."""
        values = asdict(self)
        return Sampling(**values | {"seed": None if self.seed is None else self.seed + number})


@dataclass(frozen=True)
class Ranks:
    stages: int = option(1, "into how many stages the model is cut, one behind the other", COUNT)
    tensor: int = option(1, "how many ranks share the parameters of each layer, and its features", COUNT)
    data: int = option(1, "how many copies of the model share the requests", COUNT)
    experts: int = option(1, "how many ranks share experts, and the requests as those of --data do", COUNT)
    moe: str = option(
        "tensor",
        "what the ranks of --tensor have of experts: a part of each, or whole ones",
        choice("tensor", "expert"),
    )
    precision: Literal["fp32", "bf16", "int8", "int4"] = option(
        "fp32",
        "the type of weights; fp32: as they were trained; int8 and int4: of linear layers, else bf16",
        choice("fp32", "bf16", "int8", "int4"),
    )
    average: bool = option(
        True, "of a run trained with --ema, take the average of the weights, which its validations measured", BOOLEAN
    )
    device: str = option("auto", "where to compute; auto: on a GPU if there is one", choice("auto", "cpu", "cuda"))
    trust_code: bool = option(
        False, "load code that the run names as its model, though it is not signed by training of yours", BOOLEAN
    )

    def plan(self) -> "Plan":
        """Raises ValueError for what cannot be."""
        from mpi4dl.parallel.plan import Plan  # which imports torch

        asked = {each.name: getattr(self, each.name) for each in fields(self) if each.name in Plan.options()}
        return Plan.of(tiles=((1,),), **asked)


@dataclass(frozen=True)
class Batching:
    max_batch: int = option(16, "how many requests run at once at most", COUNT)
    page_size: int = option(16, "how many tokens' keys and values are in a page", COUNT)
    pages: int | None = option(
        None,
        "how many pages each copy of the model has; none: enough for its share of --max-batch requests of half the "
        "context",
        optional(COUNT),
    )
    prefill_chunk: int = option(128, "how many tokens of prompts a step works on at most", COUNT)
