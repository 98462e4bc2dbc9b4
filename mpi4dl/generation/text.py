"""Text from tokens as they come: only what is certain, up to the first stop string.

tokens    "na"  "\\xc3"  "\\xaf"  "ve"  "\\n"  "\\n"           stop: "\\n\\n"
text      "na"  ""      "ï"     "ve"  ""    (ends; "\\n\\n" is not part of it)
"""

from collections.abc import Sequence

from mpi4dl.datasets.text import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes a part of a character


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
        """What was held back, as it is: no more tokens come."""
        return self._take(self._tokenizer.decode(self._undecoded), last=True)

    def _take(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        whole = last or not text.endswith(UNFINISHED)
        until = len(text) if whole else len(text) - 1
        self._held += text[self._shown : until]
        self._shown = until
        if whole:
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
