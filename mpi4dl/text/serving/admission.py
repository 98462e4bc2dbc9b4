"""Requests from the event loop to the batch and back: admission, errors in OpenAI's form, and statistics.

    event loop      Admission.start: a place for each choice -> Batcher.submit
    main thread     Batcher.run: on_event -> call_soon_threadsafe
    event loop      Admission._take: statistics, the reply's queue; the place is free again after the last event
    event loop      Reply.close: what nobody waits for any longer is cancelled

A place is taken until the batch reports the end of its request. So the batch knows at most `max_batch` + `max_queue`
requests at any time, including those that were just cancelled.
"""

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException

from mpi4dl.datasets.text import Tokenizer
from mpi4dl.text.batcher import Batcher, Event
from mpi4dl.text.options import Sampling

# How the server does: times to the first token and between tokens, tokens a second; for Prometheus and for a reader.
#
# All of it is used by the thread of the event loop alone.

LONGEST_SAMPLE = 1 << 16  # of the latest times, from which quantiles are taken
FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BETWEEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class Period:
    """Counts since the last report."""

    def __init__(self) -> None:
        self.requests = self.cancelled = self.refused = self.tokens = 0
        self.busy_seconds = 0.0  # while something was asked for and not answered yet
        self.first: deque[float] = deque(maxlen=LONGEST_SAMPLE)
        self.between: deque[float] = deque(maxlen=LONGEST_SAMPLE)

    def line(self) -> str:
        """The report in one line."""
        said = f"{self.requests:,} requests, {self.cancelled:,} cancelled, {self.refused:,} refused"
        if self.tokens:
            said += f"; {self.tokens:,} tokens, {self.tokens / self.busy_seconds:,.1f} tokens/s"
        for name, times in (("to first token", self.first), ("between tokens", self.between)):
            if times:
                said += f"; {name} p50 {quantile(times, 0.5):.4f} s, p99 {quantile(times, 0.99):.4f} s"
        return said


class ServingStatistics:
    """Counts what is served, in Prometheus' terms and by intervals. Times are of time.perf_counter, in seconds."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = CollectorRegistry()
        self.interval = Period()
        self._busy_since: float | None = None
        self._responses = Counter(
            "mpi4dl_http_responses", "HTTP responses by path and status", ["path", "status"], registry=self.registry
        )
        self._cancelled = Counter(
            "mpi4dl_requests_cancelled", "Requests whose client went away before the end", registry=self.registry
        )
        self._tokens = Counter("mpi4dl_tokens_generated", "Tokens generated", registry=self.registry)
        self._prompt_tokens = Counter("mpi4dl_prompt_tokens", "Tokens of prompts answered", registry=self.registry)
        self._first = Histogram(
            "mpi4dl_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST_BUCKETS,
            registry=self.registry,
        )
        self._between = Histogram(
            "mpi4dl_time_between_tokens_seconds",
            "From one token of a request to the next",
            buckets=BETWEEN_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_UnderWay(batcher))

    def responded(self, path: str, status: int) -> None:
        """An HTTP response has begun."""
        self._responses.labels(path, str(status)).inc()
        self.interval.refused += status >= 400

    def asked(self) -> None:
        """A request for text was accepted."""
        self.interval.requests += 1

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)
        self.interval.first.append(seconds)
        self._count_token()

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)
        self.interval.between.append(seconds)
        self._count_token()

    def _count_token(self) -> None:
        self._tokens.inc()
        self.interval.tokens += 1

    def answered(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def cancelled(self) -> None:
        """The client of a request went away."""
        self._cancelled.inc()
        self.interval.cancelled += 1

    def work(self, under_way: bool) -> None:
        """Something is under way from now on, or nothing is."""
        now = time.perf_counter()
        if self._busy_since is not None:
            self.interval.busy_seconds += now - self._busy_since
        self._busy_since = now if under_way else None

    def report(self) -> str | None:
        """A line about the time since the last report, if anything happened."""
        self.work(self._busy_since is not None)
        told, self.interval = self.interval, Period()
        return told.line() if told.requests or told.refused or told.tokens else None

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _UnderWay(Collector):
    """The state of the batch, read on request."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def collect(self) -> Iterator[Metric]:
        stats = self._batcher.stats()
        yield GaugeMetricFamily("mpi4dl_requests_waiting", "Requests that wait for a place in the batch", stats.waiting)
        yield GaugeMetricFamily("mpi4dl_requests_running", "Requests in the batch", stats.running)
        yield GaugeMetricFamily("mpi4dl_pages_used", "Pages of keys and values in use", stats.pages_used)
        yield GaugeMetricFamily("mpi4dl_pages_total", "Pages of keys and values there are", stats.pages_total)


# Errors, in words, and in the form that OpenAI's clients expect.

