"""One request while it is worked on: which tokens are next, and what is told of each that comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from mpi4dl.datasets.text import Tokenizer
from mpi4dl.generation.packing import TokenPortion
from mpi4dl.generation.requests import Event, FinishReason, Sampling, Usage
from mpi4dl.generation.sampling import Chooser
from mpi4dl.generation.text import TextStream

OnEvent = Callable[[Event], None]


@dataclass
class Running:
    """A request: `tokens` are its prompt and what was generated, `num_cached` of them were given to the model.

    `most` is how many tokens it may come to have. While it runs it has `pages` of data rank `row`.
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
    pages: tuple[int, ...] = ()
    num_cached: int = 0
    chooser: Chooser = field(init=False)
    text: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.sampling, self.tokens)
        self.text = TextStream(self.tokenizer, self.sampling.stop)
        # A separator ends a document, and what follows sees nothing of it.
        ends = (i + 1 if token == self.separator else 0 for i, token in enumerate(self.tokens))
        self._seen_from = list(accumulate(ends, max, initial=0))[: self.num_prompt + 1]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def prefilling(self) -> bool:
        return self.num_cached < self.num_prompt

    def next_portion(self, chunk: int) -> TokenPortion:
        """What the model is to be given next: at most `chunk` tokens, of a prompt always the same ones."""
        start = self.num_cached
        tokens = tuple(self.tokens[start : start + chunk])
        stop = start + len(tokens)
        seen_from = tuple(self._seen_from[min(at, self.num_prompt)] for at in range(start, stop))
        return TokenPortion(
            self.row, start, tokens, self.pages, stop == len(self.tokens), seen_from if any(seen_from) else ()
        )

    def take(self, logits: Tensor, norm: float) -> Event:
        """Choose a token by logits, float64, the logarithm of the sum of whose exponentials is `norm`."""
        token = self.chooser.choose(logits)
        self.tokens.append(token)
        reason: FinishReason | None = None
        text = self.text.add(token)
        if self.text.stopped or token == self.tokenizer.end:
            reason = "stop"
        elif len(self.tokens) == self.most:
            reason = "length"
        if reason is not None:
            text += self.text.end()
        return Event(self.id, token, text, reason, float(logits[token]) - norm, self.usage if reason else None)

    def ended(self, reason: FinishReason, message: str = "") -> Event:
        """The event of an end that comes from outside."""
        return Event(self.id, None, self.text.end(), reason, usage=self.usage, message=message)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_generated)


def portions_of(running: Sequence[Running], chunk: int, num_rows: int) -> list[tuple[Running, TokenPortion]]:
    """What of each request is in the next step: one token of those that generate, and the next parts of prompts.

    Parts are of `chunk` tokens but the last one of a prompt, wherever others are, so that a prompt is always computed
    in the same parts. Of each data rank there is one, or several that have `chunk` tokens together.
    """
    found, room = [], [chunk] * num_rows
    for request in running:
        portion = request.next_portion(chunk)
        if request.prefilling:
            if len(portion.tokens) > room[request.row]:
                continue
            room[request.row] -= len(portion.tokens)
        found.append((request, portion))
    return found
