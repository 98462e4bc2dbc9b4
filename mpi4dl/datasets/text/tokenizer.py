"""What a tokenizer answers, and the simplest one: every byte is a token."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Turns text into tokens from 0 to `vocabulary` - 1, and back without loss."""

    @property
    def vocabulary(self) -> int:
        """The number of different tokens, that of the end of a document included."""

    @property
    def end(self) -> int:
        """The token that ends a document. No text is encoded as it."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that encode every text alike."""

    def encode(self, text: str) -> npt.NDArray[Any]:
        """The tokens of a text, (length,), of an integer type; the end of the document is not among them."""

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text of these tokens. Ends of documents say nothing, and parts of characters become U+FFFD."""


class ByteTokenizer:
    """The bytes of UTF-8 are tokens 0 to 255, and token 256 ends a document."""

    vocabulary = 257
    end = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: npt.ArrayLike) -> str:
        found = np.asarray(tokens, np.int64)
        return found[found < self.end].astype(np.uint8).tobytes().decode(errors="replace")
