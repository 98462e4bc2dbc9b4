"""Samples of equal length cut from a stream of tokens: to predict the next one, or those that are masked."""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np
import torch

from mpi4dl.datasets.base import IGNORED, DatasetError
from mpi4dl.datasets.text.corpus import TokenStream
from mpi4dl.datasets.text.tokenizer import Tokens
from mpi4dl.datasets.transformed import Batch
from mpi4dl.geometry import Box, Interval

MASKED_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
# Beside the streams of datasets.augment: keeps random numbers apart where their seeds are equal.
MASKING_STREAM = 3


class TokenSample(NamedTuple):
    """An interval of a sample: three arrays (length,), int64.

    `documents` number the documents of the sample from 0 on, by its first token, wherever the interval begins.
    """

    tokens: Tokens
    targets: Tokens
    documents: Tokens


class TokenDataset:
    """Samples of `context` tokens, whose targets are the next tokens.

    Sample i has the tokens i * context to (i + 1) * context of the stream, and its targets are one further on. So every
    token of the stream is a target once, but the first one and what is left over at its end. The target of a document's
    last token, its end, is the first token of the next document: to be predicted from nothing that it belongs to.

    Raises:
        DatasetError: the stream is too short for one sample.
    """

    _beyond = 1  # tokens that are read behind those of a sample

    def __init__(self, stream: TokenStream, context: int) -> None:
        self.stream, self.context, self.vocabulary = stream, context, stream.vocabulary
        if context < 1:
            raise DatasetError(f"context={context}: a sample needs at least one token")
        if stream.num_tokens < context + self._beyond:
            raise DatasetError(
                f"{stream.num_tokens} tokens in {len(stream.names)} documents do not make one sample of "
                f"context={context}: needs {context + self._beyond}; choose a shorter context, or add text"
            )
        self._length = (stream.num_tokens - self._beyond) // context

    def __len__(self) -> int:
        return self._length

    def read(self, index: int, interval: Interval | None = None, epoch: int = 0) -> TokenSample:
        """An interval of the positions of sample `index`, or all of them, the same in every epoch.

        Its tokens are read and one more, no others.

        Raises:
            IndexError: there is no such sample, or no such interval in it.
            DatasetError: the token file is damaged.
        """
        tokens, documents, _ = self._window(index, interval)
        return TokenSample(tokens[:-1], tokens[1:], documents)

    def _window(self, index: int, interval: Interval | None) -> tuple[Tokens, Tokens, Interval]:
        """The tokens of an interval of a sample, and those behind it that are read; its documents; and the interval."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        whole = Interval(0, self.context)
        asked = whole if interval is None else interval
        if not whole.covers(asked):
            raise IndexError(f"positions {asked.start} to {asked.stop} of a sample of {self.context}")
        if asked.empty:
            return np.empty(self._beyond, np.int64), np.empty(0, np.int64), asked
        first = index * self.context
        places = asked.shift(first)
        documents = self.stream.documents(places) - self.stream.document_at(first)
        return self.stream.read(places.grow(0, self._beyond)), documents, asked


class MaskedTokenDataset(TokenDataset):
    """Samples of `context` tokens of which some are masked, and are the targets; elsewhere these are -100.

    15 % of each sample's positions are chosen, rounded and at least one, so that all samples have as many targets. Of
    these each becomes, by chance, the mask token (80 %), any other token of the stream's vocabulary (10 %: any alike,
    so rarely the same), or stays (10 %). The mask is one more token, the last of this dataset's `vocabulary`. The
    choice follows from (seed, epoch, index), for every interval.

    Devlin et al. 2018, "BERT", section 3.1, https://arxiv.org/abs/1810.04805.

    Raises:
        DatasetError: the stream is too short for one sample.
    """

    _beyond = 0

    def __init__(self, stream: TokenStream, context: int, seed: int = 0) -> None:
        super().__init__(stream, context)
        self.seed, self.mask, self.vocabulary = seed, stream.vocabulary, stream.vocabulary + 1

    def read(self, index: int, interval: Interval | None = None, epoch: int = 0) -> TokenSample:
        """As `TokenDataset.read`, but no other tokens are read."""
        tokens, documents, asked = self._window(index, interval)
        # All is drawn for the whole sample, and alike whatever is chosen.
        random = np.random.default_rng((MASKING_STREAM, self.seed, epoch, index))
        chosen = np.zeros(self.context, np.bool_)
        chosen[random.permutation(self.context)[: max(1, round(MASKED_SHARE * self.context))]] = True
        luck, others = random.random(self.context), random.integers(self.mask, size=self.context)
        shown = np.where(luck < MASK_SHARE, self.mask, others)
        changed = chosen & (luck < MASK_SHARE + RANDOM_SHARE)
        part = slice(*asked)
        return TokenSample(
            np.where(changed[part], shown[part], tokens), np.where(chosen[part], tokens, IGNORED), documents
        )


# Batches of token samples, of which a rank reads its own intervals.


class TokenBatches:
    """The samples of a dataset as batches: tokens (samples, length) and targets (samples, context), int64."""

    noun = "samples of text"

    def __init__(self, dataset: TokenDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(
        self, indices: tuple[int, ...], epoch: int, boxes: Sequence[Box], repeats: tuple[int, ...] | None = None
    ) -> Batch:
        """These boxes of samples and tokens, and all targets; a repeat is no other.

        Raises DatasetError if the token file is damaged.
        """
        tiles = []
        for box in boxes:
            tile = np.empty(box.shape, np.int64)
            for row, index in zip(tile, indices[slice(*box.batch)], strict=True):
                row[:] = self._dataset.read(index, box.space[0], epoch).tokens
            tiles.append(torch.from_numpy(tile))
        targets = [self._dataset.read(index, None, epoch).targets for index in indices]
        return Batch(tuple(tiles), torch.from_numpy(np.stack(targets)), indices, {})


# Turns a loss in nats per token into bits per byte, by which models with different tokenizers are compared.


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """nats_per_token * num_tokens / (num_bytes * ln 2), the size to which the model would compress a byte of text.

    Args:
        nats_per_token: the mean cross-entropy, in its natural logarithm.
        num_tokens: the tokens of a text, ends of documents included, such as a `TokenStream` counts them.
        num_bytes: the bytes of the same text in UTF-8.

    Raises:
        ValueError: a text without bytes.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes={num_bytes}: bits per byte need a text of at least one byte")
    return nats_per_token * num_tokens / (num_bytes * log(2))
