"""Answers in the form of OpenAI's, whole or in chunks as they come."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpi4dl.datasets.text import Tokenizer
from mpi4dl.generation.requests import Event
from mpi4dl.serving.errors import ApiError, as_json, busy
from mpi4dl.serving.front import Reply

DONE = b"data: [DONE]\n\n"


@dataclass
class Continued:
    """What has come of one choice."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, event: Event) -> None:
        self.text += event.text
        self.finish_reason = event.finish_reason
        self.logprobs += scored(event)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens


def scored(event: Event) -> list[tuple[int, float]]:
    """The token of an event with its logarithmic probability, if it has one."""
    return [] if event.token is None or event.logprob is None else [(event.token, event.logprob)]


class CompletionForm:
    """The shape of /v1/completions. `echoes`: what the text of each choice begins with."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, echoes: Sequence[str], logprobs: bool) -> None:
        self.echoes, self.logprobs = echoes, logprobs
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Continued], usage: dict[str, int]) -> dict[str, Any]:
        """The answer that is not streamed."""
        texts = [self._choice(i, self.echoes[i] + choice.text, choice) for i, choice in enumerate(choices)]
        return {**self._head, "object": self.object_name, "choices": texts, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None, tells_usage: bool) -> bytes:
        """One event of a stream."""
        told: dict[str, Any] = {**self._head, "object": self.chunk_name, "choices": choices}
        return b"data: " + as_json({**told, "usage": usage} if tells_usage else told) + b"\n\n"

    def opening(self, index: int) -> dict[str, Any] | None:
        """What the stream of a choice begins with, before there is any text."""
        return self.piece(index, Continued(self.echoes[index])) if self.echoes[index] else None

    def piece(self, index: int, new: Continued) -> dict[str, Any]:
        """What is new of a choice."""
        return self._choice(index, new.text, new)

    def _choice(self, index: int, text: str, found: Continued) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._scores(found), "finish_reason": found.finish_reason}

    def _scores(self, found: Continued) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [self._tokenizer.decode([token]) for token, _ in found.logprobs],
            "token_logprobs": [logprob for _, logprob in found.logprobs],
            "top_logprobs": None,
            "text_offset": [],
        }


class ChatForm(CompletionForm):
    """The shape of /v1/chat/completions."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, Continued())

    def piece(self, index: int, new: Continued) -> dict[str, Any]:
        return self._delta(index, {"content": new.text} if new.text else {}, new)

    def _delta(self, index: int, delta: dict[str, Any], found: Continued) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._scores(found),
            "finish_reason": found.finish_reason,
        }

    def _choice(self, index: int, text: str, found: Continued) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._scores(found),
            "finish_reason": found.finish_reason,
        }

    def _scores(self, found: Continued) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tokens = [(self._tokenizer.decode([token]), logprob) for token, logprob in found.logprobs]
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in tokens
            ],
            "refusal": None,
        }


def usage_of(choices: Sequence[Continued], per_prompt: int) -> dict[str, int]:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    prompt = sum(choice.prompt_tokens for choice in choices[::per_prompt])
    completion = sum(choice.completion_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _failure(event: Event) -> ApiError | None:
    """What an event says that no text can."""
    if event.finish_reason == "cancelled":
        return busy("the server is stopping, and this request took too long for that", 503, "stopping")
    if event.finish_reason == "error":
        return ApiError(500, f"this request failed: {event.message}", None, "generation_failed")
    return None


async def whole_answer(reply: Reply, form: CompletionForm, per_prompt: int) -> dict[str, Any]:
    """The answer when all choices are over. Raises ApiError if one fails."""
    choices = [Continued() for _ in form.echoes]
    while any(choice.finish_reason is None for choice in choices):
        index, event = await reply.next()
        failure = _failure(event)
        if failure is not None:
            raise failure
        choices[index].add(event)
    return form.whole(choices, usage_of(choices, per_prompt))


async def streamed_answer(
    reply: Reply, form: CompletionForm, per_prompt: int, tells_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events as the answer grows: https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    choices = [Continued() for _ in form.echoes]
    for index in range(len(choices)):
        opening = form.opening(index)
        if opening is not None:
            yield form.chunk([opening], None, tells_usage)
    while any(choice.finish_reason is None for choice in choices):
        index, event = await reply.next()
        failure = _failure(event)
        if failure is not None:
            yield b"data: " + as_json(failure.body()) + b"\n\n"
            return
        choices[index].add(event)
        if event.text or event.finish_reason or form.logprobs:
            new = Continued(event.text, event.finish_reason, scored(event))
            yield form.chunk([form.piece(index, new)], None, tells_usage)
    if tells_usage:
        yield form.chunk([], usage_of(choices, per_prompt), tells_usage)
    yield DONE