RETRY_SECONDS = 1

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that gets no answer but `message`, with an HTTP status; `param` names the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """{"error": ...} as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def busy(message: str, status: int = 429, code: str | None = "queue_full") -> ApiError:
    """An error after which clients may soon try again."""
    return ApiError(status, message, None, code, {"Retry-After": str(RETRY_SECONDS)})


def as_json(value: object) -> bytes:
    """In ASCII: what is quoted of a request may not even be Unicode."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def quoted(text: str, most: int = 80) -> str:
    """Text of a request, for an error about it, of bounded length."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def explain_errors(app: FastAPI) -> None:
    """Let all errors of `app` have this form, its own and those of routing."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method[:20]} {quoted(request.url.path)}"
        said = {
            404: (f"there is no {asked}: see /v1/models, /v1/completions, /v1/chat/completions", "unknown_url"),
            405: (f"{asked} is not possible: the method is wrong", "method_not_allowed"),
        }
        message, code = said.get(error.status_code, (str(error.detail), None))
        return ApiError(error.status_code, message, None, code, error.headers).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed; its log says why", None, "internal_error").response()


@dataclass(frozen=True)
class Limits:
    """The limits of a server. `max_tokens`: of one answer; None: as many as the context has room for."""

    context: int
    max_batch: int = 16
    max_queue: int = 64
    max_tokens: int | None = None
    max_body_bytes: int = 1 << 20

    @property
    def places(self) -> int:
        """How many requests may be under way or wait."""
        return self.max_batch + self.max_queue


@dataclass(eq=False)
class Continuation:
    """One text that is generated for a reply. `last`: when its last token came, by time.perf_counter."""

    reply: "Reply"
    index: int
    number: int = -1  # by which the batch knows it
    last: float | None = None
    over: bool = False


class Reply:
    """The choices of one HTTP request. `next` gives their events in the order in which they come."""

    def __init__(self, front: "Admission", arrived: float) -> None:
        self.arrived = arrived
        self.choices: list[Continuation] = []
        self._front = front
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def next(self) -> tuple[int, Event]:
        """The next event, and the index of the choice that it is of."""
        return await self._events.get()

    def put(self, choice: Continuation, event: Event) -> None:
        """An event of one of its choices has come."""
        self._events.put_nowait((choice.index, event))

    def close(self) -> None:
        """Cancel what is not over: nobody waits for it any longer. It may be called again."""
        choices, self.choices = self.choices, []
        for choice in choices:
            if not choice.over:
                self._front.abandon(choice)


class Admission:
    """Admits requests to the batch, as many as there are places, and hands its events on. For one event loop."""

    def __init__(self, batcher: Batcher, tokenizer: Tokenizer, limits: Limits, statistics: ServingStatistics) -> None:
        self.tokenizer, self.limits, self.statistics = tokenizer, limits, statistics
        self.stopping = False
        self._batcher = batcher
        self._under_way: set[Continuation] = set()

    @property
    def idle(self) -> bool:
        """Whether the batch is done with all that it was given."""
        return not self._under_way

    def check_room(self, num_choices: int) -> None:
        """Raises ApiError if there are no places for so many, now or ever."""
        if num_choices > self.limits.places:
            raise ApiError(
                400, f"this asks for {num_choices} texts, but {self.limits.places} at most may be under way or wait"
            )
        if self.stopping:
            raise busy("the server is stopping", 503, "stopping")
        if len(self._under_way) + num_choices > self.limits.places:
            raise busy(f"{len(self._under_way)} requests are under way or wait, and no more may wait: ask again soon")

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The tokens of prompts; those of no text are the end of the document before."""

        def encoded() -> list[list[int]]:
            return [
                [int(token) for token in self.tokenizer.encode(prompt)] or [self.tokenizer.end]
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        return await asyncio.to_thread(encoded)  # a long text takes a while

    def start(self, wanted: Sequence[tuple[list[int], Sampling]], arrived: float) -> Reply:
        """A reply whose choices are these prompts' continuations. Raises ApiError; then nothing was started."""
        self.check_room(len(wanted))
        loop, reply = asyncio.get_running_loop(), Reply(self, arrived)
        for index, (tokens, sampling) in enumerate(wanted):
            choice = Continuation(reply, index)

            def hear(event: Event, choice: Continuation = choice) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is over, and with it all waiting tasks
                    loop.call_soon_threadsafe(self._take, choice, event, time.perf_counter())

            try:
                choice.number = self._batcher.submit(tokens, sampling, hear)
            except (ValueError, RuntimeError) as error:
                reply.close()
                if isinstance(error, ValueError):
                    raise ApiError(400, str(error)) from None
                raise busy("the server is stopping", 503, "stopping") from None
            reply.choices.append(choice)
            self._under_way.add(choice)
            self.statistics.asked()
        self.statistics.work(True)
        return reply

    def _take(self, choice: Continuation, event: Event, now: float) -> None:
        if event.token is not None:
            if choice.last is None:
                self.statistics.first_token(now - choice.reply.arrived)
            else:
                self.statistics.next_token(now - choice.last)
            choice.last = now
        if event.finish_reason is not None:
            choice.over = True
            self._under_way.discard(choice)
            self.statistics.work(bool(self._under_way))
            if event.usage is not None:
                self.statistics.answered(event.usage.prompt_tokens)
        choice.reply.put(choice, event)

    def abandon(self, choice: Continuation) -> None:
        """Cancel a choice that nobody waits for any longer."""
        self.statistics.cancelled()
        self._batcher.cancel(choice.number)

    def cancel_all(self) -> None:
        """Cancel all running requests, and report that to their clients."""
        for choice in self._under_way:
            self._batcher.cancel(choice.number)
