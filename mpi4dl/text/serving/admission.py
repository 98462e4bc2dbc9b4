"""Requests from the event loop to the batch and back: admission, errors in OpenAI's form, and statistics.

    event loop      Admission.start: a place for each text -> Batcher.submit
    main thread     Batcher.run: on_event -> call_soon_threadsafe
    event loop      Admission._take: statistics, the reply's events; the place is free again after the last one
    event loop      Admission.close: the texts that nobody waits for any longer are cancelled

A place is taken until the batch reports the end of its text. So the batch knows at most `max_batch` + `max_queue` texts
at any time, including those that were just cancelled.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mpi4dl.text.batcher import Batcher, Event
from mpi4dl.text.options import Sampling

COUNTED = {
    "requests": "Texts asked for",
    "requests_cancelled": "Texts whose client went away before the end",
    "tokens_generated": "Tokens generated",
    "prompt_tokens": "Tokens of prompts answered",
}
TIMED = {
    "to_first_token": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100),  # from the arrival of the request
    "between_tokens": (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
}
STATES = {
    "requests_waiting": ("waiting", "Texts that wait for a place in the batch"),
    "requests_running": ("running", "Texts in the batch"),
    "pages_used": ("pages_used", "Pages of keys and values in use"),
    "pages_total": ("pages_total", "Pages of keys and values there are"),
}


class ServingStatistics:
    """How the server does, for Prometheus. For one event loop."""

    def __init__(self, batcher: Batcher) -> None:
        self._registry = CollectorRegistry()
        self._counters = {name: Counter(f"mpi4dl_{name}", COUNTED[name], registry=self._registry) for name in COUNTED}
        self._responses = Counter(
            "mpi4dl_http_responses", "HTTP responses by path and status", ["path", "status"], registry=self._registry
        )
        self._histograms = {
            name: Histogram(f"mpi4dl_time_{name}_seconds", "Seconds", buckets=buckets, registry=self._registry)
            for name, buckets in TIMED.items()
        }
        for name, (state, text) in STATES.items():
            gauge = Gauge(f"mpi4dl_{name}", text, registry=self._registry)
            gauge.set_function(partial(lambda state: getattr(batcher.stats(), state), state))

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def count(self, name: str, number: int = 1) -> None:
        self._counters[name].inc(number)

    def observe(self, name: str, seconds: float) -> None:
        """A token has come, after so long."""
        self._histograms[name].observe(seconds)
        self.count("tokens_generated")

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SOON = {"Retry-After": "1"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: SOON, 503: SOON}


class ApiError(HTTPException):
    """A request that gets no answer but `message`, with an HTTP status; `param` names the field that is at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, HEADERS.get(status))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """{"error": ...} as OpenAI's clients read it."""
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status_code, self.headers)


def stopping(message: str = "the server is stopping") -> ApiError:
    return ApiError(503, message, None, "stopping")


@dataclass(eq=False)
class Reply:
    """The texts of one HTTP request. `events` has theirs as they come, each with the index of its text."""

    arrived: float
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    indices: dict[int, int] = field(default_factory=dict)  # of texts, by the numbers that the batch gave them
    running: set[int] = field(default_factory=set)  # the numbers of those that are not over
    last: dict[int, float] = field(default_factory=dict)  # when the last token of each came, by time.perf_counter


class Admission:
    """Admits requests to the batch, as many as there are places, and hands its events on. For one event loop."""

    def __init__(self, batcher: Batcher, max_queue: int = 64, max_tokens: int | None = None) -> None:
        self.batcher, self.tokenizer, self.statistics = batcher, batcher.tokenizer, ServingStatistics(batcher)
        self.places, self.max_tokens = batcher.max_batch + max_queue, max_tokens
        self.stopping = False
        self._under_way: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether the batch is done with all that it was given."""
        return not self._under_way

    def check_room(self, num_texts: int) -> None:
        """Raises ApiError if there are no places for so many, now or ever."""
        if num_texts > self.places:
            raise ApiError(400, f"this asks for {num_texts} texts, but {self.places} at most may be under way or wait")
        if self.stopping:
            raise stopping()
        if len(self._under_way) + num_texts > self.places:
            said = f"{len(self._under_way)} texts are under way or wait, and no more may wait: ask again soon"
            raise ApiError(429, said, None, "queue_full")

    def room_for(self, prompt_tokens: int, wanted: int | None, default: int | None) -> int:
        """How many tokens at most to generate after a prompt of so many. Raises ApiError if there is no room."""
        context = self.batcher.context
        most = context if self.max_tokens is None else self.max_tokens
        if wanted is not None and wanted > most:
            raise ApiError(400, f"max_tokens is {wanted}, but may be {most} at most", "max_tokens")
        room = context - prompt_tokens
        if room < (wanted or 1):
            said = (
                f"the prompt has {prompt_tokens} tokens, and {wanted or 1} more are asked for, but the context of this "
                f"model is {context} tokens: shorten the prompt{' or max_tokens' if wanted else ''}"
            )
            raise ApiError(400, said, "prompt", "context_length_exceeded")
        return min(room, most, wanted or default or most)

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of prompts; those of no text are the end of the document before."""

        def encoded(prompt: str | list[int]) -> list[int]:
            if not isinstance(prompt, str):
                return prompt
            return [int(token) for token in self.tokenizer.encode(prompt)] or [self.tokenizer.end]

        return await asyncio.to_thread(lambda: [encoded(each) for each in prompts])  # a long text takes a while

    def start(self, wanted: Sequence[tuple[list[int], Sampling]], arrived: float) -> Reply:
        """A reply whose texts are these prompts' continuations. Raises ApiError; then nothing was started."""
        self.check_room(len(wanted))
        reply = Reply(arrived)
        hear = partial(self._hear, asyncio.get_running_loop(), reply)
        for index, (tokens, sampling) in enumerate(wanted):
            try:
                number = self.batcher.submit(tokens, sampling, hear)
            except (ValueError, RuntimeError) as error:
                self.close(reply)
                raise (ApiError(400, str(error)) if isinstance(error, ValueError) else stopping()) from None
            reply.indices[number] = index
            reply.running.add(number)
            self._under_way.add(number)
            self.statistics.count("requests")
        return reply

    def _hear(self, loop: asyncio.AbstractEventLoop, reply: Reply, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is over, and with it all waiting tasks
            loop.call_soon_threadsafe(self._take, reply, event, time.perf_counter())

    def _take(self, reply: Reply, event: Event, now: float) -> None:
        number = event.request_id
        if event.token is not None:
            name = "between_tokens" if number in reply.last else "to_first_token"
            self.statistics.observe(name, now - reply.last.get(number, reply.arrived))
            reply.last[number] = now
        if event.finish_reason is not None:
            reply.running.discard(number)
            self._under_way.discard(number)
            if event.usage is not None:
                self.statistics.count("prompt_tokens", event.usage.prompt_tokens)
        reply.events.put_nowait((reply.indices[number], event))

    def close(self, reply: Reply) -> None:
        """Cancel what is not over: nobody waits for it any longer. It may be called again."""
        for number in reply.running:
            self.statistics.count("requests_cancelled")
            self.batcher.cancel(number)
        reply.running.clear()

    def cancel_all(self) -> None:
        for number in self._under_way:
            self.batcher.cancel(number)
