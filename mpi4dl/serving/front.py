"""Requests from the event loop's thread to the batch, which runs on the main thread, and what comes of them back.

    event loop      Front.start: a place for each choice -> Batcher.submit
    main thread     Batcher.run: on_event -> call_soon_threadsafe
    event loop      Front._take: statistics, the reply's queue; the place is free again after the last event
    event loop      Reply.close: what nobody waits for any longer is cancelled

A place is taken until the batch itself has said that it is done with a request: so it knows at most `max_batch` +
`max_queue` of them at any time, those that were just cancelled included.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpi4dl.datasets.text import Tokenizer
from mpi4dl.generation.batcher import Batcher
from mpi4dl.generation.requests import Event, Sampling
from mpi4dl.serving.errors import ApiError, busy
from mpi4dl.serving.statistics import ServingStatistics


@dataclass(frozen=True)
class Limits:
    """What a server takes at most. `max_tokens`: of one answer; None: as many as the context has room for."""

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

    def __init__(self, front: "Front", arrived: float) -> None:
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


class Front:
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
                with contextlib.suppress(RuntimeError):  # the loop is over, and with it whoever waited
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
        """Cancel whatever is under way; who waits for it is told so."""
        for choice in self._under_way:
            self._batcher.cancel(choice.number)
