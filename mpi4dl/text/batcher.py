"""Continuous batching: requests join and leave at any token; the state, sampling and text of each.

any thread of rank 0     submit, cancel, stop    --->  what waits, behind a lock
main thread of rank 0    run:     cancellations -> admissions -> a step of all that run -> a token of each -> events
main thread of others    follow:                                 the same step
"""

import pickle
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Condition
from typing import Any, Literal

import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.datasets.text.tokenizer import Tokenizer
from mpi4dl.geometry import ceil_div
from mpi4dl.text.model import PagedModel, TokenPortion
from mpi4dl.text.options import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]


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
    """Running requests, and the steps since the start. `pages_used` are those of running requests."""

    waiting: int
    running: int
    pages_used: int
    pages_total: int
    steps: int = 0


# Which token comes next: by the logits of one request, its own random numbers, and nothing else. In float64.


class Chooser:
    """Chooses the tokens of one request. `occurred` are the tokens of its prompt."""

    def __init__(self, sampling: Sampling, occurred: Collection[int]) -> None:
        self.sampling = sampling
        self._occurred = set(occurred) if sampling.repetition_penalty != 1 else set()
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token after these logits (vocabulary,), float64."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            logits = penalized(logits, self._occurred, sampling.repetition_penalty)
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            shares = probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p).cumsum(0)
            drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * shares[-1]
            token = int(torch.searchsorted(shares, drawn, right=True).clamp_(max=len(shares) - 1))
        if sampling.repetition_penalty != 1:
            self._occurred.add(token)
        return token


def penalized(logits: Tensor, occurred: Collection[int], penalty: float) -> Tensor:
    """The logits, those of tokens that occurred divided by the penalty where positive, else multiplied by it."""
    which = torch.tensor(sorted(occurred), dtype=torch.int64)
    found = logits[which]
    return logits.index_copy(0, which, torch.where(found > 0, found / penalty, found * penalty))


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Those of the tokens that are possible; 0 of all others. They add up to 1.

    First the `top_k` most probable stay, then of these the fewest that have a probability of `top_p` together. Of
    tokens that are equally probable the first ones count as more probable.
    """
    logits = (logits - logits.max()) / temperature
    if 0 < top_k < len(logits) or top_p < 1:
        logits, order = logits.sort(descending=True, stable=True)
        shares = logits[: top_k or None].softmax(0)
        if top_p < 1:
            before = shares.cumsum(0) - shares
            shares = shares * (before < top_p)
        found = torch.zeros_like(logits).index_copy_(0, order[: len(shares)], shares)
        return found / found.sum()
    return logits.softmax(0)


# Text from tokens as they come: only what is certain, up to the first stop string.
#
# tokens    "na"  "\xc3"  "\xaf"  "ve"  "\n"  "\n"           stop: "\n\n"
# text      "na"  ""      "ï"     "ve"  ""    (ends; "\n\n" is not part of it)

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes a part of a character, or each byte of it
MOST_UNFINISHED = 3  # bytes of a character that is not whole


class TextStream:
    """The text of one request. `stopped`: a stop string was found, behind which nothing counts."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._undecoded: list[int] = []  # tokens from the last one on behind which all characters were whole
        self._shown = 0  # how many characters of theirs were taken into `_held`
        self._held = ""  # what may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain with this token."""
        self._undecoded.append(token)
        return self._take(self._tokenizer.decode(self._undecoded), last=False)

    def end(self) -> str:
        """The text held back, as it is: no more tokens come."""
        return self._take(self._tokenizer.decode(self._undecoded), last=True)

    def _take(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        until = len(text) if last else max(len(text.rstrip(UNFINISHED)), len(text) - MOST_UNFINISHED)
        self._held += text[self._shown : until]
        self._shown = until
        if until == len(text):
            self._undecoded, self._shown = [], 0
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain = self._held[: min(found)]
        else:
            certain = self._held[: len(self._held) - (0 if last else self._beginning())]
        self._held = self._held[len(certain) :]
        return certain

    def _beginning(self) -> int:
        """How many of the last characters held are the beginning of a stop string, at most."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


# The state of a running request: its next tokens, and its events.

OnEvent = Callable[[Event], None]


@dataclass
class Running:
    """A request: `tokens` are its prompt and what was generated, `num_cached` of them were given to the model.

    `most` is how many tokens it may come to have. While it runs `num_pages` of data rank `row` are set aside for it.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    most: int
    sampling: Sampling
    on_event: OnEvent
    tokenizer: Tokenizer
    separator: int | None = None
    row: int = 0
    num_pages: int = 0
    num_cached: int = 0
    chooser: Chooser = field(init=False)
    text: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.sampling, self.tokens)
        self.text = TextStream(self.tokenizer, self.sampling.stop)
        # A separator ends a document, and what follows sees nothing of it.
        ends = (i + 1 if token == self.separator else 0 for i, token in enumerate(self.tokens))
        self._seen_from = list(accumulate(ends, max, initial=0))[: self.num_prompt + 1]

    def next_portion(self, chunk: int) -> TokenPortion:
        """The next tokens for the model: at most `chunk` tokens, of a prompt always the same ones."""
        start = self.num_cached
        tokens = tuple(self.tokens[start : start + chunk])
        stop = start + len(tokens)
        seen_from = tuple(self._seen_from[min(at, self.num_prompt)] for at in range(start, stop))
        return TokenPortion(
            self.row,
            self.id,
            start,
            tokens,
            self.most - 1,
            stop == len(self.tokens),
            seen_from if any(seen_from) else (),
        )

    def take(self, logits: Tensor) -> Event:
        """Choose a token by logits (vocabulary,), float64."""
        token = self.chooser.choose(logits)
        self.tokens.append(token)
        reason: FinishReason | None = None
        text = self.text.add(token)
        if self.text.stopped or token in self.tokenizer.ends:
            reason = "stop"
        elif len(self.tokens) == self.most:
            reason = "length"
        if reason is not None:
            text += self.text.end()
            reason = "stop" if self.text.stopped else reason
        logprob = float(logits[token] - logits.logsumexp(0))
        return Event(self.id, token, text, reason, logprob, self.usage if reason else None)

    def ended(self, reason: FinishReason, message: str = "") -> Event:
        """The event of an end that comes from outside."""
        return Event(self.id, None, self.text.end(), reason, usage=self.usage, message=message)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, len(self.tokens) - self.num_prompt)


