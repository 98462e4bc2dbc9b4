"""The tokens of some documents, one after the other, and which documents train and which validate."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.split import set_aside
from mpi4dl.datasets.text.token_file import TokenFile
from mpi4dl.datasets.text.tokenizer import Tokens
from mpi4dl.geometry import Interval


class TokenStream:
    """The tokens of the documents `chosen` of a token file (None: all), each with the token that ends it.

    Attributes:
        names: those of the documents.
        num_tokens: how many tokens they have, their ends included.
        num_bytes: how many bytes of text they are.
        vocabulary: the number of different tokens.
    """

    def __init__(self, file: TokenFile, chosen: Sequence[int] | None = None) -> None:
        numbers = range(len(file.documents)) if chosen is None else chosen
        ends = np.cumsum([document.num_tokens for document in file.documents], dtype=np.int64)
        lengths = np.array([file.documents[number].num_tokens for number in numbers], np.int64)
        self._file = file
        self._ends: npt.NDArray[np.int64] = np.cumsum(lengths)  # in this stream
        # What is added to a place in the stream to get that in the file.
        self._shifts: npt.NDArray[np.int64] = ends[list(numbers)] - self._ends
        self.names = tuple(file.documents[number].name for number in numbers)
        self.num_tokens = int(lengths.sum())
        self.num_bytes = sum(file.documents[number].num_bytes for number in numbers)
        self.vocabulary = file.vocabulary

    def read(self, interval: Interval) -> Tokens:
        """The tokens of an interval of the stream; no others are read. Raises DatasetError if the file is damaged."""
        parts, start = [], interval.start
        for document in range(
            self.document_at(start), 0 if interval.empty else self.document_at(interval.stop - 1) + 1
        ):
            stop = min(interval.stop, int(self._ends[document]))
            parts.append(self._file.read(Interval(start, stop).shift(int(self._shifts[document]))))
            start = stop
        return np.concatenate([np.empty(0, np.int64), *parts])

    def document_at(self, place: int) -> int:
        """The number of the document that a token of the stream belongs to; its end still does."""
        return int(np.searchsorted(self._ends, place, side="right"))

    def documents(self, interval: Interval) -> Tokens:
        """The number of each token's document."""
        return np.searchsorted(self._ends, np.arange(*interval), side="right").astype(np.int64)


def split_documents(file: TokenFile, fraction: float, seed: int = 0) -> tuple[TokenStream, TokenStream]:
    """What trains and what validates: of the documents about `fraction`, by a hash of `seed` and their names.

    A new document moves no other, and all of a document is in one part.

    Raises:
        DatasetError: a fraction outside (0, 1), or one that leaves no document to train on or to validate with.
    """
    names = [document.name for document in file.documents]
    aside = set_aside(names, fraction, seed, kind="documents", otherwise="add documents")
    training, validation = ([i for i, held in enumerate(aside) if held is part] for part in (False, True))
    return TokenStream(file, training), TokenStream(file, validation)
