"""A corpus: documents, each a file of UTF-8 text, and the array on disk that they are encoded into once.

    tokens-<key>.npy    the tokens of all documents, each followed by one that ends it: (length,), uint16 or uint32
    tokens-<key>.json   of each document its name and its numbers of tokens and bytes; written last

Anyone may map any part of the array. The key is a hash of the tokenizer and of every document's name and content, so
the files of another corpus have other names, and processes that write the same ones at the same time write the same
bytes.
"""

import codecs
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpi4dl._files import Replacement, make_folder, naming, open_regular, read_regular
from mpi4dl.datasets.base import DatasetError, blaming
from mpi4dl.datasets.listed import files_below
from mpi4dl.datasets.split import split_patients
from mpi4dl.datasets.text.tokenizer import Tokenizer, Tokens
from mpi4dl.geometry import Interval

STDLIB = "stdlib"
TEXT_SUFFIXES = tuple(
    ".txt .text .md .rst .tex .html .xml .json .csv .toml .yaml "
    ".py .pyi .c .h .cc .cpp .hpp .cu .f90 .java .js .ts .go .rs .jl .sh".split()
)
RECORDS = (".jsonl", ".ndjson", ".parquet", ".arrow")  # of data sets of texts
NOT_OF_STDLIB = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))
PIECE_BYTES = 1 << 20


class Document(NamedTuple):
    """A file of the corpus; its name is its path from the folder on that was asked for, with slashes."""

    name: str
    path: Path


def find_documents(*sources: str | Path) -> tuple[Document, ...]:
    """The documents of these sources, in the order of the sources, each file once.

    A source is a file of any name, or a folder, of which every visible file at any depth counts that ends in one of
    `TEXT_SUFFIXES`, sorted by name. Links to folders are not followed. "stdlib" is the Python standard library: its own
    sources, without tests.

    Raises:
        DatasetError: a source does not exist, is a folder without text, or a file of records.
    """
    found: dict[Path, Document] = {}
    for source in sources:
        path = Path(source).expanduser()
        if source == STDLIB:
            documents = _inside(Path(sysconfig.get_path("stdlib")), (".py",), NOT_OF_STDLIB)
        elif path.is_dir():
            documents = _inside(path, TEXT_SUFFIXES, frozenset())
            if not documents:
                raise DatasetError(f"{path}: has no text; files count as text if they end in {' '.join(TEXT_SUFFIXES)}")
        elif not path.exists():
            raise DatasetError(f"{path}: no such file or folder; expected UTF-8 text, or {STDLIB!r}")
        elif path.suffix.lower() in RECORDS:
            raise DatasetError(
                f"{path}: holds records, whose braces and keys would be text too: write the text of each to a file of "
                "its own, which is a document, into one folder; or rename the file to train on it as it is"
            )
        else:
            documents = [Document(path.name, path)]
        for document in documents:
            found.setdefault(document.path.resolve(), document)
    if not found:
        raise DatasetError("no source of text is named: give files, folders or 'stdlib'")
    return tuple(found.values())