def portions_of(running: Sequence[Running], chunk: int, num_rows: int) -> list[tuple[Running, TokenPortion]]:
    """The tokens of each request in the next step: one of those that generate, and the next parts of prompts.

    Parts are of `chunk` tokens but the last one of a prompt, wherever others are, so that a prompt is always computed
    in the same parts. Of each data rank there is one, or several that have `chunk` tokens together.
    """
    found, room = [], [chunk] * num_rows
    for request in running:
        portion = request.next_portion(chunk)
        if request.num_cached < request.num_prompt:  # it has not been given its prompt
            if len(portion.tokens) > room[request.row]:
                continue
            room[request.row] -= len(portion.tokens)
        found.append((request, portion))
    return found


class Batcher:
    """Generates text for many requests at once, by the model that `stages` lays over the ranks of `comm`. Collective.

    Made on every rank. Rank 0 then calls `run`, all others `follow`. Only rank 0's other methods are for callers, from
    any thread; they never wait for MPI.

    A request gets the tokens that it would get alone, to the bit where all ranks of a sum add in the same order. All
    pages that it may need are set aside when it joins, so that those that run never wait for each other. Their memory
    is taken as its tokens come.

    Args:
        stages: the model: this rank's stages, or parts of parameters. It is in evaluation mode until `close`.
        comm: all ranks of the plan.
        tokenizer: what decodes tokens; its `ends` end a request.
        context: the most tokens that a prompt and what is generated may have.
        max_batch: how many requests run at once at most; others wait, first come, first served.
        page_size: how many tokens' keys and values a page holds.
        num_pages: how many pages there are on each data rank; None: enough for its share of `max_batch` requests, of
            half the context each.
        prefill_chunk: how many tokens of prompts are worked on in a step at most, on each data rank, so that others go
            on.
        separator: the token that ends a document, if the model was made so that no token sees other documents.

    Raises:
        Refusal: on all ranks, as `PagedModel`.
    """

    def __init__(
        self,
        stages: Any,
        comm: Communicator,
        tokenizer: Tokenizer,
        context: int,
        *,
        max_batch: int = 16,
        page_size: int = 16,
        num_pages: int | None = None,
        prefill_chunk: int = 128,
        separator: int | None = None,
    ) -> None:
        self.comm, self.tokenizer, self.context, self.separator = comm, tokenizer, context, separator
        self.max_batch, self.page_size, self.prefill_chunk = max_batch, page_size, prefill_chunk
        if num_pages is None:
            of_one = ceil_div(context, page_size)
            num_pages = max(of_one, -(-max_batch // stages.plan.replicas) * of_one // 2)
        self._model = PagedModel(stages, comm, page_size)
        self._num_pages, self._pages_used = num_pages, [0] * stages.plan.replicas  # of each data rank
        self._ended: list[int] = []  # requests whose memory is still there
        self._lock = Condition()  # of all that follows; one thread may take it twice, as a signal's handler does
        self._waiting: deque[Running] = deque()
        self._cancelled: set[int] = set()
        self._stopping = self._drains = False
        self._next_id = 0
        self._running: list[Running] = []
        self._steps = 0
        self._stats = self._new_stats()

    def submit(self, prompt_tokens: Sequence[int], sampling: Sampling, on_event: OnEvent) -> int:
        """Add a request; returns its id. `on_event` is called on the thread of `run`: it must be quick, and not raise.

        An empty prompt stands for the end of a document. Generation ends at the context's end too ("length").

        Raises:
            ValueError: it can never fit (longer than the context, more pages than there are), or a token is unknown.
            RuntimeError: the batch is stopping.
        """
        tokens = [int(token) for token in prompt_tokens] or [self.tokenizer.end]
        if tokens == [-1]:
            raise ValueError("the prompt is empty, and this model has no token that ends a text before: give a prompt")
        unknown = next((token for token in tokens if not 0 <= token < self.tokenizer.vocabulary), None)
        if unknown is not None:
            raise ValueError(f"token {unknown} is unknown: tokens are from 0 to {self.tokenizer.vocabulary - 1}")
        if len(tokens) >= self.context:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but prompt and generated tokens together can be {self.context} "
                "at most: shorten it"
            )
        most = min(self.context, len(tokens) + sampling.max_tokens)
        needed, there = ceil_div(most - 1, self.page_size), self._num_pages
        if needed > there:
            raise ValueError(
                f"{len(tokens)} tokens of a prompt and max_tokens={sampling.max_tokens} need {needed} pages of "
                f"{self.page_size} tokens, but there are {there}: ask for less"
            )
        with self._lock:
            if self._stopping:
                raise RuntimeError("the batch is stopping and takes no more requests")
            number, self._next_id = self._next_id, self._next_id + 1
            request = Running(
                number, tokens, len(tokens), most, sampling, on_event, self.tokenizer, separator=self.separator
            )
            self._waiting.append(request)
            self._stats = self._new_stats()
            self._lock.notify_all()
        return number

    def cancel(self, request_id: int) -> None:
        """End a request, which gets an event "cancelled"; its pages are free before the next step. Unknown ids, as of
        those that have ended, are ignored.
        """
        with self._lock:
            self._cancelled.add(request_id)
            self._lock.notify_all()

    def stop(self, drain: bool = True) -> None:
        """Accept no more requests; end `run` when those that are there have ended, or cancel them now."""
        with self._lock:
            self._stopping, self._drains = True, drain
            self._lock.notify_all()

    def stats(self) -> Stats:
        """The state after the last step."""
        with self._lock:
            return self._stats

    def run(self) -> None:
        """Make steps while there is something to do, else sleep, up to `stop`. On the main thread of rank 0."""
        try:
            while self._admit():
                self._make_step()
        except BaseException as error:
            for request in [*self._running, *self._waiting]:
                request.on_event(request.ended("error", f"{type(error).__name__}: {error}"))
            raise
        self._tell(None)

    def follow(self) -> None:
        """Take part in the steps of rank 0 until it has stopped. On the main thread of all other ranks."""
        while (step := self._hear()) is not None:
            self._model.run(*step)

    def close(self) -> None:
        """Leave the model as it was, to be trained, or used by others."""
        self._model.close()

    def _new_stats(self) -> Stats:
        used, total = sum(self._pages_used), self._num_pages * len(self._pages_used)
        return Stats(len(self._waiting), len(self._running), used, total, self._steps)

    def _admit(self) -> bool:
        """Wait for something to do; let requests leave and join. Whether there is a step to make; else all is over."""
        while True:
            with self._lock:
                gone = self._leave()
                self._join()
                self._stats = self._new_stats()
                over = self._stopping and not self._running
                frees = self._ended and not self._running
                if not (gone or self._running or over or frees):
                    self._lock.wait()
            for request in gone:
                request.on_event(request.ended("cancelled"))
            if frees:
                self._run_model([])
            if self._running or over:
                return bool(self._running)

    def _leave(self) -> list[Running]:
        """Take those out that were cancelled, and give back their pages."""
        every = self._stopping and not self._drains
        gone = [r for r in [*self._running, *self._waiting] if every or r.id in self._cancelled]
        self._cancelled.clear()
        for request in gone:
            self._remove(request)
        return gone

    def _remove(self, request: Running) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._pages_used[request.row] -= request.num_pages
        self._ended.append(request.id)

    def _join(self) -> None:
        """Let those that wait join, in turn, as long as there is room; the first that does not fit keeps its turn."""
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting[0]
            row = self._pages_used.index(min(self._pages_used))
            needed = ceil_div(request.most - 1, self.page_size)
            if self._pages_used[row] + needed > self._num_pages:
                return
            self._pages_used[row] += needed
            request.row, request.num_pages = row, needed
            self._running.append(self._waiting.popleft())

    def _make_step(self) -> None:
        step = portions_of(self._running, self.prefill_chunk, len(self._pages_used))
        found = self._run_model([portion for _, portion in step])
        events: list[tuple[Running, Event]] = []
        wanting = [request for request, portion in step if portion.wants]
        for request, portion in step:
            request.num_cached += len(portion.tokens)
        if found is not None:
            # One by one: a sum over one row alone is divided among threads, and one over each of several is not.
            events = [(request, request.take(own.double())) for request, own in zip(wanting, found, strict=True)]
        with self._lock:
            for request, event in events:
                if event.finish_reason is not None:
                    self._remove(request)
            self._steps += 1
            self._stats = self._new_stats()
        for request, event in events:
            request.on_event(event)

    def _run_model(self, portions: Sequence[TokenPortion]) -> Tensor | None:
        """A step of all ranks, before which those that ended are forgotten; there may be no portions."""
        ended, self._ended = self._ended, []
        self._tell((portions, ended))
        return self._model.run(portions, ended)

    def _tell(self, step: tuple[Sequence[TokenPortion], Sequence[int]] | None) -> None:
        """Say to all other ranks what is in the step, and who has ended, or that the last step is over."""
        if self.comm.size > 1:
            said = torch.frombuffer(bytearray(pickle.dumps(step)), dtype=torch.uint8)
            self.comm.broadcast(torch.tensor([len(said)]))
            self.comm.broadcast(said)

    def _hear(self) -> tuple[list[TokenPortion], list[int]] | None:
        length = self.comm.broadcast(torch.empty(1, dtype=torch.int64))
        said = self.comm.broadcast(torch.empty(int(length), dtype=torch.uint8))
        return pickle.loads(said.numpy().tobytes())
