"""Byte-level BPE: frequent runs of bytes are tokens. Trained on a corpus, and kept in one JSON file.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", https://arxiv.org/abs/1508.07909,
on bytes, as in GPT-2. The work is done by the package `tokenizers`.
"""

import hashlib
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl._wording import to_install
from mpi4dl.datasets.base import DatasetError
from mpi4dl.datasets.text.replacing import replacing

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
        self.vocabulary = self.end + 1
        self.fingerprint = hashlib.blake2b(inner.to_str().encode(), digest_size=16).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "BPETokenizer":
        """Learn merges from texts; the same texts in the same order always give the same tokenizer.

        It has fewer than `vocabulary` tokens if the texts have not that many runs of bytes that occur twice.

        Raises:
            DatasetError: fewer than 257 tokens are asked for, or the package `tokenizers` is missing.
        """
        package = _package()
        if vocabulary < SMALLEST:
            raise DatasetError(
                f"vocabulary={vocabulary}: BPE needs at least {SMALLEST} tokens, 256 bytes and the end of a document"
            )
        inner = package.Tokenizer(package.models.BPE())
        inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = package.decoders.ByteLevel()
        alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
        trainer = package.trainers.BpeTrainer(
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
        package = _package()
        try:
            return cls(package.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # the package has no class of errors of its own
            raise DatasetError(f"{path}: holds no tokenizer ({error}): train one anew") from error

    def save(self, path: Path) -> None:
        """Write the tokenizer to one JSON file, whole or not at all. Raises DatasetError if it cannot be written."""
        with replacing(path) as file:
            file.write(self._inner.to_str(pretty=True).encode())

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: npt.ArrayLike) -> str:
        found = np.asarray(tokens, np.int64)
        text: str = self._inner.decode(found[found < self.end].tolist(), skip_special_tokens=False)
        return text


def _package() -> ModuleType:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        message = f"BPE needs the package tokenizers; run {to_install('tokenizers')}, or use `tokenizer` bytes"
        raise DatasetError(message) from None
