"""Requests that arrive at random times, and ways to admit them to a batch, by the batcher of mpi4dl.

    one after another   a batch of one; others wait, first come, first served
    static batches      up to B of those that wait begin together, and nobody joins them until all of them have ended
    continuous          whoever comes joins at the next token, while there are fewer than B

Requests are let in from the events of those that run, so at the end of a step, on one thread.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4dl.text.batcher import Batcher, Event

ALONE, STATIC, CONTINUOUS = WAYS = ("one after another", "static batches", "continuous")
PROMPT, ANSWER, SPREAD = 24, 32, 0.7  # medians of lengths in tokens; the standard deviation of their logarithms
SHORTEST = 4


class Request(NamedTuple):
    """What is asked, and when, in seconds."""

    arrival: float
    prompt: tuple[int, ...]
    num_tokens: int


def drawn(count: int, rate: float | None, vocabulary: int, context: int, seed: int) -> list[Request]:
    """Requests that come by a Poisson process, `rate` a second; None: all are there at once.

    Lengths of prompts and answers are log-normal, and half the context at most. They are the same at every rate.
    """
    draw, pauses = random.Random(seed), random.Random(seed + 1)
    most, found, now = context // 2, [], 0.0
    for _ in range(count):
        now += 0.0 if rate is None else pauses.expovariate(rate)
        lengths = [min(most, max(SHORTEST, round(n * draw.lognormvariate(0, SPREAD)))) for n in (PROMPT, ANSWER)]
        found.append(Request(now, tuple(draw.randrange(vocabulary) for _ in range(lengths[0])), lengths[1]))
    return found


class Clock:
    """Seconds since it was made, of a counter; pauses in which nobody is served are skipped, as if they had passed."""

    def __init__(self, counter: Callable[[], float]) -> None:
        self._counter, self._start, self._skipped = counter, counter(), 0.0

    def now(self) -> float:
        return self._counter() - self._start + self._skipped

    def skip_to(self, when: float) -> None:
        self._skipped += max(0.0, when - self.now())


class Door:
    """Lets requests into a batcher as a way does, and notes what comes of each and when. On rank 0.

    `heard`: of each request its tokens and their log-probabilities; `times`: when they came.
    """

    def __init__(self, batcher: "Batcher", way: str, requests: Sequence[Request], max_batch: int, clock: Clock) -> None:
        self._batcher, self._way, self._requests, self._clock = batcher, way, requests, clock
        self._max_batch, self._places, self._inside, self._next = max_batch, 0, 0, 0
        self.heard: list[list[tuple[int | None, float | None]]] = [[] for _ in requests]
        self.times: list[list[float]] = [[] for _ in requests]

    def let_in(self) -> None:
        """Submit those that have come and may join; if nobody is there, go on to when the next one comes."""
        from mpi4dl.text.options import Sampling

        if self._next == len(self._requests):
            return
        if not self._inside:
            self._clock.skip_to(self._requests[self._next].arrival)
            self._places = self._max_batch if self._way == STATIC else len(self._requests)
        now = self._clock.now()
        while self._places and self._next < len(self._requests) and self._requests[self._next].arrival <= now:
            request = self._requests[self._next]
            sampling = Sampling(max_tokens=request.num_tokens, temperature=0)
            self._batcher.submit(request.prompt, sampling, partial(self._hear, self._next))
            self._next += 1
            self._inside += 1
            self._places -= 1
        if self._next == len(self._requests):
            self._batcher.stop(drain=True)

    def _hear(self, number: int, event: "Event") -> None:
        self.heard[number].append((event.token, event.logprob))
        self.times[number].append(self._clock.now())
        self._inside -= event.finish_reason is not None
        self.let_in()


class Waits(NamedTuple):
    """Seconds that people wait: for the first token of each request, between tokens, and for the whole answer."""

    first: list[float]
    between: list[float]
    whole: list[float]


def waits(requests: Sequence[Request], times: Sequence[Sequence[float]]) -> Waits:
    """What was waited for requests whose tokens came at these times."""
    pairs = list(zip(requests, times, strict=True))
    return Waits(
        [came[0] - request.arrival for request, came in pairs],
        [later - sooner for came in times for sooner, later in pairwise(came)],
        [came[-1] - request.arrival for request, came in pairs],
    )
