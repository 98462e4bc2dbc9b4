"""The interface of callers and the batch: sampling, events of a request, statistics."""

import math
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen, and where they end.

    Args:
        max_tokens: how many are generated at most.
        temperature: what logits are divided by; 0: always the most probable token (greedy).
        top_k: sample among this number of most probable tokens; 0: all.
        top_p: sample among the most probable tokens that together have at least this probability.
        repetition_penalty: positive logits of tokens that occurred, also in the prompt, are divided by it, negative
            ones multiplied (Keskar et al. 2019, https://arxiv.org/abs/1909.05858).
        seed: of the request's own random numbers; None: another one each time.
        stop: texts before which generation ends; they are not part of what is returned.

    Raises:
        ValueError: a number that is not finite or out of its range, or an empty stop string.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or greater")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or greater")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "greater than 0 and at most 1")
        _require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "greater than 0")
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed <= LARGEST_SEED, f"from 0 to {LARGEST_SEED}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r} must be texts that are not empty")


def _require(name: str, value: float, fits: bool, rule: str) -> None:
    if not (fits and math.isfinite(value)):
        raise ValueError(f"{name}={value} is not possible: it must be {rule}")


@dataclass(frozen=True)
class Usage:
    """How many tokens a request had, and got."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Event:
    """An event of a request: one for each token, in order. The last one has a `finish_reason`.

    `text` is what is new and certain: parts of characters, and what may be the beginning of a stop string, come with a
    later token, or at the end. `token` is None if there is only the end. `logprob` is the natural logarithm of the
    token's probability under the model's own distribution (temperature 1, no penalty). `message` says what went wrong,
    if the reason is "error".
    """

    request_id: int
    token: int | None
    text: str
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    usage: Usage | None = None
    message: str = ""


@dataclass(frozen=True)
class Stats:
    """Running requests, and totals since the start. `pages_used` are those of running requests."""

    waiting: int
    running: int
    pages_used: int
    pages_total: int
    tokens_generated: int = 0
    prompt_tokens_done: int = 0
    prompts_done: int = 0
    requests_done: int = 0
    requests_cancelled: int = 0
    steps: int = 0
