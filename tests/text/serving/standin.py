"""A batch without a model, for tests of the server: each prompt has text of its own, and tests make the time pass."""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.text.batcher import Batcher, Event, Stats, Usage
from mpi4dl.text.options import Sampling

SILENT = "~"  # the prompt whose tokens have no text
LETTERS = range(ord("a"), ord("z") + 1)


def text_after(prompt: Sequence[int], num_tokens: int) -> str:
    """What the stand-in always writes after a prompt."""
    start = sum((place + 1) * token for place, token in enumerate(prompt))
    return "".join(chr(LETTERS[(start + 7 * i) % len(LETTERS)]) for i in range(num_tokens))


@dataclass
class _Running:
    number: int
    prompt: Sequence[int]
    sampling: Sampling
    hear: Callable[[Event], None]
    tokens: int = 0
    cancelled: bool = False


class StandIn:
    """Has the face of a Batcher. While it is `held`, requests stay as they are; `steps` lets some steps through."""

    def __init__(self, context: int, max_batch: int) -> None:
        self.context, self.max_batch, self.tokenizer = context, max_batch, ByteTokenizer()
        self.submitted: list[Sampling] = []
        self._lock = threading.Condition()
        self._numbers = itertools.count()
        self._requests: dict[int, _Running] = {}
        self._credit: float = float("inf")
        self._stopped = False

    def as_batcher(self) -> Batcher:
        return cast(Batcher, cast(Any, self))

    def hold(self) -> None:
        with self._lock:
            self._credit = 0

    def step(self, times: float = float("inf")) -> None:
        with self._lock:
            self._credit += times
            self._lock.notify_all()

    def submit(self, prompt_tokens: Sequence[int], sampling: Sampling, on_event: Callable[[Event], None]) -> int:
        with self._lock:
            if max(prompt_tokens) > 256:
                raise ValueError(f"token {max(prompt_tokens)} is unknown: tokens are 0 to 256")
            request = _Running(next(self._numbers), prompt_tokens, sampling, on_event)
            self._requests[request.number] = request
            self.submitted.append(sampling)
            self._lock.notify_all()
            return request.number

    def cancel(self, request_id: int) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].cancelled = True
                self._lock.notify_all()

    def run(self) -> None:
        with self._lock:
            while not self._stopped:
                self._lock.wait_for(lambda: self._stopped or self._can_go_on())
                if not self._stopped:
                    self._step()

    def _can_go_on(self) -> bool:
        return any(each.cancelled or self._credit for each in self._requests.values())

    def _step(self) -> None:
        going, self._credit = bool(self._credit), max(0, self._credit - 1)
        for each in list(self._requests.values())[: self.max_batch]:
            if going and not each.cancelled:
                each.tokens += 1
                letter = text_after(each.prompt, each.tokens)[-1]
                over = each.tokens == each.sampling.max_tokens
                usage = Usage(len(each.prompt), each.tokens) if over else None
                text = "" if list(each.prompt) == [ord(SILENT)] else letter
                each.hear(Event(each.number, ord(letter), text, "length" if over else None, -1.0, usage))
                if over:
                    del self._requests[each.number]
        for each in [each for each in self._requests.values() if each.cancelled]:
            del self._requests[each.number]
            each.hear(Event(each.number, None, "", "cancelled", usage=Usage(len(each.prompt), each.tokens)))

    def stop(self, drain: bool = True) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def stats(self) -> Stats:
        with self._lock:
            running = min(len(self._requests), self.max_batch)
            return Stats(len(self._requests) - running, running, running, self.max_batch)
