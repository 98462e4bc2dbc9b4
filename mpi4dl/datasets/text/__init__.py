"""Text of which every rank reads its own tokens: find documents, encode them once, split them, cut samples.

documents = find_documents("stdlib")
file = encode_corpus(documents, ByteTokenizer(), Path("tokens"))
training, validation = split_documents(file, 0.1)
sample = TokenDataset(training, context=256).read(0, Interval(0, 128))
"""

from mpi4dl.datasets.text.corpus import (
    Document,
    TokenFile,
    TokenStream,
    encode_corpus,
    find_documents,
    pieces,
    split_documents,
)
from mpi4dl.datasets.text.dataset import MaskedTokenDataset, TokenDataset, TokenSample, bits_per_byte
from mpi4dl.datasets.text.tokenizer import BPETokenizer, ByteTokenizer, PretrainedTokenizer, Tokenizer

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Document",
    "MaskedTokenDataset",
    "PretrainedTokenizer",
    "TokenDataset",
    "TokenFile",
    "TokenSample",
    "TokenStream",
    "Tokenizer",
    "bits_per_byte",
    "encode_corpus",
    "find_documents",
    "pieces",
    "split_documents",
]
