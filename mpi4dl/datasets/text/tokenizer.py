"""Tokenizers: what one answers, bytes as tokens, and byte-level BPE."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpi4dl._files import read_regular, write_durably
from mpi4dl.datasets.base import DatasetError, package

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
    def ends(self) -> frozenset[int]:
        """The tokens behind which a model has no more to say."""

    @property
    def has_chats(self) -> bool:
        """Whether the model that it is of was trained on chats in a form of its own."""

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
    ends = frozenset((256,))
    has_chats = False
    fingerprint = "bytes"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: npt.ArrayLike) -> str:
        found = np.asarray(tokens, np.int64)
        return found[found < self.end].astype(np.uint8).tobytes().decode(errors="replace")


# Byte-level BPE: frequent runs of bytes are tokens. Trained on a corpus, and kept in one JSON file.
#
# Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", https://arxiv.org/abs/1508.07909,
# on bytes, as in GPT-2. The work is done by the package `tokenizers`.

SMALLEST = 257  # every byte, and the end of a document
MIN_FREQUENCY = 2


class BPETokenizer:
    """Runs of bytes as tokens, from 0 on; the last token ends a document.

    Text that looks like a special token is encoded as any other. `inner` is a `tokenizers.Tokenizer`.
    """

    def __init__(self, inner: Any) -> None:
        inner.encode_special_tokens = True  # as what they are spelled
        self._inner = inner
        self.end: int = max(inner.get_vocab().values()) + 1
        self.vocabulary, self.ends, self.has_chats = self.end + 1, frozenset((self.end,)), False
        self.fingerprint = hashlib.blake2b(inner.to_str().encode(), digest_size=16).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "BPETokenizer":
        """Learn merges from texts; the same texts in the same order always give the same tokenizer.

        It has fewer than `vocabulary` tokens if the texts have not that many runs of bytes that occur twice.

        Raises:
            DatasetError: fewer than 257 tokens are asked for, or the package `tokenizers` is missing.
        """
        tokenizers = package("tokenizers", "`tokenizer` bpe")
        if vocabulary < SMALLEST:
            raise DatasetError(
                f"vocabulary={vocabulary}: BPE needs at least {SMALLEST} tokens, 256 bytes and the end of a document"
            )
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary - 1, min_frequency=MIN_FREQUENCY, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: Path) -> "BPETokenizer":
        """The tokenizer in a JSON file, written by `save` or by the package `tokenizers`.

        Raises:
            DatasetError: the file cannot be read or holds no tokenizer, or the package `tokenizers` is missing.
        """
        return cls(_inner_at(path, "train one anew"))

    def save(self, path: Path) -> None:
        """Write the tokenizer to one JSON file, whole or not at all. Raises OSError."""
        write_durably(path, self._inner.to_str(pretty=True).encode())

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: npt.ArrayLike) -> str:
        found = np.asarray(tokens, np.int64)
        return self._inner.decode(found[found < self.end].tolist(), skip_special_tokens=False)


class PretrainedTokenizer:
    """The tokenizer of a model of transformers, whose `vocabulary` and `ends` are those of the model.

    `end` is the first of these, -1 without any. `has_chats`: whether the model has a form of chats of its own.

    The tokens that it puts around a text, such as a first one, are among those of the text. Raises as
    `BPETokenizer.load`.
    """

    def __init__(self, path: Path, vocabulary: int, ends: Sequence[int], has_chats: bool = False) -> None:
        if not path.is_file():
            raise DatasetError(
                f"{path} is missing: write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of "
                "transformers"
            )
        self._inner, self.vocabulary, self.has_chats = _inner_at(path, "save it anew"), vocabulary, has_chats
        self.end, self.ends = (*ends, -1)[0], frozenset(ends)
        self._inner.no_truncation()
        self._inner.no_padding()
        self.fingerprint = hashlib.blake2b(self._inner.to_str().encode(), digest_size=16).hexdigest()
        # Some decoders leave out a space at the beginning of a text: so there is always a beginning before it.
        self._before = self._inner.encode("a", add_special_tokens=False).ids
        self._length = len(self._inner.decode(self._before))

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self._inner.encode(text).ids, np.int64)

    def decode(self, tokens: npt.ArrayLike) -> str:
        found = np.asarray(tokens, np.int64).tolist()
        text: str = self._inner.decode([*self._before, *found], skip_special_tokens=True)
        return text[self._length :]


def _inner_at(path: Path, remedy: str) -> Any:
    """The `tokenizers.Tokenizer` of a JSON file. Raises DatasetError."""
    tokenizers = package("tokenizers", "`tokenizer` bpe")
    try:
        return tokenizers.Tokenizer.from_str(read_regular(path).decode())
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the package has no class of errors of its own
        raise DatasetError(f"{path}: holds no tokenizer ({error}): {remedy}") from error