def _inside(root: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> list[Document]:
    files = filter(Path.is_file, files_below(root, suffixes, without))
    return sorted(Document(path.relative_to(root).as_posix(), path) for path in files)


def digest(document: Document) -> str:
    """A hash of the document's bytes, in hexadecimal digits. Raises DatasetError if the file cannot be read."""
    with blaming(document.path), open_regular(document.path) as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()  # type: ignore[arg-type]


def pieces(document: Document) -> Iterator[str]:
    """The text of a document in pieces of about a megabyte, cut after a line wherever there is one.

    Together they are the file's bytes exactly: new lines are not translated, and a byte order mark is kept. The same
    file is always cut at the same places, of which tokens that span lines depend.

    Raises:
        DatasetError: the file cannot be read, or is not UTF-8.
    """
    decoder, text, done = codecs.getincrementaldecoder("utf-8")(), "", 0
    with blaming(document.path), open_regular(document.path) as file:
        while True:
            chunk = file.read(PIECE_BYTES)
            begun = done - len(decoder.getstate()[0])  # where in the file lies what is decoded next
            try:
                text += decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise DatasetError(
                    f"{document.path}: is not UTF-8 text: byte {begun + error.start} cannot be decoded "
                    f"({error.reason}); convert the file, or leave it out"
                ) from error
            if not chunk:
                break
            done += len(chunk)
            end = text.rfind("\n") + 1 or len(text)
            if text:
                yield text[:end]
            text = text[end:]
    if text:
        yield text


FORMAT = 1


class Encoded(NamedTuple):
    """A document in a token file: `num_tokens` counts its end, `num_bytes` are those of its text."""

    name: str
    num_tokens: int
    num_bytes: int


class TokenFile:
    """The tokens of a corpus, of which `read` reads a part, and its `documents` in their order.

    Opened by its header's path, which says what `tokens-<key>.npy` must hold; of that only its size is looked at.

    Raises:
        DatasetError: one of the two files is missing or damaged.
    """

    def __init__(self, header: Path) -> None:
        self.path = header.with_suffix(".npy")
        try:
            said = json.loads(read_regular(header))
            self.vocabulary = int(said["vocabulary"])
            self.documents = tuple(Encoded(str(n), int(tokens), int(size)) for n, tokens, size in said["documents"])
            self.digest, dtype, known = str(said["digest"]), np.dtype(said["dtype"]), said["format"] == FORMAT
        except OSError as error:
            raise DatasetError(f"{header}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(header, f"is no header of tokens ({type(error).__name__}: {error})") from error
        if not known:
            raise _damaged(header, f"has another format than {FORMAT}")
        length = sum(document.num_tokens for document in self.documents)
        try:
            open_regular(self.path).close()
            self.tokens: npt.NDArray[Any] = np.load(self.path, mmap_mode="r")
        except FileNotFoundError as error:
            raise _damaged(self.path, "is missing") from error
        except (OSError, ValueError, EOFError) as error:
            raise _damaged(self.path, f"cannot be mapped ({error})") from error
        if self.tokens.shape != (length,) or self.tokens.dtype != dtype:
            raise _damaged(
                self.path,
                f"holds {self.tokens.shape} of {self.tokens.dtype}, but {header.name} says ({length},) {dtype}",
            )

    def read(self, interval: Interval) -> npt.NDArray[np.int64]:
        """The tokens of an interval of the file, and no others. Raises DatasetError for what cannot be tokens."""
        found = np.asarray(self.tokens[slice(*interval)], np.int64)
        if found.size and found.max() >= self.vocabulary:
            raise _damaged(self.path, f"holds token {found.max()} of a vocabulary of {self.vocabulary}")
        return found

    def is_intact(self) -> bool:
        """Whether every token is the one that was written; reads the whole file."""
        return hashlib.blake2b(self.tokens.data).hexdigest() == self.digest


def encode_corpus(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """The corpus in tokens, from token files in `folder` if they are there and intact, and else from its text.

    Reads the whole corpus to see that it is the same. Let one rank do so, and others open its file when it is there.

    Raises:
        DatasetError: a document cannot be read, is not UTF-8 or changes meanwhile.
        OSError: `folder` cannot be written.
    """
    digests = [digest(document) for document in documents]
    of_each = [(document.name, found) for document, found in zip(documents, digests, strict=True)]
    described = json.dumps([FORMAT, tokenizer.fingerprint, of_each]).encode()
    header = folder / f"tokens-{hashlib.blake2b(described, digest_size=16).hexdigest()}.json"
    with suppress(DatasetError):  # there is none yet, or it is damaged
        known = TokenFile(header)
        if known.is_intact():
            return known
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    encoded, written = [], hashlib.blake2b()
    make_folder(folder)
    array = header.with_suffix(".npy")
    with naming(array), Replacement(array, shared=True) as temporary, temporary.open("x+b") as file:
        _write_array_header(file, dtype, 0)
        begin = file.tell()
        for document, expected in zip(documents, digests, strict=True):
            num_tokens, num_bytes, seen = 0, 0, hashlib.blake2b()
            for piece in pieces(document):
                raw = piece.encode()
                seen.update(raw)
                num_bytes += len(raw)
                tokens = tokenizer.encode(piece).astype(dtype).tobytes()
                num_tokens += len(tokens) // dtype.itemsize
                written.update(tokens)
                file.write(tokens)
            if seen.hexdigest() != expected:
                raise DatasetError(f"{document.path}: has changed while it was read: start again when it is complete")
            end = np.array([tokenizer.end], dtype).tobytes()
            written.update(end)
            file.write(end)
            encoded.append(Encoded(document.name, num_tokens + 1, num_bytes))
        file.seek(0)
        _write_array_header(file, dtype, sum(document.num_tokens for document in encoded))
        assert file.tell() == begin, "the header of an .npy file has grown over its first tokens"
    said = {
        "format": FORMAT,
        "vocabulary": tokenizer.vocabulary,
        "dtype": dtype.str,
        "digest": written.hexdigest(),
        "documents": encoded,
    }
    with naming(header), Replacement(header, shared=True) as temporary:
        temporary.write_text(json.dumps(said))
    return TokenFile(header)


def _write_array_header(file: Any, dtype: np.dtype[Any], length: int) -> None:
    """The first bytes of an .npy file, which numpy makes long enough for any length to take the place of another."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)


def _damaged(path: Path, what: str) -> DatasetError:
    return DatasetError(f"{path}: {what}: the file is damaged; remove it, and let the corpus be encoded anew")


# The tokens of some documents, one after the other, and which documents train and which validate.


class TokenStream:
    """The tokens of the documents `chosen` of a token file (None: all), each with the token that ends it.

    Attributes:
        names: those of the documents; sizes: the bytes of the text of each.
        num_tokens: how many tokens they have, their ends included.
        num_bytes: how many bytes of text they are.
        vocabulary: the number of different tokens.
        digest: differs where tokens of the file do.
    """

    def __init__(self, file: TokenFile, chosen: Sequence[int] | None = None) -> None:
        numbers = range(len(file.documents)) if chosen is None else chosen
        ends = np.cumsum([document.num_tokens for document in file.documents], dtype=np.int64)
        lengths = np.array([file.documents[number].num_tokens for number in numbers], np.int64)
        self._file = file
        self._ends: npt.NDArray[np.int64] = np.cumsum(lengths)  # in this stream
        # The offset from a place in the stream to that in the file.
        self._shifts: npt.NDArray[np.int64] = ends[list(numbers)] - self._ends
        self.sizes = {file.documents[number].name: file.documents[number].num_bytes for number in numbers}
        self.names = tuple(self.sizes)
        self.num_tokens = int(lengths.sum())
        self.num_bytes = sum(self.sizes.values())
        self.vocabulary, self.digest = file.vocabulary, file.digest

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


def split_documents(
    file: TokenFile, fraction: float, seed: int = 0, known: Mapping[str, bool] | None = None
) -> tuple[TokenStream, TokenStream]:
    """Documents for training and validation: `fraction` of them validate, by a hash of `seed` and their names.

    All of a document is in one part. `known` says of documents by name whether they validated before; they stay there.

    Raises:
        DatasetError: a fraction outside (0, 1), or fewer than two documents.
    """
    names = [document.name for document in file.documents]
    aside = split_patients(names, [0] * len(names), fraction, seed, known, noun="documents")
    training, validation = ([i for i, held in enumerate(aside) if held is part] for part in (False, True))
    return TokenStream(file, training), TokenStream(file, validation)
